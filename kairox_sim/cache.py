"""NeuronCache: which neuron sits in which slot. The simulator and the executor hold the same one.

It decides nothing (the policy does) and times nothing (the driver does). Called from one thread.
Per layer-step: plan -> (driver copies) -> commit what landed -> lookup; end_step after the last
layer. With trigger = after the order is commit, lookup, plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kairox_sim.controllers import Controller, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned, Split, StepEnded, Swap
from kairox_sim.idsets import Marks, share_of, sorted_ids
from kairox_sim.policies.base import (
    ABSENT,
    ARRIVING,
    NOTHING,
    PINNED,
    RESIDENT,
    Ids,
    Observes,
    Policy,
    Trigger,
)
from kairox_sim.record import LayerWaits, StepCounts, StepRecord

__all__ = ["NeuronCache", "Split", "Swap"]

UNLIMITED = 2**31 - 1


class NeuronCache:
    """Slots, residency and in-flight copies of every layer.

    slots: per layer or one number for all; pinned neurons take slots too. More slots than neurons
    leaves the rest unused. `warm` neurons start resident (not loads); `pinned` stay for the run.
    `trigger` (default: the policy's) says whether plans come before their lookup or after it; it
    decides what "resident before" means and whether a plan was a prediction. `journal` is told
    every call and its outcome, for the call log.
    """

    def __init__(
        self,
        n_layers: int,
        n_neurons: int,
        slots: int | Sequence[int],
        policy: Policy,
        controller: Controller,
        *,
        pinned: Sequence[ArrayLike] | None = None,
        warm: Sequence[ArrayLike] | None = None,
        swap_neurons: int = 16,
        observes: Observes | None = None,
        trigger: Trigger | None = None,
        journal: Callable[[Event], None] | None = None,
    ) -> None:
        if n_layers < 1 or n_neurons < 1 or swap_neurons < 1:
            raise KairoxError(
                f"n_layers, n_neurons and swap_neurons must be 1 or more, got {n_layers}, "
                f"{n_neurons}, {swap_neurons}"
            )
        given = [slots] * n_layers if isinstance(slots, int) else [int(s) for s in slots]
        if len(given) != n_layers or min(given) < 0:
            raise KairoxError(f"slots must be {n_layers} numbers of 0 or more, got {given}")
        for what, per_layer in (("pinned", pinned), ("warm", warm)):
            if per_layer is not None and len(per_layer) != n_layers:
                raise KairoxError(
                    f"{what} must be one list of ids per layer ({n_layers}), got {len(per_layer)}"
                )
        if controller.sets and not controller.sets & policy.knobs:
            raise KairoxError(
                f"{type(controller).__name__} sets {sorted(controller.sets)} and "
                f"{type(policy).__name__} reads {sorted(policy.knobs) or 'nothing'}: "
                "they have nothing in common; use the fixed controller or another policy"
            )
        self.n_layers, self.n_neurons = n_layers, n_neurons
        self.policy, self.controller = policy, controller
        self.swap_neurons = swap_neurons
        self.observes: Observes = observes or policy.default_observes
        self.plans_after = (trigger or policy.default_trigger) == "after"
        self.journal = journal
        self.capacity = [min(s, n_neurons) for s in given]  # usable slots per layer

        self.state = np.zeros((n_layers, n_neurons), np.uint8)  # [n_layers, n_neurons]
        self.slot_of = np.full((n_layers, n_neurons), -1, np.int32)  # [n_layers, n_neurons]
        self._unused = np.zeros((n_layers, n_neurons), bool)  # loaded and resident, never yet used
        self._free: list[NDArray[np.int32]] = []  # per layer, a stack; the last one goes first
        self._marks = Marks(n_neurons)
        self._before: list[NDArray[np.uint8] | None] = [None] * n_layers  # state before the plan
        self._predicted: list[Ids | None] = [None] * n_layers
        self._fresh: dict[int, list[Ids]] = {}  # layer -> committed since the last lookup
        self.in_flight: dict[int, Swap] = {}  # by swap id, in issue order
        self._next_id = 0
        self.totals = {"loads": 0, "used": 0, "wasted": 0, "cancelled": 0}
        self._reset_counts()
        for layer in range(n_layers):
            self._fill(layer, pinned, warm)
        controller.start([-(-c // swap_neurons) for c in self.capacity])

    def _fill(
        self, layer: int, pinned: Sequence[ArrayLike] | None, warm: Sequence[ArrayLike] | None
    ) -> None:
        fixed = sorted_ids(pinned[layer], self.n_neurons) if pinned is not None else NOTHING
        first = sorted_ids(warm[layer], self.n_neurons) if warm is not None else NOTHING
        first = np.setdiff1d(first, fixed).astype(np.int32)
        taken = np.concatenate([fixed, first])
        if taken.size > self.capacity[layer]:
            raise KairoxError(
                f"layer {layer}: {fixed.size} pinned and {first.size} warm neurons do not fit in "
                f"{self.capacity[layer]} slots; give more slots or fewer neurons"
            )
        self.state[layer, fixed] = PINNED
        self.state[layer, first] = RESIDENT
        self.slot_of[layer, taken] = np.arange(taken.size, dtype=np.int32)
        # Highest slot at the bottom, so that slots are handed out from the lowest up.
        self._free.append(np.arange(self.capacity[layer] - 1, taken.size - 1, -1, dtype=np.int32))

    # -- the four calls of a layer-step ---------------------------------------------------------

    def plan(self, layer: int, predicted: ArrayLike, share: ArrayLike | None = None) -> list[Swap]:
        """Ask the policy; evict now, reserve slots, and return the copies to start, in order."""
        seen = sorted_ids(predicted, self.n_neurons)
        share = share_of(seen, predicted, share)
        state = self.state[layer]
        if not self.plans_after:
            self._predicted[layer] = seen
            if self._before[layer] is None:
                self._before[layer] = state.copy()
        if self.observes == "predicted":
            self.policy.observe(layer, seen, share)
        knobs = self.controller.knobs.at(layer)
        assert not isinstance(knobs.max_swaps, tuple)
        limit = UNLIMITED if knobs.max_swaps is None else knobs.max_swaps * self.swap_neurons
        promote, evict = self.policy.plan(
            layer, seen, _read_only(state), self._free[layer].size, limit, knobs
        )
        self._require_legal(layer, seen, promote, evict, limit)
        swaps = self._apply(layer, promote, evict)
        self._tell(Planned(layer, seen, share, tuple(swaps), evict))
        return swaps

    def commit(self, swap_ids: Iterable[int]) -> None:
        """These swaps have landed; the driver polls once, just before each lookup."""
        ids = tuple(swap_ids)
        swaps: dict[int, Swap] = {}
        for swap_id in ids:
            swap = self.in_flight.get(swap_id)
            if swap is None or swap_id in swaps:
                raise KairoxError(f"swap {swap_id} landed, but is not in flight")
            swaps[swap_id] = swap
        landed: dict[int, list[Ids]] = {}  # by layer: one write for all its swaps
        for swap_id, swap in swaps.items():
            del self.in_flight[swap_id]
            landed.setdefault(swap.layer, []).append(swap.promote)
        for layer, parts in landed.items():
            promoted = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self.state[layer][promoted] = RESIDENT
            self._unused[layer][promoted] = True
            self._fresh.setdefault(layer, []).append(promoted)
        self._tell(Committed(ids))

    def lookup(
        self,
        layer: int,
        evaluated: ArrayLike,
        active: ArrayLike | None = None,
        share: ArrayLike | None = None,
    ) -> Split:
        """Freeze this layer-step's split.

        `active` defaults to unknown. `share` is of `active`, or of `evaluated` where that is not
        known: of what a policy that observes = active is told.
        """
        wanted = sorted_ids(evaluated, self.n_neurons)
        if active is None:
            fired = None
        else:
            fired = wanted if active is evaluated else sorted_ids(active, self.n_neurons)
        fired_or_wanted = wanted if fired is None else fired
        share = share_of(fired_or_wanted, evaluated if active is None else active, share)
        if self.observes == "active":
            self.policy.observe(layer, fired_or_wanted, share)
        elif self.observes == "evaluated":
            self.policy.observe(layer, wanted, share if fired_or_wanted is wanted else None)
        at = wanted.astype(np.intp)  # indexing with int32 takes several times as long
        here = self.state[layer].take(at)
        on_device = here >= RESIDENT
        split = Split(
            hit_resident=self._resident_before(layer, wanted, at, on_device),
            on_time=wanted.compress(on_device),
            residual=wanted.compress(~on_device),
            late=wanted.compress(here == ARRIVING) if self.in_flight else NOTHING,
        )
        unused = self._unused[layer]  # of resident neurons only: what is used here is on time
        used_first = int(np.count_nonzero(unused.take(at)))
        if used_first:
            unused[at] = False
        self.totals["used"] += used_first
        self._count_lookup(layer, wanted, fired, split, used_first)
        self._before[layer] = None
        self._predicted[layer] = None
        self._fresh = {}
        self._tell(LookedUp(layer, wanted, fired, share, split))
        return split

    def end_step(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        """Let the controller see the step; its knobs hold for the next one."""
        knobs = self.controller.update(record, layers)
        self._tell(StepEnded(record, layers, knobs))
        return knobs

    def cancel(self, swap_id: int, *, restore: bool = False) -> None:
        """A copy will never land: its neurons are absent again and their slots free.

        restore: the copy has not begun, so what it would have overwritten is still there and
        resident again. Its eviction is taken back; a load counted wasted by it stays so.
        """
        swap = self.in_flight.pop(swap_id, None)
        if swap is None:
            raise KairoxError(f"swap {swap_id} was cancelled, but is not in flight")
        self.state[swap.layer, swap.promote] = ABSENT
        self.slot_of[swap.layer, swap.promote] = -1
        kept = swap.evict if restore else NOTHING
        # The i-th neuron evicted for a swap had the i-th slot of it.
        self.state[swap.layer, kept] = RESIDENT
        self.slot_of[swap.layer, kept] = swap.slots[: kept.size]
        self._evictions -= kept.size
        freed = swap.slots[kept.size :]
        self._free[swap.layer] = np.concatenate([self._free[swap.layer], freed])
        self._cancelled += swap.promote.size
        self.totals["cancelled"] += swap.promote.size
        self._tell(Cancelled(swap_id, restore))

    def take_counts(self) -> StepCounts:
        """What was counted since the last call; the driver merges it into its StepRecord."""
        counts = StepCounts(
            evaluated=self._evaluated,
            active=self._active,
            predicted=self._n_predicted if self._any_predicted else nan,
            predicted_active=self._n_predicted_active if self._any_predicted else nan,
            hit_resident=self._hit_resident,
            hit_on_time=self._hit_on_time,
            late=self._late,
            residual=self._evaluated - self._hit_on_time,
            loads=self._loads,
            loads_used_first=self._used_first,
            wasted=self._wasted,
            cancelled=self._cancelled,
            evictions=self._evictions,
        )
        self._reset_counts()
        return counts

    @property
    def unused_yet(self) -> int:
        """Loads that are resident and still wait for a first use, or are in flight."""
        flying = sum(swap.promote.size for swap in self.in_flight.values())
        return int(np.count_nonzero(self._unused)) + flying

    def is_whole(self, layer: int) -> bool:
        """Whether every neuron of the layer is resident, so that the host has nothing to do."""
        if self.capacity[layer] < self.n_neurons:
            return False
        return bool((self.state[layer] >= RESIDENT).all())

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        flying = np.zeros((self.n_layers, self.n_neurons), bool)
        for swap in self.in_flight.values():
            assert not flying[swap.layer, swap.promote].any(), "two copies of one neuron in flight"
            flying[swap.layer, swap.promote] = True
            assert (self.slot_of[swap.layer, swap.promote] == swap.slots).all(), "slot was moved"
        assert ((self.state == ARRIVING) == flying).all(), "arriving is not what is in flight"
        assert ((self.slot_of >= 0) == (self.state != ABSENT)).all(), "a slot without a neuron"
        assert not (self._unused & (self.state != RESIDENT)).any(), "unused yet but not resident"
        for layer in range(self.n_layers):
            owned = self.slot_of[layer][self.slot_of[layer] >= 0]
            all_slots = np.sort(np.concatenate([owned, self._free[layer]]))
            whole = np.arange(self.capacity[layer])
            assert np.array_equal(all_slots, whole), "a slot lost or shared"
        totals = self.totals
        met = totals["used"] + totals["wasted"] + totals["cancelled"] + self.unused_yet
        assert totals["loads"] == met, f"{totals['loads']} loads, {met} accounted for"

    # -- inside ---------------------------------------------------------------------------------

    def _apply(self, layer: int, promote: Ids, evict: Ids) -> list[Swap]:
        state, slot_of = self.state[layer], self.slot_of[layer]
        free = self._free[layer]
        if evict.size:
            # Slots freed here are taken first, in the order of `evict`, so that swaps name them.
            free = np.concatenate([free, slot_of[evict][::-1]])
            unused = self._unused[layer]
            wasted = int(np.count_nonzero(unused[evict]))
            unused[evict] = False
            state[evict], slot_of[evict] = ABSENT, -1
            self._wasted += wasted
            self.totals["wasted"] += wasted
            self._evictions += evict.size
        slots = free[::-1][: promote.size].copy()
        self._free[layer] = free[: free.size - promote.size]
        state[promote], slot_of[promote] = ARRIVING, slots
        self._loads += promote.size
        self.totals["loads"] += promote.size
        displaced = evict[: promote.size]
        swaps = []
        for at in range(0, promote.size, self.swap_neurons):
            part = slice(at, at + self.swap_neurons)
            swap = Swap(self._next_id, layer, promote[part], slots[part], displaced[part])
            self.in_flight[swap.id] = swap
            self._next_id += 1
            swaps.append(swap)
        return swaps

    def _require_legal(self, layer: int, seen: Ids, promote: Ids, evict: Ids, limit: int) -> None:
        state = self.state[layer]
        name = type(self.policy).__name__
        room = min(limit, self._free[layer].size + evict.size)
        if promote.size > room:
            raise KairoxError(f"{name} promotes {promote.size} neurons; {room} fit")
        for what, ids, allowed in (("promotes", promote, ABSENT), ("evicts", evict, RESIDENT)):
            if ids.dtype == np.int32 and ids.size == 0:
                continue
            # As unsigned, what is negative is too large as well.
            if ids.dtype != np.int32 or ids.view(np.uint32).max() >= self.n_neurons:
                raise KairoxError(f"{name} {what} ids that are not int32 neurons of the layer")
            if self._marks.n_distinct(ids) != ids.size or (state.take(ids) != allowed).any():
                raise KairoxError(
                    f"{name} {what} neurons twice or not in state {allowed} "
                    "(0 absent, 1 arriving, 2 resident, 3 pinned)"
                )
        if not self.policy.evicts_seen and self._marks.n_common(evict, seen):
            raise KairoxError(f"{name} evicts neurons seen in this very layer-step")

    def _resident_before(
        self, layer: int, wanted: Ids, at: NDArray[np.intp], on_device: NDArray[np.bool_]
    ) -> int:
        before = self._before[layer]
        if before is not None:
            return int(np.count_nonzero(before.take(at) >= RESIDENT))
        resident = int(np.count_nonzero(on_device))
        fresh = self._fresh.get(layer)
        if fresh:  # nothing was planned first: before means ahead of this poll's commits
            resident -= self._marks.n_common(wanted, np.concatenate(fresh))
        return resident

    def _count_lookup(
        self, layer: int, wanted: Ids, fired: Ids | None, split: Split, used_first: int
    ) -> None:
        self._evaluated += wanted.size
        self._active += nan if fired is None else fired.size
        self._hit_resident += split.hit_resident
        self._hit_on_time += split.on_time.size
        self._late += split.late.size
        self._used_first += used_first
        predicted = self._predicted[layer]
        if predicted is not None:
            self._any_predicted = True
            self._n_predicted += predicted.size
            if fired is None:
                self._n_predicted_active = nan
            else:
                same = predicted is fired
                self._n_predicted_active += (
                    fired.size if same else self._marks.n_common(fired, predicted)
                )

    def _reset_counts(self) -> None:
        self._evaluated = self._hit_resident = self._hit_on_time = self._late = 0
        self._loads = self._used_first = self._wasted = self._cancelled = self._evictions = 0
        self._active = 0.0
        self._n_predicted = 0
        self._n_predicted_active = 0.0
        self._any_predicted = False

    def _tell(self, event: Event) -> None:
        if self.journal is not None:
            self.journal(event)


def _read_only(state: NDArray[np.uint8]) -> NDArray[np.uint8]:
    view = state.view()
    view.flags.writeable = False
    return view

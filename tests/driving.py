"""A driver without devices, and a second bookkeeping of what a NeuronCache may do.

`drive` makes the calls that both real drivers make, for each trigger; `Shadow` is a journal that
knows nothing but sets and checks every event against them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import isnan

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Controller, Fixed
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned
from kairox_sim.policies import Lru, build_policy
from kairox_sim.policies.base import Known, Observes, Policy, Trigger
from kairox_sim.policies.future import Future
from kairox_sim.record import LayerWaits, StepRecord


@dataclass(frozen=True)
class LayerStep:
    evaluated: list[int]
    predicted: list[int]
    active: list[int] | None = None
    shares: bool = False  # a prefill chunk: ids sorted and unique, each with a share


@dataclass(frozen=True)
class Run:
    """What a driver is given: sizes, sets, and `luck`, which says what lands when."""

    n_neurons: int
    slots: list[int]  # [n_layers]
    steps: list[list[LayerStep]]  # [n_steps][n_layers]
    trigger: Trigger
    observes: Observes
    luck: Sequence[int] = (1,)
    pinned: list[list[int]] | None = None
    warm: list[list[int]] | None = None
    swap_neurons: int = 2
    max_swaps: int | None = None
    threshold_scale: float = 1.0

    @property
    def n_layers(self) -> int:
        return len(self.slots)

    def fixed(self) -> Fixed:
        return Fixed(self.threshold_scale, self.max_swaps)

    def policy(self, name: str) -> Policy:
        """By its name, told everything it may need."""
        return build_policy(name, self.n_layers, self.n_neurons, self.known())

    def known(self) -> Known:
        """All that a policy may need. The future is of what it will be shown, in that order."""
        order = np.random.default_rng(8)
        return Known(
            rng=np.random.default_rng(7),
            future=Future.of(self._shown(), self.n_neurons),
            gpu_over_cpu=3.0,
            position=np.stack(
                [order.permutation(self.n_neurons).astype(np.int32) for _ in self.slots]
            ),
        )

    def _shown(self) -> list[list[NDArray[np.int32]]]:
        """[n_layers][calls of observe], as `drive` makes them."""
        ahead = self.trigger in ("attn_in", "attn_out")
        shown: list[list[NDArray[np.int32]]] = [[] for _ in self.slots]
        for at, step in enumerate(self.steps):
            for layer, now in enumerate(step):
                if self.observes == "active":
                    ids = now.evaluated if now.active is None else now.active
                elif self.observes == "evaluated" or self.trigger == "after":
                    ids = now.evaluated
                elif ahead and layer == 0 and at + 1 == len(self.steps):
                    continue  # layer 0 is planned at a step's end, for the next one
                else:
                    ids = now.predicted
                shown[layer].append(np.unique(np.array(ids, np.int32)))
        return shown

    def cache(self, policy: Policy | str, controller: Controller | None = None) -> NeuronCache:
        if isinstance(policy, str):
            policy = self.policy(policy)
        return NeuronCache(
            self.n_layers,
            self.n_neurons,
            self.slots,
            policy,
            controller or self.fixed(),
            pinned=self.pinned,
            warm=self.warm,
            swap_neurons=self.swap_neurons,
            observes=self.observes,
            trigger=self.trigger,
        )


class Shadow:
    """Residency as sets. Give it to a cache as its journal before the first call."""

    def __init__(self, cache: NeuronCache, limit: int | None) -> None:
        self.cache, self.limit = cache, limit
        layers = range(cache.n_layers)
        self.pinned = [set(np.flatnonzero(cache.state[i] == 3).tolist()) for i in layers]
        # id -> slot
        self.resident = [
            {int(n): int(cache.slot_of[i, n]) for n in np.flatnonzero(cache.state[i] >= 2)}
            for i in layers
        ]
        self.arriving: dict[int, tuple[int, dict[int, int]]] = {}  # swap id -> layer, id -> slot
        self.unused: list[set[int]] = [set() for _ in layers]
        self.before: dict[int, set[int]] = {}
        self.at_poll: list[set[int]] | None = None
        self.events: list[Event] = []
        self.issued = self.landed = self.cancelled = 0  # swaps
        self.loads = self.used = self.wasted = self.given_up = 0  # neurons
        self.evictions = self.hits = self.residuals = self.late = self.evaluated = 0
        self.hit_resident = 0

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Planned():
                self._planned(event)
            case Committed():
                self._committed(event)
            case LookedUp():
                self._looked_up(event)
            case Cancelled(swap_id, _):
                _, copies = self.arriving.pop(swap_id)
                self.cancelled += 1
                self.given_up += len(copies)
        assert self.issued == self.landed + self.cancelled + len(self.cache.in_flight)
        assert self.cache.in_flight.keys() == self.arriving.keys()

    def _planned(self, event: Planned) -> None:
        layer, resident = event.layer, self.resident[event.layer]
        if not self.cache.plans_after:
            self.before.setdefault(layer, set(resident))
        seen, evicted = set(event.predicted.tolist()), event.evicted.tolist()
        assert len(set(evicted)) == len(evicted)
        spared = set() if self.cache.policy.evicts_seen else seen
        assert set(evicted) <= resident.keys() - self.pinned[layer] - spared
        was = {neuron: resident.pop(neuron) for neuron in evicted}
        self.evictions += len(evicted)
        self.wasted += len(self.unused[layer] & set(evicted))
        self.unused[layer] -= set(evicted)
        promoted = 0
        for swap in event.swaps:
            assert swap.id == self.issued
            assert swap.layer == layer
            assert 1 <= swap.promote.size == swap.slots.size <= self.cache.swap_neurons
            taken = set(resident.values()) | set(self._flying(layer).values())
            assert not taken & set(swap.slots.tolist())
            assert set(swap.slots.tolist()) <= set(range(self.cache.capacity[layer]))
            assert not set(swap.promote.tolist()) & (resident.keys() | self._flying(layer).keys())
            assert set(swap.evict.tolist()) <= set(evicted)
            assert [was[n] for n in swap.evict.tolist()] == swap.slots[: swap.evict.size].tolist()
            copies = dict(zip(swap.promote.tolist(), swap.slots.tolist(), strict=True))
            assert len(copies) == len(set(copies.values())) == swap.promote.size
            self.arriving[swap.id] = layer, copies
            self.issued += 1
            promoted += len(copies)
        assert self.limit is None or promoted <= self.limit
        self.loads += promoted

    def _flying(self, layer: int) -> dict[int, int]:
        return {
            n: s for at, copies in self.arriving.values() if at == layer for n, s in copies.items()
        }

    def _committed(self, event: Committed) -> None:
        if self.at_poll is None:
            self.at_poll = [set(r) for r in self.resident]
        for swap_id in event.swap_ids:
            layer, copies = self.arriving.pop(swap_id)
            self.resident[layer] |= copies
            self.unused[layer] |= copies.keys()
            self.landed += 1

    def _looked_up(self, event: LookedUp) -> None:
        layer, split = event.layer, event.split
        wanted, now = set(event.evaluated.tolist()), self.resident[layer].keys()
        at_poll = self.at_poll[layer] if self.at_poll is not None else set(now)
        before = self.before.pop(layer, at_poll)
        self.at_poll = None
        assert split.on_time.tolist() == sorted(wanted & now)
        assert split.residual.tolist() == sorted(wanted - now)
        assert split.late.tolist() == sorted(wanted & self._flying(layer).keys())
        assert split.hit_resident == len(wanted & before)
        self.used += len(self.unused[layer] & wanted)
        self.unused[layer] -= wanted
        self.evaluated += len(wanted)
        self.hits += split.on_time.size
        self.residuals += split.residual.size
        self.late += split.late.size
        self.hit_resident += split.hit_resident

    def agree(self) -> None:
        """The cache's own books say the same; every load is somewhere."""
        self.cache.check()
        totals = self.cache.totals
        assert totals == {
            "loads": self.loads,
            "used": self.used,
            "wasted": self.wasted,
            "cancelled": self.given_up,
        }
        unused_yet = sum(len(u) for u in self.unused) + sum(
            len(copies) for _, copies in self.arriving.values()
        )
        assert self.loads == self.used + self.wasted + self.given_up + unused_yet
        assert self.cache.unused_yet == unused_yet
        assert self.evaluated == self.hits + self.residuals


def drive(cache: NeuronCache, run: Run) -> list[StepRecord]:
    """Every step of `run`, in the order of calls of its trigger, check() after each call."""
    luck = cycle(run.luck)
    records = []
    for at, step in enumerate(run.steps):
        for layer, now in enumerate(step):
            if run.trigger in ("attn_in", "attn_out") and layer + 1 < len(step):
                _plan(cache, layer + 1, step[layer + 1])
            if run.trigger in ("serial", "instant"):
                _plan(cache, layer, now)
            _poll(cache, luck, everything=run.trigger == "instant")
            _lookup(cache, layer, now)
            if run.trigger == "after":
                _plan(cache, layer, now, reactive=True)
        if run.trigger in ("attn_in", "attn_out") and at + 1 < len(run.steps):
            _plan(cache, 0, step[0])  # the next step's, from this step's own set
        counts = cache.take_counts()
        assert counts.evaluated == counts.hit_on_time + counts.residual
        assert 0 <= counts.late <= counts.residual
        assert counts.hit_resident <= counts.evaluated
        record = StepRecord.with_unknown(
            step=at,
            gpu_busy_s=1e-3 * (1 + next(luck) % 3),
            cpu_busy_s=1e-4 * counts.residual,
            swap_busy_s=2e-4 * counts.loads,
            **asdict(counts),
        )
        records.append(record)
        layers = at + np.arange(run.n_layers)
        cache.end_step(record, LayerWaits(layers % 3 == 0, 1e-4 * (layers % 2)))
    return records


def _plan(cache: NeuronCache, layer: int, step: LayerStep, *, reactive: bool = False) -> None:
    ids = np.array(step.evaluated if reactive else step.predicted, np.int64)
    share = _share(ids) if step.shares else None
    kept = ids.copy()
    swaps = cache.plan(layer, ids, share)
    assert (ids == kept).all()
    assert all(swap.id in cache.in_flight for swap in swaps)
    cache.check()


def _lookup(cache: NeuronCache, layer: int, step: LayerStep) -> None:
    ids = np.array(step.evaluated, np.int32)
    active = None if step.active is None else np.array(step.active, np.int32)
    share = _share(ids if active is None else active) if step.shares else None
    kept, kept_active = ids.copy(), None if active is None else active.copy()
    cache.lookup(layer, ids, active, share)
    assert (ids == kept).all()
    assert active is None or (active == kept_active).all()
    cache.check()


def _share(ids: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.float16]:
    return ((1 + ids % 4) / 4).astype(np.float16)


def _poll(cache: NeuronCache, luck: Iterator[int], *, everything: bool) -> None:
    """Land all, some or none of what is in flight, in or out of order; now and then cancel."""
    landed = []
    for swap_id in list(cache.in_flight):
        chance = next(luck) % 8
        if everything or chance < 4:
            landed.append(swap_id)
        elif chance == 7:
            cache.cancel(swap_id)
            cache.check()
    cache.commit(landed[::-1] if next(luck) % 3 == 0 else landed)
    cache.check()


def reactive(
    name: str, sets: list[list[int]], n: int, slots: int, controller=None, **given
) -> Shadow:
    """One layer, trigger = after, every copy landed by the next lookup."""
    run = Run(n, [slots], [[LayerStep(s, s, s)] for s in sets], "after", "active", **given)
    cache = run.cache(name, controller)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    shadow.agree()
    return shadow


def on_time(shadow: Shadow) -> list[list[int]]:
    return [e.split.on_time.tolist() for e in shadow.events if isinstance(e, LookedUp)]


def moves(shadow: Shadow) -> list[tuple[list[int], list[int]]]:
    """(promoted in issue order, evicted) per plan."""
    return [
        ([int(i) for swap in e.swaps for i in swap.promote], e.evicted.tolist())
        for e in shadow.events
        if isinstance(e, Planned)
    ]


def skewed(n: int, length: int, seed: int) -> list[int]:
    """Ids of which a few come often, and which ones drifts."""
    rng = np.random.default_rng(seed)
    drift = np.arange(length) // 200
    return ((rng.zipf(1.3, length) + 5 * drift) % n).tolist()


def skewed_sets(n: int, length: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    weight = 1 / (1 + np.arange(n))
    sets = []
    for at in range(length):
        size = rng.integers(0, 8)
        p = np.roll(weight, at // 40)
        sets.append(rng.choice(n, size, p=p / p.sum()).tolist())  # repeats, unsorted
    return sets


def busy(trigger: Trigger, observes: Observes, **changed: object) -> Run:
    """A run in which everything happens: 60 steps whose sets persist and drift."""
    rng = np.random.default_rng(3)
    steps, weight = [], rng.random((3, 24))
    for _ in range(60):
        weight = 0.8 * weight + 0.2 * rng.random((3, 24))
        step = []
        for layer in range(3):
            top = np.argsort(-weight[layer])[:8].tolist()
            guess = top[:6] + rng.integers(0, 24, 2).tolist()
            step.append(LayerStep(top, guess, top))
        steps.append(step)
    luck = rng.integers(0, 24, 97).tolist()
    run = Run(24, [9, 7, 0], steps, trigger, observes, luck, threshold_scale=0.25)
    return replace(run, **changed)


def small_log() -> list:
    """LRU, serial, 2 slots: events 0 plan, 1 commit, 2 lookup, 3 plan, 4 cancel, 5 end_step."""
    run = Run(8, [2], [], "serial", "predicted")
    cache = run.cache(Lru(1, 8), Fixed())
    events: list = []
    cache.journal = events.append
    cache.plan(0, [1, 2])
    cache.commit([0])
    cache.lookup(0, [1, 2, 3], [1])
    cache.plan(0, [3])
    cache.cancel(1)
    cache.end_step(StepRecord.with_unknown(step=7))
    return events


def fresh() -> NeuronCache:
    return Run(8, [2], [], "serial", "predicted").cache(Lru(1, 8), Fixed())


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plain(value):
    """Events as nested tuples, nan as text, so that == compares them."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, float) and isnan(value):
        return "nan"
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return (type(value).__name__, *(plain(getattr(value, n)) for n in type(value).__slots__))
    return value

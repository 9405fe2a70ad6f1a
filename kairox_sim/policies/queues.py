"""FIFO and SIEVE over sets of neurons: one queue per layer, in order of load.

A step's neurons enter together, the lowest index as the oldest of them; nothing seen in a step is a
victim in it; what does not fit is bypassed. What starts resident is older than anything loaded.
With one id per step they are the textbook policies.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
from kairox_sim.policies.base import (
    ABSENT,
    ARRIVING,
    NOTHING,
    RESIDENT,
    Fills,
    Ids,
    Late,
    Observes,
    Share,
    State,
    Trigger,
)
from kairox_sim.policies.ranked import admit_seen


class Fifo:
    """First in, first out: the victim is the neuron that was loaded longest ago."""

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.entered = np.zeros((n_layers, n_neurons), np.int64)  # which plan loaded it; 0: none
        self.plans = np.zeros(n_layers, np.int64)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        pass

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        entered = self.entered[layer]
        entered[seen.compress(state.take(seen) == ABSENT)] = 0  # equals among themselves
        promote, evict = admit_seen(seen, entered, state, free_slots, limit)
        self.plans[layer] += 1
        entered[promote] = self.plans[layer]
        return promote, evict


class Sieve:
    """SIEVE (Zhang et al., NSDI '24): FIFO with a bit per neuron and a hand that stays put.

    A use sets the neuron's bit. The hand goes from old to new, then round again: it clears the bits
    it passes and evicts the first neuron without one. What was seen or is arriving is passed over.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        # Place in the queue, unique and growing: plan that loaded it * n_neurons + neuron.
        self.place = np.tile(np.arange(n_neurons, dtype=np.int64), (n_layers, 1))
        self.used = np.zeros((n_layers, n_neurons), bool)
        self.hand = np.zeros(n_layers, np.int64)  # the lowest place it has not yet passed
        self.plans = np.zeros(n_layers, np.int64)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.used[layer][seen.astype(np.intp)] = True

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        want = seen.compress(state.take(at) == ABSENT)
        if want.size == 0 or limit == 0:
            return NOTHING, NOTHING
        victims = NOTHING
        missing = min(want.size, limit) - free_slots
        if missing > 0:
            may_go = state == RESIDENT
            may_go[at] = False
            victims = self._sweep(layer, may_go.nonzero()[0].astype(np.int32), missing)
            stay = (state == RESIDENT) | (state == ARRIVING)
            stay[victims] = False
            place = self.place[layer]
            if victims.size:
                last = place[victims[-1]]
                # Past the newest there is nothing: the next round begins at the oldest, not at
                # what this plan loads.
                self.hand[layer] = last + 1 if (place[stay] > last).any() else 0
        promote = want[: min(want.size, limit, free_slots + victims.size)]
        self.plans[layer] += 1
        self.place[layer][promote] = self.plans[layer] * state.size + promote
        self.used[layer][promote] = False
        return promote, victims

    def _sweep(self, layer: int, candidates: Ids, k: int) -> Ids:
        """Up to k victims, in the order in which the hand comes to them."""
        place, used = self.place[layer], self.used[layer]
        queue = candidates[np.argsort(place[candidates])]
        start = int(np.searchsorted(place[queue], self.hand[layer]))
        queue = np.concatenate([queue[start:], queue[:start]])
        kept = used[queue]
        idle = np.flatnonzero(~kept)
        if idle.size >= k:
            used[queue[: idle[k - 1]]] = False
            return queue[idle[:k]]
        # Once round, every bit is cleared: the rest goes in order.
        used[queue] = False
        return np.concatenate([queue[idle], queue[kept][: k - idle.size]])

"""LRU and LFU over sets of neurons, step-atomic: a step's neurons are all touched at once.

Within one layer-step there is no order among neurons, so nothing seen in it is a victim and ties
go to the lowest index. With one id per step they are the textbook policies.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
from kairox_sim.policies.base import ABSENT, Fills, Ids, Late, Observes, Share, State, Trigger
from kairox_sim.policies.ranked import admit_seen


class Lru:
    """Least recently used: the victim is the neuron whose last use is longest ago."""

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.last_use = np.zeros((n_layers, n_neurons), np.int64)  # in calls of observe; 0 is never
        self.calls = np.zeros(n_layers, np.int64)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.calls[layer] += 1
        self.last_use[layer][seen.astype(np.intp)] = self.calls[layer]

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        return admit_seen(seen, self.last_use[layer], state, free_slots, limit)


class Lfu:
    """Least frequently used, by counts over the whole run (perfect LFU), never forgotten.

    `forget` makes it the in-cache LFU of cache simulators (libCacheSim's): a count begins when its
    neuron is loaded, and ties go to the least recently used before they go to the lowest index.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int, *, forget: bool = False) -> None:
        self.forget = forget
        self.uses = np.zeros((n_layers, n_neurons), np.int64)
        self.recency = Lru(n_layers, n_neurons)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.uses[layer][seen.astype(np.intp)] += 1
        if self.forget:
            self.recency.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        uses = self.uses[layer]
        if not self.forget:
            return admit_seen(seen, uses, state, free_slots, limit)
        uses[seen.compress(state.take(seen) == ABSENT)] = 1
        # Uses, then the last one: no last use is above the number of calls.
        rank = uses * (self.recency.calls[layer] + 1) + self.recency.last_use[layer]
        return admit_seen(seen, rank, state, free_slots, limit)

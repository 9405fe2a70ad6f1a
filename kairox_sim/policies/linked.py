"""A policy whose swaps follow the order of neurons in host memory (Ripple, arXiv 2410.19274)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
from kairox_sim.policies.base import Fills, Ids, Late, Observes, Policy, Share, State, Trigger
from kairox_sim.policies.grouped import take_over


class Linked:
    """The decisions of `inner`; what it promotes is issued by `position`, lowest first.

    The same neurons are loaded and evicted, so a swap, which is the next few of them, is a stretch
    of host memory with few gaps. With groups, link these: Grouped(Linked(inner, [n_layers,
    n_groups] places of groups), members).
    """

    # The inner's, set on each instance; class variables to whoever asks for a Policy.
    knobs: ClassVar[frozenset[str]]
    admits: ClassVar[Literal["must", "filter", "never"]]
    fills: ClassVar[Fills]
    needs: ClassVar[frozenset[str]]
    evicts_seen: ClassVar[bool]
    default_trigger: ClassVar[Trigger]
    default_observes: ClassVar[Observes]
    default_late: ClassVar[Late]

    def __init__(self, inner: Policy, position: NDArray[np.int32]) -> None:
        self.inner = inner
        self.position = position  # [n_layers, n_neurons]
        take_over(self, inner)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.inner.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        promote, evict = self.inner.plan(layer, seen, state, free_slots, limit, knobs)
        return promote[np.argsort(self.position[layer].take(promote))], evict

"""Top-k of everything, changed pair by pair: Kairox's released code, and its lambda = 0."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import (
    ABSENT,
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
from kairox_sim.policies.scored import (
    Momentum,
    Ties,
    best_first,
    require_decay,
    ties_of,
    top,
)


class TamReleased:
    """Kairox as its authors released it (the OSDI '26 artifact "Anhelor", and SparkInfer).

    S = decay*S + (1 - decay)*A over groups; the wanted set is the top `capacity` of all S, with no
    filter. Only what never scored is not loaded, and gives its slot to what did: the code begins
    with full slots, and which zeros its sort would put there says nothing. `tau` gives the paper's
    filter, S > tau, back (0.33 for the decay of 0.67); residents below it stay until a load takes
    their slot. Old and new set are compared as masks: the i-th missing id, by index, is loaded over
    the i-th superfluous one, so
    loads and evictions are equal in number (free slots, which the code never has after its start,
    are filled first). Where the swap cap binds, the first pairs by index are taken; the others are
    found again, or not, by the next plan. The artifact's decay is fixed; SparkInfer's is set per
    layer by a controller, as the paper's is, and starts at the same 0.67.

    Its argsort is not stable, so who comes first among equals cannot be read off the source:
    `ties` = low (index; also what a layer starts with), high, or resident.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps", "decay"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = True
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "stall"

    def __init__(
        self,
        n_layers: int,
        n_neurons: int,
        *,
        decay: float = 0.67,
        tau: float | None = None,
        ties: str = "low",
    ) -> None:
        require_decay("tam_released", decay)
        if tau is not None and not tau >= 0:
            raise KairoxError(f"tam_released's tau must be 0 or more, or left out, got {tau}")
        self.decay, self.tau, self.ties = decay, tau, ties_of("tam_released", ties)
        self.momentum = Momentum(n_layers, n_neurons)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.momentum.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        decay = self.decay if knobs.decay is None else knobs.decay
        assert not isinstance(decay, tuple)
        score = self.momentum.at(layer, decay)
        return _swap_masks(score, self.tau or 0.0, self.ties, state, free_slots, limit)


class TopK:
    """Eager: the top `capacity` of the layer-step's own active set, all of it loaded.

    The `neuralink` (or `topk`) baseline of the Kairox paper: its engine with lambda = 0, so that S
    is the active share of this very layer-step. Inactive ids are never loaded to fill up. Pairs,
    cap and ties as in TamReleased.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = True
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "stall"

    def __init__(self, n_layers: int, n_neurons: int, *, ties: str = "low") -> None:
        self.ties = ties_of("topk", ties)
        self.momentum = Momentum(n_layers, n_neurons)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.momentum.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        score = self.momentum.at(layer, 0.0)
        return _swap_masks(score, 0.0, self.ties, state, free_slots, limit)


def _swap_masks(
    score: Share, tau: float, ties: Ties, state: State, free_slots: int, limit: int
) -> tuple[Ids, Ids]:
    """(load, evict): the differences of the old and the wanted set, both in index order."""
    resident, absent = state == RESIDENT, state == ABSENT
    capacity = int(np.count_nonzero(resident)) + free_slots
    may = (resident | absent) & (score > np.float32(tau))
    ids = may.nonzero()[0].astype(np.int32)
    if ids.size > capacity:
        ids = ids[top(best_first(ids, score, state, ties), capacity)]
    wanted = np.zeros(state.size, bool)
    wanted[ids] = True
    load = (wanted & absent).nonzero()[0].astype(np.int32)[:limit]
    n_evict = load.size - free_slots
    if n_evict <= 0:
        return load, NOTHING
    return load, (resident & ~wanted).nonzero()[0].astype(np.int32)[:n_evict]

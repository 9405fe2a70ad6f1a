"""Temporal activation momentum as the Kairox paper gives it (OSDI '26, section 6, Eq. 5)."""

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
from kairox_sim.policies.scored import Momentum, best_first, require_decay, top


class TamPaper:
    """S = decay*S + (1 - decay)*A; what exceeds tau competes for the layer's whole capacity.

    Eq. 5: A is the active share of a group, tau = (1 - decay) + epsilon, so that one hit from zero
    (which scores exactly 1 - decay) is not enough; C' = TopK({S > tau}, capacity), load C' \\ C,
    evict C \\ C'. Capacity is what is resident plus what is free: pinned and arriving ids do not
    compete. The decay is the controller's for the layer where it sets one (section 7), else
    `decay`; the paper starts it at 0.5.

    Decided, the paper being silent: residents that fail tau stay while nothing better needs their
    slot (the lowest S goes first); equals at the boundary keep the resident, then the lowest index;
    copies start with the highest S; under a swap cap, which the paper does not have, the rest of
    the loads and their victims wait.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"decay", "max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = True
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "stall"

    def __init__(
        self, n_layers: int, n_neurons: int, *, decay: float = 0.5, epsilon: float = 1e-3
    ) -> None:
        require_decay("tam_paper", decay)
        if not epsilon >= 0:
            raise KairoxError(f"tam_paper's epsilon must be 0 or more, got {epsilon}")
        self.decay, self.epsilon = decay, epsilon
        self.momentum = Momentum(n_layers, n_neurons)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.momentum.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        decay = self.decay if knobs.decay is None else knobs.decay
        assert not isinstance(decay, tuple)
        score = self.momentum.at(layer, decay)
        resident = state == RESIDENT
        capacity = int(np.count_nonzero(resident)) + free_slots
        passes = score > np.float32(1.0 - decay + self.epsilon)
        passes &= resident | (state == ABSENT)
        candidates = passes.nonzero()[0].astype(np.int32)
        key = best_first(candidates, score, state, "resident")
        kept = top(key, capacity)
        kept = kept[np.argsort(-key[kept])]
        keep = candidates[kept]
        promote = keep[state[keep] == ABSENT][:limit]
        n_victims = promote.size - free_slots
        if n_victims <= 0:
            return promote, NOTHING
        resident[keep] = False
        leaving = resident.nonzero()[0].astype(np.int32)
        worst = top(-best_first(leaving, score, state, "low"), n_victims)
        return promote, np.sort(leaving[worst])

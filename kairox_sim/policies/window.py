"""A sliding window over tokens, as LLM in a Flash keeps it in DRAM."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import RESIDENT, Fills, Ids, Late, Observes, Share, State, Trigger
from kairox_sim.policies.ranked import admit_seen


class Window:
    """Keep what was active in the last k tokens (LLM in a Flash, arXiv 2312.11514).

    What is missing is loaded and what left the window is given up at once, needed or not, as the
    paper's pre-allocated matrix does: so this one evicts with slots to spare. The paper sizes its
    memory by the window; here, where the budget is smaller, the longest unused of the window go
    too, and what still does not fit is bypassed. A prefill chunk is one token. k = 5 as in the
    paper's figures. What starts resident counts as used just before the first token.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int, *, k: int = 5) -> None:
        if k < 1:
            raise KairoxError(f"a window is 1 token or more, got k = {k}")
        self.k = k
        self.last_use = np.zeros((n_layers, n_neurons), np.int64)  # in calls of observe, from 1
        self.calls = np.zeros(n_layers, np.int64)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.calls[layer] += 1
        self.last_use[layer][seen.astype(np.intp)] = self.calls[layer]

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        last_use = self.last_use[layer]
        left = (last_use <= self.calls[layer] - self.k) & (state == RESIDENT)
        left[seen.astype(np.intp)] = False
        gone = left.nonzero()[0].astype(np.int32)
        kept = np.where(left, np.uint8(0), state) if gone.size else state
        # Those that left are absent already; none of them was seen, so none comes back at once.
        promote, evict = admit_seen(seen, last_use, kept, free_slots + gone.size, limit)
        return promote, np.concatenate([gone, evict])

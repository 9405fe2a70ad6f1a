"""The released policy with the filter as the fork runs it: masked scores, all of them sorted.

The fork multiplies the scores by the filter's mask and takes the first K of a descending argsort of
everything, zeros included (ANB_IMPLEMENTATION.md @2089bc1d: shifted_step, mul, argsort_top_k). Up
to 1,024 groups that argsort is a bitonic network, which is not stable: where its zeros end up
depends on where everything else is, so that groups that score nothing come and go.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
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
from kairox_sim.policies.scored import Momentum

Pairs = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]


@cache
def _network(n: int) -> tuple[Pairs, ...]:
    """Stages of a bitonic network of `n` (a power of two): (low, high, largest first)."""
    at, stages = np.arange(n), []
    block = 2
    while block <= n:
        distance = block // 2
        while distance:
            low = at[(at ^ distance) > at]
            stages.append((low, low ^ distance, (low & block) == 0))
            distance //= 2
        block *= 2
    return tuple(stages)


def bitonic_descending(score: Share) -> NDArray[np.intp]:
    """Ids by falling score, equal ones as the network leaves them; padding is below everything."""
    n = 1 << max(0, score.size - 1).bit_length()
    values = np.full(n, -np.inf, np.float32)
    values[: score.size] = score
    ids = np.arange(n)
    for low, high, falling in _network(n):
        a, b = values[ids[low]], values[ids[high]]
        swap = np.where(falling, a < b, a > b)
        first, second = low[swap], high[swap]
        ids[first], ids[second] = ids[second], ids[first]
    return ids[: score.size]


class ShippedSort:
    """S = decay*S + (1-decay)*A; the first `capacity` of the sorted, masked scores are wanted.

    As TamReleased in everything else: masks are compared, pairs taken in index order, capped.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = True
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "stall"

    def __init__(self, n_layers: int, n_neurons: int, *, tau: float, decay: float = 0.67) -> None:
        self.tau, self.decay = np.float32(tau), decay
        self.momentum = Momentum(n_layers, n_neurons)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.momentum.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        score = self.momentum.at(layer, self.decay)
        masked = np.where(score > self.tau, score, np.float32(0))
        resident = state == RESIDENT
        wanted = np.zeros(state.size, bool)
        wanted[bitonic_descending(masked)[: int(np.count_nonzero(resident)) + free_slots]] = True
        load = (wanted & (state == ABSENT)).nonzero()[0].astype(np.int32)[:limit]
        n_evict = load.size - free_slots
        if n_evict <= 0:
            return load, NOTHING
        return load, (resident & ~wanted).nonzero()[0].astype(np.int32)[:n_evict]

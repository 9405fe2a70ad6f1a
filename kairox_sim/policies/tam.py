"""Temporal activation momentum as the Kairox Guide's listing gives it.

The OSDI '26 paper's TAM (groups, top-k of capacity, per-layer decay) and its released code differ;
they are separate policies.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import (
    ABSENT,
    RESIDENT,
    Fills,
    Ids,
    Late,
    Observes,
    Share,
    State,
    Trigger,
)


class Tam:
    """M = beta*M + (1 - beta)*a; evict M < theta_evict; fill free slots by M >= theta_promote.

    float32, multiplied then added. In a prefill chunk a is the share of its tokens that fired.
    Seen neurons are never victims. Highest momentum first, ties to the lowest index.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"threshold_scale", "max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "cpu"

    def __init__(
        self,
        n_layers: int,
        n_neurons: int,
        *,
        beta: float = 0.90,
        theta_promote: float = 0.35,
        theta_evict: float = 0.08,
    ) -> None:
        if not 0 <= beta < 1:
            raise KairoxError(f"TAM's beta must be in [0, 1), got {beta}")
        if theta_evict < 0 or theta_promote <= 0:
            raise KairoxError(
                "TAM needs theta_promote > 0 and theta_evict >= 0, "
                f"got {theta_promote} and {theta_evict}"
            )
        self.beta = np.float32(beta)
        self.boost = np.float32(1.0 - beta)
        self.theta_promote, self.theta_evict = theta_promote, np.float32(theta_evict)
        self.momentum = np.zeros((n_layers, n_neurons), np.float32)  # [n_layers, n_neurons]

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        momentum = self.momentum[layer]
        np.multiply(momentum, self.beta, out=momentum)
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        momentum[at] += self.boost if share is None else self.boost * share

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        momentum = self.momentum[layer]
        cold = (momentum < self.theta_evict) & (state == RESIDENT)
        cold[seen.astype(np.intp)] = False
        evict = cold.nonzero()[0].astype(np.int32)
        room = min(limit, free_slots + evict.size)
        if room == 0:
            return evict[:0], evict
        threshold = np.float32(self.theta_promote * knobs.threshold_scale)
        warm = ((momentum >= threshold) & (state == ABSENT)).nonzero()[0].astype(np.int32)
        return _hottest(warm, momentum, room), evict


def _hottest(ids: Ids, momentum: Share, k: int) -> Ids:
    """Up to k ids (ascending) of highest momentum, ties to the lowest index, hottest first."""
    # Non-negative float32 order as their bits do, so bits and id make one unique integer key.
    bits = momentum[ids].view(np.uint32).astype(np.int64)
    key = (-bits << 32) + ids
    if k < ids.size:
        chosen = np.argpartition(key, k - 1)[:k]
        return ids[chosen[np.argsort(key[chosen])]]
    return ids[np.argsort(key)]

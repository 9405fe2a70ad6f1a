"""Decayed activity of every neuron, and the best of it: what the top-k policies share."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import RESIDENT, Ids, Share, State

Ties = Literal["low", "high", "resident"]  # who comes first among equals
TIES: tuple[Ties, ...] = ("low", "high", "resident")


class Momentum:
    """S = decay*S + (1 - decay)*A per layer-step, in float32, multiplied then added.

    A is the share of an id that was seen (1 in decode, where share is None), 0 of all others.
    What was observed waits for the layer's next plan, because only a plan is told the decay.
    """

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.values = np.zeros((n_layers, n_neurons), np.float32)  # [n_layers, n_neurons]
        self._waiting: list[list[tuple[NDArray[np.intp], Share | None]]] = [
            [] for _ in range(n_layers)
        ]

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        # Copies: a driver may reuse its arrays after the call.
        self._waiting[layer].append((seen.astype(np.intp), None if share is None else share.copy()))

    def at(self, layer: int, decay: float) -> Share:
        """S of the layer [n_neurons], with everything that was observed."""
        values: Share = self.values[layer]
        kept, gained = np.float32(decay), np.float32(1.0 - decay)
        for seen, share in self._waiting[layer]:
            np.multiply(values, kept, out=values)
            values[seen] += gained if share is None else gained * share
        self._waiting[layer].clear()
        return values


def best_first(ids: Ids, score: Share, state: State, ties: Ties) -> NDArray[np.int64]:
    """One different key per id, larger where the id ranks higher. `score` [n_neurons], >= 0."""
    # Non-negative float32 order as their bits do, so bits and tie-break make one integer.
    bits = score[ids].view(np.uint32).astype(np.int64) << 32
    if ties == "high":
        return bits + ids
    key = bits + (score.size - 1 - ids)
    return key + ((state[ids] == RESIDENT).astype(np.int64) << 31) if ties == "resident" else key


def top(key: NDArray[np.int64], k: int) -> NDArray[np.intp]:
    """Places of the k largest keys, in no order. Keys are different, so the set is one."""
    if k >= key.size:
        return np.arange(key.size)
    return np.argpartition(key, key.size - k)[key.size - k :] if k > 0 else np.zeros(0, np.intp)


def require_decay(owner: str, decay: float) -> None:
    if not 0 <= decay < 1:
        raise KairoxError(f"{owner}'s decay must be in [0, 1), got {decay}")


def ties_of(owner: str, given: str) -> Ties:
    for ties in TIES:
        if given == ties:
            return ties
    raise KairoxError(f"{owner}'s ties must be one of {', '.join(TIES)}, got {given!r}")

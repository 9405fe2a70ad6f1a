"""Which neurons fire together: exact counts over the tokens of a trace, and each one's neighbours.

f(ij) is the number of tokens for which i and j both fired, f(ii) those for which i did; prefill
tokens count one by one. P(ij) = f(ij) / n_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kairox_sim.trace import Trace, unpack

TOP_NEIGHBOURS = 32  # edges kept per neuron: a whole graph of 11,008 neurons has 60 million
_TOKENS_AT_ONCE = 2048  # sums of ones stay exact in float32
_NEURONS_AT_ONCE = 512

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Pairs of neurons that fired together, each once, by (low, high): the co-activation graph."""

    low: NDArray[np.int64]  # [n_edges], below `high`
    high: NDArray[np.int64]  # [n_edges]
    both: Counts  # [n_edges] f(low, high), 1 or more


def fired(trace: Trace, layer: int) -> Counts:
    """int64[n_neurons]: tokens for which each neuron of the layer fired."""
    total = np.zeros(trace.header.n_neurons, np.int64)
    bits = trace.bits[trace.layer == layer]
    for start in range(0, len(bits), _TOKENS_AT_ONCE):
        total += unpack(bits[start : start + _TOKENS_AT_ONCE], total.size).sum(axis=0)
    return total


def together(trace: Trace, layer: int) -> Iterator[tuple[int, Counts]]:
    """(first neuron, f[some neurons, n_neurons]) in blocks: the whole matrix may not fit."""
    n_neurons = trace.header.n_neurons
    bits = trace.bits[trace.layer == layer]
    for first in range(0, n_neurons, _NEURONS_AT_ONCE):
        block = slice(first, first + _NEURONS_AT_ONCE)
        total = np.zeros((min(_NEURONS_AT_ONCE, n_neurons - first), n_neurons), np.int64)
        for start in range(0, len(bits), _TOKENS_AT_ONCE):
            mask = unpack(bits[start : start + _TOKENS_AT_ONCE], n_neurons).astype(np.float32)
            total += (mask[:, block].T @ mask).astype(np.int64)
        yield first, total


def coactivation(trace: Trace, layer: int) -> Counts:
    """f as int64[n_neurons, n_neurons]: for layers of a few thousand neurons."""
    return np.concatenate([block for _, block in together(trace, layer)])


def neighbours(
    trace: Trace, layer: int, k: int = TOP_NEIGHBOURS
) -> tuple[NDArray[np.int64], Counts]:
    """(ids, f), both [n_neurons, k]: whom each neuron fires with most often, most often first.

    Ties go to the lowest id. Where fewer than k others fired with a neuron, f is 0.
    """
    n_neurons = trace.header.n_neurons
    k = min(k, n_neurons - 1)
    ids = np.zeros((n_neurons, k), np.int64)
    both = np.zeros((n_neurons, k), np.int64)
    if k == 0:
        return ids, both
    for first, block in together(trace, layer):
        rows = np.arange(len(block))
        # One unique key per pair: the chosen set does not hang on the partition's internals.
        key = block * n_neurons + np.arange(n_neurons - 1, -1, -1)
        key[rows, first + rows] = -1  # itself comes last
        top = -np.sort(np.partition(-key, k - 1, axis=1)[:, :k], axis=1)
        ids[first + rows] = n_neurons - 1 - top % n_neurons
        both[first + rows] = top // n_neurons
    return ids, both


def strongest_edges(trace: Trace, layer: int, k: int = TOP_NEIGHBOURS) -> Edges:
    """The edges from every neuron to its k neighbours; one that either end names is there."""
    n_neurons = trace.header.n_neurons
    ids, both = neighbours(trace, layer, k)
    own = np.repeat(np.arange(n_neurons), ids.shape[1])
    other, weight = ids.ravel(), both.ravel()
    real = weight > 0
    own, other, weight = own[real], other[real], weight[real]
    pair, index = np.unique(
        np.minimum(own, other) * n_neurons + np.maximum(own, other), return_index=True
    )
    return Edges(pair // n_neurons, pair % n_neurons, weight[index])

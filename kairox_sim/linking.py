"""Co-activation linking: neurons that fire together lie together in host memory.

Ripple / Neuralink (arXiv 2410.19274; ASPLOS '25, DOI 10.1145/3676642.3736114) joins neurons by the
distance 1 - P(ij) into a path, so that what one token needs is fewer, longer reads, and merges
reads with a small gap between them (access collapse). It does so for flash on a phone; here the
path is the order of bundles in host memory, and a read is one copy over the link.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kairox_sim.coactivation import TOP_NEIGHBOURS, Edges, strongest_edges
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace
from kairox_sim.trace_stats import counts

Positions = NDArray[np.int32]  # [n_layers, n_neurons] place of each neuron, counted in bundles

# Learnt in this process, by (sha256 of the prior, k), the last ones: a sweep asks for the same.
_LEARNT: dict[tuple[str, int], Positions] = {}
_LEARNT_MOST = 8


def link_order(
    prior: Trace, *, k: int = TOP_NEIGHBOURS, on_layer: Callable[[int], None] | None = None
) -> Positions:
    """Place of every neuron in host memory, learnt from the tokens of `prior`.

    Greedy over each neuron's k strongest edges (the paper takes all of them, O(n^2 log n)). The
    paths that leaves are laid end to end, the ones whose neurons fire most first, so that gaps
    across a seam are between neurons that are both wanted often.
    """
    if prior.n_tokens == 0:
        raise KairoxError("the prior is empty: there are no tokens to link neurons by")
    key = (prior.sha256, k)
    if key in _LEARNT:
        return _LEARNT[key].copy()
    fired = counts(prior)  # [n_layers, n_neurons]
    position = np.empty(fired.shape, np.int32)
    for layer in range(prior.header.n_layers):
        paths = link(strongest_edges(prior, layer, k), prior.header.n_neurons)
        heat = np.array([fired[layer][path].mean() for path in paths])
        order = np.concatenate([paths[i] for i in np.argsort(-heat, kind="stable")])
        position[layer][order] = np.arange(order.size, dtype=np.int32)
        if on_layer is not None:
            on_layer(layer)
    if len(_LEARNT) >= _LEARNT_MOST:
        del _LEARNT[next(iter(_LEARNT))]
    _LEARNT[key] = position
    return position.copy()


def link(edges: Edges, n_neurons: int) -> list[NDArray[np.int64]]:
    """Paths over neurons: strongest edge first, at most two links a neuron, never a ring.

    Equal edges in the order of (low, high). A path begins at the lower of its two ends; paths in
    the order of where they begin. A neuron without a link is a path of one.
    """
    links: list[list[int]] = [[] for _ in range(n_neurons)]
    root = list(range(n_neurons))

    def find(neuron: int) -> int:
        while root[neuron] != neuron:
            root[neuron] = root[root[neuron]]
            neuron = root[neuron]
        return neuron

    order = np.argsort(-edges.both, kind="stable")
    for i, j in zip(edges.low[order].tolist(), edges.high[order].tolist(), strict=True):
        if len(links[i]) < 2 and len(links[j]) < 2:
            a, b = find(i), find(j)
            if a != b:  # else they are the two ends of one path, and it would close
                root[b] = a
                links[i].append(j)
                links[j].append(i)

    paths, laid = [], [False] * n_neurons
    for start in range(n_neurons):
        if laid[start] or len(links[start]) == 2:
            continue
        path, before, here = [start], -1, start
        while step := [n for n in links[here] if n != before]:
            before, here = here, step[0]
            path.append(here)
        for neuron in path:
            laid[neuron] = True
        paths.append(np.array(path, np.int64))
    return paths


def reads(
    positions: NDArray[np.integer], bundle_bytes: float, bytes_per_s: float, copy_fixed_s: float
) -> tuple[int, float]:
    """(number of reads, bytes read) that fetch the bundles at `positions` (ascending, distinct).

    Neighbours in memory are one read. So are two with a gap between them, as long as reading the
    gap takes less time than starting another read: gap x bundle_bytes / bytes_per_s < copy_fixed_s.
    Bytes are those of whole reads, gaps included.
    """
    if positions.size == 0:
        return 0, 0.0
    gaps = np.diff(positions).astype(np.int64) - 1  # [n - 1] bundles in between
    joined = (gaps == 0) | (gaps * bundle_bytes / bytes_per_s < copy_fixed_s)
    n_bundles = positions.size + int(gaps[joined].sum())
    return 1 + int(np.count_nonzero(~joined)), n_bundles * bundle_bytes

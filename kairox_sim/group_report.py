"""Ways of grouping beside each other, on tokens they were not made from: no time, only hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.groups import (
    METHODS,
    Groups,
    co_activation_within,
    group_neurons,
    hottest,
    require_unseen,
)
from kairox_sim.policies.base import Policy
from kairox_sim.policies.grouped import Grouped
from kairox_sim.trace import Trace
from kairox_sim.trace_stats import counts


def compare_groups(
    prior: Trace,
    trace: Trace,
    slots: int,
    policies: dict[str, Callable[[int, int], Policy]],
    *,
    sizes: Sequence[int] = (4, 8, 16, 32),
    methods: Sequence[str] = tuple(METHODS),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row per size, method and policy: co-activation within groups, hits and loads on `trace`.

    Every row has the same `slots` neurons per layer, so the same bytes; they must be a multiple of
    every size. A policy is built for (n_layers, n_groups). Groups are the prior's and everything
    starts with its hottest groups. Plans come after lookups (trigger = after, the true sets), and
    copies land before the next layer-step.

    c_within: over all activations. hit_resident: of what was evaluated. loads: neurons per
    layer-step.
    """
    if odd := [size for size in sizes if slots % size]:
        raise KairoxError(
            f"{slots} slots are no multiple of group sizes {odd}: the budgets would differ"
        )
    header = trace.header
    fired, active = counts(prior), counts(trace).sum(axis=1)
    rows = []
    for size in sizes:
        for method in methods:
            groups = group_neurons(prior, header.n_layers, header.n_neurons, size, method, seed)
            require_unseen(groups, trace)
            within = co_activation_within(groups, trace)
            for name, build in policies.items():
                inner = build(header.n_layers, header.n_neurons // size)
                hit, loads = _hits(trace, groups, Grouped(inner, groups.members), fired, slots)
                rows.append({
                    "size": size, "method": method, "policy": name,
                    "c_within": _mean(within, active), "hit_resident": hit, "loads": loads,
                })  # fmt: skip
    return rows


def _hits(
    trace: Trace, groups: Groups, policy: Policy, fired: NDArray[np.int64], slots: int
) -> tuple[float, float]:
    """(hit_resident over evaluated, neurons loaded per layer-step)."""
    header = trace.header
    cache = NeuronCache(
        header.n_layers,
        header.n_neurons,
        slots,
        policy,
        Fixed(),
        warm=hottest(groups, fired, [slots] * header.n_layers),
        swap_neurons=groups.size,
        observes="active",
        trigger="after",
    )
    for step in trace.steps():
        for layer in range(header.n_layers):
            ids, share = step.active(layer), step.share(layer) if step.n_tokens > 1 else None
            cache.commit(list(cache.in_flight))
            cache.lookup(layer, ids, ids, share)
            cache.plan(layer, ids, share)
    cache.check()
    found = cache.take_counts()
    hit = found.hit_resident / found.evaluated if found.evaluated else np.nan
    return hit, found.loads / max(1, trace.n_steps * header.n_layers)


def _mean(within: NDArray[np.float64], active: NDArray[np.int64]) -> float:
    """Over layers that fired, each by its activations."""
    known = ~np.isnan(within)
    return float(np.average(within[known], weights=active[known])) if known.any() else np.nan

"""What a synthetic trace turned out to be, beside what its workload asked for."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from kairox_sim.trace import Trace, unpack
from kairox_sim.workload import Workload, expected_co_activation
from kairox_sim.workload_sets import Mask

_TOKENS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Statistic:
    """target: None where the workload asks for nothing. measured: nan where there is no such."""

    name: str
    means: str
    target: float | None
    measured: float


@dataclass(slots=True)
class _Sums:
    """Over the tokens of one layer."""

    active: NDArray[np.int64]  # [n_neurons] tokens for which each was active
    evaluated: NDArray[np.int64]  # [n_neurons]
    found: int = 0  # active and predicted
    predicted: int = 0
    stayed: int = 0  # active, and at the token before
    before: int = 0  # active at a token that has a next one
    mates: float = 0.0  # sum over evaluated neurons: share of the other members evaluated


def measure(trace: Trace, workload: Workload) -> list[Statistic]:
    """Every statistic of `workload`, over all layers of `trace`."""
    layers = [_layer_sums(trace, layer, workload.group_size) for layer in range(_layers(trace))]
    n_all = _layers(trace) * trace.header.n_neurons * trace.n_tokens
    active = sum(int(s.active.sum()) for s in layers)
    evaluated = sum(int(s.evaluated.sum()) for s in layers)
    said = workload.predicted
    # A shift changes who is hot: over several topics the rates are mixed, and fewer stay the same.
    one_topic = workload.shift_every is None or trace.n_tokens <= workload.shift_every
    stays = _persistence(layers, trace.n_tokens)
    rows = [
        Statistic("density", "active share of the neurons of a token", workload.active.mean,
                  _ratio(active, n_all)),
        Statistic("carried", f"share of activations of the top {workload.active.top_share:.0%}",
                  workload.active.carries if one_topic else None,
                  _mean([_carried(s.active, workload.active.top_share) for s in layers])),
        Statistic("persistence", "(P(1->1) - p) / (1 - p), p averaged over what is active",
                  workload.persistence if one_topic else None, stays),
        Statistic("one_hit_share", "of the neurons evaluated at all, those evaluated once",
                  workload.one_hit_share, _mean([_one_hit(s.evaluated) for s in layers])),
    ]  # fmt: skip
    if said is not None:
        predicted = sum(s.predicted for s in layers)
        found = sum(s.found for s in layers)
        expected = workload.recall * workload.active.mean / said.mean
        rows += [
            Statistic("predicted", "predicted share of the neurons of a token", said.mean,
                      _ratio(predicted, n_all)),
            Statistic("recall", "share of the active that is predicted", workload.recall,
                      _ratio(found, active)),
            Statistic("precision", "share of the predicted that is active", expected,
                      _ratio(found, predicted)),
        ]  # fmt: skip
        if trace.header.gating == "predicted":
            carried = _mean([_carried(s.evaluated, said.top_share) for s in layers])
            means = f"share of predictions of the top {said.top_share:.0%}"
            rows.append(
                Statistic("predicted carried", means, said.carries if one_topic else None, carried)
            )
    if workload.group_size > 1:
        size = workload.group_size
        means = f"C({size}): share of the other members evaluated, per evaluated neuron"
        mates = sum(s.mates for s in layers)
        rows.append(
            Statistic(
                "co-activation", means, expected_co_activation(workload), _ratio(mates, evaluated)
            )
        )
    return rows


def hot_overlap(before: Trace, after: Trace, top_share: float) -> float:
    """Jaccard index of the sets of the most active `top_share` of the neurons, over the layers."""
    found = []
    for layer in range(_layers(before)):
        sets = [_hot(_layer_sums(t, layer, 1).active, top_share) for t in (before, after)]
        found.append(_ratio(int((sets[0] & sets[1]).sum()), int((sets[0] | sets[1]).sum())))
    return _mean(found)


def _layer_sums(trace: Trace, layer: int, group_size: int) -> _Sums:
    n = trace.header.n_neurons
    sums = _Sums(np.zeros(n, np.int64), np.zeros(n, np.int64))
    mine = np.flatnonzero(trace.layer == layer)
    last: Mask | None = None
    for start in range(0, len(mine), _TOKENS_AT_ONCE):
        rows = mine[start : start + _TOKENS_AT_ONCE]
        active = unpack(trace.bits[rows], n)
        evaluated = active
        if trace.evaluated_bits is not None:
            evaluated = unpack(trace.evaluated_bits[rows], n)
        if trace.predicted_bits is not None:
            predicted = unpack(trace.predicted_bits[rows], n)
            sums.predicted += int(predicted.sum())
            sums.found += int((predicted & active).sum())
        sums.active += active.sum(axis=0)
        sums.evaluated += evaluated.sum(axis=0)
        earlier = active if last is None else np.concatenate([last[np.newaxis], active])
        sums.stayed += int((earlier[:-1] & earlier[1:]).sum())
        sums.before += int(earlier[:-1].sum())
        last = active[-1]
        if group_size > 1:
            cuts = np.arange(0, n, group_size)
            of_group = np.add.reduceat(evaluated, cuts, axis=1, dtype=np.int64)
            others = np.diff(np.append(cuts, n)) - 1  # the last group may be smaller
            sums.mates += float((of_group * (of_group - 1) / np.maximum(others, 1)).sum())
    return sums


def _persistence(layers: list[_Sums], n_tokens: int) -> float:
    """Estimate of rho from P(1 -> 1) = p + rho (1 - p), p averaged over what is active."""
    if n_tokens < 2:
        return nan
    stays = _ratio(sum(s.stayed for s in layers), sum(s.before for s in layers))
    # Of neurons with `fired` of n: fired (fired - 1) / (n - 1) is n p^2 on average if independent.
    square = sum(float((s.active * (s.active - 1)).sum()) for s in layers) / (n_tokens - 1)
    p = _ratio(square, sum(int(s.active.sum()) for s in layers))
    return _ratio(stays - p, 1 - p)


def _hot(counts: NDArray[np.int64], top_share: float) -> Mask:
    hot = np.zeros(len(counts), bool)
    hot[np.argsort(-counts, kind="stable")[: round(top_share * len(counts))]] = True
    return hot


def _carried(counts: NDArray[np.int64], top_share: float) -> float:
    return _ratio(int(counts[_hot(counts, top_share)].sum()), int(counts.sum()))


def _one_hit(counts: NDArray[np.int64]) -> float:
    return _ratio(int((counts == 1).sum()), int((counts > 0).sum()))


def _layers(trace: Trace) -> int:
    return trace.header.n_layers


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else nan

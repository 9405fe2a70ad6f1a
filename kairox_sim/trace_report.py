"""What a recording says at a glance: each domain's tokens and density, each layer's predictions."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from kairox_sim.trace import Trace

_BLOCK_ROWS = 1 << 16  # rows whose words are held at once


@dataclass(frozen=True, slots=True)
class DomainRow:
    domain: str
    sequences: int
    tokens: int
    density: float  # active share of all neurons; nan without tokens
    generated: bool  # some of the tokens are the model's own


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """Over the rows for which something was predicted; nan where a ratio has no denominator."""

    layer: int
    rows: int
    recall: float  # share of the active that were predicted
    precision: float  # share of the predicted that were active


def by_domain(trace: Trace) -> list[DomainRow]:
    """One row per domain, in order of first appearance."""
    n_layers, n_neurons = trace.header.n_layers, trace.header.n_neurons
    fired = _popcount(trace.bits)  # [n_rows]
    rows = []
    for domain in dict.fromkeys(s.domain for s in trace.header.sequences):
        own = [s for s in trace.header.sequences if s.domain == domain]
        mine = np.isin(trace.seq, [s.seq for s in own])
        n = int(np.count_nonzero(mine))
        density = float(fired[mine].sum() / (n * n_neurons)) if n else nan
        generated = any(s.generated for s in own)
        rows.append(DomainRow(domain, len(own), n // n_layers, density, generated))
    return rows


def predictions(trace: Trace) -> list[PredictionRow]:
    """One row per layer; empty where the trace has no predicted column."""
    if trace.predicted_bits is None or trace.predicted_known is None:
        return []
    active = _popcount(trace.bits)  # [n_rows], as the two below
    predicted = _popcount(trace.predicted_bits)
    both = _popcount(trace.bits, trace.predicted_bits)
    rows = []
    for layer in range(trace.header.n_layers):
        known = (trace.layer == layer) & trace.predicted_known
        hits = int(both[known].sum())
        rows.append(
            PredictionRow(
                layer,
                int(np.count_nonzero(known)),
                _ratio(hits, int(active[known].sum())),
                _ratio(hits, int(predicted[known].sum())),
            )
        )
    return rows


def _popcount(
    bits: NDArray[np.uint8], and_bits: NDArray[np.uint8] | None = None
) -> NDArray[np.int64]:
    """int64[n_rows]: set bits of each row, or of the rows' conjunction."""
    total = np.zeros(len(bits), np.int64)
    for start in range(0, len(bits), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        words = np.ascontiguousarray(bits[part]).view(np.uint64)
        if and_bits is not None:
            words = words & np.ascontiguousarray(and_bits[part]).view(np.uint64)
        total[part] = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return total


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else nan

"""What a trace looks like before any cache sees it: density, overlap, reuse, skew, loops.

Counts are exact int64; ratios are float64. Where no ratio exists (no tokens, no pair of tokens) it
is nan, and null in `to_dict`. A layer that never fired has density, skew and one-hit share 0 and is
named in `zero_layers`.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_sim.trace import Trace, unpack

SKEW_MASS = (4, 5)  # the 80 % of activations of `skew`, exactly
LOOP_MAX_PERIOD = 32  # tokens
LOOP_MIN_TOKENS = 16
LOOP_MIN_REPEATS = 3
_BLOCK_VALUES = 1 << 22  # unpacked values held at once


@dataclass(frozen=True, slots=True)
class Loop:
    """Tokens [start, start + n_tokens) of a sequence repeat themselves every `period` tokens."""

    seq: int
    start: int
    n_tokens: int
    period: int


@dataclass(frozen=True, slots=True)
class TraceStats:
    model: str
    n_layers: int
    n_neurons: int
    n_sequences: int
    n_steps: int
    n_tokens: int
    n_prefill_tokens: int
    truncated_at: int | None  # tokens; None of a whole recording
    activations: int  # active (token, layer, neuron) triples
    density: NDArray[np.float64]  # [n_layers], active share of the neurons of a token
    jaccard: NDArray[np.float64]  # [n_layers], mean over consecutive tokens; two empty sets: 1
    one_hit_share: NDArray[np.float64]  # [n_layers], of the neurons that ever fired, once only
    skew: NDArray[np.float64]  # [n_layers], smallest share of neurons with 80 % of activations
    reuse_median_tokens: float  # tokens until the same neuron fires again; 1 = in the next token
    reuse_histogram: NDArray[np.int64]  # [n_bins], bin b: distances in (2**(b-1), 2**b]
    loops: tuple[Loop, ...]
    loop_share: float  # of all tokens, those inside a loop
    zero_layers: tuple[int, ...]  # layers that never fired: an inert model, or a dead hook

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; nan becomes null."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def trace_stats(trace: Trace) -> TraceStats:
    header = trace.header
    n_tokens = trace.n_tokens
    fired = counts(trace)
    distances = reuse_distances(trace)
    loops = find_loops(trace)
    decode_tokens = int((trace.phase == 1).sum()) // header.n_layers
    unknown = np.full(header.n_layers, math.nan)
    return TraceStats(
        model=header.model,
        n_layers=header.n_layers,
        n_neurons=header.n_neurons,
        n_sequences=len(np.unique(trace.seq)),
        n_steps=trace.n_steps,
        n_tokens=n_tokens,
        n_prefill_tokens=n_tokens - decode_tokens,
        truncated_at=trace.truncated_at,
        activations=int(fired.sum()),
        density=fired.sum(axis=1) / (n_tokens * header.n_neurons) if n_tokens else unknown,
        jaccard=jaccard(trace),
        one_hit_share=_one_hit_share(fired) if n_tokens else unknown,
        skew=_skew(fired) if n_tokens else unknown,
        reuse_median_tokens=_median_of_histogram(distances),
        reuse_histogram=_power_of_two_bins(distances),
        loops=loops,
        loop_share=_loop_share(loops, n_tokens),
        zero_layers=tuple(np.flatnonzero(fired.sum(axis=1) == 0).tolist()) if n_tokens else (),
    )


def counts(trace: Trace) -> NDArray[np.int64]:
    """int64[n_layers, n_neurons]: tokens for which each neuron fired."""
    header = trace.header
    total = np.zeros((header.n_layers, header.n_neurons), np.int64)
    for layer in range(header.n_layers):
        bits = trace.bits[trace.layer == layer]
        for start in range(0, len(bits), 255):  # 255 ones still fit a uint8
            mask = unpack(bits[start : start + 255], header.n_neurons)
            total[layer] += mask.view(np.uint8).sum(axis=0, dtype=np.uint8)
    return total


def jaccard(trace: Trace) -> NDArray[np.float64]:
    """float64[n_layers]: overlap of the active sets of consecutive tokens of a sequence, averaged.

    |A and B| / |A or B|; 1 where both are empty; nan without a pair of tokens.
    """
    result = np.full(trace.header.n_layers, math.nan)
    for layer in range(trace.header.n_layers):
        mine = trace.layer == layer
        words, seq = trace.bits[mine].view(np.uint64), trace.seq[mine]
        pairs = _consecutive(seq)  # [n_pairs, 2]
        if len(pairs) == 0:
            continue
        before, after = words[pairs[:, 0]], words[pairs[:, 1]]
        both = np.bitwise_count(before & after).sum(axis=1, dtype=np.int64)
        either = np.bitwise_count(before | after).sum(axis=1, dtype=np.int64)
        result[layer] = np.where(either == 0, 1.0, both / np.maximum(either, 1)).mean()
    return result


def reuse_distances(trace: Trace) -> NDArray[np.int64]:
    """int64[n_tokens]: at d, how often a neuron fired again d tokens after it last did.

    Counted in tokens of the whole trace, across sequences, as a cache that outlives them sees it.
    """
    histogram = np.zeros(max(trace.n_tokens, 1), np.int64)
    for layer in range(trace.header.n_layers):
        for mask in _by_neuron(trace.bits[trace.layer == layer]):
            neuron, token = np.nonzero(mask)
            same = neuron[1:] == neuron[:-1]
            gaps = (token[1:] - token[:-1])[same]
            histogram += np.bincount(gaps, minlength=len(histogram))
    return histogram


def find_loops(trace: Trace) -> tuple[Loop, ...]:
    """Stretches where a sequence repeats an n-gram: at least 16 tokens and 3 repeats, period <= 32.

    Greedy decoding falls into them, and a looping trace flatters every cache. Shortest period
    first; a stretch inside one already found is not listed again.
    """
    first_layer = trace.layer == 0
    seq, token = trace.seq[first_layer], trace.token[first_layer]  # [n_tokens]
    loops: list[Loop] = []
    for one in np.unique(seq).tolist():
        own = token[seq == one]
        covered = np.zeros(len(own), bool)
        for period in range(1, min(LOOP_MAX_PERIOD, len(own) // LOOP_MIN_REPEATS) + 1):
            for start, stop in _runs(own[period:] == own[:-period]):
                n_tokens = stop - start + period
                long_enough = n_tokens >= max(LOOP_MIN_TOKENS, LOOP_MIN_REPEATS * period)
                if long_enough and not covered[start : start + n_tokens].all():
                    covered[start : start + n_tokens] = True
                    loops.append(Loop(int(one), start, n_tokens, period))
    return tuple(loops)


def overlaps(prior: Trace, evaluated: Trace) -> bool:
    """Whether a policy that learnt from `prior` would be measured on tokens it has seen: some
    sequences of both come from the same source text and their token ranges meet."""
    return any(
        a.source_sha256 == b.source_sha256
        and max(a.token_start, b.token_start) < min(a.token_stop, b.token_stop)
        for a in prior.header.sequences
        for b in evaluated.header.sequences
    )


def _consecutive(seq: NDArray[np.uint32]) -> NDArray[np.int64]:
    """[n_pairs, 2]: positions of each token and the next one of its own sequence."""
    order = np.argsort(seq, kind="stable")
    same = seq[order][1:] == seq[order][:-1]
    return np.stack([order[:-1][same], order[1:][same]], axis=1).astype(np.int64)


def _by_neuron(bits: NDArray[np.uint8]) -> Iterator[NDArray[np.bool_]]:
    """uint8[n_tokens, n_bytes] in blocks of bool[some neurons, n_tokens]."""
    n_bytes = max(1, _BLOCK_VALUES // (8 * max(len(bits), 1)))
    for start in range(0, bits.shape[1], n_bytes):
        block = bits[:, start : start + n_bytes]
        yield unpack(np.ascontiguousarray(block), 8 * block.shape[1]).T


def _one_hit_share(fired: NDArray[np.int64]) -> NDArray[np.float64]:
    ever = (fired > 0).sum(axis=1)
    share: NDArray[np.float64] = (fired == 1).sum(axis=1) / np.maximum(ever, 1)
    return share


def _skew(fired: NDArray[np.int64]) -> NDArray[np.float64]:
    part, whole = SKEW_MASS
    taken = np.cumsum(-np.sort(-fired, axis=1), axis=1)  # by the k + 1 most frequent
    enough = whole * taken >= part * taken[:, -1:]
    needed = np.where(taken[:, -1] > 0, enough.argmax(axis=1) + 1, 0)
    share: NDArray[np.float64] = needed / fired.shape[1]
    return share


def _median_of_histogram(histogram: NDArray[np.int64]) -> float:
    """Median of values v that occur histogram[v] times; nan when there are none."""
    total = int(histogram.sum())
    if total == 0:
        return math.nan
    upto = np.cumsum(histogram)
    low = int(np.searchsorted(upto, (total + 1) // 2))
    high = int(np.searchsorted(upto, total // 2 + 1))
    return (low + high) / 2


def _power_of_two_bins(histogram: NDArray[np.int64]) -> NDArray[np.int64]:
    distances = np.flatnonzero(histogram)
    if len(distances) == 0:
        return np.zeros(0, np.int64)
    bins = np.array([(int(d) - 1).bit_length() for d in distances])
    folded = np.zeros(int(bins.max()) + 1, np.int64)
    np.add.at(folded, bins, histogram[distances])
    return folded


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _loop_share(loops: tuple[Loop, ...], n_tokens: int) -> float:
    if n_tokens == 0:
        return math.nan
    inside = {(x.seq, t) for x in loops for t in range(x.start, x.start + x.n_tokens)}
    return len(inside) / n_tokens


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(v) for v in value.tolist()]
    if isinstance(value, tuple):
        return [dataclasses.asdict(v) if isinstance(v, Loop) else v for v in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value

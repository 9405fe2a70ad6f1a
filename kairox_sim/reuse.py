"""The fewest misses of any cache on a trace: the bypass oracle, its slots pooled over the layers.

A step is one set of (layer, neuron). Which neuron is kept plays no part, only when it is used next:
the oracle is a count of kept neurons per step of next use, and what does not fit goes from the far
end. What it holds at first is free: the best that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.trace import Trace

Sets = Literal["active", "evaluated", "all"]
Counts = NDArray[np.int64]


def set_sizes(trace: Trace, sets: Sets) -> Counts:
    """[n_steps] neurons of each step over all layers; of a prefill chunk, of any of its tokens."""
    return _set_sizes(_Content(trace.sha256, trace), _told_apart(trace, sets))


def fewest_misses(trace: Trace, sets: Sets, first: int, last: int, slots: int) -> int:
    """Over the steps [first, last), with `slots` for the neurons of all layers."""
    content, sets = _Content(trace.sha256, trace), _told_apart(trace, sets)
    if sets == "all":
        everything = trace.header.n_layers * trace.header.n_neurons
        return (last - first) * max(0, everything - slots)
    n_used = int(_set_sizes(content, sets)[first:last].sum())
    return n_used - _most_hits(content, sets, first, last, slots)


def _told_apart(trace: Trace, sets: Sets) -> Sets:
    return "active" if sets == "evaluated" and trace.evaluated_bits is None else sets


@dataclass(frozen=True, slots=True)
class _Content:
    """A trace as a key: equal to another of the same rows."""

    sha256: str
    trace: Trace = field(compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """How many neurons are used next how many steps later; both ascend, none is empty."""

    steps_later: NDArray[np.int64]
    n_neurons: Counts

    @classmethod
    def of(cls, steps_later: NDArray[np.int64]) -> _Uses:
        n_neurons = np.bincount(steps_later)
        steps = n_neurons.nonzero()[0]
        return cls(steps, n_neurons[steps])


@lru_cache(maxsize=16)
def _set_sizes(content: _Content, sets: Sets) -> Counts:
    trace = content.trace
    header = trace.header
    if sets == "all":
        return np.full(trace.n_steps, header.n_layers * header.n_neurons)
    return np.array(
        [
            np.bitwise_count(step.packed(evaluated=sets == "evaluated")).sum(dtype=np.int64)
            for step in trace.steps()
        ],
        np.int64,
    )


@lru_cache(maxsize=16)
def _reuse(content: _Content, sets: Sets, first: int, last: int) -> tuple[_Uses, tuple[_Uses, ...]]:
    """(of the first uses, counted from `first`; of what each step uses, counted from it)."""
    trace = content.trace
    n_neurons = trace.header.n_neurons
    next_use = np.full(trace.header.n_layers * n_neurons, last, np.int64)
    found: list[_Uses] = []
    for step in range(last - 1, first - 1, -1):
        rows = trace.at(step).packed(evaluated=sets == "evaluated")
        used = np.unpackbits(rows, axis=1, count=n_neurons, bitorder="little").view(np.bool_)
        at = np.flatnonzero(used)
        coming = next_use[at]
        found.append(_Uses.of(coming[coming < last] - step))
        next_use[at] = step
    return _Uses.of(next_use[next_use < last] - first), tuple(reversed(found))


@lru_cache(maxsize=256)
def _most_hits(content: _Content, sets: Sets, first: int, last: int, slots: int) -> int:
    begins_with, by_step = _reuse(content, sets, first, last)
    n_steps = last - first
    kept = np.zeros(n_steps + 1, np.int64)  # by the step of the next use
    n_kept, n_hits, end = 0, 0, 0  # `kept` is 0 from `end` on
    for step in range(-1, n_steps):
        if step >= 0:
            hits = int(kept[step])
            n_hits += hits
            n_kept -= hits
        uses = by_step[step] if step >= 0 else begins_with
        if uses.steps_later.size:
            origin = max(step, 0)
            kept[uses.steps_later + origin] += uses.n_neurons
            n_kept += int(uses.n_neurons.sum())
            end = max(end, origin + int(uses.steps_later[-1]) + 1)
        excess = n_kept - slots
        if excess > 0:
            farthest_first = kept[step + 1 : end][::-1]
            dropped = np.cumsum(farthest_first)
            at = int(np.searchsorted(dropped, excess))
            farthest_first[:at] = 0
            farthest_first[at] = dropped[at] - excess
            end -= at
            n_kept = slots
    return n_hits

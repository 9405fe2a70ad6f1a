"""What ran where and when: one Op per piece of work, as the device logged it.

Lanes and kinds, named as in the simulator's timeline:

  gpu      attention, predict, gate, ffn, head
  planner  decide: the policy's thinking; whether it holds up the gpu lane, the device says
  cpu      residual: the host's neurons
  h2d      swap; "partial sums": the host's result, before any waiting swap
  d2h      x: the FFN's input and what fired
  idle     cpu, io: the gpu lane had nothing to do, by what it waited for; decide: for a decision,
           where thinking does not always hold it up
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How much work an op is; what does not apply is 0."""

    neurons: int = 0
    n_tokens: int = 0
    context_len: int = 0  # tokens in the KV cache after this step
    n_bytes: float = 0.0  # as charged, so of the target where a small model stands in for a large
    n_swaps: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One interval of one lane, in nanoseconds of the machine's monotonic clock."""

    lane: str
    kind: str
    layer: int  # -1 where it belongs to none
    t0_ns: int
    t1_ns: int
    size: Size
    overrun: bool = False  # the real work took longer than the modelled duration

    @property
    def seconds(self) -> float:
        return (self.t1_ns - self.t0_ns) / NS


def clip(ops: Iterable[Op], t0_ns: int, t1_ns: int) -> list[tuple[int, int]]:
    """The parts of the intervals inside [t0_ns, t1_ns]; empty ones are left out."""
    inside = ((max(op.t0_ns, t0_ns), min(op.t1_ns, t1_ns)) for op in ops)
    return [(begin, end) for begin, end in inside if begin < end]


def union_ns(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals: what overlaps counts once."""
    total, reach = 0, None
    for begin, end in sorted(intervals):
        if reach is None or begin > reach:
            total += end - begin
            reach = end
        elif end > reach:
            total += end - reach
            reach = end
    return total


def gaps(intervals: Sequence[tuple[int, int]], t0_ns: int, t1_ns: int) -> list[tuple[int, int]]:
    """The parts of [t0_ns, t1_ns] that no interval covers."""
    free, at = [], t0_ns
    for begin, end in sorted(intervals):
        if end <= at or begin >= t1_ns:
            continue
        if begin > at:
            free.append((at, begin))
        at = end
    return [*free, (at, t1_ns)] if at < t1_ns else free


def busy_s(ops: Iterable[Op], t0_ns: int, t1_ns: int) -> float:
    """Seconds of [t0_ns, t1_ns] during which at least one of the ops ran."""
    return union_ns(clip(ops, t0_ns, t1_ns)) / NS

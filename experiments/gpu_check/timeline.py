"""Op logs: how much of a step overlaps, and a file for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kairox_exec.oplog import NS, Op, clip, union_ns

LANES = ("gpu", "cpu", "h2d", "d2h", "planner", "idle")


def overlap_s(ops: Sequence[Op], t0_ns: int, t1_ns: int) -> tuple[float, float]:
    """Seconds of a step in which at least one, and at least two, of GPU, host and swaps were busy.

    Where two lanes overlap is the union of the pairwise intersections.
    """
    lanes = {
        "gpu": [op for op in ops if op.lane == "gpu"],
        "cpu": [op for op in ops if op.lane == "cpu"],
        "swaps": [op for op in ops if op.lane == "h2d" and op.kind == "swap"],
    }
    busy = {name: clip(some, t0_ns, t1_ns) for name, some in lanes.items()}
    every = [interval for some in busy.values() for interval in some]
    names = list(busy)
    both = [
        (max(a0, b0), min(a1, b1))
        for at, one in enumerate(names)
        for other in names[at + 1 :]
        for a0, a1 in busy[one]
        for b0, b1 in busy[other]
        if max(a0, b0) < min(a1, b1)
    ]
    return union_ns(every) / NS, union_ns(both) / NS


def op_rows(ops: Iterable[Op]) -> list[list[Any]]:
    """For JSON; `op_from_row` reads one back."""
    return [
        [op.lane, op.kind, op.layer, op.t0_ns, op.t1_ns, op.size.neurons, op.size.n_tokens,
         op.size.context_len, op.size.n_bytes, op.size.n_swaps, op.overrun]
        for op in ops
    ]  # fmt: skip


def op_from_row(row: Sequence[Any]) -> Op:
    from kairox_exec.oplog import Size

    lane, kind, layer, t0_ns, t1_ns, neurons, n_tokens, context_len, n_bytes, n_swaps, over = row
    size = Size(neurons, n_tokens, context_len, n_bytes, n_swaps)
    return Op(lane, kind, layer, t0_ns, t1_ns, size, over)


def write_trace_events(ops: Iterable[Op], path: Path) -> None:
    """Chrome's trace event format: complete events, microseconds."""
    events = [
        {
            "name": op.kind if op.layer < 0 else f"{op.kind} {op.layer}",
            "ph": "X",
            "ts": op.t0_ns / 1000,
            "dur": (op.t1_ns - op.t0_ns) / 1000,
            "pid": 1,
            "tid": LANES.index(op.lane) + 1,
            "args": {"neurons": op.size.neurons, "bytes": op.size.n_bytes},
        }
        for op in ops
    ]
    named: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": at + 1, "args": {"name": lane}}
        for at, lane in enumerate(LANES)
    ]
    path.write_text(json.dumps({"traceEvents": [*named, *events]}) + "\n")

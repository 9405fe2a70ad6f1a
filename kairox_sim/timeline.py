"""Busy intervals of a run, for Gantt charts and trace viewers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """One operation on one resource; integer nanoseconds from the start of the run."""

    lane: str  # "gpu" | "cpu" | "h2d" | "d2h" | "planner"
    name: str
    layer: int  # -1 where it belongs to no layer
    began_ns: int
    end_ns: int

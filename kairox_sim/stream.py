"""The GPU's stream: work and waits in the order of the program, and the busy intervals of a run."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from kairox_sim.tally import Tally
from kairox_sim.timeline import Slice

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Stream:
    """`free_ns` is up to when the GPU has work or waits. The clock may be behind it: whoever speaks
    to anybody else lets it catch up first.
    """

    env: simpy.Environment
    keep_slices: bool
    free_ns: int = 0
    tally: Tally = field(default_factory=Tally)  # of this step
    slices: list[Slice] = field(default_factory=list)  # of the run and of every resource

    def compute(self, what: str, layer: int, duration_ns: int) -> None:
        """Queue work on the stream, behind what it already has."""
        self.tally.gpu += duration_ns
        if self.keep_slices:
            self.keep("gpu", what, layer, self.free_ns, self.free_ns + duration_ns)
        self.free_ns += duration_ns

    def wait_for_cpu(self, until_ns: int) -> int:
        """Idle until then, if that is still to come: for how long. The reason goes by the name."""
        waited_ns = self._wait(until_ns)
        self.tally.wait_cpu += waited_ns
        return waited_ns

    def wait_for_io(self, until_ns: int) -> int:
        waited_ns = self._wait(until_ns)
        self.tally.wait_io += waited_ns
        return waited_ns

    def wait_for_decision(self, until_ns: int) -> int:
        waited_ns = self._wait(until_ns)
        self.tally.wait_decide += waited_ns
        return waited_ns

    def catch_up(self) -> Process:
        """Let the clock reach the end of the stream."""
        ahead_ns = self.free_ns - int(self.env.now)
        if ahead_ns:
            yield self.env.timeout(ahead_ns)

    def keep(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        """Keep a busy interval of any resource."""
        if end_ns > began_ns:
            self.slices.append(Slice(lane, name, layer, began_ns, end_ns))

    def _wait(self, until_ns: int) -> int:
        waited_ns = max(0, until_ns - self.free_ns)
        self.free_ns += waited_ns
        return waited_ns

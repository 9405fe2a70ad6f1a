"""The host's threads: how many compute residual neurons beside the device, and how politely."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kairox_exec.lanes import Job, Worker
from kairox_sim.errors import KairoxError

MAX_NICE = 19
MAX_THREADS = 1024  # far above any host's cores; without a limit the system's own would be met


@dataclass(frozen=True, slots=True)
class HostPool:
    """`threads` of the host's lane. nice: lowers their priority (Linux), 0 leaves it."""

    threads: int = 1
    nice: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MAX_THREADS:
            raise KairoxError(f"host threads must be 1 to {MAX_THREADS}, got {self.threads}")
        if not 0 <= self.nice <= MAX_NICE:
            raise KairoxError(
                f"host nice must be 0 (leaves it) to {MAX_NICE} (lowest), got {self.nice}"
            )
        if self.nice and not sys.platform.startswith("linux"):
            raise KairoxError(
                f"host nice {self.nice}: a thread has a priority of its own on Linux only, and this"
                f" is {sys.platform}; use 0"
            )

    def start(self, name: str) -> HostThreads:
        return HostThreads(self, name)


class HostThreads:
    """The pool's threads, running. Called from the model's thread only."""

    def __init__(self, pool: HostPool, name: str) -> None:
        self._workers = [Worker(f"{name}-{i}" if i else name) for i in range(pool.threads)]
        if pool.nice:
            for worker in self._workers:
                os.setpriority(os.PRIO_PROCESS, worker.native_id, pool.nice)

    def submit(self, works: Sequence[Callable[[], Any]]) -> tuple[Job, ...]:
        """The i-th work to the i-th thread."""
        jobs = tuple(Job(work) for work in works)
        for worker, job in zip(self._workers, jobs, strict=False):
            worker.submit(job)
        if len(jobs) > len(self._workers):
            raise ValueError(f"{len(jobs)} works for {len(self._workers)} host threads")
        return jobs

    def raise_error(self) -> None:
        for worker in self._workers:
            worker.raise_error()

    def close(self, stuck_after_s: float | None) -> None:
        """See Worker.close."""
        for worker in self._workers:
            worker.close(stuck_after_s)

"""A thread that gathers late: its work is done when somebody looks at it, if it is drawn then."""

from __future__ import annotations

import random
import threading
from collections import deque

from kairox_exec.lanes import Job


class _Looked(threading.Event):
    def __init__(self, worker: LateWorker) -> None:
        super().__init__()
        self._worker = worker

    def is_set(self) -> bool:
        self._worker.may_go_on()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self._worker.may_go_on()
        return super().is_set()


class LateWorker:
    """In the place of `lanes.Worker`. eager: how likely it does its next job at every look."""

    def __init__(self, eager: float, seed: int = 0) -> None:
        self._eager, self._rng = eager, random.Random(seed)
        self._jobs: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        job.done = _Looked(self)
        self._jobs.append(job)

    def may_go_on(self) -> None:
        while self._jobs and self._rng.random() < self._eager:
            job = self._jobs.popleft()
            job.work()
            job.done.set()

    def raise_error(self) -> None:
        pass

    def close(self, stuck_after_s: float | None) -> None:
        pass

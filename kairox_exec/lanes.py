"""Lanes of the emulated machine: threads that do the real work, and the link's order of transfers.

A worker does real work at once; when it counts as done is arithmetic on absolute times: an op
starts at max(when it was given, when its lane became free) and lasts as modelled, or as long as the
real work took. Where the model's thread has to wait for the real work beyond that, the op ends when
the work did. So a thread that wakes up late moves no interval unless somebody noticed, and no
worker has to sleep: only the model's thread does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kairox_exec.clock import Clock
from kairox_exec.oplog import NS, Size
from kairox_sim.errors import KairoxError

STUCK_AFTER_S = 60.0


def stuck(who: str, what: str, lane: str, after_s: float) -> KairoxError:
    return KairoxError(
        f"{who} waits for {what} of lane {lane}, which has not ended after {after_s:g} s; "
        "the run cannot go on: see whether that thread is blocked, or start again"
    )


@dataclass(slots=True, eq=False)
class Job:
    """Real work for a worker; `done` is set when it ended, well or not."""

    work: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    t0_ns: int = 0  # of time.monotonic_ns
    t1_ns: int = 0
    result: Any = None

    def work_ns(self, part: float = 1.0) -> int:
        """How long the real work, or a part of it, took."""
        return round(part * (self.t1_ns - self.t0_ns))


class Worker:
    """One thread that does jobs in order. The first exception ends it; `error` then holds it."""

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self.raise_error()
        if self._closed:
            raise RuntimeError(f"{self._thread.name} is closed and takes no more work")
        self._jobs.put(job)

    def raise_error(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"work on {self._thread.name} failed: {self.error}") from self.error

    @property
    def native_id(self) -> int:
        assert self._thread.native_id is not None
        return self._thread.native_id

    def finish(self, stuck_after_s: float = STUCK_AFTER_S) -> None:
        """Return when everything given so far has been done; raise if some of it failed."""
        if self._closed:
            return
        last = Job(lambda: None)
        self._jobs.put(last)
        if not last.done.wait(stuck_after_s):
            raise stuck("finish", "the work given", self._thread.name, stuck_after_s)
        self.raise_error()

    def close(self, stuck_after_s: float | None = STUCK_AFTER_S) -> None:
        """Finish what was given and end the thread. May be called twice.

        None: do not wait for it, it is known to be stuck (and a daemon).
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            if stuck_after_s is None:
                return
            self._thread.join(stuck_after_s)
            if self._thread.is_alive():
                raise stuck("close", "the work given", self._thread.name, stuck_after_s)

    def _run(self) -> None:
        # Inference mode is per thread: without it here, writing to an inference tensor raises.
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                job.t0_ns = time.monotonic_ns()
                try:
                    if self.error is None:
                        job.result = job.work()
                except BaseException as error:
                    self.error = error
                job.t1_ns = time.monotonic_ns()
                job.done.set()


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy over the link. `t1_ns` is 0 until its times are settled."""

    kind: str  # "swap" | "partial sums"
    layer: int
    given_ns: int
    duration_ns: int
    size: Size
    job: Job | None  # the real copy; None where it has already been made
    swap_id: int = -1
    part: float = 1.0  # of the job's work that is this transfer's
    waited: bool = False  # somebody wanted it landed before its real copy was made
    t0_ns: int = 0
    t1_ns: int = 0
    overrun: bool = False


class Link:
    """Order and times of transfers: partial sums before waiting swaps, nothing is preempted.

    Times are settled lazily, from one thread: `advance` settles what has started by a given time.
    Whoever settles a transfer must know that nothing given before its start is still to come.
    """

    def __init__(
        self,
        clock: Clock,
        paced: bool,
        on_settled: Callable[[Transfer], None],
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self._clock, self._paced, self._stuck_after_s = clock, paced, stuck_after_s
        self._on_settled = on_settled
        self._free_ns = 0
        self._urgent: deque[Transfer] = deque()
        self._swaps: deque[Transfer] = deque()

    def give(self, transfer: Transfer) -> None:
        (self._urgent if transfer.kind != "swap" else self._swaps).append(transfer)

    def advance(self, until_ns: int, *, wait: bool = False) -> None:
        """Settle every transfer that has started by `until_ns` and whose real copy is made.

        Where the caller is ahead of the real clock, copies get until their modelled end; with
        `wait` as long as they take.
        """
        while self._settle_next(until_ns, wait=wait):
            pass

    def settle(self, transfer: Transfer) -> None:
        """Settle up to and including `transfer`, waiting for the real copies."""
        while not transfer.t1_ns:
            if not self._settle_next(None, wait=True):
                raise RuntimeError(f"{transfer.kind} of layer {transfer.layer} is not on the link")

    def drop_waiting(self) -> None:
        """Forget what has not been settled."""
        self._urgent.clear()
        self._swaps.clear()

    def _settle_next(self, until_ns: int | None, *, wait: bool) -> bool:
        """Settle the transfer that starts next, if by `until_ns` (None: whenever)."""
        given = [waiting[0].given_ns for waiting in (self._urgent, self._swaps) if waiting]
        if not given:
            return False
        start_ns = max(self._free_ns, min(given))
        if until_ns is not None and start_ns > until_ns:
            return False
        urgent = bool(self._urgent) and self._urgent[0].given_ns <= start_ns
        waiting = self._urgent if urgent else self._swaps
        transfer = waiting[0]
        modelled_ns = real_ns = start_ns + transfer.duration_ns
        job = transfer.job
        if job is not None:
            if not job.done.is_set():
                transfer.waited = True
                left_ns = max(0, modelled_ns - self._clock.now())
                if not job.done.wait(self._stuck_after_s if wait else left_ns / NS):
                    if not wait:
                        return False
                    raise stuck(
                        "the model",
                        f"the copy of swap {transfer.swap_id}, layer {transfer.layer}",
                        "h2d",
                        self._stuck_after_s,
                    )
            if not self._paced:
                start_ns = self._clock.at(job.t0_ns)
            real_ns = start_ns + job.work_ns(transfer.part)
            if transfer.waited or not self._paced:
                real_ns = self._clock.at(job.t1_ns)
        waiting.popleft()
        transfer.t0_ns, transfer.t1_ns = start_ns, max(modelled_ns, real_ns)
        transfer.overrun = self._paced and real_ns > modelled_ns
        self._free_ns = transfer.t1_ns
        self._on_settled(transfer)
        return True

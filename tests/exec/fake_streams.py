"""Streams of host memory that do their queued work late, in any order that CUDA would allow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class FakeEvent:
    def __init__(self, streams: FakeStreams) -> None:
        self._streams, self.done, self.at_ns = streams, False, 0

    def query(self) -> bool:
        self._streams.go_on(1)
        return self.done

    def synchronize(self) -> None:
        self._streams.run_until(self)


class FakeStream:
    """`waits`: False ignores the guards of this stream (sabotage)."""

    def __init__(self, streams: FakeStreams, *, eager: bool, waits: bool) -> None:
        self._streams, self._eager, self._waits = streams, eager, waits
        self.queue: list[Any] = []  # callables, and (event, "record" | "wait")

    def _put(self, item: Any) -> None:
        with self._streams.lock:
            self.queue.append(item)
            if self._eager:
                while self.queue:
                    self._streams.step(self)

    def run(self, work: Callable[[], None]) -> None:
        self._put(work)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._streams)
        self._put((event, "record"))
        return event

    def wait(self, event: Any) -> None:
        if self._waits:
            self._put((event, "wait"))


class FakeStreams:
    """choose(n) < n picks which stream goes on. eager: compute runs as it is given, as torch does.

    no_wait: streams whose waits are ignored.
    """

    def __init__(
        self, choose: Callable[[int], int], *, eager: bool = True, no_wait: str = ""
    ) -> None:
        self.lock, self._choose, self._now_ns = threading.RLock(), choose, 0
        self.device = torch.device("cpu")
        self.compute = FakeStream(self, eager=eager, waits=no_wait != "compute")
        self.critical = FakeStream(self, eager=False, waits=no_wait != "critical")
        self.promotion = FakeStream(self, eager=False, waits=no_wait != "promotion")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype)
        memory.view(torch.uint8).fill_(0xFF)
        return memory

    def ns_between(self, earlier: Any, later: Any) -> int:
        return int(later.at_ns - earlier.at_ns)

    def step(self, stream: FakeStream) -> None:
        """The stream's next piece; at a wait, whatever has to be done first."""
        item = stream.queue[0]
        self._now_ns += 1
        if not isinstance(item, tuple):
            del stream.queue[0]
            item()
        elif item[1] == "record":
            del stream.queue[0]
            item[0].done, item[0].at_ns = True, self._now_ns
        elif item[0].done:
            del stream.queue[0]
        else:
            self._any(but=stream)

    def _any(self, but: FakeStream | None = None) -> bool:
        able = [
            s
            for s in (self.compute, self.critical, self.promotion)
            if s is not but and s.queue and not self._blocked(s)
        ]
        if able:
            self.step(able[self._choose(len(able))])
        return bool(able)

    @staticmethod
    def _blocked(stream: FakeStream) -> bool:
        item = stream.queue[0]
        return isinstance(item, tuple) and item[1] == "wait" and not item[0].done

    def go_on(self, at_most: int) -> None:
        with self.lock:
            for _ in range(self._choose(at_most + 1)):
                self._any()

    def run_until(self, event: FakeEvent) -> None:
        with self.lock:
            while not event.done:
                assert self._any(), "deadlock: nothing that was queued can run"

"""Streams and events as `CudaDevice` needs them, and torch.cuda's.

A stream does its work in order. Work of two streams is ordered only by an event that one records
and the other waits for (CUDA C++ Programming Guide, 3.2.8 Asynchronous Concurrent Execution).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kairox_exec.oplog import NS

_CUDA: Any = torch.cuda  # parts of it are untyped


class Event(Protocol):
    def query(self) -> bool:
        """Whether everything recorded before it is done."""
        ...

    def synchronize(self) -> None:
        """Let the calling thread wait for it."""
        ...


class Stream(Protocol):
    def run(self, work: Callable[[], None]) -> None:
        """Queue the device work that `work` launches."""
        ...

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """What is queued from now on runs after the event."""
        ...


class Streams(Protocol):
    """compute: the model's. critical: the host's inputs and partial sums. promotion: the swaps."""

    device: torch.device
    compute: Stream
    critical: Stream
    promotion: Stream

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory, which copies need to be asynchronous."""
        ...

    def ns_between(self, earlier: Event, later: Event) -> int:
        """Of two events that are done."""
        ...


class _TorchStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event: Any = _CUDA.Event(enable_timing=True)
        event.record(self._stream)
        return event  # type: ignore[no-any-return]

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)


class TorchStreams:
    """Of torch.cuda; compute is the stream that is current when this is made."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        least = 0  # CUDA: 0 is the lowest priority, negative ones are higher
        self.compute: Stream = _TorchStream(torch.cuda.current_stream())
        self.critical: Stream = _TorchStream(_CUDA.Stream(priority=-1))
        self.promotion: Stream = _TorchStream(_CUDA.Stream(priority=least))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def ns_between(self, earlier: Any, later: Any) -> int:
        return round(float(earlier.elapsed_time(later)) * 1e-3 * NS)

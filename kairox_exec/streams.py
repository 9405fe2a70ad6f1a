"""Streams and events as `CudaDevice` needs them, and torch.cuda's.

A stream does its work in order. Work of two streams is ordered only by an event that one records
and the other waits for (CUDA C++ Programming Guide, 3.2.8 Asynchronous Concurrent Execution).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from kairox_exec.oplog import NS
from kairox_sim.errors import KairoxError

POLL_S = 20e-6  # between two looks at an event, while a thread waits for it with a time limit


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

    def pinned(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes]: page-locked host memory, which copies need to be asynchronous."""
        ...

    def lock_pages(self, rows: torch.Tensor) -> str:
        """Page-lock host memory where it lies; why not, where that is refused."""
        ...

    def unlock_pages(self, rows: torch.Tensor) -> None: ...

    def ns_between(self, earlier: Event, later: Event) -> int:
        """Of two events that are done."""
        ...

    def pause(self) -> None:
        """Let a little time pass, for who waits with a time limit."""
        ...

    def free_bytes(self) -> int | None:
        """Free device memory; None where nobody knows."""
        ...


class _TorchStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        new: Any = torch.cuda.Event  # untyped
        event = new(enable_timing=True)
        event.record(self._stream)
        return event  # type: ignore[no-any-return]

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)


def _runtime() -> Any:
    get: Any = torch.cuda.cudart  # untyped
    return get()


class TorchStreams:
    """Of torch.cuda; compute is the stream that is current when this is made."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        new: Any = torch.cuda.Stream  # untyped
        self.compute: Stream = _TorchStream(torch.cuda.current_stream())
        # CUDA: 0 is the lowest priority, negative ones are higher.
        self.critical: Stream = _TorchStream(new(priority=-1))
        self.promotion: Stream = _TorchStream(new(priority=0))

    def pinned(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def lock_pages(self, rows: torch.Tensor) -> str:
        n_bytes = rows.numel() * rows.element_size()
        code = int(_runtime().cudaHostRegister(rows.data_ptr(), n_bytes, 0))
        if code == 0:
            return ""
        self._forget_last_error()
        return f"cudaHostRegister of {n_bytes:,} bytes: CUDA error {code}"

    def unlock_pages(self, rows: torch.Tensor) -> None:
        if int(_runtime().cudaHostUnregister(rows.data_ptr())) != 0:
            self._forget_last_error()

    def _forget_last_error(self) -> None:
        """CUDA keeps the latest error, and torch would raise it for the next kernel it launches.

        torch has no cudaGetLastError (its pull request 165990), but asks it after every launch.
        """
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)

    def ns_between(self, earlier: Any, later: Any) -> int:
        return round(float(earlier.elapsed_time(later)) * 1e-3 * NS)

    def pause(self) -> None:
        time.sleep(POLL_S)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)


@contextmanager
def enough_memory(streams: Streams, n_bytes: int) -> Iterator[None]:
    """KairoxError, with what is free, where the device has no memory for what is made inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = streams.free_bytes()
        has = "an unknown number of" if free is None else f"{free:,}"
        raise KairoxError(
            f"the device has {has} bytes free and {n_bytes:,} more were asked for; give fewer "
            "--slots or a smaller --vram, a smaller row format (--weights), or end what else "
            "uses the device"
        ) from error

"""Streams of this host for a rehearsal: everything is done before the call returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class _Done:
    def __init__(self) -> None:
        self.at_ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _AtOnce:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> _Done:
        return _Done()

    def wait(self, event: Any) -> None:
        pass


class HostStreams:
    """See `kairox_exec.streams.Streams`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute, self.critical, self.promotion = _AtOnce(), _AtOnce(), _AtOnce()

    def pinned(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def lock_pages(self, rows: torch.Tensor) -> str:
        return ""

    def unlock_pages(self, rows: torch.Tensor) -> None:
        pass

    def ns_between(self, earlier: Any, later: Any) -> int:
        return int(later.at_ns - earlier.at_ns)

    def pause(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        return None

"""Page-locking the rows where they lie, and pinned buffers that are used again.

`cudaHostRegister` locks exactly the pages given; torch's pinned allocator rounds up to a power of
two (PyTorch issue 95823), which is right for small buffers and costs gigabytes for a model. Where
locking is refused the rows stay pageable, and the status says so.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from kairox_exec.streams import Event, Streams


class Held:
    """Host rows whose pages are locked, until `release`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._locked: list[torch.Tensor] = []
        self._refused = ""
        self.pinned_bytes = self.pageable_bytes = 0

    @property
    def memory(self) -> str:
        """ "pinned", or "pageable: " and why; "none held" before the first rows."""
        if self._refused:
            return f"pageable: {self._refused}"
        return "pinned" if self.pinned_bytes else "none held"

    @property
    def is_pinned(self) -> bool:
        return self.pinned_bytes > 0 and not self._refused

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows. Twice the same memory is locked once."""
        n_bytes = rows.numel() * rows.element_size()
        if not n_bytes or any(rows.data_ptr() == other.data_ptr() for other in self._locked):
            return rows
        if not rows.is_pinned():
            why = self._streams.lock_pages(rows)
            if why:
                self.pageable_bytes += n_bytes
                self._refused = why
                return rows
            self._locked.append(rows)
        self.pinned_bytes += n_bytes
        return rows

    def release(self) -> None:
        for rows in self._locked:
            self._streams.unlock_pages(rows)
        self._locked.clear()


class Ring:
    """Pinned buffers; one is given again only when the event it was given back with is done."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._used: dict[int, list[tuple[Event, torch.Tensor]]] = defaultdict(list)  # by bytes
        self.n_buffers = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(the buffer, to give back; its beginning as a tensor of this shape)."""
        n_bytes = math.prod(shape) * dtype.itemsize
        size = 1 << max(12, (n_bytes - 1).bit_length())  # few sizes, so that they meet again
        used, found = self._used[size], None
        for i, (event, buffer) in enumerate(used):
            if event.query():
                found = buffer
                del used[i]
                break
        if found is None:
            found, self.n_buffers = self._streams.pinned(size), self.n_buffers + 1
        return found, found[:n_bytes].view(dtype).view(shape)

    def give(self, buffer: torch.Tensor, after: Event) -> None:
        self._used[buffer.numel()].append((after, buffer))

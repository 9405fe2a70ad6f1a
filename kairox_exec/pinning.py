"""Page-locking the rows where they lie, and pinned buffers that are used again.

`cudaHostRegister` locks exactly the pages given; torch's pinned allocator rounds up to a power of
two (PyTorch issue 95823), which is right for small buffers and costs gigabytes for a model. Where
locking is refused the rows stay pageable, and the status says so. A page is locked once: rows that
begin or end in a page of others, as small ones do that lie side by side, are copied instead.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict

import torch

from kairox_exec.streams import Event, Streams


class Held:
    """Host rows whose pages are locked, until `release`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._locked: list[torch.Tensor] = []
        self._known: dict[int, torch.Tensor] = {}  # by where they lie: as they are held
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
        """The same rows, or a pinned copy. Twice the same memory is locked once."""
        n_bytes = rows.numel() * rows.element_size()
        if not n_bytes or rows.data_ptr() in self._known:
            return self._known.get(rows.data_ptr(), rows)
        held = rows
        if not rows.is_pinned():
            if self._shares_a_page(rows):
                held = self._streams.pinned(n_bytes).view(rows.dtype).view(rows.shape).copy_(rows)
            elif why := self._streams.lock_pages(rows):
                self.pageable_bytes += n_bytes
                self._refused = why
                return rows
            else:
                self._locked.append(rows)
        self._known[rows.data_ptr()] = held
        self.pinned_bytes += n_bytes
        return held

    def release(self) -> None:
        for rows in self._locked:
            self._streams.unlock_pages(rows)
        self._locked.clear()
        self._known.clear()

    def _shares_a_page(self, rows: torch.Tensor) -> bool:
        first, last = _pages(rows)
        return any(first <= b and a <= last for a, b in map(_pages, self._locked))


def _pages(rows: torch.Tensor) -> tuple[int, int]:
    """The first and the last that hold a byte of them."""
    begin = rows.data_ptr()
    end = begin + rows.numel() * rows.element_size() - 1
    return begin // mmap.PAGESIZE, end // mmap.PAGESIZE


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

"""Three ways to bring rows over the link into slots, on the promotion stream.

uva_gather  the GPU reads pinned rows itself: no work for the CPU (needs triton)
staged      the CPU gathers into a pinned ring, one copy, and the GPU scatters
per_row     a copy for each run of adjacent rows: best for large rows
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.streams import Event, Streams
from kairox_sim.errors import KairoxError

WAYS = ("uva_gather", "staged", "per_row")
# Programs of the GPU that copy: 16 filled a PCIe 5 link for rows of 24 KiB (vLLM PR 42212: 12).
N_PROGRAMS = 16

Promote = Callable[[torch.Tensor, NDArray[np.int32], torch.Tensor, NDArray[np.int32]], None]
"""slots[places] = rows[ids], queued on the promotion stream: (rows, ids, slots, places)"""


class Ring:
    """Pinned buffers by shape; one is given again only when its event is done."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._used: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Event, torch.Tensor]]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        used = self._used.setdefault((shape, dtype), [])
        for i, (event, buffer) in enumerate(used):
            if event.query():
                del used[i]
                return buffer
        return self._streams.pinned(shape, dtype)

    def give(self, buffer: torch.Tensor, after: Event) -> None:
        self._used[tuple(buffer.shape), buffer.dtype].append((after, buffer))


def promote_with(way: str, streams: Streams) -> Promote:
    ring, stream = Ring(streams), streams.promotion

    def staged(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> None:
        buffer = ring.take((ids.size, *rows.shape[1:]), rows.dtype)
        where = ring.take((ids.size,), torch.int64)
        torch.index_select(rows, 0, torch.from_numpy(ids), out=buffer)
        where.copy_(torch.from_numpy(places))

        def work() -> None:
            to = where.to(slots.device, non_blocking=True)
            slots.index_copy_(0, to, buffer.to(slots.device, non_blocking=True))

        stream.run(work)
        done = stream.record()
        ring.give(buffer, done)
        ring.give(where, done)

    def per_row(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> None:
        for first, last in runs(ids, places):
            source = rows[int(ids[first]) : int(ids[last]) + 1]
            target = slots[int(places[first]) : int(places[last]) + 1]
            stream.run(lambda s=source, t=target: t.copy_(s, non_blocking=True))  # type: ignore[misc]

    def uva_gather(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> None:
        from kairox_exec.kernels.triton_cuda import gather_rows

        both = ring.take((2, ids.size), torch.int32)
        both[0], both[1] = torch.from_numpy(ids), torch.from_numpy(places)

        def work() -> None:
            there = both.to(slots.device, non_blocking=True)
            gather_rows(as_words(rows), there[0], as_words(slots), there[1], N_PROGRAMS)

        stream.run(work)
        ring.give(both, stream.record())

    ways: dict[str, Promote] = {"uva_gather": uva_gather, "staged": staged, "per_row": per_row}
    if way not in ways:
        raise KairoxError(f"unknown way to promote {way!r}; allowed: {', '.join(WAYS)}")
    return ways[way]


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """[n, words] int32, the same memory."""
    return rows.view(torch.uint8).reshape(rows.shape[0], -1).view(torch.int32)


def runs(ids: NDArray[np.int32], places: NDArray[np.int32]) -> list[tuple[int, int]]:
    """First and last position of each stretch in which ids and places both ascend by 1."""
    if not ids.size:
        return []
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(places) != 1)) + 1
    return list(
        zip([0, *breaks.tolist()], [*(breaks - 1).tolist(), int(ids.size) - 1], strict=True)
    )


def fastest(
    streams: Streams, rows: torch.Tensor, slots: torch.Tensor, ways: tuple[str, ...]
) -> tuple[str, dict[str, float]]:
    """The way that brings most bytes per second here, and every way's: the second of two tries.

    Overwrites `slots`. Rows are spread out, so that none can be merged.
    """
    n = min(len(slots), len(rows) // 2, 256)
    if n == 0:
        return ways[-1], {}
    ids, places = np.arange(n, dtype=np.int32) * 2, np.arange(n, dtype=np.int32)
    rates: dict[str, float] = {}
    for way in ways:
        promote = promote_with(way, streams)
        for _ in range(2):
            before = streams.promotion.record()
            promote(rows, ids, slots, places)
            after = streams.promotion.record()
            after.synchronize()
        n_bytes = n * rows[0].numel() * rows.element_size()
        rates[way] = n_bytes * 1e9 / max(1, streams.ns_between(before, after))
    return max(rates, key=lambda way: rates[way]), rates

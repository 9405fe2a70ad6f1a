"""Three ways to bring rows over the link into slots, on the promotion stream.

uva_gather  the GPU reads pinned rows itself: no work for the CPU (needs triton)
staged      the CPU gathers into a pinned ring, one copy, and the GPU scatters
per_row     a copy for each run of adjacent rows: best for large rows

Which is fastest depends on the size of rows, the link and the driver (vLLM pull request 42212 and
its issue 57555), so it is measured at the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.pinning import Ring
from kairox_exec.streams import Streams
from kairox_sim.errors import KairoxError

WAYS = ("uva_gather", "staged", "per_row")
# Programs of the GPU that copy: vLLM (pull request 42212) fills a link with 12.
N_PROGRAMS = 16
TRIED_ROWS = 128  # of the start-up measurement, about what a few plans ask for
TRIES = 3
FILL_ROWS = 4096  # rows at a time before the run


@dataclass(frozen=True, slots=True)
class Promotion:
    """slots[places] = rows[ids], to be made: `gather` if there is one, to its end, then `queue`.

    gather: reads and writes host memory only, on whatever thread. queue: launches the copy on the
    promotion stream, on the thread that runs the model, and returns.
    """

    gather: Callable[[], None] | None
    queue: Callable[[], None]

    def now(self) -> None:
        """Both, on this thread."""
        if self.gather is not None:
            self.gather()
        self.queue()


Promote = Callable[[torch.Tensor, NDArray[np.int32], torch.Tensor, NDArray[np.int32]], Promotion]
"""(rows in host memory, ids, slots, places) -> slots[places] = rows[ids], to be made"""


def promote_with(
    way: str, streams: Streams, ring: Ring, *, n_programs: int = N_PROGRAMS
) -> Promote:
    """KairoxError for a way that there is not. n_programs: of uva_gather."""
    stream = streams.promotion

    def staged(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> Promotion:
        words = as_words(rows)
        into = slots.view(len(slots), -1).view(words.dtype)
        staging, gathered = ring.take((ids.size, words.shape[1]), words.dtype)
        listed, where = ring.take((ids.size,), torch.int64)
        where.copy_(torch.from_numpy(places))
        index = torch.from_numpy(ids)

        def gather() -> None:
            torch.index_select(words, 0, index, out=gathered)

        def work() -> None:
            to = where.to(slots.device, non_blocking=True)
            into.index_copy_(0, to, gathered.to(slots.device, non_blocking=True))

        def queue() -> None:
            stream.run(work)
            done = stream.record()
            ring.give(staging, done)
            ring.give(listed, done)

        return Promotion(gather, queue)

    def per_row(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> Promotion:
        def work() -> None:
            for first, last in runs(ids, places):
                source = rows[int(ids[first]) : int(ids[last]) + 1]
                target = slots[int(places[first]) : int(places[last]) + 1]
                target.copy_(source, non_blocking=True)

        return Promotion(None, lambda: stream.run(work))

    def uva_gather(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> Promotion:
        from kairox_exec.kernels.triton_cuda import gather_rows

        words = as_words(rows)
        into = slots.view(len(slots), -1).view(words.dtype)
        listed, both = ring.take((2, ids.size), torch.int32)
        both[0], both[1] = torch.from_numpy(ids), torch.from_numpy(places)

        def work() -> None:
            there = both.to(slots.device, non_blocking=True)
            gather_rows(words, there[0], into, there[1], n_programs)

        def queue() -> None:
            stream.run(work)
            ring.give(listed, stream.record())

        return Promotion(None, queue)

    ways: dict[str, Promote] = {"uva_gather": uva_gather, "staged": staged, "per_row": per_row}
    if way not in ways:
        raise KairoxError(f"unknown promotion {way!r}; allowed: auto, {', '.join(WAYS)}")
    return ways[way]


def possible_ways(streams: Streams, rows: torch.Tensor, *, pinned: bool) -> tuple[str, ...]:
    """uva_gather reads whole words of pinned host memory from a CUDA card, and needs triton."""
    whole = as_words(rows).dtype in (torch.int64, torch.int32)
    gathers = pinned and whole and streams.device.type == "cuda" and find_spec("triton") is not None
    return WAYS if gathers else WAYS[1:]


def choose_promotion(
    streams: Streams, ring: Ring, rows: torch.Tensor, ways: Sequence[str]
) -> tuple[str, dict[str, float]]:
    """(the fastest of `ways` for such rows, bytes per second of each), the best of a few tries.

    From the call until the rows are there, so that what a way takes of the CPU counts. No two rows
    are adjacent.
    """
    n = min(len(rows) // 2, TRIED_ROWS)
    if n == 0:
        return ways[-1], {}
    ids, places = np.arange(n, dtype=np.int32) * 2, np.arange(n, dtype=np.int32)[::-1].copy()
    slots = torch.empty((n, *rows.shape[1:]), dtype=rows.dtype, device=streams.device)
    streams.promotion.wait(streams.compute.record())
    n_bytes = n * rows[0].numel() * rows.element_size()
    rates: dict[str, float] = {}
    for way in ways:
        promote, took = promote_with(way, streams, ring), []
        for _ in range(TRIES + 1):  # the first compiles kernels and allocates buffers
            began_s = time.perf_counter()
            promote(rows, ids, slots, places).now()
            streams.promotion.record().synchronize()
            took.append(time.perf_counter() - began_s)
        rates[way] = n_bytes / max(min(took[1:]), 1e-9)
    return max(rates, key=lambda way: rates[way]), rates


def fill_slots(
    rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
) -> None:
    """slots[places] = rows[ids] before the run, on the current stream."""
    for at in range(0, ids.size, FILL_ROWS):
        here = slice(at, at + FILL_ROWS)
        to = torch.from_numpy(places[here]).long().to(slots.device)
        slots.index_copy_(0, to, rows[torch.from_numpy(ids[here])].to(slots.device))


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """Host rows as [n, words], the same memory, in the widest integers that fit.

    Scattering single bytes takes seven times as long as scattering int64 (measured on a CPU).
    """
    flat = rows.view(len(rows), -1)
    element = flat.element_size()
    lengths = (flat.shape[1] * element, flat.storage_offset() * element, rows.data_ptr())
    for dtype in (torch.int64, torch.int32, torch.int16):
        if not any(length % dtype.itemsize for length in lengths):
            return flat.view(dtype)
    return flat.view(torch.uint8)


def runs(ids: NDArray[np.int32], places: NDArray[np.int32]) -> list[tuple[int, int]]:
    """First and last position of each stretch in which ids and places both ascend by 1."""
    if not ids.size:
        return []
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(places) != 1)) + 1
    return list(
        zip([0, *breaks.tolist()], [*(breaks - 1).tolist(), int(ids.size) - 1], strict=True)
    )

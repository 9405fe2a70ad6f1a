"""Part 1: how fast bundles reach the device, by row size, number of rows and way of copying.

The ways are the executor's own (kairox_exec.promote), and so are the streams, the pinned ring and
the choice between them at the start; rows in one piece are the ceiling. Each is timed on an idle
card and beside a stream of matrix-vector products, whose own slowing down is measured too: copies
by the GPU's programs take multiprocessors from what runs beside them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.gpu_check.place import Left, Place
from kairox_exec.pinning import Held, Ring
from kairox_exec.promote import (
    WAYS,
    Promote,
    Promotion,
    choose_promotion,
    possible_ways,
    promote_with,
)
from kairox_exec.streams import Streams

ROW_BYTES = (6912, 16384, 24576, 49152)  # a 7B's bundles: q4_0, bfloat16 of two rows, of three
N_ROWS = (16, 64, 256, 1024)
PROGRAMS = (4, 8, 16, 32)
TABLE_ROWS = 4096
REPEATS = 5
MOST_PRODUCTS = 400  # queued beside one copy
CEILING = "one copy"
MEMORIES = ("pinned by torch", "registered", "pageable")


@dataclass(frozen=True, slots=True)
class Ask:
    """slots[places] = rows[ids], of int64 words."""

    rows: torch.Tensor  # [n, words], host
    slots: torch.Tensor  # [m, words], device
    ids: NDArray[np.int32]  # [k]
    places: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one promotion."""

    whole: float  # from the call until the rows are there, with the gather on this thread
    launching: float  # of it, what the thread that launches is held up: all but the gather


def check_links(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    """Passes where every way copied every row it was asked for, and nothing was left out."""
    sizes, counts, n_table = ROW_BYTES, N_ROWS, TABLE_ROWS
    if place.rehearse:
        sizes, counts, n_table = (256, 512), (4, 16), 64
    streams = place.new_streams()
    product = _products(place)
    rows: list[dict[str, Any]] = []
    chosen, left_out = [], []
    for memory in MEMORIES:
        for row_bytes in sizes:
            with _host_table(streams, memory, n_table, row_bytes // 8) as table:
                about = {"memory": memory, "row_bytes": row_bytes}
                allowed = possible_ways(streams, table, pinned=memory != "pageable")
                chosen.append(about | _chosen(streams, table, allowed))
                for n in counts:
                    ask = _ask(streams, table, n)
                    for name, promote in _ways(streams, allowed).items():
                        if left() < 1:
                            left_out.append([memory, row_bytes, n, name])
                            continue
                        found = _timed(streams, ask, promote, None if place.rehearse else product)
                        right = _is_right(ask, in_one_piece=name == CEILING)
                        of = {"n_rows": n, "way": name, "copied_right": right}
                        rows.append(about | of | found)
    wrong = [row for row in rows if not row["copied_right"]]
    return {
        "passed": not wrong and not left_out,
        "said": f"{len(rows)} ways and sizes, {len(wrong)} copied wrongly; " + _best(rows),
        "rows": rows,
        "chosen_at_start": chosen,
        "left_out_for_lack_of_time": left_out,
    }


def _ways(streams: Streams, allowed: Sequence[str]) -> dict[str, Promote]:
    """What is timed, by name; uva_gather by the number of its programs."""
    ring, ways = Ring(streams), {CEILING: _one_copy(streams)}
    for way in WAYS:
        if way not in allowed:
            continue
        if way == "uva_gather":
            for n in PROGRAMS:
                ways[f"{way} {n} programs"] = promote_with(way, streams, ring, n_programs=n)
        else:
            ways[way] = promote_with(way, streams, ring)
    return ways


def _one_copy(streams: Streams) -> Promote:
    """The first rows into the first slots: as many bytes, in one piece. Nothing can be faster."""

    def promote(
        rows: torch.Tensor, ids: NDArray[np.int32], slots: torch.Tensor, places: NDArray[np.int32]
    ) -> Promotion:
        def work() -> None:
            slots[: ids.size].copy_(rows[: ids.size], non_blocking=True)

        return Promotion(None, lambda: streams.promotion.run(work))

    return promote


def _chosen(streams: Streams, table: torch.Tensor, allowed: Sequence[str]) -> dict[str, Any]:
    """What an executor with such rows would take, and why."""
    way, rates = choose_promotion(streams, Ring(streams), table, allowed)
    return {"way": way, "bytes_per_s": rates}


def _timed(
    streams: Streams, ask: Ask, promote: Promote, product: Callable[[], None] | None
) -> dict[str, Any]:
    def copy() -> Took:
        began = time.perf_counter()
        promotion = promote(ask.rows, ask.ids, ask.slots, ask.places)
        asked = time.perf_counter()
        if promotion.gather is not None:
            promotion.gather()
        gathered = time.perf_counter()
        promotion.queue()
        queued = time.perf_counter()
        streams.promotion.record().synchronize()
        whole = time.perf_counter() - began
        return Took(whole, (asked - began) + (queued - gathered))

    def clear() -> None:
        ask.slots.fill_(-1)

    streams.promotion.run(clear)
    copy()  # compiles kernels and allocates buffers
    took = [copy() for _ in range(REPEATS)]
    idle_s = median(one.whole for one in took)
    beside = {} if product is None else _beside(copy, product, idle_s)
    return {
        "idle_s": idle_s,
        "idle_bytes_per_s": ask.ids.size * ask.rows.shape[1] * 8 / idle_s,
        "launching_s": median(one.launching for one in took),
        **beside,
    }


def _is_right(ask: Ask, *, in_one_piece: bool) -> bool:
    """Whether the rows are in their places, and nothing is anywhere else."""
    ids, places = torch.from_numpy(ask.ids).long(), torch.from_numpy(ask.places).long()
    if in_one_piece:
        ids = places = torch.arange(len(ids))
    wanted = torch.full(ask.slots.shape, -1, dtype=torch.int64)
    wanted[places] = ask.rows[ids]
    return torch.equal(ask.slots.cpu(), wanted)


def _beside(
    copy: Callable[[], Took], product: Callable[[], None], idle_s: float
) -> dict[str, float]:
    """The same copies while products are queued for at least twice as long."""
    alone_s = _seconds_each(product, 20)
    n = min(MOST_PRODUCTS, math.ceil(2 * idle_s / alone_s) + 4)
    queued_s = _seconds_each(product, n)
    copies, products = [], []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(n):
            product()
        end.record()
        copies.append(copy().whole)
        torch.cuda.synchronize()
        products.append(begin.elapsed_time(end) / 1000 / n)
    return {
        "beside_products_s": median(copies),
        "product_alone_s": queued_s,
        "product_beside_copy_s": median(products),
        "n_products": n,
    }


def _seconds_each(product: Callable[[], None], n: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(n):
        product()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / n


def _products(place: Place) -> Callable[[], None]:
    """A decode token's product with one FFN matrix of a 7B: reads 90 MB of device memory."""
    shape = (64, 32) if place.rehearse else (11008, 4096)
    matrix = torch.ones(shape, dtype=torch.bfloat16, device=place.device)
    vector = torch.ones((1, shape[1]), dtype=torch.bfloat16, device=place.device)

    def product() -> None:
        torch.nn.functional.linear(vector, matrix)

    return product


@contextmanager
def _host_table(streams: Streams, memory: str, n: int, words: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(n + words)
    table = torch.randint(0, 2**62, (n, words), generator=draw)
    if memory == "pinned by torch":
        yield streams.pinned(table.numel() * 8).view(torch.int64).view(n, words).copy_(table)
        return
    if memory == "pageable":
        yield table
        return
    held = Held(streams)
    held.hold(table)
    if not held.is_pinned:
        raise RuntimeError(held.memory)
    try:
        yield table
    finally:
        streams.promotion.record().synchronize()
        held.release()


def _ask(streams: Streams, table: torch.Tensor, k: int) -> Ask:
    draw = np.random.default_rng(k)
    ids = draw.permutation(len(table))[:k].astype(np.int32)
    places = draw.permutation(2 * k)[:k].astype(np.int32)
    slots = torch.empty((2 * k, table.shape[1]), dtype=torch.int64, device=streams.device)
    return Ask(table, slots, ids, places)


def _best(rows: Sequence[dict[str, Any]]) -> str:
    """The fastest way of the most rows of each size, on an idle card, and what there is to gain."""
    said = []
    most = max((row["n_rows"] for row in rows), default=0)
    for row_bytes in sorted({row["row_bytes"] for row in rows}):
        here = [row for row in rows if row["row_bytes"] == row_bytes and row["n_rows"] == most]
        best = min((r for r in here if r["way"] != CEILING), key=lambda row: row["idle_s"])
        rate = best["idle_bytes_per_s"] / 1e9
        ceiling = max(row["idle_bytes_per_s"] for row in here if row["way"] == CEILING) / 1e9
        said.append(
            f"{row_bytes} B: {best['way']} ({best['memory']}), {rate:.1f} of {ceiling:.1f} GB/s"
        )
    return "; ".join(said)

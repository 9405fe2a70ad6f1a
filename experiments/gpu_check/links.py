"""Part 1: how fast bundles reach the device, by row size, number of rows and way of copying.

Each way is timed on an idle card and beside a stream of matrix-vector products, whose own slowing
down is measured too: copies by the GPU's programs take multiprocessors from what runs beside them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.gpu_check.place import Left, Place

ROW_BYTES = (6912, 16384, 24576, 49152)  # a 7B's bundles: q4_0, bfloat16 of two rows, of three
N_ROWS = (16, 64, 256, 1024)
PROGRAMS = (4, 8, 16, 32)
TABLE_ROWS = 4096
REPEATS = 5
MOST_PRODUCTS = 400  # queued beside one copy


@dataclass(frozen=True, slots=True)
class Ask:
    """slots[places] = rows[ids], as int64 words."""

    rows: torch.Tensor  # [n, words], host
    slots: torch.Tensor  # [m, words], device
    ids: torch.Tensor  # int32 [k], host
    places: torch.Tensor
    ids_d: torch.Tensor  # the same on the device
    places_d: torch.Tensor
    staging: torch.Tensor  # [k, words], pinned host memory


def per_row(ask: Ask) -> None:
    for at, place in zip(ask.ids.tolist(), ask.places.tolist(), strict=True):
        ask.slots[place].copy_(ask.rows[at], non_blocking=True)


def staged(ask: Ask) -> None:
    torch.index_select(ask.rows, 0, ask.ids, out=ask.staging)
    arrived = ask.staging.to(ask.slots.device, non_blocking=True)
    ask.slots.index_copy_(0, ask.places_d.long(), arrived)


def gather_with(n_programs: int) -> Callable[[Ask], None]:
    from kairox_exec.kernels.triton_cuda import gather_rows

    def uva_gather(ask: Ask) -> None:
        gather_rows(ask.rows, ask.ids_d, ask.slots, ask.places_d, n_programs)

    return uva_gather


def check_links(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    """Passes where every way copied every row it was asked for, and nothing was left out."""
    sizes, counts, n_table = ROW_BYTES, N_ROWS, TABLE_ROWS
    if place.rehearse:
        sizes, counts, n_table = (256, 512), (4, 16), 64
    ways: dict[str, Callable[[Ask], None]] = {"per_row": per_row, "staged": staged}
    if not place.rehearse:
        ways |= {f"uva_gather {n} programs": gather_with(n) for n in PROGRAMS}
    product = _products(place)
    rows: list[dict[str, Any]] = []
    left_out = []
    for memory in ("pinned by torch", "registered"):
        for row_bytes in sizes:
            with _host_table(place, memory, n_table, row_bytes // 8) as table:
                for n in counts:
                    ask = _ask(place, table, n)
                    for name, way in ways.items():
                        if left() < 1:
                            left_out.append([memory, row_bytes, n, name])
                            continue
                        about = {
                            "memory": memory, "row_bytes": row_bytes, "n_rows": n, "way": name
                        }  # fmt: skip
                        rows.append(about | _timed(place, ask, way, product))
    wrong = [row for row in rows if not row["copied_right"]]
    return {
        "passed": not wrong and not left_out,
        "said": f"{len(rows)} ways and sizes, {len(wrong)} copied wrongly; " + _best(rows),
        "rows": rows,
        "left_out_for_lack_of_time": left_out,
    }


def _timed(
    place: Place, ask: Ask, way: Callable[[Ask], None], product: Callable[[], None]
) -> dict[str, Any]:
    stream = None if place.rehearse else torch.cuda.Stream()
    k, words = ask.ids.shape[0], ask.rows.shape[1]
    ask.slots.fill_(-1)

    def copy() -> float:
        began = time.perf_counter()
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            way(ask)
        if stream is not None:
            stream.synchronize()
        return time.perf_counter() - began

    place.synchronize()
    copy()
    wanted = ask.rows.index_select(0, ask.ids)
    right = torch.equal(ask.slots.cpu().index_select(0, ask.places), wanted)
    idle_s = median(copy() for _ in range(REPEATS))
    beside = {} if place.rehearse else _beside(place, copy, product, idle_s)
    n_bytes = k * words * 8
    return {
        "copied_right": right,
        "idle_s": idle_s,
        "idle_bytes_per_s": n_bytes / idle_s,
        **beside,
    }


def _beside(
    place: Place, copy: Callable[[], float], product: Callable[[], None], idle_s: float
) -> dict[str, float]:
    """The same copies while products are queued for at least twice as long."""
    alone_s = _seconds_each(place, product, 20)
    n = min(MOST_PRODUCTS, math.ceil(2 * idle_s / alone_s) + 4)
    queued_s = _seconds_each(place, product, n)
    copies, products = [], []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        place.synchronize()
        begin.record()
        for _ in range(n):
            product()
        end.record()
        copies.append(copy())
        place.synchronize()
        products.append(begin.elapsed_time(end) / 1000 / n)
    return {
        "beside_products_s": median(copies),
        "product_alone_s": queued_s,
        "product_beside_copy_s": median(products),
        "n_products": n,
    }


def _seconds_each(place: Place, product: Callable[[], None], n: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    place.synchronize()
    begin.record()
    for _ in range(n):
        product()
    end.record()
    place.synchronize()
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
def _host_table(place: Place, memory: str, n: int, words: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(n + words)
    table = torch.randint(0, 2**62, (n, words), generator=draw)
    if place.rehearse:
        yield table
    elif memory == "pinned by torch":
        yield table.pin_memory()
    else:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(table.data_ptr(), table.numel() * 8, 0))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister of {table.numel() * 8} bytes: CUDA error {code}")
        try:
            yield table
        finally:
            place.synchronize()
            runtime.cudaHostUnregister(table.data_ptr())


def _ask(place: Place, table: torch.Tensor, k: int) -> Ask:
    draw = torch.Generator().manual_seed(k)
    ids = torch.randperm(table.shape[0], generator=draw)[:k].int()
    places = torch.randperm(2 * k, generator=draw)[:k].int()
    slots = torch.empty((2 * k, table.shape[1]), dtype=torch.int64, device=place.device)
    staging = torch.empty((k, table.shape[1]), dtype=torch.int64, pin_memory=not place.rehearse)
    return Ask(
        table, slots, ids, places, ids.to(place.device), places.to(place.device), staging
    )  # fmt: skip


def _best(rows: Sequence[dict[str, Any]]) -> str:
    """The fastest way of the most rows of each size, on an idle card."""
    said = []
    most = max((row["n_rows"] for row in rows), default=0)
    for row_bytes in sorted({row["row_bytes"] for row in rows}):
        here = [row for row in rows if row["row_bytes"] == row_bytes and row["n_rows"] == most]
        best = min(here, key=lambda row: row["idle_s"])
        rate = best["idle_bytes_per_s"] / 1e9
        said.append(f"{row_bytes} B: {best['way']} ({best['memory']}), {rate:.1f} GB/s")
    return "; ".join(said)

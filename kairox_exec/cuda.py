"""A CUDA card: three streams, host threads, and an event wherever one reads what another writes.

compute runs the model, critical carries the host's inputs and partial sums, promotion the swaps.
Guards: a swap starts after everything launched so far on compute, so after the last reader of its
slot; a swap counts as landed when its event is done; host buffers are reused when theirs is. Ops
are timed by events and resolved after the step. Thinking does not hold up the gpu lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.device import HandOver
from kairox_exec.host_pool import HostPool
from kairox_exec.lanes import STUCK_AFTER_S, stuck
from kairox_exec.oplog import Op, Size
from kairox_exec.pinning import Held
from kairox_exec.promote import Ring, promote_with
from kairox_exec.streams import Event, Streams, TorchStreams
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.costs import CostModel
    from kairox_sim.events import Swap
    from kairox_sim.hardware import HardwareProfile


@dataclass(slots=True, eq=False)
class _Timed:
    """An op whose times are known when its events are done."""

    op: Op
    before: Event
    after: Event


@dataclass(slots=True, eq=False)
class _Flight:
    swap: Swap
    after: Event
    waited: bool = False  # compute waits for it, so what is launched from now on finds it landed


class CudaDevice:
    """A context manager. Use it from one thread, the one that runs the model.

    streams: torch.cuda's by default. way: see `promote`; uva_gather wants pinned rows.
    """

    def __init__(
        self,
        pool: HostPool | None = None,
        *,
        streams: Streams | None = None,
        way: str = "staged",
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        if streams is None and not torch.cuda.is_available():
            raise KairoxError(
                "device 'cuda' needs a CUDA GPU and torch sees none; use cpu, or emulated"
            )
        self.costs: CostModel | None = None
        self.profile: HardwareProfile | None = None
        self.ops: list[Op] = []
        self.n_ops = self.n_overruns = 0
        self._streams = streams or TorchStreams()
        self._pool, self._way, self._stuck_after_s = pool or HostPool(), way, stuck_after_s
        self._promote = promote_with(way, self._streams)
        self._ring = Ring(self._streams)
        self._held = Held()
        self._host = self._pool.start("kairox-cpu")
        self._gave_up = False
        self._origin: tuple[Event, int] | None = None  # of the step, and its time on the host
        self._begun: dict[int, Event] = {}
        self._n_begun = self._think_ns = 0
        self._timed: list[_Timed] = []
        self._flying: list[_Flight] = []
        self._reading = False
        # Copies whose slots are still to be read.
        self._after_reading: list[tuple[Sequence[Swap], torch.Tensor, torch.Tensor]] = []
        self._given: dict[int, list[torch.Tensor]] = {}  # inputs that critical still reads

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._host.close(None if self._gave_up else self._stuck_after_s)
        finally:
            if not self._gave_up:
                for stream in (self._streams.promotion, self._streams.critical):
                    self._await(stream.record(), "close", "what was queued", "h2d")
                self._held.release()

    @property
    def host_threads(self) -> int:
        return self._pool.threads

    @property
    def decide_blocks_gpu(self) -> bool:
        return False

    @property
    def status(self) -> dict[str, str | float]:
        return {
            "device": str(self._streams.device),
            "host_threads": self._pool.threads,
            "host_nice": self._pool.nice,
            "promotion": self._way,
            "host_memory": self._held.memory,
            "pageable_bytes": self._held.pageable_bytes,
            "why_pageable": self._held.refused,
        }

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        return self._held.hold(rows) if self._streams.device.type == "cuda" else rows

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        with _enough_memory(tensor.numel() * tensor.element_size()):
            return tensor.to(self._streams.device, copy=True).contiguous()

    def new_slots(
        self, n_slots: int, n_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        with _enough_memory(n_slots * n_rows * width * dtype.itemsize):
            slots = torch.empty((n_slots, n_rows, width), dtype=dtype, device=self._streams.device)
        slots.view(torch.uint8).fill_(0xFF)
        return slots

    def fill(
        self,
        rows: torch.Tensor,
        ids: NDArray[np.int32],
        slots: torch.Tensor,
        places: NDArray[np.int32],
    ) -> None:
        to = torch.from_numpy(places).to(slots.device, torch.int64)
        slots.index_copy_(0, to, rows[torch.from_numpy(ids)].to(slots.device))

    # -- the gpu lane ---------------------------------------------------------------------------

    def start_step(self) -> int:
        self._host.raise_error()
        origin = self._streams.compute.record()
        self._await(origin, "the step's start", "what was queued", "gpu")
        self._origin = (origin, time.monotonic_ns())
        return self._origin[1]

    def end_step(self) -> int:
        assert self._origin is not None, "end_step without start_step"
        end = self._streams.compute.record()
        self._await(end, "the step's end", "what was queued", "gpu")
        later: list[_Timed] = []
        for timed in self._timed:
            if timed.after.query():
                self._log(
                    replace(timed.op, t0_ns=self._at(timed.before), t1_ns=self._at(timed.after))
                )
            else:
                later.append(timed)  # a swap that is still on the link
        self._timed = later
        return self._at(end)

    def begin(self) -> int:
        """A handle for `end`: its time is known after the step."""
        self._n_begun += 1
        self._begun[self._n_begun] = self._streams.compute.record()
        return self._n_begun

    def end(self, t0_ns: int, kind: str, layer: int, size: Size) -> None:
        before, after = self._begun.pop(t0_ns), self._streams.compute.record()
        self._timed.append(_Timed(Op("gpu", kind, layer, 0, 0, size), before, after))

    def think(self) -> None:
        self._think_ns = time.monotonic_ns()

    def thought(self, layer: int, size: Size) -> None:
        self._log(Op("planner", "decide", layer, self._think_ns, time.monotonic_ns(), size))

    # -- the host -------------------------------------------------------------------------------

    def hand_over(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        works: Sequence[Callable[..., torch.Tensor]],
        size: Size,
    ) -> HandOver:
        streams = self._streams
        streams.critical.wait(streams.compute.record())  # compute writes the inputs
        on_host = [self._ring.take(tuple(t.shape), t.dtype) for t in inputs]
        before = streams.critical.record()
        for host, tensor in zip(on_host, inputs, strict=True):
            streams.critical.run(partial(_copy, host, tensor))
        arrived = streams.critical.record()
        n_bytes = float(sum(t.numel() * t.element_size() for t in inputs))
        moved = replace(size, n_bytes=n_bytes)
        self._timed.append(_Timed(Op("d2h", "x", layer, 0, 0, moved), before, arrived))

        def after_arrival(work: Callable[..., torch.Tensor]) -> torch.Tensor:
            arrived.synchronize()
            return work(*on_host)

        jobs = self._host.submit([partial(after_arrival, work) for work in works])
        handed = HandOver(layer, size, time.monotonic_ns(), jobs)
        self._given[id(handed)] = [*on_host, *inputs]
        return handed

    def join(self, handed: HandOver) -> torch.Tensor:
        layer, streams = handed.layer, self._streams
        for i, job in enumerate(handed.jobs):
            if not job.done.wait(self._stuck_after_s):
                self._gave_up = True
                part = f"part {i} of the residual neurons of layer {layer}"
                raise stuck("the model", part, "cpu", self._stuck_after_s)
        self._host.raise_error()
        began_ns = min(job.t0_ns for job in handed.jobs)
        ended_ns = max(job.t1_ns for job in handed.jobs)
        self._log(Op("cpu", "residual", layer, began_ns, ended_ns, handed.size))
        first: torch.Tensor = handed.jobs[0].result
        sums = self._ring.take(tuple(first.shape), first.dtype)
        sums.copy_(first)
        for job in handed.jobs[1:]:  # in this order whoever was first
            sums += job.result
        on_device = torch.empty(first.shape, dtype=first.dtype, device=streams.device)
        # The allocator may have given memory that compute still reads.
        streams.critical.wait(streams.compute.record())
        before = streams.critical.record()
        streams.critical.run(partial(_copy, on_device, sums))
        arrived = streams.critical.record()
        idle_from = streams.compute.record()
        streams.compute.wait(arrived)
        idle_to = streams.compute.record()
        n_bytes = float(sums.numel() * sums.element_size())
        moved = replace(handed.size, n_bytes=n_bytes)
        self._timed += [
            _Timed(Op("h2d", "partial sums", layer, 0, 0, moved), before, arrived),
            _Timed(Op("idle", "cpu", layer, 0, 0, Size()), idle_from, idle_to),
        ]
        self._ring.give(sums, arrived)
        kept = self._given.pop(id(handed))
        for host in kept[: len(kept) // 2]:
            self._ring.give(host, arrived)
        return on_device

    # -- the link -------------------------------------------------------------------------------

    def copy(
        self,
        swaps: Sequence[Swap],
        rows: torch.Tensor,
        slots: torch.Tensor,
        *,
        at_once: bool = False,
    ) -> None:
        if self._reading:
            self._after_reading.append((swaps, rows, slots))
            return
        stream = self._streams.promotion
        stream.wait(self._streams.compute.record())  # which may still read what is overwritten
        row_bytes = float(rows[0].numel() * rows.element_size())
        for swap in swaps:
            before = stream.record()
            self._promote(rows, swap.promote, slots, swap.slots)
            after = stream.record()
            n = int(swap.promote.size)
            op = Op("h2d", "swap", swap.layer, 0, 0, Size(neurons=n, n_bytes=n * row_bytes))
            self._timed.append(_Timed(op, before, after))
            if at_once:
                self._await(after, "the model", f"swap {swap.id}, layer {swap.layer}", "h2d")
            else:
                self._flying.append(_Flight(swap, after))

    def reading(self) -> None:
        self._reading = True

    def read(self) -> None:
        self._reading = False
        for swaps, rows, slots in self._after_reading:
            self.copy(swaps, rows, slots)
        self._after_reading.clear()

    def landed(self) -> list[int]:
        self._host.raise_error()
        n = 0  # one stream: they land in issue order
        while n < len(self._flying) and (self._flying[n].waited or self._flying[n].after.query()):
            n += 1
        landed, self._flying = self._flying[:n], self._flying[n:]
        return [flight.swap.id for flight in landed]

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        last = max((i for i, f in enumerate(self._flying) if f.swap.id in swap_ids), default=-1)
        if last < 0:
            return
        compute, flight = self._streams.compute, self._flying[last]
        before = compute.record()
        compute.wait(flight.after)
        idle = Op("idle", "io", flight.swap.layer, 0, 0, Size())
        self._timed.append(_Timed(idle, before, compute.record()))
        for earlier in self._flying[: last + 1]:
            earlier.waited = True

    def drop_copies(self) -> None:
        swap_ids = [flight.swap.id for flight in self._flying]
        done = self._streams.promotion.record()
        self._await(done, "the end of the run", f"swaps {swap_ids}", "h2d")
        self._flying.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _await(self, event: Event, who: str, what: str, lane: str) -> None:
        until_s = time.monotonic() + self._stuck_after_s
        while not event.query():
            if time.monotonic() > until_s:
                self._gave_up = True
                raise stuck(who, what, lane, self._stuck_after_s)
            time.sleep(0)

    def _at(self, event: Event) -> int:
        """On the host's monotonic clock."""
        assert self._origin is not None
        return self._origin[1] + self._streams.ns_between(self._origin[0], event)

    def _log(self, op: Op) -> None:
        self.ops.append(op)
        self.n_ops += 1


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


@contextmanager
def _enough_memory(n_bytes: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        has = "an unknown number of" if free is None else f"{free:,}"
        raise KairoxError(
            f"the device has {has} bytes free and {n_bytes:,} were asked for; give fewer --slots, "
            "a smaller row format (--weights), or end what else uses the device"
        ) from error

"""A CUDA card: three streams, host threads, and an event wherever one reads what another writes.

compute runs the model, critical carries the host's inputs and partial sums, promotion the swaps.

  who writes                 what                  waits for
  critical  pinned input     the GPU's x, act      compute, which makes them
  a host thread reads        the pinned input      its copy (the thread sleeps on the event)
  critical  sums on device   the one buffer        compute, which read the sums before (as for x)
  compute   the FFN's output sums on device        their copy
  promotion a slot           its new bundle        compute, whose last reader of it is launched
  compute   reads a slot                           its copy: landed is when its event is done
  the CPU   a pinned buffer  anything              the copy that read it last (see Ring)
  promotion a pinned buffer  read by its copy      the thread that gathers into it (see Flights)

Ops of the GPU are timed by events and resolved when the step has ended, on the host's clock.
Thinking goes on beside what the GPU has been given; where the GPU runs dry meanwhile, that is
logged as idle for a decision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.device import HandOver
from kairox_exec.flights import Flight, Flights, Timed
from kairox_exec.host_pool import HostPool
from kairox_exec.lanes import STUCK_AFTER_S, Job, stuck
from kairox_exec.oplog import Op, Size, gaps
from kairox_exec.pinning import Held, Ring
from kairox_exec.promote import fill_slots
from kairox_exec.streams import POLL_S, Event, Streams, TorchStreams, enough_memory
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.costs import CostModel
    from kairox_sim.events import Swap
    from kairox_sim.hardware import HardwareProfile


@dataclass(slots=True, eq=False)
class _Given:
    """What a hand-over keeps alive until it is joined."""

    buffers: list[torch.Tensor]  # pinned
    inputs: Sequence[torch.Tensor]  # on the device
    began_ns: list[int]  # when each part had its inputs


class CudaDevice:
    """A context manager. Use it from one thread, the one that runs the model.

    promotion: see `promote`; auto measures on the first rows that are held. streams: torch.cuda's
    by default. stuck_after_s: how long anything may be waited for before the run is given up.
    """

    def __init__(
        self,
        pool: HostPool | None = None,
        *,
        promotion: str = "auto",
        streams: Streams | None = None,
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
        self._pool, self._stuck_after_s = pool or HostPool(), stuck_after_s
        self._ring, self._held = Ring(self._streams), Held(self._streams)
        self._host = self._pool.start("kairox-cpu")
        self._gave_up = False  # something is stuck: do not wait for it again
        self._origin: tuple[Event, int] | None = None  # of the step, and its time on the host
        self._begun: dict[int, Event] = {}
        self._n_begun = self._think_ns = 0
        self._thinking = self._reading = False
        self._timed: list[Timed] = []
        self._decided: list[Op] = []  # of this step
        # Copies are queued when thinking, and reading, has ended.
        self._flights = Flights(
            self._streams, self._ring, self._held, promotion, lambda t: self._timed.append(t)
        )
        self._given: dict[int, _Given] = {}  # by id of the hand-over
        self._sums = torch.empty(0, dtype=torch.uint8, device=self._streams.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pages stay locked where the device may still be reading them: it is stuck."""
        for threads in (self._host, self._flights):
            threads.close(None if self._gave_up else self._stuck_after_s)
        if not self._gave_up:
            for stream in (self._streams.promotion, self._streams.critical):
                self._await(stream.record(), "close", "what was queued", "h2d")
            self._held.release()

    @property
    def where(self) -> torch.device:
        return self._streams.device

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
            "host_memory": self._held.memory,
            "pinned_bytes": self._held.pinned_bytes,
            "pageable_bytes": self._held.pageable_bytes,
            "promotion": self._flights.way,
            **{f"promotion_{way}_bytes_per_s": rate for way, rate in self._flights.rates.items()},
        }

    # -- memory ---------------------------------------------------------------------------------

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        held = self._held.hold(rows)
        self._flights.suit(rows)
        return held

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        with enough_memory(self._streams, tensor.numel() * tensor.element_size()):
            return tensor.to(self._streams.device, copy=True).contiguous()

    def send(self, ids: NDArray[np.int32]) -> torch.Tensor:
        # Of pageable memory, which is read before the call returns.
        return torch.from_numpy(ids).to(self._streams.device, non_blocking=True)

    def new_slots(
        self, n_slots: int, n_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        with enough_memory(self._streams, n_slots * n_rows * width * dtype.itemsize):
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
        fill_slots(rows, ids, slots, places)

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
        later, lane = [], []
        for timed in self._timed:
            if not timed.after.query():
                later.append(timed)  # a swap that is still on the link
                continue
            op = replace(timed.op, t0_ns=self._at(timed.before), t1_ns=self._at(timed.after))
            self._log(op)
            if op.lane in ("gpu", "idle"):
                lane.append((op.t0_ns, op.t1_ns))
        self._timed = later
        for decided in self._decided:
            for t0_ns, t1_ns in gaps(lane, decided.t0_ns, decided.t1_ns):
                self._log(Op("idle", "decide", decided.layer, t0_ns, t1_ns, Size()))
        self._decided.clear()
        return self._at(end)

    def begin(self) -> int:
        """A handle for `end`: its time is known after the step."""
        self._flights.go_on()
        self._n_begun += 1
        self._begun = {self._n_begun: self._streams.compute.record()}
        return self._n_begun

    def end(self, t0_ns: int, kind: str, layer: int, size: Size) -> None:
        self._timed.append(
            Timed(
                Op("gpu", kind, layer, 0, 0, size),
                self._begun[t0_ns],
                self._streams.compute.record(),
            )
        )

    def think(self) -> None:
        self._thinking, self._think_ns = True, time.monotonic_ns()

    def thought(self, layer: int, size: Size) -> None:
        op = Op("planner", "decide", layer, self._think_ns, time.monotonic_ns(), size)
        self._thinking = False
        self._decided.append(op)
        self._log(op)
        self._start_planned()

    def wait_decided(self, layer: int) -> None:
        """The thread that launches has decided before it comes here."""

    # -- the host -------------------------------------------------------------------------------

    def hand_over(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        works: Sequence[Callable[..., torch.Tensor]],
        size: Size,
    ) -> HandOver:
        critical = self._streams.critical
        # Compute writes the inputs, and has launched what reads the sums of the layer before.
        critical.wait(self._streams.compute.record())
        taken = [self._ring.take(tuple(t.shape), t.dtype) for t in inputs]
        on_host = [host for _, host in taken]
        before = critical.record()
        for host, tensor in zip(on_host, inputs, strict=True):
            critical.run(partial(_copy, host, tensor))
        arrived = critical.record()
        n_bytes = float(sum(t.numel() * t.element_size() for t in inputs))
        moved = replace(size, n_bytes=n_bytes)
        self._timed.append(Timed(Op("d2h", "x", layer, 0, 0, moved), before, arrived))
        began_ns = [0] * len(works)

        def when_arrived(i: int) -> torch.Tensor:
            arrived.synchronize()
            began_ns[i] = time.monotonic_ns()
            return works[i](*on_host)

        jobs = self._host.submit([partial(when_arrived, i) for i in range(len(works))])
        handed = HandOver(layer, size, time.monotonic_ns(), jobs)
        self._given[id(handed)] = _Given([buffer for buffer, _ in taken], inputs, began_ns)
        return handed

    def join(self, handed: HandOver) -> torch.Tensor:
        layer, jobs, streams = handed.layer, handed.jobs, self._streams
        for i, job in enumerate(jobs):
            self._await_job(job, f"part {i} of the residual neurons of layer {layer}")
        self._host.raise_error()
        given = self._given.pop(id(handed))
        ended_ns = max(job.t1_ns for job in jobs)
        self._log(Op("cpu", "residual", layer, min(given.began_ns), ended_ns, handed.size))

        first: torch.Tensor = jobs[0].result
        buffer, sums = self._ring.take(tuple(first.shape), first.dtype)
        sums.copy_(first)
        for job in jobs[1:]:  # in this order whoever was first
            sums += job.result
        on_device = self._sums_on_device(tuple(first.shape), first.dtype)
        before = streams.critical.record()
        streams.critical.run(partial(_copy, on_device, sums))
        arrived = streams.critical.record()
        idle_from = streams.compute.record()
        streams.compute.wait(arrived)
        n_bytes = float(sums.numel() * sums.element_size())
        moved = replace(handed.size, n_bytes=n_bytes)
        self._timed += [
            Timed(Op("h2d", "partial sums", layer, 0, 0, moved), before, arrived),
            Timed(Op("idle", "cpu", layer, 0, 0, Size()), idle_from, streams.compute.record()),
        ]
        for used in (buffer, *given.buffers):
            self._ring.give(used, arrived)
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
        if at_once:
            for flight in self._flights.start(swaps, rows, slots):
                copied = self._queued(flight)
                self._await(copied, "the model", flight.named, "h2d")
                self._streams.compute.wait(copied)
            return
        self._flights.plan(swaps, rows, slots)
        self._start_planned()

    def reading(self) -> None:
        self._reading = True

    def read(self) -> None:
        self._reading = False
        self._start_planned()

    def landed(self) -> list[int]:
        self._host.raise_error()
        return self._flights.landed()

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        wanted = set(swap_ids)
        flying = self._flights.flying
        waited = [flight for flight in flying if wanted.intersection(flight.swap_ids)]
        if not waited:
            return
        compute, last = self._streams.compute, waited[-1]
        before = compute.record()
        copied = self._queued(last)
        compute.wait(copied)
        idle = Op("idle", "io", last.layer, 0, 0, Size())
        self._timed.append(Timed(idle, before, compute.record()))
        # The thread waits as well: nothing is launched meanwhile, and who is stuck can be told.
        self._await(copied, "the model", f"swaps {sorted(wanted)}, layer {last.layer}", "h2d")

    def drop_copies(self) -> None:
        for flight in self._flights.drop():
            self._await_gather(flight)
        swap_ids = [swap_id for flight in self._flights.flying for swap_id in flight.swap_ids]
        done = self._streams.promotion.record()
        self._await(done, "the end of the run", f"swaps {swap_ids}", "h2d")
        self._flights.flying.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _start_planned(self) -> None:
        if not (self._thinking or self._reading):
            self._flights.start_planned()

    def _sums_on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The buffer of partial sums; what read the last ones was launched before `hand_over`."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if self._sums.numel() < n_bytes:
            self._sums = torch.empty(n_bytes, dtype=torch.uint8, device=self._streams.device)
            # Memory that compute may still be using for what it held before.
            self._streams.critical.wait(self._streams.compute.record())
        return self._sums[:n_bytes].view(dtype).view(shape)

    def _queued(self, flight: Flight) -> Event:
        """Wait until its rows are gathered and its copy is queued: the copy's event."""
        self._await_gather(flight)
        self._flights.go_on()
        assert flight.after is not None, "gathers end in issue order"
        return flight.after

    def _await_gather(self, flight: Flight) -> None:
        if flight.gathering is not None:
            self._await_job(flight.gathering, f"the gather of {flight.named}")

    def _await_job(self, job: Job, what: str) -> None:
        """For a host thread's work; copies are queued meanwhile."""
        until_s = time.monotonic() + self._stuck_after_s
        while not job.done.wait(POLL_S if self._flights.is_gathering else self._stuck_after_s):
            self._flights.go_on()
            if time.monotonic() > until_s:
                self._gave_up = True
                raise stuck("the model", what, "cpu", self._stuck_after_s)

    def _await(self, event: Event, who: str, what: str, lane: str) -> None:
        until_s = time.monotonic() + self._stuck_after_s
        while not event.query():
            self._flights.go_on()
            if time.monotonic() > until_s:
                self._gave_up = True
                raise stuck(who, what, lane, self._stuck_after_s)
            self._streams.pause()

    def _at(self, event: Event) -> int:
        """On the host's monotonic clock."""
        assert self._origin is not None
        return self._origin[1] + self._streams.ns_between(self._origin[0], event)

    def _log(self, op: Op) -> None:
        self.ops.append(op)
        self.n_ops += 1


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)

"""The emulated machine, and the same unpaced: where neurons live, and what each op takes.

`EmulatedDevice` with costs is a paced machine: every op does its real work on real, separate
memory and lasts as long as the cost model says, or as long as the work took if that is longer
(counted as overrun; see `lanes`). Without costs it is the `cpu` device: the same, unpaced.

A lane's clock is absolute. The next op of a lane starts where the one before ended, not where its
thread woke up, so that oversleeping and the interpreter's own time fill the next op instead of
adding up between ops, as with a GPU whose launches are queued ahead. Thinking (`decide`) is the
exception: it holds up the gpu lane for as long as it really takes, or where the costs say that
launches are asynchronous (`decide_blocks_gpu` false) a lane of its own, and then its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.clock import Clock, set_timer_slack
from kairox_exec.device import HandOver
from kairox_exec.formats import as_bytes, copy_rows
from kairox_exec.host_pool import HostPool
from kairox_exec.lanes import STUCK_AFTER_S, Job, Link, Transfer, Worker, stuck
from kairox_exec.oplog import Op, Size
from kairox_exec.pacing import gpu_op_ns, in_ns
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.costs import CostModel
    from kairox_sim.events import Swap
    from kairox_sim.hardware import HardwareProfile

SYNCHRONISING = ("attention", "predict", "head")  # after these the thread is not ahead of the lane


class EmulatedDevice:
    """A machine of three in-order lanes: gpu (the calling thread), cpu and h2d (a thread each).

    A context manager. Use it from one thread, the one that runs the model: paced, that thread's
    timer slack is 1 ns inside (Linux: median oversleep 53 us instead of 104 us, measured).

    Paced, the thread sleeps to the end of attention, predict and head. After the other ops it goes
    on at once, as a host does that queues work ahead of its GPU: polling, looking up and handing
    over, 0.1-0.3 ms of interpreter that no cost model charges, and the next layer's own overhead
    fall into time that the lane is busy anyway. It is never ahead by more than a layer, and an op
    is an overrun when the lane falls behind. Between steps the machine's clock stands still, so
    that what the caller does there (recording, printing) is in no time.
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        pool: HostPool | None = None,
        *,
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self._pool = pool or HostPool()
        self._stuck_after_s = stuck_after_s
        self._gave_up = False  # a lane is stuck: do not wait for it again
        self.where, self.costs = torch.device("cpu"), costs
        self.profile: HardwareProfile | None = None
        self.ops: list[Op] = []
        self.n_ops = self.n_overruns = 0
        self.paced_ns = self.behind_ns = 0  # of gpu ops: as modelled, and by how much more
        self._paced = costs is not None
        self._clock = Clock()
        self._free_ns = 0  # gpu lane
        self._ended_ns = 0  # the last step; 0 before the first
        self._thinking_ns = 0  # when thinking began, real time; 0 while not thinking
        self._blocks = costs is None or costs.decide_blocks_gpu
        self._planner_free_ns = 0
        self._decided_ns: dict[int, int] = {}  # by layer; kept where thinking does not block
        self._thought_up: list[Transfer] = []  # copies that are given when thinking ends
        self._host_free_ns = self._d2h_free_ns = 0
        self._landed: list[tuple[int, int]] = []  # (end ns, swap id) not yet reported
        self._reading = False
        self._after_reading: list[Job] = []  # copies whose slots are still to be read
        self._silent: set[int] = set()  # swap ids that are not reported
        self._on_link: dict[int, Transfer] = {}  # swaps by id, until reported
        self._link = Link(self._clock, self._paced, self._log_transfer, stuck_after_s)
        self._host = self._pool.start("kairox-cpu")
        self._copier = Worker("kairox-h2d")
        self._slack_before = set_timer_slack(1) if self._paced else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        wait_s = None if self._gave_up else self._stuck_after_s
        try:
            self._host.close(wait_s)
        finally:
            try:
                self._copier.close(wait_s)
            finally:
                if self._slack_before is not None:
                    set_timer_slack(self._slack_before)
                    self._slack_before = None

    @property
    def host_threads(self) -> int:
        return self._pool.threads

    @property
    def decide_blocks_gpu(self) -> bool:
        return self._blocks

    @property
    def status(self) -> dict[str, str | float]:
        return {
            "device": "emulated" if self._paced else "cpu",
            "host_threads": self._pool.threads,
            "host_nice": self._pool.nice,
        }

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def send(self, ids: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(ids)

    def new_slots(
        self, n_slots: int, n_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        slots = torch.empty((n_slots, n_rows, width), dtype=dtype)
        as_bytes(slots).fill(0xFF)
        return slots

    def fill(
        self,
        rows: torch.Tensor,
        ids: NDArray[np.int32],
        slots: torch.Tensor,
        places: NDArray[np.int32],
    ) -> None:
        copy_rows(rows, ids, slots, places)

    # -- the gpu lane ---------------------------------------------------------------------------

    def start_step(self) -> int:
        self._raise_errors()
        if self._paced and self._ended_ns:
            self._clock.resume(self._ended_ns)
        self._free_ns = self._clock.now()
        return self._free_ns

    def end_step(self) -> int:
        # The lane's own time, or the thread's where it has fallen behind.
        self._ended_ns = max(self._free_ns, self._clock.now())
        # Waiting for a late copy here is outside the step, and its part inside is then logged.
        try:
            self._link.advance(self._ended_ns, wait=True)
        except KairoxError:
            self._gave_up = True
            raise
        return self._ended_ns

    def begin(self) -> int:
        return self._lane_now()

    def end(self, t0_ns: int, kind: str, layer: int, size: Size) -> None:
        real_ns = self._clock.now()
        t1_ns, overrun = real_ns, False
        if self.costs is not None:
            modelled_ns = t0_ns + gpu_op_ns(self.costs, kind, size)
            t1_ns, overrun = max(modelled_ns, real_ns), real_ns > modelled_ns
            self.paced_ns += modelled_ns - t0_ns
            self.behind_ns += t1_ns - modelled_ns
            if kind in SYNCHRONISING:
                self._clock.sleep_until(t1_ns)
        self._free_ns = t1_ns
        self._log(Op("gpu", kind, layer, t0_ns, t1_ns, size, overrun))

    def think(self) -> None:
        self._thinking_ns = self._clock.now()
        if not self._paced:
            self._free_ns = self._thinking_ns

    def thought(self, layer: int, size: Size) -> None:
        if self._blocks:
            t0_ns, t1_ns = self._free_ns, self._lane_now()
            self._free_ns = t1_ns
        else:
            # The planner's own lane: for the others no time has passed, though this thread thought.
            t0_ns = max(self._free_ns, self._planner_free_ns)
            t1_ns = t0_ns + self._clock.now() - self._thinking_ns
            self._planner_free_ns = self._decided_ns[layer] = t1_ns
            self._clock.resume(self._thinking_ns)
        self._thinking_ns = 0
        for transfer in self._thought_up:
            transfer.given_ns = t1_ns
            self._link.give(transfer)
        self._thought_up.clear()
        self._log(Op("planner", "decide", layer, t0_ns, t1_ns, size))

    def wait_decided(self, layer: int) -> None:
        if not self._blocks:
            self._idle("decide", layer, self._lane_now(), self._decided_ns.get(layer, 0))

    # -- the host -------------------------------------------------------------------------------

    def hand_over(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        works: Sequence[Callable[..., torch.Tensor]],
        size: Size,
    ) -> HandOver:
        t0_ns = max(self._lane_now(), self._d2h_free_ns)
        on_host = [tensor.clone() for tensor in inputs]
        n_bytes = float(sum(t.numel() * t.element_size() for t in on_host))
        t1_ns = given_ns = self._clock.now()
        if self.costs is not None:
            n_bytes = self.costs.act_d2h_bytes(size.n_tokens)
            t1_ns = t0_ns + in_ns(self.costs.act_d2h_s(size.n_tokens))
            given_ns = t1_ns + in_ns(self.costs.handover_s)
        self._d2h_free_ns = t1_ns
        self._log(Op("d2h", "x", layer, t0_ns, t1_ns, replace(size, n_bytes=n_bytes)))
        jobs = self._host.submit([partial(work, *on_host) for work in works])
        return HandOver(layer, size, given_ns, jobs)

    def join(self, handed: HandOver) -> torch.Tensor:
        jobs, size, layer = handed.jobs, handed.size, handed.layer
        wait_from_ns = self._lane_now()
        waited = not all(job.done.is_set() for job in jobs)
        for i, job in enumerate(jobs):
            if not job.done.wait(self._stuck_after_s):
                self._gave_up = True
                part = f"part {i} of the residual neurons of layer {layer}"
                raise stuck("the model", part, "cpu", self._stuck_after_s)
        self._raise_errors()
        began_ns = min(job.t0_ns for job in jobs)
        work_ns = max(job.t1_ns for job in jobs) - began_ns
        t0_ns, overrun = self._clock.at(began_ns), False
        t1_ns = t0_ns + work_ns
        if self.costs is not None:
            t0_ns = max(handed.given_ns, self._host_free_ns)
            modelled_ns = t0_ns + in_ns(self.costs.ffn_cpu_s(size.neurons, size.n_tokens))
            real_ns = t1_ns if waited else t0_ns + work_ns
            t1_ns, overrun = max(modelled_ns, real_ns), real_ns > modelled_ns
        self._host_free_ns = t1_ns
        self._log(Op("cpu", "residual", layer, t0_ns, t1_ns, size, overrun))
        back_from_ns = self._clock.now()
        on_device: torch.Tensor = jobs[0].result.clone()
        for job in jobs[1:]:  # in this order whoever was first
            on_device += job.result
        arrived_ns = self._clock.now()
        if self.costs is not None:
            transfer = Transfer(
                "partial sums",
                layer,
                given_ns=t1_ns,
                duration_ns=in_ns(self.costs.act_h2d_s(size.n_tokens)),
                size=replace(size, n_bytes=self.costs.act_h2d_bytes(size.n_tokens)),
                job=None,
            )
            self._link.give(transfer)
            # Only this thread gives transfers, and it waits for this one: nothing can precede it.
            self._link.settle(transfer)
            arrived_ns = transfer.t1_ns + in_ns(self.costs.handover_s)
        else:
            moved = replace(size, n_bytes=float(on_device.numel() * on_device.element_size()))
            self._log(Op("h2d", "partial sums", layer, back_from_ns, arrived_ns, moved))
        self._idle("cpu", layer, wait_from_ns, arrived_ns)
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
        # One gather does the real work of a whole plan; each swap has a time of its own.
        ids = np.concatenate([swap.promote for swap in swaps])
        places = np.concatenate([swap.slots for swap in swaps])
        job = Job(lambda: copy_rows(rows, ids, slots, places))
        if self._reading:
            self._after_reading.append(job)
        else:
            self._copier.submit(job)
        given_ns = self._lane_now()
        row_bytes = float(rows[0].numel() * rows.element_size())
        for swap in swaps:
            n = int(swap.promote.size)
            duration_ns, n_bytes = 0, n * row_bytes
            if self.costs is not None:
                duration_ns, n_bytes = in_ns(self.costs.swap_s(n)), self.costs.swap_bytes(n)
            size = Size(neurons=n, n_bytes=n_bytes)
            transfer = Transfer(
                "swap", swap.layer, given_ns, duration_ns, size, job, swap.id, n / ids.size
            )
            if self._thinking_ns:
                self._thought_up.append(transfer)
            else:
                self._link.give(transfer)
            if at_once:
                self._silent.add(swap.id)
            else:
                self._on_link[swap.id] = transfer
        if at_once:
            if not job.done.wait(self._stuck_after_s):
                self._gave_up = True
                named = f"the copies of swaps {[swap.id for swap in swaps]}, layer {swaps[0].layer}"
                raise stuck("the model", named, "h2d", self._stuck_after_s)
            self._raise_errors()

    def reading(self) -> None:
        self._reading = True

    def read(self) -> None:
        self._reading = False
        for job in self._after_reading:
            self._copier.submit(job)
        self._after_reading.clear()

    def landed(self) -> list[int]:
        self._raise_errors()
        now_ns = self._lane_now()
        self._link.advance(now_ns)
        by_now = [swap_id for end_ns, swap_id in self._landed if end_ns <= now_ns]
        del self._landed[: len(by_now)]  # a lane's ends ascend
        for swap_id in by_now:
            del self._on_link[swap_id]
        return by_now

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        waited = [self._on_link[swap_id] for swap_id in swap_ids]
        if not waited:
            return
        wait_from_ns = self._lane_now()
        try:
            for transfer in waited:
                self._link.settle(transfer)
        except KairoxError:
            self._gave_up = True
            raise
        self._raise_errors()
        last = max(waited, key=lambda transfer: transfer.t1_ns)
        self._idle("io", last.layer, wait_from_ns, last.t1_ns)

    def drop_copies(self) -> None:
        try:
            self._copier.finish(self._stuck_after_s)
        except KairoxError as error:
            self._gave_up = True
            raise KairoxError(f"swaps {sorted(self._on_link)}: {error}") from error
        self._link.drop_waiting()
        self._landed.clear()
        self._on_link.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _lane_now(self) -> int:
        """Now, on the gpu lane."""
        if self._thinking_ns and self._blocks:
            return self._free_ns + self._clock.now() - self._thinking_ns
        return self._free_ns if self._paced else self._clock.now()

    def _idle(self, what: str, layer: int, from_ns: int, to_ns: int) -> None:
        """The gpu lane waits until `to_ns`; no time is lost if that has passed."""
        if to_ns > from_ns:
            self._free_ns = to_ns
            self._log(Op("idle", what, layer, from_ns, to_ns, Size()))

    def _log(self, op: Op) -> None:
        self.ops.append(op)
        self.n_ops += 1
        self.n_overruns += op.overrun

    def _log_transfer(self, transfer: Transfer) -> None:
        t = transfer
        self._log(Op("h2d", t.kind, t.layer, t.t0_ns, t.t1_ns, t.size, t.overrun))
        if t.swap_id in self._silent:
            self._silent.remove(t.swap_id)
        elif t.kind == "swap":
            self._landed.append((t.t1_ns, t.swap_id))

    def _raise_errors(self) -> None:
        self._host.raise_error()
        self._copier.raise_error()

"""The SimPy engine: GPU, CPU pool, both link directions and host DRAM around a NeuronCache.

It decides nothing and never reads a clock: the cache's policy decides, the cost model says how long
things take, the trace says what fires. Time is integer nanoseconds. One process is the GPU stream;
the host, the link and the planner are callbacks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from kairox_sim.cache import NeuronCache
from kairox_sim.costs import CostModel
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap
from kairox_sim.flows import NS, Ended, HostTraffic, capped
from kairox_sim.policies.base import Ids, Late, Share, Trigger
from kairox_sim.prediction import Predictions
from kairox_sim.record import StepRecord
from kairox_sim.timeline import Slice
from kairox_sim.trace import Trace, TraceStep
from kairox_sim.watchdog import run_to_end

LOOK_AHEAD = ("attn_in", "attn_out")
Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Run:
    """What came out: a record per step, and what was still open when the trace ended."""

    records: tuple[StepRecord, ...]
    unused_yet: int  # loads resident at the end that never met a first use
    cancelled_at_end: int  # loads still in flight at the end
    slices: tuple[Slice, ...] = ()  # busy intervals, when asked for


def run_trace(
    trace: Trace,
    cache: NeuronCache,
    costs: CostModel,
    *,
    trigger: Trigger | None = None,
    late: Late | None = None,
    predictions: Predictions | None = None,
    landings: Sequence[tuple[int, ...]] | None = None,
    keep_slices: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Run:
    """Replay `trace` through `cache` at `costs`.

    trigger, late: when plans are made and what happens to late copies; the policy's own by default.
    predictions: what the predictor says, needed by look-ahead and serial triggers.
    landings: swap ids per poll, replayed from a live run instead of decided by time.
    on_step: called after each step, for progress.
    """
    engine = _Engine(
        trace, cache, costs,
        trigger or cache.policy.default_trigger,
        late or cache.policy.default_late,
        predictions, landings, keep_slices, on_step,
    )  # fmt: skip
    return engine.run()


@dataclass(slots=True)
class _Tally:
    """Nanoseconds of one step, by what they were spent on."""

    gpu: int = 0
    cpu: int = 0
    act: int = 0
    predict: int = 0
    decide: int = 0
    wait_cpu: int = 0
    wait_io: int = 0
    wait_decide: int = 0
    swap_before: int = 0
    loads_bytes: float = 0.0


@dataclass(slots=True)
class _Engine:
    trace: Trace
    cache: NeuronCache
    costs: CostModel
    trigger: Trigger
    late: Late
    predictions: Predictions | None
    landings: Sequence[tuple[int, ...]] | None
    keep_slices: bool
    on_step: Callable[[StepRecord], None] | None

    env: simpy.Environment = field(default_factory=lambda: simpy.Environment(initial_time=0))
    traffic: HostTraffic = field(init=False)
    tally: _Tally = field(default_factory=_Tally)
    records: list[StepRecord] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)  # swap ids not yet committed, in issue order
    submitted: dict[int, int] = field(default_factory=dict)  # swap id -> when its copy was queued
    planner_free_ns: int = 0
    d2h_free_ns: int = 0
    cpu_began_ns: int = 0
    joined: Any = None  # event: the host's partial sums are on the device
    idle_for: Any = None  # (swap ids, event): the GPU waits for these landings
    wake_ns: int = -1
    n_polls: int = 0

    def __post_init__(self) -> None:
        trace, cache = self.trace, self.cache
        if (trace.header.n_layers, trace.header.n_neurons) != (cache.n_layers, cache.n_neurons):
            raise KairoxError(
                f"the trace has {trace.header.n_layers} layers of {trace.header.n_neurons} neurons "
                f"and the cache {cache.n_layers} of {cache.n_neurons}"
            )
        if self.plans and self.trigger != "after" and self.predictions is None:
            raise KairoxError(
                f"trigger {self.trigger!r} plans from predictions and none were given; "
                "use a trace with a predicted column or predictions of the active set"
            )
        self.traffic = HostTraffic(self.costs.dram_bytes_per_s)

    @property
    def now(self) -> int:
        return int(self.env.now)

    @property
    def plans(self) -> bool:
        return self.cache.policy.admits != "never"

    def run(self) -> Run:
        gpu = self.env.process(self._gpu())
        run_to_end(self.env, {"gpu": gpu})
        in_flight = list(self.cache.in_flight)
        for swap_id in in_flight:
            self.cache.cancel(swap_id)
        cancelled = self.cache.take_counts().cancelled
        self.cache.check()
        return Run(tuple(self.records), self.cache.unused_yet, cancelled, tuple(self.slices))

    # -- the GPU stream -------------------------------------------------------------------------

    def _gpu(self) -> Process:
        for step in self.trace.steps():
            began_ns = self.now
            self.tally = _Tally(swap_before=self.traffic.swap_busy_ns(began_ns))
            threshold_scale = self.cache.controller.knobs.threshold_scale
            n = step.n_tokens
            attention_ns = _ns(self.costs.attention_s(n, step.context_len))
            for layer in range(self.cache.n_layers):
                if self.trigger == "attn_in":
                    yield from self._predict_and_plan(layer + 1, step)
                yield from self._compute("attention", layer, attention_ns)
                if self.trigger == "attn_out":
                    yield from self._predict_and_plan(layer + 1, step)
                elif self.trigger == "serial":
                    yield from self._predict_and_plan(layer, step)
                elif self.costs.gating == "predicted":  # it decides what is computed
                    yield from self._predict(layer, n)
                yield from self._compute("gate", layer, _ns(self.costs.gate_s(n)))
                yield from self._ffn(layer, step)
            if self.plans and self.trigger in LOOK_AHEAD:
                yield from self._plan(0, step.last_active(0), None)
            yield from self._compute("head", -1, _ns(self.costs.head_s(1)))
            self._end_step(step, began_ns, threshold_scale)

    def _predict_and_plan(self, layer: int, step: TraceStep) -> Process:
        if layer == self.cache.n_layers:
            return
        lossy = self.costs.gating == "predicted"
        if self.plans or lossy:
            yield from self._predict(layer, step.n_tokens)
        if self.plans:
            assert self.predictions is not None
            ids, share = self.predictions.of(step, layer)
            yield from self._plan(layer, ids, share)

    def _predict(self, layer: int, n_tokens: int) -> Process:
        duration_ns = _ns(self.costs.predict_s(n_tokens))
        self.tally.predict += duration_ns
        yield from self._compute("predict", layer, duration_ns)

    def _ffn(self, layer: int, step: TraceStep) -> Process:
        if self.plans and (self.late == "stall" or self.trigger == "serial"):
            yield from self._wait_for_swaps(layer)
        active, evaluated = step.active(layer), step.evaluated(layer)
        one_token = step.n_tokens == 1  # every share is 1, which None says without an array
        if self.plans and self.trigger == "instant":
            assert self.predictions is not None
            swaps = self.cache.plan(layer, *self.predictions.of(step, layer))
            self._charge_loads(swaps)
            self._submit(swaps)
            self.cache.commit(swap.id for swap in swaps)
        else:
            self.cache.commit(self._poll())
        split = self.cache.lookup(
            layer, evaluated, active, None if one_token else step.share(layer)
        )
        n = step.n_tokens
        if split.residual.size:
            self._hand_over(layer, split.residual.size, n)
        if self.plans and self.trigger == "after":
            share = None if one_token else step.evaluated_share(layer)
            yield from self._plan(layer, evaluated, share)
        ffn_ns = _ns(self.costs.ffn_gpu_s(split.on_time.size, n))
        yield from self._compute("ffn", layer, ffn_ns)
        if split.residual.size:
            idle_ns = self.now
            yield self.joined
            self.tally.wait_cpu += self.now - idle_ns

    def _compute(self, what: str, layer: int, duration_ns: int) -> Process:
        if duration_ns:
            self.tally.gpu += duration_ns
            self._slice("gpu", what, layer, self.now, self.now + duration_ns)
            yield self.env.timeout(duration_ns)

    # -- deciding and copying -------------------------------------------------------------------

    def _plan(self, layer: int, ids: Ids, share: Share | None) -> Process:
        swaps = self.cache.plan(layer, ids, share)
        name = type(self.cache.policy).__name__.lower()
        decide_ns = _ns(self.costs.decide_s(name, len(swaps)))
        self.tally.decide += decide_ns
        self._charge_loads(swaps)
        now = self.now
        if self.costs.decide_blocks_gpu:
            self._slice("planner", "decide", layer, now, now + decide_ns)
            if decide_ns:
                self.tally.wait_decide += decide_ns
                yield self.env.timeout(decide_ns)
            self._submit(swaps)
        else:
            began_ns = max(now, self.planner_free_ns)
            self.planner_free_ns = began_ns + decide_ns
            self._slice("planner", "decide", layer, began_ns, self.planner_free_ns)
            if swaps:
                delay = self.env.timeout(self.planner_free_ns - now)
                delay.callbacks.append(lambda _: self._submit(swaps))

    def _charge_loads(self, swaps: Sequence[Swap]) -> None:
        n_loads = sum(swap.promote.size for swap in swaps)
        self.tally.loads_bytes += self.costs.swap_bytes(n_loads)

    def _submit(self, swaps: Sequence[Swap]) -> None:
        costs, now = self.costs, self.now
        self._settle()
        for swap in swaps:
            n = swap.promote.size
            n_bytes = costs.swap_bytes(n)
            cap = capped(n_bytes, costs.swap_fixed_s(n), costs.h2d_bytes_per_s)
            self.traffic.submit_swap(swap.id, n_bytes, cap)
            self.submitted[swap.id] = now
        self._settle()
        if self.idle_for is not None:
            self._check_idle()

    def _wait_for_swaps(self, layer: int) -> Process:
        """Stall until every copy of this layer has landed."""
        if self.landings is not None:
            return  # replayed landings are not a matter of time
        self._settle()
        landed = set(self.landed)
        waited = [
            swap.id
            for swap in self.cache.in_flight.values()
            if swap.layer == layer and swap.id not in landed
        ]
        if not waited:
            return
        idle_ns = self.now
        event = self.env.event()
        self.idle_for = (set(waited), event)
        yield event
        # Until the planner had queued the last of them, the GPU waited for a decision.
        decided_ns = max(idle_ns, max(self.submitted.get(i, idle_ns) for i in waited))
        self.tally.wait_decide += decided_ns - idle_ns
        self.tally.wait_io += self.now - decided_ns

    def _poll(self) -> tuple[int, ...]:
        self.n_polls += 1
        if self.landings is not None:
            if self.n_polls > len(self.landings):
                raise KairoxError(
                    f"the replayed landings end after {len(self.landings)} polls and the trace "
                    "goes on; they belong to another run"
                )
            return self.landings[self.n_polls - 1]
        self._settle()
        landed, self.landed = tuple(self.landed), []
        return landed

    # -- the host -------------------------------------------------------------------------------

    def _hand_over(self, layer: int, n_residual: int, n_tokens: int) -> None:
        """x and the gate's values go down, the pool computes, the partial sums come back."""
        costs, now = self.costs, self.now
        self.joined = self.env.event()
        began_ns = max(now, self.d2h_free_ns)
        d2h_ns = _ns(costs.act_d2h_s(n_tokens))
        self.d2h_free_ns = began_ns + d2h_ns
        self.tally.act += d2h_ns
        self._slice("d2h", "x", layer, began_ns, self.d2h_free_ns)
        cpu_at_ns = self.d2h_free_ns + _ns(costs.handover_s)
        job = (layer, n_residual, n_tokens)
        start = self.env.timeout(cpu_at_ns - now)
        start.callbacks.append(lambda _: self._start_cpu(job))

    def _start_cpu(self, job: tuple[int, int, int]) -> None:
        self.cpu_began_ns = self.now
        begin = self.env.timeout(_ns(self.costs.cpu_fixed_s))
        begin.callbacks.append(lambda _: self._read_rows(job))

    def _read_rows(self, job: tuple[int, int, int]) -> None:
        _, n_residual, n_tokens = job
        cap = self.costs.cpu_rate_cap_bytes_per_s(n_tokens)
        self._settle()
        self.traffic.submit_cpu(job, self.costs.cpu_bytes(n_residual), cap)
        self._settle()

    def _return_partial(self, job: tuple[int, int, int]) -> None:
        costs, n_tokens = self.costs, job[2]
        self.tally.cpu += self.now - self.cpu_began_ns
        self._slice("cpu", "residual", job[0], self.cpu_began_ns, self.now)
        n_bytes = costs.act_h2d_bytes(n_tokens)
        cap = capped(n_bytes, costs.act_h2d_fixed_s, costs.h2d_bytes_per_s)
        self.traffic.submit_critical(job, n_bytes, cap)

    def _settle(self) -> None:
        """Let everything that has ended by now take effect, and arm the next wake-up."""
        now = self.now
        ended = self.traffic.settle(now)
        while ended:
            for item in ended:
                self._on_end(item)
            ended = self.traffic.settle(now)  # what an end submitted may start, or even end, now
        next_ns = self.traffic.next_change_ns()
        if next_ns is not None and next_ns != self.wake_ns:
            self.wake_ns = next_ns
            self.env.timeout(next_ns - now).callbacks.append(lambda _: self._wake())

    def _wake(self) -> None:
        self.wake_ns = -1
        self._settle()

    def _on_end(self, item: Ended) -> None:
        if item.kind == "swap":
            self.landed.append(item.key)  # type: ignore[arg-type]
            self._slice("h2d", "swap", self._layer_of(item.key), item.began_ns, item.end_ns)
            if self.idle_for is not None:
                self._check_idle()
        elif item.kind == "cpu":
            self._return_partial(item.key)  # type: ignore[arg-type]
        else:
            self.tally.act += item.end_ns - item.began_ns
            self._slice("h2d", "partial sums", item.key[0], item.began_ns, item.end_ns)  # type: ignore[index]
            joined, back_ns = self.joined, _ns(self.costs.handover_s)
            self.env.timeout(back_ns).callbacks.append(lambda _: joined.succeed())

    def _check_idle(self) -> None:
        waited, event = self.idle_for
        waited -= set(self.landed)
        if not waited:
            self.idle_for = None
            event.succeed()

    # -- what is written down -------------------------------------------------------------------

    def _end_step(self, step: TraceStep, began_ns: int, threshold_scale: float) -> None:
        now = self.now
        self._settle()
        tally, counts = self.tally, self.cache.take_counts()
        record = StepRecord(
            seq=step.seq,
            step=step.step,
            phase=step.phase,
            n_tokens=step.n_tokens,
            context_len=step.context_len,
            wall_s=(now - began_ns) / NS,
            gpu_busy_s=tally.gpu / NS,
            cpu_busy_s=tally.cpu / NS,
            swap_busy_s=(self.traffic.swap_busy_ns(now) - tally.swap_before) / NS,
            act_busy_s=tally.act / NS,
            predict_s=tally.predict / NS,
            decide_s=tally.decide / NS,
            wait_cpu_s=tally.wait_cpu / NS,
            wait_io_s=tally.wait_io / NS,
            wait_decide_s=tally.wait_decide / NS,
            evaluated=counts.evaluated,
            active=counts.active,
            predicted=counts.predicted,
            predicted_active=counts.predicted_active,
            hit_resident=counts.hit_resident,
            hit_on_time=counts.hit_on_time,
            late=counts.late,
            residual=counts.residual,
            loads=counts.loads,
            loads_used_first=counts.loads_used_first,
            wasted=counts.wasted,
            cancelled=counts.cancelled,
            evictions=counts.evictions,
            h2d_bytes=tally.loads_bytes,
            threshold_scale=threshold_scale,
        )
        self.records.append(record)
        self.cache.end_step(record)
        if self.on_step is not None:
            self.on_step(record)

    def _slice(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        if self.keep_slices and end_ns > began_ns:
            self.slices.append(Slice(lane, name, layer, began_ns, end_ns))

    def _layer_of(self, swap_id: object) -> int:
        swap = self.cache.in_flight.get(swap_id)  # type: ignore[call-overload]
        return -1 if swap is None else swap.layer


def _ns(seconds: float) -> int:
    return round(seconds * NS)

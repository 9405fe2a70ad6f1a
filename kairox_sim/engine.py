"""The SimPy engine: GPU, CPU pool, both link directions and host DRAM around a NeuronCache.

It decides nothing and never reads a clock: the cache's policy decides, the cost model says how long
things take, the trace says what fires. Time is integer nanoseconds. One process is the GPU stream;
the planner and the host (host.py) are callbacks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
import simpy

from kairox_sim.cache import NeuronCache
from kairox_sim.cost_model import CostModel
from kairox_sim.dispatch import DISPATCHES, n_fetched
from kairox_sim.errors import KairoxError
from kairox_sim.events import Split, Swap
from kairox_sim.flows import to_ns
from kairox_sim.host import Host
from kairox_sim.policies.base import Ids, Late, Share, Trigger
from kairox_sim.prediction import Predictions
from kairox_sim.record import StepRecord
from kairox_sim.tally import Tally, Waits, record_of
from kairox_sim.timeline import Slice
from kairox_sim.trace import Trace, TraceStep
from kairox_sim.watchdog import run_to_end
from kairox_sim.whole_layers import layers_on_gpu, ops_of_step

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
    dispatch: str = "concurrent",
    lookahead_from: int = 1,
    context_start: int = 0,
    keep_slices: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Run:
    """Replay `trace` through `cache` at `costs`.

    trigger, late: when plans are made and what happens to late copies; the policy's own by default.
    The cache must have been made for the same trigger.
    predictions: what the predictor says, needed by look-ahead and serial triggers.
    landings: swap ids per poll, replayed from a live run instead of decided by time; nothing waits
    for a landing then.
    dispatch: who computes what is not on the device, one of DISPATCHES.
    lookahead_from: the first layer that a look-ahead trigger predicts a layer ahead. If above 1,
    the layers before it, 0 included, are predicted and planned after their own attention, and
    nothing waits for their copies.
    context_start: tokens that are in the KV cache before the trace begins.
    on_step: called after each step, for progress.
    """
    if dispatch not in DISPATCHES:
        raise KairoxError(f"unknown dispatch {dispatch!r}; allowed: {', '.join(DISPATCHES)}")
    for label, number in (("lookahead_from", lookahead_from), ("context_start", context_start)):
        if number < 0:
            raise KairoxError(f"{label} is {number}, must be 0 or more")
    engine = _Engine(
        trace, cache, costs,
        trigger or cache.policy.default_trigger,
        late or cache.policy.default_late,
        predictions, landings, dispatch, lookahead_from, context_start, keep_slices, on_step,
    )  # fmt: skip
    return engine.run()


@dataclass(frozen=True, slots=True)
class _Durations:
    """Nanoseconds of the GPU work that depends on nothing but the number of tokens."""

    gate: int
    predict: int
    head: int


@dataclass(slots=True)
class _Engine:
    trace: Trace
    cache: NeuronCache
    costs: CostModel
    trigger: Trigger
    late: Late
    predictions: Predictions | None
    landings: Sequence[tuple[int, ...]] | None
    dispatch: str
    lookahead_from: int
    context_start: int
    keep_slices: bool
    on_step: Callable[[StepRecord], None] | None

    plans: bool = field(init=False)
    stalls: bool = field(init=False)  # the FFN waits for its layer's copies
    n_own: int = field(
        init=False
    )  # layers planned in their own place though the trigger looks ahead
    counts_landings: bool = field(
        init=False
    )  # h2d_bytes are of what landed, not of what was issued
    policy_class: str = field(init=False)
    whole: tuple[bool, ...] = ()  # with whole layers: which are on the GPU
    all_ids: Ids = field(init=False)
    env: simpy.Environment = field(default_factory=simpy.Environment)
    host: Host = field(init=False)
    gpu_ns: int = 0  # up to when the GPU stream has work or waits; the clock may be behind it
    planner_free_ns: int = 0
    decided_ns: list[int] = field(init=False)  # [n_layers] when the layer's latest plan was made
    last_swap: list[int] = field(init=False)  # [n_layers] id of its last copy; -1: it had none
    n_polls: int = 0
    tally: Tally = field(default_factory=Tally)
    waits: Waits = field(init=False)
    durations: dict[int, _Durations] = field(default_factory=dict)  # by number of tokens
    evaluated: dict[int, Ids] = field(default_factory=dict)  # by layer, of this step
    records: list[StepRecord] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    waits_for: str = ""  # what the GPU waits for, should it wait for ever

    def __post_init__(self) -> None:
        trace, cache = self.trace, self.cache
        self.plans = cache.policy.admits != "never"
        self.stalls = self.plans and (self.late == "stall" or self.trigger == "serial")
        own_name = type(cache.policy).__name__.lower()
        self.policy_class = getattr(cache.policy, "cost_class", own_name)  # an adapter's: the inner
        ahead = self.trigger in LOOK_AHEAD and self.lookahead_from > 1
        self.n_own = self.lookahead_from if ahead else 0
        self.counts_landings = self.late == "cancel" and self.trigger != "instant"
        self.all_ids = np.arange(cache.n_neurons, dtype=np.int32)
        self.decided_ns, self.last_swap = [0] * cache.n_layers, [-1] * cache.n_layers
        self.waits = Waits.of(cache.n_layers)
        self.host = Host(self.env, self.costs, self._keep if self.keep_slices else None)
        if (trace.header.n_layers, trace.header.n_neurons) != (cache.n_layers, cache.n_neurons):
            raise KairoxError(
                f"the trace has {trace.header.n_layers} layers of {trace.header.n_neurons} neurons "
                f"and the cache {cache.n_layers} of {cache.n_neurons}"
            )
        if self.plans and cache.plans_after != (self.trigger == "after"):
            made_for = "'after'" if cache.plans_after else "a trigger other than 'after'"
            raise KairoxError(
                f"the cache was made for {made_for} and the run is for {self.trigger!r}; "
                "give both the same trigger"
            )
        if self.dispatch == "layers":
            self.whole = layers_on_gpu(cache, self.costs)
        if self.late == "cancel" and self.landings is not None:
            raise KairoxError(
                "landings cannot be replayed with late = cancel: they do not say what was called "
                "off; replay with late cpu, or let time decide"
            )
        if self.plans and self.trigger in (*LOOK_AHEAD, "serial") and self.predictions is None:
            raise KairoxError(
                f"trigger {self.trigger!r} plans from predictions and none were given; "
                "use a trace with a predicted column or predictions of the active set"
            )

    @property
    def _now_ns(self) -> int:
        return int(self.env.now)

    def run(self) -> Run:
        gpu = self.env.process(self._gpu())
        run_to_end(self.env, {"gpu": gpu}, lambda _: self.waits_for)
        if self.keep_slices:
            self.host.note_unfinished()
        if self.landings is not None and self.n_polls != len(self.landings):
            raise KairoxError(
                f"the run polled {self.n_polls} times and {len(self.landings)} landings were "
                "given to replay; they belong to another run"
            )
        for swap_id in list(self.cache.in_flight):
            self.cache.cancel(swap_id)
        cancelled = self.cache.take_counts().cancelled
        self.cache.check()
        return Run(tuple(self.records), self.cache.unused_yet, cancelled, tuple(self.slices))

    # -- the GPU stream -------------------------------------------------------------------------

    def _gpu(self) -> Process:
        for step in self.trace.steps():
            began_ns, busy_before = self.gpu_ns, self.host.busy_ns()
            self.tally, self.waits = Tally(), Waits.of(self.cache.n_layers)
            self.evaluated = {}
            if self.costs.position is not None or self.counts_landings:
                self.tally.swap_bytes = 0.0
            knobs = self.cache.controller.knobs
            if self.dispatch == "layers":
                self._step_of_whole_layers(step)
            else:
                yield from self._step(step)
            yield from self._catch_up()
            self._end_step(step, began_ns, busy_before, knobs.threshold_scale)

    def _step(self, step: TraceStep) -> Process:
        costs, lossy = self.costs, self.costs.gating == "predicted"
        durations = self._durations(step.n_tokens)
        context_len = step.context_len + self.context_start
        attention_ns = to_ns(costs.attention_s(step.n_tokens, context_len))
        if lossy and self.trigger in LOOK_AHEAD and not self.n_own:
            self._predict(0, durations.predict)  # no layer before it predicts what 0 computes
        for layer in range(self.cache.n_layers):
            if self.trigger == "attn_in":
                yield from self._look_ahead(layer + 1, step)
            self._compute("attention", layer, attention_ns)
            if self.trigger == "serial" or layer < self.n_own:
                yield from self._predict_and_plan(layer, step)
            elif lossy and self.trigger not in LOOK_AHEAD:  # the predictor decides what is computed
                self._predict(layer, durations.predict)
            if self.trigger == "attn_out":
                yield from self._look_ahead(layer + 1, step)
            self._compute("gate", layer, durations.gate)
            yield from self._ffn(layer, step)
        if self.plans and self.trigger in LOOK_AHEAD and not self.n_own:
            yield from self._plan(0, step.last_active(0), None)
        self._compute("head", -1, durations.head)

    def _step_of_whole_layers(self, step: TraceStep) -> None:
        context_len, tally = step.context_len + self.context_start, self.tally
        for layer in range(self.cache.n_layers):
            self._look_up(layer, step)
        for op in ops_of_step(
            self.costs, self.whole, self.cache.n_neurons, step.n_tokens, context_len
        ):
            if op.lane == "gpu":
                self._compute(op.name, op.layer, op.ns)
                continue
            if op.lane == "cpu":
                tally.cpu += op.ns
            elif op.lane:
                tally.activations += op.ns
            if op.lane and self.keep_slices:
                self._keep(op.lane, op.name, op.layer, self.gpu_ns, self.gpu_ns + op.ns)
            tally.wait_cpu += op.ns
            if op.layer >= 0:
                self.waits.cpu_ns[op.layer] += op.ns
            self.gpu_ns += op.ns

    def _look_ahead(self, layer: int, step: TraceStep) -> Process:
        if self.n_own <= layer < self.cache.n_layers:
            yield from self._predict_and_plan(layer, step)

    def _predict_and_plan(self, layer: int, step: TraceStep) -> Process:
        if self.plans or self.costs.gating == "predicted":
            self._predict(layer, self._durations(step.n_tokens).predict)
        if self.plans:
            assert self.predictions is not None
            ids, share = self.predictions.of(step, layer, self._evaluated(layer, step))
            yield from self._plan(layer, ids, share)

    def _predict(self, layer: int, duration_ns: int) -> None:
        self.tally.predict += duration_ns
        self._compute("predict", layer, duration_ns)

    def _ffn(self, layer: int, step: TraceStep) -> Process:
        if self.stalls and layer >= self.n_own:
            yield from self._wait_for_swaps(layer)
        yield from self._catch_up()
        n, tally = step.n_tokens, self.tally
        split = self._split(layer, step)
        residual = split.residual
        n_copied = n_fetched(self.dispatch, self.costs, layer, residual, n, self.cache.swap_neurons)
        n_host, arrived = residual.size - n_copied, None
        if n_copied:
            tally.n_fetched += n_copied
            tally.fetched_bytes += self.host.fetch(
                layer, residual[:n_copied], self.cache.swap_neurons
            )
        if n_host and self.dispatch != "serial":
            arrived = self.host.hand_over(layer, n_host, n)
        if self.plans and self.trigger == "after":
            yield from self._plan(layer, self._evaluated(layer, step), self._share(layer, step))
        self._compute("ffn", layer, to_ns(self.costs.ffn_gpu_s(split.on_time.size, n)))
        if n_host and self.dispatch == "serial":
            yield from self._catch_up()
            arrived = self.host.hand_over(layer, n_host, n)
        joined_ns = 0
        if arrived is not None:
            self.waits_for = f"the host's partial sums of layer {layer}"
            joined_ns = yield arrived  # the pool is idle again: when fetches land is certain
        if n_copied:
            wait_ns = max(0, self.host.fetched_ns() - self.gpu_ns)
            tally.wait_io += wait_ns
            self.gpu_ns += wait_ns
            self._compute("ffn", layer, to_ns(self.costs.ffn_gpu_s(n_copied, n)))
        wait_ns = max(0, joined_ns - self.gpu_ns)
        tally.wait_cpu += wait_ns
        self.waits.cpu_ns[layer] = wait_ns
        self.gpu_ns += wait_ns

    def _split(self, layer: int, step: TraceStep) -> Split:
        """Poll, commit and look up: who computes what."""
        if self.plans and self.trigger == "instant":  # no time passes, but the link is used
            swaps = self.cache.plan(layer, self._evaluated(layer, step), self._share(layer, step))
            self._count(swaps)
            self.host.submit(swaps)
            self.n_polls += 1  # its commits stand among the landings to replay, and change nothing
            self.cache.commit(swap.id for swap in swaps)
        else:
            landed = self._poll()
            if self.counts_landings:
                self.tally.swap_bytes += self._bytes(self.cache.in_flight[i] for i in landed)
            self.cache.commit(landed)
            if self.last_swap[layer] in self.cache.in_flight:
                self.waits.unfinished[layer] = True
                if self.late == "cancel":
                    self._call_off(layer)
        return self._look_up(layer, step)

    def _look_up(self, layer: int, step: TraceStep) -> Split:
        evaluated = self._evaluated(layer, step)
        if self.trace.evaluated_bits is None and self.costs.gating != "dense":
            return self.cache.lookup(layer, evaluated, evaluated, self._share(layer, step))
        share = None if step.n_tokens == 1 else step.share(layer)
        return self.cache.lookup(layer, evaluated, step.active(layer), share)

    def _evaluated(self, layer: int, step: TraceStep) -> Ids:
        known = self.evaluated.get(layer)
        if known is None:
            dense = self.costs.gating == "dense"
            known = self.evaluated[layer] = self.all_ids if dense else step.evaluated(layer)
        return known

    def _share(self, layer: int, step: TraceStep) -> Share | None:
        """Of what is evaluated; None says 1 each, without an array."""
        if step.n_tokens == 1 or self.costs.gating == "dense":
            return None
        return step.evaluated_share(layer)

    def _compute(self, what: str, layer: int, duration_ns: int) -> None:
        """Queue work on the stream, behind what it already has."""
        self.tally.gpu += duration_ns
        if self.keep_slices:
            self._keep("gpu", what, layer, self.gpu_ns, self.gpu_ns + duration_ns)
        self.gpu_ns += duration_ns

    def _catch_up(self) -> Process:
        """Let the clock reach the end of the stream, before anybody else is spoken to."""
        ahead_ns = self.gpu_ns - self._now_ns
        if ahead_ns:
            yield self.env.timeout(ahead_ns)

    # -- deciding and copying -------------------------------------------------------------------

    def _plan(self, layer: int, ids: Ids, share: Share | None) -> Process:
        yield from self._catch_up()
        swaps = self.cache.plan(layer, ids, share)
        self._count(swaps)
        decide_ns = to_ns(self.costs.decide_s(self.policy_class, len(swaps)))
        self.tally.decide += decide_ns
        now_ns = self.gpu_ns
        began_ns = max(now_ns, self.planner_free_ns)
        decided_ns = self.planner_free_ns = self.decided_ns[layer] = began_ns + decide_ns
        if self.keep_slices:
            self._keep("planner", "decide", layer, began_ns, decided_ns)
        if self.costs.decide_blocks_gpu:
            self.tally.wait_decide += decide_ns
            self.gpu_ns = decided_ns
            yield from self._catch_up()
        if decided_ns == self.gpu_ns:
            self.host.submit(swaps)
        elif swaps:
            submission = self.env.timeout(decided_ns - now_ns)
            submission.callbacks.append(lambda _: self._submit(swaps))

    def _submit(self, swaps: list[Swap]) -> None:
        if self.late == "cancel":  # some may have been called off while they were decided on
            swaps = [swap for swap in swaps if swap.id in self.cache.in_flight]
        self.host.submit(swaps)

    def _count(self, swaps: list[Swap]) -> None:
        """Remember a plan's copies, in order of their ids, in which they go over the link."""
        if not swaps:
            return
        self.last_swap[swaps[0].layer] = swaps[-1].id
        if self.costs.position is not None and not self.counts_landings:
            self.tally.swap_bytes += self._bytes(swaps)

    def _bytes(self, swaps: Iterable[Swap]) -> float:
        return sum(self.costs.swap_of(swap.layer, swap.promote)[0] for swap in swaps)

    def _call_off(self, layer: int) -> None:
        """Q-Infer's stop rule: once the layer computes, its copies that have not begun never do."""
        mine = [swap for swap in self.cache.in_flight.values() if swap.layer == layer]
        off = self.host.call_off(mine)
        for swap in off:
            self.cache.cancel(swap.id, restore=True)
        self.last_swap[layer] = next((swap.id for swap in mine if swap not in off), -1)

    def _wait_for_swaps(self, layer: int) -> Process:
        """Stall until the layer's plan has been made and every copy of it has landed."""
        if self.landings is not None:
            return  # replayed landings are not a matter of time
        decide_ns = max(0, self.decided_ns[layer] - self.gpu_ns)
        self.tally.wait_decide += decide_ns
        self.gpu_ns += decide_ns
        yield from self._catch_up()
        flying = [swap for swap in self.cache.in_flight.values() if swap.layer == layer]
        io_ns = self.host.landing_ns(flying) - self.gpu_ns
        self.tally.wait_io += io_ns
        self.waits.unfinished[layer] = bool(flying) and decide_ns + io_ns > 0
        self.gpu_ns += io_ns

    def _poll(self) -> tuple[int, ...]:
        self.n_polls += 1
        if self.landings is None:
            return self.host.poll()
        if self.n_polls > len(self.landings):
            raise KairoxError(
                f"the replayed landings end after {len(self.landings)} polls and the trace "
                "goes on; they belong to another run"
            )
        return self.landings[self.n_polls - 1]

    # -- what is written down -------------------------------------------------------------------

    def _end_step(
        self,
        step: TraceStep,
        began_ns: int,
        busy_before: tuple[int, int, int],
        threshold_scale: float,
    ) -> None:
        tally = self.tally
        busy = (now - before for now, before in zip(self.host.busy_ns(), busy_before, strict=True))
        cpu_ns, tally.swaps, act_ns = busy
        tally.cpu += cpu_ns
        tally.activations += act_ns
        record = record_of(
            tally,
            self.cache.take_counts(),
            self.costs,
            step,
            wall_ns=self.gpu_ns - began_ns,
            context_len=step.context_len + self.context_start,
            threshold_scale=(
                threshold_scale if "threshold_scale" in self.cache.policy.knobs else nan
            ),
        )
        self.records.append(record)
        self.cache.end_step(record, self.waits.done())
        if self.on_step is not None:
            self.on_step(record)

    def _durations(self, n_tokens: int) -> _Durations:
        known = self.durations.get(n_tokens)
        if known is None:
            costs = self.costs
            known = self.durations[n_tokens] = _Durations(
                to_ns(costs.gate_s(n_tokens)),
                to_ns(costs.predict_s(n_tokens)),
                to_ns(costs.head_s(1)),
            )
        return known

    def _keep(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        if end_ns > began_ns:
            self.slices.append(Slice(lane, name, layer, began_ns, end_ns))

"""The SimPy engine: GPU, CPU pool, both link directions and host DRAM around a NeuronCache.

It decides nothing and never reads a clock: the cache's policy decides, the cost model says how long
things take, the trace says what fires. Time is integer nanoseconds. One process is the GPU
(stream.py); the planner and the host are callbacks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np
import simpy

from kairox_sim.cache import NeuronCache
from kairox_sim.cost_model import CostModel
from kairox_sim.dispatch import DISPATCHES, n_fetched
from kairox_sim.errors import KairoxError
from kairox_sim.events import Split
from kairox_sim.flows import to_ns
from kairox_sim.host import Host
from kairox_sim.planner import Planner
from kairox_sim.policies.base import Ids, Late, Share, Trigger
from kairox_sim.prediction import Predictions
from kairox_sim.record import EXACT, StepRecord, exactness_of
from kairox_sim.stream import Process, Stream
from kairox_sim.tally import Tally, record_of
from kairox_sim.timeline import Slice
from kairox_sim.trace import Trace, TraceStep
from kairox_sim.watchdog import run_to_end
from kairox_sim.whole_layers import layers_on_gpu, ops_of_step, play

LOOK_AHEAD = ("attn_in", "attn_out")


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
    The cache must have been made for the same trigger. late = cancel: once a layer computes, those
    of its copies that have not begun are called off, and what they would have displaced is back.
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
    n_own: int = field(init=False)  # layers that are planned in their own place, without a wait
    on_demand: bool = field(init=False)  # some of what is missing may be copied for its layer-step
    whole: tuple[float, ...] = ()  # in dispatch `layers`: the share of each on the GPU
    all_ids: Ids = field(init=False)
    # When it looks up: a lossy recording lacks what was not computed, and a screened run's neurons
    # decide only then.
    knows_active: bool = field(init=False)
    exact: bool = field(init=False)  # of every step
    env: simpy.Environment = field(default_factory=simpy.Environment)
    stream: Stream = field(init=False)
    host: Host = field(init=False)
    planner: Planner = field(init=False)
    n_polls: int = 0
    durations: dict[int, _Durations] = field(default_factory=dict)  # by number of tokens
    evaluated: dict[int, Ids] = field(default_factory=dict)  # by layer, of this step
    records: list[StepRecord] = field(default_factory=list)
    waits_for: str = ""  # what the GPU waits for, should it wait for ever

    def __post_init__(self) -> None:
        cache = self.cache
        self.plans = cache.policy.admits != "never"
        self.stalls = self.plans and (self.late == "stall" or self.trigger == "serial")
        ahead = self.trigger in LOOK_AHEAD and self.lookahead_from > 1
        self.n_own = self.lookahead_from if ahead else 0
        self.on_demand = self.dispatch in ("gpu", "cost")
        self.all_ids = np.arange(cache.n_neurons, dtype=np.int32)
        header = self.trace.header
        decided = header.complete and header.gating != "screened"
        self.knows_active = decided or header.synthetic
        approximate = header.approximate is not None
        self.exact = exactness_of(self.costs.gating, approximate=approximate) == EXACT
        self._require_that_all_go_together()
        if self.dispatch == "layers":
            self.whole = layers_on_gpu(cache, self.costs)
        self.stream = stream = Stream(self.env, self.keep_slices)
        self.host = Host(self.env, self.costs, stream.keep if self.keep_slices else None)
        cancels = self.late == "cancel" and self.trigger != "instant"
        self.planner = Planner(cache, self.costs, self.host, stream, cancels)

    def _require_that_all_go_together(self) -> None:
        trace, cache = self.trace, self.cache
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
        told = self.predictions is not None or self.costs.gating == "dense"
        if self.plans and self.trigger in (*LOOK_AHEAD, "serial") and not told:
            raise KairoxError(
                f"trigger {self.trigger!r} plans from predictions and none were given; "
                "use a trace with a predicted column or predictions of the active set"
            )
        if self.late == "cancel" and self.landings is not None:
            raise KairoxError(
                "landings cannot be replayed with late = cancel: they do not say what was called "
                "off; replay with late = cpu, or let time decide"
            )

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
        return Run(tuple(self.records), self.cache.unused_yet, cancelled, tuple(self.stream.slices))

    # -- a step ---------------------------------------------------------------------------------

    def _gpu(self) -> Process:
        for step in self.trace.steps():
            began_ns, busy_before = self.stream.free_ns, self.host.busy_ns()
            self.stream.tally, self.evaluated = Tally(), {}
            if self.planner.bytes_when is not None:
                self.stream.tally.swap_bytes = 0.0
            knobs = self.cache.controller.knobs
            if self.dispatch == "layers":
                self._step_of_whole_layers(step)
            else:
                yield from self._step(step)
            yield from self.stream.catch_up()
            self._end_step(step, began_ns, busy_before, knobs.threshold_scale)

    def _step(self, step: TraceStep) -> Process:
        costs, lossy = self.costs, self.costs.gating == "predicted"
        compute, durations = self.stream.compute, self._durations(step.n_tokens)
        context_len = step.context_len + self.context_start
        attention_ns = to_ns(costs.attention_s(step.n_tokens, context_len))
        if lossy and self.trigger in LOOK_AHEAD and not self.n_own:
            self._predict(0, durations.predict)  # no layer before it predicts what 0 computes
        for layer in range(self.cache.n_layers):
            if self.trigger == "attn_in":
                yield from self._look_ahead(layer + 1, step)
            compute("attention", layer, attention_ns)
            if self.trigger == "serial" or layer < self.n_own:
                yield from self._predict_and_plan(layer, step)
            elif lossy and self.trigger not in LOOK_AHEAD:  # the predictor decides what is computed
                self._predict(layer, durations.predict)
            if self.trigger == "attn_out":
                yield from self._look_ahead(layer + 1, step)
            compute("gate", layer, durations.gate)
            yield from self._ffn(layer, step)
        if self.plans and self.trigger in LOOK_AHEAD and not self.n_own:
            dense = costs.gating == "dense"
            of_last = self.all_ids if dense else step.last_active(0)
            yield from self.planner.plan(0, of_last, None)
        compute("head", -1, durations.head)

    def _look_ahead(self, layer: int, step: TraceStep) -> Process:
        if self.n_own <= layer < self.cache.n_layers:
            yield from self._predict_and_plan(layer, step)

    def _predict_and_plan(self, layer: int, step: TraceStep) -> Process:
        if self.plans or self.costs.gating == "predicted":
            self._predict(layer, self._durations(step.n_tokens).predict)
        if not self.plans:
            return
        if self.costs.gating == "dense":  # nothing to predict: all of them
            yield from self.planner.plan(layer, self.all_ids, None)
            return
        assert self.predictions is not None
        ids, share = self.predictions.of(step, layer, self._evaluated(layer, step))
        yield from self.planner.plan(layer, ids, share)

    def _predict(self, layer: int, duration_ns: int) -> None:
        self.stream.tally.predict += duration_ns
        self.stream.compute("predict", layer, duration_ns)

    def _step_of_whole_layers(self, step: TraceStep) -> None:
        n_neurons = self.cache.n_neurons
        context_len = step.context_len + self.context_start
        for layer in range(self.cache.n_layers):
            self._look_up(layer, step)
        for op in ops_of_step(self.costs, self.whole, n_neurons, step.n_tokens, context_len):
            play(op, self.stream)

    # -- an FFN ---------------------------------------------------------------------------------

    def _ffn(self, layer: int, step: TraceStep) -> Process:
        stream, host, n = self.stream, self.host, step.n_tokens
        # Replayed landings are not a matter of time.
        if self.stalls and layer >= self.n_own and self.landings is None:
            yield from self.planner.wait_for_swaps(layer)
        yield from stream.catch_up()
        split = self._split(layer, step)
        residual, part = split.residual, self.cache.swap_neurons
        n_copied = 0
        if self.on_demand and residual.size:
            n_copied = n_fetched(self.dispatch, self.costs, layer, residual, n, part)
        n_host, arrived = residual.size - n_copied, None
        if n_copied:
            stream.tally.n_fetched += n_copied
            stream.tally.fetched_bytes += host.fetch(layer, residual[:n_copied], part)
        if n_host and self.dispatch != "serial":
            arrived = host.hand_over(layer, n_host, n)
        if self.plans and self.trigger == "after":
            evaluated, share = self._evaluated(layer, step), self._share(layer, step)
            yield from self.planner.plan(layer, evaluated, share)
        stream.compute("ffn", layer, to_ns(self.costs.ffn_gpu_s(split.on_time.size, n)))
        if n_host and self.dispatch == "serial":
            yield from stream.catch_up()
            arrived = host.hand_over(layer, n_host, n)
        joined_ns = 0
        if arrived is not None:
            self.waits_for = f"the host's partial sums of layer {layer}"
            joined_ns = yield arrived
        if n_copied:  # the pool is idle again, so that it is certain when fetches land
            stream.wait_for_io(host.fetched_ns())
            stream.compute("ffn", layer, to_ns(self.costs.ffn_gpu_s(n_copied, n)))
        if arrived is not None:
            stream.tally.layer_wait_cpu[layer] = stream.wait_for_cpu(joined_ns)

    def _split(self, layer: int, step: TraceStep) -> Split:
        """Poll, commit and look up: who computes what."""
        if self.plans and self.trigger == "instant":
            self.n_polls += 1  # its commits stand among the landings to replay, and change nothing
            evaluated, share = self._evaluated(layer, step), self._share(layer, step)
            self.planner.plan_and_land(layer, evaluated, share)
        elif self.plans:
            self.planner.commit(layer, self._poll())
        else:
            self.cache.commit(self._poll())
        return self._look_up(layer, step)

    def _look_up(self, layer: int, step: TraceStep) -> Split:
        evaluated = self._evaluated(layer, step)
        if not self.knows_active:
            return self.cache.lookup(layer, evaluated, None, self._share(layer, step))
        if self.trace.evaluated_bits is None and self.costs.gating != "dense":
            return self.cache.lookup(layer, evaluated, evaluated, self._share(layer, step))
        share = None if step.n_tokens == 1 else step.share(layer)
        return self.cache.lookup(layer, evaluated, step.active(layer), share)

    def _evaluated(self, layer: int, step: TraceStep) -> Ids:
        if self.costs.gating == "dense":
            return self.all_ids
        known = self.evaluated.get(layer)
        if known is None:
            known = self.evaluated[layer] = step.evaluated(layer)
        return known

    def _share(self, layer: int, step: TraceStep) -> Share | None:
        """Of what is evaluated; None says 1 each, without an array."""
        if step.n_tokens == 1 or self.costs.gating == "dense":
            return None
        return step.evaluated_share(layer)

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
        tally, cache = self.stream.tally, self.cache
        busy = (now - before for now, before in zip(self.host.busy_ns(), busy_before, strict=True))
        cpu_ns, tally.swaps, act_ns = busy
        tally.cpu += cpu_ns
        tally.activations += act_ns
        record = record_of(
            tally,
            cache.take_counts(),
            self.costs,
            step,
            wall_ns=self.stream.free_ns - began_ns,
            context_len=step.context_len + self.context_start,
            exact=self.exact,
            threshold_scale=threshold_scale if "threshold_scale" in cache.policy.knobs else nan,
        )
        if self.trace.header.complete and not self.knows_active:
            n_active = sum(step.active(layer).size for layer in range(cache.n_layers))
            record = replace(record, active=float(n_active))
        self.records.append(record)
        cache.end_step(record, tally.layer_waits(cache.n_layers))
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

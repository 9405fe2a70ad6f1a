"""A time that no run can beat: bytes that must be read, over the highest rates of the machine.

G, C, P and D are the highest rates of GPU memory, CPU, link and DRAM, c = min(C, D). What a step
reads is read by the GPU or by the CPU; what device memory V cannot hold comes out of host memory,
to the CPU or over the link, both of which share DRAM:

    step  T >= max(W / (G + c), max(0, W - V) / min(D, c + P))
    run   T >= max(sum of the steps',
                   (bundle x M + sum over steps of (W_dense - v)) / min(D, c + P))

W: the bytes a step reads. W_dense: those of them that every step reads, which no neuron's slot is
worth giving up for: v = min(V, W_dense) of them are kept. M: the fewest misses that slots in what
is left can have, pooled over the layers, whatever they hold at first: a load or a residual neuron
is a bundle out of host memory, and each miss is one of the two.

Fixed costs, flops and waits only add to it. Simulated times are whole nanoseconds, so that a run of
many operations may end half a nanosecond an operation below it. Trigger `instant` is not of this
world: neurons are resident before their bytes have moved, and a run may end before they have.

Everything is of the trace's layers: in a stand-in, memory and head are scaled by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, nan

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cost_model import CostModel
from kairox_sim.memory import MemoryPlan
from kairox_sim.reuse import Sets, fewest_misses, set_sizes
from kairox_sim.trace import Trace

PerStep = NDArray[np.float64]  # [n_steps]


@dataclass(frozen=True, slots=True)
class Rates:
    """The highest of one machine, in bytes/s."""

    gpu: float  # over the GPU's operations
    cpu: float  # not above DRAM
    link: float
    dram: float

    @property
    def anywhere(self) -> float:
        """GPU and CPU reading at once."""
        return self.gpu + self.cpu

    @property
    def from_host(self) -> float:
        """CPU and link taking from host memory at once."""
        return min(self.dram, self.cpu + self.link)


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """No run takes less."""

    by_step_s: PerStep
    total_s: float  # of the whole trace
    tpot_s: float  # mean over decode steps, as the metric of that name; nan without any
    slots: int  # neurons that fit beside what every step reads, over all layers of the trace
    misses: int  # the fewest with them, over the whole trace


@dataclass(frozen=True, slots=True, eq=False)
class _Needs:
    """Bytes of every step, of all layers of the trace."""

    read: PerStep  # W, as often as it is read
    distinct: PerStep  # W, once each
    dense: PerStep  # W_dense, once each
    memory: PerStep  # V
    miss_bytes: float  # out of host memory per miss
    bundle_bytes: float  # of a slot
    sets: Sets


def rates_of(costs: CostModel, *, dense_host: bool = True) -> Rates:
    """dense_host: the CPU may run whole dense layers, which stream at the DRAM rate."""
    ops = (costs.attention, costs.gate, costs.low_rank, costs.ffn_gpu, costs.head)
    dram = costs.dram_bytes_per_s
    return Rates(
        gpu=max(op.bytes_per_s for op in ops),
        cpu=dram if dense_host else min(costs.cpu_cap_bytes_per_s, dram),
        link=costs.h2d_bytes_per_s,
        dram=dram,
    )


def run_bound(
    trace: Trace,
    costs: CostModel,
    plan: MemoryPlan,
    *,
    context_start: int = 0,
    n_predicted: int | None = None,
    dense_host: bool = True,
) -> Bound:
    """No run with this W takes less: its gating's evaluated sets, gate, screen and predictor.

    plan: what the run reserves; of memory it reserves and does not read in a step nobody else can
    make use. Where the plan does not fit, V is what it holds.
    n_predicted: layers of the trace predicted in a step; by default all where the predictor decides
    what is computed, and otherwise all but the first.
    dense_host: False where the run has no dense layers on the CPU, which makes it tighter.
    """
    shape, ratio, gating = costs.shape, costs.layers_ratio, costs.gating
    n_layers = trace.header.n_layers
    sets: Sets = "all" if gating == "dense" else "evaluated"
    gated = n_layers if gating in ("exact", "screened") else 0
    if n_predicted is None:
        n_predicted = n_layers if gating == "predicted" else n_layers - 1
    ahead = n_predicted if costs.predictor == "lookahead" else 0
    low_rank = n_predicted if costs.predictor == "rank" else 0
    pass_bytes = shape.screen_bytes if gating == "screened" else shape.gate_bytes
    kv = _kv(trace, costs, context_start)
    once = {  # read in every step
        "attention": n_layers * shape.attention_bytes,
        "head": ratio * shape.head_bytes,
        "gate": max(gated, ahead) * pass_bytes,
        "predictor": low_rank * shape.predictor_bytes if low_rank else 0,
    }
    dense = kv + sum(once.values())
    again = min(gated, ahead) * pass_bytes  # the look-ahead reads the gate a second time
    unread = np.maximum(0.0, ratio * plan.kv - kv)
    for name, n_bytes in once.items():
        unread += max(0.0, ratio * getattr(plan, name) - n_bytes)
    held = max(plan.vram, plan.total) - plan.margin
    bundles = _bundles(trace, costs, sets, costs.bundle_bytes)
    needs = _Needs(
        read=dense + again + bundles,
        distinct=dense + bundles,
        dense=dense,
        memory=ratio * held - unread,
        miss_bytes=costs.cpu_bytes(1),
        bundle_bytes=costs.bundle_bytes,
        sets=sets,
    )
    return _bound(trace, needs, rates_of(costs, dense_host=dense_host))


def common_bound(
    trace: Trace, costs: CostModel, plan: MemoryPlan, *, context_start: int = 0
) -> Bound:
    """No system that computes every active neuron takes less: attention, keys and values, head and
    all rows of the active neurons; nothing to decide them by, and no memory reserved for anything.

    Of `plan` only the device's memory and margin count, so that it is the same for all systems. A
    run that is let hold more than the device has, or that is lossy, may be below it.
    """
    shape, ratio = costs.shape, costs.layers_ratio
    neuron_bytes = shape.neuron_bytes * costs.bundles_per_neuron
    touched = costs.cpu_bytes(1) / costs.bundle_bytes
    kv = _kv(trace, costs, context_start)
    dense = kv + trace.header.n_layers * shape.attention_bytes + ratio * shape.head_bytes
    reads = dense + _bundles(trace, costs, "active", neuron_bytes)
    memory = max(0.0, ratio * (plan.vram - plan.margin))
    needs = _Needs(
        read=reads,
        distinct=reads,
        dense=dense,
        memory=np.full(trace.n_steps, memory),
        miss_bytes=neuron_bytes * touched,
        bundle_bytes=neuron_bytes,
        sets="active",
    )
    return _bound(trace, needs, rates_of(costs))


def _bound(trace: Trace, needs: _Needs, rates: Rates) -> Bound:
    missing = np.maximum(0.0, needs.distinct - needs.memory)
    by_step_s = np.maximum(needs.read / rates.anywhere, missing / rates.from_host)
    kept = np.minimum(needs.memory, needs.dense)  # v
    # Rounded up: part of a bundle may be resident, and the plan's bytes are rounded.
    slots = max(0, ceil(float((needs.memory - kept).max(initial=0)) / needs.bundle_bytes - 1e-9))
    not_kept = needs.dense - kept
    n_misses = 0

    def seconds(first: int, last: int) -> float:
        nonlocal n_misses
        n_misses = fewest_misses(trace, needs.sets, first, last, slots)
        host_bytes = needs.miss_bytes * n_misses + float(not_kept[first:last].sum())
        return max(float(by_step_s[first:last].sum()), host_bytes / rates.from_host)

    # Between stretches of decoding, prefill may load whatever it likes at no cost to them.
    stretches = _decode_stretches(trace)
    n_decode = sum(last - first for first, last in stretches)
    decode_s = sum(seconds(first, last) for first, last in stretches)
    total_s = seconds(0, trace.n_steps)
    return Bound(by_step_s, total_s, decode_s / n_decode if n_decode else nan, slots, n_misses)


def _kv(trace: Trace, costs: CostModel, context_start: int) -> PerStep:
    per_token = trace.header.n_layers * costs.shape.kv_bytes_per_token
    context = np.array([step.context_len for step in trace.steps()], np.float64)
    return per_token * (context + context_start)


def _bundles(trace: Trace, costs: CostModel, sets: Sets, bundle_bytes: float) -> PerStep:
    """What is read of the neurons of `sets`."""
    touched = [costs.cpu_bytes(1, step.n_tokens) / costs.bundle_bytes for step in trace.steps()]
    n_bytes: PerStep = set_sizes(trace, sets) * (bundle_bytes * np.array(touched))
    return n_bytes


def _decode_stretches(trace: Trace) -> list[tuple[int, int]]:
    """[first, last) of every unbroken run of decode steps."""
    phases = [step.phase == "decode" for step in trace.steps()]
    change = np.flatnonzero(np.diff(np.array([False, *phases, False], np.int8)))
    return [(int(first), int(last)) for first, last in change.reshape(-1, 2)]

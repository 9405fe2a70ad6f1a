"""What one simulated step took, by what it was spent on, and the StepRecord that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import nan

import numpy as np

from kairox_sim.costs import CostModel
from kairox_sim.flows import NS
from kairox_sim.record import LayerWaits, StepCounts, StepRecord
from kairox_sim.trace import TraceStep


@dataclass(slots=True)
class Tally:
    """Nanoseconds of one step, unless the name says otherwise."""

    gpu: int = 0
    cpu: int = 0
    swaps: int = 0  # the link carried swaps or fetches
    activations: int = 0
    predict: int = 0
    decide: int = 0
    wait_cpu: int = 0
    wait_io: int = 0
    wait_decide: int = 0
    n_fetched: int = 0  # neurons
    fetched_bytes: float = 0.0
    swap_bytes: float = nan  # over the link; nan where that follows from the number of loads
    unfinished: set[int] = field(default_factory=set)  # layers whose FFN began before their copies
    layer_wait_cpu: dict[int, int] = field(default_factory=dict)  # by layer

    def layer_waits(self, n_layers: int) -> LayerWaits:
        """What each layer waited for."""
        io, cpu_s = np.zeros(n_layers, bool), np.zeros(n_layers)
        io[list(self.unfinished)] = True
        cpu_s[list(self.layer_wait_cpu)] = list(self.layer_wait_cpu.values())
        return LayerWaits(io, cpu_s / NS)


def record_of(
    tally: Tally,
    counts: StepCounts,
    costs: CostModel,
    step: TraceStep,
    *,
    wall_ns: int,
    context_len: int,
    exact: bool,
    threshold_scale: float,
) -> StepRecord:
    """The record of a step. What the cache calls residual and was fetched counts as fetched."""
    if tally.n_fetched:
        counts = replace(counts, residual=counts.residual - tally.n_fetched)
    swap_bytes = tally.swap_bytes
    if swap_bytes != swap_bytes:
        swap_bytes = costs.swap_bytes(counts.loads)
    return StepRecord.of(
        counts,
        seq=step.seq,
        step=step.step,
        phase=step.phase,
        n_tokens=step.n_tokens,
        context_len=context_len,
        exact=exact,
        wall_s=wall_ns / NS,
        gpu_busy_s=tally.gpu / NS,
        cpu_busy_s=tally.cpu / NS,
        swap_busy_s=tally.swaps / NS,
        act_busy_s=tally.activations / NS,
        predict_s=tally.predict / NS,
        decide_s=tally.decide / NS,
        wait_cpu_s=tally.wait_cpu / NS,
        wait_io_s=tally.wait_io / NS,
        wait_decide_s=tally.wait_decide / NS,
        fetched=float(tally.n_fetched),
        h2d_bytes=swap_bytes + tally.fetched_bytes,
        threshold_scale=threshold_scale,
    )

"""What one simulated step took, by what it was spent on, and the StepRecord that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    swap_bytes: float = nan  # of the loads issued; nan where that follows from their number


def record_of(
    tally: Tally,
    counts: StepCounts,
    costs: CostModel,
    step: TraceStep,
    *,
    wall_ns: int,
    context_len: int,
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


@dataclass(slots=True)
class Waits:
    """LayerWaits in the making."""

    unfinished: list[bool]  # [n_layers]
    cpu_ns: list[int]  # [n_layers]

    @classmethod
    def of(cls, n_layers: int) -> Waits:
        return cls([False] * n_layers, [0] * n_layers)

    def done(self) -> LayerWaits:
        return LayerWaits(np.array(self.unfinished), np.array(self.cpu_ns) / NS)

"""The tables behind three figures: a window of busy intervals, momenta, a controller's steps.

Each is a plain DataFrame, to be written to disk and drawn from there; its columns are listed with
the function that makes it. The numbers come out of the objects that simulate: a run's slices, a
`Tam` inside a `NeuronCache`, a run's records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.flows import NS
from kairox_sim.metrics import RunResult
from kairox_sim.policies import Tam
from kairox_sim.policies.base import RESIDENT
from kairox_sim.trace import Trace

LABELS = ("time", "costs", "hardware", "gating", "prediction")  # of RunResult.labels


def pipeline_table(
    runs: Mapping[str, RunResult], *, step: int, first_layer: int, n_layers: int = 2
) -> pd.DataFrame:
    """What every resource did during `n_layers` layers of one step, per run.

    Columns: panel (the run's key), lane, op, layer (-1 unknown), began_s and end_s from the start
    of the first layer's attention, window_s (when the layer after the last one, or the head,
    begins), step, and LABELS. The runs were simulated with keep_slices=True.
    """
    frames = []
    for panel, run in runs.items():
        began_ns, end_ns = _step_bounds_ns(panel, run, step)
        in_step = [s for s in run.slices if s.lane == "gpu" and began_ns <= s.began_ns < end_ns]
        starts = {s.layer: s.began_ns for s in in_step if s.name == "attention"}
        after = first_layer + n_layers
        starts[max(starts) + 1] = next((s.began_ns for s in in_step if s.name == "head"), end_ns)
        if first_layer not in starts or after not in starts or n_layers < 1:
            raise KairoxError(
                f"asked for {n_layers} layers from layer {first_layer}; the run has layers 0 to "
                f"{max(starts) - 1}"
            )
        start_ns = starts[first_layer]
        frame = pd.DataFrame([asdict(s) for s in run.slices])
        frame = pd.DataFrame(
            {
                "panel": panel,
                "lane": frame["lane"],
                "op": frame["name"],
                "layer": frame["layer"],
                "began_s": (frame["began_ns"] - start_ns) / NS,
                "end_s": (frame["end_ns"] - start_ns) / NS,
                "window_s": (starts[after] - start_ns) / NS,
                "step": step,
                **{name: run.labels.get(name, "") for name in LABELS},
            }
        )
        frames.append(frame[(frame["end_s"] > 0) & (frame["began_s"] < frame["window_s"])])
    return pd.concat(frames, ignore_index=True)


def _step_bounds_ns(panel: str, run: RunResult, step: int) -> tuple[int, int]:
    """When a step began and ended; steps follow each other without a gap."""
    if not run.slices:
        raise KairoxError(f"{panel}: the run kept no slices; simulate with keep_slices=True")
    at = np.flatnonzero(run.steps["step"] == step)
    if at.size == 0:
        raise KairoxError(
            f"{panel}: no step {step}; the run has steps {run.steps['step'].min()} to "
            f"{run.steps['step'].max()}"
        )
    ends_ns = np.cumsum(np.rint(run.steps["wall_s"].to_numpy(np.float64) * NS).astype(np.int64))
    i = int(at[0])
    return (int(ends_ns[i - 1]) if i else 0), int(ends_ns[i])


def momentum_table(
    fires: Mapping[str, Iterable[int]],
    *,
    n_steps: int,
    beta: float = 0.90,
    theta_promote: float = 0.35,
    theta_evict: float = 0.08,
) -> pd.DataFrame:
    """Momentum of a neuron per key of `fires`, which says at which steps it fires.

    Columns: neuron, step, active, momentum, resident (after the step's plan), beta, theta_promote,
    theta_evict. A `Tam` in a cache with a slot for each, every copy landing at once.
    """
    fired = {name: frozenset(steps) for name, steps in fires.items()}
    tam = Tam(1, len(fired), beta=beta, theta_promote=theta_promote, theta_evict=theta_evict)
    cache = NeuronCache(1, len(fired), len(fired), tam, Fixed(), trigger="instant")
    rows = []
    for step in range(n_steps):
        seen = [i for i, steps in enumerate(fired.values()) if step in steps]
        cache.commit(swap.id for swap in cache.plan(0, seen))
        cache.lookup(0, seen)
        for i, name in enumerate(fired):
            resident = bool(cache.state[0, i] == RESIDENT)
            rows.append((name, step, i in seen, float(tam.momentum[0, i]), resident))
    table = pd.DataFrame(rows, columns=["neuron", "step", "active", "momentum", "resident"])
    return table.assign(beta=beta, theta_promote=theta_promote, theta_evict=theta_evict)


def controller_table(run: RunResult, trace: Trace) -> pd.DataFrame:
    """A run's steps, with the `domain` of each one's text, the `setting` and LABELS."""
    domains = {s.seq: s.domain for s in trace.header.sequences}
    said = {name: run.labels.get(name, "") for name in ("setting", *LABELS)}
    return run.steps.assign(domain=run.steps["seq"].map(domains), **said)


@dataclass(frozen=True, slots=True)
class Moves:
    """Shares of the decode steps of a run with a controller."""

    lowered: float  # after which threshold_scale went down
    raised: float
    cpu_slowest: float  # T_cpu above both others: what lowers it
    io_over_gpu: float  # T_cpu not the slowest, and T_io above T_gpu: what raises it
    clamped_low: float  # at the lowest value of the run, and asked to go lower

    @property
    def both(self) -> float:
        """How often it moves in the direction that it takes less often."""
        return min(self.lowered, self.raised)

    def in_words(self) -> str:
        return (
            f"lowered after {self.lowered:.1%} of decode steps, raised after {self.raised:.1%}; "
            f"T_cpu is the largest in {self.cpu_slowest:.1%} ({self.clamped_low:.1%} with the "
            f"scale at its lowest already), otherwise T_io exceeds T_gpu in {self.io_over_gpu:.1%}"
        )


def controller_moves(steps: pd.DataFrame) -> Moves:
    """How often a run's controller moved, and what it saw. `steps` are in order, prefill too."""
    scale = steps["threshold_scale"].to_numpy(np.float64)
    t_gpu, t_cpu, t_io = (
        steps[name].to_numpy(np.float64) for name in ("gpu_busy_s", "cpu_busy_s", "swap_busy_s")
    )
    decode = (steps["phase"] == "decode").to_numpy()[:-1]  # nothing is known after the last step
    if not decode.any():
        raise KairoxError("the run has no decode steps for a controller to act on")
    moved = np.diff(scale)[decode]
    cpu_slowest = (t_cpu > np.maximum(t_gpu, t_io))[:-1][decode]
    io_over_gpu = ~cpu_slowest & (t_io > t_gpu)[:-1][decode]
    return Moves(
        lowered=float((moved < 0).mean()),
        raised=float((moved > 0).mean()),
        cpu_slowest=float(cpu_slowest.mean()),
        io_over_gpu=float(io_over_gpu.mean()),
        clamped_low=float((cpu_slowest & (moved == 0)).mean()),
    )

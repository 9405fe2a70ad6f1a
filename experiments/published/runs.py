"""A system on a machine over synthetic sets of one model: what a published number is held to.

Sets are of the model's preset, with groups of the Kairox artifact's size whose members follow one
latent value as often as fitted for ProSparse-7B. What no source prints is assumed, and every run
says so: only ProSparse's predicted sets are published, so other models' are as many times as large
as their active sets (0.23 / 0.1068), found at the same recall, with the skew that their family has.

A few layers stand for all (they are equally dense; head and memory are of the whole model), but for
PowerInfer as shipped, whose fault is about which layer is which. Measured on ProSparse-7B at
persistence 0.6: 16 layers instead of 4 move the tokens/s of systems that move neurons by up to 7 %,
256 tokens instead of 96 by up to 12 % (the released swap cap is still falling), and a prior of
1,024 tokens instead of 128 PowerInfer's by 2 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import Parallel, delayed

from experiments.published.machines import CONTEXT_MEAN, CONTEXT_RESERVED, constants
from kairox_sim import Settings, simulate
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.firing_rates import Rates
from kairox_sim.hardware import HardwareProfile
from kairox_sim.memory import max_layers, max_slots
from kairox_sim.metrics import summarise
from kairox_sim.model import find_shape
from kairox_sim.trace import Trace
from kairox_sim.workload import Workload, generate
from kairox_sim.workload_presets import OPT_TOP, PRESETS

PERSISTENCES = (0.0, 0.3, 0.6, 0.9)
EVALUATED_SEED, PRIOR_SEED = 1, 2
PROSPARSE = PRESETS["prosparse-7b"]

# Compositions that are no preset of their own, and what of a preset cannot hold in a stand-in.
OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    # SparkInfer, of whose repository the early bars are: a decay per layer that adapts, from 0.67,
    # and no swap cap.
    "kairox-sparkinfer": (
        "kairox-released",
        {"controller": "anb_paper", "controller_params": {"initial": 0.67}},
    ),
    # The ablation's steps, on the Kairox engine (two merges a layer). Live Pipeline: the artifact's
    # `ablation_1`, host and device at once and nothing moves. Neuron balancing: a fixed decay of
    # 0.5, as the paper's policy and as the released code's (no filter, and here no cap).
    "live-pipeline": ("powerinfer", {"handovers": 2}),
    "paper-balancing": (
        "kairox-paper",
        {"controller": "fixed", "policy_params": {"decay": 0.5}},
    ),
    "released-balancing": (
        "kairox-released",
        {"controller": "fixed", "policy_params": {"decay": 0.5}},
    ),
    # Its look-ahead starts at layer 5 of all; few layers stand for those above it.
    "qinfer": ("qinfer", {"lookahead_from": 1}),
}
STATIC = ("powerinfer", "powerinfer-serial", "powerinfer-shipped", "live-pipeline")
WHOLE = ("llama.cpp", "powerinfer-shipped")  # all layers, as which is which matters


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated. The first half of the tokens warms up what moves."""

    n_layers: int = 4
    n_tokens: int = 96
    n_static: int = 24  # tokens, where nothing moves
    n_slow: int = 32  # tokens of policies that decide row by row
    n_prior: int = 128  # independent tokens, as those of a profiling corpus are


@dataclass(frozen=True, slots=True)
class Task:
    """What to run."""

    machine: str  # its name in the tables
    profile: HardwareProfile
    model: str  # its name in the tables
    shape: str
    workload: str
    group_size: int
    persistence: float
    systems: tuple[str, ...]
    scale: Scale = Scale()
    slots: int | None = None  # per layer; None: what fits beside the reserved context
    co_active: bool = True
    true_sets: bool = False  # the predictor says exactly what fires
    density: float | None = None  # active share instead of the preset's
    overrides: dict[str, Any] = field(default_factory=dict)  # of every system's settings


@dataclass(frozen=True, slots=True)
class Run:
    """Per token of the whole model; hits and loads as in kairox_sim.metrics."""

    machine: str
    model: str
    system: str
    persistence: float
    tok_s: float
    hit_resident: float
    hit_on_time: float
    loads_per_layer_step: float
    wasted_share: float
    h2d_bytes: float
    gpu_s: float
    predict_s: float
    wait_cpu_s: float
    wait_io_s: float
    wait_decide_s: float
    cpu_busy_s: float
    swap_busy_s: float
    bound_tok_s: float  # no run that reads the same bytes is faster
    ceiling_tok_s: float  # with hits of slots / evaluated at every step, and free copies
    slots: int  # per layer
    n_neurons: int  # per layer
    evaluated: float  # neurons per layer-step
    assumed: str
    # Regrets of the whole run, warm-up included; nan where there is no such thing.
    over_bound: float = math.nan  # time above the bound of its own bytes
    over_common_bound: float = math.nan  # above what no system that computes the active ones beats
    over_oracle: float = math.nan  # above the bypass oracle in the same slots
    oracle_tok_s: float = math.nan

    @property
    def hit_ceiling(self) -> float:
        """Hits cannot exceed slots / evaluated."""
        return min(1.0, self.slots / self.evaluated) if self.evaluated else 1.0

    def resource(self) -> str:
        """Where a token's time goes: the GPU's own work, or what it waits for."""
        total = 1 / self.tok_s
        parts = {
            "GPU": self.gpu_s,
            "waiting for the CPU": self.wait_cpu_s,
            "waiting for copies": self.wait_io_s,
            "deciding": self.wait_decide_s,
        }
        said = ", ".join(
            f"{what} {s * 1e3:.1f} ms" for what, s in parts.items() if s > 0.01 * total
        )
        return f"{max(parts, key=lambda k: parts[k])} rules: {said} of {total * 1e3:.1f} ms"


def workload_of(task: Task) -> tuple[Workload, str]:
    """The sets of a task, and what is assumed of them."""
    own = PRESETS[task.workload]
    said = []
    if task.density is not None:
        active = dataclasses.replace(own.active, mean=task.density)
        own = dataclasses.replace(own, active=active)
        said.append(f"{task.density:.0%} active")
    if task.true_sets:
        own = dataclasses.replace(own, predicted=own.active, recall=1.0)
        said.append("predicted = active")
    elif own.predicted is None:
        assert PROSPARSE.predicted is not None
        ratio = PROSPARSE.predicted.mean / PROSPARSE.active.mean
        like = own.active if own.active.top_share == OPT_TOP else PROSPARSE.predicted
        predicted = Rates(own.active.mean * ratio, like.top_share, like.carries)
        own = dataclasses.replace(own, predicted=predicted, recall=PROSPARSE.recall)
        said.append(f"predicted sets assumed: {ratio:.2f} x active, recall {PROSPARSE.recall:g}")
    follow = constants()["co_activation"]["prosparse-7b"] if task.co_active else 0.0
    size = task.group_size if follow else 1
    if task.group_size > 1:
        said.append(f"groups chunks:{task.group_size}")
    return (
        dataclasses.replace(
            own, persistence=task.persistence, group_size=size, co_activation=follow
        ),
        "; ".join(said),
    )


def run_task(task: Task) -> list[Run]:
    """Every system of a task, on the same tokens and prior."""
    workload, assumed = workload_of(task)
    shape, scale = find_shape(task.shape), task.scale
    n_layers = min(scale.n_layers, shape.n_layers)
    slots = task.slots
    if task.systems == ("llama.cpp",):
        slots = 0  # whole layers instead
    if slots is None:
        slots = max_slots(task.profile, shape, "predicted", CONTEXT_RESERVED)
    few: tuple[Trace, Trace] | None = None
    whole: tuple[Trace, Trace] | None = None
    found = []
    for system in task.systems:
        if system in WHOLE:
            n_few = scale.n_static // 3
            whole = whole or _traces(workload, n_few, scale.n_prior // 2, shape.n_layers)
            trace, prior = whole
        else:
            few = few or _traces(workload, scale.n_tokens, scale.n_prior, n_layers)
            trace, prior = few
            if system in STATIC:
                trace = _first(trace, scale.n_static)
            elif system == "qinfer":
                trace = _first(trace, scale.n_slow)
        found.append(_run(task, system, trace, prior, slots, assumed))
    return found


def _traces(workload: Workload, n_tokens: int, n_prior: int, n_layers: int) -> tuple[Trace, Trace]:
    spread = dataclasses.replace(workload, persistence=0.0)
    return (
        generate(workload, n_tokens, seed=EVALUATED_SEED, n_layers=n_layers),
        generate(spread, n_prior, seed=PRIOR_SEED, n_layers=n_layers),
    )


def _first(trace: Trace, n_steps: int) -> Trace:
    return trace.select(steps=range(n_steps)) if n_steps < trace.n_steps else trace


def settings_of(task: Task, system: str, slots: int, n_tokens: int) -> Settings:
    """The preset with the groups of the artifact, at the context that is timed."""
    name, more = OVERRIDES.get(system, (system, {}))
    base = Settings.of(
        {
            "system": name,
            "model_as": task.shape,
            "context_start": max(0, CONTEXT_MEAN - n_tokens // 2),
            **more,
            **task.overrides,
        }
    )
    if system == "llama.cpp":
        n_whole = max_layers(task.profile, find_shape(task.shape), CONTEXT_RESERVED)
        return base.with_overrides({"slots": f"ngl:{n_whole}"})
    changed: dict[str, Any] = {"slots": slots}
    if base.groups is not None:
        changed["groups"] = f"chunks:{task.group_size}"
        # Slots are of whole groups.
        changed["slots"] = slots // task.group_size * task.group_size
    return base.with_overrides(changed)


def _run(task: Task, system: str, trace: Trace, prior: Trace, slots: int, assumed: str) -> Run:
    shape = find_shape(task.shape)
    n_layers, n_tokens = trace.header.n_layers, trace.n_steps
    settings = settings_of(task, system, slots, n_tokens)
    result = simulate(trace, settings, hardware=task.profile, prior=prior, oracle=True)
    warm = 1 if system in (*STATIC, *WHOLE) else n_tokens // 2
    ratio = n_layers / shape.n_layers
    out = summarise(result.steps, n_layers, ratio, warmup=warm)
    evaluated = out["evaluated_per_token"] / n_layers
    return Run(
        machine=task.machine,
        model=task.model,
        system=system,
        persistence=task.persistence,
        tok_s=out["tok_s_scaled"],
        hit_resident=out["hit_resident"],
        hit_on_time=out["hit_on_time"],
        loads_per_layer_step=out["loads_per_layer_step"],
        wasted_share=out["wasted_share"],
        h2d_bytes=out["h2d_bytes_per_token"] / ratio,
        gpu_s=out["gpu_s"] / ratio,
        predict_s=out["predict_s"] / ratio,
        wait_cpu_s=out["wait_cpu_s"] / ratio,
        wait_io_s=out["wait_io_s"] / ratio,
        wait_decide_s=out["wait_decide_s"] / ratio,
        cpu_busy_s=out["cpu_busy_s"] / ratio,
        swap_busy_s=out["swap_busy_s"] / ratio,
        bound_tok_s=ratio / result.summary["bound_s"],
        ceiling_tok_s=ceiling_tok_s(task.profile, task.shape, slots, evaluated),
        slots=slots,
        n_neurons=shape.n_neurons,
        evaluated=evaluated,
        assumed=assumed,
        **{k: result.summary[k] for k in ("over_bound", "over_common_bound", "over_oracle")},
        oracle_tok_s=ratio / result.summary["oracle_s"],
    )


def ceiling_tok_s(profile: HardwareProfile, shape_name: str, slots: int, evaluated: float) -> float:
    """Tokens/s if every slot held an evaluated neuron at every step and copies were free.

    A neuron fires at most once a token, so hits <= slots / evaluated; what is left is the host's,
    beside the GPU's part, with one hand-over. Static or dynamic, no policy is above it, unless it
    copies into slots while the layer computes.
    """
    shape = find_shape(shape_name)
    costs = costs_for(
        profile, shape, "predicted",
        trace_layers=shape.n_layers, trace_neurons=shape.n_neurons, predictor="rank",
    )  # fmt: skip
    on_gpu = min(slots, evaluated)
    layer_s = (
        costs.attention_s(1, CONTEXT_MEAN)
        + costs.predict_s(1)
        + max(
            costs.ffn_gpu_s(round(on_gpu), 1),
            costs.host_path_s(round(evaluated - on_gpu), 1),
        )
    )
    return 1 / (shape.n_layers * layer_s + costs.head_s(1))


def run_all(tasks: Sequence[Task], on_done: Callable[[int], object] | None = None) -> list[Run]:
    """Tasks in parallel; runs in the order of the tasks. on_done: how many tasks are done."""
    done = Parallel(n_jobs=min(2, len(tasks)), return_as="generator")(
        delayed(run_task)(task) for task in tasks
    )
    found: list[Run] = []
    for n, runs in enumerate(done, 1):
        found += runs
        if on_done is not None:
            on_done(n)
    return found


def write_runs(runs: Sequence[Run], path: Path) -> Path:
    """One row per run, every column a measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([dataclasses.asdict(run) for run in runs]).to_csv(path, index=False)
    return path


def read_runs(path: Path) -> list[Run]:
    """What `write_runs` wrote."""
    if not path.is_file():
        raise KairoxError(
            f"there is no {path.name} to read runs from; make it first, with python -m "
            "experiments.published"
        )
    rows = pd.read_csv(path, keep_default_na=False, na_values=["nan", ""], dtype={"model": str})
    rows["assumed"] = rows["assumed"].fillna("")
    return [Run(**{str(k): v for k, v in row.items()}) for row in rows.to_dict("records")]


def command_line(
    doc: str | None,
    stem: str,
    again: Callable[[Path], Path],
    make: Callable[[Path, Scale, Callable[[str], object]], Path],
    arguments: list[str] | None = None,
) -> None:
    """Of a script that keeps its runs: simulate and write, or `again` from the runs on disk."""
    parser = argparse.ArgumentParser(
        prog=stem, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("out/published"))
    parser.add_argument("--again", action="store_true", help="from the runs on disk")
    given = parser.parse_args(arguments)
    try:
        if given.again:
            page = again(given.out)
        else:
            page = make(given.out, Scale(), lambda said: sys.stderr.write(f"{said}\n"))
    except KairoxError as error:
        sys.exit(f"{stem}: {error}")
    sys.stdout.write(f"wrote {page}\n")

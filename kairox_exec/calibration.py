"""Calibration: op timings of this machine's own runs -> HardwareProfile.

It sees intervals and sizes, never the numbers an emulated machine is paced by. What an op costs is
taken as run: the gpu lane's time since the op before counts as the op's own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np

from kairox_exec.fitting import Line, fit_copies, fit_line, median
from kairox_exec.oplog import NS, Op
from kairox_sim.costs import CostModel
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    Decide,
    HardwareProfile,
    Link,
    Quantity,
    dump_profile,
    load_profile,
)
from kairox_sim.hardware import Op as OpCost
from kairox_sim.metrics import plain

# Of ops that took longer than the emulated machine allows, or of time by which they did: a run of
# more has times that are partly this host's.
OVERRUN_LIMIT = 0.02


class PaceError(KairoxError):
    """An emulated machine whose real work took longer than what it emulates, too often."""


@dataclass(frozen=True, slots=True)
class StepOps:
    """One step as the device logged it."""

    began_ns: int
    ended_ns: int
    n_tokens: int
    ops: Sequence[Op]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One calibration run: its setting, its steps, and what the null models are fitted on."""

    label: str
    policy_class: str
    steps: Sequence[StepOps]
    seconds_per_token: float  # decode
    residual_per_token: float  # decode
    overrun_share: float  # nan where nothing is paced
    host_memory: str = ""  # of Device.status; copies from pageable memory say little of the link


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, how well each entry fits, and the runs behind it."""

    profile: HardwareProfile
    fits: tuple[dict[str, Any], ...]
    runs: tuple[dict[str, Any], ...]
    conditions: dict[str, Any] = field(default_factory=dict)

    def dump(self, path: str | Path) -> Path:
        """The profile as TOML; fits and runs beside it as .json, which `validate` reads."""
        target = dump_profile(self.profile, path)
        beside = {"fits": self.fits, "runs": self.runs, "conditions": self.conditions}
        text = json.dumps(plain(beside), indent=1, allow_nan=False)
        target.with_suffix(".json").write_text(text + "\n")
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `dump` wrote. Raises KairoxError where either file is missing or not one of ours."""
        beside = Path(path).with_suffix(".json")
        try:
            content = json.loads(beside.read_text())
            fits, runs, conditions = (content[key] for key in ("fits", "runs", "conditions"))
            for row in runs:
                float(row["seconds_per_token"]), float(row["residual_per_token"])
            str(conditions["time"])
            if not runs:
                raise ValueError("no runs in it")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KairoxError(
                f"no calibration runs in {str(beside)!r} ({error}); `kairox calibrate -o {path}` "
                "writes both files"
            ) from error
        return cls(load_profile(Path(path)), tuple(fits), tuple(runs), conditions)


def fit_profile(
    runs: Sequence[TimedRun],
    costs: CostModel,
    *,
    name: str,
    machine: HardwareProfile,
    measured_on: str,
    calibrated_as: str | None,
) -> Calibration:
    """Fit every entry of a profile.

    costs: for the *sizes* of ops (bytes of the model that is charged), never for durations.
    machine: capacities that no timing tells (VRAM), the row-copy rule and what blocks the GPU.
    measured_on: for the sources. Raises KairoxError when a kind of op is missing from the runs,
    when an emulated machine could not keep its pace, or when copies came from pageable memory,
    which the driver copies once more before they cross the link.
    """
    for run in runs:
        if run.host_memory.startswith("pageable"):
            raise KairoxError(
                f"{run.label}: the link cannot be calibrated on copies from host memory that is "
                f"{run.host_memory}; raise the limit of locked memory (ulimit -l) and run again"
            )
        if run.overrun_share > OVERRUN_LIMIT:
            raise PaceError(
                f"setting {run.label!r} fell behind the emulated machine's pace by "
                f"{run.overrun_share:.1%} (limit {OVERRUN_LIMIT:.0%}): close other programs, or "
                f"slow the machine down more: --time-scale, which is {machine.time_scale:g}"
            )
    seen = _Seen(runs, costs, machine.decide_blocks_gpu)
    lines = {
        "attention": seen.line("attention"),
        **seen.deciding(),
        "ffn_gpu": seen.line("ffn"),
        "head": seen.line("head"),
        "ffn_cpu": seen.line("residual"),
    }
    copy_s, link_rate, link_error = fit_copies(*seen.transfers())
    x_s = median(seen.seconds("x"))
    x_bytes = costs.act_d2h_bytes(1)
    d2h_fixed_s = max(0.0, x_s - x_bytes / link_rate)

    def q(value: float, how: str) -> Quantity:
        return Quantity(value=value, source=f"measured on {measured_on}: {how}")

    def op(line: Line, per_step: float = 1.0) -> OpCost:
        return OpCost(
            fixed_s=q(line.fixed_s / per_step, line.how),
            bytes_per_s=q(line.per_s * per_step, line.how),
        )

    def or_equal(name: str, to: str) -> OpCost:
        """An op that these runs have none of is never charged for runs like them."""
        if name in lines:
            return op(lines[name])
        return op(replace(lines[to], note=f"no {name} was run, so taken equal to the {to}: "))

    head = op(lines["head"], costs.layers_ratio)
    slow_down = seen.slow_down_by_copies(lines["ffn_cpu"])
    cpu_rate = lines["ffn_cpu"].per_s
    shared = slow_down > 1.05
    dram = cpu_rate / slow_down + link_rate if shared else cpu_rate + link_rate
    both = (
        f"residual work took {slow_down:.2f} x as long while copies ran; the rates of both then"
        if shared
        else f"residual work took {slow_down:.2f} x as long while copies ran: not a limit, set to "
        "the sum of what both reach alone"
    )
    link_how = f"joint fit of swaps and partial sums, median error {link_error:.1%}"
    profile = HardwareProfile(
        name=name,
        kind="calibrated",
        decide_blocks_gpu=machine.decide_blocks_gpu,
        time_scale=machine.time_scale,
        calibrated_as=calibrated_as,
        calibrated_numerics=costs.numerics,
        vram_bytes=machine.vram_bytes,
        vram_margin_bytes=machine.vram_margin_bytes,
        attention=op(lines["attention"]),
        gate=or_equal("gate", "predictor"),
        predictor=or_equal("predictor", "gate"),
        ffn_gpu=op(lines["ffn_gpu"]),
        head=head,
        gpu_flops_per_s=q(
            seen.fastest_flops("attention", "gate", "ffn"),
            "the fastest prefill op: a lower bound of what the device reaches",
        ),
        ffn_cpu=op(lines["ffn_cpu"]),
        cpu_flops_per_s=q(
            seen.fastest_flops("residual"),
            "the fastest prefill op: a lower bound of what the host reaches",
        ),
        dram_bytes_per_s=q(dram, both),
        h2d=Link(copy_fixed_s=q(copy_s, link_how), bytes_per_s=q(link_rate, link_how)),
        copies_per_bundle=machine.copies_per_bundle,
        d2h=Link(
            copy_fixed_s=q(d2h_fixed_s, "median of the copies of x, less bytes at the h2d rate"),
            bytes_per_s=q(link_rate, "taken equal to h2d: copies of x are of one size"),
        ),
        handover_fixed_s=q(seen.handover_s(), "mean delay before the host starts and after it"),
        decide=seen.decide(q),
    )
    fits = [asdict(line) | {"how": line.how} for line in lines.values()]
    fits.append({"what": "transfers", "fixed_s": copy_s, "per_s": link_rate, "how": link_how})
    table = [
        {
            "setting": run.label,
            "seconds_per_token": run.seconds_per_token,
            "residual_per_token": run.residual_per_token,
            "overrun_share": run.overrun_share,
            "decode_steps": sum(step.n_tokens == 1 for step in run.steps),
        }
        for run in runs
    ]
    return Calibration(profile, tuple(fits), tuple(table))


class _Seen:
    """The ops of all runs by kind: decode ones with their size and their seconds as run."""

    def __init__(
        self, runs: Sequence[TimedRun], costs: CostModel, decide_blocks: bool = True
    ) -> None:
        self.costs = costs
        self.by_kind: dict[str, list[tuple[Op, float]]] = defaultdict(list)
        self.prefill: dict[str, list[Op]] = defaultdict(list)
        self.thinking: dict[str, list[Op]] = defaultdict(list)
        self.host: list[tuple[Op, float]] = []  # residual op, seconds of swaps meanwhile
        self.delays: list[float] = []
        for run in runs:
            for step in run.steps:
                if step.n_tokens > 1:
                    for op in step.ops:
                        self.prefill[op.kind].append(op)
                    continue
                for op, seconds in _as_run(step, decide_blocks):
                    self.by_kind[op.kind].append((op, seconds))
                self._add_host(step)
                self.thinking[run.policy_class] += [o for o in step.ops if o.kind == "decide"]

    def _add_host(self, step: StepOps) -> None:
        swaps = [op for op in step.ops if op.kind == "swap"]
        by_layer: Mapping[tuple[str, int], Op] = {(op.kind, op.layer): op for op in step.ops}
        for op in step.ops:
            if op.kind != "residual":
                continue
            meanwhile = sum(max(0, min(s.t1_ns, op.t1_ns) - max(s.t0_ns, op.t0_ns)) for s in swaps)
            self.host.append((op, meanwhile / NS))
            x = by_layer.get(("x", op.layer))
            back = by_layer.get(("partial sums", op.layer))
            idle = by_layer.get(("cpu", op.layer))  # the gpu lane waiting for the host
            if x is not None:
                self.delays.append(max(0.0, (op.t0_ns - x.t1_ns) / NS))
            if back is not None and idle is not None:
                self.delays.append(max(0.0, (idle.t1_ns - back.t1_ns) / NS))

    def line(self, kind: str) -> Line:
        timed = [(op, s) for op, s in self.by_kind[kind] if self._bytes(op) > 0 and s > 0]
        return fit_line(kind, [self._bytes(op) for op, _ in timed], [s for _, s in timed])

    def deciding(self) -> dict[str, Line]:
        """What says who is computed, and who comes next: a gate, a predictor of either sort, or
        both. Raises KairoxError where neither was run."""
        found = {"gate": "gate", "predictor": "predict"}
        ran = {name: kind for name, kind in found.items() if self.by_kind[kind]}
        return {name: self.line(kind) for name, kind in (ran or {"gate": "gate"}).items()}

    def seconds(self, kind: str) -> list[float]:
        return [s for _, s in self.by_kind[kind]]

    def transfers(self) -> tuple[list[float], list[float], list[float]]:
        """(copies, bytes, seconds) of everything that went to the device."""
        rows = [
            (self.costs.swap_copies(op.size.neurons), op.size.n_bytes, s)
            for op, s in self.by_kind["swap"]
        ]
        rows += [(1.0, op.size.n_bytes, s) for op, s in self.by_kind["partial sums"]]
        rows = [row for row in rows if row[1] > 0 and row[2] > 0]
        return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]

    def slow_down_by_copies(self, line: Line) -> float:
        """Seconds of residual work while copies ran throughout, over what the line says; or 1."""
        ratios = [
            op.seconds / (line.fixed_s + self._bytes(op) / line.per_s)
            for op, meanwhile in self.host
            if op.seconds > 0 and meanwhile > 0.8 * op.seconds
        ]
        alone = [
            op.seconds / (line.fixed_s + self._bytes(op) / line.per_s)
            for op, meanwhile in self.host
            if op.seconds > 0 and meanwhile == 0
        ]
        return median(ratios) / median(alone) if ratios and alone else 1.0

    def handover_s(self) -> float:
        return fmean(self.delays) if self.delays else 0.0

    def fastest_flops(self, *kinds: str) -> float:
        """Flops per second of the fastest prefill op of these kinds."""
        rates = [
            self._flops(op) / op.seconds
            for kind in kinds
            for op in self.prefill[kind]
            if op.seconds > 0 and self._flops(op) > 0
        ]
        if not rates:
            raise KairoxError(f"no prefill ops of {', '.join(kinds)} to calibrate on")
        return max(rates)

    def decide(self, q: Any) -> dict[str, Decide]:
        """Per policy class: fixed + swaps x per_swap; the default is the slowest class."""
        table: dict[str, Decide] = {}
        slowest = Decide(
            fixed_s=q(0.0, "no policy that plans was run"),
            neurons_per_s=q(1e15, "not told apart from the fixed cost on one shape"),
            per_swap_s=q(0.0, "no policy that plans was run"),
        )
        for policy_class, ops in self.thinking.items():
            if not ops:
                continue
            line = _decide_line(ops)
            how = f"{len(ops)} plans by {policy_class}"
            entry = Decide(
                fixed_s=q(line[0], how),
                neurons_per_s=q(1e15, "not told apart from the fixed cost on one shape"),
                per_swap_s=q(line[1], how),
            )
            table[policy_class] = entry
            if entry.fixed_s.value > slowest.fixed_s.value:
                slowest = entry
        return table | {"default": slowest}

    def _bytes(self, op: Op) -> float:
        shape, costs = self.costs.shape, self.costs
        if op.kind == "attention":
            return float(shape.attention_bytes + shape.kv_bytes_per_token * op.size.context_len)
        if op.kind == "predict" and costs.predictor == "rank":
            return float(shape.predictor_bytes)
        if op.kind in ("gate", "predict"):
            return float(shape.screen_bytes if costs.gating == "screened" else shape.gate_bytes)
        if op.kind == "head":
            return float(shape.head_bytes + shape.row_bytes)
        if op.kind in ("ffn", "residual"):
            return costs.cpu_bytes(op.size.neurons)
        return op.size.n_bytes

    def _flops(self, op: Op) -> float:
        shape, n = self.costs.shape, op.size.n_tokens
        if op.kind == "attention":
            return float(shape.attention_flops(n, op.size.context_len))
        if op.kind == "gate":
            return float(shape.gate_flops * n)
        per_neuron = shape.bundle_flops(self.costs.gating) * self.costs.bundles_per_neuron
        return float(op.size.neurons * per_neuron * n)


def _decide_line(ops: Sequence[Op]) -> tuple[float, float]:
    """(fixed_s, per_swap_s) of plans: least squares, refitted without the slowest hundredth.

    No more is left out: a plan is often slow, and what counts in a step is the mean.
    """
    swaps = np.array([op.size.n_swaps for op in ops], np.float64)
    seconds = np.array([op.seconds for op in ops])
    keep = np.ones(swaps.size, bool)
    for _ in range(2):
        if np.ptp(swaps[keep]) == 0:
            return float(np.median(seconds[keep])), 0.0
        slope, fixed = np.polyfit(swaps[keep], seconds[keep], 1)
        if slope < 0:
            slope, fixed = 0.0, float(np.median(seconds[keep]))
        elif fixed < 0:
            slope, fixed = float(np.median(seconds[keep] / np.maximum(swaps[keep], 1))), 0.0
        above = seconds - (fixed + slope * swaps)
        keep = above <= np.quantile(above, 0.99)
    return float(fixed), float(slope)


def _as_run(step: StepOps, decide_blocks: bool = True) -> Iterator[tuple[Op, float]]:
    """Each op and its seconds; on the gpu lane, time since the event before it is its own."""
    lanes = ("gpu", "planner", "idle") if decide_blocks else ("gpu", "idle")
    on_gpu = sorted((op for op in step.ops if op.lane in lanes), key=lambda op: op.t0_ns)
    free_ns = step.began_ns
    for at, op in enumerate(on_gpu):
        if op.lane == "gpu":
            last = at == len(on_gpu) - 1
            end_ns = step.ended_ns if last else op.t1_ns  # what follows the head is the head's
            yield op, (end_ns - free_ns) / NS
        free_ns = max(free_ns, op.t1_ns)
    for op in step.ops:
        if op.lane not in ("gpu", "planner", "idle"):
            yield op, op.seconds

"""Validation: live runs against their own simulation, setting by setting, with gates G1 to G3.

Every setting runs once recorded (its trace, its call log, G1 and G2), then several times timed, the
settings interleaved so that a slow minute falls on all of them. The simulation replays the
setting's own trace on the calibrated machine. Beside it stand two null models fitted on the same
calibration runs: a constant, and a line in residual neurons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from kairox_exec.calibration import OVERRUN_LIMIT, Calibration
from kairox_exec.gates import free_running, g1, g2
from kairox_exec.live import charged_shape, model_shape
from kairox_exec.live_run import ForcedText, LiveRun, Machine, run_forced
from kairox_exec.machine import machine_facts
from kairox_exec.queue_errors import queue_errors
from kairox_exec.recording import record
from kairox_exec.scoring import Scored, Verdict, judge, null_models
from kairox_sim.calllog import read_call_log
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event, StepEnded
from kairox_sim.metrics import plain, steps_frame, summarise
from kairox_sim.outputs import require_folder
from kairox_sim.policies import POLICIES
from kairox_sim.prediction import Recorded
from kairox_sim.provenance import code_version
from kairox_sim.record import StepRecord
from kairox_sim.settings import (
    Settings,
    build_cache,
    label,
    load_prior,
    trigger_of,
)
from kairox_sim.simulation import costs_of
from kairox_sim.trace import Trace, read_trace

GATE_REPEATS, GATE_TOKENS = 5, 128  # of fewer, figures are printed and nothing is claimed

Progress = Callable[[str, int, int], None]
"""(what is running, done, of how many)"""


@dataclass(frozen=True, slots=True)
class Validation:
    """A row per setting, the verdict of G3, and under which conditions."""

    table: pd.DataFrame
    verdict: Verdict
    conditions: dict[str, Any]
    scored: tuple[Scored, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON; unknown is None."""
        rows = json.loads(self.table.to_json(orient="records", double_precision=15))
        return {
            "verdict": asdict(self.verdict),
            "rows": rows,
            "queues": [asdict(row) for row in queue_errors(self.table)],
            "conditions": self.conditions,
        }

    def said(self) -> list[str]:
        """The verdict in words: what was claimed, and against what."""
        v = self.verdict
        outcome = {True: "passes", False: "fails", None: "claims nothing"}[v.passed]
        return [
            f"G3 {outcome}" + (": " + "; ".join(v.reasons) if v.reasons else ""),
            f"error of time per token: median {_share(v.median_error)}, worst "
            f"{_share(v.worst_error)}; a constant {_share(v.constant_error)}; with look-ahead or "
            f"stall {_share(v.ahead_error)}, linear in residual neurons "
            f"{_share(v.linear_ahead_error)}",
            f"deciding landings by its own time, the simulation differs by up to "
            f"{self._worst('hit_on_time_points'):.1f} points of hits on time, "
            f"{self._worst('hit_resident_points'):.1f} of hits resident and "
            f"{_share(self._worst('loads_error'))} of loads",
            (
                f"order: tau {v.tau:.2f} over {v.pairs} pairs that are no ties"
                if v.pairs
                else "order: every pair is a tie"
            )
            + f"; choosing by simulation costs {_share(v.top1_regret)} live; live times span "
            f"{v.contrast:.2f} x",
        ]

    def _worst(self, column: str) -> float:
        return float(self.table[column].abs().max())

    def dump(self, out: str | Path) -> list[Path]:
        """validation.json (verdict, rows, conditions) and validation.parquet, in folder `out`."""
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        as_json, as_table = folder / "validation.json", folder / "validation.parquet"
        as_json.write_text(json.dumps(plain(self.to_dict()), indent=1, allow_nan=False) + "\n")
        self.table.to_parquet(as_table)
        return [as_json, as_table]


def validate(
    model_dir: str | Path,
    settings: Sequence[Settings],
    text: ForcedText,
    calibration: Calibration,
    machine: Machine,
    out: str | Path,
    *,
    prior: Trace | None = None,
    repeats: int = 5,
    swept_tok_s: Mapping[str, float] | None = None,
    on_progress: Progress | None = None,
) -> Validation:
    """Run and simulate every setting; keep traces and call logs in folder `out`.

    prior: for all, instead of the ones the settings name. swept_tok_s: by label, what a sweep had
    promised, for the table. Raises KairoxError where a setting cannot run; a G1 or G2 that fails is
    in the table, not raised.
    """
    if repeats < 1:
        raise KairoxError(f"repeats is {repeats}, must be 1 or more")
    if not settings:
        raise KairoxError("no settings to validate; give one or more")
    folder = require_folder(out, "report")
    priors = _priors(settings, prior)
    sequences = text.sequences(model_dir)
    total = len(settings) * (repeats + 1)
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if on_progress is not None:
            on_progress(what, done, total)
        done += 1

    recorded = []
    for at, setting in enumerate(settings):
        tell(f"recording {label(setting)}")
        stem = folder / f"{at:02d}-{label(setting).replace(' ', '-').replace(':', '-')}"
        recorded.append(_record(model_dir, setting, text, machine, stem, priors[at]))
    (folder / "runs.jsonl").unlink(missing_ok=True)
    runs: list[list[LiveRun]] = [[] for _ in settings]
    for repeat in range(repeats):
        for at, setting in enumerate(settings):
            tell(f"timing {label(setting)}, {repeat + 1} of {repeats}")
            run = run_forced(
                model_dir, setting, machine, sequences, prefill=text.prefill, prior=priors[at]
            )
            runs[at].append(run)
            _keep(folder / "runs.jsonl", repeat, setting, run)

    constant, (a, b) = null_models(
        [row["seconds_per_token"] for row in calibration.runs],
        [row["residual_per_token"] for row in calibration.runs],
    )
    rows, scored = [], []
    for setting, learnt, own, repeated in zip(settings, priors, recorded, runs, strict=True):
        row, score = _compare(
            setting, own, repeated, calibration, model_dir, learnt, constant, (a, b), machine.label
        )
        row["time"], row["machine"] = machine.label, machine.label
        row["swept_tok_s"] = (swept_tok_s or {}).get(label(setting), float("nan"))
        rows.append(row)
        scored.append(score)
    conditions = {
        "time": machine.label,
        "live": f"median of {repeats} interleaved repeats of {rows[0]['decode_tokens']} tokens",
        "overrun_limit": OVERRUN_LIMIT,
        "calibration_runs": calibration.runs,
        "machine": machine_facts(),
        **code_version(),
    }
    verdict = _claimed(judge(scored), repeats, rows[0]["decode_tokens"])
    conditions |= {"repeats": repeats, "decode_tokens": rows[0]["decode_tokens"]}
    return Validation(pd.DataFrame(rows), verdict, conditions, tuple(scored))


def combined(parts: Sequence[Validation]) -> Validation:
    """Several machines as one validation, judged together; see `judge` for what is compared."""
    conditions = {part.conditions["time"]: part.conditions for part in parts}
    if len(conditions) != len(parts):
        raise ValueError(f"{len(parts)} validations on {len(conditions)} machines")
    scored = tuple(row for part in parts for row in part.scored)
    verdict = _claimed(
        judge(scored),
        min(part.conditions["repeats"] for part in parts),
        min(part.conditions["decode_tokens"] for part in parts),
    )
    table = pd.concat([part.table for part in parts], ignore_index=True)
    return Validation(
        table, verdict, {"time": "; ".join(conditions), "machines": conditions}, scored
    )


def _claimed(verdict: Verdict, repeats: int, decode_tokens: int) -> Verdict:
    """The verdict, or none where there are too few repeats or tokens."""
    if repeats >= GATE_REPEATS and decode_tokens >= GATE_TOKENS:
        return verdict
    why = (
        f"{repeats} repeats of {decode_tokens} tokens; gate G3 asks for "
        f"{GATE_REPEATS} of {GATE_TOKENS} or more"
    )
    return replace(verdict, passed=None, reasons=(why,))


def _keep(path: Path, repeat: int, settings: Settings, run: LiveRun) -> None:
    """A line per timed run as soon as it is over, so that stopping loses none of them."""
    line = {
        "setting": label(settings),
        "repeat": repeat,
        "seconds_per_token": run.per_token("wall_s"),
        "residual_per_token": run.per_token("residual"),
        "overrun_share": run.overrun_share,
    }
    with path.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def _share(value: float) -> str:
    return "unknown" if value != value else f"{value:.1%}"


def _priors(settings: Sequence[Settings], given: Trace | None) -> list[Trace | None]:
    """What each setting learns from, every file read once."""
    read: dict[str, Trace] = {}
    for path in {s.prior for s in settings if given is None and s.prior is not None}:
        read[path] = read_trace(path)
    return [load_prior(s, given or (None if s.prior is None else read[s.prior])) for s in settings]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The recorded run of one setting."""

    trace: Trace
    events: Sequence[Event]

    @property
    def records(self) -> list[StepRecord]:
        return [event.record for event in self.events if isinstance(event, StepEnded)]


def _record(
    model_dir: str | Path,
    settings: Settings,
    text: ForcedText,
    machine: Machine,
    stem: Path,
    prior: Trace | None,
) -> _Recorded:
    call_log = stem.with_name(stem.name + ".calls.arrow")
    path = record(
        model_dir,
        text.files,
        stem.with_name(stem.name + ".arrow"),
        tokens=text.tokens,
        skip=text.skip,
        prefill=text.prefill,
        window=text.window,
        settings=settings,
        prior=prior,
        call_log=call_log,
        device=machine.device,
        emulate=machine.profile,
        time_scale=None if machine.profile is None else 1.0,
        force=True,
    )
    return _Recorded(read_trace(path, strict=True), read_call_log(call_log)[1])


def _compare(
    settings: Settings,
    own: _Recorded,
    repeated: Sequence[LiveRun],
    calibration: Calibration,
    model_dir: str | Path,
    prior: Trace | None,
    constant: float,
    line: tuple[float, float],
    machine: str,
) -> tuple[dict[str, Any], Scored]:
    shape, target = model_shape(model_dir, settings), charged_shape(model_dir, settings)
    policy = POLICIES[settings.policy]
    trigger, late = trigger_of(settings), settings.late or policy.default_late

    def fresh() -> Any:
        return build_cache(settings, shape.n_layers, shape.n_neurons, prior=prior, shape=shape)

    costs = costs_of(settings, calibration.profile, target, fresh())

    predictions = None if own.trace.predicted_bits is None else Recorded()
    again = g1(own.events, fresh())
    replayed = g2(
        own.trace, own.events, own.records, fresh(), costs,
        trigger=trigger, late=late, predictions=predictions,
    )  # fmt: skip
    simulated = run_trace(
        own.trace, fresh(), costs, trigger=trigger, late=late, predictions=predictions
    ).records
    free = free_running(own.records, simulated)

    times = [run.per_token("wall_s") for run in repeated]
    live_s = median(times)
    timed = sorted(repeated, key=lambda run: run.per_token("wall_s"))[len(repeated) // 2]
    live, ours = (
        summarise(steps_frame(records), shape.n_layers, costs.layers_ratio)
        for records in (timed.records, simulated)
    )
    ahead_or_stall = policy.admits != "never" and (trigger in ("attn_in", "attn_out", "serial")
                                                   or late == "stall")  # fmt: skip
    score = Scored(
        setting=label(settings),
        live_s=live_s,
        spread=(max(times) - min(times)) / live_s,
        simulated_s=ours["tpot_s"],
        constant_s=constant,
        linear_s=line[0] + line[1] * ours["residual_per_token"],
        ahead_or_stall=ahead_or_stall,
        machine=machine,
    )
    row: dict[str, Any] = {
        "setting": label(settings),
        "live_tok_s": 1 / live_s,
        "live_spread": score.spread,
        "simulated_tok_s": ours["tok_s"],
        "error": score.simulated_s / live_s - 1,
        "null_constant_tok_s": 1 / score.constant_s,
        "null_linear_tok_s": 1 / score.linear_s,
        "uses_lookahead_or_stall": ahead_or_stall,
        "decode_tokens": int(live["n_decode"]),
        "overrun_share": max(run.overrun_share for run in repeated),
        "g1_differences": len(again.differences),
        "g1_swaps": again.swaps,
        "g2_differences": len(replayed.differences),
        "g2_first_difference": next(iter(replayed.differences), ""),
        "hit_resident_points": free.hit_resident_points,
        "hit_on_time_points": free.hit_on_time_points,
        "loads_error": free.loads_share,
    }
    for name in (
        "hit_resident", "hit_on_time", "late_share", "loads_per_layer_step", "wasted_share",
        "h2d_bytes_per_token", "residual_per_token", "gpu_s", "wait_cpu_s", "wait_io_s",
        "wait_decide_s", "unexplained_s", "cpu_busy_s", "swap_busy_s", "predict_s", "decide_s",
    ):  # fmt: skip
        row[f"live_{name}"], row[f"simulated_{name}"] = live[name], ours[name]
    row["live_act_busy_s"], row["simulated_act_busy_s"] = (
        fmean(r.act_busy_s for r in records if r.phase == "decode")
        for records in (timed.records, simulated)
    )
    return row, score

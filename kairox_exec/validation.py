"""Validation: live runs against their own simulation, setting by setting, with gates G1 to G3.

Every setting runs once recorded (its trace, its call log, G1 and G2), then several times timed, the
settings interleaved so that a slow minute falls on all of them. The simulation replays the
setting's own trace on the calibrated machine. Beside it stand two null models fitted on the same
calibration runs: a constant, and a line in residual neurons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from kairox_exec.as_run import all_as, require_calibrated_as
from kairox_exec.calibration import OVERRUN_LIMIT, Calibration
from kairox_exec.gates import free_running, g1, g2
from kairox_exec.live import charged_shape, model_shape
from kairox_exec.live_device import this_machine
from kairox_exec.live_run import ForcedText, LiveRun, Machine, require_numerics, run_forced
from kairox_exec.machine import machine_facts
from kairox_exec.recording import record
from kairox_exec.scoring import null_models
from kairox_exec.validation_report import Validation, combined
from kairox_sim.cache import NeuronCache
from kairox_sim.calllog import read_call_log
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event, StepEnded
from kairox_sim.hardware import HardwareProfile
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
    longest_context,
    trigger_of,
)
from kairox_sim.simulation import costs_of
from kairox_sim.trace import Trace, read_trace

__all__ = ["Validation", "combined", "same_memory", "validate", "with_memory_of"]

Progress = Callable[[str, int, int], None]
"""(what is running, done, of how many)"""


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
    promised, for the table. Raises KairoxError where a setting cannot run, or runs in another way
    than was calibrated; a G1 or G2 that fails is in the table, not raised.
    """
    if repeats < 1:
        raise KairoxError(f"repeats is {repeats}, must be 1 or more")
    if not settings:
        raise KairoxError("no settings to validate; give one or more")
    folder = require_folder(out, "report")
    runs_as = all_as(model_dir, settings)
    require_numerics(machine, runs_as.numerics)
    require_calibrated_as(calibration.conditions, runs_as, machine.label, machine_facts())
    swept = [(swept_tok_s or {}).get(label(one), nan) for one in settings]
    settings = [with_memory_of(machine, one) for one in settings]
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
            _require_same_slots(setting, recorded[at].slots, run.slots)
            runs[at].append(run)
            _keep(folder / "runs.jsonl", repeat, setting, run)

    constant, (a, b) = null_models(
        [row["seconds_per_token"] for row in calibration.runs],
        [row["residual_per_token"] for row in calibration.runs],
    )
    rows = []
    for at, setting in enumerate(settings):
        row = _compare(setting, recorded[at], runs[at], calibration, model_dir, priors[at])
        row["null_constant_tok_s"] = 1 / constant
        row["null_linear_tok_s"] = 1 / (a + b * row["simulated_residual_per_token"])
        row["time"], row["machine"] = machine.label, machine.label
        row["swept_tok_s"] = swept[at]
        rows.append(row)
    conditions = {
        "time": machine.label,
        "live": f"median of {repeats} interleaved repeats of {rows[0]['decode_tokens']} tokens",
        "as_run": asdict(runs_as),
        "overrun_limit": OVERRUN_LIMIT,
        "calibration_runs": calibration.runs,
        "machine": machine_facts(),
        **code_version(),
        "repeats": repeats,
        "decode_tokens": rows[0]["decode_tokens"],
    }
    return Validation(pd.DataFrame(rows), conditions)


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
        lines.write(json.dumps(plain(line)) + "\n")


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
    slots: Sequence[int]

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
        host=machine.host,
        force=True,
    )
    header, events = read_call_log(call_log)
    return _Recorded(read_trace(path, strict=True), events, header["slots"])


def _compare(
    settings: Settings,
    own: _Recorded,
    repeated: Sequence[LiveRun],
    calibration: Calibration,
    model_dir: str | Path,
    prior: Trace | None,
) -> dict[str, Any]:
    shape, target = model_shape(model_dir, settings), charged_shape(model_dir, settings)
    policy = POLICIES[settings.policy]
    trigger, late = trigger_of(settings), settings.late or policy.default_late
    planned_for = same_memory(calibration.profile, repeated[0].planned_for)

    def fresh() -> NeuronCache:
        return build_cache(
            settings, shape.n_layers, shape.n_neurons, prior=prior, shape=shape,
            profile=planned_for, context_len=longest_context(settings, own.trace),
        )  # fmt: skip

    _require_same_slots(settings, own.slots, fresh().capacity)
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
    row: dict[str, Any] = {
        "setting": label(settings),
        "live_tok_s": 1 / live_s,
        "live_spread": (max(times) - min(times)) / live_s,
        "simulated_tok_s": ours["tok_s"],
        "error": ours["tpot_s"] / live_s - 1,
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
    return row


def with_memory_of(machine: Machine, settings: Settings) -> Settings:
    """The settings, and where they fill a GPU's memory, how much of it: what is free now.

    A process's first run leaves less of it to the next ones, which have to get the same slots.
    """
    if machine.device != "cuda" or settings.slots != "vram" or settings.vram is not None:
        return settings
    free = this_machine("cuda").vram_bytes.value
    return settings.with_overrides({"vram": f"{int(free) // 2**20}MiB"})


def same_memory(profile: HardwareProfile, live: HardwareProfile | None) -> HardwareProfile:
    """`profile`, with the memory of the machine that the live run's budget was planned for.

    The calibration is of the same machine, but may say another memory: of another day, or --vram.
    """
    if live is None:
        return profile
    memory = {name: getattr(live, name) for name in ("vram_bytes", "vram_margin_bytes")}
    return profile.model_copy(update=memory)


def _require_same_slots(settings: Settings, recorded: Sequence[int], other: Sequence[int]) -> None:
    """Another budget is another setting: nothing could be compared."""
    if list(recorded) != list(other):
        raise KairoxError(
            f"{label(settings)}: the recorded run had {list(recorded)} slots per layer and its "
            f"repetition or simulation has {list(other)}; give a number of slots, or the memory "
            "(--vram)"
        )

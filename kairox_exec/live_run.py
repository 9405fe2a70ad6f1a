"""One live run over forced tokens, Settings to records: what calibration and validation repeat.

`calibrate` runs a few settings and fits a profile to what their ops took.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.as_run import all_as
from kairox_exec.calibration import Calibration, StepOps, TimedRun, fit_profile
from kairox_exec.live import (
    ONE_THREAD,
    HostSide,
    charged_shape,
    choose_device,
    device_for,
    emulated_profile,
    model_shape,
    start,
)
from kairox_exec.live_device import pace_lost, refuse_pace, this_machine
from kairox_exec.machine import machine_facts
from kairox_exec.mlp_predictor import load_predictor
from kairox_exec.oplog import NS
from kairox_exec.runner import Ending
from kairox_exec.text import encode_file, load_tokenizer, windows
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, LinkProfile, with_vram
from kairox_sim.model import Numerics
from kairox_sim.policies import POLICIES
from kairox_sim.policies.base import Trigger
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, label
from kairox_sim.trace import Trace
from kairox_sim.units import parse_bytes

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForcedText:
    """Text files whose own tokens are fed; the numbers mean what they do in `record`."""

    files: Sequence[str | Path]
    tokens: int = 256
    skip: int = 0
    prefill: int = 32
    window: int = 256

    def sequences(self, model_dir: str | Path) -> list[Tokens]:
        """Token ids of each window, prefill included."""
        tokenizer = load_tokenizer(model_dir)
        return [
            np.concatenate([part.prefill, part.decode])
            for file in self.files
            for part in windows(
                encode_file(file, tokenizer).token_ids,
                tokens=self.tokens,
                skip=self.skip,
                prefill=self.prefill,
                window=self.window,
            )
        ]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where live runs happen. `profile`: what an emulated device is paced by, already slowed."""

    device: str  # "cpu" | "cuda" | "emulated"
    profile: HardwareProfile | None = None
    numerics: Numerics = "fast"
    host: HostSide = ONE_THREAD

    @property
    def label(self) -> str:
        """Emulated or measured, for every table; and what of the machine changes its speed."""
        if self.profile is None:
            here = "GPU" if self.device == "cuda" else self.device
            return f"measured on this machine's {here}{self._kind()}"
        slowed = f"slowed {self.profile.time_scale:g} x"
        return f"emulated {self.profile.name}, {slowed}{self._kind()}"

    def _kind(self) -> str:
        pool, kind = self.host.pool, "" if self.numerics == "fast" else f", {self.numerics}"
        if pool.threads > 1:
            kind += f", {pool.threads} host threads"
        if self.device == "cpu" and (threads := torch.get_num_threads()) > 1:
            kind += f", {threads} torch threads"
        if self.host.promotion != "auto":
            kind += f", swaps by {self.host.promotion}"
        return kind + (f", host nice {pool.nice}" if pool.nice else "")


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What one run gave; steps with their ops only where they were kept."""

    records: tuple[StepRecord, ...]
    steps: tuple[StepOps, ...]
    ending: Ending
    overrun_share: float  # the larger of `pace_lost`; nan where nothing is paced
    slots: tuple[int, ...]  # of each layer
    planned_for: HardwareProfile | None  # whose memory a budget may fill; None: nobody's
    host_memory: str = ""  # of Device.status

    def per_token(self, name: str) -> float:
        """Mean of a StepRecord field over the decode steps."""
        return fmean(getattr(r, name) for r in self.records if r.phase == "decode")


def run_forced(
    model_dir: str | Path,
    settings: Settings,
    machine: Machine,
    sequences: Sequence[Tokens],
    *,
    prefill: int,
    prior: Trace | None = None,
    keep_ops: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
) -> LiveRun:
    """Feed the sequences' own tokens; each has a fresh KV cache, residency stays."""
    emulate = machine.profile
    time_scale = None if emulate is None else 1.0  # the profile has been slowed already
    device = device_for(
        settings, model_dir, machine.device,
        emulate=emulate, time_scale=time_scale, host=machine.host,
    )  # fmt: skip
    records, steps = [], []
    with device:
        longest = max(tokens.size for tokens in sequences)
        runner = start(
            model_dir, settings, device, prior=prior, context_len=longest,
            cache_dir=machine.host.cache_dir,
        )  # fmt: skip
        device.ops.clear()
        runner.keep_ops = keep_ops
        with runner, _no_garbage_collection():
            forced = runner.run(sequences, prefill=prefill, prefill_chunk=settings.prefill_chunk)
            for _, record in forced:
                records.append(record)
                if keep_ops:
                    ops, runner.ops = runner.ops, []
                    began_ns = min(op.t0_ns for op in ops if op.lane == "gpu")
                    ended_ns = began_ns + round(record.wall_s * NS)
                    steps.append(StepOps(began_ns, ended_ns, record.n_tokens, ops))
                if on_step is not None:
                    on_step(record)
        assert runner.ending is not None
        overruns = max(pace_lost(device))
        memory = str(device.status.get("host_memory", ""))
        slots, planned_for = tuple(runner.cache.capacity), device.profile
    if not any(record.phase == "decode" for record in records):
        raise KairoxError("the run has no decode steps; give more tokens than the prefill")
    return LiveRun(
        tuple(records), tuple(steps), runner.ending, overruns, slots, planned_for, memory
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection takes longer than an op; timed runs do without, as `timeit` does."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def timed(settings: Settings, run: LiveRun) -> TimedRun:
    """A run, as calibration wants it."""
    return TimedRun(
        label=label(settings),
        policy_class=POLICIES[settings.policy].__name__.lower(),
        steps=run.steps,
        seconds_per_token=run.per_token("wall_s"),
        residual_per_token=run.per_token("residual"),
        overrun_share=run.overrun_share,
        host_memory=run.host_memory,
    )


def machine_for(
    model_dir: str | Path,
    device: str,
    *,
    emulate: HardwareProfile | str | Path | None = None,
    kind: Settings | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    host: HostSide = ONE_THREAD,
) -> Machine:
    """The machine of a set of runs: one pace for all its settings.

    kind: how they run (model_as, gating, numerics, weights, dtype), see `kind_of`; the defaults
    otherwise.
    """
    chosen, kind = choose_device(device), kind or Settings()
    if chosen != "emulated":
        refuse_pace(chosen, emulate=emulate, time_scale=time_scale, link=link)
        return Machine(chosen, numerics=kind.numerics, host=host)
    if emulate is None:
        raise KairoxError("device 'emulated' needs a profile to emulate, such as emu-pc1 or pc1")
    profile = emulated_profile(
        emulate, charged_shape(model_dir, kind), kind.gating,
        time_scale=time_scale, link=link, numerics=kind.numerics,
    )  # fmt: skip
    return Machine("emulated", profile, kind.numerics, host)


def calibration_settings(
    n_neurons: int, kind: Settings | None = None, *, ahead: Trigger = "attn_out"
) -> list[Settings]:
    """What calibration runs: every kind of op, and sizes that tell fixed costs from rates.

    kind: how they run. ahead: when a predictor is asked. No budget here is a round fraction, so
    that settings under test are hardly ever among them.
    """
    # Budgets are numbers, so memory plays no part in these runs.
    base = (kind or Settings()).with_overrides({"vram": None})
    return [
        base.with_overrides(one)
        for one in (
            {"policy": "none"},
            {"policy": "lru", "slots": n_neurons * 3 // 13},
            {
                "policy": "tam",
                "policy_params": {"theta_promote": 0.15},
                "slots": n_neurons * 5 // 13,
            },
            {"policy": "lfu", "slots": n_neurons * 2 // 13, "trigger": ahead, "late": "stall"},
        )
    ]


def calibrate(
    model_dir: str | Path,
    text: ForcedText,
    machine: Machine,
    *,
    kind: Settings | None = None,
    settings: Sequence[Settings] | None = None,
    on_run: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Run a few settings on this machine and fit a profile to what their ops took.

    text: other tokens than the profile will be judged on. kind: how the runs that it is for are
    run, see `kind_of`; its vram is the memory that the profile says. settings:
    `calibration_settings` unless given. on_run: (label, done, of how many), for progress. Raises
    KairoxError where an emulated machine could not keep its pace, or a kind of op is missing.
    """
    kind = kind or Settings(numerics=machine.numerics)
    shape = model_shape(model_dir, kind)
    chosen = list(settings or calibration_settings(shape.n_neurons, kind, ahead=_ahead(kind)))
    made_as = all_as(model_dir, chosen)
    require_numerics(machine, made_as.numerics)
    known = machine.profile or this_machine(machine.device)
    if kind.vram is not None:
        known = with_vram(known, parse_bytes(kind.vram))
    target = charged_shape(model_dir, kind)
    costs = costs_for(
        known,
        target,
        made_as.gating,
        trace_layers=shape.n_layers,
        trace_neurons=shape.n_neurons,
        predictor=made_as.predictor.partition(" ")[0],
        numerics=machine.numerics,
    )
    sequences, runs = text.sequences(model_dir), []
    for at, setting in enumerate(chosen):
        if on_run is not None:
            on_run(label(setting), at, len(chosen))
        run = run_forced(
            model_dir, setting, machine, sequences, prefill=text.prefill, keep_ops=True
        )
        runs.append(timed(setting, run))
    if on_run is not None:
        on_run("fitting", len(chosen), len(chosen))
    calibration = fit_profile(
        runs,
        costs,
        name=_calibrated_name(machine),
        machine=known,
        measured_on=machine.label.removeprefix("measured on "),
        calibrated_as=target.name,
    )
    conditions = {
        "time": machine.label,
        "as_run": asdict(made_as),
        "model_as": kind.model_as,
        "decode_tokens": sum(tokens.size - text.prefill for tokens in sequences),
        "machine": machine_facts(),
    }
    return replace(calibration, conditions=conditions)


def require_numerics(machine: Machine, numerics: str) -> None:
    """The machine's label names its numerics, so runs on it have those."""
    if numerics != machine.numerics:
        raise KairoxError(
            f"the settings have numerics {numerics!r} and the machine was made for "
            f"{machine.numerics!r}; give `machine_for` the settings' kind"
        )


def _ahead(kind: Settings) -> Trigger:
    """When the predictor is asked: a trained one as it was trained."""
    if kind.predictor_file is None:
        return "attn_out"
    trigger: Any = load_predictor(kind.predictor_file).trigger
    return trigger  # type: ignore[no-any-return]


def _calibrated_name(machine: Machine) -> str:
    """An emulated machine is slower than the one it stands for: its name says how much."""
    if machine.profile is None:
        return f"calibrated-{machine.device}"
    return f"calibrated-{machine.profile.name}-slowed-{machine.profile.time_scale:g}x"

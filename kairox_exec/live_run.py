"""One live run over forced tokens, Settings to records: what calibration and validation repeat.

`calibrate` runs a few settings and fits a profile to what their ops took.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_exec.calibration import Calibration, StepOps, TimedRun, fit_profile
from kairox_exec.live import (
    ONE_THREAD,
    HostSide,
    choose_device,
    device_for,
    emulated_profile,
    model_shape,
    start,
)
from kairox_exec.live_device import this_machine
from kairox_exec.machine import machine_facts
from kairox_exec.oplog import NS
from kairox_exec.runner import Ending
from kairox_exec.text import encode_file, load_tokenizer, windows
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, LinkProfile
from kairox_sim.model import Numerics
from kairox_sim.policies import POLICIES
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, label, shape_of
from kairox_sim.trace import Trace

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
        """Emulated or measured, for every table."""
        if self.profile is None:
            here = "GPU" if self.device == "cuda" else self.device
            return f"measured on this machine's {here}{self._kind()}"
        slowed = f"slowed {self.profile.time_scale:g} x"
        return f"emulated {self.profile.name}, {slowed}{self._kind()}"

    def _kind(self) -> str:
        pool, kind = self.host.pool, "" if self.numerics == "fast" else f", {self.numerics}"
        if pool.threads > 1:
            kind += f", {pool.threads} host threads"
        return kind + (f", host nice {pool.nice}" if pool.nice else "")


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What one run gave; steps with their ops only where they were kept."""

    records: tuple[StepRecord, ...]
    steps: tuple[StepOps, ...]
    ending: Ending
    overrun_share: float
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
        overruns = device.n_overruns / max(1, device.n_ops)
        memory = str(device.status.get("host_memory", ""))
    if not any(record.phase == "decode" for record in records):
        raise KairoxError("the run has no decode steps; give more tokens than the prefill")
    return LiveRun(tuple(records), tuple(steps), runner.ending, overruns, memory)


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
    model_as: str | None = None,
    gating: str = "exact",
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    numerics: Numerics = "fast",
    host: HostSide = ONE_THREAD,
) -> Machine:
    """The machine of a set of runs: one pace for all its settings."""
    chosen = choose_device(device)
    if chosen != "emulated":
        return Machine(chosen, numerics=numerics, host=host)
    if emulate is None:
        raise KairoxError("device 'emulated' needs a profile to emulate, such as emu-pc1 or pc1")
    target = model_shape(model_dir) if model_as is None else shape_of(model_as)
    profile = emulated_profile(
        emulate, target, gating, time_scale=time_scale, link=link, numerics=numerics
    )
    return Machine("emulated", profile, numerics, host)


def calibration_settings(
    n_neurons: int, model_as: str | None = None, numerics: Numerics = "fast"
) -> list[Settings]:
    """What calibration runs: every kind of op, and sizes that tell fixed costs from rates.

    No budget here is a round fraction, so that settings under test are hardly ever among them.
    """
    common: dict[str, Any] = {"model_as": model_as, "numerics": numerics}
    return [
        Settings(policy="none", **common),
        Settings(policy="lru", slots=n_neurons * 3 // 13, **common),
        Settings(
            policy="tam", policy_params={"theta_promote": 0.15}, slots=n_neurons * 5 // 13, **common
        ),
        Settings(
            policy="lfu", slots=n_neurons * 2 // 13, trigger="attn_out", late="stall", **common
        ),
    ]


def calibrate(
    model_dir: str | Path,
    text: ForcedText,
    machine: Machine,
    *,
    model_as: str | None = None,
    settings: Sequence[Settings] | None = None,
    on_run: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Run a few settings on this machine and fit a profile to what their ops took.

    text: other tokens than the profile will be judged on. settings: `calibration_settings` unless
    given. on_run: (label, done, of how many), for progress. Raises KairoxError where an emulated
    machine could not keep its pace, or a kind of op is missing.
    """
    shape = model_shape(model_dir)
    chosen = list(settings or calibration_settings(shape.n_neurons, model_as, machine.numerics))
    target = shape if model_as is None else shape_of(model_as)
    known = machine.profile or this_machine(machine.device)
    costs = costs_for(
        known,
        target,
        chosen[0].gating,
        trace_layers=shape.n_layers,
        trace_neurons=shape.n_neurons,
        predictor="lookahead",
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
        measured_on=machine.label,
        calibrated_as=target.name,
    )
    conditions = {
        "time": machine.label,
        "model_as": model_as,
        "decode_tokens": sum(tokens.size - text.prefill for tokens in sequences),
        "machine": machine_facts(),
    }
    return replace(calibration, conditions=conditions)


def _calibrated_name(machine: Machine) -> str:
    """An emulated machine is slower than the one it stands for: its name says how much."""
    if machine.profile is None:
        return f"calibrated-{machine.device}"
    return f"calibrated-{machine.profile.name}-slowed-{machine.profile.time_scale:g}x"

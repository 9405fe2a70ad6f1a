"""Calibration: fits on numbers worked out by hand, and a profile that follows the machine."""

from pathlib import Path

import numpy as np
import pytest

from kairox_exec.calibration import (
    OVERRUN_LIMIT,
    Calibration,
    PaceError,
    StepOps,
    TimedRun,
    fit_profile,
)
from kairox_exec.fitting import fit_copies, fit_line
from kairox_exec.live import set_threads
from kairox_exec.live_run import ForcedText, Machine, calibrate, machine_for
from kairox_exec.oplog import Op, Size
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, load_profile
from kairox_sim.model import find_shape
from kairox_sim.settings import Settings

TARGET = "prosparse-7b"
KIND = Settings(model_as=TARGET)
N = 1  # decode token


def test_a_line_is_found_through_outliers() -> None:
    sizes = np.arange(1, 101, dtype=float) * 1e6
    seconds = 3e-4 + sizes / 2e9
    seconds[::20] *= 5  # one op in twenty was disturbed
    line = fit_line("ffn", sizes.tolist(), seconds.tolist())
    assert line.told_apart
    assert line.fixed_s == pytest.approx(3e-4, rel=1e-6)
    assert line.per_s == pytest.approx(2e9, rel=1e-6)
    assert line.median_error < 1e-9


def test_one_size_only_is_charged_to_the_rate_and_says_so() -> None:
    line = fit_line("gate", [4e6] * 30, [2e-3] * 30)
    assert (line.fixed_s, line.told_apart) == (0.0, False)
    assert line.per_s == pytest.approx(2e9)
    assert "charged to the rate" in line.how


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(KairoxError, match="no ffn ops to calibrate on"):
        fit_line("ffn", [], [])


def test_copies_and_bytes_are_told_apart_jointly() -> None:
    copies, n_bytes = np.array([1.0, 8, 1, 16] * 10), np.array([1e6, 4e6, 2e4, 9e6] * 10)
    seconds = 6e-6 * copies + n_bytes / 12e9
    fixed, rate, error = fit_copies(copies.tolist(), n_bytes.tolist(), seconds.tolist())
    assert fixed == pytest.approx(6e-6)
    assert rate == pytest.approx(12e9)
    assert error < 1e-9


def costs_on(profile: HardwareProfile) -> CostModel:
    return costs_for(
        profile,
        find_shape(TARGET),
        "exact",
        trace_layers=6,
        trace_neurons=896,
        predictor="lookahead",
    )


def test_a_machine_that_cannot_keep_its_pace_is_refused() -> None:
    op = Op("gpu", "attention", 0, 0, 10, Size(n_tokens=1, context_len=1))
    run = TimedRun("busy", "tam", [StepOps(0, 10, 1, [op])], 1.0, 1.0, OVERRUN_LIMIT * 1.01)
    profile = load_profile("emu-pc1")
    with pytest.raises(PaceError, match=r"fell behind .* pace by .*--time-scale"):
        fit_profile([run], costs_on(profile), name="x", machine=profile, measured_on="x",
                    calibrated_as=None)  # fmt: skip


def op_seconds(costs: CostModel) -> dict[str, float]:
    """What a decode step is made of, at sizes that occur in it."""
    return {
        "attention": costs.attention_s(N, 64),
        "gate": costs.gate_s(N),
        "ffn_gpu": costs.ffn_gpu_s(60, N),
        "ffn_cpu": costs.ffn_cpu_s(60, N),
        "head": costs.head_s(1),
        "h2d": costs.swap_s(30),
        "decide": 0.0,
    }


@pytest.mark.slow
def test_the_fit_follows_every_pacing_constant(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    """Every op that makes up 5 % of a step is paced 30 % up or down; the fit follows within 5 %."""
    set_threads(1)
    base = machine_for(
        tiny_reglu_dir, "emulated", emulate="emu-pc1", kind=KIND, time_scale=8
    ).profile
    assert base is not None
    paced = op_seconds(costs_on(base))
    step_s = 6 * (paced["attention"] + paced["gate"] + paced["ffn_cpu"]) + paced["head"]
    parts = [name for name, s in paced.items() if s * (1 if name == "head" else 6) >= 0.05 * step_s]
    assert {"attention", "gate", "ffn_cpu", "h2d"} <= set(parts)
    text = ForcedText([prompts_dir / "prose.txt"], tokens=56, skip=12288)
    for first in (1.3, 1 / 1.3):
        profile = base
        for at, name in enumerate(parts):
            entry = getattr(profile, name)
            factor = first if at % 2 == 0 else 1 / first  # neighbours go opposite ways
            slower = {
                key: getattr(entry, key).model_copy(
                    update={
                        "value": getattr(entry, key).value
                        * (1 / factor if key.endswith("_per_s") else factor)
                    }
                )
                for key in type(entry).model_fields
                if getattr(entry, key) is not None
            }
            profile = profile.model_copy(update={name: entry.model_copy(update=slower)})
        machine = Machine("emulated", profile)
        try:
            calibration = calibrate(tiny_reglu_dir, text, machine, kind=KIND)
        except PaceError as error:
            pytest.skip(f"this machine is too busy to emulate another: {error}")
        fitted, asked = op_seconds(costs_on(calibration.profile)), op_seconds(costs_on(profile))
        for name in parts:
            moved = asked[name] / paced[name]
            assert moved == pytest.approx(1.3, rel=0.01) or moved == pytest.approx(
                1 / 1.3, rel=0.01
            )
            assert fitted[name] == pytest.approx(asked[name], rel=0.05), name
    again = Calibration.load(calibration.dump(tmp_path / "hw.toml"))
    assert again.profile == calibration.profile
    assert [run["setting"] for run in again.runs] == [run["setting"] for run in calibration.runs]


def test_copies_from_pageable_memory_do_not_calibrate_the_link() -> None:
    profile = load_profile("pc1")
    run = TimedRun("lru", "lru", [], 1.0, 1.0, 0.0, host_memory="pageable: error 2")
    with pytest.raises(KairoxError, match=r"lru: the link cannot.*pageable: error 2.*ulimit -l"):
        fit_profile([run], costs_on(profile), name="x", machine=profile, measured_on="x",
                    calibrated_as=None)  # fmt: skip

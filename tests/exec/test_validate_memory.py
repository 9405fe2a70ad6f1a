"""Budgets that fill device memory: live and simulated plan the same one, from the live machine."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kairox_exec import validation
from kairox_exec.as_run import AsRun
from kairox_exec.calibration import Calibration
from kairox_exec.host_pool import HostPool
from kairox_exec.live import HostSide, model_shape
from kairox_exec.live_run import ForcedText, LiveRun, Machine, run_forced
from kairox_exec.machine import machine_facts
from kairox_exec.validation import same_memory, validate, with_memory_of
from kairox_sim.calllog import read_call_log
from kairox_sim.costs import max_slots
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile, scaled, with_margin, with_vram
from kairox_sim.settings import Settings

RUNS = ({"seconds_per_token": 0.02, "residual_per_token": 100.0},)
PC1 = load_profile("pc1")  # 12 GiB: all of this model, if a budget were planned for it
HASTY = scaled(load_profile("emu-pc1"), 1e-6)  # paced by nothing that takes time
SMALL = with_vram(with_margin(HASTY, 1e6, "a test"), 12e6)
BUILT = validation.build_cache


def calibration(machine: Machine) -> Calibration:
    as_run = AsRun("tiny-reglu", "fast", "float32", "float32", "exact", "lookahead")
    said = {"time": machine.label, "as_run": asdict(as_run), "machine": machine_facts()}
    return Calibration(PC1, (), RUNS, said)


def text_of(prompts_dir: Path) -> ForcedText:
    return ForcedText([prompts_dir / "prose.txt"], tokens=18, prefill=14)


@pytest.mark.parametrize(
    ("machine", "settings", "n_bytes"),
    [
        (Machine("cpu"), Settings(policy="lru", vram="12MB"), 12e6),  # and no margin
        (Machine("emulated", HASTY), Settings(policy="lru", vram="1312MB"), 12e6),  # and 1.3 GB
        (Machine("emulated", SMALL), Settings(policy="lru", slots="vram"), 11e6),
        (Machine("emulated", SMALL),
         Settings(policy="lfu", slots="vram", vram="10MB", trigger="attn_out"), 9e6),
    ],
    ids=["cpu", "emulated", "its own", "less than its own"],
)  # fmt: skip
def test_live_and_simulated_have_the_slots_that_fit(
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    settings: Settings,
    n_bytes: float,
) -> None:
    simulated: list[Sequence[int]] = []

    def seen(*given: Any, **more: Any) -> Any:
        cache = BUILT(*given, **more)
        simulated.append(cache.capacity)
        return cache

    monkeypatch.setattr(validation, "build_cache", seen)
    result = validate(
        tiny_reglu_dir, [settings], text_of(prompts_dir), calibration(machine), machine, tmp_path,
        repeats=1,
    )  # fmt: skip
    assert result.table["g1_differences"].tolist() == [0]
    assert result.table["g2_differences"].tolist() == [0]
    (log,) = tmp_path.glob("*.calls.arrow")
    recorded = read_call_log(log)[0]["slots"]
    assert all(list(slots) == recorded for slots in simulated)
    assert len(simulated) >= 4  # looked at, and for G1, G2 and the free simulation
    bare = with_margin(with_vram(PC1, n_bytes), 0.0, "taken off")
    most = max_slots(bare, model_shape(tiny_reglu_dir), "exact", 18, predictor="lookahead")
    assert recorded == [most] * 6
    assert 0 < most < 896


def test_another_budget_in_a_repeat_is_another_setting(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def less(*given: Any, **more: Any) -> LiveRun:
        return replace(run_forced(*given, **more), slots=(7,) * 6)

    monkeypatch.setattr(validation, "run_forced", less)
    machine, settings = Machine("cpu"), Settings(policy="lru", slots=9)
    with pytest.raises(KairoxError, match=r"had \[9, 9, 9, 9, 9, 9\] slots.* has \[7, 7"):
        validate(
            tiny_reglu_dir, [settings], text_of(prompts_dir), calibration(machine), machine,
            tmp_path, repeats=1,
        )  # fmt: skip


def test_memory_is_the_live_machines_and_rates_are_the_calibrations() -> None:
    found = same_memory(PC1, SMALL)
    assert found.vram_bytes.value == 12e6
    assert found.vram_margin_bytes.value == 1e6
    rest = {"vram_bytes", "vram_margin_bytes"}
    assert found.model_dump(exclude=rest) == PC1.model_dump(exclude=rest)
    assert same_memory(PC1, None) is PC1


def test_a_gpus_free_memory_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has used stays with torch, so a second run would be given fewer slots."""
    monkeypatch.setattr(validation, "this_machine", lambda device: with_vram(PC1, 5.5 * 2**20))
    gpu, fills = Machine("cuda"), Settings(slots="vram")
    assert with_memory_of(gpu, fills).vram == "5MiB"
    for machine, same in (
        (gpu, Settings(slots=100)),
        (gpu, Settings(slots="vram", vram="2MiB")),
        (gpu, Settings(vram="2MiB")),
        (Machine("emulated", SMALL), fills),
    ):
        assert with_memory_of(machine, same) is same


def test_the_recorded_run_has_the_host_of_the_timed_ones(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostSide(HostPool(2, 0), cache_dir="off")

    def stop(*given: Any, **more: Any) -> None:
        raise KairoxError(f"asked for {more['host'] is host}")

    monkeypatch.setattr(validation, "record", stop)
    machine = Machine("cpu", host=host)
    with pytest.raises(KairoxError, match="asked for True"):
        validate(
            tiny_reglu_dir, [Settings()], text_of(prompts_dir), calibration(machine), machine,
            tmp_path,
        )  # fmt: skip

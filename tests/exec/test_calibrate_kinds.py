"""Calibration of runs of every kind: formats, gatings, predictors; what the program passes on."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec import live_run
from kairox_exec.as_run import AsRun
from kairox_exec.calibration import Calibration, StepOps, TimedRun, fit_profile
from kairox_exec.live_run import (
    ForcedText,
    Machine,
    calibrate,
    calibration_settings,
    machine_for,
)
from kairox_exec.machine import machine_facts
from kairox_exec.oplog import Op, Size
from kairox_exec.validation import validate
from kairox_sim.cli import main
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, load_profile
from kairox_sim.model import find_shape
from kairox_sim.settings import Settings

Capture = pytest.CaptureFixture[str]
TRAINED = Path(__file__).parents[2] / "experiments" / "models" / "tiny-reglu-predictor.safetensors"
CPU = Machine("cpu")


# -- the fit --------------------------------------------------------------------------------------


def costs_of(gating: str, predictor: str) -> CostModel:
    return costs_for(
        load_profile("pc1"), find_shape("prosparse-7b"), gating, trace_layers=6, trace_neurons=896,
        predictor=predictor,
    )  # fmt: skip


def step_of(costs: CostModel, at: int) -> StepOps:
    """A decode step of one layer, each op as long as the costs say."""
    n, t, ops = 20 + at % 50, 0, []

    def add(lane: str, kind: str, seconds: float, **size: Any) -> None:
        nonlocal t
        if seconds == 0:  # as live: no kernel, no op
            return
        began, t = t, t + round(seconds * 1e9)
        ops.append(Op(lane, kind, 0, began, t, Size(n_tokens=1, **size)))

    add("gpu", "attention", costs.attention_s(1, 1 + at), context_len=1 + at)
    add("gpu", "predict", costs.predict_s(1))
    add("gpu", "gate", costs.gate_s(1))
    waits_from = t
    add("d2h", "x", costs.act_d2h_s(1), n_bytes=costs.act_d2h_bytes(1))
    add("cpu", "residual", costs.ffn_cpu_s(n, 1), neurons=n)
    add("h2d", "partial sums", costs.act_h2d_s(1), n_bytes=costs.act_h2d_bytes(1))
    ops.append(Op("idle", "cpu", 0, waits_from, t, Size()))
    add("gpu", "ffn", costs.ffn_gpu_s(n, 1), neurons=n)
    add("gpu", "head", costs.head_s(1))
    ended = t
    add("h2d", "swap", costs.swap_s(n), neurons=n, n_bytes=costs.swap_bytes(n))
    return StepOps(0, ended, 1, ops)


def fitted(costs: CostModel) -> HardwareProfile:
    chunk = [
        Op("gpu", kind, 0, 0, 1, Size(neurons=9, n_tokens=8, context_len=8))
        for kind in ("attention", "ffn", "residual")
    ]
    steps = [*(step_of(costs, at) for at in range(60)), StepOps(0, 1, 8, chunk)]
    run = TimedRun("x", "tam", steps, 1.0, 1.0, float("nan"))
    return fit_profile([run], costs, name="x", machine=load_profile("pc1"), measured_on="x",
                       calibrated_as=None).profile  # fmt: skip


def not_run(profile: HardwareProfile) -> set[str]:
    parts = {"gate": profile.gate, "predictor": profile.predictor}
    return {name for name, op in parts.items() if "was run, so" in op.bytes_per_s.source}


@pytest.mark.parametrize("gating", ["exact", "screened", "oracle", "predicted"])
@pytest.mark.parametrize("predictor", ["lookahead", "rank"])
def test_deciding_and_predicting_are_found_under_every_gating(gating: str, predictor: str) -> None:
    """A look-ahead has other kernels than the gate: here it takes three times as long."""
    costs = costs_of(gating, predictor)
    slow = replace(costs.look_ahead, bytes_per_s=costs.look_ahead.bytes_per_s / 3)
    costs = replace(costs, look_ahead=slow)
    found = fitted(costs)
    again = costs_for(found, costs.shape, gating, trace_layers=6, trace_neurons=896,
                      predictor=predictor)  # fmt: skip
    assert again.gate_s(1) == pytest.approx(costs.gate_s(1), rel=0.01)
    assert again.predict_s(1) == pytest.approx(costs.predict_s(1), rel=0.01)
    assert again.ffn_gpu_s(40, 1) == pytest.approx(costs.ffn_gpu_s(40, 1), rel=0.01)
    assert not_run(found) == (set() if gating in ("exact", "screened") else {"gate"})


def test_without_a_predictor_its_entry_says_so_and_without_both_there_is_no_profile() -> None:
    found = fitted(costs_of("exact", "none"))
    assert not_run(found) == {"predictor"}
    assert found.predictor.bytes_per_s.value == found.gate.bytes_per_s.value
    with pytest.raises(KairoxError, match="no gate ops to calibrate on"):
        fitted(costs_of("oracle", "none"))


def test_a_datasheets_look_ahead_is_a_pass_of_the_gate() -> None:
    costs = costs_of("exact", "lookahead")
    assert costs.look_ahead == costs.gate != costs.low_rank


# -- what is run ----------------------------------------------------------------------------------


def test_calibration_runs_are_run_as_what_they_are_for() -> None:
    kind = Settings(
        model_as="prosparse-7b", weights="q8_0", dtype="bfloat16", gating="screened",
        numerics="deterministic", vram="1GiB", predictor_file="p.safetensors",
    )  # fmt: skip
    made = calibration_settings(896, kind, ahead="attn_in")
    for name in ("model_as", "weights", "dtype", "gating", "numerics", "predictor_file"):
        assert {getattr(one, name) for one in made} == {getattr(kind, name)}
    assert {one.vram for one in made} == {None}
    assert [one.trigger for one in made] == [None, None, None, "attn_in"]
    assert [one.policy for one in made] == ["none", "lru", "tam", "lfu"]


@pytest.fixture(scope="module")
def made(tiny_reglu_dir: Path, prompts_dir: Path) -> Calibration:
    kind = Settings(weights="int8", gating="predicted", predictor_file=str(TRAINED), vram="64MB")
    text = ForcedText([prompts_dir / "prose.txt"], tokens=18, prefill=12, skip=12288)
    return calibrate(tiny_reglu_dir, text, CPU, kind=kind)


def test_a_calibration_says_what_it_was_made_as(made: Calibration, tmp_path: Path) -> None:
    again = Calibration.load(made.dump(tmp_path / "hw.toml"))
    assert again.conditions["as_run"] == {
        "model": "tiny-reglu@ffn-int8", "numerics": "fast", "weights": "int8", "dtype": "float32",
        "gating": "predicted", "predictor": "rank 96",
    }  # fmt: skip
    assert again.profile == made.profile
    assert made.profile.calibrated_as == "tiny-reglu@ffn-int8"
    assert made.profile.vram_bytes.value == 64e6
    assert "no gate was run" in made.profile.gate.bytes_per_s.source
    assert "predict ops" in made.profile.predictor.bytes_per_s.source
    assert all(run["overrun_share"] is None for run in again.runs)  # nothing was paced


def test_it_validates_such_runs_and_no_others(
    made: Calibration, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    text = ForcedText([prompts_dir / "prose.txt"], tokens=16, prefill=12)
    runs = Settings(
        policy="lru", slots=120, trigger="attn_out", weights="int8", gating="predicted",
        predictor_file=str(TRAINED),
    )  # fmt: skip
    found = validate(tiny_reglu_dir, [runs], text, made, CPU, tmp_path, repeats=1)
    assert found.table[["g1_differences", "g2_differences"]].to_numpy().tolist() == [[0, 0]]
    assert found.table["overrun_share"].isna().all()
    assert found.conditions["as_run"] == made.conditions["as_run"]
    for change, why in (
        ({"weights": "q4_0"}, r"weights int8 and these runs .* weights q4_0"),
        (
            {"gating": "exact", "predictor_file": None},
            r"gating predicted and predictor rank 96 .* gating exact and predictor lookahead",
        ),
    ):
        other = runs.with_overrides(change)
        with pytest.raises(KairoxError, match=why):
            validate(tiny_reglu_dir, [other], text, made, CPU, tmp_path, repeats=1)


def test_a_machine_made_for_other_numerics_is_refused(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    kind = Settings(numerics="deterministic")
    text = ForcedText([prompts_dir / "prose.txt"], tokens=18)
    with pytest.raises(KairoxError, match="numerics 'deterministic' and the machine was made for"):
        calibrate(tiny_reglu_dir, text, CPU, kind=kind)


def test_an_emulated_machine_has_the_pace_of_what_it_runs(tiny_reglu_dir: Path) -> None:
    """Fewer bytes a layer: slowed further until the shortest one lasts as long."""

    def scale(**kind: Any) -> float:
        made = machine_for(tiny_reglu_dir, "emulated", emulate="pc1", kind=Settings(**kind))
        assert made.profile is not None
        return made.profile.time_scale

    assert scale(weights="q4_0", model_as="prosparse-7b") > scale(model_as="prosparse-7b")
    linked = machine_for(tiny_reglu_dir, "emulated", emulate="pc1", link="pcie3")
    assert "pc1+pcie3" in linked.label
    for option in ({"emulate": "pc1"}, {"time_scale": 2.0}, {"link": "pcie3"}):
        with pytest.raises(KairoxError, match="is for the emulated device and the device is 'cpu'"):
            machine_for(tiny_reglu_dir, "cpu", **option)  # type: ignore[arg-type]


def test_torch_threads_of_the_cpu_device_are_in_its_label() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert CPU.label.endswith("cpu, 2 torch threads")
        assert "torch" not in Machine("emulated", load_profile("pc1")).label
    finally:
        torch.set_num_threads(before)
    assert "torch" not in CPU.label


# -- the program ----------------------------------------------------------------------------------


def kairox(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert (ended.value.code or 0) == code


class Asked(Exception):  # noqa: N818  (no error: a way out once what was asked is known)
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program would have calibrated; nothing is run."""
    seen: dict[str, Any] = {}

    def stop(model: Path, text: ForcedText, machine: Machine, **more: Any) -> Calibration:
        seen.update(more, machine=machine)
        raise Asked

    monkeypatch.setattr(live_run, "calibrate", stop)
    return seen


OPTIONS = ("--device", "emulated", "--emulate", "pc1", "--link", "pcie5", "--as", "prosparse-7b",
           "--weights", "int8", "--dtype", "bfloat16", "--gating", "screened", "--numerics",
           "deterministic", "--vram", "6GiB")  # fmt: skip


def test_calibrate_and_validate_calibrate_the_same(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    given = ("--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt", *OPTIONS)
    kinds, labels = [], []
    for command in (
        ("calibrate", *given, "-o", tmp_path / "hw.toml"),
        ("validate", *given, "-o", tmp_path / "report", "--policy", "lru", "--slots", 40),
    ):
        with pytest.raises(Asked):
            main([str(a) for a in command])
        kinds.append(asked["kind"])
        labels.append(asked["machine"].label)
    assert kinds[0] == kinds[1] == Settings(
        model_as="prosparse-7b", weights="int8", dtype="bfloat16", gating="screened",
        numerics="deterministic", vram="6GiB",
    )  # fmt: skip
    assert labels[0] == labels[1]
    assert "pc1+pcie5" in labels[0]
    assert labels[0].endswith("deterministic")


def test_calibrate_takes_a_predictor(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    given = ("calibrate", "--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt",
             "--device", "cpu", "-o", tmp_path / "hw.toml")  # fmt: skip
    for options, said in (
        (("--predictor-file", TRAINED), ("rank", str(TRAINED))),
        (("--gating", "predicted", "--predictor", "lookahead"), ("lookahead", None)),
    ):
        with pytest.raises(Asked):
            main([str(a) for a in (*given, *options)])
        assert (asked["kind"].predictor, asked["kind"].predictor_file) == said


def test_validate_refuses_a_profile_of_other_runs(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = Settings(policy="lru", slots=40, trigger="attn_out")
    said = {
        "time": CPU.label,
        "as_run": asdict(AsRun.of(tiny_reglu_dir, settings)),
        "machine": machine_facts(),
    }
    runs = ({"seconds_per_token": 0.1, "residual_per_token": 1.0},)
    path = Calibration(load_profile("pc1"), (), runs, said).dump(tmp_path / "hw.toml")
    report = tmp_path / "report"
    given = ("validate", "--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt",
             "--device", "cpu", "--policy", "lru", "--set", "trigger=attn_out")  # fmt: skip
    for options, why in (
        (("--gating", "screened"), "gating exact and these runs are with gating screened"),
        (("--weights", "int8"), "weights float32 and these runs are with model"),
        (("--dtype", "float16"), "dtype float32 and these runs are with weights float16"),
        (("--host-threads", 2), "those of these runs measured on this machine's cpu, 2 host"),
    ):
        kairox(*given, *options, "--hardware", path, "-o", report, code=2)
        assert why in " ".join(capsys.readouterr().err.split())
    assert list(report.glob("*")) == []
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    settings.dump(first)
    settings.with_overrides({"numerics": "deterministic"}).dump(second)
    kairox(*given, "-o", report, "--settings", first, second, code=2)
    assert "numerics fast and" in " ".join(capsys.readouterr().err.split())

"""Validation: rows against runs and simulations made again by hand; priors; what is refused."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kairox_exec import validation
from kairox_exec.calibration import Calibration
from kairox_exec.live_run import ForcedText, LiveRun, Machine, run_forced
from kairox_exec.machine import machine_facts
from kairox_exec.recording import record
from kairox_exec.text import encode_file, load_tokenizer
from kairox_exec.validation import Validation, validate
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile, scaled
from kairox_sim.metrics import steps_frame, summarise
from kairox_sim.settings import Settings, label
from kairox_sim.simulation import simulate
from kairox_sim.trace import read_trace

CPU = Machine("cpu")
RUNS = (
    {"seconds_per_token": 0.02, "residual_per_token": 100.0},
    {"seconds_per_token": 0.04, "residual_per_token": 500.0},
)
AS_RUN = {
    "model": "tiny-reglu", "numerics": "fast", "weights": "float32", "dtype": "float32",
    "gating": "exact", "predictor": "lookahead",
}  # fmt: skip
CONDITIONS = {"time": CPU.label, "as_run": AS_RUN, "machine": machine_facts()}
CALIBRATION = Calibration(load_profile("pc1"), (), RUNS, CONDITIONS)


def _text(prompts_dir: Path) -> ForcedText:
    return ForcedText([prompts_dir / "prose.txt"], tokens=44)


@pytest.fixture(scope="module")
def priors(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    folder = tmp_path_factory.mktemp("priors")
    made = []
    for domain in ("code", "math"):
        out = folder / f"{domain}.arrow"
        record(tiny_reglu_dir, prompts_dir / f"{domain}.txt", out, tokens=48)
        made.append(str(out))
    return made


@pytest.fixture(scope="module")
def settings(priors: list[str]) -> list[Settings]:
    low = {"theta_promote": 0.12, "theta_evict": 0.05}
    return [
        Settings(policy="static", slots=150, prior=priors[0]),
        Settings(policy="static", slots=150, prior=priors[1], trigger="attn_out"),
        Settings(policy="tam", slots=150, policy_params=low, swap_neurons=3),
    ]


Made = tuple[Validation, list[tuple[Settings, LiveRun]], Path]


@pytest.fixture(scope="module")
def made(
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    settings: list[Settings],
    tmp_path_factory: pytest.TempPathFactory,
) -> Made:
    """A validation of two repeats, and the runs that it timed."""
    runs: list[tuple[Settings, LiveRun]] = []

    def watched(model_dir: Path, setting: Settings, *rest: Any, **more: Any) -> LiveRun:
        run = run_forced(model_dir, setting, *rest, **more)
        runs.append((setting, run))
        return run

    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "run_forced", watched)
        result = validate(
            tiny_reglu_dir, settings, _text(prompts_dir), CALIBRATION, CPU, out, repeats=2,
            swept_tok_s={label(settings[2]): 7.0},
        )  # fmt: skip
    return result, runs, out


def test_repeats_are_interleaved_and_each_row_is_of_its_own_runs(
    made: Made, settings: list[Settings]
) -> None:
    result, runs, _ = made
    assert [setting for setting, _ in runs] == settings * 2
    for setting, (_, row) in zip(settings, result.table.iterrows(), strict=True):
        own = [run for of, run in runs if of == setting]
        times = [run.per_token("wall_s") for run in own]
        assert row["setting"] == label(setting)
        assert row["live_tok_s"] == pytest.approx(1 / median(times))
        assert row["live_spread"] == pytest.approx((max(times) - min(times)) / median(times))
        assert row["decode_tokens"] == 12  # 44 tokens, 32 of them prefilled
        assert row["error"] == pytest.approx(row["live_tok_s"] / row["simulated_tok_s"] - 1)
        slower = steps_frame(max(own, key=lambda run: run.per_token("wall_s")).records)
        assert row["live_hit_on_time"] == summarise(slower, 6)["hit_on_time"]
        assert row["live_gpu_s"] == summarise(slower, 6)["gpu_s"]


def test_few_repeats_of_few_tokens_claim_nothing(made: Made) -> None:
    result, _, _ = made
    assert result.verdict.passed is None
    assert result.verdict.reasons == ("2 repeats of 12 tokens; gate G3 asks for 5 of 128 or more",)
    assert result.said()[0].startswith("G3 claims nothing: 2 repeats")


def test_every_timed_run_is_on_disk_as_soon_as_it_is_over(made: Made) -> None:
    _, runs, out = made
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [(line["setting"], line["repeat"]) for line in lines] == [
        (label(setting), at // 3) for at, (setting, _) in enumerate(runs)
    ]
    assert [line["seconds_per_token"] for line in lines] == [
        run.per_token("wall_s") for _, run in runs
    ]


def test_every_setting_starts_from_its_own_prior_live_recorded_and_simulated(
    made: Made, settings: list[Settings]
) -> None:
    result, _, out = made
    table = result.table
    assert (table["g1_differences"] == 0).all()
    assert (table["g2_differences"] == 0).all()
    hits = table["live_hit_resident"]
    assert hits[0] != hits[1]  # the same policy and budget, another prior
    assert (table["simulated_hit_resident"][:2] == hits[:2]).all()
    for at, setting in enumerate(settings):
        found = [p for p in out.glob(f"{at:02d}-*.arrow") if ".calls." not in p.name]
        trace = read_trace(found[0])
        again = simulate(trace, setting, hardware="pc1").summary
        assert table["simulated_tok_s"][at] == pytest.approx(again["tok_s"])
        assert table["simulated_hit_on_time"][at] == again["hit_on_time"]


def test_null_models_and_look_ahead_are_in_the_rows(made: Made) -> None:
    table = made[0].table
    assert table["uses_lookahead_or_stall"].tolist() == [False, False, True]  # static never plans
    assert table["null_constant_tok_s"].tolist() == pytest.approx([1 / 0.03] * 3)
    line = 0.015 + table["simulated_residual_per_token"] * 0.02 / 400
    assert table["null_linear_tok_s"].tolist() == pytest.approx((1 / line).tolist())
    assert table["swept_tok_s"].isna().tolist() == [True, True, False]
    assert table["swept_tok_s"][2] == 7.0


def test_the_report_on_disk_is_the_table(made: Made, tmp_path: Path) -> None:
    as_json, as_table = made[0].dump(tmp_path / "new" / "folder")
    assert pd.read_parquet(as_table).equals(made[0].table)
    content = json.loads(as_json.read_text())
    assert [row["setting"] for row in content["rows"]] == made[0].table["setting"].tolist()
    assert content["rows"][0]["swept_tok_s"] is None
    assert content["conditions"]["time"] == CPU.label


@pytest.mark.parametrize(("repeats", "n"), [(0, 1), (-1, 1), (1, 0)])
def test_nothing_to_run_is_refused(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, repeats: int, n: int
) -> None:
    chosen = [Settings(policy="none")] * n
    with pytest.raises(KairoxError, match=r"repeats|no settings"):
        validate(
            tiny_reglu_dir, chosen, _text(prompts_dir), CALIBRATION, CPU, tmp_path, repeats=repeats
        )


def test_a_prior_that_saw_the_tokens_is_refused(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.arrow"
    record(tiny_reglu_dir, prompts_dir / "prose.txt", seen, tokens=40)
    chosen = [Settings(policy="static", slots=150, prior=str(seen))]
    with pytest.raises(KairoxError, match="overlaps"):
        validate(tiny_reglu_dir, chosen, _text(prompts_dir), CALIBRATION, CPU, tmp_path, repeats=1)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "5",
        '{"fits": 1, "runs": 2, "conditions": 3}',
        '{"fits": [], "runs": [], "conditions": {"time": "x"}}',
        '{"fits": [], "runs": [{"seconds_per_token": 1}], "conditions": {"time": "x"}}',
        '{"fits": [], "runs": [{"seconds_per_token": 1, "residual_per_token": null}], '
        '"conditions": {"time": "x"}}',
    ],
)
def test_a_foreign_file_beside_a_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = CALIBRATION.dump(tmp_path / "hw.toml")
    assert Calibration.load(path).runs == RUNS
    path.with_suffix(".json").write_text(content)
    with pytest.raises(KairoxError, match="no calibration runs"):
        Calibration.load(path)


def test_a_log_in_place_of_the_trace_or_nowhere_is_refused_before_recording(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    text, out = prompts_dir / "prose.txt", tmp_path / "t.arrow"
    for log, said in (
        (out, "is the file of the trace too"),
        (tmp_path / "no" / "c.arrow", "no folder"),
    ):
        with pytest.raises(KairoxError, match=said):
            record(tiny_reglu_dir, text, out, tokens=40, call_log=log, force=True)
        assert not out.exists()


def test_a_run_without_a_decode_step_is_refused(tiny_reglu_dir: Path) -> None:
    tokens = [np.arange(1, 9, dtype=np.int32)]
    with pytest.raises(KairoxError, match="no decode steps"):
        run_forced(tiny_reglu_dir, Settings(policy="none"), CPU, tokens, prefill=8)


def test_a_machine_that_is_asked_too_much_says_so(tiny_reglu_dir: Path) -> None:
    """At a millionth of its durations no op can keep the pace."""
    hasty = Machine("emulated", scaled(load_profile("emu-pc1"), 1e-6))
    tokens = [np.arange(1, 6, dtype=np.int32)]
    run = run_forced(tiny_reglu_dir, Settings(policy="none"), hasty, tokens, prefill=2)
    assert run.overrun_share > 0.5
    assert len(run.records) == 4


def test_forced_text_is_the_files_own_tokens_from_skip_on(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    whole = encode_file(prompts_dir / "prose.txt", load_tokenizer(tiny_reglu_dir)).token_ids
    text = ForcedText([prompts_dir / "prose.txt"], tokens=50, skip=7, prefill=4, window=30)
    first, second = text.sequences(tiny_reglu_dir)
    assert np.array_equal(np.concatenate([first, second]), whole[7:57])
    assert first.size == 30

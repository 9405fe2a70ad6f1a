"""make gpu-check without a GPU: says so and claims nothing; the rehearsal runs what can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.gpu_check import __main__ as gpu_check
from experiments.gpu_check import links
from experiments.gpu_check.big import SHAPE_TOY, new_bundles, new_model, sticky_tokens
from experiments.gpu_check.large import Setting, new_cache
from experiments.gpu_check.offload import dense_model
from experiments.gpu_check.place import Place
from experiments.gpu_check.timeline import op_from_row, op_rows, overlap_s
from kairox_exec.families import family_of
from kairox_exec.oplog import Op, Size
from kairox_exec.runner import run_bundles

ROOT = Path(__file__).parents[2]
# What a bare GPU machine does not have: everything but torch, triton, transformers and numba.
NOT_THERE = (
    "pandas", "pydantic", "simpy", "pyarrow", "matplotlib", "psutil", "pynvml", "joblib", "tomli_w",
    "accelerate",
)  # fmt: skip
WITHOUT = """
import importlib.util, runpy, sys
gone = set({gone!r})
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in gone else found(name, *rest)
sys.argv = ["gpu_check", *sys.argv[1:]]
runpy.run_module("experiments.gpu_check", run_name="__main__", alter_sys=True)
"""


def _run(*words: str | Path, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(gone=without), *words],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("without", "why"), [((), "finds no CUDA device"), (("torch",), "torch is not installed")]
)
def test_without_a_card_nothing_is_claimed_or_written(
    tmp_path: Path, without: tuple[str, ...], why: str
) -> None:
    done = _run("--out", tmp_path / "out", without=without)
    assert done.returncode == 0, done.stderr
    assert why in done.stdout
    assert "nothing is claimed" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rehearsal on a machine that has only what a bare one has."""
    out = tmp_path_factory.mktemp("rehearsal")
    done = _run("--rehearse", "--out", out, without=NOT_THERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsal on the CPU: nothing is claimed" in done.stdout
    return out


def _content(path: Path) -> Any:
    def refused(constant: str) -> None:
        raise AssertionError(f"{path.name}: {constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refused)


@pytest.mark.slow
def test_the_rehearsal_runs_every_part_and_keeps_what_it_found(rehearsed: Path) -> None:
    for part in gpu_check.parts():
        content = _content(rehearsed / f"{part.name}.json")
        assert content["label"] == "rehearsal on the CPU: nothing is claimed"
        assert content["passed"] is not False, content["said"]
        assert content["budget_s"] == part.budget_s
    links, bits, tiny, large, prediction = (
        _content(rehearsed / f"{part.name}.json") for part in gpu_check.parts()
    )
    assert all(row["copied_right"] and row["idle_s"] > 0 for row in links["rows"])
    assert not any(sum(row["elements_that_differ"].values()) for row in bits["rows"])
    assert {row["numerics"] for row in tiny["rows"]} == {"fast", "deterministic"}
    assert [run["run"] for run in large["runs"]] == [
        "profile", "static-64-slots", "lru-64-slots", "tam-64-slots", "tam+anb-64-slots",
    ]  # fmt: skip
    moved = {run["run"]: run["means"] for run in large["runs"]}
    assert moved["lru-64-slots"]["loads"] > 0
    assert moved["static-64-slots"]["residual"] > 0
    assert moved["profile"]["residual"] == 0
    assert large["accelerate"][0]["skipped"] == "accelerate is not installed"
    assert set(prediction["skipped"]) <= set(NOT_THERE)
    assert "--finish" in prediction["said"]
    facts = _content(rehearsed / "conditions.json")
    assert facts["gpu"] is None
    assert facts["versions"]["torch"] is not None
    events = _content(rehearsed / "large-lru-64-slots.timeline.json")["traceEvents"]
    assert {"gpu", "cpu", "h2d"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}


@pytest.mark.slow
def test_what_was_kept_is_fitted_and_drawn_later(rehearsed: Path) -> None:
    done = _run("--finish", rehearsed)
    assert done.returncode == 0, done.stderr
    rows = {row["run"]: row for row in _content(rehearsed / "prediction.json")["rows"]}
    assert {name for name, row in rows.items() if not row["calibrated_on"]} == {
        "tam-64-slots", "tam+anb-64-slots",
    }  # fmt: skip
    for row in rows.values():  # the same cache, driven by the simulator over the run's own trace
        assert row["simulated_s"] > 0
        assert row["simulated_hit_on_time"] + row["simulated_residual"] == pytest.approx(
            row["live_hit_on_time"] + row["live_residual"]
        )
    lru = rows["lru-64-slots"]
    assert lru["simulated_loads"] == pytest.approx(lru["live_loads"], rel=0.1)
    assert (rehearsed / "links.png").stat().st_size > 1000
    assert (rehearsed / "large.png").stat().st_size > 1000
    assert (rehearsed / "hw.toml").is_file()


def test_a_part_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise RuntimeError("no such card")

    def fine(*_: Any) -> dict[str, Any]:
        return {"passed": True, "said": "done"}

    parts = [gpu_check.Part("broken", 1.0, broken), gpu_check.Part("fine", 1.0, fine)]
    monkeypatch.setattr(gpu_check, "parts", lambda: parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--rehearse", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    assert "failed: broken" in capsys.readouterr().out
    assert "no such card" in _content(tmp_path / "broken.json")["traceback"]
    assert _content(tmp_path / "fine.json")["passed"] is True


def _links(tmp_path: Path, left: float = 60.0) -> dict[str, Any]:
    return links.check_links(Place(rehearse=True), tmp_path, lambda: left)


def test_the_executors_own_ways_are_timed_below_a_copy_in_one_piece(tmp_path: Path) -> None:
    found = _links(tmp_path)
    assert found["passed"] is True
    assert {row["way"] for row in found["rows"]} == {links.CEILING, "staged", "per_row"}
    assert all(0 < row["launching_s"] <= row["idle_s"] for row in found["rows"])
    assert {one["way"] for one in found["chosen_at_start"]} <= {"staged", "per_row"}
    assert len(found["rows"]) == 3 * len(found["chosen_at_start"]) * 2  # of two numbers of rows


@pytest.mark.parametrize("wrong", ["rows", "places"])
def test_a_way_that_copies_wrongly_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    real = links.promote_with

    def promote_with(*given: Any, **how: Any) -> Any:
        promote = real(*given, **how)

        def shifted(rows: Any, ids: Any, slots: Any, places: Any) -> Any:
            if wrong == "rows":
                return promote(rows, ids[::-1].copy(), slots, places)
            return promote(rows, ids, slots, (places + 1) % len(slots))

        return shifted

    monkeypatch.setattr(links, "promote_with", promote_with)
    found = _links(tmp_path)
    assert found["passed"] is False
    assert {r["way"] for r in found["rows"] if r["copied_right"]} == {links.CEILING}


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    found = _links(tmp_path, left=0.5)
    assert found["passed"] is False
    assert found["rows"] == []
    assert len(found["left_out_for_lack_of_time"]) == 36


def test_parts_fit_in_nine_minutes() -> None:
    # Starting Python, importing torch and drawing are in no part: 40 s are left for them.
    assert sum(part.budget_s for part in gpu_check.parts()) <= 9 * 60 - 40


def test_accelerate_is_given_the_same_model() -> None:
    place = Place(rehearse=True)
    bundles = new_bundles(place, SHAPE_TOY)
    dense, config = dense_model(place, SHAPE_TOY, bundles)
    tokens = torch.from_numpy(sticky_tokens(SHAPE_TOY, 12, seed=1).astype(np.int64))[None]
    with torch.inference_mode():
        expected = dense(input_ids=tokens).logits[0, -1].float()
        hybrid, config = new_model(place, SHAPE_TOY)
        everything = new_cache(
            Setting("static", "fixed", SHAPE_TOY.n_neurons, None),
            np.ones((SHAPE_TOY.n_layers, SHAPE_TOY.n_neurons), np.int64),
        )
        with closing(place.new_device()) as device:
            runner = run_bundles(
                hybrid, config, family_of(config), bundles, lambda *_: everything, device
            )
            with runner:
                list(runner.run([tokens[0].numpy().astype(np.int32)], prefill=12))
            got = runner.logits.float()
    # bfloat16 has 8 bits: sums in float32 here, rounded on the way there.
    assert float((got - expected).abs().max()) < 0.03 * float(expected.abs().max())
    assert float(expected.std()) > 0.1


def test_overlap_by_hand() -> None:
    def op(lane: str, kind: str, t0: int, t1: int) -> Op:
        return Op(lane, kind, 0, t0 * 10**9, t1 * 10**9, Size(neurons=3))

    # gpu 0-4, cpu 3-6, swap 5-8 beside the cpu for 1 s; partial sums and idle time are no overlap.
    ops = [
        op("gpu", "ffn", 0, 4), op("cpu", "residual", 3, 6), op("h2d", "swap", 5, 8),
        op("h2d", "partial sums", 0, 9), op("idle", "cpu", 4, 6),
    ]  # fmt: skip
    assert overlap_s(ops, 0, 10 * 10**9) == (8.0, 2.0)
    assert overlap_s(ops, 0, 5 * 10**9) == (5.0, 1.0)
    assert [op_from_row(row) for row in op_rows(ops)] == ops

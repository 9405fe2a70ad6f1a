"""Bad input of every kind: refused with a message before anything is computed, nothing lost."""

from __future__ import annotations

import json
import math
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from toys import random_trace

from kairox_sim import KairoxError, Settings, Sweep, simulate, sweep, sweeps
from kairox_sim.cli import main
from kairox_sim.settings import shape_of
from kairox_sim.sweeps import expand, read_table
from kairox_sim.trace import write_trace

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "with ü and spaces"
    path.mkdir()
    write_trace(random_trace(n_decode=4), path / "eval.arrow")
    return path


def cells(folder: Path) -> Sweep:
    base = {"model_as": "prosparse-7b", "prediction": "perfect"}
    grid: dict[str, list[Any]] = {"policy": ["tam", "lru"], "slots": [8, 24]}
    return Sweep(trace=str(folder / "eval.arrow"), base=base, grid=grid)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("theta_promote", math.nan),
        ("theta_promote", math.inf),
        ("theta_evict", math.nan),
        ("max_swaps", 1.5),
        ("max_swaps", math.nan),
        ("policy_params", 5),
        ("controller_params", [1]),
        ("swap_neurons", True),
        ("seed", 2**63),
        ("prefill_chunk", 10**30),
    ],
)
def test_a_value_that_no_run_could_use_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(KairoxError, match=key):
        Settings().with_overrides({key: value})


def test_no_limit_on_swaps_is_a_value(tmp_path: Path) -> None:
    chosen = Settings().with_overrides({"max_swaps": None})
    assert Settings.load(chosen.dump(tmp_path / "s.toml")).policy == "tam"


@pytest.mark.parametrize("policy", [["tam"], {"x": 1}, 5])
def test_a_policy_that_is_no_name_is_refused_in_a_sweep(policy: object) -> None:
    with pytest.raises(KairoxError, match="policy"):
        expand(Sweep(trace="t", base={"policy": policy}))


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(KairoxError, match="JSON list, not an object"):
        shape_of(str(tmp_path / "config.json"))


def test_plans_ahead_without_a_predictor_are_refused_as_they_are_live(folder: Path) -> None:
    base: dict[str, Any] = {"model_as": "prosparse-7b", "slots": 24, "prediction": "perfect"}
    with pytest.raises(KairoxError, match="predictor is 'none'"):
        simulate(folder / "eval.arrow", Settings(policy="tam", predictor="none", **base))
    after = Settings(policy="lru", predictor="none", **base)
    assert simulate(folder / "eval.arrow", after).summary["predict_s"] == 0


@pytest.mark.parametrize("out", ["missing/t.parquet", "", "."])
def test_a_place_for_no_table_is_refused_before_the_first_cell(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "simulate", lambda *_, **__: pytest.fail("a cell ran"))
    with pytest.raises(KairoxError, match=r"folder|names no file"):
        sweep(cells(folder), out)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BrokenProcessPool("killed")])
def test_a_sweep_that_is_stopped_keeps_its_rows_and_the_table_before_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    out = tmp_path / "t.parquet"
    whole = sweep(cells(folder), out)
    before = out.read_bytes()

    def two(path: Any, trace: Any, some: Any, origin: Any, workers: int) -> Any:
        yield sweeps._run_cells(trace, some[:1], origin)
        yield sweeps._run_cells(trace, some[1:2], origin)
        raise stop

    monkeypatch.setattr(sweeps, "_results", two)
    with pytest.raises((KeyboardInterrupt, KairoxError), match="first 2 of 4 cells are in"):
        sweep(cells(folder), out)
    assert out.read_bytes() == before
    assert read_table(tmp_path / "t.parquet.stopped").equals(whole.iloc[:2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.parquet", "t.parquet.stopped"]


def test_ctrl_c_in_a_sweep_is_exit_code_130(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    spec = tmp_path / "s.toml"
    spec.write_text(f"trace = {json.dumps(str(folder / 'eval.arrow'))}\n", encoding="utf-8")

    def stopped(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "_results", stopped)
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(spec), "-o", str(tmp_path / "t.parquet")])
    assert end.value.code == 130
    assert "0 of 1 cells" in capsys.readouterr().err


def test_a_file_where_a_folder_should_be_is_one_message(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    sweep(cells(folder), tmp_path / "t.parquet")
    (tmp_path / "taken").write_text("x", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["plot", str(tmp_path / "t.parquet"), "-o", str(tmp_path / "taken")])
    assert end.value.code == 2
    assert "taken" in capsys.readouterr().err

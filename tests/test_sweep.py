"""Sweeps: the cells a file means, a status for each, the same bytes for any number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from toys import random_trace

from kairox_sim import KairoxError, Settings, Sweep, best, simulate, sweep
from kairox_sim import simulation as simulation_module
from kairox_sim.sweeps import COLUMNS, expand, read_table
from kairox_sim.trace import write_trace

BASE = {"model_as": "prosparse-7b", "prediction": "perfect", "slots": 24}
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        "trace": str(write_trace(random_trace(n_decode=12), folder / "eval.kxtrace")),
        "prior": str(write_trace(random_trace(seed=1, source="b"), folder / "prior.kxtrace")),
    }


def spec(traces: dict[str, str], **other: Any) -> Sweep:
    return Sweep(**({"base": BASE} | traces | other))


# -- the cells ----------------------------------------------------------------------------------


def labels(plan: Sweep) -> list[tuple[str, str, str | None]]:
    from kairox_sim.settings import label

    return [(label(c.settings), c.hardware, c.link) for c in expand(plan)]


def test_the_grid_is_every_combination_in_order() -> None:
    plan = Sweep(trace="t", grid={"policy": ["tam", "lru"], "slots": [8, 16], "hardware": ["pc2"]})
    assert labels(plan) == [
        ("tam 8", "pc2", None),
        ("tam 16", "pc2", None),
        ("lru 8", "pc2", None),
        ("lru 16", "pc2", None),
    ]


def test_an_axis_of_tables_varies_its_keys_together() -> None:
    rules = [{"policy": "tam"}, {"policy": "tam", "controller": "anb"}, {"policy": "lru"}]
    plan = Sweep(trace="t", grid={"rule": rules, "link": ["pcie3", "own"]}, base={"slots": 8})
    assert labels(plan) == [
        ("tam 8", "pc1", "pcie3"),
        ("tam 8", "pc1", None),
        ("tam+anb 8", "pc1", "pcie3"),
        ("tam+anb 8", "pc1", None),
        ("lru 8", "pc1", "pcie3"),
        ("lru 8", "pc1", None),
    ]


def test_equal_cells_run_once() -> None:
    # beta is tam's alone, and the bounds have no budget
    grid = {"policy": ["tam", "lru", "all"], "slots": [8, 16], "tam.beta": [0.8, 0.9]}
    assert [name for name, _, _ in labels(Sweep(trace="t", grid=grid))] == [
        "tam(beta=0.8) 8",
        "tam(beta=0.9) 8",
        "tam(beta=0.8) 16",
        "tam(beta=0.9) 16",
        "lru 8",
        "lru 16",
        "all",
    ]


def test_explicit_cells_and_seeds() -> None:
    plan = Sweep(
        trace="t", seeds=[0, 1], base={"slots": 8}, cells=[{"policy": "none"}, {"slots": 9}]
    )
    cells = expand(plan)
    assert [(c.settings.policy, c.settings.slots, c.settings.seed) for c in cells] == [
        ("none", None, 0),
        ("none", None, 1),
        ("tam", 9, 0),
        ("tam", 9, 1),
    ]
    assert len(expand(Sweep(trace="t"))) == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"grid": {"polcy": ["tam"]}}, "unknown key 'polcy'; did you mean 'policy'"),
        ({"grid": {"policy": ["lur"]}}, "did you mean 'lru'"),
        ({"grid": {"slots": []}}, "grid axis 'slots' is empty"),
        ({"base": {"beat": 0.9}}, "unknown key 'beat'"),
        ({"cells": [{"tam.beta": 2.0}]}, r"beta must be in \[0, 1\)"),
        ({"grid": {"hardware": ["pc9"]}}, "no hardware profile 'pc9'"),
        ({"grid": {"link": ["pcie9"]}}, "no link profile 'pcie9'"),
        ({"trace": "missing.kxtrace"}, r"missing\.kxtrace"),
    ],
)
def test_a_typo_stops_the_sweep_before_it_starts(
    traces: dict[str, str], other: dict[str, Any], said: str
) -> None:
    with pytest.raises(KairoxError, match=said):
        sweep(spec(traces, **other))


def test_sweep_files(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('trace = "t"\n[grid]\nslots = [1, 2]\n', encoding="utf-8")
    assert Sweep.load(file) == Sweep.load(str(file)) == Sweep(trace="t", grid={"slots": [1, 2]})
    file.write_text('trace = "t"\ngird = {}\n', encoding="utf-8")
    with pytest.raises(KairoxError, match="unknown key 'gird'; did you mean 'grid'"):
        Sweep.load(file)
    file.write_text("[grid]\n", encoding="utf-8")
    with pytest.raises(KairoxError, match="missing key 'trace'"):
        Sweep.load(file)


# -- the table ----------------------------------------------------------------------------------

RULES = [
    {"policy": "tam", "controller": "anb"},
    {"policy": "lru"},
    {"policy": "lru", "controller": "anb"},
    {"policy": "static"},
    {"policy": "all"},
]


def test_a_row_and_a_status_for_each_cell(traces: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    seen: list[tuple[int, int]] = []
    plan = spec(traces, grid={"rule": RULES, "slots": [24, 64]})
    table = sweep(plan, out, on_cell=lambda done, of: seen.append((done, of)))
    assert seen == [(i + 1, 9) for i in range(9)]
    assert list(table.columns) == list(COLUMNS)
    pd.testing.assert_frame_equal(read_table(out), table)

    by = table.set_index("label")
    assert by["status"].to_dict() == {
        "tam+anb 24": "ok",
        "tam+anb 64": "refused",
        "lru 24": "ok",
        "lru 64": "refused",
        "lru+anb 24": "refused",
        "lru+anb 64": "refused",
        "static 24": "ok",
        "static 64": "refused",
        "all": "ok",
    }
    assert "nothing in common" in by.loc["lru+anb 24", "why"]
    assert "does not fit" in by.loc["lru 64", "why"]
    assert by.loc["lru 64", ["tok_s", "slots"]].isna().all()
    assert not by.loc["all", "fits"]
    assert by.loc["lru 24", "fits"]
    assert by.loc["all", "slots"] == 64
    assert "does not fit" in by.loc["all", "warnings"]

    row = by.loc["static 24"]
    again = simulate(traces["trace"], Settings.of(json.loads(row["settings"])), oracle=True)
    for name, value in again.summary.items():
        assert row[name] == pytest.approx(value, nan_ok=True)
    assert row["trace_sha256"] == again.provenance["trace_sha256"]
    assert row["prior_sha256"] == again.provenance["prior_sha256"]
    assert row["profile_sha256"] == again.provenance["profile_sha256"]
    assert row["costs"] == "stand-in: toy activations, prosparse-7b costs"


def test_no_headroom_is_in_its_row(traces: dict[str, str]) -> None:
    table = sweep(spec(traces, grid={"policy": ["lru", "tam"], "slots": [2, 24]}))
    said = table.set_index("label")["warnings"].fillna("").str.contains("no policy headroom")
    assert said.to_dict() == {"lru 2": True, "lru 24": False, "tam 2": True, "tam 24": False}


def test_a_broken_cell_does_not_lose_the_others(
    traces: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trace = simulation_module.run_trace

    def breaks(trace: Any, cache: Any, *rest: Any, **other: Any) -> Any:
        if cache.capacity[0] == 7:
            raise RuntimeError("a bug")
        return run_trace(trace, cache, *rest, **other)

    monkeypatch.setattr(simulation_module, "run_trace", breaks)
    table = sweep(spec(traces, grid={"slots": [6, 7, 8]}))
    assert table["status"].tolist() == ["ok", "failed", "ok"]
    assert "Traceback" in table["why"][1]
    assert "RuntimeError: a bug" in table["why"][1]


def test_the_same_bytes_for_any_worker_count_and_hash_seed(
    traces: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        "[base]\nmodel_as = 'prosparse-7b'\nprediction = '0.8,0.7'\n"
        "[grid]\nslots = [8, 24, 64]\n"
        "rule = [{ policy = 'tam' }, { policy = 'lru' }, { policy = 'lfu', controller = 'anb' }]\n"
        "[[cells]]\npolicy = 'none'\n",
        encoding="utf-8",
    )
    file.write_text(
        f"trace = '{traces['trace']}'\nseeds = [0, 1]\n" + file.read_text(encoding="utf-8"),
        encoding="utf-8",
    )
    tables = []
    for hash_seed, workers in (("0", "1"), ("1", "2")):
        out = tmp_path / f"{hash_seed}.parquet"
        done = subprocess.run(
            [sys.executable, "-m", "kairox_sim.cli", "sweep", str(file), "-o", str(out),
             "--workers", workers, "--json"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PATH": ""},  # no git: it may move
            cwd=ROOT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout)
        assert (counts["ok"], counts["refused"], counts["failed"]) == (10, 10, 0)
        tables.append(out.read_bytes())
    assert tables[0] == tables[1]


# -- best ---------------------------------------------------------------------------------------


def made_up(*rows: dict[str, Any]) -> pd.DataFrame:
    """A table as `sweep` makes it, of numbers chosen here."""
    blank = dict.fromkeys(COLUMNS)
    made = []
    for row in rows:
        slots = row.get("slots", 10)
        settings = Settings(policy=row.get("policy", "tam"), slots=slots, seed=row.get("seed", 0))
        made.append(
            blank
            | {
                "status": "ok", "hardware": "pc1", "machine": "pc1", "policy": settings.policy,
                "fits": True, "device_bytes": slots * 1e9, "costs": "own", "slots": slots,
                "label": f"{settings.policy} {slots}",
                "settings": json.dumps(settings.model_dump(mode="json"), sort_keys=True),
            }
            | row
        )  # fmt: skip
    return pd.DataFrame(made).astype({"tok_s": float})


def chosen(table: pd.DataFrame, hardware: str = "pc1", **other: Any) -> tuple[str, float]:
    settings, row = best(table, hardware, **other)
    assert settings.policy == row["policy"]
    return str(row["policy"]), float(row["slots"])


def test_best_is_the_fastest_that_fits() -> None:
    table = made_up(
        {"policy": "all", "tok_s": 99, "slots": 9, "fits": True},  # a bound is no choice
        {"policy": "lru", "tok_s": 50, "slots": 40, "fits": False},
        {"policy": "lru", "tok_s": 30, "slots": 20},
        {"policy": "tam", "tok_s": 20, "slots": 10},
        {"policy": "lfu", "tok_s": None, "slots": 8, "status": "refused", "why": "so"},
    )
    assert chosen(table) == ("lru", 20)
    assert chosen(table, slots_max=19) == ("tam", 10)
    assert chosen(table, vram_bytes=15_000_000_000) == ("tam", 10)
    assert chosen(table, vram_bytes=64_000_000_000) == ("lru", 40)  # a larger card than the profile
    with pytest.raises(KairoxError, match=r"smallest setting has 10 slots .* 10\.000 GB"):
        best(table, "pc1", slots_max=3)


def test_closer_than_a_percent_is_a_tie_for_the_smaller_budget() -> None:
    rows = [{"tok_s": 100.0, "slots": 30}, {"tok_s": 99.2, "slots": 20}, {"tok_s": 98.0}]
    assert chosen(made_up(*rows)) == ("tam", 20)
    assert chosen(made_up(*reversed(rows))) == ("tam", 20)
    same = [{"tok_s": 99.5, "policy": "lru"}, {"tok_s": 100.0}]
    assert chosen(made_up(*same)) == ("tam", 10)


def test_seeds_count_as_their_mean() -> None:
    rows = [
        {"policy": "tam", "seed": 0, "tok_s": 60.0},
        {"policy": "lru", "seed": 0, "tok_s": 50.0},
        {"policy": "tam", "seed": 1, "tok_s": 20.0},
        {"policy": "lru", "seed": 1, "tok_s": 40.0},
    ]
    settings, row = best(made_up(*rows), "pc1")
    assert (settings.policy, row["tok_s"]) == ("lru", 45.0)


def test_best_asks_which_machine() -> None:
    table = made_up(
        {"tok_s": 10.0, "slots": 1, "link": "pcie3", "machine": "pc1+pcie3"},
        {"tok_s": 20.0, "slots": 2},
    )
    assert chosen(table, link="pcie3") == ("tam", 1)
    assert chosen(table, link="own") == ("tam", 2)
    assert chosen(table, "pc1+pcie3") == ("tam", 1)
    by_path = table.assign(hardware="out/pc1.toml")
    assert chosen(by_path, "pc1", link="pcie3") == ("tam", 1)  # by the profile's own name
    with pytest.raises(KairoxError, match="choose one with --link: own, pcie3"):
        best(table, "pc1")
    with pytest.raises(KairoxError, match="no link 'pcie5'"):
        best(table, "pc1", link="pcie5")
    with pytest.raises(KairoxError, match="no hardware 'pc2'; it has pc1"):
        best(table, "pc2")


def test_best_compares_only_what_can_be_compared() -> None:
    with pytest.raises(KairoxError, match="cannot be compared: other; own"):
        best(made_up({"tok_s": 1.0}, {"tok_s": 2.0, "costs": "other"}), "pc1")
    with pytest.raises(KairoxError, match=r"no setting ran on 'pc1'.* first reason: too big"):
        best(made_up({"status": "refused", "why": "too big", "tok_s": None}), "pc1")


def test_best_reads_tables_only(tmp_path: Path) -> None:
    other = tmp_path / "x.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(other)
    with pytest.raises(KairoxError, match="is not a sweep's table: it has no label"):
        best(other, "pc1")
    other.write_bytes(b"PAR1, or so it says")
    with pytest.raises(KairoxError, match="cannot read"):
        best(other, "pc1")
    with pytest.raises(KairoxError, match=r"cannot read .*: no such file; "):
        best(tmp_path / "missing.parquet", "pc1")

"""The oracle's time beside every run: what runs, where it is unknown, and once per environment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from toys import random_trace
from typer.testing import CliRunner

from kairox_sim import Settings, oracle, simulate, sweep
from kairox_sim.cli import app
from kairox_sim.hardware import load_profile
from kairox_sim.metrics import AGAINST
from kairox_sim.oracle import oracle_settings, oracle_tpot_s
from kairox_sim.sweeps import Sweep
from kairox_sim.trace import Trace, write_trace

TRACE = random_trace(n_decode=16)
PRIOR = random_trace(seed=1, source="b")
BASE = Settings(slots=12, model_as="prosparse-7b", prediction="perfect", gating="predicted")
PC1 = load_profile("pc1")


def test_it_is_the_bypass_oracle_in_the_same_slots_and_nothing_else_of_the_run() -> None:
    chosen = Settings.of({"system": "neuralink-linked", "model_as": "prosparse-7b", "seed": 3,
                          "handovers": 2, "context_start": 7})  # fmt: skip
    asked = oracle_settings(chosen, [3, 5])
    assert asked is not None
    assert (asked.policy, asked.observes, asked.slots) == ("belady_bypass", "evaluated", (3, 5))
    assert (asked.dispatch, asked.gating, asked.handovers, asked.context_start, asked.seed) == (
        "concurrent", "predicted", 2, 7, 3,
    )  # fmt: skip
    assert asked.system is asked.copies is asked.groups is None
    assert oracle_settings(Settings(dispatch="serial"), [1]).dispatch == "concurrent"  # type: ignore[union-attr]
    assert asked.start == "warm"  # with what is used first, as no run can begin better
    assert oracle_settings(Settings.of({"system": "llama.cpp"}), [1]) is None
    assert oracle_settings(Settings(gating="dense"), [1]) is None


def test_a_runs_columns_are_the_oracles_own_run() -> None:
    plain = simulate(TRACE, BASE)
    assert math.isnan(plain.summary["oracle_s"])
    assert math.isnan(plain.summary["over_oracle"])
    run = simulate(TRACE, BASE, oracle=True)
    asked = oracle_settings(BASE, [12, 12])
    assert asked is not None
    itself = simulate(TRACE, asked, oracle=True)
    assert run.summary["oracle_s"] == itself.summary["tpot_s"] == itself.summary["oracle_s"]
    assert itself.summary["over_oracle"] == 0
    over = run.summary["tpot_s"] / run.summary["oracle_s"] - 1
    assert run.summary["over_oracle"] == pytest.approx(over)
    assert over > 0
    assert run.summary["bound_s"] <= run.summary["oracle_s"]


def test_it_is_unknown_for_whole_layers_and_for_a_trace_that_was_cut() -> None:
    layers = simulate(TRACE, Settings.of({"system": "llama.cpp", "model_as": "prosparse-7b"}),
                      oracle=True)  # fmt: skip
    assert math.isnan(layers.summary["oracle_s"])
    assert not math.isnan(layers.summary["bound_s"])
    cut = Trace(TRACE.header, TRACE._columns, truncated_at=5, warnings=("cut",))
    assert math.isnan(oracle_tpot_s(cut, BASE, [12, 12], PC1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings of the oracle's runs, in order; none is known from before."""
    import kairox_sim.simulation as simulation

    seen: list[Settings] = []
    real = simulation.simulate

    def counted(trace: Trace, settings: Settings, **given: object) -> object:
        if settings.policy == "belady_bypass":
            seen.append(settings)
        return real(trace, settings, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(oracle, "_KNOWN", {})
    monkeypatch.setattr(simulation, "simulate", counted)
    return seen


def test_one_run_per_environment(tmp_path: Path, runs: list[Settings]) -> None:
    spec = Sweep.model_validate(
        {
            "trace": str(write_trace(TRACE, tmp_path / "t.arrow")),
            "prior": str(write_trace(PRIOR, tmp_path / "p.arrow")),
            "base": BASE.model_dump(include={"model_as", "prediction", "gating"}),
            "grid": {"slots": [8, 16], "hardware": ["pc1", "pc2"],
                     "rule": [{"policy": "lru"}, {"policy": "static"}, {"policy": "tam"},
                              {"policy": "lru", "trigger": "attn_out"}]},
            "cells": [{"system": "llama.cpp", "gating": "dense"}],
        }
    )  # fmt: skip
    table = sweep(spec)
    assert set(AGAINST) <= set(table.columns)
    assert (table["status"] == "ok").all(), table["why"].tolist()
    assert len(runs) == 4  # of 16 cells: two budgets, two machines
    own = table[table["policy"] != "static"].groupby(["hardware", "slots"])["oracle_s"].nunique()
    assert (own == 1).all()
    ours = table[table["system"].isna()]
    assert ours["oracle_s"].nunique() == 4
    assert ((ours["tpot_s"] / ours["oracle_s"] - 1) - ours["over_oracle"]).abs().max() < 1e-12
    assert table.loc[table["system"] == "llama.cpp", "oracle_s"].isna().all()
    oracle_tpot_s(TRACE, BASE, [8, 8], PC1)
    assert len(runs) == 4  # known
    oracle_tpot_s(random_trace(n_decode=16, seed=5), BASE, [8, 8], PC1)
    assert len(runs) == 5


def test_the_command_line_has_the_columns(tmp_path: Path) -> None:
    trace = str(write_trace(TRACE, tmp_path / "t.arrow"))
    given = ["simulate", trace, "--policy", "lru", "--slots", "12", "--as", "prosparse-7b",
             "--gating", "predicted", "--set", "prediction=perfect", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)["summary"]
    assert summary["over_oracle"] == pytest.approx(summary["tpot_s"] / summary["oracle_s"] - 1)
    done = CliRunner().invoke(app, [*given, "--no-oracle"])
    assert json.loads(done.stdout)["summary"]["oracle_s"] is None
    done = CliRunner().invoke(app, ["simulate", trace, "--system", "llama.cpp", "--as",
                                    "prosparse-7b", "--json"])  # fmt: skip
    assert json.loads(done.stdout)["summary"]["oracle_s"] is None

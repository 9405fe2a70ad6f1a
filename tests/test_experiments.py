"""Every figure of experiments/: a spec, a short script, a row in the README, and it draws."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from matplotlib.text import Text
from toys import random_trace

from kairox_sim import sweep
from kairox_sim.figure_data import Moves
from kairox_sim.plot_systems import spread, where_metis_loses
from kairox_sim.sweeps import Sweep, expand
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import write_trace

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "experiments"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("fig[0-9]*.py"))
SPECS = sorted(path.stem for path in FOLDER.glob("fig[0-9]*.toml"))
SWEPT = ["fig01_throughput", "fig02_budget", "fig03_time_split"]
NO_SPEC = ["fig07_validation"]  # experiments/validate.toml is its spec


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.{name}")


def test_every_script_has_a_spec_and_every_spec_a_script() -> None:
    assert sorted(SPECS + NO_SPEC) == SCRIPTS
    assert len(SCRIPTS) >= 7


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_says_how_it_is_run(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    command = f"python -m experiments.{name} "
    assert command in source
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{name}`" in line]
    assert len(rows) == 1
    assert command in rows[0]
    assert name == module(name).STEM
    assert callable(module(name).draw)


@pytest.mark.parametrize("name", [*SPECS, "validate"])
def test_a_specs_traces_are_shipped(name: str) -> None:
    spec = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    named = [spec.get("trace"), spec.get("prior"), spec.get("run", {}).get("prior")]
    for path in filter(None, named):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("name", SWEPT)
def test_a_sweeps_figure_is_drawn_from_its_own_sweep(name: str, tmp_path: Path) -> None:
    plan = Sweep.load(FOLDER / f"{name}.toml")
    trace = random_trace(n_layers=2, n_neurons=896, n_decode=3)
    prior = random_trace(n_layers=2, n_neurons=896, n_decode=3, seed=1, source="b")
    toys = {
        "trace": str(write_trace(trace, tmp_path / "eval.arrow")),
        "prior": str(write_trace(prior, tmp_path / "prior.arrow")),
    }
    table = tmp_path / "t.parquet"
    rows = sweep(plan.model_copy(update=toys), table)
    assert len(rows) == len(expand(plan))
    assert (rows["status"] == "ok").all(), rows["why"].dropna().unique()
    module("figure").draw_to(table, tmp_path, name, module(name).draw)
    assert (tmp_path / f"{name}.png").is_file()
    assert (tmp_path / f"{name}.pdf").is_file()


def test_pipeline_is_made_and_drawn(tmp_path: Path) -> None:
    figure = module("fig04_pipeline")
    table = tmp_path / "t.parquet"
    figure.make(table, random_trace(n_layers=5, n_neurons=896, n_decode=59, prefill=2))
    rows = pd.read_parquet(table)
    assert rows["panel"].nunique() == 2
    assert rows["step"].unique().tolist() == [figure.SPEC["step"]]
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig04_pipeline.png").is_file()


def test_momentum_is_made_by_one_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.fig05_momentum", "--make"]
    done = subprocess.run(
        [*command, str(tmp_path / "new" / "t.csv"), "-o", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "fig05_momentum.png").is_file()
    rows = pd.read_csv(tmp_path / "new" / "t.csv")
    assert not rows.loc[rows["neuron"] == "one hit", "resident"].any()
    assert rows.loc[rows["neuron"] == "sustained", "resident"].any()


def test_a_missing_table_is_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.fig05_momentum", str(tmp_path / "no.csv")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("fig05_momentum: cannot read")


def moves(lowered: float, raised: float) -> Moves:
    return Moves(lowered, raised, cpu_slowest=lowered, io_over_gpu=raised, clamped_low=0.0)


def test_anb_is_shown_where_it_moves_both_ways_or_comes_closest() -> None:
    figure = module("fig06_anb")
    some = [moves(0.9, 0.01), moves(0.06, 0.05), moves(0.5, 0.5)]
    assert figure.chosen(some) == 1  # the first that passes, not the liveliest
    assert figure.note(some, 1).startswith("Of 3 settings swept, 2 move both ways")
    none = [moves(0.9, 0.01), moves(0.02, 0.3), moves(0.3, 0.02)]
    assert figure.chosen(none) == 1  # ties to the first
    said = figure.note(none, 1)
    assert "None of 3 settings" in said
    assert "seldom lowered" in said
    assert "seldom raised" in figure.note(none, 2)


def test_anb_is_made_and_drawn_with_what_every_setting_did(tmp_path: Path) -> None:
    figure = module("fig06_anb")
    table = tmp_path / "t.parquet"
    figure.make(table, random_trace(n_layers=2, n_neurons=896, n_decode=12))
    settings = pd.read_csv(tmp_path / "t.settings.csv")
    assert len(settings) == len(expand(Sweep.load(figure.SPEC))) == 12
    assert {"setting", "hardware", "lowered", "raised"} <= set(settings)
    rows = pd.read_parquet(table)
    assert rows["note"].nunique() == 1
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig06_anb.png").is_file()


def test_systems_are_drawn_and_listed_from_their_own_sweep(tmp_path: Path) -> None:
    figure = module("fig08_hits_and_throughput")
    plan = Sweep.load(FOLDER / "fig08_hits_and_throughput.toml")
    systems = {rule["system"] for rule in plan.grid["rule"] if "system" in rule}
    assert systems == set(SYSTEMS)
    trace = random_trace(n_layers=2, n_neurons=896, n_decode=2)
    prior = random_trace(n_layers=2, n_neurons=896, n_decode=3, seed=1, source="b")
    toys = {
        "trace": str(write_trace(trace, tmp_path / "eval.arrow")),
        "prior": str(write_trace(prior, tmp_path / "prior.arrow")),
    }
    rows = sweep(plan.on("pc1").model_copy(update=toys), tmp_path / "t.parquet")
    refused = rows[rows["status"] != "ok"]
    assert set(refused["system"]) == {"dejavu"}
    assert refused["why"].str.contains("does not fit on pc1: attention").all()
    module("figure").draw_to(tmp_path / "t.parquet", tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig08_hits_and_throughput.png").is_file()
    names = [text.get_text() for text in figure.draw(rows).axes[0].texts]
    assert {name.partition(" ")[0] for name in names} == systems - {"dejavu"}
    assert len(names) == len(set(names)) == len([r for r in plan.grid["rule"] if "system" in r]) - 1
    other = rows.assign(hardware="mine", machine="mine")  # the only machine, whatever its name
    assert len(figure.draw(other).axes[0].texts) == len(names)
    both = pd.concat([rows, other])
    drawn = [figure.draw(both), figure.draw(both, "mine")]
    for machine, one in zip(("pc1", "mine"), drawn, strict=True):
        said = " ".join(text.get_text() for text in one.findobj(Text))
        assert f"decode only, on {machine};" in " ".join(said.split())
    figure.write_tables(tmp_path / "t.parquet", tmp_path)
    said = (tmp_path / "fig08_pc1.md").read_text(encoding="utf-8")
    assert all(said.count(f"\n| {name} |") == 2 for name in systems - {"dejavu"})
    assert said.count("- dejavu: prosparse-") == 2
    assert said.count("all (does not fit)") == 2
    speeds = [float(row.split("|")[2]) for row in said.split("##")[1].splitlines() if "| 0." in row]
    assert speeds == sorted(speeds, reverse=True)


def test_names_keep_their_order_and_distance() -> None:
    assert spread([1.0, 5.0, 9.0], least=1.0, highest=10.0) == [1.0, 5.0, 9.0]
    assert spread([5.0, 5.0, 5.0], least=1.0, highest=10.0) == [4.0, 5.0, 6.0]
    assert spread([9.9, 9.9], least=1.0, highest=10.0) == [8.5, 9.5]
    assert spread([0.0, 0.0], least=1.0, highest=10.0) == [0.5, 1.5]
    assert spread([0.0, 0.0, 0.0, 9.0], least=5.0, highest=8.0) == [1.0, 3.0, 5.0, 7.0]
    assert spread([], least=1.0, highest=1.0) == []


def test_groups_are_made_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = module("fig09_groups")
    monkeypatch.setitem(figure.SPEC, "slots", 64)
    trace = random_trace(n_layers=2, n_neurons=256, n_decode=12)
    prior = random_trace(n_layers=2, n_neurons=256, n_decode=40, seed=1, source="b")
    figure.make(tmp_path / "t.csv", trace, prior)
    rows = pd.read_csv(tmp_path / "t.csv")
    assert len(rows) == 4 * 3 * 2
    assert not rows.duplicated(["size", "method", "policy"]).any()
    module("figure").draw_to(tmp_path / "t.csv", tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig09_groups.png").is_file()


def test_where_metis_loses_is_said_by_size_and_policy() -> None:
    rows = [
        (size, method, policy, hit)
        for size, method, policy, hit in (
            (4, "metis", "lru", 0.5), (4, "random", "lru", 0.4), (4, "frequency", "lru", 0.6),
            (8, "metis", "lru", 0.5), (8, "random", "lru", 0.4), (8, "frequency", "lru", 0.5),
            (4, "metis", "topk", 0.5), (4, "random", "topk", 0.6), (4, "frequency", "topk", 0.6),
        )
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["size", "method", "policy", "hit_resident"])
    assert where_metis_loses(table) == (
        "METIS has fewer hits than groups by frequency under LRU at 4, top-k at 4; than groups "
        "at random under top-k at 4."
    )
    assert where_metis_loses(table[table["method"] != "frequency"].iloc[:4]).startswith(
        "METIS has the most hits"
    )

"""Every figure of experiments/: a spec, a short script, a row in the README, and it draws."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from toys import header, random_trace

from kairox_sim import sweep
from kairox_sim.figure_data import Moves
from kairox_sim.plot_adaptation import idle_steps
from kairox_sim.plot_systems import spread, where_metis_loses
from kairox_sim.sweeps import Sweep, expand
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import SequenceInfo, Trace, write_trace
from kairox_sim.trace_stats import counts

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


def test_domain_shift_is_made_and_drawn(tmp_path: Path) -> None:
    figure = module("fig10_domain_shift")
    table = tmp_path / "t.parquet"
    traces = (of_two_domains(seed) for seed in (0, 1))
    figure.make(table, *traces)
    rows = pd.read_parquet(table)
    cases = {(system, "prose") for system in figure.SPEC["systems"]}
    cases |= {(figure.SPEC["reference"], "all domains")}
    assert set(zip(rows["system"], rows["profiled_on"], strict=True)) == cases
    assert rows["machine"].unique().tolist() == ["pc1", "pc2"]
    assert rows["domain"].unique().tolist() == ["prose", "code"]
    ratio = 32 / 2  # layers, model over trace
    assert rows["token_s"].to_numpy() == pytest.approx(rows["wall_s"].to_numpy() * ratio)
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig10_domain_shift.png").is_file()


def of_two_domains(seed: int) -> Trace:
    """Two sequences of 12 tokens; nothing that fires in one fires in the other."""
    n_neurons, n_tokens = 896, 12
    rng = np.random.default_rng(seed)
    bits = rng.random((2, n_tokens, 2, n_neurons)) < 0.2  # [seq, token, layer, neuron]
    bits[0, ..., 448:] = bits[1, ..., :448] = False
    sequences = tuple(
        SequenceInfo(i, domain, f"{domain}{seed}", str(seed) * 64, 0, n_tokens)
        for i, domain in enumerate(("prose", "code"))
    )
    seq, step, layer = (part.ravel() for part in np.mgrid[:2, :n_tokens, :2])
    return Trace.from_arrays(
        header(2, n_neurons, sequences=sequences),
        seq=seq, step=step + seq * n_tokens, token=step, layer=layer, phase=np.ones_like(seq),
        bits=bits.reshape(-1, n_neurons),
    )  # fmt: skip


def test_a_burst_is_planted_where_it_was_asked_for() -> None:
    failures = module("failures")
    trace = random_trace(n_layers=2, n_neurons=64, n_decode=6, prefill=0)
    cold = failures.cold_ids(trace, 1)
    assert len(cold) == 64 - round(0.3 * 64)
    fired = counts(trace)[1]
    assert fired[cold].max() <= fired[np.setdiff1d(np.arange(64), cold)].min()
    burst = failures.planted(trace, 1, cold, {4: 20})
    for step, before in zip(burst.steps(), trace.steps(), strict=True):
        assert step.active(0).tolist() == before.active(0).tolist()
        new = np.setdiff1d(step.active(1), before.active(1))
        assert len(new) == (20 if step.step == 4 else 0)
        assert np.isin(new, cold).all()
        assert np.isin(before.active(1), step.active(1)).all()


def test_bursts_are_made_and_drawn(tmp_path: Path) -> None:
    figure = module("fig11_burst")
    small = {"n_layers": 2, "prior_tokens": 8, "systems": ["powerinfer", "lru", "kairox-paper"]}
    spec = figure.SPEC | small
    for part in ("burst", "swings"):
        changed = {"layer": 1, "step": 3, "n_tokens": 2, "sizes": [100, 1500]}
        workload = spec[part]["workload"] | {"n_neurons": 512}
        spec[part] = spec[part] | changed | {"workload": workload}
    spec["swings"] |= {"largest": 500}
    table = tmp_path / "t.parquet"
    figure.make(table, spec)
    rows = pd.read_parquet(table)
    assert len(rows) == 2 * 3 * (2 + 2)
    one = rows[(rows["panel"] == "burst") & (rows["system"] == "powerinfer")]
    per_neuron_s = one["added_s"] / one["cold_neurons"]
    # On the CPU at half the memory's rate, where the set is static: see the profiles.
    assert per_neuron_s.to_numpy() == pytest.approx(2 * one["roofline_s"].to_numpy(), rel=0.3)
    assert (rows["listing_s"] * 1e6).unique() == pytest.approx([15])
    assert (rows["prose_s"] * 1e6).unique() == pytest.approx([80e3 / 1500])
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig11_burst.png").is_file()


def test_thrash_is_made_and_drawn(tmp_path: Path) -> None:
    figure = module("fig12_thrash")
    policies = ["lru", "tam", "tam_paper", "static", "none"]
    small = {"n_layers": 1, "n_tokens": 48, "one_hit_shares": [0.4, 0.8], "policies": policies}
    table = tmp_path / "t.parquet"
    figure.make(table, figure.SPEC | small)
    rows = pd.read_parquet(table)
    assert len(rows) == 2 * 2 * 2 * len(policies)
    shares = rows["one_hit_share"].unique().tolist()
    assert shares == pytest.approx([0.4, 0.8], abs=0.05)
    one_copy_each = rows[rows["copies"] == "bundle"].set_index(["machine", "policy"])
    # The filter that the Kairox Guide speaks of: TAM wastes few of its loads, LRU most of them.
    wasted = one_copy_each["wasted_share"]
    assert wasted.xs("tam", level="policy").max() < 0.2 < wasted.xs("lru", level="policy").min()
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig12_thrash.png").is_file()


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
    assert sorted(names) == sorted(systems - {"dejavu"})
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


def test_the_ratchet_is_made_and_drawn(tmp_path: Path) -> None:
    figure = module("fig13_ratchet")
    spec = figure.SPEC | {"n_layers": 2, "phase_tokens": 40, "shown_layers": [0, 1]}
    spec["workload"] = spec["workload"] | {"n_neurons": 864}
    table = tmp_path / "t.parquet"
    figure.make(table, spec)
    rows = pd.read_parquet(table)
    runs = dict(list(rows.groupby("controlled")))
    assert set(runs) == set(spec["runs"])
    assert (runs["fixed"]["threshold_scale"] == 1).all()
    guide = runs["guide"].reset_index(drop=True)
    fast = guide["density"] == 0.04
    idle = idle_steps(guide)
    assert idle[fast].all()
    assert guide.loc[fast, "threshold_scale"].nunique() == 1
    assert guide["threshold_scale"].min() < 1
    decays = runs["paper"][["decay_0", "decay_1"]]
    assert decays.iloc[0].tolist() == [0.5, 0.5]
    assert decays.nunique().min() > 5
    module("figure").draw_to(table, tmp_path, figure.STEM, figure.draw)
    assert (tmp_path / "fig13_ratchet.png").is_file()


def test_knobs_of_the_journal_are_those_of_the_records() -> None:
    failures = module("failures")
    trace = random_trace(n_layers=2, n_neurons=64, n_decode=20)
    prior = random_trace(n_layers=2, n_neurons=64, n_decode=20, seed=1, source="b")
    given = "kairox-guide", "pc1", prior, "metis:2"
    asked = {"model_as": "prosparse-7b", "slots": 16}
    recorded = failures.run_system(trace, *given, **asked).steps["threshold_scale"].tolist()
    knobs = failures.knobs_in_force(trace, *given, **asked)
    assert [knob.threshold_scale for knob in knobs] == recorded
    assert len(set(recorded)) > 3

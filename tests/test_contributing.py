"""CONTRIBUTING's worked examples, as they stand there: read, put where they say, run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import test_cache_contract as contract
from toys import random_trace
from typer.testing import CliRunner

from kairox_sim import KairoxError, Settings, model_catalogue, simulate, sweep, systems
from kairox_sim.cli import app
from kairox_sim.hardware import load_profile
from kairox_sim.model import CATALOGUE, ModelShape, find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.policies.base import Observes
from kairox_sim.sweeps import Sweep
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import write_trace

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
TRACE = random_trace()
PRIOR = random_trace(seed=1, source="b")


def blocks(heading: str) -> list[str]:
    """The fenced blocks below a heading."""
    (section,) = re.findall(rf"^### {heading}$(.*?)(?=^##)", TEXT, re.M | re.S)
    return re.findall(r"^```\w+\n(.*?)^```$", section, re.M | re.S)


def test_each_kind_has_its_example() -> None:
    kinds = ("A policy", "A system", "A machine", "A model")
    assert [len(blocks(kind)) for kind in kinds] == [3, 1, 1, 1]
    for path in re.findall(r"^`?(kairox_sim/[\w/]+\.py)|in `(kairox_sim/[\w/]+\.py)`", TEXT, re.M):
        (place,) = filter(None, path)
        assert (Path(__file__).parent.parent / place).is_file() or place.endswith("aged.py")


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's file as a module, its import and its row in the table."""
    source, imported, row = blocks("A policy")
    file = tmp_path / "aged.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kairox_sim.policies.aged", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "kairox_sim.policies.aged", module)
    names: dict[str, Any] = {}
    exec(imported, names)
    ((name, made),) = eval(f"{{{row}}}", names).items()
    monkeypatch.setitem(POLICIES, name, made)
    return str(name)


@pytest.fixture
def system(policy: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (row,) = blocks("A system")
    (made,) = eval(f"({row})", dict(vars(systems)))
    monkeypatch.setitem(SYSTEMS, made.name, made)
    return str(made.name)


def run(**given: Any) -> Any:
    machine = given.pop("hardware", "pc1")
    base = {"model_as": "prosparse-7b", "prediction": "perfect", "slots": 16}
    return simulate(TRACE, Settings().with_overrides(base | given), hardware=machine, prior=PRIOR)


def test_the_policy_runs_and_its_parameter_counts(policy: str, tmp_path: Path) -> None:
    slow, quick = run(policy=policy, slots=20), run(policy=policy, slots=20, period=2)
    assert slow.labels["setting"] == "aged_lfu 20"
    assert quick.labels["setting"] == "aged_lfu(period=2) 20"
    assert slow.totals["used"] > 0
    assert slow.totals["loads"] != quick.totals["loads"]
    assert (
        slow.totals["loads"] == run(policy="lfu", slots=20).totals["loads"]
    )  # 25 steps: nothing fades
    with pytest.raises(KairoxError, match="aged_lfu's period must be 1 or more, got 0"):
        Settings(policy=policy).with_overrides({"period": 0})
    spec = {"trace": str(write_trace(TRACE, tmp_path / "t.arrow")),
            "base": {"model_as": "prosparse-7b", "policy": policy, "prediction": "perfect"},
            "grid": {f"{policy}.period": [16, 64]}}  # fmt: skip
    assert sweep(Sweep.model_validate(spec))["status"].tolist() == ["ok", "ok"]
    listed = json.loads(CliRunner().invoke(app, ["policies", "--json"]).stdout)
    (ours,) = [entry for entry in listed if entry["name"] == policy]
    assert ours["parameters"] == ["period"]


def test_the_policy_keeps_the_contract(policy: str) -> None:
    contract.test_any_calls(policy)
    for trigger in contract.TRIGGERS:
        for observes in get_args(Observes):
            contract.test_it_is_not_vacuous(policy, trigger, observes)
    contract.test_max_swaps_0_moves_nothing_in(policy)


def test_the_system_runs_and_is_listed(system: str, policy: str) -> None:
    result = simulate(
        TRACE, Settings.of({"system": system, "model_as": "prosparse-7b"}), prior=PRIOR
    )
    assert result.labels["setting"] == system
    assert result.settings["policy"] == policy
    assert result.totals["residual"] == 0  # all is the GPU's
    assert result.totals["loads"] > 0
    tight = Settings.of({"system": system, "model_as": "prosparse-7b", "slots": 9})
    assert simulate(TRACE, tight).totals["fetched"] > 0
    listed = json.loads(CliRunner().invoke(app, ["systems", system, "--json"]).stdout)
    assert listed[0]["decided"].startswith("Says here")
    with pytest.raises(KairoxError, match="did you mean 'aged'"):
        Settings.of({"system": "agd"})


def test_the_machine_is_its_parts_and_what_it_says_itself(tmp_path: Path) -> None:
    (text,) = blocks("A machine")
    path = tmp_path / "my-box.toml"
    path.write_text(text, encoding="utf-8")
    mine, parts = load_profile(path), tomllib.loads(text)
    plain = load_profile(f"{parts['gpu']}+{parts['cpu']}+{parts['link']}")
    assert mine.name == "my-box"
    assert mine.dram_bytes_per_s.value == 38e9 != plain.dram_bytes_per_s.value
    assert mine.ffn_gpu == plain.ffn_gpu
    assert mine.h2d == plain.h2d
    layers = {"system": "llama.cpp", "slots": "ngl:1"}  # whose CPU streams at the DRAM rate
    slower = run(**layers, hardware=path)
    assert slower.labels["hardware"] == "my-box"
    assert slower.summary["tok_s"] < run(**layers, hardware=plain).summary["tok_s"]


def test_the_model_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = blocks("A model")
    (values,) = eval(f"({row})", dict(vars(model_catalogue)))
    assert values["name"] not in CATALOGUE
    monkeypatch.setitem(CATALOGUE, values["name"], ModelShape(**values))
    assert find_shape("my-relu-1b@q8_0").bytes_per_weight < 2
    result = run(policy="lru", model_as="my-relu-1b", gating="predicted")
    assert result.labels["costs"].endswith("my-relu-1b costs")
    assert result.summary["tok_s_scaled"] > run(policy="lru").summary["tok_s_scaled"]

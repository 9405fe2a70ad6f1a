"""What a run says of neurons that may be missing: by its gating, by thresholds, by its trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from toys import random_trace

from kairox_sim import Settings, simulate
from kairox_sim.budgets import shape_of, target_of
from kairox_sim.errors import KairoxError
from kairox_sim.model import find_shape
from kairox_sim.predictor_file import KEY, rank_of
from kairox_sim.record import APPROXIMATE, EXACT, LOSSY, exactness_of
from kairox_sim.sweeps import Sweep, sweep
from kairox_sim.trace import write_trace

BASE = {"model_as": "prosparse-7b", "slots": 12, "policy": "lru"}
TINY = {"model_as": "llama2-7b", "slots": 12, "policy": "lru"}


@pytest.mark.parametrize(
    ("gating", "approximate", "said"),
    [
        ("exact", False, EXACT),
        ("screened", False, EXACT),
        ("predicted", False, LOSSY),
        ("exact", True, APPROXIMATE),
        ("predicted", True, f"{APPROXIMATE}; {LOSSY}"),
        ("dense", True, EXACT),
    ],
)
def test_what_is_promised(gating: str, approximate: bool, said: str) -> None:
    assert exactness_of(gating, approximate=approximate) == said


@pytest.mark.parametrize("gating", ["exact", "screened", "predicted", "dense"])
def test_steps_labels_and_report_say_the_same(gating: str) -> None:
    policy = {"policy": "none"} if gating == "dense" else {"prediction": "perfect"}
    result = simulate(random_trace(), Settings(**BASE | policy, gating=gating))  # type: ignore[arg-type]
    lossless = gating != "predicted"
    assert set(result.steps["exact"]) == {lossless}
    assert result.labels["exactness"] == (EXACT if lossless else LOSSY)
    assert result.to_dict()["labels"]["exactness"] == result.labels["exactness"]


def test_a_sweeps_table_says_it(tmp_path: Path) -> None:
    path = write_trace(random_trace(), tmp_path / "t.arrow")
    grid = {"gating": ["exact", "predicted"]}
    table = sweep(Sweep(trace=str(path), base=BASE | {"prediction": "perfect"}, grid=grid))
    assert list(table["exactness"]) == [EXACT, LOSSY]


def test_a_lossy_recording_does_not_know_what_it_missed() -> None:
    made = random_trace()
    recorded = random_trace(gating="predicted", complete=False)
    result = simulate(recorded, Settings(**BASE, gating="predicted"))  # type: ignore[arg-type]
    assert result.steps["active"].isna().all()
    assert math.isnan(result.summary["recall"])
    drawn = simulate(made, Settings(**BASE, gating="predicted", prediction="0.9,0.8"))  # type: ignore[arg-type]
    assert drawn.steps["active"].notna().all()  # what was drawn from is known


def test_thresholds_are_those_of_the_trace() -> None:
    with pytest.raises(KairoxError, match="recorded without any"):
        simulate(random_trace(), Settings(**BASE, thresholds="t.json"))  # type: ignore[arg-type]
    with pytest.raises(KairoxError, match="not ReLU-sparse"):
        simulate(random_trace(), Settings(**TINY))  # type: ignore[arg-type]
    by_thresholds = random_trace(approximate="a tenth is kept, +0.3 nats per token")
    for given in ({}, {"thresholds": "t.json"}):
        result = simulate(by_thresholds, Settings(**TINY, **given))  # type: ignore[arg-type]
        assert result.labels["exactness"] == APPROXIMATE
        assert not result.steps["exact"].any()


def test_a_header_keeps_what_is_approximate(tmp_path: Path) -> None:
    header = replace(random_trace().header, approximate="0.1 kept")
    assert type(header).from_json(header.to_json()) == header
    old = json.loads(random_trace().header.to_json())
    del old["approximate"]  # traces of before
    assert type(header).from_json(json.dumps(old)).approximate is None


def test_a_dense_model_by_its_config_is_no_sparse_one(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(str(tmp_path))
    assert (shape.relu_sparse, shape.approximate) == (False, False)
    asked = target_of(Settings(thresholds="t.json"), shape)
    assert asked is not None
    assert asked.approximate


def _predictor(path: Path, metadata: object) -> Path:
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_trained_predictor_is_charged_by_its_rank(tmp_path: Path) -> None:
    file = _predictor(tmp_path / "p.safetensors", {KEY: json.dumps({"rank": 24})})
    assert rank_of(file) == 24
    own = find_shape("tiny-reglu")
    assert own.predictor_rank is None
    target = target_of(Settings(predictor_file=str(file), predictor="rank"), own)
    assert target is not None
    assert target.predictor_rank == 24
    stand_in = target_of(Settings(predictor_file=str(file), model_as="prosparse-7b"), own)
    assert stand_in == find_shape("prosparse-7b")  # as published


@pytest.mark.parametrize("metadata", [None, {}, {KEY: "{}"}, {KEY: '{"rank": 0}'}])
def test_what_is_no_predictor(tmp_path: Path, metadata: object) -> None:
    with pytest.raises(KairoxError, match=r"is no predictor|must be 1 or more"):
        rank_of(_predictor(tmp_path / "p.safetensors", metadata))
    with pytest.raises(KairoxError, match="cannot read the predictor"):
        rank_of(tmp_path / "none")

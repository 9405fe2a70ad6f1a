"""FFN rows in another format than the rest of the model, and device memory given by its size."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kairox_sim.cli import app
from kairox_sim.costs import max_slots
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile, with_vram
from kairox_sim.model import find_shape, with_ffn_weights
from kairox_sim.oracle import oracle_settings
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
from kairox_sim.sweeps import read_table
from kairox_sim.trace import read_trace

TRACE = Path(__file__).parent.parent / "traces" / "tiny-reglu-eval.arrow"
SHAPE = find_shape("prosparse-7b")  # d_model 4,096, float16


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("float32", 16384),
        ("float16", 8192),
        ("bfloat16", 8192),
        ("int8", 4100),
        ("q8_0", 128 * 34),
        ("q4_0", 128 * 18),
    ],
)
def test_bytes_of_rows(kind: str, row: int) -> None:
    shape = with_ffn_weights(SHAPE, kind)
    assert shape.ffn_row_bytes == row
    assert shape.bundle_bytes("exact") == 2 * row
    assert shape.bundle_bytes("screened") == shape.neuron_bytes == 3 * row
    assert shape.gate_bytes == 11008 * row
    for name in ("attention_bytes", "head_bytes", "embedding_bytes", "kv_bytes_per_token"):
        assert getattr(shape, name) == getattr(SHAPE, name)  # nothing else changes
    assert with_ffn_weights(shape, kind) == shape
    assert find_shape(f"prosparse-7b@ffn-{kind}") == shape


def test_formats_that_cannot_be() -> None:
    with pytest.raises(KairoxError, match="unknown weights 'q5'; allowed: float32"):
        with_ffn_weights(SHAPE, "q5")
    with pytest.raises(KairoxError, match="rows of 100 weights are not whole blocks of 32"):
        with_ffn_weights(replace(SHAPE, d_model=100), "q4_0")


def test_weights_in_settings_are_those_of_the_stand_in() -> None:
    trace = read_trace(TRACE).select(seqs=[0])
    plain, by_name, by_setting = (
        simulate(trace, Settings(policy="lru", slots=100, **given), hardware="pc1")
        for given in (
            {"model_as": "prosparse-7b"},
            {"model_as": "prosparse-7b@ffn-q8_0"},
            {"model_as": "prosparse-7b", "weights": "q8_0"},
        )
    )
    assert by_setting.summary == pytest.approx(by_name.summary, nan_ok=True)
    moved = by_setting.summary["h2d_bytes_per_token"] / plain.summary["h2d_bytes_per_token"]
    assert moved == pytest.approx(34 / 64)
    assert "ffn-q8_0" in by_setting.labels["costs"]


def test_a_budget_of_memory_is_planned_as_the_machines_own_is() -> None:
    trace = read_trace(TRACE).select(seqs=[0])
    common = {"policy": "lru", "model_as": "prosparse-7b", "gating": "exact"}
    given = simulate(trace, Settings(vram="11GiB", **common), hardware="pc1")
    machine = with_vram(load_profile("pc1"), 11 * 2**30)
    own = simulate(trace, Settings(slots="vram", **common), hardware=machine)
    assert given.provenance["slots"] == own.provenance["slots"]
    assert given.provenance["vram_bytes"] == 11 * 2**30
    context = int(given.steps["context_len"].max())
    expected = max_slots(machine, SHAPE, "exact", context, trace_neurons=896, predictor="none")
    assert given.provenance["slots"] == [expected] * 6
    # A budget that is given stands, and has to fit.
    stands = simulate(trace, Settings(vram="11GiB", slots=7, **common), hardware="pc1")
    assert stands.provenance["slots"] == [7] * 6
    with pytest.raises(KairoxError, match="does not fit"):
        simulate(trace, Settings(vram="8GiB", slots=700, **common), hardware="pc1")


def test_smaller_rows_leave_room_for_more() -> None:
    trace = read_trace(TRACE).select(seqs=[0])
    common = {"policy": "lru", "model_as": "prosparse-7b", "vram": "9GiB"}
    slots = [
        simulate(trace, Settings(weights=kind, **common)).provenance["slots"][0]
        for kind in ("float16", "q8_0", "q4_0")
    ]
    assert slots[0] < slots[1] < slots[2]


def test_the_size_of_values_is_a_live_runs() -> None:
    trace = read_trace(TRACE).select(seqs=[0])  # of tiny-reglu, float32
    common = {"policy": "lru", "slots": 100}
    own, halved = (simulate(trace, Settings(**common, dtype=d)) for d in ("float32", "bfloat16"))
    moved = halved.summary["h2d_bytes_per_token"] / own.summary["h2d_bytes_per_token"]
    assert moved == pytest.approx(0.5)
    kept = simulate(trace, Settings(**common, dtype="bfloat16", weights="float32"))
    assert kept.summary["h2d_bytes_per_token"] == own.summary["h2d_bytes_per_token"]
    assert kept.summary["gpu_s"] < own.summary["gpu_s"]  # attention, head, keys and values
    stand_in = simulate(trace, Settings(**common, dtype="bfloat16", model_as="prosparse-7b"))
    assert "dtype bfloat16 plays no part: prosparse-7b is as published" in stand_in.warnings


def test_options_of_the_commands(tmp_path: Path) -> None:
    asked = ["--as", "prosparse-7b", "--policy", "lru", "--vram", "9GiB", "--json", "--no-oracle"]
    told = CliRunner().invoke(
        app,
        ["simulate", str(TRACE), *asked, "--weights", "q4_0", "--numerics", "deterministic"],
    )
    assert told.exit_code == 0, told.output
    said = json.loads(told.stdout)
    assert said["provenance"]["vram_bytes"] == 9 * 2**30
    assert (said["settings"]["weights"], said["settings"]["numerics"]) == ("q4_0", "deterministic")
    spec = tmp_path / "s.toml"
    spec.write_text(
        f'trace = "{TRACE}"\n[base]\nmodel_as = "prosparse-7b"\nvram = "12GiB"\n'
        '[grid]\nweights = ["float16", "q4_0"]\n[[cells]]\npolicy = "none"\nvram = "10GiB"\n'
    )
    out = tmp_path / "t.parquet"
    told = CliRunner().invoke(
        app, ["sweep", str(spec), "-o", str(out), "--workers", "1", "--vram", "9GiB"]
    )
    assert told.exit_code == 0, told.output
    table = read_table(out)
    assert set(table["vram"]) == {"9GiB"}
    assert table["slots"][0] < table["slots"][1]


def test_the_oracle_of_a_run_is_kept_and_computed_as_it_is() -> None:
    run = Settings(weights="q8_0", numerics="deterministic", dtype="float16", vram="9GiB")
    asked = oracle_settings(run, [5])
    assert asked is not None
    assert (asked.weights, asked.numerics, asked.dtype) == ("q8_0", "deterministic", "float16")


def test_a_size_that_is_none() -> None:
    with pytest.raises(KairoxError, match="vram: got 'lots'; allowed: a size such as 12GiB"):
        Settings.of({"vram": "lots"})

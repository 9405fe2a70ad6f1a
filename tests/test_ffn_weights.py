"""FFN rows in another format than the rest of the model, and device memory given by its size."""

from dataclasses import replace
from pathlib import Path

import pytest

from kairox_sim.costs import max_slots
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile, with_vram
from kairox_sim.model import find_shape, with_ffn_weights
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
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


def test_a_size_that_is_none() -> None:
    with pytest.raises(KairoxError, match="vram: got 'lots'; allowed: a size such as 12GiB"):
        Settings.of({"vram": "lots"})

"""What a system may choose and what it costs: copies, hand-overs, places, whole layers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.costs import COPIES, CostModel, costs_for, fits, max_layers
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, load_profile
from kairox_sim.model import ModelShape, find_shape
from kairox_sim.placement import whole_layers
from kairox_sim.whole_layers import ops_of_step

PC1 = load_profile("pc1")
PROSPARSE = find_shape("prosparse-7b")
MIXTRAL = find_shape("mixtral-8x7b")


def costs(
    profile: HardwareProfile = PC1,
    shape: ModelShape = PROSPARSE,
    gating: str = "exact",
    **changes: Any,
) -> CostModel:
    sizes = {"trace_layers": shape.n_layers, "trace_neurons": shape.n_neurons}
    return costs_for(profile, shape, gating, **{**sizes, **changes})


# Copies


def test_copies_of_a_swap_by_hand() -> None:
    """16 neurons; under exact gating up and down move, under predicted the gate as well."""
    for gating, rows in (("exact", 2), ("predicted", 3)):
        n = {c: costs(gating=gating, copies=c).swap_copies(16) for c in COPIES}
        assert n == {"gather": 1, "bundle": 16, "matrix": rows, "row": 16 * rows}
    same = {costs(copies=c).swap_bytes(16) for c in COPIES}
    assert same == {16 * 16_384}
    assert {costs(copies=c).swap_copies(0) for c in COPIES} == {0}


def test_the_profile_says_what_a_swap_is_by_default() -> None:
    assert costs().copies == "gather"
    assert costs(load_profile("pc1-rowcopies")).copies == "bundle"
    assert costs(load_profile("pc1-rowcopies"), copies="gather").copies == "gather"


def test_copies_of_a_stand_in() -> None:
    """A neuron of 896 is 12.29 bundles of the model: matrices of a swap stay as many."""
    sizes = {"trace_layers": 6, "trace_neurons": 896}
    n = {c: costs(copies=c, **sizes).swap_copies(2) for c in COPIES}
    bundles = 2 * 11_008 / 896
    assert n == {
        "gather": 1, "matrix": 2, "bundle": pytest.approx(bundles),
        "row": pytest.approx(2 * bundles),
    }  # fmt: skip


def test_each_copy_bears_its_share_of_a_synchronisation() -> None:
    sync = PC1.h2d.sync_fixed_s
    assert sync is not None
    plain, every_4 = costs(copies="row"), costs(copies="row", copies_per_sync=4)
    assert every_4.swap_fixed_s(16) - plain.swap_fixed_s(16) == pytest.approx(32 * sync.value / 4)
    alone = costs(copies_per_sync=1)
    assert alone.swap_s(16) - costs().swap_s(16) == pytest.approx(sync.value)
    # activations are not copied in such batches
    assert alone.act_h2d_s(1) == costs().act_h2d_s(1)


def test_hand_overs_are_paid_along_the_hosts_path() -> None:
    one, two = costs(), costs(handovers=2)
    assert one.host_path_s(0, 1) == two.host_path_s(0, 1) == 0
    round_trip = one.act_d2h_s(1) + one.act_h2d_s(1) + 2 * one.handover_s
    assert one.host_path_s(500, 1) == pytest.approx(round_trip + one.ffn_cpu_s(500, 1))
    assert two.host_path_s(500, 1) - one.host_path_s(500, 1) == pytest.approx(round_trip)


# Places in host memory


def places(*order: int) -> np.ndarray:
    """[1, 8]: neuron i lies at order[i]."""
    return np.array([order], np.int32)


def linked(position: np.ndarray, copies: str = "bundle", **changes: Any) -> CostModel:
    sizes = {"trace_layers": 1, "trace_neurons": 8, "position": position, "copies": copies}
    return costs(shape=replace(PROSPARSE, n_layers=1, n_neurons=8), **sizes, **changes)


def test_reads_of_a_swap_by_hand() -> None:
    """6 us start a copy, 0.67 us move a bundle of 16 KiB: gaps of up to 8 are read through."""
    ids = np.array([1, 4, 6], np.int32)
    near = linked(places(0, 5, 1, 2, 3, 4, 6, 7))  # at 5, 3 and 6: one read, 3 to 6
    assert near.swap_of(0, ids) == (4 * 16_384, pytest.approx(6e-6))
    far = linked(places(0, 5, 1, 2, 3, 4, 20, 7))  # 20 is alone
    assert far.swap_of(0, ids) == (4 * 16_384, pytest.approx(12e-6))
    # The rows of two matrices: half as long, so that gaps of up to 17 are read through.
    rows = linked(places(0, 5, 1, 2, 3, 4, 20, 7), "row")
    assert rows.swap_of(0, ids) == (18 * 16_384, pytest.approx(12e-6))
    unlinked = linked(places(0, 100, 200, 300, 400, 500, 600, 700))
    assert unlinked.swap_of(0, ids) == (3 * 16_384, unlinked.swap_fixed_s(3))


def test_a_stand_ins_neuron_lies_as_so_many_bundles() -> None:
    """Nothing lies together: as many copies as without positions. All do: one per bundle of one."""
    sizes = {"trace_layers": 1, "trace_neurons": 4, "copies": "bundle"}
    shape = replace(PROSPARSE, n_layers=1, n_neurons=8)
    apart = costs(shape=shape, position=np.array([[0, 90, 180, 270]], np.int32), **sizes)
    ids = np.array([0, 1, 3], np.int32)
    assert apart.swap_of(0, ids) == (apart.swap_bytes(3), apart.swap_fixed_s(3))
    together = costs(shape=shape, position=np.array([[0, 1, 3, 2]], np.int32), **sizes)
    assert together.swap_of(0, ids) == (apart.swap_bytes(3), apart.swap_fixed_s(1))


@given(
    ids=st.sets(st.integers(0, 39), min_size=1),
    seed=st.integers(0, 9),
    copies=st.sampled_from(["bundle", "row"]),
)
def test_linking_never_costs_more(ids: set[int], seed: int, copies: str) -> None:
    shape = replace(PROSPARSE, n_layers=1, n_neurons=40)
    position = np.random.default_rng(seed).permutation(40)[None].astype(np.int32)
    sizes = {"trace_layers": 1, "trace_neurons": 40, "copies": copies}
    plain, laid = costs(shape=shape, **sizes), costs(shape=shape, position=position, **sizes)
    chosen = np.array(sorted(ids), np.int32)
    n_bytes, fixed_s = laid.swap_of(0, chosen)
    assert n_bytes >= plain.swap_bytes(chosen.size)
    assert fixed_s <= plain.swap_fixed_s(chosen.size) * (1 + 1e-12)
    assert laid.swap_of_s(0, chosen) <= plain.swap_of_s(0, chosen) * (1 + 1e-12)
    assert plain.swap_of_s(0, chosen) == plain.swap_s(chosen.size)


# Dense


def test_experts_are_read_by_the_tokens_routed_to_them() -> None:
    """2 of 8: a token reads a quarter of a layer, two tokens 7/16 of it, many tokens all."""
    model = costs(shape=MIXTRAL, gating="dense")
    n = MIXTRAL.n_neurons
    whole = n * 3 * 4096 * 2
    assert model.bundle_bytes * n == whole
    assert [model.cpu_bytes(n, t) / whole for t in (1, 2)] == [0.25, 0.4375]
    assert model.cpu_bytes(n, 64) / whole == pytest.approx(1, abs=1e-7)
    fixed = PC1.ffn_gpu.fixed_s.value
    assert model.ffn_gpu_s(n, 1) - fixed == pytest.approx(whole / 4 / PC1.ffn_gpu.bytes_per_s.value)
    # flops are each token's own
    flops = costs_for(PC1, MIXTRAL, "dense", trace_layers=32, trace_neurons=n).ffn_gpu_s(n, 4096)
    assert flops - fixed == pytest.approx(4096 * n / 4 * 6 * 4096 / PC1.gpu_flops_per_s.value)
    # a swap moves what it names
    assert model.swap_bytes(16) == 16 * 3 * 8192
    # sparse gating evaluates what it says
    assert costs(shape=MIXTRAL, gating="oracle", predictor="none").cpu_bytes(100) == 100 * 24_576


def test_dense_pays_for_no_gate_and_sends_x_alone() -> None:
    model = costs(gating="dense")
    assert model.gate_s(1) == model.predict_s(1) == 0
    assert model.act_d2h_bytes(3) == 3 * 8192
    assert costs(gating="dense", predictor="lookahead").predict_s(1) == 0


def test_a_layer_on_the_host_by_hand() -> None:
    """At the whole 68 GB/s of DRAM, not at the 34 of the sparse kernel, 30 us a pass."""
    model = costs(gating="dense")
    assert model.attention_cpu_s(1, 100) == pytest.approx(
        30e-6 + (134_217_728 + 100 * 16_384) / 68e9
    )
    assert model.dense_ffn_cpu_s(11_008, 1) == pytest.approx(30e-6 + 11_008 * 24_576 / 68e9)
    assert model.head_cpu_s(1) == pytest.approx(30e-6 + 32_001 * 8192 / 68e9)
    assert model.x_h2d_s(1) == pytest.approx(6e-6 + 8192 / 24.5e9)
    # 64 tokens are bound by 660 GFLOP/s
    assert model.dense_ffn_cpu_s(11_008, 64) == pytest.approx(
        30e-6 + 64 * 11_008 * 6 * 4096 / 660e9
    )
    small = costs(gating="dense", trace_layers=6, trace_neurons=896)
    assert small.dense_ffn_cpu_s(896, 1) == pytest.approx(model.dense_ffn_cpu_s(11_008, 1))
    assert small.head_cpu_s(1) == pytest.approx(model.head_cpu_s(1) * 6 / 32)


def test_a_chunk_crosses_whole_and_its_last_token_alone_goes_to_the_head() -> None:
    model = costs(gating="dense")
    ops = ops_of_step(model, [False, True], 11_008, 64, 64)
    crossings = {op.lane: op.ns for op in ops if op.name == "x"}
    assert crossings == {
        "h2d": round(1e9 * (6e-6 + 64 * 8192 / 24.5e9)),
        "d2h": round(1e9 * (6e-6 + 8192 / 24.5e9)),
    }


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"copies": "rows"}, "unknown copies 'rows'; allowed: gather, bundle, matrix, row"),
        ({"copies_per_sync": 0}, "copies_per_sync is 0, must be at least 1"),
        ({"handovers": 0}, "handovers is 0, must be at least 1"),
        (
            {"position": np.zeros((32, 7), np.int32), "copies": "row"},
            "positions are of 32 x 7 and the trace has 32 layers of 11008 neurons",
        ),
        (
            {"position": np.zeros((32, 11_008), np.int32)},
            "copies 'gather' does not read them one by one; use copies bundle or row",
        ),
        (
            {"profile": load_profile("guide"), "copies_per_sync": 4},
            "copies_per_sync is 4 and profile 'guide' does not say what a synchronisation costs",
        ),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(KairoxError, match=re.escape(words)):
        costs(**changes)


# Memory of whole layers


def test_whole_layers_by_hand() -> None:
    plan = fits(PC1, PROSPARSE, "dense", [0] * 12 + [11_008] * 20, 1024, dispatch="layers")
    assert plan.whole_layers == 20
    assert plan.attention == 20 * 134_217_728
    assert plan.kv == 20 * 1024 * 16_384
    assert plan.slots == 20 * 11_008 * 24_576
    assert plan.head == plan.gate == plan.predictor == 0
    assert "prosparse-7b (dense, 20 whole layers) fits on pc1" in plan.explain()
    everything = fits(PC1, PROSPARSE, "dense", 11_008, 1024, dispatch="layers")
    assert (everything.whole_layers, everything.head) == (32, 32_000 * 8192)
    assert "(dense, 32 whole layers) does not fit on pc1: attention 4.295" in everything.explain()
    # a stand-in's six layers, three of them resident, are half of the target's
    small = fits(PC1, PROSPARSE, "dense", [0, 0, 0, 896, 896, 896], 1024, trace_neurons=896,
                 dispatch="layers")  # fmt: skip
    assert small.whole_layers == 16


@given(
    n_model=st.integers(1, 80), n_layers=st.integers(1, 12),
    n_neurons=st.sampled_from([1, 12, 896]), share=st.floats(0, 1),
)  # fmt: skip
def test_what_a_stand_in_is_given_is_planned_as_so_many_layers(
    n_model: int, n_layers: int, n_neurons: int, share: float
) -> None:
    """And never as more, even where a slot is more than a layer of the model."""
    n = round(share * n_model)
    slots = whole_layers(n_layers, n_neurons, n, of=n_model).slots
    shape = replace(PROSPARSE, n_layers=n_model)
    plan = fits(PC1, shape, "dense", slots, 64, trace_neurons=n_neurons, dispatch="layers")
    assert plan.whole_layers is not None
    assert plan.whole_layers <= n
    if n_layers * n_neurons >= n_model:
        assert plan.whole_layers == n
    assert (plan.head > 0) == (n == n_model) == (min(slots) == n_neurons)


def test_dense_slots_have_neither_gate_nor_predictor_beside_them() -> None:
    plan = fits(PC1, PROSPARSE, "dense", 1000, 1024, predictor="lookahead")
    assert plan.gate == plan.predictor == 0
    assert plan.attention == 32 * 134_217_728
    assert plan.whole_layers is None


@given(context=st.integers(0, 8192), vram_gib=st.floats(0.5, 40))
def test_max_layers_is_the_last_that_fits(context: int, vram_gib: float) -> None:
    def fit(n: int) -> bool:
        slots = [0] * (32 - n) + [11_008] * n
        return fits(
            PC1, PROSPARSE, "dense", slots, context, vram_bytes=vram, dispatch="layers"
        ).fits

    vram = vram_gib * 2.0**30
    most = max_layers(PC1, PROSPARSE, context, vram_bytes=vram)
    assert most == 0 or fit(most)
    assert most == 32 or not fit(most + 1)


def test_the_head_alone_can_keep_the_last_layer_out() -> None:
    layer = 134_217_728 + 11_008 * 24_576
    vram = PC1.vram_margin_bytes.value + 32 * layer
    assert max_layers(PC1, PROSPARSE, 0, vram_bytes=vram) == 31
    assert max_layers(PC1, PROSPARSE, 0, vram_bytes=vram + 32_000 * 8192) == 32

"""Bytes of real arrays, shapes from configuration files, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.errors import KairoxError
from kairox_sim.model import (
    CATALOGUE,
    GATINGS,
    PREDICTORS,
    ModelShape,
    find_shape,
    mean_slots,
)

PROSPARSE = CATALOGUE["prosparse-7b"]
OPT = CATALOGUE["opt-6.7b"]
TINY = CATALOGUE["tiny-reglu"]


def nbytes(*arrays: np.ndarray) -> int:
    return sum(array.size * array.itemsize for array in arrays)


def test_c17_bytes_are_those_of_the_real_matrices() -> None:
    """A non-square FFN of 4096 x 11008: a neuron is a row of gate and up, a *column* of down."""
    gate = np.empty((11008, 4096), dtype=np.float16)
    up = np.empty((11008, 4096), dtype=np.float16)
    down = np.empty((4096, 11008), dtype=np.float16)
    assert PROSPARSE.n_neurons * PROSPARSE.neuron_bytes == nbytes(gate, up, down)
    assert PROSPARSE.neuron_bytes == nbytes(gate[7], up[7], down[:, 7]) == 24_576
    assert PROSPARSE.gate_bytes == nbytes(gate)
    assert PROSPARSE.bundle_bytes("exact") == nbytes(up[7], down[:, 7])
    for gating in ("oracle", "screened", "predicted", "dense"):
        assert PROSPARSE.bundle_bytes(gating) == nbytes(gate[7], up[7], down[:, 7])


def test_c17_opt() -> None:
    fc1 = np.empty((16384, 4096), dtype=np.float16)
    fc2 = np.empty((4096, 16384), dtype=np.float16)
    assert OPT.n_neurons * OPT.neuron_bytes == nbytes(fc1, fc2)
    assert OPT.bundle_bytes("exact") == nbytes(fc2[:, 0])
    assert OPT.gate_bytes == nbytes(fc1)


def test_attention_bytes_with_fewer_key_heads() -> None:
    q, k, v, o = (
        np.empty(size, np.float32) for size in ((192, 192), (64, 192), (64, 192), (192, 192))
    )
    assert TINY.attention_bytes == nbytes(q, k, v, o)
    assert TINY.kv_bytes_per_token == nbytes(k[:, 0], v[:, 0])


def test_bytes_of_a_published_model() -> None:
    """LLaMA-2-13B in FP16: 209.7 MB of attention and 424.7 MB of FFN a layer, 819 200 B of KV."""
    shape = replace(
        PROSPARSE, n_layers=40, d_model=5120, n_neurons=13824, n_heads=40, n_kv_heads=40
    )
    assert shape.attention_bytes == 4 * 5120 * 5120 * 2
    assert shape.neuron_bytes == 30_720
    assert shape.n_layers * shape.kv_bytes_per_token == 819_200
    assert shape.head_bytes == shape.embedding_bytes == 32_000 * 5120 * 2
    assert shape.predictor_bytes == 1024 * (5120 + 13824) * 2


@pytest.mark.parametrize("shape", CATALOGUE.values(), ids=lambda s: s.name)
def test_catalogue(shape: ModelShape) -> None:
    assert find_shape(shape.name) is shape
    assert shape.source
    assert shape.share_source
    assert shape.bundle_flops("oracle") == 2 * shape.rows_per_neuron * shape.d_model
    assert shape.bundle_flops("exact") * shape.n_neurons + shape.gate_flops == (
        shape.bundle_flops("oracle") * shape.n_neurons
    )


def test_attention_flops_by_hand() -> None:
    """Two a weight and token; scores and weighted sums: two each, of heads x size x context."""
    weights = 192 * 192 + 2 * 64 * 192 + 192 * 192
    assert TINY.attention_flops(3, 10) == 3 * (2 * weights + 2 * 2 * 192 * 10)


@given(slots=st.integers(0, 11007), context=st.integers(0, 4096), gating=st.sampled_from(GATINGS))
def test_a_slot_more_is_a_bundle_a_layer_more(slots: int, context: int, gating: str) -> None:
    less, more = (PROSPARSE.device_bytes(gating, n, context) for n in (slots, slots + 1))
    assert more - less == 32 * PROSPARSE.bundle_bytes(gating)
    longer = PROSPARSE.device_bytes(gating, slots, context + 1)
    assert longer - less == 32 * PROSPARSE.kv_bytes_per_token


def test_device_parts_by_gating_and_predictor() -> None:
    exact = PROSPARSE.device_parts("exact", 100, 256)
    assert exact["gate"] == 32 * 11008 * 8192
    assert exact["slots"] == 32 * 100 * 2 * 8192
    predicted = PROSPARSE.device_parts("predicted", 100, 256)
    assert predicted["gate"] == 0
    assert predicted["slots"] == 32 * 100 * 3 * 8192
    assert predicted["predictor"] == 32 * PROSPARSE.predictor_bytes
    ahead = PROSPARSE.device_parts("predicted", 100, 256, predictor="lookahead")
    assert ahead["gate"] == exact["gate"]
    assert ahead["predictor"] == 0
    screened = PROSPARSE.device_parts("screened", 100, 256)
    assert 0.5 < screened["gate"] / exact["gate"] < 0.51
    assert PROSPARSE.device_parts("oracle", 0, 0, predictor="none")["gate"] == 0
    for predictor in PREDICTORS:
        dense = PROSPARSE.device_parts("dense", 100, 256, predictor=predictor)
        assert (dense["gate"], dense["predictor"]) == (0, 0)
        assert dense["slots"] == predicted["slots"]


def test_everything_resident_is_every_weight() -> None:
    """Gate on the device and up and down in slots, or all rows in slots: the same bytes."""
    for gating in ("exact", "oracle"):
        total = TINY.device_bytes(gating, TINY.n_neurons, 0, predictor="none")
        layer = TINY.attention_bytes + TINY.n_neurons * TINY.neuron_bytes
        assert total == TINY.n_layers * layer + TINY.embedding_bytes


def test_shape_refused() -> None:
    with pytest.raises(KairoxError, match="a shifted one is 'fatrelu'"):
        replace(TINY, activation_threshold=0.01)
    with pytest.raises(KairoxError, match="predictor_rank is 0"):
        replace(TINY, predictor_rank=0)
    with pytest.raises(KairoxError, match="no published predictor"):
        TINY.predictor_bytes  # noqa: B018
    with pytest.raises(KairoxError, match="'exactly'; allowed: oracle, exact"):
        TINY.bundle_bytes("exactly")
    with pytest.raises(KairoxError, match="allowed: rank, lookahead, none"):
        TINY.device_parts("exact", 0, 0, predictor="oracle")
    with pytest.raises(KairoxError, match="allowed are 0 to 896"):
        TINY.device_parts("exact", 897, 0, predictor="none")
    with pytest.raises(KairoxError, match="'gpt'; allowed: tiny-reglu"):
        find_shape("gpt")
    with pytest.raises(KairoxError, match="3 of 2 experts in 896"):
        replace(TINY, n_experts=2, experts_per_token=3)
    with pytest.raises(KairoxError, match="1 of 3 experts in 896"):
        replace(TINY, n_experts=3)
    with pytest.raises(KairoxError, match=r"a share of 11, must be in \(0, 1\]"):
        replace(TINY, active_share=11)
    with pytest.raises(KairoxError, match="0 bytes per weight"):
        replace(TINY, bytes_per_weight=0)
    with pytest.raises(KairoxError, match="drelu fires above 0"):
        replace(TINY, activation="drelu", activation_threshold=0.5)
    assert replace(TINY, activation="silu", relu_sparse=False).activation == "silu"


def test_mean_slots() -> None:
    assert mean_slots(7) == 7.0
    assert mean_slots(np.array([1, 2, 6])) == mean_slots((1, 2, 6)) == 3.0
    assert mean_slots(np.int64(5)) == 5.0
    with pytest.raises(KairoxError, match="empty"):
        mean_slots([])

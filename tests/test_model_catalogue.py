"""The catalogue against published sizes and real matrices; quantised weights; who is sparse."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.errors import KairoxError
from kairox_sim.model import (
    CATALOGUE,
    GATINGS,
    QUANT_BLOCK,
    RELU_LIKE,
    WEIGHT_BYTES,
    ModelShape,
    find_shape,
    quantised,
    require_sparse,
)

# Billions of parameters: Hugging Face's counts of the named checkpoints, or the papers' tables
# (OPT, arXiv 2205.01068; LLaMA 2, arXiv 2307.09288; Nemotron-4, arXiv 2402.16819 and 2406.11704).
PUBLISHED = {
    "opt-125m": 0.1252, "opt-1.3b": 1.316, "opt-6.7b": 6.658, "opt-13b": 12.85, "opt-30b": 29.97,
    "opt-66b": 65.7, "llama2-7b": 6.738, "prosparse-7b": 6.738, "relu-llama-7b": 6.738,
    "llama2-13b": 13.02, "prosparse-13b": 13.02, "relu-llama-13b": 13.02, "relu-llama-70b": 68.98,
    "llama-3-70b": 70.55, "mixtral-8x7b": 46.7, "turbosparse-mixtral-47b": 46.7,
    "falcon-40b-relu": 41.3, "bamboo-7b": 7.24, "turbosparse-mistral-7b": 7.24,
    "sparseqwen2-7b": 7.62, "minitron-4b": 4.19, "minitron-8b": 8.27, "nemotron-4-15b": 15.6,
    "nemotron-4-340b": 341.0,
}  # fmt: skip


def parameters(shape: ModelShape) -> float:
    n_bytes = shape.n_layers * (shape.attention_bytes + shape.n_neurons * shape.neuron_bytes)
    n_bytes += shape.head_bytes + (0 if shape.tied_embedding else shape.embedding_bytes)
    return n_bytes / shape.bytes_per_weight


def test_every_model_but_ours_has_a_published_size() -> None:
    assert CATALOGUE.keys() - PUBLISHED.keys() == {"tiny-reglu"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    assert parameters(find_shape(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def weights(*shapes: Sequence[int]) -> int:
    return sum(math.prod(shape) for shape in shapes)


# One layer's matrices, out x in, as the checkpoints store them.
LAYERS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    # grouped-query attention, gated, not square
    "sparseqwen2-7b": (
        [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584)],
        [(18944, 3584), (18944, 3584), (3584, 18944)],
    ),
    # one fused q, k, v matrix; the FFN beside the attention; not gated
    "falcon-40b-relu": ([((128 + 2 * 8) * 64, 8192), (8192, 8192)], [(32768, 8192), (8192, 32768)]),
    # queries wider than the hidden state
    "minitron-8b": (
        [(6144, 4096), (1024, 4096), (1024, 4096), (4096, 6144)], [(16384, 4096), (4096, 16384)],
    ),
    # eight experts
    "turbosparse-mixtral-47b": (
        [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)],
        8 * [(14336, 4096), (14336, 4096), (4096, 14336)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", WEIGHT_BYTES)
def test_bytes_are_those_of_the_matrices(name: str, kind: str) -> None:
    shape, (attention, ffn) = find_shape(f"{name}@{kind}"), LAYERS[name]
    assert shape.attention_bytes == weights(*attention) * WEIGHT_BYTES[kind]
    assert shape.n_neurons * shape.neuron_bytes == weights(*ffn) * WEIGHT_BYTES[kind]


def test_experts() -> None:
    sparse, dense = find_shape("turbosparse-mixtral-47b"), find_shape("bamboo-7b")
    assert sparse.n_neurons == 8 * dense.n_neurons
    assert sparse.dense_neurons == 2 * dense.n_neurons
    assert dense.dense_neurons == dense.n_neurons


@pytest.mark.parametrize("shape", CATALOGUE.values(), ids=lambda s: s.name)
def test_rows(shape: ModelShape) -> None:
    assert shape.relu_sparse == (shape.activation in RELU_LIKE)
    assert (shape.active_share is None) or shape.relu_sparse
    if shape.predicted_share is not None:  # a predictor errs on the side of firing
        assert shape.active_share is not None
        assert shape.predicted_share > shape.active_share
    if shape.predictor_rank is not None:
        share = shape.n_layers * shape.predictor_bytes / (2 * parameters(shape))
        assert (
            0.01 < share < 0.09
        )  # 6-7 %, up to 8.68 %, in PowerInfer; less in the Kairox artifact
    assert "rank" in shape.source or shape.predictor_rank is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-13b", 0.88), ("opt-66b", 3.23), ("falcon-40b-relu", 3.63), ("relu-llama-70b", 5.66),
     ("opt-30b", 0.46), ("sparseqwen2-7b", 0.4285)],
)  # fmt: skip
def test_derived_ranks_have_the_published_parameters(name: str, billions: float) -> None:
    shape = find_shape(name)
    assert shape.n_layers * shape.predictor_bytes / 2e9 == pytest.approx(billions, rel=2e-3)


def test_names_in_full() -> None:
    assert {"prosparse-13b", "opt-13b", "opt-66b", "bamboo-7b", "llama-3-70b"} <= CATALOGUE.keys()
    assert find_shape("prosparse-13b").neuron_bytes == 30_720


Q8, Q4 = find_shape("opt-30b@q8_0"), find_shape("opt-30b@q4_0")


def test_quantised_by_hand() -> None:
    """A block of 32 weights and a float16 scale: 34 bytes of int8, 18 of packed int4."""
    blocks = 28672 * 7168 // QUANT_BLOCK
    q8 = np.empty(blocks, np.dtype([("d", np.float16), ("qs", np.int8, 32)]))
    q4 = np.empty(blocks, np.dtype([("d", np.float16), ("qs", np.uint8, 16)]))
    assert Q8.gate_bytes == q8.nbytes
    assert Q4.gate_bytes == q4.nbytes
    assert Q8.row_bytes == 7168 // 32 * 34


def test_quantised_weights_leave_keys_values_and_predictor_alone() -> None:
    full = find_shape("opt-30b")
    for shape in (Q8, Q4):
        assert shape.kv_bytes_per_token == full.kv_bytes_per_token
        assert shape.predictor_bytes == full.predictor_bytes
        assert shape.hidden_bytes == full.hidden_bytes == 2 * 7168
        assert shape.screen_bytes == full.screen_bytes
        for flops in ("gate_flops", "head_flops", "predictor_flops"):
            assert getattr(shape, flops) == getattr(full, flops)
        assert shape.attention_flops(3, 100) == full.attention_flops(3, 100)
        assert "bytes each (ggml)" in shape.source


def test_quantised_names() -> None:
    assert (Q8.name, Q4.name) == ("opt-30b@q8_0", "opt-30b@q4_0")
    full = find_shape("opt-30b")
    assert quantised(Q8, "q4_0").bytes_per_weight == Q4.bytes_per_weight
    assert find_shape("tiny-reglu@float16").kv_bytes_per_token * 2 == (
        find_shape("tiny-reglu").kv_bytes_per_token
    )
    assert find_shape("opt-30b@float16").neuron_bytes == full.neuron_bytes
    with pytest.raises(KairoxError, match="weights 'q5_0'; allowed: float16, q8_0, q4_0"):
        find_shape("opt-30b@q5_0")
    with pytest.raises(KairoxError, match="unknown model 'opt-31b@q8_0'"):
        find_shape("opt-31b@q8_0")
    with pytest.raises(KairoxError, match="not whole blocks of 32"):
        quantised(replace(full, d_model=100), "q8_0")


@given(
    name=st.sampled_from(sorted(CATALOGUE)), kind=st.sampled_from(sorted(WEIGHT_BYTES)),
    gating=st.sampled_from(GATINGS), slots=st.floats(0, 1), context=st.integers(0, 4096),
)  # fmt: skip
def test_bytes_are_whole(name: str, kind: str, gating: str, slots: float, context: int) -> None:
    shape = find_shape(f"{name}@{kind}")
    predictor = "none" if shape.predictor_rank is None else "rank"
    parts = shape.device_parts(gating, slots * shape.n_neurons, context, predictor=predictor)
    assert all(type(n_bytes) is int for n_bytes in parts.values())
    assert type(shape.hidden_bytes) is type(shape.neuron_bytes) is int
    assert 0 < shape.row_bytes <= find_shape(f"{name}@float16").row_bytes


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "llama2-7b", "llama2-13b"])
@pytest.mark.parametrize("gating", GATINGS)
def test_what_is_not_relu_sparse_says_so(name: str, gating: str) -> None:
    shape = find_shape(name)
    if gating == "dense":
        require_sparse(shape, gating)
        return
    with pytest.raises(KairoxError, match=f"{name}.*not ReLU-sparse.*not zero.*gating 'dense'"):
        require_sparse(shape, gating)


def test_what_is_relu_sparse_may_run_sparse() -> None:
    for gating in GATINGS:
        require_sparse(find_shape("bamboo-7b"), gating)
    with pytest.raises(KairoxError, match="unknown gating 'sparse'"):
        require_sparse(find_shape("bamboo-7b"), "sparse")

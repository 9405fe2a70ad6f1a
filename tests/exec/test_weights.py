"""Neuron bundles: which rows move, which stay, and that their bytes are those the model charges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kairox_exec.families import FAMILIES, decoder_layers, family_of
from kairox_exec.kernels import torch_ref
from kairox_exec.loading import load_dense
from kairox_exec.weights import bundle_layer, bundle_model, row_names
from kairox_sim.errors import KairoxError
from kairox_sim.model import find_shape

LLAMA, OPT = (next(f for f in FAMILIES if f.name == name) for name in ("llama", "opt"))


@pytest.mark.parametrize(
    ("family", "gating", "expected"),
    [
        (LLAMA, "exact", ("up", "down")),
        (LLAMA, "oracle", ("gate", "up", "down")),
        (LLAMA, "predicted", ("gate", "up", "down")),
        (OPT, "exact", ("fc2",)),
        (OPT, "oracle", ("fc1", "fc2")),
        (OPT, "predicted", ("fc1", "fc2")),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_rows_that_move(family, gating, expected) -> None:  # type: ignore[no-untyped-def]
    assert row_names(family, gating) == expected


@pytest.mark.parametrize("gating", ["exact", "oracle", "predicted"])
def test_tiny_reglu_bundle_is_as_many_bytes_as_its_shape_says(
    tiny_reglu_dir: Path, gating: str
) -> None:
    model, config = load_dense(tiny_reglu_dir)
    shape = find_shape("tiny-reglu")
    bundles = bundle_model(model, family_of(config), gating=gating, threshold=0.0)
    assert len(bundles) == shape.n_layers
    for layer, b in enumerate(bundles):
        assert b.layer == layer
        assert (b.n_neurons, b.d_model) == (shape.n_neurons, shape.d_model)
        assert b.bundle_bytes == shape.bundle_bytes(gating)
        assert b.rows.is_contiguous()
        assert b.rows.numel() * 4 == b.bundle_bytes * b.n_neurons
        assert b.stationary_bytes == (shape.gate_bytes if gating == "exact" else 0)
    if gating == "exact":
        assert bundles[0].bundle_bytes == 2 * 192 * 4


def test_llama_rows_are_gate_and_up_rows_and_down_columns(tiny_reglu_dir: Path) -> None:
    model, config = load_dense(tiny_reglu_dir)
    mlp = decoder_layers(model, family_of(config))[4].get_submodule("mlp")
    b = bundle_model(model, family_of(config), gating="oracle", threshold=0.1)[4]
    for neuron in (0, 123, 895):
        assert torch.equal(b.rows[neuron, 0], mlp.gate_proj.weight[neuron])
        assert torch.equal(b.rows[neuron, 1], mlp.up_proj.weight[neuron])
        assert torch.equal(b.rows[neuron, 2], mlp.down_proj.weight[:, neuron])
    assert (b.gate_b, b.up_b, b.down_b) == (None, None, None)
    assert (b.spec.gated, b.spec.threshold) == (True, 0.1)


def test_opt_keeps_its_biases_apart_from_the_rows(tiny_opt_dir: Path) -> None:
    model, config = load_dense(tiny_opt_dir)
    layer = decoder_layers(model, family_of(config))[1]
    b = bundle_model(model, family_of(config), gating="exact", threshold=0.0)[1]
    assert b.rows.shape == (96, 1, 32)
    assert torch.equal(b.rows[:, 0], layer.get_submodule("fc2").weight.T)
    assert torch.equal(b.gate_w, layer.get_submodule("fc1").weight)
    assert b.gate_b is not None
    assert b.down_b is not None
    assert torch.equal(b.gate_b, layer.get_submodule("fc1").bias)
    assert torch.equal(b.down_b, layer.get_submodule("fc2").bias)
    assert b.stationary_bytes == 4 * (96 * 32 + 96 + 32)


def test_gated_ffn_with_biases_from_its_bundles() -> None:
    """Llama's mlp_bias: gate and up biases per neuron, the down bias once."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=70,
        num_attention_heads=2,
        hidden_act="relu",
        mlp_bias=True,
    )
    generator = torch.Generator().manual_seed(5)
    layer = nn.Module()
    layer.mlp = LlamaMLP(config).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    x = torch.randn((3, 24), generator=generator)
    b = bundle_layer(layer, LLAMA, layer=0, gating="exact", threshold=0.0)
    act = torch_ref.gate_all(x, b.gate_w, b.gate_b, b.spec)
    everyone = torch.arange(b.n_neurons)
    y = torch_ref.ffn_union(x, b.rows, everyone, b.spec, act=act, up_b=b.up_b) + b.down_b
    torch.testing.assert_close(y, layer.mlp(x), rtol=0, atol=1e-5)
    assert b.stationary_bytes == 4 * (70 * 24 + 70 + 70 + 24)


def test_bundles_are_memory_of_their_own(tiny_opt_dir: Path) -> None:
    """The model's weights may be freed or overwritten; a missed copy then shows."""
    model, config = load_dense(tiny_opt_dir)
    family = family_of(config)
    for gating in ("exact", "oracle"):
        b = bundle_model(model, family, gating=gating, threshold=0.0)[0]
        before = [b.rows.clone(), b.gate_w.clone(), b.gate_b.clone(), b.down_b.clone()]
        for parameter in decoder_layers(model, family)[0].parameters():
            parameter.fill_(float("nan"))
        after = [b.rows, b.gate_w, b.gate_b, b.down_b]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        model, config = load_dense(tiny_opt_dir)


def test_gate_on_the_host_costs_no_second_copy(tiny_reglu_dir: Path) -> None:
    model, config = load_dense(tiny_reglu_dir)
    family = family_of(config)
    oracle = bundle_model(model, family, gating="oracle", threshold=0.0)[0]
    exact = bundle_model(model, family, gating="exact", threshold=0.0)[0]
    assert oracle.gate_w.data_ptr() == oracle.rows.data_ptr()
    assert exact.gate_w.is_contiguous()
    assert torch.equal(oracle.gate_w, exact.gate_w)


def test_unknown_gating_is_refused() -> None:
    with pytest.raises(KairoxError, match=r"'dense'.*oracle, exact, screened, predicted"):
        row_names(LLAMA, "dense")


def test_modules_that_are_not_plain_linears_are_refused(tiny_opt_dir: Path) -> None:
    model, config = load_dense(tiny_opt_dir)
    family = family_of(config)
    layer = decoder_layers(model, family)[0]
    layer.set_submodule("fc2", nn.Linear(96, 31))
    with pytest.raises(KairoxError, match=r"fc2 is \(31, 96\)"):
        bundle_layer(layer, family, layer=0, gating="exact", threshold=0.0)
    layer.set_submodule("fc2", nn.Identity())
    with pytest.raises(KairoxError, match="fc2 is a Identity"):
        bundle_layer(layer, family, layer=0, gating="exact", threshold=0.0)

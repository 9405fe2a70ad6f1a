"""Families: the table, loading, thresholds, replacing an FFN; what is not ReLU-like is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kairox_exec.activations import FatRelu
from kairox_exec.families import (
    FAMILIES,
    activation_of,
    decoder_layers,
    family_of,
    fires,
    replace_ffn,
    threshold_of,
)
from kairox_exec.kernels import torch_ref
from kairox_exec.loading import load_dense, model_sha256
from kairox_exec.weights import NeuronBundles, bundle_model
from kairox_sim.errors import KairoxError

LLAMA = {"model_type": "llama", "hidden_act": "relu"}
OPT = {"model_type": "opt", "activation_function": "relu"}

Edit = Callable[..., Path]


@pytest.fixture
def edited(tiny_reglu_dir: Path, tmp_path: Path) -> Edit:
    """A copy of tiny-reglu with some keys of config.json changed."""

    def edit(**changes: Any) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(tiny_reglu_dir, directory, dirs_exist_ok=True)
        config = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return edit


class AllRows(nn.Module):
    """A layer's FFN from its bundles alone, every neuron evaluated."""

    def __init__(self, bundles: NeuronBundles) -> None:
        super().__init__()
        self.bundles = bundles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = self.bundles
        flat = x.reshape(-1, x.shape[-1])
        act = torch_ref.gate_all(flat, b.gate_w, b.gate_b, b.spec)
        y = torch_ref.ffn_union(
            flat, b.rows, torch.arange(b.n_neurons), b.spec, act=act, up_b=b.up_b
        )
        return (y if b.down_b is None else y + b.down_b).reshape(x.shape)


def logits(model: nn.Module, n_vocab: int) -> torch.Tensor:
    ids = torch.randint(0, n_vocab, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        out: torch.Tensor = model(ids).logits[0]
    return out


@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("gating", ["exact", "oracle"])
@pytest.mark.parametrize("which", ["tiny_reglu_dir", "tiny_opt_dir"])
def test_replaced_ffns_give_the_dense_logits(
    which: str, gating: str, threshold: float, request: pytest.FixtureRequest
) -> None:
    model, config = load_dense(request.getfixturevalue(which), fatrelu_threshold=threshold)
    family = family_of(config)
    dense = logits(model, config.vocab_size)
    bundles = bundle_model(model, family, gating=gating, threshold=threshold_of(config))
    for layer, b in zip(decoder_layers(model, family), bundles, strict=True):
        replace_ffn(layer, family, AllRows(b))
    torch.testing.assert_close(logits(model, config.vocab_size), dense, rtol=0, atol=2e-5)


def test_mistral_is_read_like_llama(edited: Edit, tiny_reglu_dir: Path) -> None:
    """The same weights under Mistral's class (no sliding window) give the same logits."""
    mistral, config = load_dense(edited(model_type="mistral", sliding_window=None))
    assert type(mistral).__name__ == "MistralForCausalLM"
    llama, _ = load_dense(tiny_reglu_dir)
    torch.testing.assert_close(
        logits(mistral, config.vocab_size), logits(llama, config.vocab_size), rtol=0, atol=2e-5
    )


def test_load_dense_is_float32_and_eval(tiny_reglu_dir: Path) -> None:
    model, config = load_dense(tiny_reglu_dir)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert (config.model_type, config.hidden_act, config.fatrelu_threshold) == ("llama", "relu", 0)


def test_fatrelu_override_changes_the_dense_model(tiny_reglu_dir: Path) -> None:
    relu, config = load_dense(tiny_reglu_dir)
    fatrelu, _ = load_dense(tiny_reglu_dir, fatrelu_threshold=0.2)
    difference = (logits(relu, config.vocab_size) - logits(fatrelu, config.vocab_size)).abs().max()
    assert 1e-3 < difference < 5.0


def test_prosparse_keys_are_read(edited: Edit) -> None:
    """Its own model_type, the class named in auto_map (never run), hidden_act and its parameter."""
    directory = edited(
        model_type="sparsellama",
        auto_map={"AutoConfig": "configuration_sparsellama.SparseLlamaConfig"},
        hidden_act="fatrelu",
        hidden_act_param=0.01,
    )
    model, config = load_dense(directory)
    assert threshold_of(config) == 0.01
    activations = [
        layer.get_submodule("mlp.act_fn") for layer in decoder_layers(model, FAMILIES[0])
    ]
    assert [a.threshold for a in activations if isinstance(a, FatRelu)] == [0.01] * 6


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"model_type": "mistral"}, OPT])
def test_family_of_known(config: dict[str, Any]) -> None:
    assert family_of(config).gated == (config["model_type"] != "opt")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"hidden_act": "silu"}, ["'silu'", "relu, fatrelu"]),
        (OPT | {"activation_function": "gelu"}, ["'gelu'", "activation_function"]),
        ({"model_type": "llama"}, ["hidden_act", "None", "relu, fatrelu"]),
        ({"model_type": "gpt2"}, ["'gpt2'", "llama", "mistral", "opt"]),
        ({}, ["model_type None", "llama"]),
        (OPT | {"do_layer_norm_before": False}, ["do_layer_norm_before"]),
    ],
)
def test_family_of_refuses(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(KairoxError) as caught:
        family_of(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "override", "expected"),
    [
        (LLAMA, None, 0.0),
        (LLAMA, 0.2, 0.2),
        (LLAMA | {"fatrelu_threshold": 0.1}, None, 0.1),
        (LLAMA | {"fatrelu_threshold": 0.1}, 0.0, 0.0),
        (LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, None, 0.01),
        (LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, 0.3, 0.3),
        (LLAMA | {"hidden_act": "fatrelu"}, 0.3, 0.3),
        # Left over in the file of a ReLU model: not a FATReLU threshold.
        (LLAMA | {"hidden_act_param": 0.03}, None, 0.0),
    ],
)
def test_threshold_of(config: dict[str, Any], override: float | None, expected: float) -> None:
    assert threshold_of(config, override) == expected


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), True, "0.1"])
def test_threshold_refused(bad: Any) -> None:
    with pytest.raises(KairoxError, match="threshold is"):
        threshold_of(LLAMA, bad)


def test_fatrelu_without_its_threshold_is_refused() -> None:
    with pytest.raises(KairoxError, match="hidden_act_param"):
        threshold_of(LLAMA | {"hidden_act": "fatrelu"})


def test_fires_is_strict_and_agrees_with_fatrelu() -> None:
    gate = torch.tensor([-1.0, 0.0, 0.2, 0.2001, float("nan")])
    assert fires(gate, 0.0).tolist() == [False, False, True, True, False]
    threshold = float(gate[2])
    assert fires(gate, threshold).tolist() == [False, False, False, True, False]
    assert torch.equal(FatRelu(threshold)(gate[:4]) > 0, fires(gate[:4], threshold))
    assert (activation_of(0.0), activation_of(0.2)) == ("relu", "fatrelu")


def test_silu_model_directory_is_refused(edited: Edit) -> None:
    with pytest.raises(KairoxError, match="'silu'"):
        load_dense(edited(hidden_act="silu"))


def test_weights_that_do_not_fit_the_config_are_refused(edited: Edit) -> None:
    with pytest.raises(KairoxError, match="lack 9 tensors"):
        load_dense(edited(num_hidden_layers=7))
    with pytest.raises(KairoxError, match="cannot load"):
        load_dense(edited(intermediate_size=900))
    with pytest.raises(KairoxError, match=r"config\.json: .*num_hidden_layers"):
        load_dense(edited(num_hidden_layers="six"))
    with pytest.raises(KairoxError, match=r"config\.json: .*multiple"):
        load_dense(edited(hidden_size=191))


def test_damaged_or_absent_files_are_refused(edited: Edit, tmp_path: Path) -> None:
    directory = edited()
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(KairoxError, match="cannot load the weights"):
        load_dense(directory)
    weights.unlink()
    with pytest.raises(KairoxError, match=r"no \*\.safetensors"):
        load_dense(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(KairoxError, match="not JSON"):
        load_dense(directory)
    with pytest.raises(KairoxError, match="does not exist"):
        load_dense(tmp_path / "nowhere")


def test_model_sha256_is_of_the_weight_bytes(tiny_reglu_dir: Path, edited: Edit) -> None:
    content = (tiny_reglu_dir / "model.safetensors").read_bytes()
    assert model_sha256(tiny_reglu_dir) == hashlib.sha256(content).hexdigest()
    directory = edited()
    (directory / "model-2.safetensors").write_bytes(b"more")
    assert model_sha256(directory) == hashlib.sha256(b"more" + content).hexdigest()

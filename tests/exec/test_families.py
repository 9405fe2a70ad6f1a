"""Families: the table, loading, thresholds, replacing an FFN; what is not ReLU-like is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from kairox_exec.activations import FatRelu
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import (
    FAMILIES,
    Family,
    Rule,
    activation_of,
    decoder_layers,
    family_of,
    fires,
    hook_layer,
    replace_ffn,
    rule_of,
    threshold_of,
)
from kairox_exec.kernels import torch_ref
from kairox_exec.loading import load_dense, model_sha256, read_config
from kairox_exec.runner import load
from kairox_exec.weights import NeuronBundles, bundle_model
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES
from tests.exec.tiny_families import D_MODEL, N_LAYERS, N_NEURONS, TINY, VOCAB, save_tiny

LLAMA = {"model_type": "llama", "hidden_act": "relu"}
SWIGLU = {"model_type": "llama", "hidden_act": "silu"}
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


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(name, tmp_path_factory.mktemp(name)) for name in TINY}


def test_every_family_is_among_the_tiny_models(tiny_dirs: dict[str, Path]) -> None:
    for name, tiny in TINY.items():
        config = read_config(tiny_dirs[name])
        assert family_of(config, thresholds=tiny.thresholds).name == tiny.family
        rule = rule_of(config, thresholds=tiny.thresholds)
        assert rule.activation == tiny.activation
        assert rule.approximate == (tiny.thresholds is not None)
        assert len(rule.thresholds) == N_LAYERS
    assert {tiny.family for tiny in TINY.values()} == {family.name for family in FAMILIES}


def by_hand(layer: Any, family: Family, rule: Rule, threshold: float, x: torch.Tensor) -> Any:
    """A layer's FFN output from its weights, in the words of `ffn_spec`."""
    gate = layer.get_submodule(family.gate)
    down = layer.get_submodule(family.down)
    g = functional.linear(x, gate.weight, gate.bias)
    if rule.activation == "silu":
        a = g / (1 + torch.exp(-g))
        a = a * (a.abs() > threshold)
    else:
        a = g * (g > threshold)
    a = a * a if rule.activation == "relu2" else a
    if family.up is not None:
        up = layer.get_submodule(family.up)
        u = functional.linear(x, up.weight, up.bias)
        a = a * (u.clamp(min=0) if rule.activation == "drelu" else u)
    return functional.linear(a, down.weight, down.bias)


@pytest.mark.parametrize("name", TINY)
def test_the_dense_model_computes_the_rule(name: str, tiny_dirs: dict[str, Path]) -> None:
    """By what goes into every FFN and comes out of it, against the formula."""
    model, config = load_dense(tiny_dirs[name], thresholds=TINY[name].thresholds)
    family, rule = family_of(config), rule_of(config)
    assert rule == rule_of(read_config(tiny_dirs[name]), thresholds=TINY[name].thresholds)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    entered: list[torch.Tensor] = []
    for layer in decoder_layers(model, family):
        first, last = (layer.get_submodule(path) for path in (family.gate, family.down))
        first.register_forward_pre_hook(lambda _m, args: entered.append(args[0]))
        last.register_forward_hook(lambda _m, _a, out: seen.append((entered[-1], out.clone())))
    logits(model, VOCAB)
    assert len(seen) == N_LAYERS
    for layer, threshold, (x, y) in zip(
        decoder_layers(model, family), rule.thresholds, seen, strict=True
    ):
        with torch.inference_mode():
            expected = by_hand(layer, family, rule, threshold, x)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_fires_says_what_the_kernels_say(name: str, tiny_dirs: dict[str, Path]) -> None:
    model, config = load_dense(tiny_dirs[name], thresholds=TINY[name].thresholds)
    family, rule = family_of(config), rule_of(config)
    bundles = bundle_model(
        model, family, gating="oracle", threshold=rule.thresholds, activation=rule.activation
    )
    x = torch.randn(16, D_MODEL, generator=torch.Generator().manual_seed(1))
    for layer, b in zip(decoder_layers(model, family), bundles, strict=True):
        gate: Any = layer.get_submodule(family.gate)
        # With the hook that dReLU's dense model has on it: the sign is what counts.
        up = None if family.up is None else layer.get_submodule(family.up)(x)
        fired = torch.empty((16, N_NEURONS), dtype=torch.bool)
        torch_ref.ffn_union(
            x, b.rows, torch.arange(N_NEURONS), b.spec, gate_b=b.gate_b, up_b=b.up_b, fired=fired
        )
        assert torch.equal(fires(gate(x), b.spec.threshold, rule.activation, up), fired)
        assert 0.02 < fired.float().mean() < 0.98  # neither nothing nor everything


@pytest.mark.parametrize("slots", [0, 20, N_NEURONS])
@pytest.mark.parametrize("gating", ["exact", "oracle"])
@pytest.mark.parametrize("name", TINY)
def test_hybrid_ffns_give_the_dense_logits(
    name: str, gating: str, slots: int, tiny_dirs: dict[str, Path]
) -> None:
    """Every family at budget none, some and all, through the runner: prefill, then decode."""
    thresholds = TINY[name].thresholds
    tokens = np.random.default_rng(2).integers(0, VOCAB, 24).astype(np.int32)
    model, _ = load_dense(tiny_dirs[name], thresholds=thresholds)
    with torch.inference_mode():
        dense = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    assert dense.std() > 0.3

    def cache(n_layers: int, n_neurons: int) -> NeuronCache:
        policy = POLICIES["lru"](n_layers, n_neurons)
        return NeuronCache(n_layers, n_neurons, slots, policy, Fixed(), trigger="attn_out")

    with (
        EmulatedDevice() as device,
        load(
            tiny_dirs[name], cache, device, gating=gating, trigger="attn_out",
            thresholds=thresholds,
        ) as runner,
    ):  # fmt: skip
        fed = 0
        for _, record in runner.run([tokens], prefill=12, prefill_chunk=6):
            fed += record.n_tokens
            torch.testing.assert_close(runner.logits, dense[fed - 1], rtol=0, atol=2e-5)
        assert fed == tokens.size
        assert (runner.cache.totals["loads"] > 0) == (slots > 0)


@pytest.mark.parametrize("name", TINY)
def test_hooks_see_the_states_of_the_model(name: str, tiny_dirs: dict[str, Path]) -> None:
    model, config = load_dense(tiny_dirs[name], thresholds=TINY[name].thresholds)
    family = family_of(config)
    entering: list[torch.Tensor] = []
    attended: list[torch.Tensor] = []
    order: list[str] = []
    attention: list[torch.Tensor] = []
    handles = []
    for layer in decoder_layers(model, family):
        handles += hook_layer(
            layer,
            family,
            entering=lambda h: (order.append("in"), entering.append(h.clone())),
            after_attention=lambda h: (order.append("attention"), attended.append(h.clone())),
        )
        layer.get_submodule(family.gate).register_forward_hook(lambda *_: order.append("ffn"))
        layer.get_submodule(family.attention).register_forward_hook(
            lambda _m, _a, out: attention.append(out[0].clone())
        )
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
        assert order == ["in", "attention", "ffn"] * N_LAYERS
        for i in range(N_LAYERS):
            assert torch.equal(entering[i], states[i])
            residual = attended[i].reshape(states[i].shape)  # OPT's has no batch dimension
            torch.testing.assert_close(residual, states[i] + attention[i], rtol=0, atol=1e-6)
        for handle in handles:
            handle.remove()
        model(ids)
    assert len(entering) == len(attended) == N_LAYERS


@pytest.mark.parametrize("name", ["llama", "falcon-parallel"])
def test_one_hook_without_the_other(name: str, tiny_dirs: dict[str, Path]) -> None:
    told: list[str] = []
    model, config = load_dense(tiny_dirs[name])
    family = family_of(config)
    for layer in decoder_layers(model, family):
        assert hook_layer(layer, family) == []
        hook_layer(layer, family, entering=lambda _: told.append("in"))
    logits(model, VOCAB)
    model, _ = load_dense(tiny_dirs[name])
    for layer in decoder_layers(model, family):
        hook_layer(layer, family, after_attention=lambda _: told.append("attention"))
    logits(model, VOCAB)
    assert told == ["in"] * N_LAYERS + ["attention"] * N_LAYERS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel_attn": False, "new_decoder_architecture": True}, ["parallel_attn False"]),
        ({"num_ln_in_parallel_attn": 2}, ["num_ln_in_parallel_attn 2"]),
        ({"num_ln_in_parallel_attn": 3, "new_decoder_architecture": True}, ["1 or 2 norms"]),
    ],
)
def test_falcons_that_do_not_exist_are_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(KairoxError) as caught:
        family_of({"model_type": "falcon", "activation": "relu"} | change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (LLAMA, {"thresholds": (0.1,)}, ["exactly zero already", "'relu'"]),
        (SWIGLU, {}, ["'silu'", "kairox sparsify"]),
        (SWIGLU, {"thresholds": (0.1, 0.2)}, ["2 thresholds for 1 layers"]),
        (SWIGLU, {"thresholds": (float("nan"),)}, ["finite", "nan"]),
        (SWIGLU, {"thresholds": (-0.1,)}, ["finite and >= 0"]),
        (SWIGLU, {"thresholds": (0.1,), "fatrelu_threshold": 0.1}, ["FATReLU", "silu"]),
        (LLAMA | {"hidden_act": "drelu"}, {"fatrelu_threshold": 0.1}, ["'drelu'", "0.1"]),
        (LLAMA | {"num_hidden_layers": None}, {}, ["num_hidden_layers is None"]),
    ],
)
def test_rules_that_do_not_belong_to_the_model_are_refused(
    config: dict[str, Any], given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(KairoxError) as caught:
        rule_of({"num_hidden_layers": 1} | config, **given)
    for word in words:
        assert word in str(caught.value)


def test_fires_of_drelu_needs_the_up_projection() -> None:
    gate, up = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([1.0, -1.0, 1.0])
    assert fires(gate, 0.0, "drelu", up).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="up was not given"):
        fires(gate, 0.0, "drelu")


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
    with pytest.raises(KairoxError, match=r"gate_proj.weight is \(896, 192\) and .*\(900, 192\)"):
        load_dense(edited(intermediate_size=900))
    with pytest.raises(KairoxError, match=r"config\.json: .*num_hidden_layers"):
        load_dense(edited(num_hidden_layers="six"))
    with pytest.raises(KairoxError, match=r"config\.json: .*multiple"):
        load_dense(edited(hidden_size=191))


def test_damaged_or_absent_files_are_refused(edited: Edit, tmp_path: Path) -> None:
    directory = edited()
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(KairoxError, match=r"model\.safetensors has 100000 bytes.*truncated"):
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

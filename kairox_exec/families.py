"""Model families: where a decoder layer keeps its FFN, and when a neuron fires. One row per family.

A neuron `i` fires for a token when its gate `g_i = gate_i . x + b_i` exceeds the threshold (0 for
ReLU, the model's own for FATReLU); its activation is then `g_i`, else exactly 0. Gated families
(ReGLU) multiply it by the up projection, OPT does not. Activations that are never exactly zero
(SiLU, GELU) are refused: skipping their neurons would change the output.

Sources: LLaMA (arXiv:2302.13971), OPT (arXiv:2205.01068), ProSparse's FATReLU (arXiv:2402.13516).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kairox_sim.errors import KairoxError


@dataclass(frozen=True, slots=True)
class Family:
    """Dotted paths are relative to the model (`layers`) or to one decoder layer (all others)."""

    name: str
    # `model_type` values of config.json. The first is the transformers class that loads those
    # transformers itself does not know.
    model_types: tuple[str, ...]
    gated: bool
    activation_key: str  # the config key that names the activation
    activations: tuple[str, ...]  # allowed values of that key
    layers: str
    attn_norm: str
    ffn_norm: str  # its output is the FFN's input x
    gate: str  # fc1 where not gated
    up: str | None
    down: str  # fc2 where not gated
    act: str
    replaced: str  # the module a hybrid FFN takes the place of
    bypassed: tuple[str, ...]  # modules after it that become the identity


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        # sparsellama: ProSparse's checkpoints, Llama weights under a class of their own.
        model_types=("llama", "mistral", "sparsellama"),
        gated=True,
        activation_key="hidden_act",
        activations=("relu", "fatrelu"),
        layers="model.layers",
        attn_norm="input_layernorm",
        ffn_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        act="mlp.act_fn",
        replaced="mlp",
        bypassed=(),
    ),
    Family(
        name="opt",
        model_types=("opt",),
        gated=False,
        activation_key="activation_function",
        activations=("relu", "fatrelu"),
        layers="model.decoder.layers",
        attn_norm="self_attn_layer_norm",
        ffn_norm="final_layer_norm",
        gate="fc1",
        up=None,
        down="fc2",
        act="activation_fn",
        replaced="fc1",
        bypassed=("activation_fn", "fc2"),
    ),
)


class FatRelu(nn.Module):
    """x where x > threshold, else 0 (ProSparse, section 3.3). Threshold 0 is ReLU."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > self.threshold, x, torch.zeros_like(x))


def fires(gate: torch.Tensor, threshold: float) -> torch.Tensor:
    """bool, same shape: which gate values make their neuron active."""
    return gate > threshold


def family_of(config: Any) -> Family:
    """The row of a model, from its configuration (a transformers config or a config.json dict)."""
    model_type = _get(config, "model_type")
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        known = ", ".join(t for f in FAMILIES for t in f.model_types)
        raise KairoxError(
            f"model_type {model_type!r} is not known (known: {known}). "
            "Add a row to kairox_exec/families.py if its FFN has the same parts."
        )
    activation = _get(config, family.activation_key)
    if activation not in family.activations:
        raise KairoxError(
            f"{family.activation_key} {activation!r} of this {model_type} model is not allowed "
            f"(allowed: {', '.join(family.activations)}): its neurons are never exactly zero, so "
            "leaving some out would change the output. Use a ReLU-fied model, e.g. ProSparse."
        )
    if family.name == "opt" and not _get(config, "do_layer_norm_before", True):
        raise KairoxError(
            "OPT with do_layer_norm_before = false (opt-350m) is not supported: its FFN input is "
            "not the output of a norm before the FFN. Use another OPT size."
        )
    return family


def threshold_of(config: Any, override: float | None = None) -> float:
    """The gate value above which a neuron fires.

    `override`, else the config's `fatrelu_threshold`, else `hidden_act_param` where the activation
    is "fatrelu" (ProSparse's keys), else 0.
    """
    family = family_of(config)
    stated = _get(config, "fatrelu_threshold")
    if stated is None and _get(config, family.activation_key) == "fatrelu":
        stated = _get(config, "hidden_act_param")
        if stated is None and override is None:
            raise KairoxError(
                'the activation is "fatrelu" but config.json has neither fatrelu_threshold nor '
                "hidden_act_param. Give the threshold explicitly."
            )
    value = stated if override is None else override
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KairoxError(f"FATReLU threshold is {value!r}; it must be a number >= 0")
    if not math.isfinite(value) or value < 0:
        raise KairoxError(
            f"FATReLU threshold is {value}; it must be finite and >= 0 (0 is ReLU): below 0, "
            "neurons with a negative gate would fire."
        )
    return float(value)


def activation_of(threshold: float) -> str:
    """The activation's name in trace headers and model shapes."""
    return "fatrelu" if threshold > 0 else "relu"


def set_threshold(model: nn.Module, family: Family, threshold: float) -> None:
    """Make a dense model's activation FATReLU(threshold). 0 leaves it as it is."""
    if threshold == 0.0:
        return
    for layer in decoder_layers(model, family):
        layer.set_submodule(family.act, FatRelu(threshold))


def decoder_layers(model: nn.Module, family: Family) -> list[nn.Module]:
    """The decoder layers, first to last."""
    stack = model.get_submodule(family.layers)
    assert isinstance(stack, nn.ModuleList)
    return list(stack)


def replace_ffn(layer: nn.Module, family: Family, ffn: nn.Module) -> None:
    """Put `ffn` (FFN input x -> FFN output, biases included) in the place of a layer's FFN."""
    layer.set_submodule(family.replaced, ffn)
    for name in family.bypassed:
        layer.set_submodule(name, nn.Identity())


def _get(config: Any, key: str, default: Any = None) -> Any:
    return config.get(key, default) if isinstance(config, dict) else getattr(config, key, default)

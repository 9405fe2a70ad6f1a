"""Model families: where a decoder layer keeps its FFN, and when a neuron fires. One row per layout.

What neurons compute is in `ffn_spec`: ReLU and FATReLU of the gate, its square, ReLU of gate and up
(dReLU). Gated families multiply the activation by the up projection; OPT, Falcon and Nemotron have
none. Activations that are never exactly zero (SiLU, GELU) are refused: skipping their neurons would
change the output. SiLU runs with a threshold on |silu(gate)|, marked approximate (`sparsify`).

Sources: LLaMA (arXiv:2302.13971), OPT (arXiv:2205.01068), ProSparse's FATReLU (arXiv:2402.13516),
Bamboo's dReLU (github.com/SJTU-IPADS/Bamboo; arXiv:2406.05955), Falcon (arXiv:2311.16867, section
4.2.1: attention and FFN side by side), Nemotron-4 (arXiv:2402.16819), CATS (arXiv:2404.08763).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kairox_exec.ffn_spec import Activation
from kairox_sim.errors import KairoxError

Tell = Callable[[torch.Tensor], object]
"""Is told a hidden state [..., d_model]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Dotted paths are relative to the model (`layers`) or to one decoder layer (all others)."""

    name: str
    model_types: tuple[str, ...]  # `model_type` of config.json
    loads_as: str  # the model_type that loads those transformers itself does not know
    gated: bool
    activation_key: str  # the config key that names the activation
    # Allowed values of that key, and what neurons then compute; silu only with thresholds.
    activations: Mapping[str, Activation]
    layers: str
    attention: str
    attn_norm: str
    ffn_norm: str  # its output is the FFN's input x
    gate: str  # fc1 where not gated
    up: str | None
    down: str  # fc2 where not gated
    act: str
    replaced: str  # the module a hybrid FFN takes the place of
    bypassed: tuple[str, ...] = ()  # modules after it that become the identity
    # Attention and FFN side by side: both read the layer's input, and their outputs are added.
    parallel: bool = False


_GATED_ACTS: dict[str, Activation] = {
    "relu": "relu", "fatrelu": "relu", "relu2": "relu2", "drelu": "drelu", "silu": "silu",
}  # fmt: skip
_PLAIN_ACTS: dict[str, Activation] = {"relu": "relu", "fatrelu": "relu", "relu2": "relu2"}

_LLAMA = Family(
    name="llama",
    # sparsellama: ProSparse's checkpoints, Llama weights under a class of their own.
    model_types=("llama", "mistral", "qwen2", "sparsellama"),
    loads_as="llama",
    gated=True,
    activation_key="hidden_act",
    activations=_GATED_ACTS,
    layers="model.layers",
    attention="self_attn",
    attn_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    act="mlp.act_fn",
    replaced="mlp",
)
_FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    loads_as="falcon",
    gated=False,
    activation_key="activation",
    activations=_PLAIN_ACTS,
    layers="transformer.h",
    attention="self_attention",
    attn_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    gate="mlp.dense_h_to_4h",
    up=None,
    down="mlp.dense_4h_to_h",
    act="mlp.act",
    replaced="mlp",
)

FAMILIES: tuple[Family, ...] = (
    _LLAMA,
    # Mistral with ReLU of gate and up, which its config calls "relu".
    replace(
        _LLAMA,
        name="bamboo",
        model_types=("bamboo",),
        loads_as="mistral",
        activations={"relu": "drelu", "drelu": "drelu"},
    ),
    Family(
        name="opt",
        model_types=("opt",),
        loads_as="opt",
        gated=False,
        activation_key="activation_function",
        activations=_PLAIN_ACTS,
        layers="model.decoder.layers",
        attention="self_attn",
        attn_norm="self_attn_layer_norm",
        ffn_norm="final_layer_norm",
        gate="fc1",
        up=None,
        down="fc2",
        act="activation_fn",
        replaced="fc1",
        bypassed=("activation_fn", "fc2"),
    ),
    # Three layouts of one model_type: `family_of` tells them apart. 7B, 40B, and Falcon-RW.
    replace(_FALCON, name="falcon-parallel", ffn_norm="input_layernorm", parallel=True),
    replace(
        _FALCON, name="falcon-two-norms", attn_norm="ln_attn", ffn_norm="ln_mlp", parallel=True
    ),
    _FALCON,
    replace(
        _LLAMA,
        name="nemotron",
        model_types=("nemotron", "arcee"),
        loads_as="nemotron",
        gated=False,
        activations=_PLAIN_ACTS,
        gate="mlp.up_proj",
        up=None,
    ),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the neurons of every layer compute, and whether that is what the model computes."""

    activation: Activation
    thresholds: tuple[float, ...]  # one a layer: of `ffn_spec`, 0 where ReLU is meant
    approximate: bool  # neurons are left out that are not zero

    @property
    def name(self) -> str:
        """The activation's name in trace headers and model shapes."""
        return activation_of(max(self.thresholds, default=0.0), self.activation)


def fires(
    gate: torch.Tensor,
    threshold: float,
    activation: Activation = "relu",
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool, same shape: which gate values make their neuron active.

    gate: before the activation. up: the up projection's output; decides only under drelu, which
    needs it.
    """
    if activation == "silu":
        return nn.functional.silu(gate).abs() > threshold
    if activation != "drelu":
        return gate > threshold
    if up is None:
        raise ValueError("under drelu a neuron fires by its gate and up values; up was not given")
    return (gate > threshold) & (up > 0)


def family_of(config: Any, *, thresholds: Sequence[float] | None = None) -> Family:
    """The row of a model, from its configuration (a transformers config or a config.json dict).

    thresholds: given where a dense SwiGLU model is run by an activation threshold. The config that
    `load_dense` returns carries them.
    """
    model_type = _get(config, "model_type")
    rows = [f for f in FAMILIES if model_type in f.model_types]
    if not rows:
        known = ", ".join(dict.fromkeys(t for f in FAMILIES for t in f.model_types))
        raise KairoxError(
            f"model_type {model_type!r} is not known (known: {known}). "
            "Add a row to kairox_exec/families.py if its FFN has the same parts."
        )
    family = rows[0] if len(rows) == 1 else _falcon(config)
    activation = _get(config, family.activation_key)
    if activation == "silu" and "silu" in family.activations:
        if thresholds is None and _get(config, "silu_thresholds") is None:
            raise _not_zero(family, activation, model_type)
    elif activation not in family.activations:
        raise _not_zero(family, activation, model_type)
    if family.name == "opt" and not _get(config, "do_layer_norm_before", True):
        raise KairoxError(
            "OPT with do_layer_norm_before = false (opt-350m) is not supported: its FFN input is "
            "not the output of a norm before the FFN. Use another OPT size."
        )
    return family


def _not_zero(family: Family, activation: Any, model_type: Any) -> KairoxError:
    allowed = ", ".join(name for name in family.activations if name != "silu")
    message = (
        f"{family.activation_key} {activation!r} of this {model_type} model is not allowed "
        f"(allowed: {allowed}): its neurons are never exactly zero, so "
        "leaving some out would change the output. Use a ReLU-fied model, e.g. ProSparse"
    )
    if activation == "silu" and "silu" in family.activations:
        message += ", or, as an approximation, thresholds made with `kairox sparsify`"
    return KairoxError(message + ".")


def _falcon(config: Any) -> Family:
    """Falcon's layouts: one or two norms before parallel parts, or one after the other."""
    parallel = bool(_get(config, "parallel_attn", True))
    norms = _get(config, "num_ln_in_parallel_attn")
    if not _get(config, "new_decoder_architecture", False):
        name, sound = "falcon-parallel" if parallel else "falcon", norms in (None, 1)
    else:
        name = "falcon-two-norms" if norms in (None, 2) else "falcon-parallel"
        sound = parallel and norms in (None, 1, 2)
    if not sound:
        raise KairoxError(
            f"this Falcon config (parallel_attn {parallel}, num_ln_in_parallel_attn {norms}) names "
            "a layer that no Falcon has: a new_decoder_architecture is parallel with 1 or 2 norms, "
            "an old one has 1; correct config.json"
        )
    return next(f for f in FAMILIES if f.name == name)


def rule_of(
    config: Any,
    *,
    fatrelu_threshold: float | None = None,
    thresholds: Sequence[float] | None = None,
) -> Rule:
    """What the model's neurons compute, by its config or the config that `load_dense` returned.

    fatrelu_threshold: instead of the config's. thresholds: one a layer on |silu(gate)|, for a dense
    SwiGLU model only (`sparsify`). Raises KairoxError where they do not belong to the model.
    """
    family = family_of(config, thresholds=thresholds)
    activation = _activation(config, family)
    n_layers = _get(config, "num_hidden_layers")
    if not isinstance(n_layers, int) or n_layers < 1:
        raise KairoxError(f"config.json: num_hidden_layers is {n_layers!r}; it must be 1 or more")
    if activation != "silu":
        if thresholds is not None:
            raise KairoxError(
                f"this model's activation is {activation_of(0.0, activation)!r}, which is exactly "
                "zero already: it needs no thresholds on |silu(gate)|. Run it without"
            )
        return Rule(activation, (threshold_of(config, fatrelu_threshold),) * n_layers, False)
    if fatrelu_threshold is not None:
        raise KairoxError(
            "a FATReLU threshold was given for a model of silu; give thresholds of "
            "`kairox sparsify`, or a ReLU-fied model"
        )
    given = _get(config, "silu_thresholds") if thresholds is None else thresholds
    if len(given) != n_layers:
        raise KairoxError(f"{len(given)} thresholds for {n_layers} layers; give one a layer")
    if not all(math.isfinite(t) and t >= 0 for t in given):
        raise KairoxError(f"thresholds must be finite and >= 0, got {[*given]}")
    return Rule("silu", tuple(float(t) for t in given), True)


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
    activation = _activation(config, family)
    if value > 0 and activation != "relu":
        raise KairoxError(
            f"a FATReLU threshold of {value} was given and this model's activation is "
            f"{activation!r}, which fires above 0; leave the threshold out"
        )
    return float(value)


def _activation(config: Any, family: Family) -> Activation:
    """What `load_dense` noted in the config, else what config.json says."""
    noted: Activation | None = _get(config, "ffn_activation")
    return noted or family.activations[_get(config, family.activation_key)]


def activation_of(threshold: float, activation: Activation = "relu") -> str:
    """The activation's name in trace headers and model shapes."""
    return "fatrelu" if activation == "relu" and threshold > 0 else activation


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


def hook_layer(
    layer: nn.Module,
    family: Family,
    *,
    entering: Tell | None = None,
    after_attention: Tell | None = None,
) -> list[RemovableHandle]:
    """Be told the states of one layer in every forward pass; returns what removes the hooks.

    entering: the hidden state entering the layer, before anything of it runs. after_attention: the
    residual after its attention (where attention and FFN are parallel, the layer's input plus the
    attention's output), before its FFN runs.
    """
    handles: list[RemovableHandle] = []
    parallel = family.parallel and after_attention is not None
    held: list[torch.Tensor] = []  # parallel: the input of the layer that runs

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if parallel:
            held[:] = [hidden]
        if entering is not None:
            entering(hidden)

    if entering is not None or parallel:
        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
    if after_attention is None:
        return handles
    tell = after_attention
    if parallel:

        def attended(module: nn.Module, args: Any, output: Any) -> None:
            tell(held.pop() + (output[0] if isinstance(output, tuple) else output))

        attention = layer.get_submodule(family.attention)
        handles.append(attention.register_forward_hook(attended))
    else:

        def norm_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            tell(args[0])

        norm = layer.get_submodule(family.ffn_norm)
        handles.append(norm.register_forward_pre_hook(norm_input))
    return handles


def _get(config: Any, key: str, default: Any = None) -> Any:
    return config.get(key, default) if isinstance(config, dict) else getattr(config, key, default)

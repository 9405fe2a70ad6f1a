"""A Hugging Face config.json -> ModelShape. One row per family of configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kairox_sim.errors import KairoxError
from kairox_sim.model import RELU_LIKE, ModelShape, not_relu_like

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MOST_LAYERS = 10_000  # far above any model; a config of 10^9 would fill the memory with its layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Where a family's config.json says what, and what it means where it says nothing."""

    model_types: tuple[str, ...]
    gated: bool
    activation: str = "hidden_act"
    ffn: str = "intermediate_size"
    kv_heads: str | None = "num_key_value_heads"  # None: as many as there are heads
    tied: bool = False
    relu_is: str = "relu"  # what "relu" names


_FAMILIES: tuple[_Keys, ...] = (
    _Keys(model_types=("llama", "mistral", "qwen2", "qwen3", "sparsellama"), gated=True),
    # Its FFN takes the ReLU of gate and up (github.com/SJTU-IPADS/Bamboo).
    _Keys(model_types=("bamboo",), gated=True, relu_is="drelu"),
    _Keys(
        model_types=("opt",), gated=False, activation="activation_function", ffn="ffn_dim",
        kv_heads=None, tied=True,
    ),
    _Keys(
        model_types=("falcon",), gated=False, activation="activation", ffn="ffn_hidden_size",
        kv_heads="num_kv_heads", tied=True,
    ),
    _Keys(model_types=("nemotron", "arcee"), gated=False),
)  # fmt: skip
MODEL_TYPES: tuple[str, ...] = tuple(t for keys in _FAMILIES for t in keys.model_types)


def shape_from_config(
    config: Mapping[str, Any],
    *,
    name: str | None = None,
    bytes_per_weight: float | None = None,
    activation_threshold: float | None = None,
    predictor_rank: int | None = None,
    approximate: bool = False,
    source: str = "config.json",
) -> ModelShape:
    """The shape that a config.json describes. Raises KairoxError for what is not in the table.

    `bytes_per_weight` defaults to the file's dtype; pass it when the model runs in another one.
    `activation_threshold` overrides the file's (0 for ReLU). `approximate`: a dense SwiGLU model
    is meant as run by thresholds on |silu(gate)|; its `activation_threshold` is nan if not given.
    """
    family = str(config.get("model_type", "(none given)"))
    label = name or str(config.get("_name_or_path") or family)
    keys = next((k for k in _FAMILIES if family in k.model_types), None)
    if keys is None:
        raise KairoxError(
            f"model {label!r}: model_type {family!r} is not known; allowed: "
            f"{', '.join(MODEL_TYPES)}"
        )
    d_model = _whole(config, "hidden_size", label)
    if config.get("word_embed_proj_dim", d_model) != d_model:
        raise KairoxError(
            f"model {label!r}: word_embed_proj_dim {config['word_embed_proj_dim']} differs from "
            f"hidden_size {d_model}; such OPT models (350M) are not supported"
        )
    activation = str(_need(config, keys.activation, label))
    activation = keys.relu_is if activation == "relu" else activation
    if approximate:
        _require_swiglu(label, activation, keys)
    elif activation not in RELU_LIKE:
        raise KairoxError(not_relu_like(label, activation))
    threshold = activation_threshold
    if threshold is None:
        threshold = math.nan if approximate else 0.0
        if activation == "fatrelu":
            threshold = _threshold(config.get("hidden_act_param") or 0.0, label)
    n_heads = _whole(config, "num_attention_heads", label)
    if family == "falcon" and config.get(keys.ffn) is None:
        n_neurons = 4 * d_model  # Falcon's own default
    else:
        n_neurons = _whole(config, keys.ffn, label)
    n_layers = _whole(config, "num_hidden_layers", label)
    if n_layers > _MOST_LAYERS:
        raise KairoxError(
            f"model {label!r}: num_hidden_layers is {n_layers}; at most {_MOST_LAYERS} are allowed"
        )
    return ModelShape(
        name=label,
        n_layers=n_layers,
        d_model=d_model,
        n_neurons=n_neurons,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(config, keys, n_heads, label),
        head_dim=_whole(config, "head_dim", label, d_model // max(n_heads, 1)),
        vocab=_whole(config, "vocab_size", label),
        gated=keys.gated,
        activation=activation,
        activation_threshold=threshold,
        bytes_per_weight=_bytes_per_weight(config, label, bytes_per_weight),
        tied_embedding=bool(config.get("tie_word_embeddings", keys.tied)),
        predictor_rank=predictor_rank,
        relu_sparse=not approximate,
        approximate=approximate,
        source=source,
    )


def _kv_heads(config: Mapping[str, Any], keys: _Keys, n_heads: int, label: str) -> int:
    """Falcon's older decoders have one unless `multi_query` is off, whatever num_kv_heads says."""
    if keys.kv_heads is None:
        return n_heads
    if "falcon" in keys.model_types:
        newer = config.get("new_decoder_architecture", False)
        if not newer and config.get("multi_query", True):
            return 1
    return _whole(config, keys.kv_heads, label, n_heads)


def _bytes_per_weight(config: Mapping[str, Any], label: str, given: float | None) -> float:
    if given is not None:
        return given
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "(none given)")
    if dtype not in _DTYPE_BYTES:
        raise KairoxError(
            f"model {label!r}: dtype {dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}, "
            "or pass bytes_per_weight"
        )
    return _DTYPE_BYTES[dtype]


def _require_swiglu(label: str, activation: str, keys: _Keys) -> None:
    if activation != "silu" or not keys.gated:
        raise KairoxError(
            f"model {label!r}: thresholds on |silu(gate)| are for gated models of silu; this one "
            f"is {'gated' if keys.gated else 'not gated'}, with activation {activation!r}"
        )


def _need(config: Mapping[str, Any], key: str, label: str) -> Any:
    if config.get(key) is None:
        raise KairoxError(f"model {label!r}: its config.json has no {key!r}")
    return config[key]


def _whole(config: Mapping[str, Any], key: str, label: str, default: int | None = None) -> int:
    """A count; ModelShape says its range. default: where the config has none, null or 0."""
    given = _need(config, key, label) if default is None else config.get(key) or default
    if isinstance(given, bool) or not isinstance(given, int):
        raise KairoxError(
            f"model {label!r}: {key} is {given!r} in its config.json; it must be a whole number of "
            "1 or more"
        )
    return given


def _threshold(given: Any, label: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise KairoxError(
            f"model {label!r}: hidden_act_param is {given!r} in its config.json; it must be a "
            "number above 0"
        )
    return float(given)

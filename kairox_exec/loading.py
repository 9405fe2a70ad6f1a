"""A model directory to a model in memory: its config, its weights, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kairox_exec import bundle_cache
from kairox_exec.activations import BUILT_WITH, use_rule
from kairox_exec.checkpoint import Checkpoint, Progress, model_sha256, open_checkpoint, told
from kairox_exec.families import Family, Rule, decoder_layers, family_of, rule_of
from kairox_exec.ffn_spec import FfnSpec, Numerics
from kairox_exec.formats import Format, row_bytes
from kairox_exec.skeleton import UNBUILDABLE, fill, plan, reason, skeleton, stored_bytes
from kairox_exec.weights import FfnWeights, NeuronBundles, bundle_weights, row_names
from kairox_sim.errors import KairoxError

__all__ = [
    "Loaded",
    "config_for",
    "dtype_named",
    "load_bundled",
    "load_dense",
    "load_reference",
    "model_sha256",
    "read_config",
]  # fmt: skip

MOST_LAYERS = 1000  # published models have up to 126
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORTH_KEEPING_BYTES = 256 * 10**6  # of bundles: below, they are made in about a second


def load_dense(
    model_dir: str | Path,
    *,
    dtype: str = "float32",
    fatrelu_threshold: float | None = None,
    thresholds: Sequence[float] | None = None,
) -> tuple[nn.Module, Any]:
    """The plain transformers model on the CPU, in `dtype`, and its config. Local files only.

    thresholds: of `sparsify`, one a layer, for a dense SwiGLU model. The returned model computes
    the dense output of its rule (`families.rule_of`), also where transformers has no such
    activation, and the returned config carries that rule.
    """
    directory = Path(model_dir)
    raw = read_config(directory)
    family = family_of(raw, thresholds=thresholds)
    rule = rule_of(raw, fatrelu_threshold=fatrelu_threshold, thresholds=thresholds)
    _refuse_quantised(directory, raw)
    with open_checkpoint(directory) as checkpoint:
        config = config_for(directory, raw, family, rule)
        model = skeleton(directory, config, dtype_named(dtype))
        in_files, groups = plan(model, checkpoint, family)
        _require_memory(directory, stored_bytes(model))
        fill(model, checkpoint, in_files, groups)
    use_rule(model, family, rule)
    return model, config


def load_reference(model_dir: str | Path, *, dtype: str = "float32") -> tuple[nn.Module, Any]:
    """As `load_dense`, of the model as published; one of silu is whole, without thresholds."""
    raw = read_config(model_dir)
    none = None
    if raw.get("hidden_act") == "silu" and isinstance(raw.get("num_hidden_layers"), int):
        none = (0.0,) * raw["num_hidden_layers"]  # |silu| > 0: silu itself
    return load_dense(model_dir, dtype=dtype, thresholds=none)


def config_for(directory: Path, raw: dict[str, Any], family: Family, rule: Rule) -> Any:
    """The transformers config of a model directory; it carries the rule for `rule_of`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    values = {
        key: value
        for key, value in raw.items()
        if key not in ("model_type", "auto_map", "dtype", "torch_dtype")
    }
    silu = rule.activation == "silu"
    values |= {
        family.activation_key: BUILT_WITH[rule.activation],
        "ffn_activation": rule.activation,
        "fatrelu_threshold": 0.0 if silu else rule.thresholds[0],
        "silu_thresholds": list(rule.thresholds) if silu else None,
    }
    model_type = raw["model_type"]
    try:
        return AutoConfig.for_model(
            model_type if model_type in CONFIG_MAPPING else family.loads_as, **values
        )
    except (StrictDataclassError, *UNBUILDABLE) as error:
        raise KairoxError(f"{directory / 'config.json'}: {reason(error)}") from error


def _require_memory(directory: Path, n_bytes: int, root: Path = Path("/")) -> None:
    """Before anything is read: a model that does not fit would end in swapping or a kill."""
    try:
        from kairox_sim.machine_facts import available_bytes, memory_limit
    except ImportError:  # a bare GPU machine without psutil: what is free is not known
        return
    limit = memory_limit(root)
    free = available_bytes(limit)
    if n_bytes > free:
        of, to_do = "", "end other programs"
        if limit is not None and free < available_bytes(None):
            of = f" of the {limit.limit_bytes / 1e9:.1f} GB that this container or service may use"
            to_do = "raise that limit"
        raise KairoxError(
            f"{directory} needs {n_bytes / 1e9:.1f} GB of host memory and {free / 1e9:.1f} GB are "
            f"available{of}; use smaller rows (`weights` int8 or q4_0) or a smaller dtype, or "
            f"{to_do}"
        )


def _refuse_quantised(directory: Path, raw: dict[str, Any]) -> None:
    quantised = raw.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise KairoxError(
            f"{directory / 'config.json'} has a quantization_config ({method}); quantised "
            "checkpoints are not read: use the original weights, and `weights` int8, q8_0 or q4_0 "
            "to keep them small"
        )


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of a model directory, as it is on disk."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise KairoxError(
            f"{path} does not exist: a model is a Hugging Face directory with config.json, "
            "*.safetensors and tokenizer.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise KairoxError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise KairoxError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    n_layers = raw.get("num_hidden_layers")
    if isinstance(n_layers, int) and n_layers > MOST_LAYERS:
        raise KairoxError(
            f"{path} says num_hidden_layers {n_layers} (allowed: up to {MOST_LAYERS}); is it of a "
            "model?"
        )
    return raw


def dtype_named(name: str) -> torch.dtype:
    """float32, bfloat16 or float16; KairoxError for others."""
    if name not in DTYPES:
        raise KairoxError(f"unknown dtype {name!r}; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose FFNs are bundles; its own have no weights and wait for `run_bundles`."""

    model: nn.Module
    config: Any
    family: Family
    bundles: list[NeuronBundles]
    n_bytes: int  # of the bundles, without biases
    from_cache: bool
    kept: bool  # in the cache, now
    cache: str  # the folder that bundles are kept in, or why they are not

    @property
    def notice(self) -> str:
        """A line on where the bundles of a large model came from, and whether they are kept."""
        if self.n_bytes < WORTH_KEEPING_BYTES:
            return ""
        rows = f"FFN rows, {self.n_bytes / 1e9:.2f} GB, are"
        if self.from_cache:
            return f"{rows} mapped from {self.cache}"
        if self.kept:
            return f"{rows} kept in {self.cache} for the next start; see `kairox bundles`"
        if self.cache == "off":
            return f"{rows} made at every start, since none are to be kept (off)"
        return ""  # why not has been warned of


def load_bundled(
    model_dir: str | Path,
    *,
    gating: str = "exact",
    fmt: Format = "float32",
    numerics: Numerics = "fast",
    dtype: str = "float32",
    fatrelu_threshold: float | None = None,
    thresholds: Sequence[float] | None = None,
    cache_dir: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Loaded:
    """A model directory with its FFN rows as bundles of `fmt`, all else in `dtype`.

    Rows come from the files as they are stored, layer by layer: at no time are there two copies of
    the model, nor a second copy of an FFN beyond one layer. cache_dir: where bundles are kept, the
    platform's cache by default (for bundles of 256 MB and more); "off" keeps none. on_progress:
    told what is being done, which takes seconds for a large model.
    """
    directory = Path(model_dir)
    raw = read_config(directory)
    family = family_of(raw, thresholds=thresholds)
    rule = rule_of(raw, fatrelu_threshold=fatrelu_threshold, thresholds=thresholds)
    _refuse_quantised(directory, raw)
    with open_checkpoint(directory) as checkpoint:
        config = config_for(directory, raw, family, rule)
        model = skeleton(directory, config, dtype_named(dtype))
        in_files, groups = plan(model, checkpoint, family)
        layers = decoder_layers(model, family)
        ours = _ffn_names(family, len(layers))
        n_neurons, d_model = model.get_parameter(ours[0]["gate"]).shape
        specs = [
            FfnSpec(d_model, family.gated, rule.activation, threshold, fmt, numerics)
            for threshold in rule.thresholds
        ]
        left = frozenset(name for names in ours for name in names.values())
        n_bytes = len(layers) * _bundle_bytes(family, gating, specs[0], n_neurons)
        _require_memory(directory, n_bytes + stored_bytes(model, left))

        folder, why_not = _cache_folder(cache_dir, n_bytes)
        bundles = key = None
        if folder is not None:
            key = bundle_cache.Key(
                model_sha256=bundle_cache.sha256_of(directory, folder, on_progress),
                gating=gating, fmt=fmt,
                n_layers=len(layers), n_neurons=n_neurons, d_model=d_model,
            )  # fmt: skip
            bundles = bundle_cache.read(folder, key, family, specs, on_progress)
        from_cache = bundles is not None
        if bundles is None:
            bundles = []
            bundles = [
                bundle_weights(
                    _read_ffn(checkpoint, model, in_files, ours[layer]), family,
                    layer=layer, gating=gating, threshold=specs[layer].threshold,
                    activation=rule.activation, fmt=fmt, numerics=numerics,
                )
                for layer in told(range(len(layers)), on_progress, "making bundles, layers")
            ]  # fmt: skip
            if folder is not None and key is not None:
                name = directory.resolve().name
                why_not = bundle_cache.write(folder, key, bundles, name, on_progress)
        fill(model, checkpoint, in_files, groups, left, on_progress)
    return Loaded(
        model, config, family, bundles, n_bytes,
        from_cache=from_cache, kept=not why_not, cache=why_not or str(folder),
    )  # fmt: skip


def _ffn_names(family: Family, n_layers: int) -> list[dict[str, str]]:
    """Per layer, a field of FfnWeights -> the model's name for it, biases included."""
    parts = {"gate": family.gate, "down": family.down}
    if family.up is not None:
        parts["up"] = family.up
    return [
        {
            field + suffix: f"{family.layers}.{layer}.{path}.{kind}"
            for field, path in parts.items()
            for suffix, kind in (("", "weight"), ("_b", "bias"))
        }
        for layer in range(n_layers)
    ]


def _read_ffn(
    checkpoint: Checkpoint, model: nn.Module, in_files: dict[str, str], names: dict[str, str]
) -> FfnWeights:
    read = {
        field: checkpoint.read(in_files[name], model.get_parameter(name).shape)
        for field, name in names.items()
        if name in in_files
    }
    return FfnWeights(
        read["gate"], read.get("up"), read["down"],
        read.get("gate_b"), read.get("up_b"), read.get("down_b"),
    )  # fmt: skip


def _bundle_bytes(family: Family, gating: str, spec: FfnSpec, n_neurons: int) -> int:
    """Of one layer in host memory, without biases."""
    n_rows = len(row_names(family, gating)) + (1 if gating == "exact" else 0)
    stored = n_rows * n_neurons * row_bytes(spec.fmt, spec.d_model)
    return stored + (n_neurons * (spec.d_model + 8) if gating == "screened" else 0)


def _cache_folder(cache_dir: str | Path | None, n_bytes: int) -> tuple[Path | None, str]:
    """The folder, or None and why."""
    if cache_dir == "off":
        return None, "off"
    if cache_dir is not None:
        return Path(cache_dir), ""
    if n_bytes < WORTH_KEEPING_BYTES:
        return None, f"bundles below {WORTH_KEEPING_BYTES / 1e6:.0f} MB are made faster than kept"
    return bundle_cache.default_folder(), ""

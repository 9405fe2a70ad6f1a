"""A model directory to a model in memory: its config, its weights, and what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from kairox_exec.activations import BUILT_WITH, use_rule
from kairox_exec.checkpoint import open_checkpoint, weight_files
from kairox_exec.families import Family, Rule, family_of, rule_of
from kairox_exec.skeleton import fill, plan, skeleton, stored_bytes
from kairox_sim.errors import KairoxError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        model = skeleton(directory, config, DTYPES[dtype])
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
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise KairoxError(f"{directory / 'config.json'}: {reason}") from error


def _require_memory(directory: Path, n_bytes: int) -> None:
    """Before anything is read: a model that does not fit would end in swapping or a kill."""
    free = psutil.virtual_memory().available
    if n_bytes > free:
        raise KairoxError(
            f"{directory} needs {n_bytes / 1e9:.1f} GB of host memory and {free / 1e9:.1f} GB are "
            "available; use smaller rows (`weights` int8 or q4_0) or a smaller dtype, or end "
            "other programs"
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
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KairoxError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise KairoxError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def model_sha256(model_dir: str | Path) -> str:
    """SHA-256 over the bytes of the safetensors files in name order (one file: its sha256sum)."""
    digest = hashlib.sha256()
    for path in weight_files(model_dir):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()

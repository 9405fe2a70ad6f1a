"""config.json to ModelShape: published configurations, their defaults, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kairox_sim.errors import KairoxError
from kairox_sim.model import CATALOGUE, require_sparse
from kairox_sim.shape_config import MODEL_TYPES, shape_from_config

PROSPARSE = CATALOGUE["prosparse-7b"]
OPT = CATALOGUE["opt-6.7b"]
TINY = CATALOGUE["tiny-reglu"]
TINY_CONFIG = Path(__file__).parents[1] / "experiments/models/tiny-reglu/config.json"

# The configuration of SparseLLM/prosparse-llama-2-7b on Hugging Face, the keys that matter here.
PROSPARSE_CONFIG: dict[str, Any] = {
    "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.01,
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
# facebook/opt-6.7b.
OPT_CONFIG: dict[str, Any] = {
    "model_type": "opt", "activation_function": "relu", "hidden_size": 4096, "ffn_dim": 16384,
    "num_attention_heads": 32, "num_hidden_layers": 32, "torch_dtype": "float16",
    "vocab_size": 50272, "word_embed_proj_dim": 4096,
}  # fmt: skip
# SJTU-IPADS/Bamboo's keys: Mistral's.
BAMBOO_CONFIG: dict[str, Any] = {
    "model_type": "bamboo", "hidden_act": "relu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
# tiiuae/falcon-40b with its activation replaced.
FALCON_CONFIG: dict[str, Any] = {
    "model_type": "falcon", "activation": "relu", "hidden_size": 8192, "num_hidden_layers": 60,
    "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True,
    "vocab_size": 65024, "torch_dtype": "bfloat16",
}  # fmt: skip
# nvidia/Minitron-8B-Base
NEMOTRON_CONFIG: dict[str, Any] = {
    "model_type": "nemotron", "hidden_act": "relu2", "hidden_size": 4096,
    "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 48,
    "head_dim": 128, "vocab_size": 256000, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_config_gives_the_catalogue_entries() -> None:
    config = json.loads(TINY_CONFIG.read_text(encoding="utf-8"))
    for entry, its_config in ((PROSPARSE, PROSPARSE_CONFIG), (OPT, OPT_CONFIG), (TINY, config)):
        shape = shape_from_config(
            its_config, name=entry.name, source=entry.source, predictor_rank=entry.predictor_rank,
            bytes_per_weight=entry.bytes_per_weight if entry is TINY else None,
        )  # fmt: skip
        # what no config.json says
        published: dict[str, Any] = {
            "active_share": None,
            "predicted_share": None,
            "share_source": "",
        }
        assert shape == replace(entry, **published)
    assert shape_from_config(config).bytes_per_weight == 2  # as the file has it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "silu"}, ["silu", "relu, fatrelu, relu2"]),
        ({"hidden_act": "gelu_new"}, ["gelu_new"]),
        ({"hidden_act_param": None}, ["fatrelu", "threshold above 0"]),
        ({"hidden_act": "shiftrelu"}, ["shiftrelu"]),
        ({"model_type": "gpt2"}, ["gpt2", "llama", "opt", "falcon", "nemotron"]),
        ({"torch_dtype": "int8"}, ["int8", "bytes_per_weight"]),
        ({"intermediate_size": None}, ["intermediate_size"]),
        ({"vocab_size": 0}, ["vocab is 0"]),
    ],
)
def test_config_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(KairoxError) as error:
        shape_from_config({**PROSPARSE_CONFIG, **change}, name="a-model")
    assert "a-model" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_opt_refused() -> None:
    with pytest.raises(KairoxError, match="350M"):
        shape_from_config({**OPT_CONFIG, "word_embed_proj_dim": 512})
    with pytest.raises(KairoxError, match="gelu"):
        shape_from_config({**OPT_CONFIG, "activation_function": "gelu"})


@pytest.mark.parametrize(
    ("entry", "config"),
    [
        ("bamboo-7b", BAMBOO_CONFIG),
        ("falcon-40b-relu", FALCON_CONFIG),
        ("minitron-8b", NEMOTRON_CONFIG | {"num_key_value_heads": 8}),
    ],
)
def test_configs_of_other_families_give_the_catalogue_entries(
    entry: str, config: dict[str, Any]
) -> None:
    expected, shape = CATALOGUE[entry], shape_from_config(config, name=entry)
    for field in (
        "n_layers", "d_model", "n_neurons", "n_heads", "n_kv_heads", "head_dim", "vocab", "gated",
        "activation", "activation_threshold", "bytes_per_weight", "tied_embedding",
    ):  # fmt: skip
        assert getattr(shape, field) == getattr(expected, field), field


def test_falcon_7b_has_one_key_head_and_its_own_ffn_size() -> None:
    """Older Falcon decoders: multi_query by default, num_kv_heads has no effect with it."""
    old = FALCON_CONFIG | {"new_decoder_architecture": False, "ffn_hidden_size": 1000}
    assert shape_from_config(old).n_kv_heads == 1
    assert shape_from_config(old).n_neurons == 1000
    assert shape_from_config(old | {"multi_query": False}).n_kv_heads == 8
    assert shape_from_config(old | {"multi_query": False, "num_kv_heads": None}).n_kv_heads == 128
    # The older decoder's keys say nothing of a newer one.
    assert shape_from_config(FALCON_CONFIG | {"multi_query": True}).n_kv_heads == 8


def test_nemotron_is_not_gated_and_squares() -> None:
    shape = shape_from_config(NEMOTRON_CONFIG)
    assert (shape.gated, shape.activation, shape.rows_per_neuron) == (False, "relu2", 2)
    assert shape.n_kv_heads == shape.n_heads  # the file says nothing
    assert not shape.tied_embedding
    gated = shape_from_config(PROSPARSE_CONFIG | {"model_type": "qwen2", "hidden_act": "drelu"})
    assert (gated.gated, gated.activation) == (True, "drelu")


def test_swiglu_only_as_an_approximation() -> None:
    swiglu = PROSPARSE_CONFIG | {"model_type": "llama", "hidden_act": "silu"}
    shape = shape_from_config(swiglu, approximate=True, activation_threshold=0.1)
    assert (shape.activation, shape.activation_threshold) == ("silu", 0.1)
    assert shape.approximate
    assert not shape.relu_sparse
    require_sparse(shape, "exact")
    with pytest.raises(KairoxError, match="not ReLU-sparse"):
        require_sparse(replace(shape, approximate=False), "exact")
    assert math.isnan(shape_from_config(swiglu, approximate=True).activation_threshold)
    with pytest.raises(KairoxError, match=r"gated models of silu.*'fatrelu'"):
        shape_from_config(PROSPARSE_CONFIG, approximate=True)
    with pytest.raises(KairoxError, match="not gated"):
        shape_from_config(NEMOTRON_CONFIG | {"hidden_act": "silu"}, approximate=True)


def test_every_family_that_runs_has_a_shape() -> None:
    families = pytest.importorskip("kairox_exec.families")
    runs = {name for family in families.FAMILIES for name in family.model_types}
    assert runs <= set(MODEL_TYPES)


@pytest.mark.parametrize(
    "value", ["x", "7", [], {}, [1], 1.5, math.nan, math.inf, -1, True, 10**30], ids=repr
)
@pytest.mark.parametrize("config", [PROSPARSE_CONFIG, OPT_CONFIG, FALCON_CONFIG], ids=str)
def test_a_value_of_another_kind_is_named(config: dict[str, Any], value: object) -> None:
    counts = [key for key, its in config.items() if isinstance(its, int | float)]
    for key in [*counts, "hidden_act_param", "head_dim", "num_kv_heads", "dtype"]:
        try:
            shape_from_config({**config, key: value}, name="odd")
        except KairoxError as error:
            assert "odd" in str(error)  # noqa: PT017


def test_counts_are_whole_numbers() -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        for value in ("7", 2.0, True):
            with pytest.raises(KairoxError, match=f"{key} is .* whole number"):
                shape_from_config({**PROSPARSE_CONFIG, key: value})
    with pytest.raises(KairoxError, match="at most 10000"):
        shape_from_config({**PROSPARSE_CONFIG, "num_hidden_layers": 10**9})
    with pytest.raises(KairoxError, match="hidden_act_param is 'x'"):
        shape_from_config({**PROSPARSE_CONFIG, "hidden_act_param": "x"})

"""A model of a 7B's shape with drawn weights: real attention, real gates, synthetic activations.

Each neuron's gate has a bias that makes it fire at a rate of its own; the rates are Beta
distributed, the most active 26 % of the neurons carrying 80 % of the activations (PowerInfer, SOSP
2024, section 2.2), and 15 % fire on average. Tokens repeat, so that neurons fire again. Which
neurons fire together, and what a predictor finds out, is not a trained model's: times and bytes
mean something here, hit rates do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.gpu_check.place import Place
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.weights import NeuronBundles
from kairox_sim.firing_rates import Rates
from kairox_sim.model import ModelShape
from kairox_sim.shape_config import shape_from_config

RATES = Rates(mean=0.15, top_share=0.26, carries=0.80)
WEIGHT_STD = 0.02
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class BigShape:
    n_layers: int
    n_neurons: int
    d_model: int
    n_heads: int
    vocab: int

    def config(self, *, ffn: int | None = None) -> Any:
        """transformers' configuration. ffn: another width, where the FFNs are replaced anyway."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.d_model,
            intermediate_size=self.n_neurons if ffn is None else ffn,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_heads,
            vocab_size=self.vocab,
            max_position_embeddings=CONTEXT,
            hidden_act="relu",
            mlp_bias=ffn is None,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def costs_shape(self) -> ModelShape:
        """Bytes and flops, as the simulator counts them."""
        return shape_from_config(
            self.config().to_dict() | {"model_type": "llama"}, name="synthetic-7b-shape",
            bytes_per_weight=2,
        )  # fmt: skip


SHAPE_7B = BigShape(32, 11008, 4096, 32, 32000)
SHAPE_TOY = BigShape(2, 256, 64, 4, 128)


def shape_for(place: Place) -> BigShape:
    return SHAPE_TOY if place.rehearse else SHAPE_7B


def new_model(place: Place, shape: BigShape) -> tuple[Any, Any]:
    """The model without its FFNs' weights, in bfloat16 on the device; the same one every time."""
    from transformers import LlamaForCausalLM

    config = shape.config(ffn=1)
    before = torch.get_default_dtype()
    devices = [] if place.rehearse else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(1)
        try:
            torch.set_default_dtype(torch.bfloat16)
            with place.device:
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    return model, config


def new_bundles(place: Place, shape: BigShape) -> list[NeuronBundles]:
    """Every layer's FFN weights in host memory, drawn on the device: exact gating, bfloat16."""
    draw = torch.Generator(device=place.device).manual_seed(2)
    biases = np.random.default_rng(3)
    bundles = []
    for layer in range(shape.n_layers):
        rows = torch.empty((shape.n_neurons, 2, shape.d_model), dtype=torch.bfloat16)
        gate = torch.empty((shape.n_neurons, shape.d_model), dtype=torch.bfloat16)
        for target in (rows, gate):
            drawn = torch.empty(target.shape, dtype=torch.bfloat16, device=place.device)
            target.copy_(drawn.normal_(std=WEIGHT_STD, generator=draw))
        bundles.append(
            NeuronBundles(
                layer=layer,
                gating="exact",
                spec=FfnSpec(shape.d_model, True, "relu", 0.0, "bfloat16"),
                row_names=("up", "down"),
                rows=rows,
                gate_w=gate,
                gate_b=_gate_biases(shape, biases),
                up_b=None,
                down_b=None,
            )
        )
    return bundles


def _gate_biases(shape: BigShape, draw: np.random.Generator) -> torch.Tensor:
    """float32 [n_neurons]: after the norm a gate is normal with std WEIGHT_STD * sqrt(d_model)."""
    std = WEIGHT_STD * shape.d_model**0.5
    rates = draw.permutation(RATES.quantiles(shape.n_neurons)).clip(1e-9, 1 - 1e-9)
    normal = NormalDist()
    return torch.tensor([std * normal.inv_cdf(float(rate)) for rate in rates], dtype=torch.float32)


def sticky_tokens(shape: BigShape, n_tokens: int, seed: int) -> NDArray[np.int32]:
    """Each token is, at even odds, one of the last eight, or else any."""
    draw = np.random.default_rng(seed)
    tokens = [int(draw.integers(shape.vocab))]
    while len(tokens) < n_tokens:
        again = draw.random() < 0.5
        tokens.append(int(draw.choice(tokens[-8:]) if again else draw.integers(shape.vocab)))
    return np.asarray(tokens, np.int32)


def slots_within(shape: BigShape, budget_bytes: float, margin_bytes: float) -> int:
    """Slots per layer that fit, with attention, gates, head, embedding and KV cache.

    0 and less: not even those fit.
    """
    counted = shape.costs_shape()
    empty = sum(counted.device_parts("exact", 0, CONTEXT, predictor="lookahead").values())
    empty += shape.vocab * shape.d_model * 2  # the embedding table, which transformers keeps there
    per_slot = shape.n_layers * counted.bundle_bytes("exact")
    return min(shape.n_neurons, int((budget_bytes - margin_bytes - empty) // per_slot))


def described(shape: BigShape) -> dict[str, Any]:
    return asdict(shape) | {
        "weights": "bfloat16, drawn", "gating": "exact", "numerics": "fast",
        "activations": "synthetic", "mean_active_share": RATES.mean,
        "most_active_26_percent_carry": RATES.carries,
    }  # fmt: skip


def dense_weights(bundles: list[NeuronBundles]) -> Iterator[dict[str, torch.Tensor]]:
    """Of each layer, by its name under `mlp`: what plain transformers computes the same with."""
    for bundle in bundles:
        n, d = bundle.n_neurons, bundle.d_model
        assert bundle.gate_b is not None
        yield {
            "gate_proj.weight": bundle.gate_w,
            "gate_proj.bias": bundle.gate_b.bfloat16(),
            "up_proj.weight": bundle.rows[:, 0].contiguous(),
            "up_proj.bias": torch.zeros(n, dtype=torch.bfloat16),
            "down_proj.weight": bundle.rows[:, 1].T.contiguous(),
            "down_proj.bias": torch.zeros(d, dtype=torch.bfloat16),
        }

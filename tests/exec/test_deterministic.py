"""Deterministic numerics: the same bits wherever a neuron is computed, and whenever it arrives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kairox_exec.kernels import numba_cpu
from kairox_exec.loading import read_config
from kairox_exec.text import load_tokenizer
from kairox_sim.policies import POLICIES
from tests.exec.racing import Model, Shuffled, logits_of
from tests.exec.tiny_families import TINY, save_tiny

LIVE = [name for name in POLICIES if not {"future", "gpu_over_cpu"} & POLICIES[name].needs]
TRIGGERS = ("attn_in", "attn_out", "serial", "after", "instant")
HAPPENS = ("loads", "hit_on_time", "residual", "late", "evictions", "dropped")
EVERYTHING: dict[str, Any] = {"policy": "none", "trigger": "after", "predicted_share": 1.0}
"""Under predicted gating: all neurons are evaluated, on the host, and decide for themselves."""


def _tokens(model_dir: Path, prompts_dir: Path, n: int, domain: str = "prose") -> Any:
    text = (prompts_dir / f"{domain}.txt").read_text(encoding="utf-8")[: 12 * n]
    return load_tokenizer(model_dir).encode(text)[:n]


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, folder / name) for name in TINY}


@pytest.fixture(scope="module")
def reglu(tiny_reglu_dir: Path, prompts_dir: Path) -> Model:
    return Model.of(tiny_reglu_dir, _tokens(tiny_reglu_dir, prompts_dir, 12))


def _small(directory: Path, **how: Any) -> Model:
    vocab = int(read_config(directory)["vocab_size"])
    tokens = np.random.default_rng(3).integers(0, vocab, 14).astype(np.int32)
    return Model.of(directory, tokens, **how)


def test_any_placement_of_tiny_reglu(reglu: Model) -> None:
    """Residency, budgets, racing and dropped copies, triggers, predictions, order, gating."""
    bundles = {g: reglu.bundles(g) for g in ("oracle", "exact", "screened", "predicted")}
    n = bundles["exact"][0].n_neurons
    dense = logits_of(reglu, bundles["predicted"], **EVERYTHING)
    assert dense.isfinite().all()
    happened: Counter[str] = Counter()

    @settings(max_examples=25, deadline=None)
    @given(
        gating=st.sampled_from(["exact", "exact", "screened", "oracle"]),
        policy=st.sampled_from(["lru", "lfu", "tam", "static"]),
        trigger=st.sampled_from(TRIGGERS),
        slots=st.lists(st.sampled_from([0, 1, 60, 200, 500, n]), min_size=6, max_size=6),
        p_land=st.sampled_from([0.0, 0.4, 1.0]),
        p_drop=st.sampled_from([0.0, 0.2]),
        share=st.sampled_from([0.0, 0.1, 0.9]),
        shuffled=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    @example(  # so that everything in HAPPENS does, whatever is drawn
        gating="exact", policy="lru", trigger="attn_out", slots=[60] * 6, p_land=0.4, p_drop=0.5,
        share=0.9, shuffled=True, seed=1,
    )  # fmt: skip
    def same_bits(
        gating: str, policy: str, trigger: str, slots: list[int], p_land: float, p_drop: float,
        share: float, shuffled: bool, seed: int,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        logits = logits_of(
            reglu, bundles[gating], policy=policy, trigger=trigger, slots=slots, rng=rng,
            p_land=p_land, p_drop=p_drop, predicted_share=share, happened=happened,
            kernels=Shuffled(rng) if shuffled else numba_cpu,
        )  # fmt: skip
        assert torch.equal(logits, dense)

    same_bits()
    assert all(happened[what] > 0 for what in HAPPENS), happened


@pytest.mark.parametrize("policy", LIVE)
def test_every_policy(policy: str, tiny_dirs: dict[str, Path]) -> None:
    model = _small(tiny_dirs["llama"])
    bundles = model.bundles("exact")
    dense = logits_of(model, model.bundles("predicted"), **EVERYTHING)
    happened: Counter[str] = Counter()
    for seed, slots in enumerate((0, 10, 40, 96)):
        # `after` for all: there a policy may give up what the layer-step is still to read.
        triggers = {"after", "after" if POLICIES[policy].default_trigger == "after" else "attn_out"}
        for trigger in sorted(triggers):
            logits = logits_of(
                model, bundles, policy=policy, slots=slots, rng=np.random.default_rng(seed),
                trigger=trigger, p_land=0.6, p_drop=0.05, happened=happened,
            )  # fmt: skip
            assert torch.equal(logits, dense), trigger
    assert happened["hit_on_time"] or policy == "none"
    assert happened["residual"] or policy == "all"
    assert happened["loads"] or POLICIES[policy].admits == "never", happened


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family(name: str, dtype: str, tiny_dirs: dict[str, Path]) -> None:
    model = _small(tiny_dirs[name], dtype=dtype, fmt=dtype, thresholds=TINY[name].thresholds)
    dense = logits_of(model, model.bundles("predicted"), **EVERYTHING)
    happened: Counter[str] = Counter()
    for seed, gating in enumerate(("oracle", "exact", "screened")):
        bundles = model.bundles(gating)
        for trigger in ("attn_out", "attn_in"):
            rng = np.random.default_rng(seed)
            logits = logits_of(
                model, bundles, slots=[0, 30, 96], trigger=trigger, rng=rng, p_land=0.5,
                p_drop=0.1, kernels=Shuffled(rng), happened=happened,
            )  # fmt: skip
            assert torch.equal(logits, dense), (gating, trigger)
    assert all(happened[what] for what in HAPPENS), happened


@pytest.mark.parametrize("fmt", ["float16", "int8", "q8_0", "q4_0"])
def test_every_format(fmt: str, tiny_dirs: dict[str, Path]) -> None:
    model = _small(tiny_dirs["mistral"], fmt=fmt)
    dense = logits_of(model, model.bundles("predicted"), **EVERYTHING)
    assert not torch.equal(dense, _dense_of(tiny_dirs["mistral"]))  # other weights, other logits
    happened: Counter[str] = Counter()
    for gating in ("oracle", "exact", "screened"):
        rng = np.random.default_rng(1)
        logits = logits_of(
            model, model.bundles(gating), slots=40, rng=rng, p_land=0.5, p_drop=0.1,
            kernels=Shuffled(rng), happened=happened,
        )  # fmt: skip
        assert torch.equal(logits, dense), gating
    assert all(happened[what] for what in HAPPENS), happened


def _dense_of(directory: Path) -> torch.Tensor:
    plain = _small(directory)
    return logits_of(plain, plain.bundles("predicted"), **EVERYTHING)


def test_fast_numerics_do_differ(tiny_reglu_dir: Path, prompts_dir: Path) -> None:
    """What the tests above would say if sums were float32: they can fail."""
    model = Model.of(tiny_reglu_dir, _tokens(tiny_reglu_dir, prompts_dir, 12), numerics="fast")
    bundles = model.bundles("exact")
    runs = [
        logits_of(model, bundles, policy="static", slots=s, trigger="after", prefill=1)
        for s in (0, 300, 896)
    ]
    assert not torch.equal(runs[0], runs[1])
    assert (runs[0] - runs[1]).abs().max() < 2e-5


def test_a_missed_neuron_shows(reglu: Model) -> None:
    """Nor would the comparison overlook one: leave a few per cent of the neurons out."""
    everything = logits_of(reglu, reglu.bundles("predicted"), **EVERYTHING)
    most = logits_of(reglu, reglu.bundles("predicted"), **(EVERYTHING | {"predicted_share": 0.97}))
    assert not torch.equal(most, everything)


@pytest.mark.parametrize(
    "n_tokens",
    [8, pytest.param(96, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)],
)
def test_greedy_text_resident_offloaded_and_split(
    n_tokens: int, tiny_reglu_dir: Path, prompts_dir: Path, record_property: Any
) -> None:
    """Resident, offloaded, split: one text and one set of logits; float32 sums are reported."""
    texts: dict[str, dict[str, Any]] = {"deterministic": {}, "fast": {}}
    prompt = _tokens(tiny_reglu_dir, prompts_dir, 8, "code")
    for numerics, found in texts.items():
        model = Model.of(tiny_reglu_dir, prompt, numerics=numerics)
        bundles = model.bundles("exact")
        for name, slots in (("resident", 896), ("offloaded", 0), ("split", 300)):
            found[name] = _greedy(model, bundles, slots, n_tokens)
    first = texts["deterministic"]["resident"]
    for tokens, logits in texts["deterministic"].values():
        assert tokens == first[0]
        assert torch.equal(logits, first[1])
    resident = texts["fast"]["resident"]
    for name in ("offloaded", "split"):
        tokens, logits = texts["fast"][name]
        apart = [i for i, (a, b) in enumerate(zip(tokens, resident[0], strict=True)) if a != b]
        until = apart[0] + 1 if apart else n_tokens
        error = float((logits[:until] - resident[1][:until]).abs().max())
        record_property(f"fast, {name}: largest logit error", error)
        record_property(f"fast, {name}: first divergence", apart[0] if apart else "none")
        assert error < 1e-4


def _greedy(model: Model, bundles: Any, slots: int, n: int) -> tuple[list[int], torch.Tensor]:
    tokens: list[int] = []
    rows: list[torch.Tensor] = []

    def keep(runner: Any, token: int) -> None:
        tokens.append(token)
        rows.append(runner.logits.clone())

    logits_of(
        model, bundles, policy="static", trigger="after", slots=slots, generate=n, on_token=keep,
        whole=True,
    )  # fmt: skip
    return tokens, torch.stack(rows)

"""Activation thresholds: the quantile, what they cost, the file, and the hybrid FFN with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import decoder_layers, family_of
from kairox_exec.loading import load_dense, model_sha256
from kairox_exec.runner import load
from kairox_exec.score import score, score_dense
from kairox_exec.sparsify import _cut, _histograms, sparsify
from kairox_exec.text import load_tokenizer
from kairox_exec.thresholds import Thresholds, Tokens, read_thresholds
from kairox_sim.cache import NeuronCache
from kairox_sim.cli import main
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES
from kairox_sim.settings import Settings


@pytest.fixture(scope="module")
def swiglu_dir(tiny_reglu_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-reglu's weights and tokenizer under silu: a poor model, and a dense one."""
    directory = tmp_path_factory.mktemp("swiglu") / "model"
    shutil.copytree(tiny_reglu_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    return directory


@pytest.fixture(scope="module")
def prose(prompts_dir: Path) -> Path:
    return prompts_dir / "prose.txt"


@pytest.fixture(scope="module")
def half(swiglu_dir: Path, prose: Path) -> Thresholds:
    return sparsify(swiglu_dir, prose, density=0.5, tokens=512, eval_tokens=256, window=128)


def test_the_density_is_reached(half: Thresholds) -> None:
    assert len(half.per_layer) == len(half.densities) == 6
    assert all(abs(d - 0.5) < 0.005 for d in half.calibrated_densities)
    # On tokens it has not seen. Layers after the first get another input than they were calibrated
    # on, since those before them are thresholded too.
    assert abs(half.densities[0] - 0.5) < 0.05
    assert all(0.35 < d < 0.75 for d in half.densities)
    assert half.density == pytest.approx(np.mean(half.densities))
    assert (half.measured_on.start, half.measured_on.stop) == (512, 768)
    assert not half.calibrated_on.overlaps(half.measured_on)


def test_thresholds_are_the_quantile_of_what_the_dense_model_computes(
    half: Thresholds, swiglu_dir: Path, prose: Path
) -> None:
    """All values kept in memory, which the histograms need not do."""
    model, config = load_dense(swiglu_dir, thresholds=(0.0,) * 6)
    family, values = family_of(config), [[] for _ in range(6)]  # type: ignore[var-annotated]
    for i, layer in enumerate(decoder_layers(model, family)):
        layer.get_submodule(family.gate).register_forward_hook(
            lambda _m, _a, gate, i=i: values[i].append(functional.silu(gate).abs().reshape(-1))
        )
    ids = load_tokenizer(swiglu_dir).encode(prose.read_text(encoding="utf-8"))[:512]
    for window in ids.reshape(4, 128).astype(np.int64):
        with torch.inference_mode():
            model(torch.from_numpy(window)[None])
    for found, threshold in zip(values, half.per_layer, strict=True):
        exact = float(np.quantile(torch.cat(found).numpy(), 0.5))
        assert threshold == pytest.approx(exact, rel=0.006)


def test_the_cost_is_that_of_the_thresholded_model(
    half: Thresholds, swiglu_dir: Path, prose: Path
) -> None:
    """Nats per token of both models, loaded again, from their logits."""
    ids = load_tokenizer(swiglu_dir).encode(prose.read_text(encoding="utf-8"))[512:768]

    def nats(thresholds: tuple[float, ...]) -> tuple[float, torch.Tensor]:
        model, _ = load_dense(swiglu_dir, thresholds=thresholds)
        sums, rows = [], []
        for window in ids.reshape(2, 128).astype(np.int64):
            tokens = torch.from_numpy(window)
            with torch.inference_mode():
                logits = model(tokens[None]).logits[0, :-1]
            sums.append(functional.cross_entropy(logits.double(), tokens[1:], reduction="sum"))
            rows.append(logits)
        return float(sum(sums)) / 254, torch.cat(rows)

    dense, theirs = nats((0.0,) * 6)
    ours, logits = nats(half.per_layer)
    cost = half.cost
    assert cost.positions == 254
    assert cost.dense_nats_per_token == pytest.approx(dense, abs=1e-5)
    assert cost.nats_per_token == pytest.approx(ours, abs=1e-5)
    assert cost.max_logit_error == pytest.approx(float((logits - theirs).abs().max()), rel=1e-3)
    assert cost.max_logit_error > 0.01
    assert cost.max_logit_error > cost.rms_logit_error > 0
    assert f"{ours - dense:+.4f} nats" in half.approximate


def test_fewer_neurons_cost_more(swiglu_dir: Path, prose: Path, half: Thresholds) -> None:
    errors = [
        sparsify(
            swiglu_dir, prose, density=density, tokens=512, eval_tokens=256, window=128
        ).cost.rms_logit_error
        for density in (0.9, 0.2)
    ]
    assert 0 < errors[0] < half.cost.rms_logit_error < errors[1]


def test_where_greedy_text_parts(swiglu_dir: Path, prose: Path) -> None:
    """Against both models writing on their own, token after token."""
    found = sparsify(swiglu_dir, prose, density=0.9, tokens=128, eval_tokens=64, window=64)
    ids = load_tokenizer(swiglu_dir).encode(prose.read_text(encoding="utf-8"))[128:160]

    def write(thresholds: tuple[float, ...]) -> list[int]:
        model, _ = load_dense(swiglu_dir, thresholds=thresholds)
        text = torch.from_numpy(ids.astype(np.int64))[None]
        for _ in range(found.cost.greedy_tokens):
            with torch.inference_mode():
                nxt = model(text).logits[0, -1].argmax().reshape(1, 1)
            text = torch.cat([text, nxt], dim=1)
        return text[0, 32:].tolist()

    both = zip(write((0.0,) * 6), write(found.per_layer), strict=True)
    first = next((i for i, (a, b) in enumerate(both) if a != b), None)
    assert first is not None
    assert found.cost.first_greedy_divergence == first


@pytest.mark.parametrize("gating", ["exact", "oracle"])
def test_the_hybrid_ffn_gives_the_thresholded_logits(
    gating: str, half: Thresholds, swiglu_dir: Path, prose: Path
) -> None:
    tokens = load_tokenizer(swiglu_dir).encode(prose.read_text(encoding="utf-8"))[600:648]
    model, _ = load_dense(swiglu_dir, thresholds=half.per_layer)
    plain, _ = load_dense(swiglu_dir, thresholds=(0.0,) * 6)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.inference_mode():
        expected, dense = model(ids).logits[0], plain(ids).logits[0]
    assert (expected - dense).abs().max() > 0.01

    def cache(n_layers: int, n_neurons: int) -> NeuronCache:
        policy = POLICIES["lru"](n_layers, n_neurons)
        return NeuronCache(n_layers, n_neurons, 200, policy, Fixed(), trigger="attn_out")

    with (
        EmulatedDevice() as device,
        load(
            swiglu_dir, cache, device, gating=gating, trigger="attn_out",
            thresholds=half.per_layer,
        ) as runner,
    ):  # fmt: skip
        fed = evaluated = 0
        for _, record in runner.run([tokens], prefill=16):
            fed += record.n_tokens
            if record.phase == "decode":
                evaluated += record.evaluated
            torch.testing.assert_close(runner.logits, expected[fed - 1], rtol=0, atol=5e-5)
        share = evaluated / (32 * 6 * runner.cache.n_neurons)
        assert 0.4 < share < 0.75  # about half of the neurons, and not all of them
        assert runner.cache.totals["loads"] > 0


@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_a_cut_keeps_the_density(density: float, seed: int, scale: float) -> None:
    """Of values spread over several octaves, by their counts alone."""
    values = torch.randn(4000, generator=torch.Generator().manual_seed(seed)).abs() * scale
    counts = torch.bincount(values.view(torch.int32) >> 15, minlength=1 << 16)
    threshold, share = _cut(counts, density)
    assert share == pytest.approx(density, abs=0.01)
    assert float((values >= threshold).float().mean()) == pytest.approx(share, abs=1e-6)


def test_the_reference_of_a_swiglu_model_is_silu_itself(
    swiglu_dir: Path, prose: Path, half: Thresholds, tmp_path: Path
) -> None:
    """Scored by `score`: the dense model without thresholds, and how far they are from it."""
    text = {"tokens": 256, "skip": 512, "window": 128}
    dense = score_dense(swiglu_dir, prose, **text)
    assert dense.nats_per_token == pytest.approx(half.cost.dense_nats_per_token, abs=1e-4)
    half.save(tmp_path / "thresholds.json")
    chosen = Settings(policy="lru", slots=200, thresholds=str(tmp_path / "thresholds.json"))
    run = score(
        swiglu_dir, prose, chosen, device="cpu", against_dense=True, kernels="torch", **text
    )
    assert "approximate" in run.exactness
    assert run.nats_per_token == pytest.approx(half.cost.nats_per_token, abs=0.02)
    assert run.difference is not None
    assert run.difference.rms_logit_error == pytest.approx(half.cost.rms_logit_error, rel=0.05)


def test_histograms_leave_no_hooks(swiglu_dir: Path) -> None:
    model, config = load_dense(swiglu_dir, thresholds=(0.0,) * 6)
    counts = _histograms(model, family_of(config), [torch.arange(7)[None]], lambda _: None)
    assert [int(row.sum()) for row in counts] == [7 * config.intermediate_size] * 6
    model(torch.arange(7)[None])
    assert [int(row.sum()) for row in counts] == [7 * config.intermediate_size] * 6


def test_file_round_trip(half: Thresholds, swiglu_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    half.save(path)
    assert read_thresholds(path, swiglu_dir) == half
    assert half.model_sha256 == model_sha256(swiglu_dir)
    replace(half, model_sha256="0" * 64).save(path)
    assert read_thresholds(path).model_sha256 == "0" * 64
    with pytest.raises(KairoxError, match=r"sha256 000000000000\.\.\..*kairox sparsify"):
        read_thresholds(path, swiglu_dir)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 1 .got 2"),
        ({"per_layer": [0.1, -0.1]}, ">= 0"),
        ({"per_layer": []}, "thresholds must be"),
        ({"per_layer": "0.1"}, "damaged: a list"),
        ({"cost": {}}, "damaged: cost must have the keys"),
        ({"measured_on": None}, "damaged: tokens must have the keys"),
        ({"target_density": "half"}, "damaged"),
        ({"per_layer": [1e300] * 6}, "finite in float32"),
        ({"densities": []}, "damaged: 6 thresholds, 0 densities"),
    ],
)
def test_damaged_files_are_refused(
    change: dict[str, Any], words: str, half: Thresholds, tmp_path: Path
) -> None:
    path = tmp_path / "thresholds.json"
    half.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KairoxError, match=words):
        read_thresholds(path)
    for text in ("[", "[" * 100_000, '{"format": ' + "1" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(KairoxError, match="cannot read thresholds"):
            read_thresholds(path)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("cost", "kl_nats", "x"), ("cost", "positions", 1.5), ("measured_on", "text", 5),
     ("calibrated_on", "stop", True)],
)  # fmt: skip
def test_a_value_of_another_type_is_named(
    part: str, key: str, value: object, half: Thresholds, tmp_path: Path
) -> None:
    path = tmp_path / "thresholds.json"
    half.save(path)
    content = json.loads(path.read_text())
    content[part][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(KairoxError, match=f"is damaged: {key} is {value!r}"):
        read_thresholds(path)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"density": 1.0}, "below 1; got 1.0"),
        ({"density": 0.5, "tokens": 8}, "tokens 8"),
        ({"density": 0.5, "tokens": 10**6}, "fewer tokens"),
        ({"density": 0.5, "tokens": 64, "eval_tokens": 10**6}, "another text to measure on"),
    ],
)
def test_refused(how: dict[str, Any], words: str, swiglu_dir: Path, prose: Path) -> None:
    with pytest.raises(KairoxError, match=words):
        sparsify(swiglu_dir, prose, **how)


def test_models_that_need_no_thresholds_are_refused(tiny_reglu_dir: Path, prose: Path) -> None:
    with pytest.raises(KairoxError, match="exactly zero already: it needs no thresholds"):
        sparsify(tiny_reglu_dir, prose, density=0.5)


def test_tokens_are_not_calibrated_and_measured_on(swiglu_dir: Path, prose: Path) -> None:
    with pytest.raises(KairoxError, match=r"0 to 64 of prose\.txt would be calibrated and"):
        sparsify(swiglu_dir, prose, density=0.5, tokens=64, eval_text=prose, eval_tokens=64)
    a = Tokens("a", "same", 10, 20)
    assert a.overlaps(replace(a, text="copy", start=19, stop=30))
    assert not a.overlaps(replace(a, start=20, stop=30))
    assert not a.overlaps(replace(a, text_sha256="other"))


def test_command(
    swiglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thresholds.json"
    arguments = [
        "sparsify", "--model", str(swiglu_dir), "--text", str(prompts_dir / "prose.txt"),
        "--density", "0.4", "--tokens", "256", "--eval-text", str(prompts_dir / "code.txt"),
        "--eval-tokens", "128", "-o", str(out),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "approximate: SwiGLU by activation thresholds" in shown
    assert "nats per token" in shown
    found = read_thresholds(out, swiglu_dir)
    assert found.target_density == 0.4
    assert found.measured_on.text == "code.txt"
    assert shown.count("\n") == 1 + 6 + 3
    assert shown.endswith(f"{out}: run with --thresholds {out}\n")
    with pytest.raises(SystemExit):
        main([*arguments[:-2], "--json"])
    assert json.loads(capsys.readouterr().out)["densities"] == list(found.densities)

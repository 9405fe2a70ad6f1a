"""kairox train-predictor: learning and judging, from texts and recordings, and all refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kairox_exec import predictor_runs
from kairox_exec.hidden_states import read_hidden_states
from kairox_exec.mlp_predictor import load_predictor
from kairox_exec.predictor_data import Recording, Texts
from kairox_exec.predictor_judging import Judged, LayerQuality, evaluate, require_unseen
from kairox_exec.predictor_runs import judge_on, train_on
from kairox_exec.recording import record
from kairox_sim.cli import app
from kairox_sim.errors import KairoxError
from kairox_sim.trace import read_trace

QUICK: dict[str, Any] = {"rank": 8, "epochs": 1}


def invoke(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error or the error's text)"""
    told = CliRunner().invoke(app, ["train-predictor", *map(str, arguments)])
    wrong = told.exception
    return (
        told.exit_code,
        told.stdout,
        str(wrong) if isinstance(wrong, KairoxError) else told.stderr,
    )


@pytest.fixture(scope="module")
def recording(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """The executor's, of 200 tokens of prose from token 1,000 on."""
    folder = tmp_path_factory.mktemp("recording")
    path = record(
        tiny_reglu_dir, prompts_dir / "prose.txt", folder / "r.arrow", tokens=200, skip=1000,
        prefill=190, hidden=folder / "r.hidden",
    )  # fmt: skip
    return Recording(path, folder / "r.hidden")


@pytest.fixture(scope="module")
def trained(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "p.safetensors"
    train_on(recording, out, **QUICK)
    return out


@pytest.mark.parametrize("trigger", ["attn_out", "attn_in"])
def test_texts_and_a_recording_of_them_are_the_same(
    trigger: str, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    """The plain model's states and neurons are the executor's: float16's last bits apart."""
    text = prompts_dir / "html.txt"
    trace, hidden = Texts(tiny_reglu_dir, (text,), 24, 100).read(trigger)
    path = record(
        tiny_reglu_dir, text, tmp_path / "r.arrow", tokens=24, skip=100, window=24, prefill=12,
        trigger=trigger, hidden=tmp_path / "h",
    )  # fmt: skip
    other, states = read_trace(path), read_hidden_states(tmp_path / "h")
    assert trace.header.sequences == other.header.sequences
    for layer in range(6):
        assert (trace.bits[trace.layer == layer] == other.bits[other.layer == layer]).all()
        mine, theirs = (torch.from_numpy(s.fed_to(layer).copy()) for s in (hidden, states))
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 513])
def test_any_number_of_tokens_is_read(tokens: int, tiny_reglu_dir: Path, prompts_dir: Path) -> None:
    texts = Texts(tiny_reglu_dir, (prompts_dir / "code.txt",), tokens, 7)
    trace, hidden = texts.read()
    assert trace.n_tokens == hidden.n_tokens == tokens
    spans = [(s.token_start, s.token_stop) for s in trace.header.sequences]
    assert (spans[0][0], spans[-1][1]) == (7, 7 + tokens)
    assert all(stop - start <= 256 for start, stop in spans)
    ((_, (_, first, stop)),) = texts.spans()
    assert (first, stop) == (7, 7 + tokens)


@pytest.mark.parametrize(
    ("first", "stop", "refused"),
    [(0, 10, False), (0, 11, True), (12, 13, True), (19, 30, True), (20, 30, False), (5, 40, True)],
)
def test_overlap_is_refused_and_neighbours_are_not(first: int, stop: int, refused: bool) -> None:
    seen = [("a" * 64, 10, 20)]
    require_unseen(seen, [("other", ("b" * 64, 10, 20))])
    if not refused:
        return require_unseen(seen, [("text", ("a" * 64, first, stop))])
    with pytest.raises(KairoxError, match=f"text tokens {first} to {stop}: tokens 10 to 20 of it"):
        require_unseen(seen, [("text", ("a" * 64, first, stop))])
    return None


def test_judged_by_hand(trained: Path, tiny_reglu_dir: Path, prompts_dir: Path) -> None:
    predictor = load_predictor(trained)
    texts = Texts(tiny_reglu_dir, (prompts_dir / "prose.txt", prompts_dir / "code.txt"), 40)
    judged = judge_on(predictor, texts)
    assert (judged.tokens, judged.texts) == (80, ("prose.txt", "code.txt"))
    assert judged.known_texts == ("prose.txt",)  # other tokens of it were learnt from
    assert judged.threads == torch.get_num_threads()
    trace, hidden = texts.read()
    layer = judged.layers[2]
    said = predictor.predict(2, torch.from_numpy(hidden.fed_to(2).copy()))
    bits = torch.from_numpy(trace.bits[trace.layer == 2].copy())
    true = (
        (bits[:, :, None] >> torch.arange(8)).bitwise_and(1).flatten(1).bool()[:, : said.shape[1]]
    )
    both = int((said & true).sum())
    assert layer.recall == both / int(true.sum())
    assert layer.precision == both / int(said.sum())
    assert layer.predicted_share == pytest.approx(said.float().mean().item(), rel=1e-5)
    d, n = trace.header.d_model, trace.header.n_neurons
    assert layer.multiply_adds == 8 * d + n * 8
    assert layer.n_bytes == 2 * (8 * d + 8 + n * 8 + n)
    assert 0 < layer.seconds_per_token < 1


def _layer(recall: float, precision: float, density: float, share: float) -> LayerQuality:
    return LayerQuality(0, 0.95, 0.0, recall, precision, density, share, 1, 1, 1e-6)


def test_all_layers_together_count_neurons() -> None:
    # Of 100 neurons: 10 active, 9 found among 20; 50 active, 25 found among 30; none active.
    rows = _layer(0.9, 0.45, 0.1, 0.2), _layer(0.5, 25 / 30, 0.5, 0.3), _layer(nan, 0, 0, 0.1)
    judged = Judged(rows, 100, ("t",), (), 1)
    assert judged.recall == pytest.approx(34 / 60)
    assert judged.precision == pytest.approx(34 / 60)
    assert len(judged.warnings()) == 1  # the second layer; the first is within 5 points
    assert "by up to 45 points (layers 0)" in judged.warnings()[0]
    poor = Judged((_layer(0.95, 0.11, 0.1, 0.9),), 100, ("t",), (), 1)
    assert "hardly better than guessing" in poor.warnings()[0]
    assert not Judged((_layer(0.95, 0.5, 0.1, 0.2),), 100, ("t",), (), 1).warnings()
    silent = Judged((_layer(nan, nan, 0, 0),), 100, ("t",), (), 1)
    assert isnan(silent.recall)
    assert isnan(silent.precision)
    assert not silent.warnings()


def test_it_learns_and_is_judged_in_one_go(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.safetensors"
    few = ["--tokens", 160, "--skip", 1000, "--eval-tokens", 64, "--epochs", 1, "--rank", 8]
    files = ["--text", prompts_dir / "prose.txt", "--eval-text", prompts_dir / "code.txt"]
    code, told, said = invoke("--model", tiny_reglu_dir, *files, *few, "-o", out, "--json")
    assert code == 0, said
    found = json.loads(told)
    assert (found["rank"], len(found["layers"]), found["trigger"]) == (8, 6, "attn_out")
    assert found["judged_on"]["texts"] == ["code.txt"]
    assert found["judged_on"]["known_texts"] == []
    assert found["layers"][1]["recall_target"] == 0.95
    assert any("hardly better than guessing" in text for text in found["judged_on"]["warnings"])
    assert "warning: precision" in said
    assert load_predictor(out).rank == 8
    code, told, _ = invoke("--model", tiny_reglu_dir, *files[:2], *few, "-o", out, "--force")
    assert code == 0
    assert "other tokens of prose.txt" in told
    assert "us/token (measured)" in told
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_one_that_is_there_is_judged(
    trained: Path, recording: Recording, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    before = trained.read_bytes()
    one = ["--predictor", trained, "--json"]
    math = ["--eval-text", prompts_dir / "math.txt", prompts_dir / "json.txt", "--eval-tokens", 30]
    code, told, said = invoke(*one, "--model", tiny_reglu_dir, *math, "--eval-skip", 5)
    assert code == 0, said
    assert json.loads(told)["judged_on"]["tokens"] == 60
    path = record(
        tiny_reglu_dir, prompts_dir / "math.txt", tmp_path / "m.arrow", tokens=20, prefill=10,
        trigger="attn_in", hidden=tmp_path / "m.hidden",
    )  # fmt: skip
    code, _, said = invoke(*one, "--trace", path, "--hidden", tmp_path / "m.hidden")
    assert code
    assert "holds the states of trigger 'attn_in', not of 'attn_out'" in said
    code, _, said = invoke(*one, "--trace", recording.trace, "--hidden", recording.hidden)
    assert code
    assert "were trained on" in said
    assert trained.read_bytes() == before


def test_what_is_refused_is_refused_before_anything_runs(
    trained: Path, recording: Recording, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.safetensors"
    prose, model = prompts_dir / "prose.txt", ["--model", tiny_reglu_dir]
    text, o = ["--text", prose], ["-o", out]
    pair = ["--trace", recording.trace, "--hidden", recording.hidden]
    for given, says in (
        ([*o], "learn from texts"),
        ([*model, *text], "name the predictor to write"),
        ([*text, *o], "with --model"),
        ([*model, *text, *pair, *o], "learn from texts"),
        ([*pair[:2], *o], "go together"),
        ([*pair, *o, "--tokens", 9, "--eval-skip", 3], "--tokens, --eval-skip"),
        ([*pair, *o, "--trigger", "attn_in"], "not of 'attn_in'"),
        ([*pair, *o, "--trigger", "after"], "unknown trigger 'after'"),
        ([*pair, *o, "--recall", "high"], "recall 'high'"),
        ([*pair, *o, "--recall", "0.9,0.8"], "one for each of the 6"),
        ([*pair, *o, "--epochs", 0], "epochs 0"),
        ([*pair, *o, "--rank", 0], "rank 0"),
        ([*pair, "-o", trained], "exists; name another file"),
        ([*pair, "-o", tmp_path / "no" / "p"], "there is no folder"),
        ([*model, *text, *o, "--skip", 100], "were trained on"),
        ([*model, *text, *o, "--tokens", 10], "10 tokens are too few"),
        ([*model, *text, *o, "--tokens", 0, "--eval-tokens", 0], "tokens must be 1 or more"),
        ([*model, *text, *o, "--eval-skip", 10**6], "give a longer text"),
        ([*model, *text, prose, "--eval-text", prose, *o], "learn from .* or judge on it"),
        (["--predictor", trained], "judge it on texts"),
        (["--predictor", trained, *pair, *o, "--rank", 3], "--out, --rank with --predictor"),
        (["--predictor", trained, *pair, "--eval-tokens", 3], "--eval-tokens with --trace"),
        (["--predictor", tmp_path / "no", *pair], "no predictor"),
        (["--predictor", trained, *model, "--eval-text", prose, "--eval-skip", 1150], "trained on"),
    ):
        code, _, said = invoke(*given)
        assert code, given
        assert re.search(says, said), (given, said)
    assert list(tmp_path.iterdir()) == []


def test_recordings_of_other_models_and_cut_ones(
    trained: Path, recording: Recording, tiny_opt_dir: Path, tmp_path: Path
) -> None:
    other = replace(recording, model_dir=tiny_opt_dir)
    with pytest.raises(KairoxError, match=r"with weights .* has others; record this model"):
        train_on(other, tmp_path / "p", **QUICK)
    trace, hidden = recording.read()
    predictor = load_predictor(trained)
    theirs = replace(predictor, info=replace(predictor.info, model_sha256="0" * 64, seen=()))
    with pytest.raises(KairoxError, match=r"judged on .* read by its own model"):
        evaluate(theirs, trace, hidden)
    asked_before = replace(predictor, info=replace(predictor.info, trigger="attn_in", seen=()))
    with pytest.raises(KairoxError, match=r"trained for trigger 'attn_in'"):
        evaluate(asked_before, trace, hidden)
    for name in ("trace", "hidden"):
        whole: Path = getattr(recording, name)
        cut = tmp_path / name
        shutil.copy(whole, cut)
        os.truncate(cut, whole.stat().st_size * 9 // 10)
        with pytest.raises(KairoxError, match=r"was cut"):
            train_on(replace(recording, **{name: cut}), tmp_path / "p", **QUICK)


def test_what_ctrl_c_left_can_be_learnt_from(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    def stop(done: int, of: int) -> None:
        if done >= 200:
            raise KeyboardInterrupt

    pair = Recording(tmp_path / "t.arrow", tmp_path / "t.hidden")
    with pytest.raises(KeyboardInterrupt):
        record(
            tiny_reglu_dir, prompts_dir / "prose.txt", pair.trace, tokens=256, prefill=190,
            hidden=pair.hidden, progress=stop,
        )  # fmt: skip
    trace, hidden = pair.read()
    assert trace.truncated_at == trace.n_tokens == hidden.n_tokens >= 200
    made, _ = train_on(pair, tmp_path / "p", **QUICK)
    assert [(first, last) for _, first, last in made.info.seen] == [(0, trace.n_tokens)]
    # What was seen of a step that the trace has no more is no state of it.
    first = read_hidden_states(pair.hidden).first(150)
    assert first.n_tokens == 150
    assert {len(rows) for rows in first.states.values()} == {150}


def test_ctrl_c_says_what_there_is(
    recording: Recording, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "p.safetensors"
    told: list[tuple[str, int, int]] = []

    def stop_in_layer_2(what: str, done: int, of: int) -> None:
        told.append((what, done, of))
        if what == "training layer 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="nothing was written"):
        train_on(recording, out, rank=8, epochs=3, progress=stop_in_layer_2)
    assert told == [(f"training layer {i // 3}", i, 18) for i in range(7)]
    assert list(tmp_path.iterdir()) == []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(predictor_runs, "evaluate", interrupted)
    few = ["--model", tiny_reglu_dir, "--eval-text", prompts_dir / "math.txt", "--eval-tokens", 4]
    pair = ["--trace", recording.trace, "--hidden", recording.hidden]
    code, _, said = invoke(*pair, *few, "-o", out, "--epochs", 1)
    assert code == 130
    assert "is whole, and was not judged" in said
    load_predictor(out)

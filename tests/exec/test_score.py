"""Scores by hand and against the dense model; what the hash says; what is refused."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kairox_exec.score import Comparison, Score, Tally, score, score_dense
from kairox_sim.cli import app, main
from kairox_sim.commands.score import print_score
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings

CUT = {"tokens": 40, "prefill": 8, "window": 40}


FOUND = Score(
    setting="lru 50", gating="exact", numerics="fast", weights="q4_0", dtype="bfloat16",
    exactness="exact", tokens=1, nats_per_token=2.0, logits_sha256="", tok_s=1.0, time="measured",
    hardware="cpu, unpaced", prefill=1, window=2,
)  # fmt: skip


def test_nats_and_hash_by_hand() -> None:
    tally = Tally()
    rows = [torch.tensor([0.0, math.log(3.0)]), torch.tensor([1.0, 1.0])]
    tally.add(rows[0], 1)  # 3/4
    tally.add(rows[1], 0)  # 1/2
    assert tally.nats_per_token == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2)) / 2, abs=1e-7)
    data = np.array([[0.0, math.log(3.0)], [1.0, 1.0]], np.float32).tobytes()
    assert tally.logits_sha256 == hashlib.sha256(data).hexdigest()


def test_a_logit_that_is_not_finite_is_no_score() -> None:
    with pytest.raises(KairoxError, match="position 0"):
        Tally().add(torch.tensor([0.0, float("nan")]), 0)


def test_a_comparison_by_hand() -> None:
    compared = Comparison()
    dense = torch.tensor([0.0, math.log(3.0)])
    compared.add(dense, dense, 1)
    compared.add(torch.tensor([math.log(3.0), 0.0]), dense, 1)
    found = compared.result()
    assert found.max_logit_error == pytest.approx(math.log(3.0))
    assert found.rms_logit_error == pytest.approx(math.log(3.0) / math.sqrt(2))
    # KL of (1/4, 3/4) from (3/4, 1/4), at one of two positions
    assert found.kl_nats == pytest.approx(0.5 * (0.25 * math.log(1 / 3) + 0.75 * math.log(3)))
    assert (found.top1_agreement, found.first_divergence) == (0.5, 1)


def test_exact_gating_scores_what_the_dense_model_does(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    text = prompts_dir / "prose.txt"
    plain = score_dense(tiny_reglu_dir, text, **CUT)
    ours = score(tiny_reglu_dir, text, Settings(policy="lru", slots=60), against_dense=True, **CUT)
    assert (plain.tokens, ours.tokens) == (32, 32)
    assert 1.0 < plain.nats_per_token < 6.0  # better than guessing among 1,024: 6.9
    assert ours.nats_per_token == pytest.approx(plain.nats_per_token, abs=1e-5)
    assert ours.difference is not None
    assert ours.difference.dense_nats_per_token == plain.nats_per_token
    assert ours.difference.max_logit_error < 1e-4
    assert ours.difference.first_divergence is None
    assert ours.exactness == "exact"


def test_the_hash_is_one_for_every_placement_under_deterministic_numerics_only(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    def hashes(numerics: str) -> set[str]:
        return {
            score(
                tiny_reglu_dir,
                prompts_dir / "code.txt",
                Settings(numerics=numerics, **chosen),
                **CUT,
            ).logits_sha256
            for chosen in ({"policy": "none"}, {"policy": "lru", "slots": 300}, {"policy": "all"})
        }

    assert len(hashes("deterministic")) == 1
    assert len(hashes("fast")) > 1


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"tokens": 8, "prefill": 8, "window": 40}, "prefill 8 uses up"),
        ({"tokens": 40, "prefill": 0, "window": 40}, "prefill must be 1 or more"),
    ],
)
def test_what_cannot_be_scored(
    tiny_reglu_dir: Path, prompts_dir: Path, cut: dict[str, int], said: str
) -> None:
    with pytest.raises(KairoxError, match=said):
        score(tiny_reglu_dir, prompts_dir / "prose.txt", **cut)


def test_the_command(tiny_reglu_dir: Path, prompts_dir: Path) -> None:
    text = str(prompts_dir / "prose.txt")
    common = ["score", "--model", str(tiny_reglu_dir), "--text", text, "--tokens", "24", "--json"]
    told = CliRunner().invoke(app, [*common, "--policy", "lru", "--slots", "50"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["tokens"] == 23
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    assert len(found["logits_sha256"]) == 64
    assert (found["time"], found["warnings"]) == ("measured", [])


def test_an_emulated_time_is_labelled_and_too_fast_a_pace_is_said(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    found = score(
        tiny_reglu_dir, prompts_dir / "prose.txt", tokens=10, prefill=8, window=10,
        device="emulated", emulate="emu-pc1", time_scale=1e-3,
    )  # fmt: skip
    assert (found.time, found.hardware) == ("emulated", "emu-pc1, slowed 0.001 x")
    assert "took longer than the emulated machine allows" in found.warnings[0]


def test_rows_of_another_format_and_the_machine_stand_beside_a_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_score(FOUND)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "lru 50; gating exact, numerics fast, FFN rows q4_0, rounded from bfloat16; neurons: exact"
    )
    assert lines[1].endswith("1.0 tok/s (measured: cpu, unpaced)")
    print_score(replace(FOUND, weights="bfloat16"))
    assert "rounded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [
        ["--policy", "lru"], ["--slots", "0"], ["--weights", "int8"], ["--vram", "1GiB"],
        ["--numerics", "deterministic"], ["--set", "late=stall"], ["--device", "emulated"],
        ["--emulate", "pc1"], ["--host-threads", "2"], ["--thresholds", "x"], ["--against-dense"],
        ["--settings", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_beside_dense_nothing_is_left_unsaid(
    tiny_reglu_dir: Path, prompts_dir: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["score", "--model", str(tiny_reglu_dir), "--text", str(prompts_dir / "prose.txt")]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--dense", *option])
    assert ended.value.code == 2
    assert f"of which {option[0]} say nothing" in capsys.readouterr().err


def test_a_window_longer_than_the_context_is_refused_dense_too(
    tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    with pytest.raises(KairoxError, match="5000 tokens; the model's context holds 4096"):
        score_dense(tiny_reglu_dir, prompts_dir / "prose.txt", tokens=5000, window=5000)


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    found = replace(FOUND, nats_per_token=1e4)
    assert found.perplexity == math.inf

"""The shipped traces: whole, small, described, of the shipped model and text, and disjoint."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from kairox_sim.trace import Trace, read_trace
from kairox_sim.trace_report import by_domain, predictions
from kairox_sim.trace_stats import overlaps, trace_stats

ROOT = Path(__file__).parents[1]
TRACES = sorted((ROOT / "traces").glob("*.arrow"))
MODEL = ROOT / "experiments" / "models" / "tiny-reglu"
DOMAINS = ["prose", "code", "math", "html", "json"]
LIMIT_BYTES = 1_000_000


@pytest.fixture(scope="module", params=TRACES, ids=lambda path: path.stem)
def trace(request: pytest.FixtureRequest) -> Trace:
    path: Path = request.param
    return read_trace(path, strict=True)


def test_there_are_samples() -> None:
    assert [path.name for path in TRACES] == [
        "tiny-reglu-eval.arrow",
        "tiny-reglu-profile.arrow",
    ]


def test_is_whole_and_small(trace: Trace) -> None:
    assert trace.path is not None
    assert trace.path.stat().st_size < LIMIT_BYTES
    assert trace.header.complete
    assert not trace.header.synthetic
    assert trace.truncated_at is None
    fed = sum(s.token_stop - s.token_start for s in trace.header.sequences)
    assert trace.n_tokens == fed == 1280
    assert len(trace.step) == fed * trace.header.n_layers
    assert 0 < trace.header.recorder_overhead < 1
    assert trace.header.hardware["cpu"]["threads"] >= 1


def test_every_layer_fired_and_was_predicted(trace: Trace) -> None:
    stats = trace_stats(trace)
    assert stats.zero_layers == ()
    assert stats.loop_share < 0.1
    assert (stats.density > 0.01).all()
    assert trace.header.predicted_trigger == "attn_out"
    rows = predictions(trace)
    assert [row.rows for row in rows] == [0, *[trace.n_tokens] * 5]  # nothing precedes layer 0
    assert all(row.recall > 0.4 for row in rows[1:])


def test_has_five_domains_in_sequence(trace: Trace) -> None:
    assert [row.domain for row in by_domain(trace)] == DOMAINS
    assert [row.tokens for row in by_domain(trace)] == [256] * 5
    assert (np.diff(trace.seq.astype(np.int64)) >= 0).all()


def test_is_of_the_shipped_model_and_text(trace: Trace) -> None:
    weights = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    tokenizer = hashlib.sha256((MODEL / "tokenizer.json").read_bytes()).hexdigest()
    trace.header.check_model(model_sha256=weights)
    assert trace.header.tokenizer_sha256 == tokenizer
    for sequence in trace.header.sequences:
        text = ROOT / "experiments" / "prompts" / sequence.source
        assert hashlib.sha256(text.read_bytes()).hexdigest() == sequence.source_sha256


def test_readme_has_a_row_that_says_how_it_was_made(trace: Trace) -> None:
    assert trace.path is not None
    readme = (ROOT / "traces" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith(f"| {trace.path.name} ")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[1:4] == [trace.header.model, trace.header.gating, str(trace.n_tokens)]
    assert float(cells[4].removesuffix(" MB")) == pytest.approx(
        trace.path.stat().st_size / 1e6, abs=0.006
    )
    command = cells[6].strip("`")
    assert command.startswith("kairox record --model experiments/models/tiny-reglu --text ")
    assert command.endswith(f" -o traces/{trace.path.name}")
    skip = re.search(r"--skip (\d+)", command)
    assert skip is not None
    assert {s.token_start for s in trace.header.sequences} == {int(skip.group(1))}
    assert f"{{{','.join(DOMAINS)}}}.txt" in command


def test_profile_shares_no_tokens_with_evaluation() -> None:
    by_name = {path.stem.rpartition("-")[2]: read_trace(path) for path in TRACES}
    assert not overlaps(by_name["profile"], by_name["eval"])
    assert overlaps(by_name["eval"], by_name["eval"])  # the check can say yes

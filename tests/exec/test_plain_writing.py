"""A plain run's bits on their way: packed, handed to the thread, in the file before a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kairox_exec import plain_recording
from kairox_exec.packing import pack_bits, pack_by_products
from kairox_exec.plain_recording import record_plain
from kairox_exec.plain_rows import PassWriter
from kairox_exec.text import Tokenizer
from kairox_sim.trace import Trace, pack, read_trace

PROMPT = "The old house on the hill"


def _ids(tokenizer: Tokenizer) -> torch.Tensor:
    return torch.from_numpy(tokenizer.encode(PROMPT).astype(np.int64))[None]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 3), st.floats(0, 1), st.integers(0, 99))
def test_bits_are_packed_as_in_a_trace(n: int, rows: int, share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random((rows, 2, n)) < share
    for packed in (pack_bits, pack_by_products):
        assert np.array_equal(packed(torch.from_numpy(mask)).numpy(), pack(mask))


@pytest.mark.parametrize(
    ("name", "value"),
    [("PACKED_LATER", 0), ("AT_ONCE", 1), ("AT_ONCE", 1000), ("QUEUED", 1)],
    ids=["each layer at once", "each pass at once", "all passes at once", "a thread behind"],
)
def test_when_bits_are_packed_and_written_changes_none(
    model: Any,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: int,
) -> None:
    """Passes of many shapes: a prompt with padding, its decode steps, and a prompt in one row."""
    ids = _ids(tokenizer).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def recorded(out: Path) -> Trace:
        with record_plain(model, tokenizer, out):
            model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
            model.generate(ids[:1], max_new_tokens=9, do_sample=False)
        return read_trace(out, strict=True)

    before = recorded(tmp_path / "a.arrow")
    monkeypatch.setattr(plain_recording, name, value)
    after = recorded(tmp_path / "b.arrow")
    assert before.n_tokens == 11 + 8 + 8 + 8 + 11 + 8
    for column in ("seq", "step", "token", "layer", "phase", "bits"):
        assert np.array_equal(getattr(before, column), getattr(after, column))


def test_a_gate_that_is_overwritten_later_was_recorded_as_it_was(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for i, overwrites in enumerate((False, True)):
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.ReLU(inplace=overwrites)
        with record_plain(model, tokenizer, tmp_path / f"{i}.arrow"), torch.inference_mode():
            model.generate(_ids(tokenizer), max_new_tokens=5, do_sample=False)
            ids = _ids(tokenizer)
            model(input_ids=ids)
            ids.zero_()
    kept, overwritten = (read_trace(tmp_path / f"{i}.arrow", strict=True) for i in range(2))
    assert np.array_equal(kept.bits, overwritten.bits)
    assert np.array_equal(kept.token, overwritten.token)
    assert overwritten.token[-1] != 0


@pytest.mark.parametrize("held_s", [0.0, 1e9])
def test_few_tokens_do_not_wait_long_to_be_written(
    model: Any,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held_s: float,
) -> None:
    """A model that is slow must not lose minutes to a kill: passes are written by their age too."""
    written: list[int] = []
    write = PassWriter.write

    def counted(self: PassWriter, forwards: Any) -> None:
        write(self, forwards)
        written.append(len(forwards))

    monkeypatch.setattr(PassWriter, "write", counted)
    monkeypatch.setattr(plain_recording, "HELD_S", held_s)
    with record_plain(model, tokenizer, tmp_path / "t.arrow"):
        model.generate(_ids(tokenizer)[:, :5], max_new_tokens=8, do_sample=False)
    assert written == ([1] * 8 + [0] if held_s == 0 else [8])


_SCRIPT = """
import sys
from kairox_exec.plain_run import record_plain_run
record_plain_run(sys.argv[1], sys.argv[2], sys.argv[3], tokens=2000, prefill=0,
                 progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_a_killed_recording_is_readable(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    arguments = [tiny_reglu_dir, prompts_dir / "prose.txt", tmp_path / "killed.arrow"]
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if int(line) >= 300)
        process.kill()  # SIGKILL: nothing gets to clean up
    trace = read_trace(tmp_path / "killed.arrow")
    # The thread may be 3 times 32 tokens behind; it writes as many, and as many are on their way.
    assert 300 - 160 <= trace.n_tokens == trace.truncated_at < 2000
    assert len(trace.step) == 6 * trace.n_tokens

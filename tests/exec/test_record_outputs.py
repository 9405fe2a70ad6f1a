"""`kairox record` writes over nothing that it reads, and each of its files once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kairox_exec import plain_run
from kairox_exec import recording as recording_run
from kairox_exec.hidden_states import HiddenStatesWriter, read_hidden_states
from kairox_sim import cli
from kairox_sim.cli import main
from kairox_sim.trace import read_trace

Capture = pytest.CaptureFixture[str]


def kairox(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("run", ["hybrid", "plain"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "text.txt"], "trace: 'text.txt' is read in this run"),
        (["-o", "model/config.json"], "trace: 'model/config.json' is read"),
        (["-o", "t.arrow", "--hidden", "t.arrow"], "is the file of the trace too"),
        (["-o", "t.arrow", "--hidden", "text.txt"], "hidden states: 'text.txt' is read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_that_is_read_is_written_over(
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    run: str,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(prompts_dir / "prose.txt", "text.txt")
    shutil.copytree(tiny_reglu_dir, "model")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    given = ["--model", "model", "--text", "text.txt", "--tokens", 40, "--run", run, "--force"]
    assert kairox("record", *given, *arguments) == 2
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_call_log_has_a_file_of_its_own(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = ["--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt", "--tokens", 40]
    log = ["--call-log", tmp_path / "x", "--hidden", tmp_path / "x"]
    assert kairox("record", *given, "-o", tmp_path / "t.arrow", *log) == 2
    assert "is the file of the call log too" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_trigger_of_nothing_is_refused(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = ["--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt", "--tokens", 40]
    plain = ["-o", tmp_path / "t.arrow", "--run", "plain", "--trigger", "attn_in"]
    assert kairox("record", *given, *plain) == 2
    assert "give --hidden too" in capsys.readouterr().err


# -- runs that end early --------------------------------------------------------------------------


@pytest.fixture(params=["hybrid", "plain"])
def recording(
    request: pytest.FixtureRequest, tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> list[object]:
    """With hidden states, over a whole recording of 40 tokens with its own."""
    given = ["record", "--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt"]
    given += ["--run", request.param, "-o", tmp_path / "t.arrow", "--hidden", tmp_path / "t.hidden"]
    assert kairox(*given, "--tokens", 40) == 0
    return [*given, "--tokens", 80, "--force"]


def ended_by(error: BaseException, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `error` in the step after so many."""
    steps, whole = iter(range(after)), HiddenStatesWriter.end_step

    def end_step(self: HiddenStatesWriter, record: Any) -> None:
        if next(steps, None) is None:
            raise error
        whole(self, record)

    monkeypatch.setattr(HiddenStatesWriter, "end_step", end_step)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped; the first "),
        (OSError(28, "No space left on device"), 2, "cannot write the recording: No space left"),
    ],
    ids=["interrupt", "full disk"],
)
def test_a_whole_recording_outlives_one_that_was_to_replace_it(
    recording: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    ended_by(error, 5, monkeypatch)
    assert kairox(*recording) == code
    message = capsys.readouterr().err
    assert said in message
    assert {path: path.read_bytes() for path in before} == before
    there = read_trace(tmp_path / "t.arrow.recording")
    assert 0 < there.n_tokens < 80
    assert f"{there.n_tokens} tokens" in message
    assert (tmp_path / "t.hidden.recording").stat().st_size > 0


def test_an_interrupt_before_the_first_step_leaves_nothing_in_the_way(
    recording: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def stopped(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recording_run, "_run", stopped)
        patched.setattr(plain_run, "_forwards", stopped)
        assert kairox(*recording) == 130
    assert "stopped before the first step" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert kairox(*recording) == 0
    assert read_trace(tmp_path / "t.arrow").n_tokens == 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.arrow", "t.hidden"]
    assert read_hidden_states(tmp_path / "t.hidden").header.sequences[0].token_stop == 80


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs")
def test_a_pipe_is_not_replaced(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = ["--model", tiny_reglu_dir, "--text", prompts_dir / "prose.txt", "--tokens", 40]
    for run in ("hybrid", "plain"):
        assert kairox("record", *given, "-o", tmp_path / "pipe", "--force", "--run", run) == 2
        assert "is a device or a pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_without_a_name_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(**given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "app", full)
    assert kairox("models") == 2
    assert capsys.readouterr().err.startswith("kairox: cannot write: No space left on device")

"""`kairox record` writes over nothing that it reads, and each of its files once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kairox_sim.cli import main

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

"""What a user is told while a model is loaded, and of its bundles when it is."""

from __future__ import annotations

import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from kairox_exec import bundle_cache, checkpoint, loading
from kairox_exec.live import HostSide, load
from kairox_exec.loading import load_bundled
from kairox_sim.cli import main
from kairox_sim.commands.live_options import host_side, loading_bar
from tests.exec.tiny_families import save_tiny

Capture = pytest.CaptureFixture[str]
Call = tuple[str, int, int]

HASH, MAKE = "hashing the weights, MB", "making bundles, layers"
SUM, KEEP = "summing bundles, MB", "keeping bundles, MB"
CHECK, REST = "checking kept bundles, MB", "reading the rest, tensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


def stages(calls: list[Call]) -> dict[str, int]:
    """Each thing that was done, in order, and how much there was of it."""
    found = {}
    for what, told in groupby(calls, lambda call: call[0]):
        steps = [call[1:] for call in told]
        done, (total,) = [step[0] for step in steps], {step[1] for step in steps}
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, total)
        assert what not in found
        found[what] = total
    return found


def loaded_stages(model_dir: Path, **how: Any) -> dict[str, int]:
    calls: list[Call] = []
    load_bundled(model_dir, on_progress=lambda *call: calls.append(call), **how)
    return stages(calls)


def test_everything_that_takes_time_is_told(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing to all of it; numbers of bytes are those of the files."""
    monkeypatch.setattr(checkpoint, "_MB", 1)
    folder = tmp_path / "cache"
    first = loaded_stages(model_dir, cache_dir=folder)
    assert list(first) == [HASH, MAKE, SUM, KEEP, REST]
    assert first[HASH] == (model_dir / "model.safetensors").stat().st_size
    assert first[MAKE] == 3
    (entry,) = bundle_cache.entries(folder)
    assert first[KEEP] == entry.n_bytes
    second = loaded_stages(model_dir, cache_dir=folder)
    assert list(second) == [CHECK, REST]
    assert second[CHECK] == first[SUM] > 0.9 * (first[KEEP] - 4096 * 18)  # but for padding
    assert list(loaded_stages(model_dir, cache_dir="off")) == [MAKE, REST]
    content = bytearray(entry.path.read_bytes())
    content[-5000] ^= 1
    entry.path.write_bytes(content)
    with pytest.warns(UserWarning, match="its bytes have changed"):
        assert list(loaded_stages(model_dir, cache_dir=folder)) == [CHECK, MAKE, SUM, KEEP, REST]


def test_megabytes_are_whole() -> None:
    calls: list[Call] = []
    add = checkpoint.count_bytes(lambda *call: calls.append(call), "reading", 2_500_000)
    add(1_999_999)
    add(500_001)
    assert calls == [("reading, MB", 0, 2), ("reading, MB", 1, 2), ("reading, MB", 2, 2)]
    checkpoint.count_bytes(None, "reading", 1)(1)  # nobody is told


def test_a_large_model_says_once_where_its_rows_come_from(
    tiny_reglu_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    calls: list[Call] = []

    def start(cache_dir: str | Path) -> str:
        said.clear()
        calls.clear()
        host = HostSide(
            cache_dir=cache_dir, on_load=lambda *call: calls.append(call), on_loaded=said.append
        )
        load(tiny_reglu_dir, device="cpu", host=host).device.close()
        assert "compiling kernels" in stages(calls)
        return " | ".join(said)

    folder = tmp_path / "cache"
    assert start(folder) == ""  # small
    shutil.rmtree(folder)
    monkeypatch.setattr(loading, "WORTH_KEEPING_BYTES", 1)
    rows = r"FFN rows, 0\.01 GB, are"
    assert re.fullmatch(rf"{rows} kept in {re.escape(str(folder))} for the next .*", start(folder))
    assert re.fullmatch(rf"{rows} mapped from {re.escape(str(folder))}", start(folder))
    assert re.fullmatch(rf"{rows} made at every start.*\(off\)", start("off"))
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="are not kept in"):
        assert start(tmp_path / "file" / "cache") == ""  # said by the warning


def test_a_bar_shows_one_thing_after_another() -> None:
    bar = Progress(disable=True)
    show = loading_bar(bar, bar.add_task("loading", total=None))
    (task,) = bar.tasks
    for what in ("hashing, MB", "checking, MB"):  # of one size, as often
        show(what, 0, 4)
        assert (task.description, task.completed, task.total) == (what, 0, 4)
        assert not task.finished
        show(what, 3, 4)
        assert task.completed == 3
        show(what, 4, 4)
        assert task.finished


def test_commands_say_it_on_standard_error(capsys: Capture) -> None:
    host = host_side(1, 0, "auto", None)
    assert host.on_loaded is not None
    host.on_loaded("a line")
    assert capsys.readouterr() == ("", "a line\n")


@pytest.mark.parametrize("command", ["generate", "score", "record"])
def test_a_bar_on_a_terminal_leaves_the_output_alone(
    command: str,
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Standard error gets bar and notice, standard output is as without them."""
    monkeypatch.setattr(loading, "WORTH_KEEPING_BYTES", 1)
    text = ["--text", prompts_dir / "prose.txt", "--tokens", 12]
    arguments = {
        "generate": ["--prompt", "The old", "--max-new-tokens", 6],
        "score": text,
        "record": [*text, "--prefill", 4, "-o", tmp_path / "a.arrow", "--force"],
    }[command]
    run = [command, "--model", tiny_reglu_dir, "--device", "cpu", *arguments]
    outputs = {}
    for forced in (False, True):
        if forced:
            monkeypatch.setenv("FORCE_COLOR", "1")
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in [*run, "--cache-dir", tmp_path / "cache"]])
        assert not ended.value.code
        outputs[forced] = capsys.readouterr()
    for what in ("checking kept bundles, MB", "reading the rest, tensors", "compiling kernels"):
        assert what in outputs[True].err
        assert what not in outputs[False].err + outputs[True].out
    for told in outputs.values():
        assert told.err.count("FFN rows, ") == 1
        assert "FFN rows, " not in told.out
    if command == "generate":
        first = [told.out.splitlines()[0] for told in outputs.values()]
        assert first[0] == first[1] != ""

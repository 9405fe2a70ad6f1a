"""`kairox bundles`: what is kept, what is wrong with it, what is removed and what is not."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kairox_exec import bundle_cache
from kairox_exec.loading import load_bundled
from kairox_sim.cli import main
from tests.exec.tiny_families import save_tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, root / name) for name in ("llama", "opt")}


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    """Two entries of llama, one of opt, and a file of somebody else whose name is like ours."""
    folder = tmp_path / "kept"
    load_bundled(models["llama"], cache_dir=folder)
    load_bundled(models["llama"], fmt="int8", gating="oracle", cache_dir=folder)
    load_bundled(models["opt"], cache_dir=folder)
    for name in ("film.mkv.part", "other.sha256.json", "mine.bundles.safetensors"):
        (folder / name).write_text("somebody else's")
    return folder


def kairox(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert (ended.value.code or 0) == code


def listed(folder: Path, capsys: Capture, *more: object) -> dict[str, Any]:
    kairox("bundles", "--cache-dir", folder, "--json", *more)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_kept(folder: Path, models: dict[str, Path], capsys: Capture) -> None:
    found = listed(folder, capsys)
    rows = found["entries"]
    assert {(r["model"], r["gating"], r["format"]) for r in rows} == {
        ("llama", "exact", "float32"), ("llama", "oracle", "int8"), ("opt", "exact", "float32"),
    }  # fmt: skip
    assert [r["problem"] for r in rows] == [None] * 3
    assert [r["bytes"] for r in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    assert found["total_bytes"] == sum(Path(r["path"]).stat().st_size for r in rows)
    assert all(0 <= time.time() - r["modified_s"] < 600 for r in rows)
    config = json.loads((models["llama"] / "config.json").read_text())
    shape = (config["num_hidden_layers"], config["intermediate_size"])
    assert {(r["n_layers"], r["n_neurons"]) for r in rows if r["model"] == "llama"} == {shape}
    assert len(listed(folder, capsys, "--model", "opt")["entries"]) == 1


def test_the_table(folder: Path, capsys: Capture) -> None:
    for entry, age_s in zip(bundle_cache.entries(folder), (90, 7300, 3 * 86400), strict=True):
        os.utime(entry.path, (time.time() - age_s,) * 2)
    kairox("bundles", "--cache-dir", folder)
    shown = capsys.readouterr().out
    for words in ("llama", "oracle", "int8", "3 x 96", "2 min", "2 h", "3 d", "whole", "MB"):
        assert words in shown
    assert "somebody" not in shown


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), r"damaged: it has \d+ bytes instead of"),
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "unreadable: it is cut in its header"),
        (lambda p: p.write_bytes(b""), "unreadable"),
        (lambda p: p.write_bytes(b"\xff" * 9000), "unreadable: it is cut in its header, or"),
        (lambda p: p.write_bytes(b"\x08" + bytes(7) + b"not json" * 9), "unreadable"),
        (lambda p: p.write_bytes(b"\x02" + bytes(7) + b"{}" * 9), "unreadable"),
    ],
)
def test_damage_is_said(damage: Any, problem: str, folder: Path, capsys: Capture) -> None:
    path = bundle_cache.entries(folder)[0].path
    damage(path)
    (row,) = (r for r in listed(folder, capsys)["entries"] if r["path"] == str(path))
    assert re.match(problem, row["problem"])
    assert row["bytes"] == path.stat().st_size
    kairox("bundles", "--cache-dir", folder)
    assert problem.partition(":")[0] in capsys.readouterr().out


def test_an_entry_that_no_run_will_read(folder: Path, capsys: Capture) -> None:
    """Renamed by hand, of another version, or never finished."""
    first, second, third = bundle_cache.entries(folder)
    assert first.key is not None
    assert second.key is not None
    other = first.path.with_name(replace(first.key, model_sha256="0" * 64).file_name)
    first.path.rename(other)
    older = replace(second.key, version=0)
    text = second.path.read_bytes().replace(rb"\"version\": 1", rb"\"version\": 0")
    second.path.unlink()
    second.path.with_name(older.file_name).write_bytes(text)
    third.path.rename(third.path.with_name(third.path.name + ".k3_x.part"))
    said = {row["bytes"]: row["problem"] for row in listed(folder, capsys)["entries"]}
    assert "of something else than its name says" in said[first.n_bytes]
    assert said[second.n_bytes] == "of another version of this program"
    assert said[third.n_bytes].startswith("unfinished")


def test_clearing(folder: Path, models: dict[str, Path], capsys: Capture) -> None:
    """Only what a run has put there, whose bytes are counted; the next start makes it again."""
    part = bundle_cache.entries(folder)[0].path
    part.rename(part.with_name(part.name + ".abc.part"))
    theirs = {"film.mkv.part", "other.sha256.json", "mine.bundles.safetensors"}
    before = sum(p.stat().st_size for p in folder.iterdir() if p.name not in theirs)
    kairox("bundles", "--cache-dir", folder, "--clear")
    assert capsys.readouterr().out == f"removed {before:,} bytes from {folder}\n"
    assert names(folder) == theirs
    assert not load_bundled(models["opt"], cache_dir=folder).from_cache
    assert listed(folder, capsys, "--clear")["removed_bytes"] > 0
    assert listed(folder, capsys) == {"folder": str(folder), "entries": [], "total_bytes": 0}
    kairox("bundles", "--cache-dir", folder)
    assert capsys.readouterr().out == f"nothing is kept in {folder}\n"


def test_clearing_one_model(folder: Path, models: dict[str, Path], capsys: Capture) -> None:
    of_llama = listed(folder, capsys, "--model", "llama")["total_bytes"]
    assert listed(folder, capsys, "--model", "llama", "--clear")["removed_bytes"] == of_llama
    (left,) = listed(folder, capsys)["entries"]
    assert left["model"] == "opt"
    assert load_bundled(models["opt"], cache_dir=folder).from_cache
    kairox("bundles", "--cache-dir", folder, "--model", "llama", "--clear", code=2)
    assert "nothing of model 'llama' is kept in" in (said := capsys.readouterr().err)
    assert said.endswith("there is of: opt\n")


def test_folders_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Named by the user it is a mistake; the platform's own is not there before the first run."""
    (tmp_path / "file").write_text("")
    for named in ("nowhere", "file"):
        kairox("bundles", "--cache-dir", tmp_path / named, code=2)
        assert f"{named}' is no folder" in capsys.readouterr().err
    monkeypatch.setattr(bundle_cache, "default_folder", lambda: tmp_path / "own")
    kairox("bundles")
    said = capsys.readouterr().out
    assert said.startswith(f"nothing is kept in {tmp_path / 'own'} (rows of less than 256 MB")
    kairox("bundles", "--model", "opt", code=2)
    assert capsys.readouterr().err.endswith(
        "is kept in {}, nor of any other\n".format(tmp_path / "own")
    )
    kairox("bundles", "--clear")
    assert capsys.readouterr().out.startswith("removed 0 bytes")
    assert not (tmp_path / "own").exists()

"""Bundles on disk: the second start, and every way in which a kept file can be wrong."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kairox_exec import bundle_cache, checkpoint, loading
from kairox_exec.loading import Loaded, load_bundled
from kairox_sim.errors import KairoxError
from tests.exec.test_loading import same_bundles
from tests.exec.tiny_families import save_tiny

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")  # with biases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def kept(model_dir: Path, folder: Path) -> Path:
    """The entry of a first start."""
    assert not load_bundled(model_dir, cache_dir=folder).from_cache
    (path,) = folder.glob(f"*{bundle_cache.SUFFIX}")
    return path


def plain(model_dir: Path, **how: Any) -> Loaded:
    return load_bundled(model_dir, cache_dir="off", **how)


@pytest.mark.parametrize("fmt", ["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"])
@pytest.mark.parametrize("gating", ["exact", "oracle", "screened", "predicted"])
def test_the_second_start_maps_the_same_bytes(
    gating: str, fmt: Any, model_dir: Path, folder: Path
) -> None:
    how = {"gating": gating, "fmt": fmt}
    first = load_bundled(model_dir, cache_dir=folder, **how)
    second = load_bundled(model_dir, cache_dir=folder, **how)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.cache == second.cache == str(folder)
    same_bundles(second.bundles, first.bundles)
    same_bundles(second.bundles, plain(model_dir, **how).bundles)
    for b in second.bundles:
        assert b.rows.data_ptr() % 4096 == 0  # mapped, from a whole page on
        assert b.rows.is_contiguous()
        assert (b.gate_w.data_ptr() == b.rows.data_ptr()) == (gating != "exact")


def test_what_is_computed_with_the_rows_is_not_of_the_file(model_dir: Path, folder: Path) -> None:
    load_bundled(model_dir, cache_dir=folder)
    again = load_bundled(
        model_dir, cache_dir=folder, fatrelu_threshold=0.25, numerics="deterministic"
    )
    assert again.from_cache
    assert again.bundles[0].spec.threshold == 0.25
    assert again.bundles[0].spec.numerics == "deterministic"


def test_an_entry_is_a_safetensors_file(kept: Path, model_dir: Path) -> None:
    bundles = plain(model_dir).bundles
    with safe_open(kept, framework="pt") as file:
        assert torch.equal(file.get_tensor("layer.2.rows"), bundles[2].rows)
        assert torch.equal(file.get_tensor("layer.0.gate_b"), bundles[0].gate_b)


def test_mapped_bundles_may_be_written_to(kept: Path, model_dir: Path, folder: Path) -> None:
    before = kept.read_bytes()
    loaded = load_bundled(model_dir, cache_dir=folder)
    loaded.bundles[0].rows.fill_(7.0)
    assert bool((loaded.bundles[0].rows == 7.0).all())
    assert kept.read_bytes() == before


def damaged(change: str, path: Path) -> None:
    content = bytearray(path.read_bytes())
    where = {"first data": 4096 + 5, "last data": len(content) - 4096 - 50, "header": 300}
    match change:
        case "empty":
            content = bytearray()
        case "cut in the header":
            content = content[:1000]
        case "cut in the data":
            content = content[:-4096]
        case "longer":
            content += b"more"
        case "a page of zeros":
            content[8192:12288] = bytes(4096)
        case "pages swapped":
            content[4096:8192], content[8192:12288] = content[8192:12288], content[4096:8192]
        case "not ours":
            save_file({"x": torch.zeros(4)}, path)
            return
        case _:
            content[where[change]] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    ["empty", "cut in the header", "cut in the data", "longer", "a page of zeros",
     "pages swapped", "not ours", "first data", "last data", "header"],
)  # fmt: skip
def test_a_damaged_entry_is_made_again(
    change: str, kept: Path, model_dir: Path, folder: Path
) -> None:
    damaged(change, kept)
    with pytest.warns(UserWarning, match=r"is damaged .*made again"):
        loaded = load_bundled(model_dir, cache_dir=folder)
    assert not loaded.from_cache
    same_bundles(loaded.bundles, plain(model_dir).bundles)
    assert load_bundled(model_dir, cache_dir=folder).from_cache


def test_an_entry_under_another_name_is_not_taken(
    kept: Path, model_dir: Path, folder: Path
) -> None:
    load_bundled(model_dir, gating="oracle", cache_dir=folder)
    (other,) = folder.glob(f"oracle*{bundle_cache.SUFFIX}")
    shutil.copy(kept, other)
    with pytest.warns(UserWarning, match="something else than its name says"):
        loaded = load_bundled(model_dir, gating="oracle", cache_dir=folder)
    same_bundles(loaded.bundles, plain(model_dir, gating="oracle").bundles)


def test_other_weights_are_another_entry(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    load_bundled(directory, cache_dir=folder)
    tensors = load_file(directory / FILE)
    tensors["model.layers.0.mlp.up_proj.weight"][5, 5] += 1
    save_file(tensors, directory / FILE, metadata={"format": "pt"})  # the same size
    loaded = load_bundled(directory, cache_dir=folder)
    assert not loaded.from_cache
    same_bundles(loaded.bundles, plain(directory).bundles)
    assert len(bundle_cache.entries(folder)) == 2


def test_the_second_start_does_not_hash(
    model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    hashed: list[Path] = []

    def counted(given: Path, tell: Any) -> str:
        hashed.append(given)
        return checkpoint.model_sha256(given)

    monkeypatch.setattr(bundle_cache, "model_sha256", counted)
    load_bundled(directory, cache_dir=folder)
    load_bundled(directory, cache_dir=folder)
    load_bundled(directory, fmt="int8", cache_dir=folder)
    assert len(hashed) == 1
    later = (directory / FILE).stat().st_mtime_ns + 10**9
    os.utime(directory / FILE, ns=(later, later))
    assert load_bundled(directory, cache_dir=folder).from_cache  # its bytes are the same
    assert len(hashed) == 2
    for memo in folder.glob("*.sha256.json"):
        memo.write_text("{")
    assert load_bundled(directory, cache_dir=folder).from_cache
    assert len(hashed) == 3
    assert bundle_cache.sha256_of(directory, folder) == checkpoint.model_sha256(directory)


def test_the_ffn_is_not_read_again(
    kept: Path, model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_read_ffn", None)
    assert load_bundled(model_dir, cache_dir=folder).from_cache


def test_damage_to_the_rest_is_seen_on_a_second_start(
    model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    load_bundled(directory, cache_dir=folder)
    stamp = (directory / FILE).stat()
    tensors = load_file(directory / FILE)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    os.utime(directory / FILE, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(KairoxError, match=r"model\.norm\.weight holds 1 NaN"):
        load_bundled(directory, cache_dir=folder)


def test_a_killed_writer_leaves_nothing_that_is_read(
    kept: Path, model_dir: Path, folder: Path
) -> None:
    """Its part has another name; a later start removes it once it is a day old."""
    part = kept.rename(kept.with_name(kept.name + ".abc.part"))
    part.write_bytes(part.read_bytes()[:9000])
    assert not load_bundled(model_dir, cache_dir=folder).from_cache
    assert part.exists()  # its writer may be at work
    kept.unlink()
    old = time.time() - 2 * 24 * 3600
    os.utime(part, (old, old))
    assert not load_bundled(model_dir, cache_dir=folder).from_cache
    assert not part.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_writer_removes_its_part(
    error: type[BaseException], model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(header: bytes, tensors: Any) -> Any:
        yield header
        raise error

    monkeypatch.setattr(bundle_cache, "_pieces", interrupted)
    with pytest.raises(error):
        load_bundled(model_dir, cache_dir=folder)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_disk_that_is_full(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.warns(UserWarning, match=r"not kept .* GB are free.*\"off\""):
        loaded = load_bundled(model_dir, cache_dir=folder)
    assert "are free" in loaded.cache
    same_bundles(loaded.bundles, plain(model_dir).bundles)
    assert not bundle_cache.entries(folder)


def test_a_disk_that_fills_while_writing(model_dir: Path, folder: Path) -> None:
    """The kernel's own refusal, by a limit on the size of files."""
    resource = pytest.importorskip("resource")
    folder.mkdir()
    bundle_cache.sha256_of(model_dir, folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.warns(UserWarning, match="not kept in"):
            loaded = load_bundled(model_dir, cache_dir=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same_bundles(loaded.bundles, plain(model_dir).bundles)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_folder_that_cannot_be_made(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="not kept in"):
        loaded = load_bundled(model_dir, cache_dir=tmp_path / "file" / "cache")
    assert not loaded.from_cache


def test_concurrent_starts(model_dir: Path, folder: Path) -> None:
    """All write the same entry and read it while others replace it."""
    expected = plain(model_dir).bundles
    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(load_bundled, model_dir, cache_dir=folder) for _ in range(12)]
        for start in starts:
            same_bundles(start.result().bundles, expected)
    assert load_bundled(model_dir, cache_dir=folder).from_cache
    assert len([*folder.iterdir()]) == 2  # the entry and the hash


def test_seeing_and_clearing(kept: Path, model_dir: Path, folder: Path) -> None:
    load_bundled(model_dir, fmt="int8", cache_dir=folder)
    first, second = bundle_cache.entries(folder)
    assert (first.path, first.n_bytes, first.model) == (kept, kept.stat().st_size, "llama")
    assert first.key is not None
    assert second.key is not None
    assert (first.key.fmt, second.key.fmt) == ("float32", "int8")
    damaged("cut in the header", kept)
    assert [entry.key is None for entry in bundle_cache.entries(folder)] == [False, True]
    (folder / "of-somebody-else.txt").write_text("mine")
    in_use = load_bundled(model_dir, fmt="int8", cache_dir=folder)
    assert bundle_cache.clear(folder) > second.n_bytes
    assert [path.name for path in folder.iterdir()] == ["of-somebody-else.txt"]
    same_bundles(in_use.bundles, plain(model_dir, fmt="int8").bundles)
    assert bundle_cache.entries(folder / "nowhere") == []
    assert bundle_cache.clear(folder / "nowhere") == 0


def test_small_models_are_kept_only_where_a_folder_is_given(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_cache, "default_folder", lambda: tmp_path / "own")
    assert "made faster than kept" in load_bundled(model_dir).cache
    assert not (tmp_path / "own").exists()
    monkeypatch.setattr(loading, "WORTH_KEEPING_BYTES", 1)
    assert load_bundled(model_dir).cache == str(tmp_path / "own")
    assert load_bundled(model_dir).from_cache


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "given/kairox/bundles"),
        ("linux", None, "home/.cache/kairox/bundles"),
        ("darwin", None, "home/Library/Caches/kairox/bundles"),
        ("win32", "LOCALAPPDATA", "given/kairox/bundles"),
        ("win32", None, "home/AppData/Local/kairox/bundles"),
    ],
)
def test_the_folder_of_each_platform(
    platform: str, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "given")
    assert bundle_cache.default_folder() == Path(expected)

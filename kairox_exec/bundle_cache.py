"""Bundles on disk, so that a model's second start maps them instead of making them.

An entry is one safetensors file (any reader of that format opens it) whose tensors begin at whole
pages; its name and header say which weights, gating and row format it is of. It is written under
another name and renamed, so that what has its name is whole, and read back against a checksum, so
that what has changed since is made again. Nothing here depends on activation, thresholds or
numerics: bundles hold rows, and what is computed with them is said by their `spec`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import torch

from kairox_exec.checkpoint import (
    Progress,
    count_bytes,
    model_sha256,
    remember_sha256,
    stamps_of,
)
from kairox_exec.families import Family
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.formats import storage_dtype
from kairox_exec.kernels.screening import Screen
from kairox_exec.weights import NeuronBundles, row_names
from kairox_sim.errors import KairoxError

VERSION = 1  # of what is in an entry; a change of `encode` or `make_screen` needs the next
SUFFIX = ".bundles.safetensors"
_PART = ".part"
_OURS = re.compile(
    rf"((?P<entry>[a-z]+-\w+-[0-9a-f]{{24}}{re.escape(SUFFIX)})|[0-9a-f]{{24}}\.sha256\.json)"
    rf"(?P<part>\.\w+{re.escape(_PART)})?"
)
_PART_S = 24 * 3600.0  # a part older than this was left by a killed writer
_PAGE = 4096
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
_AT_ONCE = 64 * 2**20  # bytes summed at once; whole pages
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8,
    "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What an entry is of; what differs in any of it is another entry."""

    model_sha256: str
    gating: str
    fmt: str
    n_layers: int
    n_neurons: int
    d_model: int
    version: int = VERSION

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.gating}-{self.fmt}-{digest[:24]}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache, for those who look at it. Its numbers are checked when it is read."""

    path: Path
    n_bytes: int
    modified_s: float  # since 1970
    model: str  # the name of the directory that it was made from; "" where it cannot be read
    key: Key | None
    problem: str  # why no run will read it; "" where one will


def default_folder() -> Path:
    """Where this platform keeps what may be deleted at any time."""
    home = Path.home()
    match sys.platform:
        case "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
        case "darwin":
            base = home / "Library" / "Caches"
        case _:
            base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "kairox" / "bundles"


def sha256_of(model_dir: str | Path, folder: Path, tell: Progress | None = None) -> str:
    """`model_sha256`, remembered in `folder` while names, sizes and times of the files stay."""
    directory = Path(model_dir).resolve()
    stamps = stamps_of(directory)
    place = hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]
    memo = folder / f"{place}.sha256.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_text("utf-8"))
        if tuple(tuple(file) for file in known["files"]) == stamps:
            return remember_sha256(stamps, str(known["sha256"]))
    digest = model_sha256(directory, tell)
    content = {"files": stamps, "sha256": digest}
    with suppress(OSError):  # the next start hashes again
        folder.mkdir(parents=True, exist_ok=True)
        _replace(memo, [json.dumps(content).encode()], lambda n_bytes: None)
    return digest


def read(
    folder: Path, key: Key, family: Family, specs: Sequence[FfnSpec], tell: Progress | None = None
) -> list[NeuronBundles] | None:
    """The bundles of `key`, mapped; None where there are none. specs: one a layer.

    An entry that is damaged is removed with a warning. The memory may be written to without
    reaching the file.
    """
    path = folder / key.file_name
    if not path.is_file():
        return None
    try:
        tensors = _map(path, key, tell)
        return [
            _layer(tensors, layer, key.gating, family, spec) for layer, spec in enumerate(specs)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        warnings.warn(f"{path} is damaged ({error}); it is made again", stacklevel=2)
        with suppress(OSError):
            path.unlink()
        return None


def write(
    folder: Path,
    key: Key,
    bundles: Sequence[NeuronBundles],
    model: str,
    tell: Progress | None = None,
) -> str:
    """Keep the bundles. Returns "", or why they were not kept, which has been warned of."""
    path = folder / key.file_name
    tensors = dict(_tensors_of(bundles))
    header, n_bytes = _header(tensors, key, model, tell)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_parts(folder)
        free = shutil.disk_usage(folder).free
        if n_bytes > free:
            raise OSError(f"{n_bytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
        _replace(path, _pieces(header, tensors), count_bytes(tell, "keeping bundles", n_bytes))
    except OSError as error:
        why = f"bundles are not kept in {folder}: {error.strerror or error}"
        warnings.warn(
            f"{why}; the next start makes them again. Free some space, choose another cache_dir, "
            'or "off"',
            stacklevel=2,
        )
        return why
    return ""


def entries(folder: Path) -> list[Entry]:
    """What is kept, and what became of it, the largest first."""
    found = []
    for path, name in _ours(folder):
        if name["entry"]:
            with suppress(FileNotFoundError):  # another process may clear
                found.append(_entry(path, unfinished=name["part"] is not None))
    return sorted(found, key=lambda entry: (-entry.n_bytes, entry.path))


def clear(folder: Path, model: str | None = None) -> int:
    """Remove all that this module put there; returns the bytes. Runs that have mapped go on.

    model: the entries of this model only, by the name of its directory.
    """
    if model is None:
        paths = [path for path, _ in _ours(folder)]
    else:
        paths = [entry.path for entry in entries(folder) if entry.model == model]
    n_bytes = 0
    for path in paths:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:  # another process clears, too
            continue
        except OSError as error:  # Windows: while a run has it mapped
            raise KairoxError(f"cannot remove {path}: {error.strerror}; end its runs") from error
        n_bytes += size
    return n_bytes


def _ours(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """What has a name that this module gives: the folder may hold others' files, too."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _OURS.fullmatch(path.name)
        if name is not None:
            yield path, name


def _entry(path: Path, *, unfinished: bool) -> Entry:
    status = path.stat()
    model, key = "", None
    try:
        places, said, start = _open(path)
        model, key = str(said["model"]), Key(**said["key"])
        wanted = _size(places, start)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"unreadable: {error}"
    else:
        if key.version != VERSION:
            problem = "of another version of this program"
        elif key.file_name != path.name and not unfinished:
            problem = "damaged: it is of something else than its name says"
        elif status.st_size != wanted and not unfinished:
            problem = f"damaged: it has {status.st_size} bytes instead of {wanted}"
        else:
            problem = ""
    if unfinished:
        problem = "unfinished: it is being written, or its run was killed"
    return Entry(path, status.st_size, status.st_mtime, model, key, problem)


# -- one file ---------------------------------------------------------------------------------


def _tensors_of(bundles: Sequence[NeuronBundles]) -> Iterator[tuple[str, torch.Tensor]]:
    for b in bundles:
        parts = {"rows": b.rows, "gate_b": b.gate_b, "up_b": b.up_b, "down_b": b.down_b}
        if b.gating == "exact":  # else a view of the rows
            parts["gate_w"] = b.gate_w
        if b.screen is not None:
            parts |= {
                "codes": b.screen.codes, "scale": b.screen.scale, "error": b.screen.error,
            }  # fmt: skip
        for name, tensor in parts.items():
            if tensor is not None:
                yield f"layer.{b.layer}.{name}", tensor


def _layer(
    tensors: Mapping[str, torch.Tensor], layer: int, gating: str, family: Family, spec: FfnSpec
) -> NeuronBundles:
    def part(name: str) -> torch.Tensor | None:
        return tensors.get(f"layer.{layer}.{name}")

    names = row_names(family, gating)
    rows = tensors[f"layer.{layer}.rows"]
    if rows.shape[1:] != (len(names), spec.width) or rows.dtype != storage_dtype(spec.fmt):
        raise ValueError(f"rows of layer {layer} are {tuple(rows.shape)} of {rows.dtype}")
    screen = None
    if gating == "screened":
        screen = Screen(*(tensors[f"layer.{layer}.{name}"] for name in ("codes", "scale", "error")))
    return NeuronBundles(
        layer=layer,
        gating=gating,
        spec=spec,
        row_names=names,
        rows=rows,
        gate_w=tensors[f"layer.{layer}.gate_w"] if gating == "exact" else rows[:, 0],
        gate_b=part("gate_b"),
        up_b=part("up_b"),
        down_b=part("down_b"),
        screen=screen,
    )


def _header(
    tensors: Mapping[str, torch.Tensor], key: Key, model: str, tell: Progress | None
) -> tuple[bytes, int]:
    """The header, filled up to whole pages, and the bytes of the file."""
    places: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        places[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = -(-end // _PAGE) * _PAGE
        if at > end:  # the format allows no holes
            places[f"pad.{name}"] = {
                "dtype": "U8", "shape": [at - end], "data_offsets": [end, at],
            }  # fmt: skip
    checksum = _checksum(places, key, tensors, tell, "summing bundles")
    said = {"key": asdict(key), "model": model, "checksum": checksum}
    text = json.dumps({"__metadata__": {"kairox": json.dumps(said)}, **places}).encode()
    whole = -(-(8 + len(text)) // _PAGE) * _PAGE
    return (whole - 8).to_bytes(8, "little") + text.ljust(whole - 8), whole + at


def _pieces(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    yield header
    for tensor in tensors.values():
        data = _bytes_of(tensor)
        yield data.numpy()
        yield bytes(-data.numel() % _PAGE)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The places of the tensors, what is said of them, and where the data begin."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(path.stat().st_size, _LARGEST_HEADER):
            raise ValueError("it is cut in its header, or that is damaged")
        places = json.loads(file.read(start - 8))
    said = json.loads(places.pop("__metadata__")["kairox"])
    return places, said, start


def _size(places: Mapping[str, Any], start: int) -> int:
    return int(start + max(place["data_offsets"][1] for place in places.values()))


def _map(path: Path, key: Key, tell: Progress | None) -> dict[str, torch.Tensor]:
    places, said, start = _open(path)
    if said["key"] != asdict(key):
        raise ValueError("it is of something else than its name says")
    size, wanted = path.stat().st_size, _size(places, start)
    if size != wanted:
        raise ValueError(f"it has {size} bytes instead of {wanted}")
    # A private mapping: pages are read when touched, and what is written stays in memory.
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {
        name: data[start + place["data_offsets"][0] : start + place["data_offsets"][1]]
        .view(_DTYPES[place["dtype"]])
        .view(place["shape"])
        for name, place in places.items()
        if not name.startswith("pad.")
    }
    if _checksum(places, key, tensors, tell, "checking kept bundles") != said["checksum"]:
        raise ValueError("its bytes have changed")
    return tensors


def _checksum(
    places: Mapping[str, Any],
    key: Key,
    tensors: Mapping[str, torch.Tensor],
    tell: Progress | None,
    what: str,
) -> str:
    """SHA-256 over what is said of the tensors and the sums of their pages.

    A page's sum is of its 8-byte words, modulo 2^64: any one changed word changes it, at the speed
    of memory, where a hash of all bytes would take longer than making the bundles.
    """
    digest = hashlib.sha256(json.dumps([places, asdict(key)], sort_keys=True).encode())
    add = count_bytes(tell, what, sum(t.numel() * t.element_size() for t in tensors.values()))
    for tensor in tensors.values():
        data = _bytes_of(tensor)
        whole = data.numel() // _PAGE * _PAGE
        for start in range(0, whole, _AT_ONCE):
            words = data[start : min(start + _AT_ONCE, whole)].view(torch.int64)
            digest.update(words.view(-1, _PAGE // 8).sum(dim=1).numpy().data)
            add(words.numel() * 8)
        digest.update(data[whole:].numpy().data)
        add(data.numel() - whole)
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _replace(path: Path, pieces: Iterable[Any], add: Callable[[int], None]) -> None:
    """Write beside it and rename: what has the name is whole, whoever else writes it."""
    handle, part = mkstemp(dir=path.parent, prefix=path.name + ".", suffix=_PART)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                add(file.write(piece))
        Path(part).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(part).unlink()
        raise


def _remove_parts(folder: Path) -> None:
    for path, name in _ours(folder):
        with suppress(OSError):
            if name["part"] and time.time() - path.stat().st_mtime > _PART_S:
                path.unlink()

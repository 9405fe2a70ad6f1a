"""The safetensors files of a model directory: what is in them, what is wrong with them, one read.

Headers are checked when it is opened; a tensor's numbers are when it is read. Format: the
safetensors README (github.com/huggingface/safetensors): a length, a JSON header, the bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from kairox_exec.formats import finite
from kairox_sim.errors import KairoxError

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<of>\d+)\.safetensors")
_AGAIN = "download or copy the file again"
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
_MB = 10**6
T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""(what is being done and in which unit, how far, of how many): each from 0 to all, one by one"""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is, by the header of its file."""

    path: Path
    dtype: str  # safetensors' word: F32, BF16, I8
    shape: tuple[int, ...]
    n_bytes: int


@dataclass(slots=True)
class Checkpoint:
    """A context manager: files are mapped at the first read and let go at the end."""

    directory: Path
    entries: dict[str, Entry]  # by the tensor's name
    _open: dict[Path, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def require(self, name: str, shape: Sequence[int]) -> Entry:
        """The entry of a float tensor of that shape. KairoxError naming file and tensor."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise KairoxError(
                f"{entry.path}: {name} is {entry.dtype} (allowed: {', '.join(FLOATS)}); quantised "
                "checkpoints (GPTQ, AWQ, FP8) are not read: use the original weights, and "
                "`weights` int8, q8_0 or q4_0 to keep them small"
            )
        if entry.shape != tuple(shape):
            raise KairoxError(
                f"{entry.path}: {name} is {entry.shape} and config.json calls for {tuple(shape)}; "
                "the two are of different models: take both from one"
            )
        return entry

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A finite float tensor as it is stored: a view of the mapped file."""
        from safetensors import SafetensorError, safe_open

        path = self.require(name, shape).path
        try:
            if path not in self._open:
                opened: Any = safe_open(str(path), framework="pt")
                self._open[path] = self._stack.enter_context(opened)
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise KairoxError(f"{path}: cannot read {name}: {error}; {_AGAIN}") from error
        require_finite(tensor, f"{path}: {name}", _AGAIN)
        return tensor


def require_finite(tensor: torch.Tensor, what: str, to_do: str) -> None:
    if not finite(tensor):
        nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        raise KairoxError(
            f"{what} holds {nan} NaN and {infinite} infinite of {tensor.numel()} weights; {to_do}"
        )


def weight_files(model_dir: str | Path) -> list[Path]:
    """The model's safetensors files, by name."""
    directory = Path(model_dir)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise KairoxError(
            f"{directory} has no *.safetensors. Pickled weights (*.bin) are not read; convert "
            "them with transformers' save_pretrained first."
        )
    return files


Stamps = tuple[tuple[str, int, int], ...]
_hashed: dict[Stamps, str] = {}  # by this process


def stamps_of(model_dir: str | Path) -> Stamps:
    """(path, bytes, time of the last change in ns) of the weight files."""
    files = weight_files(Path(model_dir).resolve())
    return tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in files)


def remember_sha256(stamps: Stamps, digest: str) -> str:
    """Let `model_sha256` know it while the files stay as they are; returns it."""
    _hashed[stamps] = digest
    return digest


def model_sha256(model_dir: str | Path, tell: Progress | None = None) -> str:
    """SHA-256 over the bytes of the safetensors files in name order (one file: its sha256sum).

    Files are read once, and again where name, size or time changed.
    """
    stamps = stamps_of(model_dir)
    if stamps in _hashed:
        return _hashed[stamps]
    digest, files = hashlib.sha256(), weight_files(model_dir)
    add = count_bytes(tell, "hashing the weights", sum(path.stat().st_size for path in files))
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                add(len(block))
    return remember_sha256(stamps, digest.hexdigest())


def count_bytes(tell: Progress | None, what: str, n_bytes: int) -> Callable[[int], None]:
    """A function that is given bytes as they are done, and tells of them in MB."""
    done = 0

    def add(n: int) -> None:
        nonlocal done
        done += n
        if tell is not None:
            tell(f"{what}, MB", done // _MB, n_bytes // _MB)

    add(0)
    return add


def told(items: Sequence[T], tell: Progress | None, what: str) -> Iterator[T]:
    """The items; how many of them are done is told."""
    for n, item in enumerate(items):
        if tell is not None:
            tell(what, n, len(items))
        yield item
    if tell is not None:
        tell(what, len(items), len(items))


def open_checkpoint(model_dir: str | Path) -> Checkpoint:
    """Read every header. KairoxError where a file is missing, cut or not safetensors."""
    directory = Path(model_dir)
    index = directory / INDEX
    # In transformers' order: one file, else an index of several.
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return Checkpoint(directory, _of_files(_chosen(weight_files(directory))))
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"a file of the same folder is named by {file!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise KairoxError(f"{index} is not an index of safetensors: {error!r}; {_AGAIN}") from error
    absent = sorted({f for f in weight_map.values() if not (directory / f).is_file()})
    if absent:
        raise KairoxError(
            f"{index} names {len(absent)} files that are not there, e.g. {absent[0]}; download "
            "the missing ones beside it"
        )
    entries = _of_files([directory / file for file in sorted(set(weight_map.values()))])
    for name, file in weight_map.items():
        if name not in entries or entries[name].path.name != Path(file).name:
            raise KairoxError(
                f"{directory / file} does not hold {name}, which {index.name} says is there; "
                "index and file are of different downloads: take both from one"
            )
    return Checkpoint(directory, entries)


def _chosen(files: Sequence[Path]) -> Sequence[Path]:
    """The files to read where there is no index: model.safetensors, or all of them."""
    single = [path for path in files if path.name == "model.safetensors"]
    if single:
        return single
    for path in files:
        match = _SHARD.fullmatch(path.name)
        if match is None:
            continue
        digits, of = len(match["part"]), int(match["of"])
        for part in range(1, of + 1):
            name = f"{match['stem']}-{part:0{digits}d}-of-{match['of']}.safetensors"
            if not path.with_name(name).is_file():
                raise KairoxError(
                    f"{path.with_name(name)} is missing, part {part} of {of}; {_AGAIN}"
                )
    return files


def _of_files(files: Sequence[Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if name in entries:
                raise KairoxError(
                    f"{name} is in {entries[name].path.name} and in {path}; a directory holds one "
                    "model: move the files of the other away"
                )
            entries[name] = entry
    return entries


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, whose length is checked too."""
    size = path.stat().st_size
    with path.open("rb") as file:
        n_header = int.from_bytes(file.read(8), "little")
        if size < 8 or n_header > min(size - 8, _LARGEST_HEADER):
            raise KairoxError(
                f"{path} is cut in its header, or is not safetensors: it has {size} bytes and the "
                f"header alone says {n_header + 8}; {_AGAIN}"
            )
        text = file.read(n_header)
    entries: dict[str, Entry] = {}
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        end = 0
        for name, said in content.items():
            first, last = said["data_offsets"]
            shape, dtype = tuple(said["shape"]), said["dtype"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, first, last - first))
            if not (whole and isinstance(dtype, str)):
                raise ValueError(f"{name} is {said}")
            entries[name] = Entry(path, dtype, shape, last - first)
            end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KairoxError(f"{path}: its header is not safetensors': {error!r}; {_AGAIN}") from error
    if size != 8 + n_header + end:
        cut = [n for n, e in content.items() if 8 + n_header + e["data_offsets"][1] > size]
        which = f"; {len(cut)} tensors are cut, e.g. {cut[0]}" if cut else ""
        raise KairoxError(
            f"{path} has {size} bytes and its header calls for {8 + n_header + end}{which}: "
            f"{'truncated' if cut else 'damaged'}; {_AGAIN}"
        )
    return entries

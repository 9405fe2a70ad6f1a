"""The container of a trace: NumPy columns in an Arrow IPC stream or file, a checksum per batch.

Knows bytes, batches and damage; nothing of models, neurons or steps (trace.py does). Arrow IPC
has no checksum of its own, so each record batch carries one in its custom metadata, and each
batch is handed to the system before the next begins: a killed recording keeps every batch that was
acknowledged. It is forced to the disk once a second, which is what a power cut can take.
The layout is described field by field in traces/README.md. Apache Arrow columnar format, "IPC
streaming format" and "IPC file format": https://arrow.apache.org/docs/format/Columnar.html
"""

import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError

Columns = dict[str, NDArray[Any]]
"""Column name -> one value per row; bit columns are uint8[n_rows, n_bytes]. `predicted_known`
(bool[n_rows]) is not a column of its own: it is the validity of `predicted`."""

SCALARS: tuple[tuple[str, Any, Any], ...] = (
    ("seq", pa.uint32(), np.uint32),
    ("step", pa.uint32(), np.uint32),
    ("token", pa.int32(), np.int32),
    ("layer", pa.uint16(), np.uint16),
    ("phase", pa.uint8(), np.uint8),
)
BIT_COLUMNS = ("bits", "evaluated", "predicted")

_HEADER = b"kairox"
_HEADER_CRC = b"kairox.crc32"
_MAGIC = b"ARROW1\0\0"  # an IPC file; an IPC stream has no magic
_MARK = 0xFFFFFFFF  # every message: mark u32, metadata size i32, metadata, body
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # a message without metadata: end of stream
_SEALED = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
# Compressing small batches took most of the time of writing them, and sealing compresses anyway.
_STREAMED = ipc.IpcWriteOptions(use_threads=False)
_READ_OPTIONS = ipc.IpcReadOptions(use_threads=False)  # measured: threads slow down these batches
# What pyarrow raises on damaged bytes; ValueError includes text that is not UTF-8.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError, StopIteration)


@dataclass(frozen=True, slots=True)
class Contents:
    header: str  # JSON
    columns: Columns
    cut: str | None  # why the end is missing; None when the container is whole
    notes: tuple[str, ...]  # odd, yet nothing is lost


SYNC_S = 1.0  # forcing every batch out took a third of the recorder's time


class ContainerWriter:
    """Writes batches of columns; each survives a kill of the process when `write` returns.

    Leaving the `with` block by an exception abandons the file: no end mark, so readers say that it
    was cut, and keep all its batches.
    """

    def __init__(
        self, path: Path, header: str, n_bytes: int, columns: tuple[str, ...], *, sealed: bool
    ) -> None:
        self._schema = _schema(header, n_bytes, columns)
        self._batches = 0
        self._synced_s = -SYNC_S  # the first batch is forced out at once
        self._file = path.open("wb")
        new, options = (ipc.new_file, _SEALED) if sealed else (ipc.new_stream, _STREAMED)
        # The header reaches the file with the first batch, or with the end mark.
        self._writer = new(self._file, self._schema, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close() if kind is None else self.abandon()

    def write(self, columns: Columns) -> None:
        steps = columns["step"]
        about = {
            "kairox.batch": str(self._batches),
            "kairox.first_step": str(steps[0]),
            "kairox.last_step": str(steps[-1]),
            "kairox.crc32": f"{checksum(columns):08x}",
        }
        self._writer.write_batch(_to_batch(columns, self._schema), custom_metadata=about)
        self._batches += 1
        self._file.flush()
        if time.monotonic() - self._synced_s > SYNC_S:
            self._sync()

    def close(self) -> None:
        """End mark (and footer, in a sealed file), then close."""
        if not self._file.closed:
            self._writer.close()
            self._sync()
            self._file.close()

    def abandon(self) -> None:
        """Close without an end mark."""
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()


def checksum(columns: Columns) -> int:
    """CRC-32 (zlib) of the rows: column after column in schema order, little-endian values; where
    `predicted` is not known its bytes are zero, and one byte per row (0 or 1) follows it."""
    crc = 0
    for name in _names(columns):
        crc = zlib.crc32(np.ascontiguousarray(columns[name]).data, crc)
    return crc


def read_container(path: Path) -> Contents:
    """Every whole batch of the trace at `path`; KairoxError where it is damaged rather than cut.

    An end that is missing, or that turned into NULs (what a power cut leaves), is a cut. Bad bytes
    with a good batch or an end mark behind them are damage: the rows between are lost, and
    what is left is not a prefix of what was recorded.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise KairoxError(f"cannot read the trace {path}: {error.strerror or error}") from error
    at = len(_MAGIC) if raw.startswith(_MAGIC) else 0
    sealed = at > 0
    schema, header, start = _read_header(path, raw, at)
    head, at = raw[at:start], start
    batches: list[Columns] = []
    cut: str | None = None
    while raw[at : at + len(_END)] != _END:
        try:
            columns, at_next = _read_batch(raw, at, head, schema, len(batches))
        except _BadBatch as bad:
            if _goes_on_after(raw, at, head, schema, sealed):
                raise KairoxError(
                    f"{path} is damaged in the batch at byte offset {at}: {bad}; the file goes on "
                    "behind it, so this is not a recording that was cut short. Restore it from a "
                    "copy, or record again"
                ) from bad
            cut = f"the recording ends inside the batch at byte offset {at}: {bad}"
            break
        batches.append(columns)
        at = at_next
    notes: tuple[str, ...] = ()
    if cut is None:
        at += len(_END)
        if sealed and not _footer_holds(raw, schema, len(batches)):
            cut = f"the footer of the sealed file, from byte offset {at} on, is missing or damaged"
        elif not sealed and at < len(raw):
            if _find_batch(raw, at, head, schema):
                raise KairoxError(
                    f"{path} is damaged at byte offset {at}: an end mark, but batches behind it. "
                    "Were two recordings put in one file? Separate them, or restore from a copy"
                )
            notes = (f"{len(raw) - at} bytes after the end mark at byte offset {at} were ignored",)
    return Contents(header, _concatenate(batches, schema), cut, notes)


class _BadBatch(Exception):  # noqa: N818 - caught here, never seen by a user
    pass


def _schema(header: str, n_bytes: int, columns: tuple[str, ...]) -> Any:
    fields = [pa.field(name, kind, nullable=False) for name, kind, _ in SCALARS]
    for name in BIT_COLUMNS:
        if name in columns:
            fields.append(pa.field(name, pa.binary(n_bytes), nullable=name == "predicted"))
    text = header.encode()
    return pa.schema(fields, {_HEADER: text, _HEADER_CRC: f"{zlib.crc32(text):08x}".encode()})


def _names(columns: Columns) -> list[str]:
    order = [name for name, _, _ in SCALARS] + [*BIT_COLUMNS, "predicted_known"]
    return [name for name in order if name in columns]


def _to_batch(columns: Columns, schema: Any) -> Any:
    arrays = []
    for field in schema:
        values = np.ascontiguousarray(columns[field.name])
        known = columns.get("predicted_known") if field.name == "predicted" else None
        valid = None if known is None or known.all() else np.packbits(known, bitorder="little")
        # From buffers: pa.array() and to_numpy() import pandas where it is installed.
        buffers = [None if valid is None else pa.py_buffer(valid), pa.py_buffer(values)]
        arrays.append(pa.Array.from_buffers(field.type, len(values), buffers))
    return pa.record_batch(arrays, schema=schema)


def _to_columns(batch: Any) -> Columns:
    """Views of a batch that a reader made: its arrays begin at offset 0."""
    columns: Columns = {}
    n_rows = batch.num_rows
    dtypes = {name: dtype for name, _, dtype in SCALARS}
    for name in batch.schema.names:
        valid, values = batch.column(name).buffers()
        if name in dtypes:
            columns[name] = np.frombuffer(values, dtypes[name], n_rows)
        else:
            width = batch.schema.field(name).type.byte_width
            flat = np.frombuffer(values, np.uint8, n_rows * width)
            columns[name] = flat.reshape(n_rows, width)
        if name == "predicted":
            columns["predicted_known"] = (
                np.ones(n_rows, bool)
                if valid is None
                else np.unpackbits(
                    np.frombuffer(valid, np.uint8), count=n_rows, bitorder="little"
                ).astype(bool)
            )
    return columns


def _concatenate(batches: list[Columns], schema: Any) -> Columns:
    if batches:
        return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    columns: Columns = {name: np.empty(0, dtype) for name, _, dtype in SCALARS}
    for name in schema.names[len(SCALARS) :]:
        columns[name] = np.empty((0, schema.field(name).type.byte_width), np.uint8)
    if "predicted" in columns:
        columns["predicted_known"] = np.empty(0, bool)
    return columns


def _read_header(path: Path, raw: bytes, at: int) -> tuple[Any, str, int]:
    """(Arrow schema, header JSON, offset of the first batch)."""
    what = "an Arrow IPC stream or file that Kairox recorded"
    if not raw:
        raise KairoxError(f"{path} is empty: nothing had been recorded yet; expected {what}")
    try:
        _, size = struct.unpack_from("<Ii", raw, at)
        schema = ipc.read_schema(ipc.read_message(pa.py_buffer(raw[at : at + 8 + max(size, 0)])))
        names, metadata = schema.names, schema.metadata or {}
    except (*_UNREADABLE, struct.error) as error:
        raise KairoxError(
            f"{path} is not a trace, or its header is cut or damaged (byte offset {at}): {error}. "
            f"Expected {what}"
        ) from error
    if _HEADER not in metadata:
        raise KairoxError(
            f"{path} is an Arrow file but not a Kairox trace: its schema metadata has no 'kairox' "
            f"entry, only {sorted(metadata)}. Expected {what}"
        )
    text = metadata[_HEADER]
    if metadata.get(_HEADER_CRC) != f"{zlib.crc32(text):08x}".encode():
        raise KairoxError(
            f"{path} is damaged: the header at byte offset {at} does not match its checksum. "
            "Restore the file from a copy, or record again"
        )
    columns = tuple(name for name in BIT_COLUMNS if name in names)
    try:
        wanted = _schema(text.decode(), schema.field("bits").type.byte_width, columns)
    except (KeyError, ValueError):  # no such column, or not one of a fixed width
        wanted = None
    if wanted is None or not schema.equals(wanted):
        raise KairoxError(
            f"{path} is damaged: its header is whole, but the columns after it are {names}, "
            "not those of a trace, or of other types. Restore the file from a copy"
        )
    return schema, text.decode(), at + 8 + size


def _read_batch(
    raw: bytes, at: int, head: bytes, schema: Any, number: int | None
) -> tuple[Columns, int]:
    """The batch at `at`, its checksum verified, and the offset behind it."""
    if at + 8 > len(raw):
        raise _BadBatch(f"{len(raw) - at} bytes are left, a batch needs more")
    mark, size = struct.unpack_from("<Ii", raw, at)
    if mark != _MARK or size <= 0 or size % 8:
        raise _BadBatch("no batch begins here")
    if at + 8 + size > len(raw):
        raise _BadBatch("the batch reaches past the end of the file")
    try:
        message = ipc.read_message(pa.py_buffer(memoryview(raw)[at:]))
        end = at + 8 + size + (message.body.size if message.body is not None else 0)
        # A reader over header + this one batch: only stream readers hand out custom metadata.
        reader = ipc.open_stream(head + raw[at:end], options=_READ_OPTIONS)
        batch, about = reader.read_next_batch_with_custom_metadata()
        batch.validate(full=True)
        columns = _to_columns(batch)
    except _UNREADABLE as error:
        raise _BadBatch(f"it cannot be decoded ({str(error).strip()})") from error
    if about is None or about.get(b"kairox.crc32") != f"{checksum(columns):08x}".encode():
        raise _BadBatch("its rows do not match their checksum")
    stated = about.get(b"kairox.batch")
    if number is not None and stated != str(number).encode():
        raise _BadBatch(f"batch {number} was due, this one says {stated!r}")
    return columns, end


def _find_batch(raw: bytes, at: int, head: bytes, schema: Any) -> bool:
    """Whether a whole batch, checksum and all, starts anywhere from `at` on."""
    mark = _END[:4]
    at = raw.find(mark, at)
    while at >= 0:
        try:
            _read_batch(raw, at, head, schema, None)
            return True
        except _BadBatch:
            at = raw.find(mark, at + 1)
    return False


def _goes_on_after(raw: bytes, at: int, head: bytes, schema: Any, sealed: bool) -> bool:
    ended = raw.endswith(_MAGIC[:6]) if sealed else raw.endswith(_END)
    return ended or _find_batch(raw, at + 1, head, schema)


def _footer_holds(raw: bytes, schema: Any, n_batches: int) -> bool:
    try:
        reader = ipc.open_file(pa.py_buffer(raw))
        return bool(
            reader.num_record_batches == n_batches
            and reader.schema.equals(schema, check_metadata=True)
        )
    except _UNREADABLE:
        return False

"""The call log: every call a driver made to its NeuronCache, in order, with what came of it.

An Arrow IPC stream (zstd), one row per call, beside the trace of the same run. Replaying it through
a fresh cache must give the same swaps, splits and knobs bit for bit; `replay` says where it does
not. `kind` says which columns of a row hold something; the others are null:

  plan      layer, ids (predicted), share, swap_id, promote and slots (promote_end cuts them, one
            end per swap), evict (evict_end cuts it), evicted (all that the plan gave up)
  commit    swap_id (what had landed)
  lookup    layer, ids (evaluated), active, share, hit_resident, on_time, residual, late
  cancel    swap_id (one)
  end_step  record (the fields of StepRecord), knobs (of the next step)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numpy.typing import NDArray

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Controller, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned, Split, StepEnded, Swap
from kairox_sim.policies.base import PINNED, RESIDENT, Policy
from kairox_sim.record import LayerWaits, StepRecord
from kairox_sim.replay import Difference, Replay, replay

__all__ = [
    "CallLogWriter",
    "Difference",
    "Replay",
    "call_log_header",
    "read_call_log",
    "rebuild",
    "replay",
]

FORMAT_VERSION = 1
REQUIRED = ("n_layers", "n_neurons", "slots", "settings")

_HEADER = b"kairox.calls"
_HEADER_CRC = b"kairox.calls.crc32"
_BATCH, _CRC = b"kairox.batch", b"kairox.crc32"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # what a closed Arrow stream ends with
_OPTIONS = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))

_ARROW_OF = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
_RECORD = {f.name: _ARROW_OF[str(f.type)] for f in fields(StepRecord)}
_KNOBS = {
    "threshold_scale": pa.float64(),
    "max_swaps": pa.list_(pa.int64()),  # of one number, or one per layer
    "decay": pa.list_(pa.float64()),
    "per_layer": pa.list_(pa.string()),  # the names of those that are one per layer
}
_SCALARS: dict[str, Any] = {
    "kind": pa.string(),
    "layer": pa.int64(),
    "hit_resident": pa.int64(),
    "restored": pa.bool_(),
    "record": pa.struct(list(_RECORD.items())),
    "knobs": pa.struct(list(_KNOBS.items())),
}
_LISTS: dict[str, tuple[Any, Any]] = {
    "ids": (pa.int32(), np.int32),
    "active": (pa.int32(), np.int32),
    "share": (pa.float32(), np.float32),
    "swap_id": (pa.int64(), np.int64),
    "promote": (pa.int32(), np.int32),
    "slots": (pa.int32(), np.int32),
    "promote_end": (pa.int32(), np.int32),
    "evict": (pa.int32(), np.int32),
    "evict_end": (pa.int32(), np.int32),
    "evicted": (pa.int32(), np.int32),
    "on_time": (pa.int32(), np.int32),
    "residual": (pa.int32(), np.int32),
    "wait_io": (pa.uint8(), np.uint8),  # LayerWaits, one entry per layer
    "wait_cpu_s": (pa.float64(), np.float64),
    "late": (pa.int32(), np.int32),
}

Row = Mapping[str, Any]  # a column that is missing is null


def call_log_header(cache: NeuronCache, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `rebuild` needs to make the cache again, taken before its first call.

    `settings` name the policy and the controller with their parameters; the rest, also which
    neurons are pinned and which start warm, is read off the cache.
    """
    return {
        "n_layers": cache.n_layers,
        "n_neurons": cache.n_neurons,
        "slots": list(cache.capacity),
        "swap_neurons": cache.swap_neurons,
        "observes": cache.observes,
        "plans_after": cache.plans_after,
        "pinned": [np.flatnonzero(row == PINNED).tolist() for row in cache.state],
        "warm": [np.flatnonzero(row == RESIDENT).tolist() for row in cache.state],
        "settings": dict(settings),
    }


def rebuild(header: Mapping[str, Any], policy: Policy, controller: Controller) -> NeuronCache:
    """The cache that `call_log_header` was taken from, as it was before its first call."""
    return NeuronCache(
        header["n_layers"],
        header["n_neurons"],
        header["slots"],
        policy,
        controller,
        pinned=header["pinned"],
        warm=header["warm"],
        swap_neurons=header["swap_neurons"],
        observes=header["observes"],
        trigger="after" if header["plans_after"] else "attn_out",
    )


class CallLogWriter:
    """Appends events; `NeuronCache(journal=writer.write)` feeds it. A context manager.

    Batches are handed to the operating system, not forced to the disk: forcing would stall the step
    in which it happens, and this log describes steps. A killed process keeps all full batches.
    """

    def __init__(
        self, path: str | Path, header: Mapping[str, Any], *, events_per_batch: int = 256
    ) -> None:
        missing = [name for name in REQUIRED if name not in header]
        if missing:
            raise KairoxError(f"a call log's header must have {list(REQUIRED)}; {missing} missing")
        if events_per_batch < 1:
            raise KairoxError(f"events_per_batch must be 1 or more, got {events_per_batch}")
        text = json.dumps({**header, "format_version": FORMAT_VERSION}).encode()
        about = {_HEADER: text, _HEADER_CRC: f"{zlib.crc32(text):08x}".encode()}
        types = _SCALARS | {name: pa.list_(kind) for name, (kind, _) in _LISTS.items()}
        self._schema = pa.schema(list(types.items()), about)
        self.path, self.events_per_batch = Path(path), events_per_batch
        self._rows: list[Row] = []
        self._batches = 0
        self._file = self.path.open("wb")
        self._writer = ipc.new_stream(self._file, self._schema, options=_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(complete=kind is None)

    def write(self, event: Event) -> None:
        if self._file.closed:
            raise KairoxError(f"the call log {self.path} is closed; no more calls can be logged")
        self._rows.append(_row_of(event))
        if len(self._rows) >= self.events_per_batch:
            self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system as one batch."""
        if self._rows:
            batch = _to_batch(self._rows, self._schema)
            about = {_BATCH: str(self._batches), _CRC: f"{_checksum(batch):08x}"}
            self._writer.write_batch(batch, custom_metadata=about)
            self._batches += 1
            self._rows = []
        self._file.flush()

    def close(self, *, complete: bool = True) -> None:
        """Without `complete` there is no end mark, so that readers say that the log was cut."""
        if self._file.closed:
            return
        self.flush()
        if complete:
            self._writer.close()
        self._file.close()


def read_call_log(
    path: str | Path, *, allow_cut: bool = False
) -> tuple[dict[str, Any], list[Event]]:
    """(header, events). A log without its end mark is refused, or with `allow_cut` read up to it.

    Damage before the end is always refused: what is behind it cannot be replayed.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise KairoxError(f"cannot read the call log {path}: {error.strerror or error}") from error
    source = pa.BufferReader(raw)
    header, reader = _open(path, source)
    events: list[Event] = []
    batches = 0
    bad: str | None = None
    while True:
        at = source.tell()
        try:
            batch, about = reader.read_next_batch_with_custom_metadata()
            batch.validate(full=True)
            stated = about or {}
            if stated.get(_CRC) != f"{_checksum(batch):08x}".encode():
                bad = "a batch does not match its checksum"
                break
            if stated.get(_BATCH) != str(batches).encode():
                bad = f"batch {batches} was due, this one says {stated.get(_BATCH)}"
                break
            events += _to_events(batch)
            batches += 1
        except StopIteration:
            break
        except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
            bad = f"a batch cannot be decoded ({error})"
            break
    if raw.endswith(_END):
        if bad is not None or source.tell() != len(raw):
            raise KairoxError(
                f"{path} is damaged at byte offset {at}: {bad or 'it ends, and yet goes on'}. "
                "Restore it from a copy, or record again"
            )
    elif not allow_cut:
        raise KairoxError(
            f"{path} was cut at byte offset {at}, after {len(events)} whole calls"
            f"{f' ({bad})' if bad else ''}: the run that wrote it did not end. Read it with "
            "allow_cut=True to use these calls"
        )
    return header, events


def _open(path: str | Path, source: Any) -> tuple[dict[str, Any], Any]:
    expected = "expected an Arrow stream that CallLogWriter wrote"
    try:
        reader = ipc.open_stream(source)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise KairoxError(f"{path} is not a call log ({error}); {expected}") from error
    about = reader.schema.metadata or {}
    if _HEADER not in about:
        raise KairoxError(f"{path} is an Arrow stream but not a call log; {expected}")
    if about.get(_HEADER_CRC) != f"{zlib.crc32(about[_HEADER]):08x}".encode():
        raise KairoxError(f"{path} is damaged: its header does not match its checksum")
    header: dict[str, Any] = json.loads(about[_HEADER])
    if header["format_version"] != FORMAT_VERSION:
        raise KairoxError(
            f"{path} is a call log of version {header['format_version']}; this Kairox reads "
            f"version {FORMAT_VERSION}"
        )
    return header, reader


# -- events as rows -----------------------------------------------------------------------------


def _row_of(event: Event) -> Row:
    """Everything is copied: drivers and policies may reuse their arrays after the call."""
    match event:
        case Planned(layer, predicted, share, swaps, evicted):
            return {
                "kind": "plan",
                "layer": layer,
                "ids": predicted.copy(),
                "share": None if share is None else share.copy(),
                "swap_id": [swap.id for swap in swaps],
                "promote": _joined([swap.promote for swap in swaps]),
                "slots": _joined([swap.slots for swap in swaps]),
                "promote_end": list(accumulate(swap.promote.size for swap in swaps)),
                "evict": _joined([swap.evict for swap in swaps]),
                "evict_end": list(accumulate(swap.evict.size for swap in swaps)),
                "evicted": evicted.copy(),
            }
        case Committed(swap_ids):
            return {"kind": "commit", "swap_id": swap_ids}
        case LookedUp(layer, evaluated, active, share, split):
            return {
                "kind": "lookup",
                "layer": layer,
                "ids": evaluated.copy(),
                "active": None if active is None else active.copy(),
                "share": None if share is None else share.copy(),
                "hit_resident": split.hit_resident,
                "on_time": split.on_time.copy(),
                "residual": split.residual.copy(),
                "late": split.late.copy(),
            }
        case Cancelled(swap_id, restored):
            return {"kind": "cancel", "swap_id": [swap_id], "restored": restored}
        case StepEnded(record, layers, knobs):
            return {
                "kind": "end_step",
                "record": {name: getattr(record, name) for name in _RECORD},
                "wait_io": None if layers is None else layers.io.astype(np.uint8),
                "wait_cpu_s": None if layers is None else layers.cpu_s.copy(),
                "knobs": _knobs_row(knobs),
            }


def _knobs_row(knobs: Knobs) -> Row:
    per_layer: list[str] = []
    row: dict[str, Any] = {"threshold_scale": knobs.threshold_scale, "per_layer": per_layer}
    for name in ("max_swaps", "decay"):
        value = getattr(knobs, name)
        per_layer += [name] if isinstance(value, tuple) else []
        row[name] = list(value) if isinstance(value, tuple) else None if value is None else [value]
    return row


def _knobs_of(row: Row) -> Knobs:
    values = dict(row)
    per_layer = values.pop("per_layer")
    for name in ("max_swaps", "decay"):
        given = values[name]
        if given is not None:
            values[name] = tuple(given) if name in per_layer else given[0]
    return Knobs(**values)


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _to_batch(rows: Sequence[Row], schema: Any) -> Any:
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in _SCALARS.items()]
    for name, (kind, dtype) in _LISTS.items():
        values = [None if row.get(name) is None else np.asarray(row[name], dtype) for row in rows]
        sizes = [0 if v is None else v.size for v in values]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        held = [v for v in values if v is not None]
        flat = np.concatenate(held) if held else np.zeros(0, dtype)
        null = pa.array([v is None for v in values])
        arrays.append(pa.ListArray.from_arrays(offsets, pa.array(flat, kind), mask=null))
    return pa.record_batch(arrays, schema=schema)


def _checksum(batch: Any) -> int:
    """CRC-32 of the columns in order: text of the scalar ones; valid, offsets, values of lists."""
    crc = 0
    for name in _SCALARS:
        crc = zlib.crc32(repr(batch.column(name).to_pylist()).encode(), crc)
    for name in _LISTS:
        array = batch.column(name)
        for part in (array.is_valid(), array.offsets, array.flatten()):
            crc = zlib.crc32(np.ascontiguousarray(part.to_numpy(zero_copy_only=False)).data, crc)
    return crc


def _to_events(batch: Any) -> list[Event]:
    scalars = {name: batch.column(name).to_pylist() for name in _SCALARS}
    lists = {name: _lists(batch.column(name)) for name in _LISTS}
    columns = scalars | lists
    rows = [{name: columns[name][i] for name in columns} for i in range(batch.num_rows)]
    return [_event_of(row) for row in rows]


def _lists(array: Any) -> list[NDArray[Any] | None]:
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy()
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(valid.size)]


def _event_of(row: Row) -> Event:
    match row["kind"]:
        case "plan":
            swaps = zip(
                row["swap_id"].tolist(),
                _cut(row["promote"], row["promote_end"]),
                _cut(row["slots"], row["promote_end"]),
                _cut(row["evict"], row["evict_end"]),
                strict=True,
            )
            made = tuple(Swap(id_, row["layer"], *arrays) for id_, *arrays in swaps)
            return Planned(row["layer"], row["ids"], row["share"], made, row["evicted"])
        case "commit":
            return Committed(tuple(row["swap_id"].tolist()))
        case "lookup":
            split = Split(row["hit_resident"], row["on_time"], row["residual"], row["late"])
            return LookedUp(row["layer"], row["ids"], row["active"], row["share"], split)
        case "cancel":
            return Cancelled(int(row["swap_id"][0]), row["restored"])
        case "end_step":
            known = row["wait_io"] is not None
            waits = LayerWaits(row["wait_io"].astype(bool), row["wait_cpu_s"]) if known else None
            return StepEnded(StepRecord(**row["record"]), waits, _knobs_of(row["knobs"]))
    raise ValueError(f"unknown kind of call {row['kind']!r}")


def _cut(values: NDArray[np.int32], ends: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    return np.split(values, ends[:-1]) if ends.size else []

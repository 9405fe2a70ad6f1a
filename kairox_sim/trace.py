"""Trace: which neurons fired, per token and layer, and what the recording was made of.

A row is one token in one layer, its active set a row of bits; a step (one forward pass) is
n_layers x n_tokens rows, layer by layer. Reading and sealing keep to that order and verify it.
The fields are described in traces/README.md; what the bytes look like is trace_file.py's concern.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.trace_file import BIT_COLUMNS, SCALARS, Columns, ContainerWriter, read_container
from kairox_sim.trace_format import (
    PHASES,
    SequenceInfo,
    TraceHeader,
    as_bits,
    check_bits,
    pack,
    unpack,
)
from kairox_sim.trace_writer import TraceWriter

__all__ = [
    "SequenceInfo",
    "Trace",
    "TraceHeader",
    "TraceStep",
    "TraceWriter",
    "pack",
    "read_trace",
    "seal",
    "unpack",
    "write_trace",
]

SEALED_BATCH_ROWS = 4096  # a few MB of bits at 11,008 neurons


class TraceStep:
    """One forward pass: a decode token, or one prefill chunk. Sets are over the chunk's tokens."""

    __slots__ = ("_first", "_trace", "context_len", "n_tokens", "phase", "seq", "step", "tokens")

    def __init__(self, trace: "Trace", first: int, n_tokens: int, context_len: int) -> None:
        self._trace = trace
        self._first = first  # its first row
        self.seq = int(trace.seq[first])
        self.step = int(trace.step[first])
        self.phase = PHASES[trace.phase[first]]
        self.n_tokens = n_tokens
        self.tokens: NDArray[np.int32] = trace.token[first : first + n_tokens]
        self.context_len = context_len  # tokens in the KV cache after this step

    def active(self, layer: int) -> NDArray[np.int32]:
        """Ids that fired for any token; sorted, unique."""
        return self._ids(self._trace.bits, layer)

    def share(self, layer: int) -> NDArray[np.float32]:
        """Per id of `active`: the part of the step's tokens for which it fired, in (0, 1]."""
        return self._share(self._trace.bits, layer)

    def last_active(self, layer: int) -> NDArray[np.int32]:
        """Ids that fired for the last token."""
        row = self._rows(layer).stop - 1
        return _ids(self._trace.bits[row], self._trace.header.n_neurons)

    def evaluated(self, layer: int) -> NDArray[np.int32]:
        """Ids computed for any token; the active ones where the trace does not tell them apart."""
        return self._ids(self._evaluated_bits(), layer)

    def evaluated_share(self, layer: int) -> NDArray[np.float32]:
        """Per id of `evaluated`."""
        return self._share(self._evaluated_bits(), layer)

    def predicted(self, layer: int) -> NDArray[np.int32] | None:
        """Ids predicted for any token, or None where nothing was predicted for this layer-step."""
        bits = self._predicted_bits(layer)
        return None if bits is None else self._ids(bits, layer)

    def predicted_share(self, layer: int) -> NDArray[np.float32] | None:
        """Per id of `predicted`."""
        bits = self._predicted_bits(layer)
        return None if bits is None else self._share(bits, layer)

    def packed(self, *, evaluated: bool = False) -> NDArray[np.uint8]:
        """uint8[n_layers, n_bytes]: the active, or evaluated, set of every layer."""
        bits = self._evaluated_bits() if evaluated else self._trace.bits
        n_layers = self._trace.header.n_layers
        rows = bits[self._first : self._first + n_layers * self.n_tokens]
        if self.n_tokens == 1:
            return rows
        chunk = rows.reshape(n_layers, self.n_tokens, -1)
        of_any: NDArray[np.uint8] = np.bitwise_or.reduce(chunk, axis=1)
        return of_any

    def _rows(self, layer: int) -> slice:
        n_layers = self._trace.header.n_layers
        if not 0 <= layer < n_layers:
            raise IndexError(f"layer {layer} of a trace of {n_layers} layers")
        start = self._first + layer * self.n_tokens
        return slice(start, start + self.n_tokens)

    def _evaluated_bits(self) -> NDArray[np.uint8]:
        evaluated = self._trace.evaluated_bits
        return self._trace.bits if evaluated is None else evaluated

    def _predicted_bits(self, layer: int) -> NDArray[np.uint8] | None:
        known = self._trace.predicted_known
        if known is None or not known[self._rows(layer)].all():
            return None
        return self._trace.predicted_bits

    def _ids(self, bits: NDArray[np.uint8], layer: int) -> NDArray[np.int32]:
        rows = bits[self._rows(layer)]
        row = rows[0] if self.n_tokens == 1 else np.bitwise_or.reduce(rows, axis=0)
        return _ids(row, self._trace.header.n_neurons)

    def _share(self, bits: NDArray[np.uint8], layer: int) -> NDArray[np.float32]:
        mask = unpack(bits[self._rows(layer)], self._trace.header.n_neurons)
        fired = mask.sum(axis=0, dtype=np.int32)  # [n_neurons], tokens
        share: NDArray[np.float32] = fired[fired > 0].astype(np.float32) / np.float32(self.n_tokens)
        return share


class Trace:
    """Rows in memory, read-only. Made by `read_trace` or `Trace.from_arrays`.

    Row arrays: seq, step, token, layer, phase [n_rows]; bits, evaluated_bits, predicted_bits uint8
    [n_rows, n_bytes]; predicted_known bool[n_rows]. The last three are None where not recorded.
    `truncated_at` is the number of tokens kept of a recording that was cut, None of a whole one.
    """

    def __init__(
        self,
        header: TraceHeader,
        columns: Columns,
        *,
        path: Path | None = None,
        truncated_at: int | None = None,
        warnings: tuple[str, ...] = (),
        context_len: NDArray[np.int64] | None = None,
    ) -> None:
        self.header = header
        self.path = path
        self.truncated_at = truncated_at
        self.warnings = warnings
        for array in columns.values():
            array.flags.writeable = False
        self._columns = columns
        self.seq: NDArray[np.uint32] = columns["seq"]
        self.step: NDArray[np.uint32] = columns["step"]
        self.token: NDArray[np.int32] = columns["token"]
        self.layer: NDArray[np.uint16] = columns["layer"]
        self.phase: NDArray[np.uint8] = columns["phase"]
        self.bits: NDArray[np.uint8] = columns["bits"]
        self.evaluated_bits: NDArray[np.uint8] | None = columns.get("evaluated")
        self.predicted_bits: NDArray[np.uint8] | None = columns.get("predicted")
        self.predicted_known: NDArray[np.bool_] | None = columns.get("predicted_known")
        # Per step: first row [n_steps + 1], tokens [n_steps], tokens in the KV cache [n_steps].
        for name in BIT_COLUMNS:
            if name in columns:
                check_bits(columns[name], header, name)
        self._first, self._step_tokens = _check_rows(header, columns)
        if context_len is None:
            context_len = _context_len(self.seq[self._first[:-1]], self._step_tokens)
        self._context_len = context_len
        self._sha256: str | None = None

    @classmethod
    def from_arrays(
        cls,
        header: TraceHeader,
        *,
        seq: ArrayLike,
        step: ArrayLike,
        token: ArrayLike,
        layer: ArrayLike,
        phase: ArrayLike,
        bits: NDArray[Any],
        evaluated_bits: NDArray[Any] | None = None,
        predicted_bits: NDArray[Any] | None = None,
        predicted_known: ArrayLike | None = None,
    ) -> Self:
        """One value per row; phase 0 prefill, 1 decode; bits packed, or bool[n_rows, n_neurons]."""
        given = {"seq": seq, "step": step, "token": token, "layer": layer, "phase": phase}
        columns: Columns = {n: np.array(given[n]).astype(dtype) for n, _, dtype in SCALARS}
        n_rows = len(columns["seq"])
        columns["bits"] = as_bits(bits, n_rows, header, "bits")
        if evaluated_bits is not None:
            columns["evaluated"] = as_bits(evaluated_bits, n_rows, header, "evaluated_bits")
        if predicted_bits is not None:
            columns["predicted"] = as_bits(predicted_bits, n_rows, header, "predicted_bits")
            known = np.ones(n_rows, bool) if predicted_known is None else predicted_known
            columns["predicted_known"] = np.array(known, dtype=bool)
        return cls(header, columns)

    @property
    def n_steps(self) -> int:
        return len(self._step_tokens)

    @property
    def n_tokens(self) -> int:
        return len(self.step) // self.header.n_layers

    @property
    def sha256(self) -> str:
        """Of the rows: the same for a stream, a sealed file and a trace made from arrays."""
        if self._sha256 is None:
            digest = hashlib.sha256(f"{self.header.n_layers} {self.header.n_neurons}".encode())
            for name, array in self._columns.items():
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(array).data)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def at(self, index: int) -> TraceStep:
        """The step at `index` in [0, n_steps); its own number is `.step`."""
        if not 0 <= index < self.n_steps:
            raise IndexError(f"step {index} of a trace of {self.n_steps} steps")
        n_tokens, context = self._step_tokens[index], self._context_len[index]
        return TraceStep(self, int(self._first[index]), int(n_tokens), int(context))

    def steps(self) -> Iterator[TraceStep]:
        return (self.at(index) for index in range(self.n_steps))

    def select(
        self, *, seqs: Sequence[int] | None = None, steps: Sequence[int] | None = None
    ) -> "Trace":
        """The steps of these sequences and with these step numbers; None keeps all.

        Numbers stay, and so does context_len: tokens left out still are in the KV cache.
        """
        own_seq, own_step = self.seq[self._first[:-1]], self.step[self._first[:-1]]  # [n_steps]
        keep = np.ones(self.n_steps, bool)
        header = self.header
        if seqs is not None:
            known = {s.seq for s in header.sequences}
            if strangers := sorted(set(seqs) - known):
                raise KairoxError(f"no sequences {strangers} in the trace; it has {sorted(known)}")
            keep &= np.isin(own_seq, list(seqs))
            kept = tuple(s for s in header.sequences if s.seq in set(seqs))
            header = dataclasses.replace(header, sequences=kept)
        if steps is not None:
            if missing := sorted(set(steps) - set(own_step.tolist())):
                raise KairoxError(
                    f"no steps {missing[:5]} in the trace: it has {self.n_steps}"
                    + (f", numbered {own_step[0]} to {own_step[-1]}" if self.n_steps else "")
                )
            keep &= np.isin(own_step, list(steps))
        rows = np.repeat(keep, np.diff(self._first))
        kept_rows = {name: array[rows] for name, array in self._columns.items()}
        return self._with(header, kept_rows, self._context_len[keep])

    def evaluating(self, bits: NDArray[np.uint8], trigger: str) -> "Trace":
        """As a lossy run at `trigger` that was told, and evaluated, uint8[n_rows, n_bytes] `bits`.

        The true sets stay as they are, and as complete.
        """
        header = dataclasses.replace(self.header, gating="predicted", predicted_trigger=trigger)
        known = np.ones(len(bits), bool)
        told = {"evaluated": bits, "predicted": bits, "predicted_known": known}
        return self._with(header, {**self._columns, **told}, self._context_len)

    def _with(
        self, header: TraceHeader, columns: Columns, context_len: NDArray[np.int64]
    ) -> "Trace":
        """Other content of the same recording, with what is said of it."""
        return Trace(
            header, columns, path=self.path, truncated_at=self.truncated_at,
            warnings=self.warnings, context_len=context_len,
        )  # fmt: skip


def read_trace(path: str | Path, *, strict: bool = False) -> Trace:
    """The trace at `path`, a stream being or having been recorded, or a sealed file.

    Of a recording that was cut, the whole steps before the cut: `truncated_at` is their number
    of tokens and `warnings` says why; `strict` refuses it. Damage in the middle is an error.
    """
    try:
        path = Path(path)
    except TypeError as error:
        raise KairoxError(f"a trace path is a str or a Path, not {path!r}") from error
    contents = read_container(path)
    header = TraceHeader.from_json(contents.header)
    n_tokens = len(contents.columns["step"]) // header.n_layers
    truncated_at, warnings = header.truncated_at, contents.notes
    if truncated_at is not None:
        cut = f"truncated at token {truncated_at}: its recording was stopped there"
        warnings = (*warnings, f"{path}: {cut}")
    if contents.cut is not None:
        truncated_at = n_tokens
        warnings = (*warnings, f"{path}: truncated at token {n_tokens}; {contents.cut}")
    if strict and warnings:
        raise KairoxError(
            "; ".join(warnings) + ". Strict reading refuses it: read without strict, or `seal` it "
            "to keep what is whole"
        )
    return Trace(header, contents.columns, path=path, truncated_at=truncated_at, warnings=warnings)


def seal(
    path: str | Path,
    out: str | Path | None = None,
    *,
    header_updates: Mapping[str, Any] | None = None,
) -> Path:
    """Rewrite a recording as a random-access Arrow IPC file, in place or to `out`: its path.

    `header_updates` replaces header fields known only afterwards (recorder_overhead, token_stop).
    A cut recording is sealed as far as it goes, and its header says where it was cut.
    """
    trace = read_trace(path)
    updates = {"truncated_at": trace.truncated_at, **(header_updates or {})}
    allowed = {f.name for f in dataclasses.fields(TraceHeader)} - {"format_version"}
    if unknown := sorted(set(updates) - allowed):
        raise KairoxError(f"no such header fields: {unknown}; allowed: {sorted(allowed)}")
    header = dataclasses.replace(trace.header, **updates)
    return write_trace(
        Trace(header, trace._columns, context_len=trace._context_len), Path(out or path)
    )


def write_trace(trace: Trace, path: str | Path) -> Path:
    """Write `trace` as a sealed file: to a temporary name, then renamed, so never half there."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    columns, header = trace._columns, trace.header
    names = tuple(n for n in columns if n not in {s[0] for s in SCALARS} | {"predicted_known"})
    try:
        with ContainerWriter(partial, header.to_json(), header.n_bytes, names, sealed=True) as out:
            first = 0
            for last in trace._first[1:]:
                if last - first >= SEALED_BATCH_ROWS or last == len(trace.step):
                    out.write({name: array[first:last] for name, array in columns.items()})
                    first = last
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def _ids(row: NDArray[np.uint8], n_neurons: int) -> NDArray[np.int32]:
    """Set bits of one row, ascending."""
    # bool, not uint8: numpy finds the non-zeros of a bool array several times faster.
    mask = np.unpackbits(row, count=n_neurons, bitorder="little").view(np.bool_)
    return np.flatnonzero(mask).astype(np.int32)


def _check_rows(
    header: TraceHeader, columns: Columns
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first row of each step [n_steps + 1], tokens of each step [n_steps]), the order verified."""
    step, n_rows = columns["step"], len(columns["step"])
    begins = np.ones(n_rows, bool)
    begins[1:] = step[1:] != step[:-1]
    bounds = np.append(np.flatnonzero(begins), n_rows).astype(np.int64)
    starts, n_tokens = bounds[:-1], np.diff(bounds) // header.n_layers
    broken = np.diff(bounds) != n_tokens * header.n_layers
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise KairoxError(
            f"step {step[bounds[at]]} has {np.diff(bounds)[at]} rows: not a multiple of the "
            f"{header.n_layers} layers in the header"
        )
    tokens_here = np.repeat(n_tokens, np.diff(bounds))  # [n_rows]
    start = np.repeat(starts, np.diff(bounds))
    offset = np.arange(n_rows) - start
    twin = start + offset % np.maximum(tokens_here, 1)  # the row of the same token in layer 0
    wrong = columns["layer"] != offset // np.maximum(tokens_here, 1)
    for name in ("seq", "phase"):
        wrong |= columns[name] != columns[name][start]
    wrong |= columns["token"] != columns["token"][twin]
    wrong |= columns["phase"] >= len(PHASES)
    wrong |= (columns["phase"] == 1) & (tokens_here != 1)
    wrong |= ~np.isin(columns["seq"], [s.seq for s in header.sequences])
    wrong[1:] |= step[1:] < step[:-1]
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        values = ", ".join(f"{name} {columns[name][row]}" for name, _, _ in SCALARS)
        raise KairoxError(
            f"row {row} is out of order ({values}): a step is n_layers x n_tokens rows, layer by "
            "layer, of one sequence in the header and one phase; decode has one token; steps grow"
        )
    return bounds, n_tokens


def _context_len(seq: NDArray[np.uint32], n_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of the same sequence up to and including each step."""
    total = np.zeros(len(seq), np.int64)
    for one in np.unique(seq):
        mine = seq == one
        total[mine] = np.cumsum(n_tokens[mine])
    return total

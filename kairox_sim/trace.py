"""Trace: which neurons fired, per token and layer, and what the recording was made of.

A row is one token in one layer, its active set a row of bits; a step (one forward pass) is
n_layers x n_tokens rows, layer by layer. Reading, writing and sealing keep to that order, and verify it.
The fields are described in traces/README.md; what the bytes look like is trace_file.py's concern.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.trace_file import (
    SCALARS,
    Columns,
    ContainerWriter,
    read_container,
)

FORMAT_VERSION = 1
GATINGS = ("oracle", "exact", "screened", "predicted")
PHASES = ("prefill", "decode")  # index = the stored phase
SEALED_BATCH_ROWS = 4096  # a few MB of bits at 11,008 neurons


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Where one sequence's tokens came from: [token_start, token_stop) of a tokenised source text."""

    seq: int
    domain: str
    source: str
    source_sha256: str
    token_start: int
    token_stop: int
    generated: bool = False  # the model's own tokens follow the prompt


@dataclass(frozen=True, slots=True)
class TraceHeader:
    model: str
    model_sha256: str
    n_layers: int
    n_neurons: int  # FFN hidden units per layer
    d_model: int
    activation: str
    activation_threshold: float  # a neuron is active when its activation exceeds this
    gating: str
    complete: bool  # every active neuron is in the trace
    tokenizer_sha256: str
    sequences: tuple[SequenceInfo, ...]
    predicted_trigger: str | None = (
        None  # trigger the predicted column was made for; None: no column
    )
    hardware: dict[str, Any] = field(default_factory=dict)
    capacities: tuple[int, ...] = ()  # resolved slots per layer while recording
    recorder_overhead: float = math.nan  # share of the step time that recording added
    synthetic: bool = False
    truncated_at: int | None = None  # tokens kept, where the recording had been cut before sealing
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.n_layers < 1 or self.n_neurons < 1 or self.n_layers > np.iinfo(np.uint16).max:
            raise KairoxError(
                f"a trace of {self.n_layers} layers x {self.n_neurons} neurons: needs 1 to 65535 "
                "layers and at least 1 neuron"
            )
        if self.gating not in GATINGS:
            raise KairoxError(f"gating {self.gating!r} in a trace header: must be one of {GATINGS}")
        seqs = [s.seq for s in self.sequences]
        if len(set(seqs)) != len(seqs):
            raise KairoxError(f"a trace header lists a sequence twice: {seqs}")
        for s in self.sequences:
            if not 0 <= s.token_start <= s.token_stop:
                raise KairoxError(
                    f"sequence {s.seq} spans tokens [{s.token_start}, {s.token_stop}): the start "
                    "must be at least 0 and not behind the stop"
                )

    @property
    def n_bytes(self) -> int:
        """Bytes of one row of bits: padded to 64 neurons."""
        return -(-self.n_neurons // 64) * 8

    def check_model(
        self,
        *,
        model_sha256: str | None = None,
        n_layers: int | None = None,
        n_neurons: int | None = None,
    ) -> None:
        """KairoxError unless the trace was recorded with this model; None is not compared."""
        wanted = {"model_sha256": model_sha256, "n_layers": n_layers, "n_neurons": n_neurons}
        for name, want in wanted.items():
            got = getattr(self, name)
            if want is not None and got != want:
                raise KairoxError(
                    f"the trace was recorded with {self.model}, {name} {got!r}, and is used with a "
                    f"model of {name} {want!r}: record a trace with the model at hand"
                )

    def to_json(self) -> str:
        return json.dumps(_nan_to_null(dataclasses.asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise KairoxError(
                f"trace format version {version!r}: this release reads version {FORMAT_VERSION}; "
                "use the release that wrote the trace, or a newer one"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(content) - known):
            raise KairoxError(f"unknown keys {unknown} in a trace header; known: {sorted(known)}")
        try:
            content["sequences"] = tuple(SequenceInfo(**s) for s in content["sequences"])
            content["capacities"] = tuple(content["capacities"])
            if content["recorder_overhead"] is None:
                content["recorder_overhead"] = math.nan
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise KairoxError(f"a trace header lacks or misspells a key: {error}") from error


def pack(mask: ArrayLike) -> NDArray[np.uint8]:
    """bool[..., n] -> uint8[..., n_bytes]: bit i of byte b is neuron 8b + i, zero-padded to 64."""
    mask = np.asarray(mask, dtype=bool)
    n_bytes = -(-mask.shape[-1] // 64) * 8
    packed = np.zeros((*mask.shape[:-1], n_bytes), np.uint8)
    packed[..., : -(-mask.shape[-1] // 8)] = np.packbits(mask, axis=-1, bitorder="little")
    return packed


def unpack(bits: NDArray[np.uint8], n_neurons: int) -> NDArray[np.bool_]:
    """uint8[..., n_bytes] -> bool[..., n_neurons]"""
    return np.unpackbits(bits, axis=-1, count=n_neurons, bitorder="little").view(np.bool_)


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
        return fired[fired > 0].astype(np.float32) / np.float32(self.n_tokens)


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
        """One value per row; phase 0 prefill, 1 decode; bit arrays packed, or bool[n_rows, n_neurons]."""
        given = {"seq": seq, "step": step, "token": token, "layer": layer, "phase": phase}
        columns: Columns = {n: np.array(given[n]).astype(dtype) for n, _, dtype in SCALARS}
        n_rows = len(columns["seq"])
        columns["bits"] = _as_bits(bits, n_rows, header, "bits")
        if evaluated_bits is not None:
            columns["evaluated"] = _as_bits(evaluated_bits, n_rows, header, "evaluated_bits")
        if predicted_bits is not None:
            columns["predicted"] = _as_bits(predicted_bits, n_rows, header, "predicted_bits")
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
        return Trace(
            header,
            {name: array[rows] for name, array in self._columns.items()},
            path=self.path,
            truncated_at=self.truncated_at,
            warnings=self.warnings,
            context_len=self._context_len[keep],
        )


class TraceWriter:
    """Records layer-steps into an Arrow IPC stream; what was acknowledged survives a kill.

    Whole steps only reach the file: `steps_per_batch` of them at a time, each batch with its checksum
    and on the disk before `append` returns. An exception inside the `with` block keeps the whole
    steps and leaves the file without its end mark, so that readers say that it was cut.
    """

    def __init__(self, path: str | Path, header: TraceHeader, steps_per_batch: int = 8) -> None:
        if steps_per_batch < 1:
            raise KairoxError(f"steps_per_batch is {steps_per_batch}: at least 1 is needed")
        self.path = Path(path)
        self.header = header
        self._steps_per_batch = steps_per_batch
        self._known_seqs = {s.seq for s in header.sequences}
        self._container: ContainerWriter | None = None
        self._has_evaluated = False
        self._open: dict[int, Columns] = {}  # layers of the step being recorded
        self._last: tuple[int, int, str, NDArray[np.int32]] | None = None  # of that step
        self._whole: list[Columns] = []  # whole steps not yet written
        self._closed = False
        self.path.open("wb").close()  # fail now, not at the first batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def append(
        self,
        *,
        seq: int,
        step: int,
        phase: str,
        tokens: ArrayLike,
        layer: int,
        active: NDArray[Any],
        evaluated: NDArray[Any] | None = None,
        predicted: NDArray[Any] | None = None,
    ) -> None:
        """One layer of one step, layers in any order; the sets are bool[n_tokens, n_neurons] or
        packed uint8[n_tokens, n_bytes]. `predicted` None: nothing was predicted here."""
        if self._closed:
            raise KairoxError(f"{self.path} is closed: nothing can be appended")
        ids = np.array(tokens, dtype=np.int32).reshape(-1)
        self._check_place(seq, step, phase, ids, layer)
        if predicted is not None and self.header.predicted_trigger is None:
            raise KairoxError(
                "a predicted set, but the header names no predicted_trigger: say which trigger the "
                "predictions were made for, so that a simulation of another one can refuse them"
            )
        if self._container is None:
            self._has_evaluated = evaluated is not None
            self._container = self._create()
        if (evaluated is not None) != self._has_evaluated:
            raise KairoxError(
                f"step {step}, layer {layer}: evaluated sets must be given for every layer-step or "
                f"for none; the first one was {'given' if self._has_evaluated else 'not given'}"
            )
        n = len(ids)
        rows: Columns = {
            "seq": np.full(n, seq, np.uint32),
            "step": np.full(n, step, np.uint32),
            "token": ids,
            "layer": np.full(n, layer, np.uint16),
            "phase": np.full(n, PHASES.index(phase), np.uint8),
            "bits": _as_bits(active, n, self.header, "active"),
        }
        if evaluated is not None:
            rows["evaluated"] = _as_bits(evaluated, n, self.header, "evaluated")
        if self.header.predicted_trigger is not None:
            rows["predicted"] = (
                np.zeros((n, self.header.n_bytes), np.uint8)
                if predicted is None
                else _as_bits(predicted, n, self.header, "predicted")
            )
            rows["predicted_known"] = np.full(n, predicted is not None)
        self._last = (seq, step, phase, ids)
        self._open[layer] = rows
        if len(self._open) == self.header.n_layers:
            self._whole.append(_join([self._open[k] for k in sorted(self._open)]))
            self._open.clear()
            if len(self._whole) == self._steps_per_batch:
                self._write_whole()

    def close(self) -> None:
        """Write what is left and the end mark. KairoxError if layers of the last step are missing:
        then the whole steps are kept, without an end mark."""
        if self._closed:
            return
        if self._open:
            self.abandon()
            raise self._missing_layers("recording ended")
        self._write_whole()
        self._closed = True
        if self._container is None:
            self._container = self._create()
        self._container.close()

    def abandon(self) -> None:
        """Keep the whole steps and close without an end mark: the recording did not finish."""
        if self._closed:
            return
        self._closed = True
        if self._container is not None:
            self._write_whole()
            self._container.abandon()

    def _create(self) -> ContainerWriter:
        optional = ("evaluated",) if self._has_evaluated else ()
        if self.header.predicted_trigger is not None:
            optional = (*optional, "predicted")
        text, n_bytes = self.header.to_json(), self.header.n_bytes
        return ContainerWriter(self.path, text, n_bytes, ("bits", *optional), sealed=False)

    def _write_whole(self) -> None:
        if self._whole and self._container is not None:
            self._container.write(_join(self._whole))
            self._whole.clear()

    def _check_place(
        self, seq: int, step: int, phase: str, tokens: NDArray[np.int32], layer: int
    ) -> None:
        where = f"step {step}, layer {layer}"
        if not 0 <= layer < self.header.n_layers:
            raise KairoxError(f"{where}: the header says {self.header.n_layers} layers")
        if layer in self._open and self._last is not None and step == self._last[1]:
            raise KairoxError(f"{where}: recorded twice")
        if phase not in PHASES:
            raise KairoxError(f"{where}: phase {phase!r}, must be one of {PHASES}")
        if len(tokens) < 1 or (phase == "decode" and len(tokens) != 1):
            raise KairoxError(
                f"{where}: {len(tokens)} tokens in {phase}; prefill takes 1 or more, decode 1"
            )
        if seq not in self._known_seqs:
            raise KairoxError(
                f"{where}: sequence {seq} is not in the header, which lists "
                f"{sorted(self._known_seqs)}; describe it there before recording"
            )
        if self._last is None:
            return
        last_seq, last_step, last_phase, last_tokens = self._last
        if self._open and step != last_step:
            raise self._missing_layers(f"step {step} began")
        if self._open and (
            (seq, phase) != (last_seq, last_phase) or not np.array_equal(tokens, last_tokens)
        ):
            raise KairoxError(
                f"{where}: sequence, phase or tokens differ from the step's first layer"
            )
        if not self._open and step <= last_step:
            raise KairoxError(f"{where}: step numbers must grow; the one before was {last_step}")

    def _missing_layers(self, when: str) -> KairoxError:
        missing = sorted(set(range(self.header.n_layers)) - set(self._open))
        step = None if self._last is None else self._last[1]
        return KairoxError(
            f"records missing: {when} and step {step} has no rows for layers {missing} of "
            f"{self.header.n_layers}. Rows must equal layers x tokens: are the hooks of these "
            "layers attached, and called on every forward pass?"
        )


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
        warnings = (*warnings, f"{path}: truncated at token {truncated_at}, before it was sealed")
    if contents.cut is not None:
        truncated_at = n_tokens
        warnings = (*warnings, f"{path}: truncated at token {n_tokens}; it {contents.cut}")
    if strict and warnings:
        raise KairoxError(
            "; ".join(warnings)
            + ". Strict reading refuses it: read without strict, or `seal` it to "
            "keep what is whole"
        )
    return Trace(header, contents.columns, path=path, truncated_at=truncated_at, warnings=warnings)


def seal(
    path: str | Path,
    out: str | Path | None = None,
    *,
    header_updates: Mapping[str, Any] | None = None,
) -> Path:
    """Rewrite a recording as a random-access Arrow IPC file, in place or to `out`; returns its path.

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
    with ContainerWriter(partial, header.to_json(), header.n_bytes, names, sealed=True) as out:
        first = 0
        for last in trace._first[1:]:
            if last - first >= SEALED_BATCH_ROWS or last == len(trace.step):
                out.write({name: array[first:last] for name, array in columns.items()})
                first = last
    os.replace(partial, path)
    return path


def _ids(row: NDArray[np.uint8], n_neurons: int) -> NDArray[np.int32]:
    """Set bits of one row, ascending."""
    # bool, not uint8: numpy finds the non-zeros of a bool array several times faster.
    mask = np.unpackbits(row, count=n_neurons, bitorder="little").view(np.bool_)
    return np.flatnonzero(mask).astype(np.int32)


def _as_bits(rows: NDArray[Any], n_rows: int, header: TraceHeader, name: str) -> NDArray[np.uint8]:
    """A packed copy of bool[n_rows, n_neurons] or uint8[n_rows, n_bytes]."""
    n, n_bytes = header.n_neurons, header.n_bytes
    if rows.dtype == np.bool_ and rows.shape == (n_rows, n):
        return pack(rows)
    if rows.dtype == np.uint8 and rows.shape == (n_rows, n_bytes):
        bits: NDArray[np.uint8] = np.array(rows, order="C")
        if n % 64 and pack(unpack(bits, n)).tobytes() != bits.tobytes():
            raise KairoxError(
                f"{name} has bits set behind neuron {n - 1}: the padding must be zero"
            )
        return bits
    raise KairoxError(
        f"{name} is {rows.dtype}{list(rows.shape)}: expected bool[{n_rows}, {n}] or packed "
        f"uint8[{n_rows}, {n_bytes}]"
    )


def _join(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _check_rows(
    header: TraceHeader, columns: Columns
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first row of each step [n_steps + 1], tokens of each step [n_steps]), the order verified."""
    step, n_rows = columns["step"], len(columns["step"])
    first = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1]))) if n_rows else []
    bounds = np.append(first, n_rows).astype(np.int64)
    starts, n_tokens = bounds[:-1], np.diff(bounds) // header.n_layers
    broken = np.diff(bounds) != n_tokens * header.n_layers
    if broken.any():
        at = int(np.flatnonzero(broken)[0])
        raise KairoxError(
            f"step {step[bounds[at]]} has {np.diff(bounds)[at]} rows: not a multiple of the header's "
            f"{header.n_layers} layers"
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


def _nan_to_null(value: Any) -> Any:
    """JSON has no nan; unknown numbers become null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {k: _nan_to_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_to_null(v) for v in value]
    return value

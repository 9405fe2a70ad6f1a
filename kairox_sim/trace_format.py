"""What a trace says about itself, and how a set of neurons is a row of bits.

The header travels as JSON inside the file; traces/README.md describes every field.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kairox_sim.errors import KairoxError

FORMAT_VERSION = 1
GATINGS = ("oracle", "exact", "screened", "predicted")
PHASES = ("prefill", "decode")  # index = the stored phase


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Where a sequence's tokens came from: [token_start, token_stop) of a tokenised source."""

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
    approximate: str | None = None  # what is left out although it is not zero; None: nothing is
    # kind (hybrid, plain), dtype of the residual stream, weights (format of FFN rows), numerics
    run: dict[str, Any] = field(default_factory=dict)
    truncated_at: int | None = None  # tokens kept, where the recording had been cut before sealing
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.n_layers < 1 or self.n_neurons < 1 or self.n_layers > np.iinfo(np.uint16).max:
            raise KairoxError(
                f"a trace of {self.n_layers} layers x {self.n_neurons} neurons: needs 1 to 65535 "
                "layers and at least 1 neuron"
            )
        if not math.isfinite(self.activation_threshold):
            raise KairoxError(
                f"activation_threshold {self.activation_threshold}: a trace must say what counts "
                "as active, 0.0 for exactly-zero activations"
            )
        if self.gating not in GATINGS:
            raise KairoxError(f"gating {self.gating!r} in a trace header: must be one of {GATINGS}")
        seqs = [s.seq for s in self.sequences]
        if len(set(seqs)) != len(seqs):
            raise KairoxError(f"a trace header lists a sequence twice: {seqs}")
        for s in self.sequences:
            if not 0 <= s.seq <= np.iinfo(np.uint32).max:
                raise KairoxError(f"sequence number {s.seq}: it must fit 32 bits, unsigned")
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
        try:
            return json.dumps(_nan_to_null(dataclasses.asdict(self)), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise KairoxError(
                f"the trace header cannot be written as JSON: {error}; it takes text, booleans, "
                "finite numbers (nan: unknown), lists and dicts"
            ) from error

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
    packed = np.packbits(np.asarray(mask, dtype=bool), axis=-1, bitorder="little")
    n_bytes = packed.shape[-1]
    if n_bytes % 8 == 0:
        return packed
    padded = np.zeros((*packed.shape[:-1], n_bytes + -n_bytes % 8), np.uint8)
    padded[..., :n_bytes] = packed
    return padded


def unpack(bits: NDArray[np.uint8], n_neurons: int) -> NDArray[np.bool_]:
    """uint8[..., n_bytes] -> bool[..., n_neurons]"""
    return np.unpackbits(bits, axis=-1, count=n_neurons, bitorder="little").view(np.bool_)


def as_bits(rows: NDArray[Any], n_rows: int, header: TraceHeader, name: str) -> NDArray[np.uint8]:
    """A packed copy of bool[n_rows, n_neurons] or uint8[n_rows, n_bytes]."""
    n, n_bytes = header.n_neurons, header.n_bytes
    if rows.dtype == np.bool_ and rows.shape == (n_rows, n):
        return pack(rows)
    if rows.dtype == np.uint8 and rows.shape == (n_rows, n_bytes):
        bits: NDArray[np.uint8] = np.array(rows, order="C")
        check_bits(bits, header, name)
        return bits
    raise KairoxError(
        f"{name} is {rows.dtype}{list(rows.shape)}: expected bool[{n_rows}, {n}] or packed "
        f"uint8[{n_rows}, {n_bytes}]"
    )


def check_bits(bits: NDArray[np.uint8], header: TraceHeader, name: str) -> None:
    """KairoxError unless rows have the header's width and zeros behind the last neuron."""
    n, n_bytes = header.n_neurons, header.n_bytes
    if bits.shape[1] != n_bytes:
        raise KairoxError(
            f"{name} has rows of {bits.shape[1]} bytes: {n} neurons take {n_bytes}, padded to 64"
        )
    if n % 64:
        last_word = np.ascontiguousarray(bits[:, -8:]).view("<u8")  # [n_rows, 1]
        if (last_word >> np.uint64(n % 64)).any():
            raise KairoxError(f"{name} has bits set behind neuron {n - 1}: padding must be zero")


def _nan_to_null(value: Any) -> Any:
    """JSON has no nan; unknown numbers become null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {k: _nan_to_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_to_null(v) for v in value]
    return value

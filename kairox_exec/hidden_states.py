"""Hidden states beside a trace: what a predictor is fed, row for row with the trace's tokens.

An Arrow IPC stream, a record batch per step on disk when the step has ended: a killed recording is
readable up to its last whole step. Columns: step u32, layer u16, at u8 (0: the state entering the
layer; 1: the residual after its attention), state (fixed-size binary, d_model float16). Rows of a
step and layer are its tokens in order. The header, JSON in the schema's metadata, names the model
and the trace's sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kairox_exec.families import Family, decoder_layers, hook_layer
from kairox_sim.errors import KairoxError
from kairox_sim.record import StepRecord
from kairox_sim.trace_format import SequenceInfo, TraceHeader

FORMAT = 1
ENTERING, AFTER_ATTENTION = 0, 1
TRIGGERS = ("attn_out", "attn_in")
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class StatesHeader:
    """Of a file of hidden states."""

    model: str
    model_sha256: str
    n_layers: int
    d_model: int
    trigger: str  # attn_out: after attention; attn_in: entering, and after attention of layer 0
    sequences: tuple[SequenceInfo, ...]


class HiddenStatesWriter:
    """Hooks a model's layers and writes what they say, step by step.

    trigger: the look-ahead whose predictor will be trained. Call `end_step` with every record the
    runner yields. A context manager; left with an error it keeps the whole steps.
    """

    def __init__(
        self, path: str | Path, header: TraceHeader, model: nn.Module, family: Family, trigger: str
    ) -> None:
        import pyarrow as pa

        if trigger not in TRIGGERS:
            raise KairoxError(
                f"hidden states are of a look-ahead trigger, got {trigger!r}; allowed: "
                f"{', '.join(TRIGGERS)}"
            )
        self.header = StatesHeader(
            header.model, header.model_sha256, header.n_layers, header.d_model, trigger,
            header.sequences,
        )  # fmt: skip
        about = json.dumps({"format": FORMAT, **asdict(self.header)})
        self._schema = pa.schema(
            [
                ("step", pa.uint32()),
                ("layer", pa.uint16()),
                ("at", pa.uint8()),
                ("state", pa.binary(2 * header.d_model)),
            ],
            metadata={"kairox.hidden": about},
        )
        self._file = Path(path).open("wb")  # noqa: SIM115  (closed in __exit__)
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._step: list[tuple[int, int, NDArray[np.float16]]] = []  # layer, at, [n_tokens, d]
        self._handles: list[Any] = []
        for i, layer in enumerate(decoder_layers(model, family)):
            after = partial(self._seen, i, AFTER_ATTENTION)
            self._handles += hook_layer(
                layer,
                family,
                entering=partial(self._seen, i, ENTERING) if trigger == "attn_in" else None,
                after_attention=after if trigger == "attn_out" or i == 0 else None,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self._stream.close()  # the end mark
        self._file.close()

    def _seen(self, layer: int, at: int, hidden: torch.Tensor) -> None:
        state = hidden.detach().reshape(-1, hidden.shape[-1]).to("cpu", torch.float32)
        limited = state.clamp(-_LARGEST, _LARGEST).to(torch.float16)
        self._step.append((layer, at, limited.numpy()))

    def end_step(self, record: StepRecord) -> None:
        """KairoxError unless every layer of the step was seen, with all its tokens."""
        import pyarrow as pa

        rows, self._step = self._step, []
        wanted = self.header.n_layers + (1 if self.header.trigger == "attn_in" else 0)
        if len(rows) != wanted or any(len(state) != record.n_tokens for _, _, state in rows):
            raise KairoxError(
                f"step {record.step}: {len(rows)} states of {wanted}, for {record.n_tokens} "
                "tokens: a layer's hook did not run; was the model compiled before?"
            )
        n = record.n_tokens
        columns = [
            np.full(n * len(rows), record.step, np.uint32),
            np.repeat(np.array([layer for layer, _, _ in rows], np.uint16), n),
            np.repeat(np.array([at for _, at, _ in rows], np.uint8), n),
        ]
        states = np.ascontiguousarray(np.concatenate([state for _, _, state in rows]))
        data = pa.py_buffer(states.tobytes())
        binary = pa.FixedSizeBinaryArray.from_buffers(
            self._schema.field("state").type, len(states), [None, data]
        )
        arrays = [*map(pa.array, columns), binary]
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._file.flush()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """A file read: `states[layer, at]` is float16 [n_tokens, d_model], in the trace's order."""

    header: StatesHeader
    states: dict[tuple[int, int], NDArray[np.float16]]
    n_tokens: int

    def fed_to(self, layer: int) -> NDArray[np.float16]:
        """What a predictor of `layer` is given: a state of the layer before; of layer 0 its own."""
        if layer == 0:
            return self.states[0, AFTER_ATTENTION]
        at = AFTER_ATTENTION if self.header.trigger == "attn_out" else ENTERING
        return self.states[layer - 1, at]

    def first(self, n_tokens: int) -> HiddenStates:
        """Of that many tokens, from the first on."""
        states = {key: rows[:n_tokens] for key, rows in self.states.items()}
        return HiddenStates(self.header, states, min(n_tokens, self.n_tokens))


def read_hidden_states(path: str | Path) -> HiddenStates:
    """Whole steps of a file, cut ones included. KairoxError where it is not one of ours."""
    import pyarrow as pa

    file = Path(path)
    try:
        with file.open("rb") as source:
            reader = pa.ipc.open_stream(source)
            header = _header(reader.schema, file)
            batches = list(_whole_batches(reader))
    except (OSError, pa.ArrowInvalid) as error:
        raise KairoxError(f"cannot read the hidden states {str(file)!r}: {error}") from error
    found: dict[tuple[int, int], list[NDArray[np.float16]]] = {}
    n_tokens = 0
    for batch in batches:
        layer = batch.column("layer").to_numpy()
        at = batch.column("at").to_numpy()
        column = batch.column("state")
        states = np.frombuffer(column.buffers()[1], np.float16).reshape(-1, header.d_model)
        states = states[column.offset : column.offset + len(column)]
        for key in dict.fromkeys(zip(layer.tolist(), at.tolist(), strict=True)):
            rows = states[(layer == key[0]) & (at == key[1])]
            found.setdefault(key, []).append(rows)
        n_tokens += int(((layer == 0) & (at == AFTER_ATTENTION)).sum())
    hidden = HiddenStates(header, {k: np.concatenate(v) for k, v in found.items()}, n_tokens)
    _require_whole(hidden, file)
    return hidden


def _require_whole(hidden: HiddenStates, file: Path) -> None:
    """Finite states, of every layer that a predictor is fed from, all of as many tokens."""
    if not hidden.n_tokens:
        raise KairoxError(f"{str(file)!r} holds no whole step of hidden states; record again")
    for layer in range(hidden.header.n_layers):
        try:
            states = hidden.fed_to(layer)
        except KeyError:
            states = np.zeros((0, 0), np.float16)
        if len(states) != hidden.n_tokens:
            raise KairoxError(
                f"{str(file)!r} is damaged: {len(states)} states of {hidden.n_tokens} tokens for "
                f"layer {layer}; record again"
            )
        wrong = np.flatnonzero(~np.isfinite(states).all(axis=1))
        if wrong.size:
            raise KairoxError(
                f"{str(file)!r}: NaN in the states fed to layer {layer}, first of token "
                f"{wrong[0]}, {wrong.size} tokens in all: the model's weights or its run were "
                "broken; nothing can be learnt from it"
            )


def _whole_batches(reader: Any) -> Iterator[Any]:
    import pyarrow as pa

    while True:
        try:
            yield reader.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError):  # the end, or where it was cut
            return


def _header(schema: Any, file: Path) -> StatesHeader:
    text = (schema.metadata or {}).get(b"kairox.hidden")
    if text is None:
        raise KairoxError(
            f"{str(file)!r} holds no hidden states; `kairox record --hidden FILE` writes them"
        )
    try:
        content = json.loads(text)
        version = content.pop("format")
        if version == FORMAT:
            sequences = tuple(SequenceInfo(**one) for one in content.pop("sequences"))
            header = StatesHeader(**content, sequences=sequences)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KairoxError(
            f"{str(file)!r}: the header of the hidden states is damaged ({error!r}); record again"
        ) from error
    if version != FORMAT:
        raise KairoxError(f"{str(file)!r} is of another version of kairox; record it again")
    width = schema.field("state").type.byte_width
    if header.trigger not in TRIGGERS or width != 2 * header.d_model:
        raise KairoxError(
            f"{str(file)!r} says trigger {header.trigger!r} and d_model {header.d_model} of states "
            f"of {width} bytes: that is no file of this version; record again"
        )
    return header

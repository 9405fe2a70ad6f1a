"""Recording: layer-steps in, durable batches of whole steps out."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.trace_file import Columns, ContainerWriter
from kairox_sim.trace_format import PHASES, TraceHeader, as_bits, check_bits

_LAST_STEP = (1 << 32) - 1


class _Step(NamedTuple):
    """A whole step; the rows of `bits`, part after part, are by layer, and in a layer by token."""

    seq: int
    step: int
    phase: int  # as stored
    tokens: list[int]
    bits: list[Columns]


class TraceWriter:
    """Records layer-steps into an Arrow IPC stream; what was acknowledged survives a kill.

    Only whole steps reach the file: `steps_per_batch` of them at a time, each batch with its
    checksum and out of the process before `append` returns. An exception inside the `with` block
    keeps the whole steps and leaves the file without its end mark: readers then say that it was
    cut.
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
        self._open: dict[int, Columns] = {}  # bits by layer, of the step being recorded
        self._last: tuple[int, int, str, list[int]] | None = None  # seq, step ... of that step
        self._whole: list[_Step] = []  # not yet written
        self._closed = False
        self._header_json = header.to_json()  # fail now, not at the first batch
        self.path.open("wb").close()

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
        ids: list[int] = np.asarray(tokens).reshape(-1).tolist()
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
        rows: Columns = {"bits": as_bits(active, n, self.header, "active")}
        if evaluated is not None:
            rows["evaluated"] = as_bits(evaluated, n, self.header, "evaluated")
        if self.header.predicted_trigger is not None:
            rows["predicted"] = (
                np.zeros((n, self.header.n_bytes), np.uint8)
                if predicted is None
                else as_bits(predicted, n, self.header, "predicted")
            )
            rows["predicted_known"] = (np.zeros if predicted is None else np.ones)(n, bool)
        self._last = (seq, step, phase, ids)
        self._open[layer] = rows
        if len(self._open) == self.header.n_layers:
            bits = [self._open[i] for i in range(self.header.n_layers)]
            self._open.clear()
            self._keep(_Step(seq, step, PHASES.index(phase), ids, bits))

    def append_step(
        self, *, seq: int, step: int, phase: str, tokens: ArrayLike, active: NDArray[np.uint8]
    ) -> None:
        """All layers of one step: packed uint8[n_layers, n_tokens, n_bytes], nothing predicted.

        `active` is kept until the step is written: do not change it.
        """
        if self._closed:
            raise KairoxError(f"{self.path} is closed: nothing can be appended")
        ids: list[int] = np.asarray(tokens).reshape(-1).tolist()
        n_layers, n_tokens = self.header.n_layers, len(ids)
        if self._open or self._has_evaluated or self.header.predicted_trigger is not None:
            raise KairoxError(
                f"step {step}: a step of active sets alone, in a trace of which steps are under "
                "way layer by layer, or have evaluated or predicted sets"
            )
        self._check_place(seq, step, phase, ids, 0)
        if active.ndim != 3 or active.shape[:2] != (n_layers, n_tokens) or active.dtype != np.uint8:
            raise KairoxError(
                f"step {step}: active sets {active.dtype}{list(active.shape)} for {n_layers} "
                f"layers of {n_tokens} tokens, packed"
            )
        rows = active.reshape(n_layers * n_tokens, -1)
        check_bits(rows, self.header, "active")
        if self._container is None:
            self._container = self._create()
        self._last = (seq, step, phase, ids)
        self._keep(_Step(seq, step, PHASES.index(phase), ids, [{"bits": rows}]))

    def flush(self) -> None:
        """Write the whole steps that there are, as one batch."""
        if not self._closed:
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
            try:
                self._write_whole()
            finally:
                self._container.abandon()

    def _create(self) -> ContainerWriter:
        optional = ("evaluated",) if self._has_evaluated else ()
        if self.header.predicted_trigger is not None:
            optional = (*optional, "predicted")
        return ContainerWriter(
            self.path, self._header_json, self.header.n_bytes, ("bits", *optional), sealed=False
        )

    def _keep(self, step: _Step) -> None:
        self._whole.append(step)
        if len(self._whole) == self._steps_per_batch:
            self._write_whole()

    def _write_whole(self) -> None:
        if self._whole and self._container is not None:
            # What fails is not tried again: behind half a batch it would read as damage.
            steps, self._whole = self._whole, []
            self._container.write(_columns(steps, self.header.n_layers))

    def _check_place(self, seq: int, step: int, phase: str, tokens: list[int], layer: int) -> None:
        is_new = 0 <= layer < self.header.n_layers and layer not in self._open
        if self._open and is_new and (seq, step, phase, tokens) == self._last:
            return  # as the step's other layers, which were checked
        where = f"step {step}, layer {layer}"
        if not 0 <= layer < self.header.n_layers:
            raise KairoxError(f"{where}: the header says {self.header.n_layers} layers")
        if layer in self._open and self._last is not None and step == self._last[1]:
            raise KairoxError(f"{where}: recorded twice")
        if not 0 <= step <= _LAST_STEP:
            raise KairoxError(f"{where}: step numbers are stored as unsigned 32-bit ones")
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
        if self._open and ((seq, phase, tokens) != (last_seq, last_phase, last_tokens)):
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


def _columns(steps: Sequence[_Step], n_layers: int) -> Columns:
    """The rows of whole steps: layer after layer, of each all the step's tokens."""
    parts = [part for step in steps for part in step.bits]
    n_tokens = np.array([len(step.tokens) for step in steps])
    n_rows = n_tokens * n_layers
    tokens = np.array([token for step in steps for token in step.tokens], np.int32)
    per_layer = np.repeat(n_tokens, n_layers)  # rows of each layer of each step
    layers = np.tile(np.arange(n_layers, dtype=np.uint16), len(steps))
    # Each layer repeats its step's tokens: from where they begin, counted from its first row.
    begins = np.repeat(np.cumsum(n_tokens) - n_tokens, n_layers)
    counted_from = np.cumsum(per_layer) - per_layer
    at = np.arange(n_rows.sum()) + np.repeat(begins - counted_from, per_layer)
    return {
        "seq": np.repeat(np.array([step.seq for step in steps], np.uint32), n_rows),
        "step": np.repeat(np.array([step.step for step in steps], np.uint32), n_rows),
        "token": tokens[at],
        "layer": np.repeat(layers, per_layer),
        "phase": np.repeat(np.array([step.phase for step in steps], np.uint8), n_rows),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    }

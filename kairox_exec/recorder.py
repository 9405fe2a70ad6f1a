"""Recorder: what fired in a run, layer by layer, into a trace; and what recording it cost.

It is a Runner's `on_layer`. Every step must bring every layer once: hooks that a compiled model
never calls would otherwise give a recording with holes that looks like a sparse one.
"""

from __future__ import annotations

import time
from math import nan
from pathlib import Path
from types import TracebackType
from typing import Self

from kairox_exec.layer_step import LayerStep
from kairox_sim.errors import KairoxError
from kairox_sim.record import StepRecord
from kairox_sim.trace_format import TraceHeader
from kairox_sim.trace_writer import TraceWriter


class Recorder:
    """Set as `runner.pipeline.on_layer`; call `end_step` with every record the runner yields.

    A context manager: left without an error it closes the trace, with one it keeps the whole steps.
    `predicts_layer0`: whether the header's trigger predicts layer 0 too, as `serial` does.
    """

    def __init__(self, path: str | Path, header: TraceHeader, *, steps_per_batch: int = 8) -> None:
        self.header = header
        self.n_steps = self.n_tokens = 0
        self._writer = TraceWriter(path, header, steps_per_batch=steps_per_batch)
        self._first_predicted = 0 if header.predicted_trigger == "serial" else 1
        self._seen: set[int] = set()  # layers of the step under way
        self._inside_ns = self._wall_ns = 0

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

    def __call__(self, layer_step: LayerStep) -> None:
        began_ns = time.perf_counter_ns()
        step, layer = layer_step.step, layer_step.layer
        predicted = layer_step.predicted
        if self.header.predicted_trigger is None:
            predicted = None
        elif predicted is None and layer >= self._first_predicted:
            raise KairoxError(
                f"step {step.step}, layer {layer}: nothing was predicted, and the header says that "
                f"predictions of trigger {self.header.predicted_trigger!r} are recorded. The hook "
                "behind this layer's attention did not run: was the layer compiled before? Attach "
                "the executor to the plain model"
            )
        evaluated = layer_step.evaluated
        self._writer.append(
            seq=step.seq,
            step=step.step,
            phase=step.phase,
            tokens=step.tokens,
            layer=layer,
            active=layer_step.active,
            evaluated=None if evaluated is layer_step.active else evaluated,
            predicted=predicted,
        )
        self._seen.add(layer)
        self._inside_ns += time.perf_counter_ns() - began_ns

    def end_step(self, record: StepRecord) -> None:
        """KairoxError unless every layer of the step was recorded."""
        missing = sorted(set(range(self.header.n_layers)) - self._seen)
        if missing:
            raise KairoxError(
                f"records missing: step {record.step} brought no layers {missing} of "
                f"{self.header.n_layers}. Rows must equal layers x tokens: was the model compiled "
                "before the recorder was attached, or one of its FFNs replaced?"
            )
        self._seen.clear()
        self.n_steps += 1
        self.n_tokens += record.n_tokens
        self._wall_ns += round(record.wall_s * 1e9)

    @property
    def overhead(self) -> float:
        """Share of the steps' time spent in here, writing to disk included; nan before the first.

        Of this thread: on an emulated machine that waits anyway it costs the run less.
        """
        return self._inside_ns / self._wall_ns if self._wall_ns else nan

    def close(self) -> None:
        """Write what is left and the end mark. KairoxError if records are missing."""
        self._writer.close()

    def abandon(self) -> None:
        """Keep the whole steps; the trace says that it was cut."""
        self._writer.abandon()

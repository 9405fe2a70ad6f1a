"""What a predictor says before the truth is known: recorded, perfect, or of a given quality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import Ids, Share
from kairox_sim.trace import Trace, TraceStep, pack, unpack


class Predictions(Protocol):
    """`label` stands beside every number that used them."""

    @property
    def label(self) -> str: ...

    def of(self, step: TraceStep, layer: int, evaluated: Ids) -> tuple[Ids, Share | None]:
        """(ids, share); share is None in decode. `evaluated` is the truth, for those who cheat."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """The trace's own predicted column, made for one trigger."""

    label: str = "recorded prediction"

    def of(self, step: TraceStep, layer: int, evaluated: Ids) -> tuple[Ids, Share | None]:
        ids = step.predicted(layer)
        if ids is None:
            raise KairoxError(
                f"step {step.step}, layer {layer}: the trace has no prediction here; "
                "ask for perfect prediction or a recall and precision"
            )
        return ids, None if step.n_tokens == 1 else step.predicted_share(layer)


@dataclass(frozen=True, slots=True)
class Perfect:
    """Predicted = evaluated: an upper bound, labelled so."""

    label: str = "perfect prediction"

    def of(self, step: TraceStep, layer: int, evaluated: Ids) -> tuple[Ids, Share | None]:
        share = None if step.n_tokens == 1 else step.evaluated_share(layer)
        return evaluated, share


@dataclass(frozen=True, slots=True)
class OfQuality:
    """Random misses and false alarms at a given recall and precision; the same for a given seed."""

    recall: float
    precision: float
    n_neurons: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.recall <= 1 and 0 < self.precision <= 1):
            raise KairoxError(
                f"recall must be in [0, 1] and precision in (0, 1], got {self.recall} "
                f"and {self.precision}"
            )

    @property
    def label(self) -> str:
        return f"prediction of recall {self.recall:g}, precision {self.precision:g}"

    def of(self, step: TraceStep, layer: int, evaluated: Ids) -> tuple[Ids, Share | None]:
        rng = np.random.default_rng((self.seed, step.step, layer))
        truth = evaluated
        kept = rng.random(truth.size) < self.recall
        silent = np.setdiff1d(np.arange(self.n_neurons, dtype=np.int32), truth)
        mean_alarms = np.count_nonzero(kept) * (1 - self.precision) / self.precision
        alarms = silent[rng.random(silent.size) < mean_alarms / max(1, silent.size)]
        ids = np.concatenate([truth[kept], alarms])
        order = np.argsort(ids)
        if step.n_tokens == 1:
            return ids[order], None
        share = step.evaluated_share(layer)
        one_token = np.full(alarms.size, 1 / step.n_tokens, np.float32)
        return ids[order], np.concatenate([share[kept], one_token])[order]


def as_predicted(trace: Trace, quality: tuple[float, float], trigger: str, seed: int = 0) -> Trace:
    """The trace as a predictor of this recall and precision would have it run: what it says is
    evaluated.

    Misses and false alarms are drawn per layer, evenly over active and silent neurons; the same
    for a given seed. What is evaluated is not all that fires, and its cost is that of what is
    predicted.
    """
    recall, precision = quality
    header = trace.header
    said = np.zeros_like(trace.bits)
    for layer in range(header.n_layers):
        rows = np.flatnonzero(trace.layer == layer)
        rng = np.random.default_rng((seed, layer))
        for part in np.array_split(rows, max(1, rows.size * header.n_neurons >> 22)):
            active = unpack(trace.bits[part], header.n_neurons).astype(bool)
            draw = rng.random(active.shape, np.float32)
            kept = active & (draw < recall)
            mean_alarms = kept.sum(axis=1) * (1 - precision) / precision  # [n_rows]
            silent = header.n_neurons - active.sum(axis=1)
            chance = mean_alarms / np.maximum(silent, 1)
            said[part] = pack(kept | (~active & (draw < chance[:, None])))
    return trace.evaluating(said, trigger)


def predictions_for(
    trace: Trace,
    trigger: str,
    *,
    perfect: bool = False,
    quality: tuple[float, float] | None = None,
    seed: int = 0,
) -> Predictions:
    """The predictions to use; raises where the trace has none made for this trigger."""
    if perfect:
        return Perfect()
    if quality is not None:
        return OfQuality(*quality, n_neurons=trace.header.n_neurons, seed=seed)
    made_for = trace.header.predicted_trigger
    if trace.predicted_bits is None:
        raise KairoxError(
            f"trigger {trigger!r} needs predictions and the trace has none; record with a "
            "look-ahead predictor (hybrid runs do), ask for perfect prediction (--set "
            "prediction=perfect) or a recall and precision (--set prediction=0.9,0.8), or plan "
            "from what has fired (--set trigger=after)"
        )
    if made_for != trigger:
        raise KairoxError(
            f"the trace's predictions were made for trigger {made_for!r}, not {trigger!r}; "
            f"use {made_for!r}, or ask for perfect prediction (--set prediction=perfect) or a "
            "recall and precision (--set prediction=0.9,0.8)"
        )
    return Recorded()

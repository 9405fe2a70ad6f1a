"""How good a trained predictor is on tokens that it was not trained on, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from kairox_exec.hidden_states import HiddenStates
from kairox_exec.mlp_predictor import MlpPredictor
from kairox_exec.predictor_training import active_of, require_pair
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace

WARM, TIMED = 5, 50  # predictions before and under the clock, a token each
SHORT = 0.05  # of recall under its target that is warned of
GUESS = 1.5  # times the share of neurons that fire: a precision not above it is warned of

Seen = tuple[str, int, int]
"""(text's sha256, first token, token after the last)"""


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """Of one layer; ratios over all tokens, nan where nothing was active or predicted."""

    layer: int
    recall_target: float
    threshold: float
    recall: float
    precision: float
    density: float  # active neurons over all
    predicted_share: float  # predicted neurons over all
    multiply_adds: int  # of a prediction for one token
    n_bytes: int  # read for a prediction, as stored: float16
    # Measured: a prediction for one token on this CPU, weights in float32; the median of 50.
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A predictor on a recording, whose states are those of the whole model: under gating predicted
    a neuron that is left out also moves the states that later layers are predicted from."""

    layers: tuple[LayerQuality, ...]
    tokens: int
    texts: tuple[str, ...]  # names of what was read
    known_texts: tuple[str, ...]  # of them, those that it learnt from other tokens of
    threads: int  # of torch, when it was timed

    @property
    def recall(self) -> float:
        """Over all layers' neurons at once."""
        return _ratio(self._both, sum(row.density for row in self.layers))

    @property
    def precision(self) -> float:
        """Over all layers' neurons at once."""
        return _ratio(self._both, sum(row.predicted_share for row in self.layers))

    def warnings(self) -> list[str]:
        """What a user should know before running with it."""
        told = []
        short = {
            row.layer: row.recall_target - row.recall
            for row in self.layers
            if row.recall_target - row.recall > SHORT
        }
        if short:
            layers = ", ".join(map(str, short))
            told.append(
                f"recall is under its target by up to {100 * max(short.values()):.0f} points "
                f"(layers {layers}): learn from text that is more like this one, or from more"
            )
        share = sum(row.density for row in self.layers) / len(self.layers)
        if self.precision < GUESS * share:
            told.append(
                f"precision {self.precision:.1%} is hardly better than guessing ({share:.1%} of "
                "all neurons fire): train on more tokens, for more epochs or with a larger rank"
            )
        return told

    @property
    def _both(self) -> float:
        return sum(row.recall * row.density for row in self.layers if row.density)


def require_unseen(seen: Iterable[Seen], judged_on: Iterable[tuple[str, Seen]]) -> None:
    """KairoxError where tokens were trained on. judged_on: with the name of each text.

    Texts are told apart by their hash: a changed copy of a text is not recognised.
    """
    learnt = list(seen)
    for name, (text, first, stop) in judged_on:
        for other, a, b in learnt:
            if text == other and a < stop and first < b:
                last = max(end for one, _, end in learnt if one == text)
                raise KairoxError(
                    f"{name} tokens {first} to {stop}: tokens {a} to {b} of it were trained on; "
                    f"judge the predictor on other ones (of this text the last is {last - 1})"
                )


def evaluate(predictor: MlpPredictor, trace: Trace, hidden: HiddenStates) -> Judged:
    """Recall, precision and cost of each layer on a recording.

    KairoxError where the recording is of another model or trigger, or was trained on.
    """
    require_pair(trace, hidden)
    info, header = predictor.info, trace.header
    if info.model_sha256 != header.model_sha256:
        raise KairoxError(
            f"the predictor was trained for {info.model!r} with weights {info.model_sha256[:12]} "
            f"and judged on {header.model!r} with weights {header.model_sha256[:12]}; use a text "
            "or a recording read by its own model"
        )
    if info.trigger != hidden.header.trigger:
        raise KairoxError(
            f"the predictor was trained for trigger {info.trigger!r} and the hidden states are of "
            f"{hidden.header.trigger!r}; record with --trigger {info.trigger}"
        )
    texts = {s.source: s.source_sha256 for s in header.sequences}
    require_unseen(
        info.seen,
        ((s.source, (s.source_sha256, s.token_start, s.token_stop)) for s in header.sequences),
    )
    known = {text for text, _, _ in info.seen}
    return Judged(
        layers=tuple(_quality(predictor, trace, hidden, i) for i in range(header.n_layers)),
        tokens=trace.n_tokens,
        texts=tuple(texts),
        known_texts=tuple(name for name, sha256 in texts.items() if sha256 in known),
        threads=torch.get_num_threads(),
    )


def _ratio(part: float, of: float) -> float:
    return part / of if of else float("nan")


def _quality(
    predictor: MlpPredictor, trace: Trace, hidden: HiddenStates, layer: int
) -> LayerQuality:
    states = torch.from_numpy(hidden.fed_to(layer).copy())
    predicted = predictor.predict(layer, states).numpy()
    active = active_of(trace, layer)
    both, n_active, n_predicted = (predicted & active).sum(), active.sum(), predicted.sum()
    net, info = predictor.nets[layer], predictor.info
    return LayerQuality(
        layer=layer,
        recall_target=info.target_of(layer),
        threshold=info.thresholds[layer],
        recall=_ratio(float(both), float(n_active)),
        precision=_ratio(float(both), float(n_predicted)),
        density=float(active.mean()),
        predicted_share=float(predicted.mean()),
        multiply_adds=net.down.numel() + net.up.numel(),
        n_bytes=predictor.n_bytes,
        seconds_per_token=_seconds(predictor, layer, states),
    )


def _seconds(predictor: MlpPredictor, layer: int, states: torch.Tensor) -> float:
    seconds = []
    for i in range(WARM + TIMED):
        state = states[i % len(states)]
        began_s = time.perf_counter()
        predictor.predict(layer, state)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[WARM:])

"""Training the adjacent-layer predictor on recorded hidden states, and how good it is elsewhere.

Binary cross-entropy over a layer's neurons, active ones weighted up by how rare they are; then the
layer's threshold is the highest that reaches the recall on tokens that were kept apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from kairox_exec.hidden_states import HiddenStates
from kairox_exec.mlp_predictor import LayerNet, MlpPredictor, PredictorInfo, normalised
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace

APART = 0.2  # of the training tokens, the last ones: thresholds are chosen on them
BATCH = 256  # tokens
LEARNING_RATE = 2e-3
LARGEST_WEIGHT = 10.0  # of an active neuron in the loss

Progress = Callable[[str, int, int], None]
"""(what, done, of how many)"""


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """Of one layer on tokens that were not trained on; nan where nothing was active."""

    layer: int
    recall: float
    precision: float
    density: float  # active neurons over all
    predicted_share: float
    flops_per_token: int
    n_bytes: int  # read for a prediction, in float16
    seconds: float  # measured: a prediction for one token on this machine's CPU, median


def train(
    trace: Trace,
    hidden: HiddenStates,
    *,
    rank: int | None = None,
    recall: float = 0.95,
    epochs: int = 12,
    seed: int = 0,
    progress: Progress | None = None,
) -> MlpPredictor:
    """A predictor for the model that `trace` and its `hidden` states are of.

    rank: a quarter of d_model by default, 32 at least. recall: of each layer's active neurons, on
    the last fifth of the tokens, which train nothing else.
    """
    _require_pair(trace, hidden)
    if not 0 < recall < 1:
        raise KairoxError(f"recall {recall}; it must be between 0 and 1, such as 0.95")
    width = rank or max(32, trace.header.d_model // 4)
    if width < 1 or epochs < 1:
        raise KairoxError(f"rank {width}, epochs {epochs}: both must be 1 or more")
    n_train = trace.n_tokens - int(APART * trace.n_tokens)
    if n_train < BATCH // 4 or n_train == trace.n_tokens:
        raise KairoxError(
            f"{trace.n_tokens} tokens are too few to train on and choose thresholds; record more"
        )
    generator = torch.Generator().manual_seed(seed)
    nets, thresholds = [], []
    for layer in range(trace.header.n_layers):
        if progress is not None:
            progress(f"layer {layer}", layer, trace.header.n_layers)
        x = normalised(torch.from_numpy(hidden.fed_to(layer).copy()))
        y = torch.from_numpy(_active(trace, layer))
        net = _fit(x[:n_train], y[:n_train], width, epochs, generator)
        nets.append(net)
        thresholds.append(_threshold(net, x[n_train:], y[n_train:], recall))
    header = trace.header
    info = PredictorInfo(
        model=header.model,
        model_sha256=header.model_sha256,
        trigger=hidden.header.trigger,
        rank=width,
        recall_target=recall,
        thresholds=tuple(thresholds),
        seen=tuple((s.source_sha256, s.token_start, s.token_stop) for s in header.sequences),
    )
    return MlpPredictor(info, tuple(nets))


def evaluate(predictor: MlpPredictor, trace: Trace, hidden: HiddenStates) -> list[LayerQuality]:
    """Recall, precision, cost of each layer. KairoxError where it was trained on these tokens."""
    _require_pair(trace, hidden)
    for text, start, stop in predictor.info.seen:
        for info in trace.header.sequences:
            if info.source_sha256 == text and start < info.token_stop and info.token_start < stop:
                raise KairoxError(
                    f"{info.source} tokens {info.token_start} to {info.token_stop} were trained on "
                    f"(tokens {start} to {stop}); judge the predictor on other ones"
                )
    return [_quality(predictor, trace, hidden, i) for i in range(trace.header.n_layers)]


def as_rows(qualities: list[LayerQuality]) -> list[dict[str, Any]]:
    """For a table or JSON."""
    return [asdict(row) for row in qualities]


def _quality(
    predictor: MlpPredictor, trace: Trace, hidden: HiddenStates, layer: int
) -> LayerQuality:
    states = torch.from_numpy(hidden.fed_to(layer).copy())
    predicted = predictor.predict(layer, states).numpy()
    active = _active(trace, layer)
    both, n_active, n_predicted = (predicted & active).sum(), active.sum(), predicted.sum()
    net = predictor.nets[layer]
    seconds = []
    for state in states[:20]:
        began_s = time.perf_counter()
        predictor.predict(layer, state)
        seconds.append(time.perf_counter() - began_s)
    return LayerQuality(
        layer=layer,
        recall=float(both / n_active) if n_active else float("nan"),
        precision=float(both / n_predicted) if n_predicted else float("nan"),
        density=float(active.mean()),
        predicted_share=float(predicted.mean()),
        flops_per_token=2 * (net.down.numel() + net.up.numel()),
        n_bytes=predictor.n_bytes,
        seconds=median(seconds),
    )


def _fit(
    x: torch.Tensor, y: torch.Tensor, rank: int, epochs: int, generator: torch.Generator
) -> LayerNet:
    n, d = x.shape
    n_neurons = y.shape[1]
    down = torch.randn((rank, d), generator=generator) / d**0.5
    up = torch.randn((n_neurons, rank), generator=generator) / rank**0.5
    parameters = [nn.Parameter(t) for t in (down, torch.zeros(rank), up, torch.zeros(n_neurons))]
    net = LayerNet(*parameters)
    share = y.float().mean().clamp(min=1e-4)
    weight = ((1 - share) / share).clamp(1.0, LARGEST_WEIGHT)
    steps = epochs * -(-n // BATCH)
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4 * LEARNING_RATE, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(n, generator=generator)
        for part in torch.split(order, BATCH):
            logits = _outputs(net, x[part])
            loss = functional.binary_cross_entropy_with_logits(
                logits, y[part].float(), pos_weight=weight
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    # As it will be stored, so that the threshold is of what runs.
    return LayerNet(*(p.detach().half().float() for p in parameters))


def _outputs(net: LayerNet, x: torch.Tensor) -> torch.Tensor:
    """`LayerNet.outputs` of states that are normalised already."""
    hidden = functional.relu(functional.linear(x, net.down, net.down_bias))
    return functional.linear(hidden, net.up, net.up_bias)


@torch.inference_mode()
def _threshold(net: LayerNet, x: torch.Tensor, y: torch.Tensor, recall: float) -> float:
    """The highest that at least `recall` of the active exceed; without any active one, 0."""
    of_active = torch.sort(_outputs(net, x)[y]).values
    if not len(of_active):
        return 0.0
    at = int(np.floor((1 - recall) * len(of_active)))
    # Just below the value itself, which must exceed it.
    return float(np.nextafter(np.float32(of_active[at].item()), np.float32(-np.inf)))


def _active(trace: Trace, layer: int) -> NDArray[np.bool_]:
    """bool [n_tokens, n_neurons]"""
    bits = trace.bits[trace.layer == layer]
    every = np.unpackbits(bits, axis=1, bitorder="little")[:, : trace.header.n_neurons]
    return every.astype(bool)


def _require_pair(trace: Trace, hidden: HiddenStates) -> None:
    ours, theirs = trace.header, hidden.header
    if (ours.model_sha256, ours.sequences) != (theirs.model_sha256, theirs.sequences):
        raise KairoxError(
            "the trace and the hidden states are of different models or texts; record both at once "
            "with --hidden"
        )
    if not ours.complete:
        raise KairoxError(
            "the trace does not hold every active neuron (gating predicted), so nothing can be "
            "learnt from it; record with exact gating"
        )
    if trace.n_tokens != hidden.n_tokens:
        raise KairoxError(
            f"the trace has {trace.n_tokens} tokens and the hidden states {hidden.n_tokens}: one "
            "of the recordings was cut; record again"
        )

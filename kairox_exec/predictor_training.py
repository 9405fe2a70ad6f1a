"""Training the adjacent-layer predictor on recorded hidden states.

Binary cross-entropy over a layer's neurons, active ones weighted up by how rare they are; then the
layer's threshold is the highest that reaches the recall on tokens that were kept apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from kairox_exec.hidden_states import HiddenStates
from kairox_exec.mlp_predictor import LayerNet, MlpPredictor, PredictorInfo, normalised
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace

APART = 0.2  # of each text's tokens, the last ones: thresholds are chosen on them
LEAST = 64  # tokens to train on
BATCH = 256  # tokens
LEARNING_RATE = 2e-3
LARGEST_WEIGHT = 10.0  # of an active neuron in the loss

Progress = Callable[[str, int, int], None]
"""(what, done, of how many)"""


def train(
    trace: Trace,
    hidden: HiddenStates,
    *,
    rank: int | None = None,
    recall: float | Sequence[float] = 0.95,
    epochs: int = 12,
    seed: int = 0,
    progress: Progress | None = None,
) -> MlpPredictor:
    """A predictor for the model that `trace` and its `hidden` states are of.

    rank: a quarter of d_model by default, 32 at least. recall: of each layer's active neurons, one
    target for all or one a layer, on the last fifth of every text, which trains nothing else.
    progress is told of every epoch of every layer.
    """
    require_pair(trace, hidden)
    header = trace.header
    n_layers = header.n_layers
    targets = [recall] * n_layers if isinstance(recall, int | float) else list(recall)
    if len(targets) != n_layers or not all(0 < target < 1 for target in targets):
        raise KairoxError(
            f"recall {', '.join(f'{t:g}' for t in targets)}; it must be between 0 and 1, such as "
            f"0.95: one for all layers, or one for each of the {n_layers}"
        )
    width = max(32, header.d_model // 4) if rank is None else rank
    if width < 1 or epochs < 1:
        raise KairoxError(f"rank {width}, epochs {epochs}: both must be 1 or more")
    kept = apart(trace)
    if (~kept).sum() < LEAST or not kept.any():
        raise KairoxError(
            f"{trace.n_tokens} tokens are too few: at least {LEAST} to train on, and a fifth more "
            "of each text to choose thresholds; record more"
        )
    learnt, chosen = torch.from_numpy(~kept), torch.from_numpy(kept)
    generator = torch.Generator().manual_seed(seed)
    nets, thresholds = [], []
    for layer in range(n_layers):

        def tell(epoch: int, layer: int = layer) -> None:
            if progress is not None:
                progress(f"training layer {layer}", layer * epochs + epoch, n_layers * epochs)

        x = normalised(torch.from_numpy(hidden.fed_to(layer).copy()))
        y = torch.from_numpy(active_of(trace, layer))
        net = _fit(x[learnt], y[learnt], width, epochs, generator, tell)
        nets.append(net)
        thresholds.append(_threshold(net, x[chosen], y[chosen], targets[layer]))
    info = PredictorInfo(
        model=header.model,
        model_sha256=header.model_sha256,
        trigger=hidden.header.trigger,
        rank=width,
        recall_target=targets[0] if len(set(targets)) == 1 else tuple(targets),
        thresholds=tuple(thresholds),
        seen=_seen(trace),
    )
    return MlpPredictor(info, tuple(nets))


def apart(trace: Trace) -> NDArray[np.bool_]:
    """bool [n_tokens]: the last fifth of each text, so that every text chooses thresholds."""
    texts = {info.seq: info.source_sha256 for info in trace.header.sequences}
    of_token = np.array([texts[seq] for seq in trace.seq[trace.layer == 0].tolist()])
    kept = np.zeros(len(of_token), bool)
    for text in dict.fromkeys(texts.values()):
        tokens = np.flatnonzero(of_token == text)
        kept[tokens[len(tokens) - int(APART * len(tokens)) :]] = True
    return kept


def _fit(
    x: torch.Tensor,
    y: torch.Tensor,
    rank: int,
    epochs: int,
    generator: torch.Generator,
    tell: Callable[[int], None],
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
    for epoch in range(epochs):
        tell(epoch)
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


def _seen(trace: Trace) -> tuple[tuple[str, int, int], ...]:
    """What was fed of each text; a recording that was stopped names more than it holds."""
    fed = Counter(trace.seq[trace.layer == 0].tolist())
    return tuple(
        (s.source_sha256, s.token_start, min(s.token_stop, s.token_start + fed[s.seq]))
        for s in trace.header.sequences
        if fed[s.seq]
    )


def active_of(trace: Trace, layer: int) -> NDArray[np.bool_]:
    """Who fired in a layer: bool [n_tokens, n_neurons]."""
    bits = trace.bits[trace.layer == layer]
    every = np.unpackbits(bits, axis=1, bitorder="little")[:, : trace.header.n_neurons]
    return every.astype(bool)


def require_pair(trace: Trace, hidden: HiddenStates) -> None:
    """KairoxError unless both are of one recording that can be learnt from."""
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

"""Small traces for tests: random sets with a known answer, written through TraceWriter."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kairox_sim.trace import SequenceInfo, Trace, TraceHeader, TraceWriter


def header(n_layers=2, n_neurons=70, n_seqs=1, **changes):
    sequences = tuple(
        SequenceInfo(s, "code", f"text {s}", f"sha-{s}", 100 * s, 100 * s + 50)
        for s in range(n_seqs)
    )
    fields = {
        "model": "tiny",
        "model_sha256": "m" * 64,
        "n_layers": n_layers,
        "n_neurons": n_neurons,
        "d_model": 8,
        "activation": "relu",
        "activation_threshold": 0.0,
        "gating": "exact",
        "complete": True,
        "tokenizer_sha256": "t" * 64,
        "sequences": sequences,
    }
    return TraceHeader(**{**fields, **changes})


@dataclass
class LayerStep:
    seq: int
    step: int
    phase: str
    tokens: list[int]
    layer: int
    active: np.ndarray  # bool[n_tokens, n_neurons]
    evaluated: np.ndarray | None = None
    predicted: np.ndarray | None = None

    def arguments(self):
        return dict(vars(self))


@dataclass
class Recording:
    header: TraceHeader
    layer_steps: list[LayerStep] = field(default_factory=list)


def recording(steps, rng, *, density=0.3, evaluated=False, **changes):
    """`steps`: (seq, n_tokens) each; 1 token is a decode step. Step numbers have gaps."""
    n_seqs = 1 + max((seq for seq, _ in steps), default=0)
    made = Recording(header(n_seqs=n_seqs, **changes))
    for index, (seq, n_tokens) in enumerate(steps):
        tokens = rng.integers(0, 1000, n_tokens).tolist()
        for layer in range(made.header.n_layers):
            shape = (n_tokens, made.header.n_neurons)
            active = rng.random(shape) < density
            guess = rng.random(shape) < density
            has_predicted = made.header.predicted_trigger is not None and (index, layer) != (0, 0)
            made.layer_steps.append(
                LayerStep(
                    seq,
                    3 * index,
                    "decode" if n_tokens == 1 else "prefill",
                    tokens,
                    layer,
                    active,
                    active | guess if evaluated else None,
                    guess if has_predicted else None,
                )
            )
    return made


def write(path: Path, made: Recording, steps_per_batch=2) -> Path:
    with TraceWriter(path, made.header, steps_per_batch) as writer:
        for layer_step in made.layer_steps:
            writer.append(**layer_step.arguments())
    return path


def from_masks(masks, tokens=None, seqs=None, **changes) -> Trace:
    """bool[n_tokens, n_layers, n_neurons], one decode step per token."""
    masks = np.asarray(masks, bool)
    n_tokens, n_layers, n_neurons = masks.shape
    tokens = np.arange(n_tokens) if tokens is None else np.asarray(tokens)
    seqs = np.zeros(n_tokens, int) if seqs is None else np.asarray(seqs)
    made = header(n_layers, n_neurons, n_seqs=int(seqs.max(initial=0)) + 1, **changes)
    return Trace.from_arrays(
        made,
        seq=np.repeat(seqs, n_layers),
        step=np.repeat(np.arange(n_tokens), n_layers),
        token=np.repeat(tokens, n_layers),
        layer=np.tile(np.arange(n_layers), n_tokens),
        phase=np.ones(n_tokens * n_layers, int),
        bits=masks.reshape(n_tokens * n_layers, n_neurons),
    )

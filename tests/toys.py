"""Small traces made by hand or by a seed, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kairox_sim.trace import SequenceInfo, Trace, TraceHeader


def header(n_layers: int, n_neurons: int, **other: object) -> TraceHeader:
    values: dict[str, object] = {
        "model": "toy",
        "model_sha256": "0" * 64,
        "n_layers": n_layers,
        "n_neurons": n_neurons,
        "d_model": 32,
        "activation": "relu",
        "activation_threshold": 0.0,
        "gating": "exact",
        "complete": True,
        "tokenizer_sha256": "1" * 64,
        "sequences": (SequenceInfo(0, "prose", "a.txt", "a" * 64, 0, 1000),),
    }
    return TraceHeader(**(values | other))  # type: ignore[arg-type]


def of_chunks(
    chunks: Sequence[Sequence[Sequence[Sequence[int]]]],
    n_neurons: int,
    *,
    n_layers: int = 1,
    n_prefill: int = 0,
    tokens: Sequence[int] | None = None,
    **other: object,
) -> Trace:
    """chunks[step][layer][token] is a set of ids; the first `n_prefill` steps are prefill.

    tokens: the token of each step; by default no two are the same.
    """
    rows: list[tuple[int, int, int, int]] = []  # step, token, layer, phase
    bits: list[np.ndarray] = []
    for step, layers in enumerate(chunks):
        for layer, sets in enumerate(layers):
            for token, ids in enumerate(sets):
                said = 100 * step + token if tokens is None else tokens[step]
                rows.append((step, said, layer, int(step >= n_prefill)))
                mask = np.zeros(n_neurons, bool)
                mask[list(ids)] = True
                bits.append(mask)
    step_, token_, layer_, phase_ = np.array(rows, np.int64).reshape(-1, 4).T
    return Trace.from_arrays(
        header(n_layers, n_neurons, **other),
        seq=np.zeros(len(rows)),
        step=step_,
        token=token_,
        layer=layer_,
        phase=phase_,
        bits=np.array(bits, bool).reshape(-1, n_neurons),
    )


def random_trace(
    n_layers: int = 2,
    n_neurons: int = 64,
    n_decode: int = 24,
    prefill: int = 4,
    seed: int = 0,
    source: str = "a",
    **other: object,
) -> Trace:
    """Neurons of very different frequency; the same ones are hot for every seed."""
    often = np.random.default_rng(99).random((n_layers, n_neurons)) ** 4
    rng = np.random.default_rng(seed)
    sizes = ([prefill] if prefill else []) + [1] * n_decode
    chunks = [
        [
            [np.flatnonzero(rng.random(n_neurons) < often[layer]).tolist() for _ in range(n_tokens)]
            for layer in range(n_layers)
        ]
        for n_tokens in sizes
    ]
    info = SequenceInfo(0, "prose", f"{source}.txt", source * 64, 0, prefill + n_decode)
    return of_chunks(
        chunks,
        n_neurons,
        n_layers=n_layers,
        n_prefill=1 if prefill else 0,
        sequences=(info,),
        **other,
    )

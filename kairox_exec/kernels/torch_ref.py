"""FFN kernels in plain torch: the readable reference, on any device torch runs on.

All float32. `rows` is [n_places, n_rows, d_model]: neuron bundles in host memory (a place is a
neuron id) or slots on the device (a place is a slot). Its last row is down (fc2), the one before it
up where gated, and the first one gate (fc1) where the bundle holds all rows. `index` int32 or int64
[n] names places, in any order, each at most once; values "per entry" follow its order. Biases of
the down projection are not added here: partial sums of disjoint entries add up to the FFN's output
without it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# Bundles gathered at a time: the copy stays in the CPU's caches.
CHUNK = 64


def gate_all(
    x: torch.Tensor, gate_w: torch.Tensor, gate_b: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """Activation of every neuron, exactly 0 where it does not fire.

    x [n_tokens, d_model], gate_w [n_neurons, d_model], gate_b [n_neurons] -> [n_tokens, n_neurons].
    """
    gate = functional.linear(x, gate_w, gate_b)
    return torch.where(gate > threshold, gate, torch.zeros_like(gate))


def ffn_union(
    x: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    *,
    gated: bool,
    act: torch.Tensor | None = None,
    gate_b: torch.Tensor | None = None,
    up_b: torch.Tensor | None = None,
    threshold: float = 0.0,
) -> torch.Tensor:
    """Partial FFN output of the neurons in `index`, for one token or a chunk and its union.

    x [n_tokens, d_model]; act [n_tokens, n]; gate_b, up_b [n] -> y [n_tokens, d_model]. With `act`
    the gate row, if there is one, is not read; without, the gate is computed here and entries that
    do not fire add 0. One GEMM per row kind for a chunk.
    """
    check_shapes(x, rows, index, gated, act)
    n_tokens, d_model = x.shape
    n = index.shape[0]
    y = x.new_zeros((n_tokens, d_model))
    chunk = CHUNK if n_tokens == 1 else n
    gathered = rows.new_empty((min(chunk, n), *rows.shape[1:]))
    for start in range(0, n, max(chunk, 1)):
        here = slice(start, min(start + chunk, n))
        bundle = gathered[: here.stop - start]
        torch.index_select(rows, 0, index[here], out=bundle)
        if act is None:
            a = gate_all(x, bundle[:, 0], None if gate_b is None else gate_b[here], threshold)
        else:
            a = act[:, here]
        if gated:
            a = a * functional.linear(x, bundle[:, -2], None if up_b is None else up_b[here])
        y.addmm_(a, bundle[:, -1])
    return y


def check_shapes(
    x: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    gated: bool,
    act: torch.Tensor | None,
) -> None:
    """Raise on arguments that do not belong together; x is [n_tokens, d_model]."""
    all_rows = 3 if gated else 2
    allowed = (all_rows,) if act is None else (all_rows - 1, all_rows)
    if rows.ndim != 3 or rows.shape[1] not in allowed or rows.shape[2] != x.shape[-1]:
        raise ValueError(
            f"rows is {tuple(rows.shape)}; expected [places, {' or '.join(map(str, allowed))}, "
            f"{x.shape[-1]}] ({'with' if act is not None else 'without'} act, gated={gated})"
        )
    if act is not None and act.shape != (x.shape[0], index.shape[0]):
        raise ValueError(
            f"act is {tuple(act.shape)}; expected {(x.shape[0], index.shape[0])}, one value per "
            "token and entry of index"
        )

"""FFN kernels in plain torch: the readable reference, on any device torch runs on.

x is float32 [n_tokens, d_model]. `rows` is [n_places, n_rows, width] of spec.fmt: neuron bundles in
host memory (a place is a neuron id) or slots on the device (a place is a slot). Its last row is
down (fc2), the one before it up where gated, and the first one gate (fc1) where the bundle holds
all rows. `index` int32 or int64 [n] names places, in any order, each at most once; values "per
entry" follow its order. Biases of the down projection are not added here: partial sums of disjoint
entries add up to the FFN's output without it.

Partial sums are float32 (`fast`), or int64 fixed point (`deterministic`): then each product of two
float32 is scaled by 2^40, cut towards zero and added as a whole number, so that no order, split or
place of the additions changes a bit. `total` gives float32 of either.

All kernels agree to the bit on deterministic results, those of silu included. Memory that decodes
to NaN has no meaning in fixed point; infinite values and sums of 2^22 and more are refused before
(`fixed_point`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kairox_exec.ffn_spec import FIXED_BITS, FfnSpec
from kairox_exec.formats import decode

# Bundles decoded at a time: the copy stays in the CPU's caches.
CHUNK = 64
_SCALE = float(2**FIXED_BITS)


def gate_all(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    """Activated gate of every neuron, exactly 0 where its gate does not fire.

    gate_rows [n_neurons, width], gate_b [n_neurons] -> float32 [n_tokens, n_neurons]. Of `drelu`
    only the gate's half is decided here; `silu` gives silu(gate), which may be negative.
    """
    return activate(gate_values(x, gate_rows, gate_b, spec), spec)


def gate_values(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    """What `gate_all` activates: row . x + b, float32 [n_tokens, n_neurons]."""
    if spec.numerics == "fast" and spec.fmt == "float32":
        gate = functional.linear(x, gate_rows)
    else:
        gate = x.new_empty((x.shape[0], gate_rows.shape[0]))
        for start in range(0, gate_rows.shape[0], 16 * CHUNK):
            here = slice(start, start + 16 * CHUNK)
            gate[:, here] = _dots(x, decode(gate_rows[here], spec.fmt), spec)
    return gate if gate_b is None else gate + gate_b


def activate(gate: torch.Tensor, spec: FfnSpec) -> torch.Tensor:
    """Gate values -> the gate's factor of the activation, exactly 0 where it does not fire."""
    if spec.activation == "silu":
        value = silu(gate) if spec.numerics == "deterministic" else functional.silu(gate)
        return torch.where(value.abs() > spec.threshold, value, torch.zeros_like(value))
    value = gate * gate if spec.activation == "relu2" else gate
    return torch.where(gate > spec.threshold, value, torch.zeros_like(value))


def silu(gate: torch.Tensor) -> torch.Tensor:
    """float32 silu from plain float64 operations in a stated order: the same bits in every kernel.

    Libraries differ in the last bit of exp. Here e^-|g| is 2^k e^r with r in +-ln(2)/2, by
    the first terms of its series; nothing may be fused or reordered.
    """
    wide = gate.double()
    t = -wide.abs().clamp(max=700.0)
    k = torch.floor(t * 1.4426950408889634 + 0.5)
    r = (t - k * 0.6931471803691238) - k * 1.9082149292705877e-10  # ln(2), in two parts
    p = torch.ones_like(r)
    for n in range(13, 0, -1):
        p = p * r / n + 1.0
    p = p * ((k.long() + 1023) << 52).view(torch.float64)  # 2^k, exactly
    return (wide * (torch.where(wide >= 0, 1.0, p) / (1.0 + p))).float()


def ffn_union(
    x: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    spec: FfnSpec,
    *,
    act: torch.Tensor | None = None,
    gate_b: torch.Tensor | None = None,
    up_b: torch.Tensor | None = None,
    fired: torch.Tensor | None = None,
) -> torch.Tensor:
    """Partial FFN output of the neurons in `index`, for one token or a chunk and its union.

    act float32 [n_tokens, n], of `gate_all`; gate_b, up_b [n] -> y [n_tokens, d_model], float32 or
    int64. With `act` the gate row, if there is one, is not read; without, the gate is computed here
    and entries that do not fire add 0. fired: bool [n_tokens, n], written where given.
    """
    check_shapes(x, rows, index, spec, act)
    n_tokens, n = x.shape[0], index.shape[0]
    kept = torch.int64 if spec.numerics == "deterministic" else torch.float32
    y = torch.zeros(x.shape, dtype=kept, device=x.device)
    chunk = CHUNK if n_tokens == 1 or spec.numerics == "deterministic" else max(n, 1)
    for start in range(0, n, chunk):
        here = slice(start, min(start + chunk, n))
        bundle = decode(rows.index_select(0, index[here]), spec.fmt)
        if act is None:
            gate = _dots(x, bundle[:, 0], spec)
            a = activate(gate if gate_b is None else gate + gate_b[here], spec)
        else:
            a = act[:, here]
        fires = a != 0
        if spec.gated:
            up = _dots(x, bundle[:, -2], spec)
            up = up if up_b is None else up + up_b[here]
            if spec.activation == "drelu":
                fires &= up > 0
                up = functional.relu(up)
            a = a * up
        if fired is not None:
            fired[:, here] = fires
        _add_down(y, a, bundle[:, -1], spec)
    return y


def code_dots(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """x float32 [n_tokens, d] by int8 codes [n, d] -> float32 [n_tokens, n]: see `screening`."""
    out = x.new_empty((x.shape[0], codes.shape[0]))
    for start in range(0, codes.shape[0], 16 * CHUNK):
        here = slice(start, start + 16 * CHUNK)
        out[:, here] = functional.linear(x, codes[here].float())
    return out


def total(y: torch.Tensor) -> torch.Tensor:
    """Partial sums, added up -> float32."""
    return (y.double() / _SCALE).float() if y.dtype == torch.int64 else y


def check_shapes(
    x: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    spec: FfnSpec,
    act: torch.Tensor | None,
) -> None:
    """Raise on arguments that do not belong together."""
    every = spec.rows_per_neuron
    allowed = (every,) if act is None else (every - 1, every)
    if rows.ndim != 3 or rows.shape[1] not in allowed or rows.shape[2] != spec.width:
        raise ValueError(
            f"rows is {tuple(rows.shape)}; expected [places, {' or '.join(map(str, allowed))}, "
            f"{spec.width}] ({'with' if act is not None else 'without'} act, {spec})"
        )
    if x.ndim != 2 or x.shape[1] != spec.d_model or x.dtype != torch.float32:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; expected float32 [tokens, {spec.d_model}]"
        )
    if act is not None and act.shape != (x.shape[0], index.shape[0]):
        raise ValueError(
            f"act is {tuple(act.shape)}; expected {(x.shape[0], index.shape[0])}, one value per "
            "token and entry of index"
        )


def _dots(x: torch.Tensor, weights: torch.Tensor, spec: FfnSpec) -> torch.Tensor:
    """x [n_tokens, d_model] by weights [n, d_model] -> float32 [n_tokens, n]."""
    if spec.numerics == "fast":
        return functional.linear(x, weights)
    return torch.stack([total(_fixed(token * weights).sum(dim=1)) for token in x])


def _add_down(y: torch.Tensor, a: torch.Tensor, down: torch.Tensor, spec: FfnSpec) -> None:
    """y [n_tokens, d_model] += a [n_tokens, n] @ down [n, d_model]."""
    if spec.numerics == "fast":
        y.addmm_(a, down)
        return
    for out, token in zip(y, a, strict=True):
        out += _fixed(token[:, None] * down).sum(dim=0)


def _fixed(products: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in steps of 2^-40, cut towards zero. The power of two scales exactly."""
    return (products * _SCALE).to(torch.int64)

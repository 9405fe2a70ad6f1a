"""Which neurons may fire, from an int8 copy of the gate: half of float16's memory, none missed.

Of a gate row w the screen keeps codes q (int8), a scale s and an error E. For the FFN's input x and
the row's bias b,

    upper = s (q.x) + E ||x|| + |b| 2^-50 + b + tiny

bounds from above every value a kernel may get for the gate, and `candidates` are the neurons whose
activation can exceed the threshold at or below `upper`. The kernels then decide with the real row.

Proof. Let u = 2^-24, d weights in a row, n = ||x||, W = ||w||, D = ||w - s q|| (norms: 2-norms).

1. Exactly, w.x = s (q.x) + (w - s q).x <= s (q.x) + D n, by Cauchy and Schwarz.
2. A float32 sum of d products, in any order and any grouping, each product rounded or fused, is off
   by at most g sum|w_j x_j| <= g W n with g = d u / (1 - d u) (Higham, Accuracy and Stability of
   Numerical Algorithms, 2nd ed., 3.1), plus 2 d 2^-126 (1 + W) where factors or products are
   too small for float32, or flushed to zero: the gate of a fast kernel, or of float64, which errs
   less. A deterministic kernel rounds each product (u W n in sum), cuts it at 2^-40 (d 2^-40 in
   sum) and rounds the sum once (2 u W n + d 2^-40 at most): within the same bound.
   A scale applied to the sum instead of to each weight is one rounding more.
3. q.x is itself such a float32 sum: s times its error is at most g s ||q|| n <= g (W + D) n.
4. So E = D + g W + g (W + D), each computed in float64, and rounded up generously: the spare part,
   W 2^-24 at least, also covers the roundings of s (q.x) and E n in float64.
5. Adding the bias: rounding to float32 is monotone and the threshold is a float32, so a rounded sum
   exceeds it only if the exact one does. |b| 2^-50 covers float64's rounding of `upper`.
6. Nothing above holds after an overflow. If (W + D) n < 2^126 there is none. Else, and if x is not
   finite, the neuron is a candidate.

It holds for float32 products of full precision: not for TF32 (torch's default is without), and not
for arithmetic in bfloat16. No assumption is made about which rows are in a call, or where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.formats import decode, require_format
from kairox_exec.kernels import torch_ref
from kairox_sim.errors import KairoxError

Dots = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_U = 2.0**-24
_UP = 1.0 + 2.0**-30  # more than d roundings of float64 for any d below 2^22
_MAX_D = 2**20
_ROWS_AT_ONCE = 1024
# Where |silu| is largest among negative gates: silu(-1.2784645) = -0.2784645.
_SILU_MINIMUM = -1.2784645427610738


@dataclass(frozen=True, slots=True)
class Screen:
    """Of one layer's gate. All on one device."""

    codes: torch.Tensor  # int8 [n, d]
    scale: torch.Tensor  # float32 [n]
    error: torch.Tensor  # float32 [n]; what the gate may be off by, per unit of ||x||

    @property
    def stored_bytes(self) -> int:
        parts = (self.codes, self.scale, self.error)
        return sum(t.numel() * t.element_size() for t in parts)


def make_screen(gate_rows: torch.Tensor, fmt: str) -> Screen:
    """gate_rows [n, width] of `fmt`, as stored. KairoxError where a weight is not finite."""
    require_format(fmt)
    n = gate_rows.shape[0]
    parts = [
        _screen_of(decode(gate_rows[start : start + _ROWS_AT_ONCE], fmt))
        for start in range(0, n, _ROWS_AT_ONCE)
    ]
    codes, scale, error = (torch.cat(column) for column in zip(*parts, strict=True))
    return Screen(codes, scale, error)


def _screen_of(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not bool(torch.isfinite(w).all()):
        raise KairoxError("a weight of a gate is NaN or infinite; the model's files are damaged")
    d = w.shape[1]
    if d > _MAX_D:
        raise KairoxError(f"a screen of rows of {d} weights is not proven; at most {_MAX_D} are")
    scale = w.abs().amax(dim=1) / 127  # float32; 0 for a row of zeros, or of the smallest denormals
    wide, s = w.double(), scale.double()[:, None]
    codes = torch.where(s > 0, wide / s, torch.zeros_like(wide)).round().clamp(-127, 127)
    off = torch.linalg.vector_norm(wide - s * codes, dim=1) * _UP
    size = torch.linalg.vector_norm(wide, dim=1) * _UP
    rounding = _growth(d)
    error = off + rounding * size + rounding * (size + off)
    rounded = (error * (1 + 2.0**-20)).float()  # up by more than a rounding to float32
    smallest = torch.finfo(torch.float32).tiny
    return codes.to(torch.int8), scale, torch.where(error > 0, rounded.clamp(min=smallest), 0.0)


def _growth(d: int) -> float:
    """The g of the proof, with roundings to spare."""
    return (d + 4) * _U / (1 - (d + 4) * _U)


def upper_bounds(
    x: torch.Tensor,
    screen: Screen,
    gate_b: torch.Tensor | None,
    *,
    dots: Dots = torch_ref.code_dots,
) -> torch.Tensor:
    """float64 [n_tokens, n]: no kernel's gate exceeds it. inf or NaN: nothing is known."""
    return _bounds(x, screen, gate_b, dots)[0]


def _bounds(
    x: torch.Tensor, screen: Screen, gate_b: torch.Tensor | None, dots: Dots
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower bounds."""
    d = x.shape[1]
    norm = torch.linalg.vector_norm(x.double(), dim=1, keepdim=True) * _UP  # [n_tokens, 1]
    dot = dots(x, screen.codes).double()
    slack = screen.error.double() * norm
    size = screen.error.double() / _growth(d)  # W + D at least
    overflow = (size * norm >= 2.0**126) | ~torch.isfinite(dot)
    slack = slack.masked_fill(overflow, torch.inf)
    # Underflow, and the cut of fixed point. Where x = 0 every product is exactly 0.
    tiny = 2 * d * (2.0**-40 + size * 2.0**-125)
    slack = slack + (norm != 0) * tiny
    middle = torch.nan_to_num(screen.scale.double() * dot, nan=0.0, posinf=0.0, neginf=0.0)
    if gate_b is not None:
        bias = gate_b.double()
        middle, slack = middle + bias, slack + bias.abs() * 2.0**-50
    return middle + slack, middle - slack


def candidates(
    x: torch.Tensor,
    screen: Screen,
    gate_b: torch.Tensor | None,
    spec: FfnSpec,
    *,
    dots: Dots = torch_ref.code_dots,
) -> torch.Tensor:
    """bool [n_tokens, n]: every neuron that fires in any kernel, and some that do not.

    x float32 [n_tokens, d_model]; gate_b float32 [n]. `dots`: `code_dots` of the kernels of x's
    device. Of a token that is not finite everything is a candidate. Of drelu the gate's half is
    screened.
    """
    if x.ndim != 2 or x.shape[1] != screen.codes.shape[1] or x.dtype != torch.float32:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; expected float32 [tokens, {screen.codes.shape[1]}]"
        )
    upper, lower = _bounds(x, screen, gate_b, dots)
    if spec.activation == "silu":
        return ~(_largest_silu(upper, lower) <= _threshold(spec))
    return ~(upper <= _threshold(spec))  # so that NaN is a candidate


def smallest_margin(
    x: torch.Tensor,
    screen: Screen,
    gate_b: torch.Tensor | None,
    spec: FfnSpec,
    active: torch.Tensor,
    *,
    dots: Dots = torch_ref.code_dots,
) -> float:
    """How close the screen came to missing one: the least that an active neuron's bound exceeds
    the threshold by (of silu, the bound of |silu|). inf where nothing was active.

    active: bool [n_tokens, n], the truth. Negative would be a miss, and the proof wrong.
    """
    upper, lower = _bounds(x, screen, gate_b, dots)
    bound = _largest_silu(upper, lower) if spec.activation == "silu" else upper
    margin = (bound - _threshold(spec))[active]
    return float(margin.min()) if margin.numel() else float("inf")


def _threshold(spec: FfnSpec) -> float:
    """What kernels compare with is the threshold as float32; never more than either."""
    return min(float(spec.threshold), float(np.float32(spec.threshold)))


def _largest_silu(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The largest |silu(g)| for g from lower to upper, with room for float32's rounding of it.

    silu falls to its minimum and rises from there, so |silu| is largest at `upper` or, among
    negative g, at the point of the interval nearest to the minimum.
    """
    above = _abs_silu(upper.clamp(min=0.0))
    nearest = torch.minimum(torch.clamp(lower, min=_SILU_MINIMUM), upper)
    below = torch.where(lower < 0, _abs_silu(nearest.clamp(max=0.0)), 0.0)
    largest = torch.maximum(above, below) * (1 + 2.0**-16) + 2.0**-126
    return torch.where(torch.isfinite(upper), largest, torch.inf)


def _abs_silu(gate: torch.Tensor) -> torch.Tensor:
    return (gate * torch.sigmoid(gate)).abs()

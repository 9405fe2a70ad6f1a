"""Whether sums of fixed point fit into int64: checked before a layer computes, from norms alone.

A deterministic kernel adds float32 products times 2^40 as int64, so magnitudes must stay below
2^23, and nothing may be NaN or infinite. By Cauchy and Schwarz a row w gives |w.x| <= ||w|| ||x||,
also for the sum of magnitudes; what neuron i adds to output j is then at most

    (G_i n + |b_i|)^p (U_i n + |c_i|) |d_ij|        n = ||x||, p = 2 for relu2, else 1

with the norms G_i, U_i of its gate and up rows and its biases b_i, c_i (without an up row, the
second factor is 1). The sum over i is a polynomial in n, whose coefficients are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kairox_exec.ffn_spec import FIXED_LIMIT, FfnSpec
from kairox_exec.formats import decode
from kairox_sim.errors import KairoxError

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class SumBounds:
    """Of one layer. Made once from its weights; `check` is a norm and a few multiplications."""

    row_norm: float  # largest norm of a gate or up row
    bias: float  # largest magnitude of a gate or up bias
    # Largest magnitude of a sum of the down projection: sum of coefficients[k] * ||x||^k.
    coefficients: tuple[float, ...]
    # Per neuron, for an `act` that is known: ||up row||, |up bias|, largest |down weight|.
    up_norm: torch.Tensor | None  # float64 [n]; None where not gated
    up_bias: torch.Tensor | None
    down_max: torch.Tensor  # float64 [n]

    @staticmethod
    def of(
        gate_rows: torch.Tensor,
        rows: torch.Tensor,
        spec: FfnSpec,
        gate_b: torch.Tensor | None = None,
        up_b: torch.Tensor | None = None,
    ) -> SumBounds:
        """gate_rows [n, width] and bundles `rows` [n, n_rows, width], as stored, host memory."""
        n = rows.shape[0]
        power = (2 if spec.activation == "relu2" else 1) + (1 if spec.gated else 0)
        sums = torch.zeros((power + 1, spec.d_model), dtype=torch.float64)
        zeros = torch.zeros(n, dtype=torch.float64)
        b = zeros if gate_b is None else gate_b.double().abs()
        c = zeros if up_b is None else up_b.double().abs()
        gate_norm, up_norm, down_max = zeros.clone(), zeros.clone(), zeros.clone()
        for start in range(0, n, _ROWS_AT_ONCE):
            here = slice(start, start + _ROWS_AT_ONCE)
            gate_norm[here] = _norms(gate_rows[here], spec)
            if spec.gated:
                up_norm[here] = _norms(rows[here, -2], spec)
            down = decode(rows[here, -1], spec.fmt).double().abs()
            down_max[here] = down.amax(dim=1)
            factor = _linear_factor(b[here], gate_norm[here])
            terms = factor
            if spec.activation == "relu2":
                terms = _times(terms, factor)
            if spec.gated:
                terms = _times(terms, _linear_factor(c[here], up_norm[here]))
            sums += terms @ down
        row_norm = max(float(gate_norm.max()), float(up_norm.max())) if n else 0.0
        bias = max(float(b.max()), float(c.max())) if n else 0.0
        coefficients = tuple(float(value) for value in sums.amax(dim=1))
        if not all(map(_finite, (row_norm, bias, *coefficients))):
            raise KairoxError("a weight is NaN or infinite; the model's files are damaged")
        gated = spec.gated
        return SumBounds(
            row_norm, bias, coefficients, up_norm if gated else None, c if gated else None, down_max
        )

    def largest(self, x: torch.Tensor, act: torch.Tensor | None = None) -> float:
        """A bound of the magnitude of every sum of the layer. x float32 [n_tokens, d_model].

        With act [n_tokens, n], of `gate_all`, the bound of the down projection's is tighter. One
        number comes back to the host: of a tensor on a GPU, that waits for it.
        """
        norms = (
            torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) if len(x) else x.new_zeros(1)
        )
        norm = float(norms.max())
        dots = self.row_norm * norm + self.bias
        if act is None:
            down = 0.0
            for coefficient in reversed(self.coefficients):
                down = down * norm + coefficient
        else:
            factor = self.down_max
            if self.up_norm is not None and self.up_bias is not None:
                factor = factor * (self.up_norm * norm + self.up_bias)
            down = float((act.to("cpu", torch.float64).abs() @ factor).max()) if len(act) else 0.0
        return max(dots, down) if _finite(dots) and _finite(down) else float("inf")

    def check(self, x: torch.Tensor, act: torch.Tensor | None = None, *, layer: int) -> None:
        """KairoxError where x is NaN or infinite, or where the layer's sums may leave int64.

        Call it once per layer-step under deterministic numerics, before any kernel; give `act`
        where it is known: it is looked at only if the bound without it is too large. The limit is
        half of what int64 holds, which is more than the roundings of the products can add.
        """
        if not bool(torch.isfinite(x).all()):
            raise KairoxError(
                f"the input of layer {layer}'s FFN is NaN or infinite: the model's weights are "
                "damaged, or its dtype is too narrow (use --dtype float32)"
            )
        largest = self.largest(x)
        if largest > FIXED_LIMIT and act is not None:
            largest = min(largest, self.largest(x, act))
        if largest > FIXED_LIMIT:
            raise KairoxError(
                f"sums of layer {layer} may reach {largest:.3g}; deterministic numerics allow "
                f"{FIXED_LIMIT:.3g} (fixed point in int64): use --numerics fast for this model"
            )


def _norms(stored: torch.Tensor, spec: FfnSpec) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(decode(stored, spec.fmt).double(), dim=1)
    return norms


def _linear_factor(constant: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The polynomial constant + slope n, of every neuron: [2, n_neurons]."""
    return torch.stack([constant, slope])


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of polynomials, coefficients [degree + 1, n_neurons]."""
    product = a.new_zeros((len(a) + len(b) - 1, a.shape[1]))
    for i, coefficient in enumerate(a):
        product[i : i + len(b)] += coefficient * b
    return product


def _finite(value: float) -> bool:
    return abs(value) < float("inf")

"""What the neurons of one layer compute, how their rows are stored and how sums are kept.

Of a neuron with gate row g, up row u and down row d, for the FFN's input x (biases included in the
dot products; without a gate, `g` is fc1 and there is no u):

  relu    fires where g.x > threshold (0; FATReLU: its own);   adds  g.x * u.x * d
  relu2   fires where g.x > 0;                                 adds  (g.x)^2 * u.x * d
  drelu   fires where g.x > 0 and u.x > 0;                     adds  g.x * u.x * d
  silu    fires where |silu(g.x)| > threshold: approximate;    adds  silu(g.x) * u.x * d

Sources: FATReLU: ProSparse (arXiv:2402.13516); relu2: Primer (arXiv:2109.08668), as in Nemotron-4;
dReLU: Turbo Sparse (arXiv:2406.05955); a threshold on |silu|: CATS (arXiv:2404.08763).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kairox_exec.formats import Format, row_width

Activation = Literal["relu", "relu2", "drelu", "silu"]
Numerics = Literal["fast", "deterministic"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NUMERICS: tuple[str, ...] = get_args(Numerics)

# Fixed point of deterministic sums: a float32 product times 2^40, cut to a whole number, is added
# in int64. Whole numbers may be added in any order. Values reach 2^23; a step is 9.1e-13.
FIXED_BITS = 40
FIXED_LIMIT = float(2**22)  # of the sum of magnitudes; half of what int64 holds


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """Of one layer; the same for rows in host memory and in slots."""

    d_model: int
    gated: bool
    activation: Activation
    threshold: float
    fmt: Format
    numerics: Numerics = "fast"

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return row_width(self.fmt, self.d_model)

    @property
    def rows_per_neuron(self) -> int:
        """Gate, up, down; or fc1, fc2."""
        return 3 if self.gated else 2

"""How often the neurons of a layer fire: Beta-distributed rates with a chosen mean and skew.

Published skew comes as one point of a curve: the most active `top_share` of the neurons carry
`carries` of all activations (PowerInfer, SOSP 2024, section 2.2 and figure 5: 26 % carry 80 % in
an MLP block of OPT-30B, 43 % in LLaMA2-ReGLU-70B). One Beta distribution has that mean and that
point. NumPy has no incomplete beta function; DLMF 8.17.22 gives it as a continued fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError

Floats = NDArray[np.float64]

# Quantiles and tails are read off this grid: fine near 0, where skewed rates crowd together.
_GRID: Floats = np.concatenate(
    [np.geomspace(1e-40, 0.005, 1500), np.linspace(0.005, 1.0, 1501)[1:]]
)
_ROUNDING = 1e-9
_FRACTION_STEPS = 400  # of the continued fraction, which converges far sooner at most points


@dataclass(frozen=True, slots=True)
class Rates:
    """Firing rates of a layer: Beta distributed, with this mean and this point of skew."""

    mean: float  # active share of the neurons of a token
    top_share: float  # of the neurons, the most active ones
    carries: float  # share of all activations that is theirs

    def __post_init__(self) -> None:
        if not (0 < self.mean < 1 and 0 < self.top_share < 1):
            raise KairoxError(
                f"rates: mean {self.mean:g} and top_share {self.top_share:g} must be above 0 and "
                "below 1"
            )
        most = min(1.0, self.top_share / self.mean)
        if not self.top_share < self.carries < most:
            raise KairoxError(
                f"rates: the top {self.top_share:g} of the neurons cannot carry {self.carries:g} "
                f"at mean {self.mean:g}; allowed is above {self.top_share:g} (no skew) and below "
                f"{most:g} (each of them fires at every token)"
            )

    @property
    def beta(self) -> tuple[float, float]:
        """(alpha, beta) of the distribution."""
        return beta_for(self.mean, self.top_share, self.carries)

    def quantiles(self, n: int, mean: float | None = None) -> Floats:
        """float64[n], ascending: the distribution as `n` neurons, scaled to exactly `mean`."""
        alpha, beta = self.beta
        below = np.interp((np.arange(n) + 0.5) / n, _cdf(alpha, beta), _GRID)
        return scaled_to(below, self.mean if mean is None else mean)


@cache
def beta_for(mean: float, top_share: float, carries: float) -> tuple[float, float]:
    """(alpha, beta) with this mean, and whose top `top_share` carries `carries` of the mass."""
    low, high = math.log(1e-3), math.log(1e3)  # more skew at the low end
    for _ in range(40):
        middle = (low + high) / 2
        alpha = math.exp(middle)
        if carried_by(alpha, alpha * (1 - mean) / mean, top_share) > carries:
            low = middle
        else:
            high = middle
    alpha = math.exp((low + high) / 2)
    return alpha, alpha * (1 - mean) / mean


def carried_by(alpha: float, beta: float, top_share: float) -> float:
    """Share of the mass of Beta(alpha, beta) that lies above its quantile 1 - top_share."""
    threshold = np.interp(1 - top_share, _cdf(alpha, beta), _GRID)
    # x times the density of Beta(alpha, beta) is, up to its mean, that of Beta(alpha + 1, beta).
    return 1.0 - float(np.interp(threshold, _GRID, _cdf(alpha + 1, beta)))


def scaled_to(
    rates: Floats, mean: float, low: Floats | float = 0, high: Floats | float = 1
) -> Floats:
    """The rates times one factor, held between `low` and `high`, with exactly this mean."""
    least_mean, most_mean = (float(np.broadcast_to(v, rates.shape).mean()) for v in (low, high))
    if not least_mean - _ROUNDING <= mean <= most_mean + _ROUNDING:
        raise KairoxError(
            f"rates of mean {mean:g} do not fit their bounds, {least_mean:.4g} to {most_mean:.4g} "
            "on average"
        )
    least, most = 0.0, 1.0
    while np.clip(rates * most, low, high).mean() < mean and most < 1e12:
        most *= 4
    for _ in range(60):
        factor = (least + most) / 2
        if np.clip(rates * factor, low, high).mean() < mean:
            least = factor
        else:
            most = factor
    return np.clip(rates * most, low, high)


@cache
def _cdf(alpha: float, beta: float) -> Floats:
    """I_x(alpha, beta) at every x of the grid."""
    turn = (alpha + 1) / (alpha + beta + 2)  # on the other side, 1 - I_(1-x)(beta, alpha)
    low_side = turn > _GRID
    values = np.empty_like(_GRID)
    values[low_side] = _tail(alpha, beta, _GRID[low_side])
    values[~low_side] = 1 - _tail(beta, alpha, 1 - _GRID[~low_side])
    return np.maximum.accumulate(np.clip(values, 0.0, 1.0))


def _tail(a: float, b: float, x: Floats) -> Floats:
    """I_x(a, b) for x below (a + 1) / (a + b + 2), by the method of Lentz."""
    with np.errstate(divide="ignore"):
        log_front = a * np.log(x) + b * np.log1p(-x)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = np.exp(log_front - log_beta) / a
    # value = 1 / (1 + term_1 / (1 + term_2 / (1 + ...))); d and c are its forward recurrences.
    d = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value, c = d.copy(), np.ones_like(x)
    for step in range(2, _FRACTION_STEPS):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _nonzero(1 + term * d)
        c = _nonzero(1 + term / c)
        value *= c * d
        if np.all(np.abs(c * d - 1) < 1e-13):
            break
    result: Floats = front * value
    return result


def _nonzero(values: Floats) -> Floats:
    return np.where(np.abs(values) < 1e-300, 1e-300, values)

"""Robust fits of op timings: seconds = fixed + bytes / rate, and what could not be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError

TRIMMED = 0.10  # share of ops left out: the worst relative residuals of a first fit
SPREAD = 1.2  # sizes must span this ratio before a fixed cost can be told from a rate


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed_s + n / per_s, and how well it does over the ops it was fitted on."""

    what: str
    fixed_s: float
    per_s: float  # units per second
    n_ops: int
    median_error: float  # of |fit / seconds - 1|
    told_apart: bool  # whether fixed cost and rate were both identified
    note: str = ""  # before how it was fitted

    @property
    def how(self) -> str:
        """For the `source` of a profile entry."""
        split = "" if self.told_apart else "; one size only, so all of it is charged to the rate"
        error = f"median error {self.median_error:.1%}"
        return f"{self.note}fit of {self.n_ops} {self.what} ops, {error}{split}"


def fit_line(what: str, sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares on relative residuals, refitted without the worst tenth.

    Where the sizes hardly differ, or the fit would need a negative cost, everything is charged to
    the rate. Raises KairoxError where there is nothing to fit.
    """
    n = np.asarray(sizes, np.float64)
    t = np.asarray(seconds, np.float64)
    if n.size == 0 or not (n > 0).all() or not (t > 0).all():
        raise KairoxError(f"no {what} ops to calibrate on; run longer, or settings that have some")
    keep = np.ones(n.size, bool)
    fixed, slope, apart = _solve(n, t)
    residual = np.abs((fixed + slope * n) / t - 1)
    if n.size >= 20:
        keep = residual <= np.quantile(residual, 1 - TRIMMED)
        fixed, slope, apart = _solve(n[keep], t[keep])
    error = float(np.median(np.abs((fixed + slope * n[keep]) / t[keep] - 1)))
    return Line(what, fixed, 1 / slope, int(n.size), error, apart)


def _solve(n: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[float, float, bool]:
    """(fixed, slope, whether both were identified)."""
    if n.max() >= SPREAD * n.min():
        fixed, slope = _relative_least_squares(np.stack([np.ones_like(n), n], axis=1), t)
        if slope > 0 and fixed >= 0:
            return float(fixed), float(slope), True
    return 0.0, float(np.median(t / n)), False


def fit_copies(
    copies: Sequence[float], n_bytes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """(seconds per copy, bytes per second, median relative error) of transfers of all sizes.

    Raises KairoxError where there are none.
    """
    c, b = np.asarray(copies, np.float64), np.asarray(n_bytes, np.float64)
    t = np.asarray(seconds, np.float64)
    if t.size == 0:
        raise KairoxError("no transfers to calibrate the link on; run settings that load neurons")
    keep = np.ones(t.size, bool)
    for _ in range(2):
        fixed, slope = _relative_least_squares(np.stack([c[keep], b[keep]], axis=1), t[keep])
        if fixed < 0 or slope <= 0:
            fixed, slope = 0.0, float(np.median(t[keep] / b[keep]))
        residual = np.abs((fixed * c + slope * b) / t - 1)
        keep = residual <= np.quantile(residual, 1 - TRIMMED)
    return float(fixed), float(1 / slope), float(np.median(residual[keep]))


def _relative_least_squares(columns: NDArray[np.float64], t: NDArray[np.float64]) -> NDArray:  # type: ignore[type-arg]
    scale = np.abs(columns).max(axis=0)
    solution, *_ = np.linalg.lstsq(columns / scale / t[:, None], np.ones_like(t), rcond=None)
    return np.asarray(solution / scale)


def median(values: Sequence[float]) -> float:
    """nan of nothing."""
    return float(np.median(values)) if len(values) else nan

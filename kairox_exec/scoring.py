"""How far simulation was from the live runs: gate G3's numbers, its null models and its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan
from statistics import fmean, median

import numpy as np

CONTRAST = 1.5  # live times must span this ratio, or nothing is claimed
MEDIAN_ERROR, WORST_ERROR, TAU, REGRET = 0.05, 0.12, 0.90, 0.03  # at most; tau: at least
CONSTANT_SHARE = 0.5  # of the constant's median error, at most


@dataclass(frozen=True, slots=True)
class Scored:
    """One setting: seconds per decode token, live and as each model has it."""

    setting: str
    live_s: float  # median of the repeats
    spread: float  # (max - min) / median of the repeats
    simulated_s: float
    constant_s: float
    linear_s: float
    ahead_or_stall: bool  # uses look-ahead, or stalls for late copies
    machine: str = ""  # where it ran: order is compared within a machine only


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None where nothing may be claimed; `reasons` say what failed, or why not."""

    passed: bool | None
    reasons: tuple[str, ...]
    contrast: float  # slowest live time over the fastest
    median_error: float
    worst_error: float
    tau: float
    pairs: int  # pairs of settings that are not ties
    top1_regret: float
    constant_error: float
    ahead_error: float  # median, over settings with look-ahead or stall
    linear_ahead_error: float
    ahead_share: float


def null_models(
    seconds_per_token: Sequence[float], residual_per_token: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """(the constant, (a, b) of a + b x residual) fitted on calibration runs."""
    constant = fmean(seconds_per_token)
    if len(set(residual_per_token)) < 2:
        return constant, (constant, 0.0)
    b, a = np.polyfit(residual_per_token, seconds_per_token, 1)
    return constant, (float(a), float(b))


def kendall_tau(rows: Sequence[Scored]) -> tuple[float, int]:
    """(tau, pairs counted): concordant less discordant, over pairs of a machine that are not ties.

    A pair whose live times are closer than twice the larger of their spreads is a tie.
    """
    agree = pairs = 0
    for a, b in combinations(rows, 2):
        if a.machine != b.machine:
            continue
        closer = abs(a.live_s - b.live_s) / min(a.live_s, b.live_s)
        if closer < 2 * max(a.spread, b.spread):
            continue
        pairs += 1
        agree += int(np.sign(a.live_s - b.live_s) * np.sign(a.simulated_s - b.simulated_s))
    return (agree / pairs if pairs else nan), pairs


def judge(rows: Sequence[Scored]) -> Verdict:
    """Gate G3 over these settings, of one machine or several."""
    live = [row.live_s for row in rows]
    errors = [abs(row.simulated_s / row.live_s - 1) for row in rows]
    ahead = [row for row in rows if row.ahead_or_stall]
    tau, pairs = kendall_tau(rows)
    figures = {
        "contrast": max(live) / min(live),
        "median_error": median(errors),
        "worst_error": max(errors),
        "tau": tau,
        "pairs": pairs,
        "top1_regret": max(_regrets(rows)),
        "constant_error": median(abs(row.constant_s / row.live_s - 1) for row in rows),
        "ahead_error": _median(abs(row.simulated_s / row.live_s - 1) for row in ahead),
        "linear_ahead_error": _median(abs(row.linear_s / row.live_s - 1) for row in ahead),
        "ahead_share": len(ahead) / len(rows),
    }
    if figures["contrast"] < CONTRAST:
        why = f"no contrast: live times span {figures['contrast']:.2f} x, {CONTRAST} x is needed"
        return Verdict(None, (why,), **figures)  # type: ignore[arg-type]
    if figures["ahead_share"] < 0.5:
        why = f"only {figures['ahead_share']:.0%} of the settings use look-ahead or stall"
        return Verdict(None, (why,), **figures)  # type: ignore[arg-type]
    failed = [
        text
        for ok, text in (
            (
                figures["median_error"] <= MEDIAN_ERROR,
                f"median error {figures['median_error']:.1%}, at most {MEDIAN_ERROR:.0%}",
            ),
            (
                figures["worst_error"] <= WORST_ERROR,
                f"worst error {figures['worst_error']:.1%}, at most {WORST_ERROR:.0%}",
            ),
            (tau >= TAU, f"tau {tau:.2f} over {pairs} pairs, at least {TAU}"),
            (
                figures["top1_regret"] <= REGRET,
                f"top-1 regret {figures['top1_regret']:.1%}, at most {REGRET:.0%}",
            ),
            (
                figures["median_error"] <= CONSTANT_SHARE * figures["constant_error"],
                f"median error is not half of the constant's {figures['constant_error']:.1%}",
            ),
            (
                figures["ahead_error"] < figures["linear_ahead_error"],
                f"with look-ahead or stall {figures['ahead_error']:.1%}, the linear model "
                f"{figures['linear_ahead_error']:.1%}",
            ),
        )
        if not ok
    ]
    return Verdict(not failed, tuple(failed), **figures)  # type: ignore[arg-type]


def _regrets(rows: Sequence[Scored]) -> Iterator[float]:
    """Of each machine: what its fastest setting by simulation costs live, over its fastest."""
    for machine in {row.machine for row in rows}:
        here = [row for row in rows if row.machine == machine]
        chosen = min(here, key=lambda row: row.simulated_s)
        yield chosen.live_s / min(row.live_s for row in here) - 1


def _median(values: object) -> float:
    found = list(values)  # type: ignore[call-overload]
    return median(found) if found else nan

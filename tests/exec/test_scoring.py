"""Gate G3's arithmetic, by hand."""

from dataclasses import replace
from math import isnan

import pytest

from kairox_exec.scoring import Scored, judge, kendall_tau, null_models


def row(name: str, live: float, simulated: float, *, spread: float = 0.0, ahead: bool = True):
    return Scored(name, live, spread, simulated, constant_s=3.0, linear_s=live * 1.2,
                  ahead_or_stall=ahead)  # fmt: skip


GOOD = [row("a", 1.0, 1.02), row("b", 2.0, 2.04), row("c", 4.0, 3.92)]


def test_a_good_simulation_passes() -> None:
    verdict = judge(GOOD)
    assert verdict.passed is True
    assert verdict.reasons == ()
    assert verdict.contrast == 4.0
    assert verdict.median_error == pytest.approx(0.02)
    assert (verdict.tau, verdict.pairs, verdict.top1_regret) == (1.0, 3, 0.0)
    # |3/1 - 1|, |3/2 - 1|, |3/4 - 1| = 2, 0.5, 0.25
    assert verdict.constant_error == pytest.approx(0.5)
    assert verdict.linear_ahead_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("a", 1.0, 1.3), row("b", 2.0, 2.6), row("c", 4.0, 5.2)], "median error 30.0%"),
        ([row("a", 1.0, 2.05), row("b", 2.0, 1.99), row("c", 4.0, 4.0)], "tau 0.33 over 3"),
        ([row("a", 1.0, 2.05), row("b", 2.0, 1.99), row("c", 4.0, 4.0)], "top-1 regret 100.0%"),
        ([replace(r, constant_s=r.live_s * 1.01) for r in GOOD], "not half of the constant's 1.0%"),
        ([replace(r, linear_s=r.live_s) for r in GOOD], "the linear model 0.0%"),
    ],
)
def test_each_way_to_fail_is_named(rows: list[Scored], said: str) -> None:
    verdict = judge(rows)
    assert verdict.passed is False
    assert any(said in reason for reason in verdict.reasons), verdict.reasons


def test_without_contrast_nothing_is_claimed() -> None:
    verdict = judge([row("a", 1.0, 1.0), row("b", 1.4, 1.4)])
    assert verdict.passed is None
    assert "no contrast" in verdict.reasons[0]


def test_mostly_reactive_settings_claim_nothing() -> None:
    verdict = judge([GOOD[0], *(replace(r, ahead_or_stall=False) for r in GOOD[1:])])
    assert verdict.passed is None


def test_pairs_within_twice_the_spread_are_ties() -> None:
    close = [row("a", 1.0, 1.1, spread=0.03), row("b", 1.05, 1.0), row("c", 2.0, 2.0)]
    assert kendall_tau(close) == (1.0, 2)  # a and b, 5 % apart, are within 6 %
    tau, pairs = kendall_tau(close[:2])
    assert isnan(tau)
    assert pairs == 0


def test_null_models() -> None:
    assert null_models([1.0, 3.0], [10.0, 30.0]) == (2.0, (pytest.approx(0.0), pytest.approx(0.1)))
    assert null_models([1.0, 3.0], [5.0, 5.0]) == (2.0, (2.0, 0.0))

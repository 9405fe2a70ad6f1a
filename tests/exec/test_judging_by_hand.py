"""Gates, verdict and calibration on cases small enough to work out: what live runs seldom reach."""

from dataclasses import fields, replace
from math import isnan, nan
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kairox_exec.calibration import (
    StepOps,
    TimedRun,
    _as_run,
    _decide_line,
    _Seen,
    fit_profile,
)
from kairox_exec.fitting import fit_line
from kairox_exec.gates import ReplayedKnobs, _swap_differences, free_running
from kairox_exec.oplog import Op, Size
from kairox_exec.scoring import Scored, judge
from kairox_sim.controllers import Knobs
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.events import Planned, StepEnded
from kairox_sim.hardware import Quantity, load_profile
from kairox_sim.model import find_shape
from kairox_sim.record import StepRecord

COSTS = costs_for(
    load_profile("pc1"), find_shape("tiny-reglu"), "exact", trace_layers=6, trace_neurons=896,
    predictor="lookahead",
)  # fmt: skip


def record(phase: str = "decode", **other: float) -> StepRecord:
    zeros: dict[str, Any] = {f.name: 0 for f in fields(StepRecord)}
    return StepRecord(**(zeros | {"phase": phase} | other))


# -- gates ----------------------------------------------------------------------------------------


def test_replayed_knobs_are_those_in_force_step_by_step() -> None:
    scales = [0.9, 0.7, 1.4]
    events = [StepEnded(record(), None, Knobs(threshold_scale=s)) for s in scales]
    original = SimpleNamespace(controller=SimpleNamespace(knobs=Knobs(threshold_scale=1.1)))
    knobs = ReplayedKnobs(cast(Any, original), events)
    in_force = [knobs.knobs.threshold_scale]
    for _ in scales:
        assert knobs.update(record()) is knobs.knobs
        in_force.append(knobs.knobs.threshold_scale)
    assert in_force == [1.1, *scales]


@pytest.mark.parametrize(("live", "simulated"), [(2, 1), (1, 2), (0, 1)])
def test_a_plan_too_many_or_too_few_is_a_difference(live: int, simulated: int) -> None:
    plan = Planned(0, None, None, (), np.zeros(0, np.int32))
    found = _swap_differences([plan] * live, [plan] * simulated)
    assert found == [f"{live} plans live, {simulated} simulated"]
    assert _swap_differences([plan] * live, [plan] * live) == []


def test_free_running_is_of_decode_steps_and_simulated_less_live() -> None:
    chunk = record("prefill", evaluated=1000, hit_on_time=1000, hit_resident=1000, loads=500)
    live = [chunk, record(evaluated=100, hit_on_time=40, hit_resident=30, loads=20)]
    ours = [record(evaluated=100, hit_on_time=50, hit_resident=35, loads=25)]
    found = free_running(live, ours)
    assert found.hit_on_time_points == pytest.approx(10)
    assert found.hit_resident_points == pytest.approx(5)
    assert found.loads_share == pytest.approx(0.25)
    none = free_running([record(evaluated=1)], [record(evaluated=1)])
    assert none.loads_share == 0
    assert isnan(free_running([record(evaluated=1)], ours).loads_share)


# -- verdict --------------------------------------------------------------------------------------


def test_the_worst_is_the_largest_and_ahead_is_of_those_that_look_ahead() -> None:
    a = Scored("a", 1.0, 0.0, 1.02, constant_s=3.0, linear_s=1.3, ahead_or_stall=True)
    b = Scored("b", 2.0, 0.0, 2.12, constant_s=3.0, linear_s=2.2, ahead_or_stall=True)
    reactive = Scored("c", 4.0, 0.0, 4.4, constant_s=3.0, linear_s=9.0, ahead_or_stall=False)
    verdict = judge([a, b, reactive])
    assert verdict.worst_error == pytest.approx(0.10)
    assert verdict.median_error == pytest.approx(0.06)
    assert verdict.ahead_error == pytest.approx(0.04)  # of 2 % and 6 %, not of 10 %
    assert verdict.linear_ahead_error == pytest.approx(0.2)  # of 30 % and 10 %
    assert verdict.ahead_share == pytest.approx(2 / 3)
    alone = judge([replace(r, ahead_or_stall=False) for r in (a, b, reactive)])
    assert isnan(alone.ahead_error)


# -- calibration ----------------------------------------------------------------------------------


def op(lane: str, kind: str, t0: int, t1: int, layer: int = 0, **size: Any) -> Op:
    return Op(lane, kind, layer, t0, t1, Size(n_tokens=1, **size))


def test_time_before_an_op_is_its_own_unless_somebody_was_waited_for() -> None:
    ops = [
        op("gpu", "attention", 10, 100),
        op("idle", "cpu", 100, 400),
        op("gpu", "ffn", 450, 600),
        op("gpu", "head", 650, 700),
        op("host", "residual", 150, 350, neurons=5),
    ]
    seconds = {o.kind: round(s * 1e9) for o, s in _as_run(StepOps(0, 1000, 1, ops))}
    assert seconds == {"attention": 100, "ffn": 200, "head": 400, "residual": 200}


def test_copies_under_way_slow_the_host_by_what_they_did() -> None:
    """Alone the line holds; under copies all the time it takes 1.5 x; partly is left out."""
    rows, swap = 100, 0
    line = fit_line("residual", [COSTS.cpu_bytes(n) for n in (50, 100, 200)], [1e-3, 2e-3, 4e-3])
    alone = [op("host", "residual", 0, 2_000_000, neurons=rows)]
    under = [
        op("host", "residual", 0, 3_000_000, neurons=rows),
        op("link", "swap", swap, 3_000_000, neurons=16, n_bytes=1.0),
    ]
    partly = [
        op("host", "residual", 0, 9_000_000, neurons=rows),
        op("link", "swap", swap, 4_500_000, neurons=16, n_bytes=1.0),
    ]
    steps = [StepOps(0, 10_000_000, 1, ops) for ops in (alone, under, partly)]
    prefill = StepOps(0, 10_000_000, 4, alone)
    seen = _Seen([TimedRun("x", "lru", [*steps, prefill], 1.0, 1.0, 0.0)], COSTS)
    assert seen.slow_down_by_copies(line) == pytest.approx(1.5)
    assert len(seen.by_kind["residual"]) == 3  # the prefill's is not among them
    assert len(seen.prefill["residual"]) == 1
    without = _Seen([TimedRun("x", "lru", steps[:1], 1.0, 1.0, 0.0)], COSTS)
    assert without.slow_down_by_copies(line) == 1.0


def test_plans_cost_their_mean_with_only_the_slowest_hundredth_left_out() -> None:
    """A tenth of all plans is slow: they stay, because what counts in a step is the mean."""
    plans = [
        op("planner", "decide", 0, 100_000 if at % 10 else 1_100_000, n_swaps=at % 7)
        for at in range(700)
    ]
    plans.append(op("planner", "decide", 0, 10**9, n_swaps=3))  # a machine that stood still
    fixed, per_swap = _decide_line(plans)
    assert fixed + 3 * per_swap == pytest.approx(200e-6, rel=0.1)
    assert _decide_line([op("planner", "decide", 0, 500, n_swaps=2)] * 5) == (5e-7, 0.0)


def step_as_long_as(costs: CostModel, context_len: int, n: int, n_swaps: int) -> StepOps:
    """One layer and the head: n neurons on the device, n on the host, one swap of n."""
    t, ops = 0, []

    def add(lane: str, kind: str, seconds: float, **size: Any) -> None:
        nonlocal t
        began, t = t, t + round(seconds * 1e9)
        ops.append(op(lane, kind, began, t, **size))

    add("gpu", "attention", costs.attention_s(1, context_len), context_len=context_len)
    add("gpu", "gate", costs.gate_s(1))
    add("planner", "decide", 20e-6 + 3e-6 * n_swaps, n_swaps=n_swaps)
    idle_from = t
    add("d2h", "x", costs.act_d2h_s(1), n_bytes=costs.act_d2h_bytes(1))
    t += round(1.5e9 * costs.handover_s)  # out
    add("cpu", "residual", costs.ffn_cpu_s(n, 1), neurons=n)
    add("h2d", "partial sums", costs.act_h2d_s(1), n_bytes=costs.act_h2d_bytes(1))
    t += round(0.5e9 * costs.handover_s)  # and back: what is charged each way is the mean
    ops.append(op("idle", "cpu", idle_from, t))
    add("gpu", "ffn", costs.ffn_gpu_s(n, 1), neurons=n)
    add("gpu", "head", costs.head_s(1))
    ended = t
    add("h2d", "swap", costs.swap_s(n), neurons=n, n_bytes=costs.swap_bytes(n))
    return StepOps(0, ended, 1, ops)


def test_every_entry_of_a_profile_is_found_from_op_timings() -> None:
    """Ops as long as one profile says, fitted: each op's seconds and fixed costs come back."""
    profile = load_profile("pc1")
    stand_in = {"trace_layers": 6, "trace_neurons": 896, "predictor": "lookahead"}
    costs = costs_for(profile, find_shape("prosparse-7b"), "exact", **stand_in)  # type: ignore[arg-type]
    steps = [step_as_long_as(costs, 1 + at, 20 + at % 100, at % 5) for at in range(200)]
    chunk = [
        Op("gpu", kind, 0, 0, 1, Size(neurons=9, n_tokens=8, context_len=8))
        for kind in ("attention", "gate", "ffn", "residual")
    ]
    steps.append(StepOps(0, 1, 8, chunk))
    run = TimedRun("x", "tam", steps, 1.0, 1.0, 0.0)
    found = fit_profile([run], costs, name="x", machine=profile, measured_on="x",
                        calibrated_as=None).profile  # fmt: skip
    again = costs_for(found, costs.shape, "exact", **stand_in)  # type: ignore[arg-type]
    for name, ours, theirs in (
        ("attention", again.attention_s(1, 100), costs.attention_s(1, 100)),
        ("gate", again.gate_s(1), costs.gate_s(1)),
        ("ffn", again.ffn_gpu_s(77, 1), costs.ffn_gpu_s(77, 1)),
        ("head", again.head_s(1), costs.head_s(1)),
        ("residual", again.ffn_cpu_s(77, 1), costs.ffn_cpu_s(77, 1)),
        ("swap", again.swap_s(50), costs.swap_s(50)),
        ("partial sums", again.act_h2d_s(1), costs.act_h2d_s(1)),
        ("x", again.act_d2h_s(1), costs.act_d2h_s(1)),
        ("handover", again.handover_s, costs.handover_s),
        ("decide", again.decide_s("tam", 4), 32e-6),
    ):
        assert ours == pytest.approx(theirs, rel=0.02), name
    for name in ("h2d", "d2h"):
        ours, theirs = getattr(found, name), getattr(profile, name)
        assert ours.copy_fixed_s.value == pytest.approx(theirs.copy_fixed_s.value, rel=0.02), name
        assert ours.bytes_per_s.value == pytest.approx(theirs.bytes_per_s.value, rel=0.02), name


def test_a_policy_that_was_not_timed_costs_as_the_slowest_that_was() -> None:
    runs = []
    for name, ns in (("slow", 9_000), ("quick", 2_000)):
        plans = [op("planner", "decide", 0, ns, n_swaps=1)] * 3
        runs.append(TimedRun(name, name, [StepOps(0, 10_000, 1, plans)], 1.0, 1.0, 0.0))
    for some in (runs, runs[::-1]):
        table = _Seen(some, COSTS).decide(lambda value, how: Quantity(value=value, source=how))
        assert table["quick"].fixed_s.value == pytest.approx(2e-6)
        assert table["default"] == table["slow"]


def test_nan_is_not_a_number_of_loads() -> None:
    assert isnan(free_running([record(evaluated=nan)], [record(evaluated=1)]).hit_on_time_points)

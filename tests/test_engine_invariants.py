"""What must hold for every trace, policy and machine: bounds, conservation, scaling, anomalies."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kairox_sim.engine import run_trace
from kairox_sim.prediction import Perfect
from tests.driving import Shadow
from tests.engine_cases import N_NEURONS, WAITS, Case, cases, machines, total_ns
from tests.toy_engine import Journal, costs, in_ns, lanes


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_bounds_and_identities(case):
    run, cache = case.run()
    for r in run.records:
        for busy in ("gpu_busy_s", "cpu_busy_s", "swap_busy_s", "act_busy_s"):
            assert 0 <= getattr(r, busy) <= r.wall_s * (1 + 1e-12)
        unexplained = r.wall_s - r.gpu_busy_s - sum(getattr(r, w) for w in WAITS)
        assert in_ns(unexplained) == pytest.approx(0, abs=1e-3)
        assert min(getattr(r, w) for w in WAITS) >= 0
        assert r.evaluated == r.hit_on_time + r.residual
        assert r.hit_resident <= r.evaluated
        assert r.late <= r.residual
        assert r.predict_s <= r.gpu_busy_s
        assert r.h2d_bytes == r.loads * 40
        if case.late == "stall" or case.trigger in ("serial", "instant"):
            assert r.late == 0

    # Busiest resource <= makespan <= sum of all work, the planner's and the hand-overs' included.
    makespan = total_ns(run, "wall_s")
    work = {
        "gpu": total_ns(run, "gpu_busy_s"),
        "cpu": total_ns(run, "cpu_busy_s"),
        "link": total_ns(run, "swap_busy_s", "act_busy_s"),
        "planner": total_ns(run, "decide_s"),
    }
    assert max(work["gpu"], work["cpu"]) <= makespan
    h2d = sum(end - began for *_, began, end in lanes(run).get("h2d", ()))
    assert h2d <= makespan
    hand_overs = 2 * case.machine["handover"] * len(lanes(run).get("cpu", ()))
    assert makespan <= sum(work.values()) + hand_overs

    # Over the run every load is somewhere.
    totals = {name: sum(getattr(r, name) for r in run.records) for name in
              ("loads", "loads_used_first", "wasted", "cancelled")}  # fmt: skip
    assert totals["loads"] == (
        totals["loads_used_first"] + totals["wasted"] + totals["cancelled"]
        + run.cancelled_at_end + run.unused_yet
    )  # fmt: skip
    assert totals["loads"] == cache.totals["loads"]
    cache.check()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_is_issued_lands_once_or_is_cancelled(case):
    journal = Journal()
    run, cache = case.run(journal=journal)
    assert sorted(journal.landed + journal.cancelled) == journal.issued == sorted(journal.issued)
    assert not cache.in_flight
    copies = [s for s in run.slices if s.name == "swap"]
    assert len(copies) <= len(journal.issued)
    if case.trigger != "instant":
        assert len(copies) >= len(journal.landed)
    # A second bookkeeping, of sets, sees nothing it objects to.
    watched = case.cache()
    shadow = watched.journal = Shadow(watched, None)
    run_trace(
        case.trace(), watched, costs(**case.machine), trigger=case.trigger, late=case.late,
        predictions=Perfect(),
    )  # fmt: skip
    shadow.agree()


@settings(max_examples=75, deadline=None)
@given(cases())
def test_intervals_of_a_lane_do_not_overlap_and_sum_to_its_busy_time(case):
    run, _ = case.run()
    busy = {}
    for lane, ops in lanes(run).items():
        ends = 0
        for name, _, began, end in ops:
            assert ends <= began < end
            ends = end
            busy[lane, name] = busy.get((lane, name), 0) + end - began
    makespan = total_ns(run, "wall_s")
    assert all(s.end_ns <= makespan for s in run.slices if s.lane != "planner")
    gpu = sum(ns for (lane, _), ns in busy.items() if lane == "gpu")
    assert gpu == total_ns(run, "gpu_busy_s")
    assert busy.get(("cpu", "residual"), 0) == total_ns(run, "cpu_busy_s")
    assert busy.get(("h2d", "swap"), 0) == total_ns(run, "swap_busy_s")
    activations = busy.get(("h2d", "partial sums"), 0) + busy.get(("d2h", "x"), 0)
    assert activations == total_ns(run, "act_busy_s")
    assert busy.get(("planner", "decide"), 0) == total_ns(run, "decide_s")


@settings(max_examples=25, deadline=None)
@given(cases())
def test_same_inputs_same_run(case):
    (first, _), (second, _) = case.run(), case.run()
    assert repr(first) == repr(second)  # nan included
    assert first.records


@pytest.mark.parametrize(("trigger", "late"), [("attn_out", "cpu"), ("attn_in", "stall")])
def test_the_cases_meet_what_they_are_for(trigger, late):
    """None of these properties holds because nothing ever happens."""
    rng = np.random.default_rng(5)
    sets = [[[np.flatnonzero(rng.random(N_NEURONS) < 0.5).tolist()] for _ in range(3)]
            for _ in range(12)]  # fmt: skip
    machine = {"dram": 6, "h2d": 4, "cpu_cap": 4, "copy_fixed": 60, "ffn": 10, "attention": 40,
               "decide_blocks_gpu": late == "stall"}  # fmt: skip
    case = Case(sets, 3, 0, "tam", trigger, late, 6, 2, False, False, machine)
    journal = Journal()
    run, _ = case.run(journal=journal)
    met = {f.name: sum(getattr(r, f.name) for r in run.records) for f in fields(run.records[0])
           if f.name not in ("phase",)}  # fmt: skip
    always = ("loads", "evictions", "hit_resident", "hit_on_time", "residual", "wait_cpu_s")
    assert all(met[name] > 0 for name in always)
    assert met["late" if late == "cpu" else "wait_io_s"] > 0
    assert (met["wait_decide_s"] > 0) == (late == "stall")
    calm, _ = case.run(machine | {"dram": 99}, landings=journal.landings)
    assert total_ns(calm, "cpu_busy_s") < total_ns(run, "cpu_busy_s")  # DRAM was short
    # Sums have waited for a copy, and have gone before copies that waited.
    h2d = lanes(run)["h2d"]
    pool_ends = {end for *_, end in lanes(run)["cpu"]}
    assert any(name == "partial sums" and began not in pool_ends for name, _, began, _ in h2d)


DECISIONS = ("evaluated", "hit_resident", "hit_on_time", "late", "residual", "loads",
             "loads_used_first", "wasted", "evictions", "h2d_bytes")  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(cases(), machines())
def test_replayed_landings_give_the_same_decisions_on_any_machine(case, other):
    case = replace(case, anb=False)  # what a controller sees is time
    journal = Journal()
    first, _ = case.run(journal=journal)
    other = other | {"gating": case.machine["gating"]}
    again, _ = case.run(other, landings=journal.landings)
    for a, b in zip(first.records, again.records, strict=True):
        assert [getattr(a, name) for name in DECISIONS] == [getattr(b, name) for name in DECISIONS]

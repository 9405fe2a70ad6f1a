"""What must hold whatever a system chooses: dispatch, calling off, copies modes, whole layers."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.engine import run_trace
from kairox_sim.policies import Static
from tests.engine_cases import N_NEURONS, WAITS, Case, chunks, machines, systems, total_ns
from tests.test_engine_scaling import FIXED, RATES
from tests.toy_engine import Journal, costs, in_ns, lanes, new_cache
from tests.toys import of_chunks

slow_is_fine = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def busy_by_lane(run):
    """(lane, name) -> ns; and no two intervals of a lane overlap."""
    busy = {}
    for lane, ops in lanes(run).items():
        ends = 0
        for name, _, began, end in ops:
            assert ends <= began < end
            ends = end
            busy[lane, name] = busy.get((lane, name), 0) + end - began
    return busy


@slow_is_fine
@given(systems())
def test_bounds_and_identities(case):
    journal = Journal()
    run, cache = case.run(journal=journal)
    for r in run.records:
        for name in ("gpu_busy_s", "cpu_busy_s", "swap_busy_s", "act_busy_s"):
            assert 0 <= getattr(r, name) <= r.wall_s * (1 + 1e-12)
        unexplained = r.wall_s - r.gpu_busy_s - sum(getattr(r, w) for w in WAITS)
        assert in_ns(unexplained) == pytest.approx(0, abs=1e-3)
        assert min(getattr(r, w) for w in WAITS) >= 0
        assert r.evaluated == r.hit_on_time + r.fetched + r.residual
        assert r.late <= r.fetched + r.residual
        assert r.predict_s <= r.gpu_busy_s
        if case.dispatch == "gpu":
            assert r.residual == r.cpu_busy_s == r.act_busy_s == r.wait_cpu_s == 0
        if case.dispatch in ("concurrent", "serial"):
            assert r.fetched == 0
        if case.machine["gating"] == "dense":
            assert r.evaluated == case.n_layers * N_NEURONS
            assert r.predict_s == 0

    # Busiest resource <= makespan <= sum of all work.
    busy, makespan = busy_by_lane(run), total_ns(run, "wall_s")
    work = {
        "gpu": total_ns(run, "gpu_busy_s"),
        "cpu": total_ns(run, "cpu_busy_s"),
        "link": total_ns(run, "swap_busy_s", "act_busy_s"),
        "planner": total_ns(run, "decide_s"),
    }
    assert max(work["gpu"], work["cpu"]) <= makespan
    assert sum(ns for (lane, _), ns in busy.items() if lane == "h2d") <= makespan
    hand_overs = 2 * case.machine["handovers"] * case.machine["handover"]
    assert makespan <= sum(work.values()) + hand_overs * len(lanes(run).get("cpu", ()))
    assert busy.get(("gpu", "ffn"), 0) <= work["gpu"]
    assert busy.get(("cpu", "residual"), 0) == work["cpu"]
    assert busy.get(("h2d", "swap"), 0) + busy.get(("h2d", "fetch"), 0) == total_ns(
        run, "swap_busy_s"
    )
    if case.dispatch == "serial":
        gpu = [s for s in run.slices if s.lane == "gpu"]
        for pool in (s for s in run.slices if s.lane == "cpu"):
            assert all(s.end_ns <= pool.began_ns or pool.end_ns <= s.began_ns for s in gpu)

    # Every copy lands once or is cancelled, and over the run every load is somewhere.
    assert sorted(journal.landed + journal.cancelled) == journal.issued == sorted(journal.issued)
    totals = {name: sum(getattr(r, name) for r in run.records) for name in
              ("loads", "loads_used_first", "wasted", "cancelled")}  # fmt: skip
    assert totals["loads"] == (
        totals["loads_used_first"] + totals["wasted"] + totals["cancelled"]
        + run.cancelled_at_end + run.unused_yet
    )  # fmt: skip
    cache.check()


@slow_is_fine
@given(systems())
def test_bytes_are_those_of_the_copies(case):
    journal = Journal()
    run, _ = case.run(journal=journal)
    moved = sum(r.h2d_bytes for r in run.records)
    fetched = 40 * sum(r.fetched for r in run.records)
    if "position" in case.machine:
        assert moved >= fetched
    if case.late == "cancel" and case.trigger != "instant":
        loads = sum(s.promote.size for e in journal.events if hasattr(e, "swaps")
                    for s in e.swaps if s.id in journal.landed)  # fmt: skip
    else:
        loads = sum(r.loads for r in run.records)
    if "position" in case.machine:
        assert moved >= 40 * loads + fetched
    else:
        assert moved == 40 * loads + fetched


@settings(max_examples=40, deadline=None)
@given(systems())
def test_same_inputs_same_run(case):
    (first, _), (second, _) = case.run(), case.run()
    assert repr(first) == repr(second)  # nan included
    assert first.records


def slower(machine, k):
    names = (*FIXED, "copy_sync")
    changed = {name: machine[name] * k for name in names}
    return machine | changed | {name: machine[name] / k for name in RATES}


@settings(max_examples=100, deadline=None)
@given(systems(dram=float("inf")), st.sampled_from([2, 3, 10]))
def test_a_machine_k_times_as_fast_takes_a_kth_of_the_time(case, k):
    """Exactly, where nothing is rounded; whether a gap is worth reading is a matter of rounding."""
    machine = {name: value for name, value in case.machine.items() if name != "position"}
    case = replace(case, anb=False, machine=machine)
    fast, _ = case.run()
    slow, _ = case.run(slower(machine, k))
    for a, b in zip(fast.records, slow.records, strict=True):
        for field in fields(a):
            one, other = getattr(a, field.name), getattr(b, field.name)
            if field.name.endswith("_s"):
                assert round(in_ns(other)) == k * round(in_ns(one)), field.name
            else:
                assert one == other or (one != one and other != other), field.name


@settings(max_examples=60, deadline=None)
@given(systems())
def test_a_step_alone_is_no_slower_beside_than_after_the_host(case):
    """Static placement: there is no copy, so nothing but the two sides' order differs."""
    case = replace(case, policy="static", slots=min(case.slots, 9))
    beside, _ = replace(case, dispatch="concurrent").run()
    after, _ = replace(case, dispatch="serial").run()
    for a, b in zip(beside.records, after.records, strict=True):
        assert a.wall_s <= b.wall_s * (1 + 1e-12)
        assert in_ns(b.wall_s - a.wall_s) <= in_ns(a.gpu_busy_s) + 1e-3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), chunks(n))),
    machines(gating="dense"),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from([2, 3]),
)
def test_whole_layers_are_one_after_the_other(given_chunks, machine, sides, k):
    n_layers, (sets, n_prefill) = given_chunks
    machine = machine | {"dram": 8}
    sides = sides[:n_layers]
    slots = [N_NEURONS if on_gpu else 0 for on_gpu in sides]

    def run(changed):
        cache = new_cache(
            Static(n_layers, N_NEURONS), n_layers=n_layers, n_neurons=N_NEURONS, slots=slots,
            pinned=[range(n) for n in slots],
        )  # fmt: skip
        trace = of_chunks(sets, N_NEURONS, n_layers=n_layers, n_prefill=n_prefill)
        return run_trace(trace, cache, costs(**changed), dispatch="layers", keep_slices=True)

    fast = run(machine)
    work = total_ns(fast, "gpu_busy_s", "cpu_busy_s", "act_busy_s")
    changes = sum(a != b for a, b in pairwise(sides))
    changes += sides[-1] and not all(sides)
    assert total_ns(fast, "wall_s") == work + len(fast.records) * changes * machine["handover"]
    assert sum(busy_by_lane(fast).values()) == work
    for r in fast.records:
        assert (r.hit_on_time, r.residual) == (sum(slots), n_layers * N_NEURONS - sum(slots))
        assert r.wait_cpu_s == pytest.approx(r.wall_s - r.gpu_busy_s)
    slow = run(slower(machine | {"copy_sync": 0}, k))
    n_events = 4 + 2 * len(fast.slices)
    assert total_ns(slow, "wall_s") == pytest.approx(
        k * total_ns(fast, "wall_s"), abs=(k + 1) * n_events
    )


@pytest.mark.parametrize("dispatch", ["gpu", "cost"])
@pytest.mark.parametrize("late", ["cpu", "cancel"])
def test_the_cases_meet_what_they_are_for(dispatch, late):
    """None of these properties holds because nothing ever happens."""
    rng = np.random.default_rng(5)
    sets = [[[np.flatnonzero(rng.random(N_NEURONS) < 0.5).tolist()] for _ in range(3)]
            for _ in range(12)]  # fmt: skip
    machine = {"dram": 6, "h2d": 4, "cpu_cap": 2, "copy_fixed": 40, "ffn": 1, "attention": 40}
    case = Case(sets, 3, 0, "tam", "attn_out", late, 6, 1, False, False, machine, dispatch, 2)
    run, _ = case.run()
    met = {f.name: sum(getattr(r, f.name) for r in run.records) for f in fields(run.records[0])
           if f.name != "phase"}  # fmt: skip
    for name in ("loads", "late", "hit_on_time", "fetched", "wait_io_s", "swap_busy_s"):
        assert met[name] > 0, name
    assert (met["cancelled"] > 0) == (late == "cancel")
    assert (met["residual"] > 0) == (met["cpu_busy_s"] > 0) == (dispatch == "cost")
    names = [name for name, *_ in lanes(run)["h2d"]]
    assert {"swap", "fetch"} <= set(names)
    # A fetch has waited for a copy, and copies have waited for fetches.
    pairs = set(pairwise(names))
    assert ("swap", "fetch") in pairs
    assert ("fetch" if dispatch == "gpu" else "partial sums", "swap") in pairs

"""A machine k times as fast, more of one rate, and the anomalies: where faster is slower."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.engine import run_trace
from kairox_sim.flows import HostTraffic
from kairox_sim.prediction import Perfect
from tests.engine_cases import cases, total_ns
from tests.toy_engine import Journal, Scripted, costs, in_ns, lanes, new_cache
from tests.toys import of_chunks

# -- scaling ------------------------------------------------------------------------------------

FIXED = ("attention", "gate", "predict", "ffn", "head", "cpu_fixed", "copy_fixed", "act_fixed",
         "d2h_fixed", "handover", "decide", "decide_per_swap")  # fmt: skip
RATES = ("ffn_rate", "cpu_cap", "dram", "h2d")


def slower(machine, k):
    """Every fixed cost k times as long, every rate a k-th."""
    changed = {name: machine[name] * k for name in FIXED}
    return machine | changed | {name: machine[name] / k for name in RATES}


@settings(max_examples=75, deadline=None)
@given(cases(dram=float("inf")), st.sampled_from([2, 3, 10]))
def test_a_machine_k_times_as_fast_takes_a_kth_of_the_time(case, k):
    """Exactly, where nothing is rounded: 40 bytes at 1, 2, 4, 5, 8, 20 or 40 a ns."""
    case = replace(case, anb=False)
    fast, _ = case.run()
    slow, _ = case.run(slower(case.machine, k))
    for a, b in zip(fast.records, slow.records, strict=True):
        for field in fields(a):
            one, other = getattr(a, field.name), getattr(b, field.name)
            if field.name.endswith("_s"):
                assert round(in_ns(other)) == k * round(in_ns(one))
            else:
                assert one == other or (one != one and other != other)


@pytest.fixture
def fifo(monkeypatch):
    """One queue for the link, without priorities."""
    monkeypatch.setattr(HostTraffic, "submit_critical", _behind_everything)


def _behind_everything(traffic, key, n_bytes, setup_ns, now_ns):
    traffic.submit_swaps([key], n_bytes, setup_ns)
    queue = traffic._swaps
    queue[-1].kind = "critical"
    start_ns = now_ns if traffic._link is None else traffic._link.end_ns
    return start_ns + sum(run.alone_ns * (len(run.keys) - run.n_started) for run in queue)


# With a planner that blocks and plans ahead of the FFN, what is queued on the link is always in the
# order of the program: copies for l+1, sums of l, copies for l+2.
IN_ORDER = {"decide_blocks_gpu": True}
PLANNED_AHEAD = ("attn_in", "attn_out", "serial")
monkeypatch_per_example = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@monkeypatch_per_example
@given(
    cases(triggers=PLANNED_AHEAD, **IN_ORDER),
    st.sampled_from([2, 3, 7]),
)
def test_scaling_with_shared_dram_is_exact_to_a_ns_per_event(fifo, case, k):
    case = replace(case, anb=False)
    journal = Journal()
    base = slower(case.machine, 1000)  # so that a ns is little
    case.run(base, journal=journal)
    fast, _ = case.run(base, landings=journal.landings)
    slow, _ = case.run(slower(base, k), landings=journal.landings)
    n_events = 4 + 2 * len(fast.slices)  # every op begins and ends once
    assert total_ns(slow, "wall_s") == pytest.approx(
        k * total_ns(fast, "wall_s"), abs=(k + 1) * n_events
    )


@monkeypatch_per_example
@given(
    cases(triggers=PLANNED_AHEAD, dram=float("inf"), **IN_ORDER),
    st.sampled_from([*FIXED, "ffn_rate", "cpu_cap", "h2d"]),
)
def test_more_of_one_rate_never_slows_a_run(fifo, case, name):
    """Decisions and landings fixed, unlimited DRAM, one FIFO queue per device, no priorities."""
    case = replace(case, anb=False)
    journal = Journal()
    case.run(journal=journal)
    before, _ = case.run(landings=journal.landings)
    value = case.machine[name]
    faster = case.machine | {name: value / 2 if name in FIXED else value * 2}
    after, _ = case.run(faster, landings=journal.landings)
    ends = [np.cumsum([r.wall_s for r in run.records]) for run in (before, after)]
    assert (ends[1] <= ends[0] + 1e-12).all()


# -- anomalies: the conditions above are needed --------------------------------------------------


def anomaly(machine, script, **options):
    cache = new_cache(Scripted(script), swap_neurons=options.pop("swap_neurons"))
    trace = of_chunks([[[[0]], [[2, 3]]]], 8, n_layers=2)
    return run_trace(trace, cache, costs(**machine), predictions=Perfect(), keep_slices=True,
                     **options)  # fmt: skip


def test_with_shared_dram_a_faster_pool_slows_the_run():
    """Copies at up to 16 bytes/ns and a pool at 4 or 10 share 20; layer 1 waits for its copies.

    Six copies of 4800 bytes: planner 120-134, then 134-434-734-1034-1334-1634 and on.
    Pool: 4800 bytes from 145 (see test_engine_timelines). FFN(0) is long: 130-1730; attention
    -1830, gate -1840.

    Pool at 4: no conflict. Reads to 1345; its sums wait for the fifth copy, 1634-1641, and delay
    the sixth: 1641-1941. FFN(1) starts at 1941.
    Pool at 10: copies at 10 as well while it reads, to 625. First: 11 ns at 16, 4624 left: 608.
    Second: 170 by 625, 4630 left at 16: 915. Sums -922. Then 1222, 1522, 1822, 2122.
    """
    machine = {"bundle": 4800, "ffn": 1600, "ffn_rate": 4800, "copy_fixed": 0, "h2d": 16,
               "dram": 20}  # fmt: skip
    script = ([2, 3, 4, 5, 6, 7], [])
    options = {"late": "stall", "swap_neurons": 1}
    slow_pool = anomaly(machine | {"cpu_cap": 4}, script, **options)
    fast_pool = anomaly(machine | {"cpu_cap": 10}, script, **options)
    starts = [
        next(s.began_ns for s in run.slices if (s.name, s.layer) == ("ffn", 1))
        for run in (slow_pool, fast_pool)
    ]
    assert starts == [1941, 2122]
    assert total_ns(fast_pool, "wall_s") == total_ns(slow_pool, "wall_s") + 181
    assert slow_pool.records[0].hit_on_time == fast_pool.records[0].hit_on_time == 2


def test_with_priorities_a_faster_link_slows_the_run():
    """Two copies of 17 + 80 / h2d each, from 130 on. FFN(0) 130-160, pool 138-149.

    Link at 20: first copy -151, then the sums: 151 + 4 + 2 = 157, joined at 160: no wait.
    Link at 80: first copy -148, the second has begun when the sums are given: -166, sums
    166 + 4 + 0.5 -> 171, joined at 174: the GPU waits 14.
    """
    machine = {"copy_fixed": 17}
    script = ([2, 3, 4, 5], [])
    slow_link = anomaly(machine | {"h2d": 20}, script, swap_neurons=2)
    fast_link = anomaly(machine | {"h2d": 80}, script, swap_neurons=2)
    assert lanes(slow_link)["h2d"] == [
        ("swap", 1, 130, 151), ("partial sums", 0, 151, 157), ("swap", 1, 157, 178),
    ]  # fmt: skip
    assert lanes(fast_link)["h2d"] == [
        ("swap", 1, 130, 148), ("swap", 1, 148, 166), ("partial sums", 0, 166, 171),
    ]  # fmt: skip
    assert total_ns(slow_link, "wait_cpu_s") == 0
    assert total_ns(fast_link, "wait_cpu_s") == 14
    assert total_ns(fast_link, "wall_s") == total_ns(slow_link, "wall_s") + 14
    assert slow_link.records[0].hit_on_time == fast_link.records[0].hit_on_time == 2

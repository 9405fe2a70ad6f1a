"""What must hold for every trace, policy and machine: bounds, conservation, scaling, anomalies."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.controllers import Anb
from kairox_sim.engine import run_trace
from kairox_sim.flows import HostTraffic
from kairox_sim.policies import Lfu, Lru, NoneResident, Static, Tam
from kairox_sim.prediction import OfQuality, Perfect
from tests.driving import Shadow
from tests.toy_engine import Journal, Scripted, costs, in_ns, lanes, new_cache
from tests.toys import of_chunks

N_NEURONS = 12
TRIGGERS = ("attn_in", "attn_out", "serial", "after", "instant")
WAITS = ("wait_cpu_s", "wait_io_s", "wait_decide_s")


@dataclass(frozen=True)
class Case:
    chunks: list  # [step][layer][token] -> ids
    n_layers: int
    n_prefill: int
    policy: str
    trigger: str
    late: str
    slots: int
    swap_neurons: int
    anb: bool
    perfect: bool
    machine: dict

    def trace(self):
        return of_chunks(
            self.chunks, N_NEURONS, n_layers=self.n_layers, n_prefill=self.n_prefill
        )  # fmt: skip

    def cache(self, journal=None):
        size = (self.n_layers, N_NEURONS)
        policy = {
            "tam": lambda: Tam(*size, beta=0.5),
            "lru": lambda: Lru(*size),
            "lfu": lambda: Lfu(*size),
            "static": lambda: Static(*size),
            "none": lambda: NoneResident(*size),
        }[self.policy]()
        slots = 0 if self.policy == "none" else self.slots
        warm = [range(slots)] * self.n_layers if self.policy == "static" else None
        cache = new_cache(
            policy,
            n_layers=self.n_layers,
            n_neurons=N_NEURONS,
            slots=slots,
            controller=Anb() if self.anb and self.policy == "tam" else None,
            warm=warm,
            swap_neurons=self.swap_neurons,
            trigger=self.trigger,
        )
        cache.journal = journal
        return cache

    def run(self, machine=None, journal=None, landings=None):
        cache = self.cache(journal)
        run = run_trace(
            self.trace(),
            cache,
            costs(**(machine or self.machine)),
            trigger=self.trigger,
            late=self.late,
            predictions=Perfect() if self.perfect else OfQuality(0.7, 0.6, N_NEURONS, seed=3),
            landings=landings,
            keep_slices=True,
        )
        return run, cache


@st.composite
def chunks(draw, n_layers):
    sizes = draw(st.sampled_from([[1] * 4, [3, 1, 1], [1], [1] * 6, [2, 4, 1]]))
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mask = rng.random(N_NEURONS) < density
    made = []
    for n_tokens in sizes:
        step = []
        for _ in range(n_layers):
            tokens = []
            for _ in range(n_tokens):
                fresh = rng.random(N_NEURONS) < 0.4
                mask = np.where(fresh, rng.random(N_NEURONS) < density, mask)
                tokens.append(np.flatnonzero(mask).tolist())
            step.append(tokens)
        made.append(step)
    return made, sum(n > 1 for n in sizes)


@st.composite
def machines(draw, **fixed):
    machine = {
        "attention": draw(st.sampled_from([0, 5, 100])),
        "gate": draw(st.sampled_from([0, 10])),
        "predict": draw(st.sampled_from([0, 20])),
        "ffn": draw(st.sampled_from([1, 30])),
        "ffn_rate": draw(st.sampled_from([5, 40])),
        "head": draw(st.sampled_from([0, 50])),
        "cpu_fixed": draw(st.sampled_from([0, 7])),
        "cpu_cap": draw(st.sampled_from([1, 2, 8])),
        "dram": draw(st.sampled_from([float("inf"), 3, 6, 20])),
        "copy_fixed": draw(st.sampled_from([0, 6, 60])),
        "h2d": draw(st.sampled_from([1, 4, 20])),
        "rowcopies": draw(st.booleans()),
        "act_fixed": draw(st.sampled_from([0, 4])),
        "d2h_fixed": draw(st.sampled_from([0, 5])),
        "handover": draw(st.sampled_from([0, 3, 40])),
        "decide": draw(st.sampled_from([0, 8, 150])),
        "decide_per_swap": draw(st.sampled_from([0, 1])),
        "decide_blocks_gpu": draw(st.booleans()),
        "gating": draw(st.sampled_from(["exact", "oracle", "predicted"])),
    }
    return machine | fixed


@st.composite
def cases(draw, triggers=TRIGGERS, **fixed):
    n_layers = draw(st.integers(1, 3))
    sets, n_prefill = draw(chunks(n_layers))
    return Case(
        chunks=sets,
        n_layers=n_layers,
        n_prefill=n_prefill,
        policy=draw(st.sampled_from(["tam", "tam", "lru", "lfu", "static", "none"])),
        trigger=draw(st.sampled_from(triggers)),
        late=draw(st.sampled_from(["cpu", "stall"])),
        slots=draw(st.sampled_from([0, 1, 4, 9, 12])),
        swap_neurons=draw(st.integers(1, 4)),
        anb=draw(st.booleans()),
        perfect=draw(st.booleans()),
        machine=draw(machines(**fixed)),
    )


def total_ns(run, *names):
    return sum(round(in_ns(getattr(r, name))) for r in run.records for name in names)


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
@given(cases(triggers=("attn_in", "attn_out", "serial", "after")), machines())
def test_replayed_landings_give_the_same_decisions_on_any_machine(case, other):
    case = replace(case, anb=False)  # what a controller sees is time
    journal = Journal()
    first, _ = case.run(journal=journal)
    other = other | {"gating": case.machine["gating"]}
    again, _ = case.run(other, landings=journal.landings)
    for a, b in zip(first.records, again.records, strict=True):
        assert [getattr(a, name) for name in DECISIONS] == [getattr(b, name) for name in DECISIONS]


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

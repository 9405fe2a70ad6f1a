"""Host memory traffic: hand-worked sharing, and a reference that goes nanosecond by nanosecond."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.flows import NEVER, HostTraffic, water_fill

GB = 1e9  # bytes/s; 1 GB/s is one byte per ns


def settle_all(traffic, now_ns):
    ended = []
    while some := traffic.settle(now_ns):
        ended += some
    return [(e.end_ns, e.kind, e.key) for e in ended]


# -- water-filling ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "capacity", "rates"),
    [
        ([10, 20], 100, [10, 20]),  # nobody is short
        ([10, 20], 20, [10, 10]),  # 10 each: the first is content with that
        ([4, 20], 20, [4, 16]),  # 4 asks less than its half, the other gets the rest
        ([20, 4], 20, [16, 4]),
        ([30, 30], 20, [10, 10]),
        ([3, 9, 9], 15, [3, 6, 6]),  # 5 each; 2 left over; (15 - 3) / 2
        ([5], inf, [5]),
        ([], 7, []),
    ],
)
def test_water_fill(caps, capacity, rates):
    assert water_fill(caps, capacity) == rates


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    st.floats(0.1, 300),
)
def test_water_fill_is_fair_and_gives_all_there_is(caps, capacity):
    rates = water_fill(caps, capacity)
    assert all(0 < rate <= cap for rate, cap in zip(rates, caps, strict=True))
    assert sum(rates) == pytest.approx(min(capacity, sum(caps)))
    # Whoever is kept below its cap gets as much as the best served.
    assert all(
        rate == pytest.approx(max(rates))
        for rate, cap in zip(rates, caps, strict=True)
        if rate < cap * (1 - 1e-12)
    )


# -- by hand ------------------------------------------------------------------------------------


def test_a_copy_takes_its_set_up_and_its_bytes():
    traffic = HostTraffic(4 * GB)
    traffic.submit_swaps("ab", 100, 6)
    assert settle_all(traffic, 10) == []  # starts at 10, not when it was submitted
    # 6 + 100 / 4 = 31 ns each
    assert settle_all(traffic, 40) == []
    assert settle_all(traffic, 41) == [(41, "swap", "a")]
    assert settle_all(traffic, 71) == []
    assert settle_all(traffic, 500) == [(72, "swap", "b")]
    assert traffic.swap_busy_ns(500) == 62


def test_ends_are_rounded_up_and_whole_quotients_are_not():
    traffic = HostTraffic(3 * GB)
    traffic.submit_swaps("a", 10, 0)  # 3.33 ns
    settle_all(traffic, 0)
    assert settle_all(traffic, 9) == [(4, "swap", "a")]
    traffic = HostTraffic(0.1 * GB)
    traffic.submit_swaps("a", 0.3, 0)  # 0.3 / 0.1 is 2.9999999999999996 or 3.0000000000000004
    settle_all(traffic, 0)
    assert settle_all(traffic, 9) == [(3, "swap", "a")]


def test_dram_limits_a_copy_that_is_alone():
    traffic = HostTraffic(4 * GB, 2 * GB)
    traffic.submit_swaps("a", 100, 6)
    settle_all(traffic, 0)
    assert settle_all(traffic, 100) == [(56, "swap", "a")]


def test_pool_and_link_share_dram():
    # Link 4, pool up to 6, DRAM 8 bytes/ns: together each gets 4; the pool alone has 6.
    # Swap: set up 0-10, during which the pool has 6. From 10 on 4 each.
    # Pool, 200 bytes: 60 by 10, the other 140 at 4: 10 + 35 = 45 if the swap goes on for so long.
    # Swap, 100 bytes from 10 at 4: 35. By then the pool has 60 + 100 = 160; 40 left at 6: 6.67 ns.
    traffic = HostTraffic(4 * GB, 8 * GB)
    traffic.submit_swaps("a", 100, 10)
    settle_all(traffic, 0)
    traffic.submit_cpu("rows", 200, 6 * GB, 0, 0)
    settle_all(traffic, 0)
    assert traffic.next_change_ns() == 10
    assert settle_all(traffic, 10) == []
    assert traffic.next_change_ns() == 35
    assert settle_all(traffic, 35) == [(35, "swap", "a")]
    assert traffic.next_change_ns() == 42
    assert settle_all(traffic, 42) == [(42, "cpu", "rows")]
    assert traffic.next_change_ns() == NEVER


def test_a_pool_that_starts_slows_a_copy_that_is_moving():
    # Link 6, pool 8, DRAM 8 bytes/ns: together 4 each. The pool is woken at 3 and reads from 10.
    # Swap of 120 bytes at 6: 60 by ns 10, then 4 each; 60 / 4 = 15: lands at 25.
    # Pool of 100 bytes: 60 by 25, the other 40 at 8: 30.
    traffic = HostTraffic(6 * GB, 8 * GB)
    traffic.submit_swaps("a", 120, 0)
    settle_all(traffic, 0)
    settle_all(traffic, 3)
    traffic.submit_cpu("rows", 100, 8 * GB, 10, 3)
    assert traffic.next_change_ns() == 10
    assert settle_all(traffic, 10) == []
    assert settle_all(traffic, 25) == [(25, "swap", "a")]
    assert settle_all(traffic, 30) == [(30, "cpu", "rows")]


def test_critical_goes_before_waiting_swaps_and_preempts_none():
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("abc", 10, 0)
    settle_all(traffic, 0)
    settle_all(traffic, 4)
    assert traffic.submit_critical("x", 5, 1, 4) == 16  # a ends at 10, then 1 + 5
    assert traffic.next_change_ns() == NEVER  # nothing can change it
    assert settle_all(traffic, 99) == [
        (10, "swap", "a"), (16, "critical", "x"), (26, "swap", "b"), (36, "swap", "c"),
    ]  # fmt: skip
    assert traffic.swap_busy_ns(99) == 30


def test_a_pool_that_ends_with_a_swap_puts_its_sums_before_the_next_swap():
    # Both end at 10. What the pool's end makes the caller submit goes before what starts at 10.
    traffic = HostTraffic(1 * GB)
    traffic.submit_swaps("ab", 10, 0)
    settle_all(traffic, 0)
    traffic.submit_cpu("rows", 20, 2 * GB, 0, 0)
    ended = traffic.settle(10)
    assert [(e.kind, e.end_ns) for e in ended] == [("cpu", 10), ("swap", 10)]
    assert traffic.submit_critical("rows", 3, 0, 10) == 13
    assert traffic.settle(10) == []
    assert settle_all(traffic, 13) == [(13, "critical", "rows")]
    assert settle_all(traffic, 23) == [(23, "swap", "b")]


def test_landings_are_known_while_the_pool_is_idle():
    traffic = HostTraffic(2 * GB)
    with pytest.raises(RuntimeError, match="only while the pool is idle"):
        traffic.landing_ns("a")
    traffic.submit_swaps(["a", "b", "c"], 10, 1)
    traffic.submit_swaps(["d"], 4, 1)
    settle_all(traffic, 5)
    settle_all(traffic, 12)  # a: 5-11; b has begun
    assert [traffic.landing_ns(key) for key in "bcd"] == [17, 23, 26]
    traffic.submit_critical("x", 2, 0, 12)
    assert [traffic.landing_ns(key) for key in "bcd"] == [17, 24, 27]
    with pytest.raises(RuntimeError, match="'a' is neither on the link nor waiting"):
        traffic.landing_ns("a")


def test_one_layer_step_at_a_time():
    traffic = HostTraffic(1 * GB)
    traffic.submit_cpu("a", 1, GB, 0, 0)
    with pytest.raises(RuntimeError, match="one layer-step at a time"):
        traffic.submit_cpu("b", 1, GB, 0, 0)
    with pytest.raises(RuntimeError, match="with the pool, or another one, still at work"):
        traffic.submit_critical("a", 5, 0, 0)
    with pytest.raises(RuntimeError, match="only while the pool is idle"):
        traffic.landing_ns("c")
    settle_all(traffic, 1)
    traffic.submit_critical("a", 5, 0, 1)
    settle_all(traffic, 1)
    with pytest.raises(RuntimeError, match="one layer-step at a time"):
        traffic.submit_cpu("b", 1, GB, 2, 2)


# -- against a reference that moves every byte in every nanosecond --------------------------------


@dataclass
class Job:
    idle: int  # ns from the arrival of the sums before it
    wake: int  # ns from then until the pool reads
    n_bytes: int
    cap: int
    n_sums: int  # bytes
    setup: int  # of the sums


@dataclass
class Scene:
    """Rates in bytes/ns. The pool works through `jobs`; the end of each sends sums up the link."""

    h2d: int
    dram: int | None
    plans: list  # (time, [n_bytes per swap], set-up)
    jobs: list[Job]


@dataclass
class NaiveLink:
    kind: str
    key: object
    setup: int
    left: Fraction


@dataclass
class Naive:
    scene: Scene
    landed: dict = field(default_factory=dict)  # key -> time

    def run(self):
        scene = self.scene
        swaps, critical = [], []
        link = None
        job, job_left = 0, None
        job_starts = scene.jobs[0].idle + scene.jobs[0].wake if scene.jobs else None
        n_due = sum(len(sizes) for _, sizes, _ in scene.plans) + 2 * len(scene.jobs)
        now = 0
        while len(self.landed) < n_due:
            if job_left is not None and job_left <= 0:
                self.landed["cpu", job] = now
                done = scene.jobs[job]
                critical.append(NaiveLink("critical", job, done.setup, done.n_sums))
                job_left, job, job_starts = None, job + 1, None
            if link is not None and link.setup == 0 and link.left <= 0:
                self.landed[link.kind, link.key] = now
                if link.kind == "critical" and job < len(scene.jobs):
                    job_starts = now + scene.jobs[job].idle + scene.jobs[job].wake
                link = None
            for number, (time, sizes, setup) in enumerate(scene.plans):
                if time == now:
                    swaps += [
                        NaiveLink("swap", (number, i), setup, Fraction(n))
                        for i, n in enumerate(sizes)
                    ]
            if job < len(scene.jobs) and job_left is None and job_starts == now:
                job_left = Fraction(scene.jobs[job].n_bytes)
            if link is None and (critical or swaps):
                link = (critical or swaps).pop(0)
            moving = link is not None and link.setup == 0
            cpu_rate, link_rate = self.rates(job, job_left is not None, moving)
            if job_left is not None:
                job_left -= cpu_rate
            if moving:
                link.left -= link_rate
            elif link is not None:
                link.setup -= 1
            now += 1
        return self.landed

    def rates(self, job, pool_reads, link_moves):
        scene = self.scene
        cap = Fraction(scene.jobs[job].cap) if pool_reads else Fraction(0)
        h2d = Fraction(scene.h2d) if link_moves else Fraction(0)
        if scene.dram is None or cap + h2d <= scene.dram:
            return cap, h2d
        half = Fraction(scene.dram, 2)
        if not pool_reads or not link_moves:
            return min(cap, scene.dram), min(h2d, scene.dram)
        if cap <= half:
            return cap, scene.dram - cap
        if h2d <= half:
            return scene.dram - h2d, h2d
        return half, half


def drive(scene, expected, *, together):
    """The same through HostTraffic, waking up when it says so and when something is submitted."""
    traffic = HostTraffic(scene.h2d * GB, inf if scene.dram is None else scene.dram * GB)
    landed, n_wakes = {}, 0
    starts = {scene.jobs[0].idle: 0} if scene.jobs else {}  # time -> job
    plans = {}  # time -> what is submitted
    for number, (time, sizes, setup) in enumerate(scene.plans):
        plans.setdefault(time, []).append((number, sizes, setup))
    submitted = []
    reading = False

    def settle(now):
        nonlocal reading
        while ended := traffic.settle(now):
            for e in ended:
                landed[e.kind, e.key] = e.end_ns
                if e.kind == "cpu":
                    assert e.end_ns == now, "the end of the pool's work went unnoticed"
                    reading = False
                    job = scene.jobs[e.key]
                    arrival = traffic.submit_critical(e.key, job.n_sums, job.setup, now)
                    assert arrival == expected["critical", e.key]
                    if e.key + 1 < len(scene.jobs):
                        starts[arrival + scene.jobs[e.key + 1].idle] = e.key + 1

    while True:
        now = min([traffic.next_change_ns(), *starts, *plans])
        if now == NEVER:
            break
        n_wakes += 1
        settle(now)
        for number, sizes, setup in plans.pop(now, ()):
            keys = [(number, i) for i in range(len(sizes))]
            submitted += keys
            whole = [key for key, n in zip(keys, sizes, strict=True) if n == sizes[0]]
            if together and whole == keys[: len(whole)]:
                traffic.submit_swaps(whole, sizes[0], setup)
                keys = keys[len(whole) :]
            for key in keys:
                traffic.submit_swaps([key], sizes[key[1]], setup)
        settle(now)
        if now in starts:
            number = starts.pop(now)
            job = scene.jobs[number]
            traffic.submit_cpu(number, job.n_bytes, job.cap * GB, now + job.wake, now)
            reading = True
        settle(now)
        if not (reading or starts):  # the pool rests for good: all landings are certain
            for key in submitted:
                if ("swap", key) not in landed:
                    assert traffic.landing_ns(key) == expected["swap", key]
    settle(10**9)
    return landed, n_wakes


@st.composite
def scenes(draw):
    n_plans = draw(st.integers(0, 3))
    plans, time = [], 0
    for _ in range(n_plans):
        time += draw(st.integers(0, 40))
        size = draw(st.integers(1, 40))
        last = draw(st.integers(1, size))
        n = draw(st.integers(0, 4))
        plans.append((time, [size] * n + [last], draw(st.integers(0, 9))))
    jobs = draw(
        st.lists(
            st.builds(
                Job,
                idle=st.integers(0, 30),
                wake=st.integers(0, 20),
                n_bytes=st.integers(1, 150),
                cap=st.integers(1, 8),
                n_sums=st.integers(1, 12),
                setup=st.integers(0, 9),
            ),
            max_size=3,
        )
    )
    return Scene(draw(st.integers(1, 6)), draw(st.none() | st.integers(1, 12)), plans, jobs)


@settings(max_examples=300, deadline=None)
@given(scenes())
def test_a_plan_submitted_together_lands_as_swap_by_swap(scene):
    """Rates change in the middle of a swap, the last one is smaller, sums cut in."""
    expected = Naive(scene).run()
    for together in (True, False):
        landed, _ = drive(scene, expected, together=together)
        assert landed == expected


def test_the_reference_meets_what_it_is_for():
    """A scene in which a swap is slowed down half-way and the sums wait for a swap to end."""
    jobs = [Job(idle=1, wake=4, n_bytes=60, cap=5, n_sums=4, setup=0)]
    scene = Scene(h2d=4, dram=6, plans=[(0, [40, 40, 40, 10], 2)], jobs=jobs)
    # Swap 0: set up 0-2; at 4 by 5 (12 bytes), then 3 beside the pool: 28 left, 10 ns: 15.
    # Pool: 3 each from 5 to 15 (30 bytes); alone, 5, while swap 1 is set up, 15-17 (40 by then);
    # 3 again: 20 left, 7 ns: 24. Swap 1, moving from 17: 21 by 24, the other 19 at 4: 29.
    # The sums wait for it and take 1 ns: 30. Swap 2: 30 + 2 + 10 = 42; swap 3: 42 + 2 + 3 = 47.
    expected = {
        ("swap", (0, 0)): 15,
        ("cpu", 0): 24,
        ("swap", (0, 1)): 29,
        ("critical", 0): 30,
        ("swap", (0, 2)): 42,
        ("swap", (0, 3)): 47,
    }
    assert Naive(scene).run() == expected
    assert drive(scene, expected, together=True)[0] == expected


def test_uncontended_swaps_cost_no_wake_up():
    jobs = [Job(idle=5, wake=0, n_bytes=60, cap=5, n_sums=4, setup=0)]
    scene = Scene(h2d=4, dram=None, plans=[(0, [40] * 50, 2)], jobs=jobs)
    _, n_wakes = drive(scene, Naive(scene).run(), together=True)
    assert n_wakes == 3  # the plan, the job, its end


def test_busy_time_of_a_copy_under_way_counts_up_to_now():
    traffic = HostTraffic(1 * GB)
    assert traffic.swap_busy_ns(0) == 0
    assert traffic.on_link() is None
    traffic.submit_swaps("ab", 10, 0)
    settle_all(traffic, 5)
    settle_all(traffic, 8)
    assert traffic.swap_busy_ns(8) == 3
    assert traffic.on_link() == ("swap", "a", 5)
    settle_all(traffic, 19)
    assert traffic.swap_busy_ns(19) == 14

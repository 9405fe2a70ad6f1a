"""Host memory traffic against a reference that moves every byte in every nanosecond."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.flows import NEVER, HostTraffic
from tests.test_flows import GB


@dataclass
class Job:
    idle: int  # ns from the arrival of the sums before it
    wake: int  # ns from then until the pool reads
    n_bytes: int
    cap: int
    n_sums: int  # bytes
    setup: int  # of the sums
    fetches: tuple = ()  # bytes each, given as the job is
    fetch_setup: int = 0


@dataclass
class Scene:
    """Rates in bytes/ns. The pool works through `jobs`; the end of each sends sums up the link.

    What a job fetches is given with it, `wake` before the pool reads. The next one begins `idle`
    after the sums are up.
    """

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
        swaps, urgent = [], []
        link = None
        job, job_left = 0, None
        job_starts = scene.jobs[0].idle + scene.jobs[0].wake if scene.jobs else None
        n_due = sum(len(sizes) for _, sizes, _ in scene.plans)
        n_due += sum(2 + len(job.fetches) for job in scene.jobs)
        now = 0
        while len(self.landed) < n_due:
            if job_left is not None and job_left <= 0:
                self.landed["cpu", job] = now
                done = scene.jobs[job]
                urgent.append(NaiveLink("critical", job, done.setup, done.n_sums))
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
            if job < len(scene.jobs) and job_left is None and job_starts is not None:
                given = scene.jobs[job]
                if now == job_starts - given.wake:
                    if link is None and swaps:  # what can begin now has, before the job is given
                        link = swaps.pop(0)
                    urgent += [
                        NaiveLink("fetch", ("of job", job, i), given.fetch_setup, Fraction(n))
                        for i, n in enumerate(given.fetches)
                    ]
            if job < len(scene.jobs) and job_left is None and job_starts == now:
                job_left = Fraction(scene.jobs[job].n_bytes)
            if link is None and (urgent or swaps):
                link = (urgent or swaps).pop(0)
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
    given = set()  # keys of fetches

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
            for i, n in enumerate(job.fetches):
                traffic.submit_fetches([("of job", number, i)], n, job.fetch_setup)
            settle(now)
            traffic.submit_cpu(number, job.n_bytes, job.cap * GB, now + job.wake, now)
            reading = True
            given |= {("of job", number, i) for i in range(len(job.fetches))}
        settle(now)
        if not (reading or starts):  # the pool rests for good: all landings are certain
            for key in submitted:
                if ("swap", key) not in landed:
                    assert traffic.landing_ns(key) == expected["swap", key]
        if not reading:  # until the next job, and fetches are not overtaken
            for kind, key in expected:
                if kind == "fetch" and key in given and (kind, key) not in landed:
                    assert traffic.landing_ns(key) == expected[kind, key]
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
                fetches=st.lists(st.integers(1, 40), max_size=3).map(tuple),
                fetch_setup=st.integers(0, 9),
            ),
            max_size=3,
        )
    )
    return Scene(draw(st.integers(1, 6)), draw(st.none() | st.integers(1, 12)), plans, jobs)


@settings(max_examples=300, deadline=None)
@given(scenes())
def test_a_plan_submitted_together_lands_as_swap_by_swap(scene):
    """Rates change in the middle of a swap, the last one is smaller, fetches and sums cut in."""
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


def test_the_reference_meets_fetches_beside_the_pool():
    """Two fetches share DRAM with the pool, one outlasts it, and the sums wait for that one."""
    jobs = [Job(idle=2, wake=0, n_bytes=30, cap=5, n_sums=4, setup=0, fetches=(12, 28),
                fetch_setup=1)]  # fmt: skip
    scene = Scene(h2d=4, dram=6, plans=[(0, [8, 8, 8], 1)], jobs=jobs)
    # Swap 0: 1 + 2: 3; the pool reads from 2 on: 5 while nobody else moves, else 3. The swap has 4
    # left at 2, at 3 a ns: 3.33, 4. The pool has 6 by 4. Fetch 0 is set up to 5 (11 by then), moves
    # 12 at 3: 9 (23). Fetch 1 set up to 10 (28); the pool has 2 left at 3: 11; the fetch 3 by then,
    # 25 at 4: 17.25, 18. The sums, 1: 19. Swaps 1 and 2: 3 each: 22, 25.
    expected = {
        ("swap", (0, 0)): 4,
        ("fetch", ("of job", 0, 0)): 9,
        ("cpu", 0): 11,
        ("fetch", ("of job", 0, 1)): 18,
        ("critical", 0): 19,
        ("swap", (0, 1)): 22,
        ("swap", (0, 2)): 25,
    }
    assert Naive(scene).run() == expected
    assert drive(scene, expected, together=True)[0] == expected

"""What only an oracle can do, what it refuses to do, and that nobody does better."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import small_traces
import toys
from driving import LayerStep, Run, ids, moves, on_time, reactive
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.future_uses import future_of
from kairox_sim.policies import POLICIES, Belady, BeladyBypass, Known, build_policy
from kairox_sim.policies.future import NEVER, Future
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
from kairox_sim.trace import Trace, read_trace, seal

MUST = [name for name, policy in POLICIES.items() if policy.admits == "must"]
ORACLES = ["belady", "belady_bypass"]


# -- nobody does better ---------------------------------------------------------------------------

N = 10
sets_of_ids = st.lists(st.sets(st.integers(0, N - 1), max_size=5), min_size=1, max_size=24)


def counted(name: str, sets: list[list[int]], slots: int) -> tuple[int, int]:
    """(misses, neurons loaded in a step that did not use them), every copy landed by the next."""
    run = Run(N, [slots], [[LayerStep(s, s)] for s in sets], "after", "active")
    cache = run.cache(name)
    misses = ahead = 0
    for seen in sets:
        cache.commit(list(cache.in_flight))
        misses += cache.lookup(0, seen).residual.size
        promoted = [i for swap in cache.plan(0, seen) for i in swap.promote.tolist()]
        ahead += len(set(promoted) - set(seen))
    cache.check()
    return misses, ahead


def assert_ordered(sets: list[list[int]], slots: int) -> dict[str, int]:
    runs = {name: counted(name, sets, slots) for name in POLICIES}
    must, bypass = (runs[name][0] for name in ORACLES)
    fits = all(len(set(s)) <= slots for s in sets)
    for name, (misses, ahead) in runs.items():
        # A load of what was not seen can save a miss that no cache of what was seen can save.
        assert bypass <= misses + ahead, name
        if name in MUST:
            assert ahead == 0, name
            assert not fits or must <= misses, name
    return {name: misses for name, (misses, _) in runs.items()}


@settings(max_examples=60, deadline=None)
@given(sets_of_ids, st.integers(1, N))
def test_no_policy_misses_less_than_an_oracle(sets, slots: int) -> None:
    assert_ordered([sorted(s) for s in sets], slots)


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_c1_the_oracle_is_the_best_curve(slots: int) -> None:
    rng = np.random.default_rng(0)
    misses = assert_ordered([[i] for i in rng.integers(0, N, 300).tolist()], slots)
    online = min(misses["lru"], misses["lfu"])
    assert misses["belady_bypass"] < online
    assert (misses["belady"] < online) == (slots > 1)  # one slot leaves it no choice


def least_misses(sets: list[frozenset[int]], slots: int, *, must: bool) -> int:
    """By trying everything that may be kept after each step, from nothing resident."""
    everything = frozenset().union(*sets)
    kept = {
        base: [
            frozenset(c) for k in range(min(slots, len(base)) + 1) for c in combinations(base, k)
        ]
        for size in range(len(everything) + 1)
        for base in map(frozenset, combinations(sorted(everything), size))
    }

    @cache
    def least(at: int, here: frozenset[int]) -> int:
        if at == len(sets):
            return 0
        seen = sets[at]
        return len(seen - here) + min(
            least(at + 1, keep) for keep in kept[here | seen] if not must or seen <= keep
        )

    return least(0, frozenset())


tiny = st.lists(st.frozensets(st.integers(0, 4), max_size=4), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(tiny, st.integers(1, 4))
def test_bypass_is_the_best_of_all_subsets(sets, slots: int) -> None:
    got = reactive("belady_bypass", [sorted(s) for s in sets], 5, slots)
    assert got.residuals == least_misses(sets, slots, must=False)


@settings(max_examples=150, deadline=None)
@given(tiny, st.integers(1, 4))
def test_must_admit_is_the_best_of_all_evictions(sets, slots: int) -> None:
    sets = [frozenset(sorted(s)[:slots]) for s in sets]  # so that every step's set fits
    got = reactive("belady", [sorted(s) for s in sets], 5, slots)
    assert got.residuals == least_misses(sets, slots, must=True)


def test_c2_with_and_without_having_to_admit() -> None:
    """One slot, A B A C A D: to admit costs every hit there is."""
    stream = [[0], [1], [0], [2], [0], [3]]
    must, bypass = (reactive(name, stream, 4, 1) for name in ORACLES)
    assert (must.residuals, bypass.residuals) == (6, 4)
    assert on_time(bypass) == [[], [], [0], [], [0], []]
    assert moves(bypass) == [([0], [])] + [([], [])] * 5
    assert moves(must)[:3] == [([0], []), ([1], [0]), ([0], [1])]


@pytest.mark.parametrize(("slots", "lru", "best"), [(5, 0, 45), (6, 54, 54), (7, 54, 54)])
def test_c7_around_one_cycle_of_a_scan(slots: int, lru: int, best: int) -> None:
    """Ten scans of six ids: LRU has nothing one slot below the cycle, and an oracle 5 of 6."""
    scan = [[i % 6] for i in range(60)]
    hits = {name: reactive(name, scan, 7, slots).hits for name in ("lru", *ORACLES)}
    assert hits["lru"] == lru
    assert hits["belady_bypass"] == best
    # It gives up a slot to every miss, so that it misses once in five steps, not once in six.
    assert hits["belady"] == (44 if slots == 5 else best)


@pytest.mark.parametrize("repeats", [1, 2])
def test_c9_no_headroom_is_said_and_not_ranked(repeats: int) -> None:
    """Three slots and eight wanted in every step: nothing that must admit tells itself apart."""
    chunks = [[[range(8 * (i % repeats), 8 * (i % repeats) + 8)]] for i in range(20)]
    trace = toys.of_chunks(chunks, 16)
    hits = set()
    for name in MUST:
        run = simulate(trace, Settings(policy=name, slots=3, model_as="tiny-reglu"))
        hits.add(run.summary["hit_on_time"])
        assert any("no policy headroom" in text for text in run.warnings), name
    assert len(hits) == 1
    enough = simulate(trace, Settings(policy="lru", slots=16, model_as="tiny-reglu"))
    assert not any("headroom" in text for text in enough.warnings)


# -- what it knows --------------------------------------------------------------------------------


def test_victims_by_hand() -> None:
    """Two slots. After {0, 1} come {2}, {1}, {0}: 2 takes the place of 0, which is used last."""
    sets = [[0, 1], [2], [1], [0]]
    assert moves(reactive("belady", sets, 3, 2)) == [
        ([1, 0], []), ([2], [0]), ([], []), ([0], [1]),
    ]  # fmt: skip
    assert moves(reactive("belady_bypass", sets, 3, 2)) == [([1, 0], [])] + [([], [])] * 3


def test_ties_go_to_the_lowest_index() -> None:
    sets = [[0, 1, 2], [3], [4], [0, 1, 2, 3, 4]]
    assert moves(reactive("belady", sets, 5, 3))[1:3] == [([3], [0]), ([4], [1])]
    # More of one next use than fits; later ones of the same next use move nothing.
    assert moves(reactive("belady_bypass", sets, 5, 2)) == [([0, 1], [])] + [([], [])] * 3


def test_bypass_gives_up_what_was_seen_now_for_what_comes_sooner() -> None:
    """One slot: 0 is resident and used now, then 1 twice before 0 comes again."""
    sets = [[0], [0, 1], [1], [1], [0]]
    shadow = reactive("belady_bypass", sets, 2, 1)
    assert moves(shadow)[:2] == [([0], []), ([1], [0])]
    assert shadow.residuals == 3


@settings(max_examples=60, deadline=None)
@given(sets_of_ids, st.integers(1, N))
def test_bypass_loads_nothing_that_is_not_used_again(sets, slots: int) -> None:
    shadow = reactive("belady_bypass", [sorted(s) for s in sets], N, slots)
    for at, (promoted, _) in enumerate(moves(shadow)):
        assert set(promoted) <= set().union(*sets[at + 1 :])


@pytest.mark.parametrize("name", ORACLES)
def test_ahead_of_a_layer_step_the_next_use_is_the_one_to_come(name: str) -> None:
    """Planned before its lookup, step 1 still counts as the next use of what it will use."""
    steps = [[LayerStep(s, s)] for s in ([0, 1], [2, 1], [0], [1])]
    run = Run(3, [2], steps, "serial", "active")
    policy = run.policy(name)
    policy.observe(0, ids(0, 1), None)
    state = np.array([2, 2, 0], np.uint8)
    promote, evict = policy.plan(0, ids(2), state, 0, 16, Knobs())
    assert (promote.tolist(), evict.tolist()) == ([2], [0])  # and not 1, which comes at once


def test_the_limit_takes_the_nearest_first() -> None:
    sets = [[0, 1, 2], [2], [1], [0]]
    run = Run(3, [3], [[LayerStep(s, s)] for s in sets], "after", "active")
    for name in ORACLES:
        policy = run.policy(name)
        policy.observe(0, ids(0, 1, 2), None)
        promote, evict = policy.plan(0, ids(0, 1, 2), np.zeros(3, np.uint8), 3, 2, Knobs())
        assert (promote.tolist(), evict.tolist()) == ([2, 1], [])


def test_the_future_is_the_active_sets_a_chunk_at_once() -> None:
    chunks = [[[[0], [0, 3]], [[1], [2]]], [[[3]], [[1]]], [[[]], [[2]]]]
    trace = toys.of_chunks(chunks, 4, n_layers=2, n_prefill=1)
    future = future_of(trace)
    assert [s.tolist() for s in future.seen[0]] == [[0, 3], [3], []]
    assert [a.tolist() for a in future.after[0]] == [[NEVER, 1], [NEVER], []]
    assert future.first.tolist() == [[0, NEVER, NEVER, 0], [NEVER, 0, 0, NEVER]]
    for members in (np.array([[0, 1], [3, 2]]), np.array([[[0, 1], [3, 2]]] * 2)):
        groups = future_of(trace, members.astype(np.int32))
        assert [[s.tolist() for s in of] for of in groups.seen] == [
            [[0, 1], [1], []], [[0, 1], [0], [1]],
        ]  # fmt: skip
        assert groups.first.tolist() == [[0, 0], [0, 0]]


def test_the_evaluated_sets_have_a_future_of_their_own() -> None:
    made = small_traces.recording([(0, 1)] * 6, np.random.default_rng(0), evaluated=True)
    trace = of_recording(made, complete=False, gating="predicted")
    future = future_of(trace, observes="evaluated")
    assert future.seen[1][2].tolist() == trace.at(2).evaluated(1).tolist()
    assert future.seen[1][2].size > trace.at(2).active(1).size


def of_recording(made, **changes) -> Trace:
    steps = made.layer_steps
    return Trace.from_arrays(
        small_traces.header(**changes),
        seq=[s.seq for s in steps],
        step=[s.step for s in steps],
        token=[s.tokens[0] for s in steps],
        layer=[s.layer for s in steps],
        phase=np.ones(len(steps)),
        bits=np.concatenate([s.active for s in steps]),
        evaluated_bits=np.concatenate([s.evaluated for s in steps]),
    )


# -- what it refuses ------------------------------------------------------------------------------


def test_c1_a_trace_that_was_cut_has_no_future(tmp_path) -> None:
    made = small_traces.recording([(0, 1)] * 12, np.random.default_rng(0))
    path = small_traces.write(tmp_path / "a.arrow", made)
    whole = read_trace(path)
    assert len(future_of(whole).seen[0]) == 12  # a stream with its end mark is whole
    path.write_bytes(path.read_bytes()[:-700])
    cut = read_trace(path)
    assert 0 < cut.n_steps < 12
    seal(path)
    for trace in (cut, read_trace(path), cut.select(steps=[0, 3])):
        with pytest.raises(KairoxError, match=rf"was cut at token {cut.n_tokens}.*whole trace"):
            future_of(trace)


def test_c1_a_recording_that_misses_neurons_has_no_future() -> None:
    trace = toys.random_trace(complete=False, gating="predicted")
    with pytest.raises(KairoxError, match=r"complete = false \(gating 'predicted'\)"):
        future_of(trace)


@pytest.mark.parametrize("name", ORACLES)
def test_c1_no_oracle_without_a_future(name: str) -> None:
    with pytest.raises(KairoxError, match="the whole recorded trace"):
        build_policy(name, 1, 4, Known())


@pytest.mark.parametrize("oracle", [Belady, BeladyBypass])
@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (ids(1, 2), "step 1 it uses 2 neurons and the future says 1 neurons"),
        (ids(2), "step 1 it uses 1 neurons and the future says 1 neurons, others"),
    ],
)
def test_c1_another_run_than_the_future_is_refused(oracle, seen, says: str) -> None:
    policy = oracle(1, 4, future=Future.of([[ids(0), ids(1)]], 4))
    policy.observe(0, ids(0), None)
    with pytest.raises(KairoxError, match=f"not the trace the future was read from.*{says}"):
        policy.observe(0, seen, None)
    policy.observe(0, ids(1), None)
    with pytest.raises(KairoxError, match="the future says nothing more"):
        policy.observe(0, ids(), None)
    with pytest.raises(KairoxError, match=r"1 layers x 4 neurons .* 2 x 4"):
        oracle(2, 4, future=Future.of([[ids(0)]], 4))

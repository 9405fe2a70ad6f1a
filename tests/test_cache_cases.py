"""Inputs that broke other caches, and traces small enough to work out by hand."""

import numpy as np
import pytest
from driving import LayerStep, Run, Shadow, drive, moves, on_time, reactive, skewed_sets

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.events import Planned
from kairox_sim.policies import POLICIES, Lfu, Lru, Tam

MUST = [name for name, policy in POLICIES.items() if policy.admits == "must"]
NOT_MUST = [name for name in POLICIES if name not in MUST]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("slots", [0, 1, 2])
def test_c4_tiny_budgets(name: str, slots: int) -> None:
    shadow = reactive(name, skewed_sets(10, 60, 7), 10, slots, threshold_scale=0.2)
    assert shadow.evaluated > 0
    assert shadow.hits <= slots * 60
    if slots == 0:
        assert shadow.residuals == shadow.evaluated
        assert shadow.issued == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("trigger", ["serial", "instant", "after"])
def test_c6_nothing_seen_now_is_a_victim(name: str, more: int, trigger) -> None:
    """Four old favourites, then four newcomers whose scores start low, at budgets 3, 4, 5."""
    steps = [[LayerStep(s, s, s)] for s in [[0, 1, 2, 3]] * 8 + [[4, 5, 6, 7]] * 2]
    run = Run(8, [4 + more], steps, trigger, "predicted", threshold_scale=0.2)
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    shadow.agree()
    if name in MUST:
        new = [set(come) for come, _ in moves(shadow)[8:]]
        # As many newcomers as fit, once: none of them made room for another.
        assert len(new[0]) == min(4, 4 + more)
        assert new[1] == set()


@pytest.mark.parametrize("name", POLICIES)
def test_c8_ids_that_repeat_count_once(name: str) -> None:
    plain, untidy = ([[5, 7]] * 6 + [[1]] * 6, [[5, 5, 5, 7]] * 3 + [[7, 5]] * 3 + [[1, 1]] * 6)
    expected = reactive(name, plain, 8, 2, threshold_scale=0.2)
    got = reactive(name, untidy, 8, 2, threshold_scale=0.2)
    assert on_time(got) == on_time(expected)
    assert moves(got) == moves(expected)
    assert got.evaluated == 18


def test_c8_a_chunk_of_three_tokens_is_one_layer_step() -> None:
    """Tokens fire {1, 2}, {2, 3}, {2}: union {1, 2, 3}, shares 1/3, 1, 1/3."""
    share = np.array([1 / 3, 1, 1 / 3], np.float32)
    lfu = Lfu(1, 8)
    cache = NeuronCache(1, 8, 2, lfu, Fixed(), trigger="after")
    assert cache.lookup(0, [1, 2, 3], [1, 2, 3], share).residual.tolist() == [1, 2, 3]
    (swap,) = cache.plan(0, [1, 2, 3], share)
    assert swap.promote.tolist() == [1, 2]
    assert cache.take_counts().evaluated == 3
    assert lfu.uses[0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("slots", [12, 13, 120])
def test_c10_a_budget_for_everything(slots: int) -> None:
    sets = skewed_sets(12, 80, 8)
    touched = len({i for s in sets for i in s})
    results = {name: reactive(name, sets, 12, slots) for name in POLICIES}
    for name in MUST:
        if name == "window":  # gives up what left the window, with slots to spare
            assert results[name].residuals >= touched
            continue
        assert results[name].residuals == touched
        assert results[name].evictions == 0
        assert on_time(results[name]) == on_time(results[MUST[0]])
    for name in NOT_MUST:
        assert results[name].residuals >= touched
    assert len(MUST) >= 2


@pytest.mark.parametrize("name", NOT_MUST)
def test_c10_filters_start_with_what_is_pinned(name: str) -> None:
    sets = skewed_sets(12, 80, 8)
    touched = len({i for s in sets for i in s})
    shadow = reactive(name, sets, 12, 12, pinned=[[0, 1, 2]])
    assert shadow.residuals >= touched - 3
    assert shadow.hits > 0


def test_c10_tam_evicts_only_what_went_cold() -> None:
    sets = [[0, 1, 2]] * 6 + [[3, 4]] * 40
    tam = Tam(1, 12)
    cache = NeuronCache(1, 12, 12, tam, Fixed(), trigger="after", observes="active")
    evicted = []
    for ids in sets:
        cache.lookup(0, ids)
        was = cache.state[0] == 2
        swaps = cache.plan(0, ids)
        gone = np.flatnonzero(was & (cache.state[0] == 0))
        assert (tam.momentum[0, gone] < 0.08).all()
        evicted += gone.tolist()
        cache.commit([swap.id for swap in swaps])
    assert evicted == [0, 1, 2]


def test_c7_lru_just_below_one_cycle() -> None:
    cycle = [[i % 6] for i in range(60)]
    hits = [reactive("lru", cycle, 6, slots).hits for slots in (5, 6, 7)]
    assert hits == [0, 54, 54]


def test_c12_twenty_accesses_by_hand() -> None:
    """LRU, 6 neurons, 3 slots, planned just before each lookup with the true set.

    step  raw access  before   evicted  loads  lands      on time  residual
    1     0 1 1       -        -        0 1    at once    0 1      -
    2     1 2         0 1      -        2      at once    1 2      -
    3     0 3 3       0 1 2    1        3      at once    0 3      -
    4     1           0 2 3    2        1      in step 5  -        1 (late)
    5     1 4 4       0 3      0        4      at once    1 4      -
    6     5 3         1 3 4    1        5      at once    3 5      -
    7     0 2         3 4 5    4 3      0 2    in step 8  -        0 2 (late)
    8     4 5 5 5     5        -        -                 5        4 (no room: bypassed)
    """
    raw = [[0, 1, 1], [1, 2], [0, 3, 3], [1], [1, 4, 4], [5, 3], [0, 2], [4, 5, 5, 5]]
    assert sum(map(len, raw)) == 20
    cache = NeuronCache(1, 6, 3, Lru(1, 6), Fixed(), trigger="serial", observes="predicted")
    hit_resident, hit_on_time, residual, late, unique, evicted, loads = [], [], [], [], [], [], []
    for step, ids in enumerate(raw, start=1):
        cache.plan(0, ids)
        cache.commit([] if step in (4, 7) else list(cache.in_flight))
        cache.lookup(0, ids, ids)
        cache.check()
        counts = cache.take_counts()
        unique.append(counts.evaluated)
        hit_resident.append(counts.hit_resident)
        hit_on_time.append(counts.hit_on_time)
        residual.append(counts.residual)
        late.append(counts.late)
        evicted.append(counts.evictions)
        loads.append(counts.loads)
        assert counts.active == counts.predicted == counts.predicted_active == counts.evaluated
    assert unique == [2, 2, 2, 1, 2, 2, 2, 2]
    assert hit_resident == [0, 1, 1, 0, 0, 1, 0, 1]
    assert hit_on_time == [2, 2, 2, 0, 2, 2, 0, 1]
    assert residual == [0, 0, 0, 1, 0, 0, 2, 1]
    assert late == [0, 0, 0, 1, 0, 0, 2, 0]
    assert evicted == [0, 0, 1, 1, 1, 1, 2, 0]
    assert loads == [2, 1, 1, 1, 1, 1, 2, 0]
    # Of unique accesses: 4/15 resident before, 11/15 on time; without the first four steps' 7
    # accesses, 2/8 and 5/8. All ratios are of unique accesses: 20 raw ones are 15.
    assert sum(hit_resident) / sum(unique) == 4 / 15
    assert sum(hit_on_time) / sum(unique) == 11 / 15
    assert sum(hit_resident[4:]) / sum(unique[4:]) == 2 / 8
    assert sum(hit_on_time[4:]) / sum(unique[4:]) == 5 / 8
    # 9 loads = 7 used (1 twice) + 0 wasted + 0 cancelled + 2 unused yet (0 and 2).
    assert cache.totals == {"loads": 9, "used": 7, "wasted": 0, "cancelled": 0}
    assert cache.unused_yet == 2


def test_c37_used_wasted_late_cancelled_on_a_toy_of_two_layers() -> None:
    """LRU, look-ahead: layer 1 is planned before layer 0's lookup, layer 0 after the last FFN."""
    cache = NeuronCache(2, 6, [1, 2], Lru(2, 6), Fixed(), trigger="attn_out", observes="predicted")
    cache.plan(1, [1, 2])  # swap 0
    cache.commit([0])
    cache.lookup(0, [0], [0])  # nothing was predicted for the first step's layer 0
    cache.commit([])
    assert cache.lookup(1, [1], [1]).on_time.tolist() == [1]
    cache.plan(0, [0])  # swap 1, for the next step, counted in this one
    first = cache.take_counts()
    cache.plan(1, [1, 3])  # swap 2; evicts 2, never used
    cache.commit([1])
    assert cache.lookup(0, [0], [0]).hit_resident == 0  # it came because of its own plan
    cache.commit([])
    assert cache.lookup(1, [1, 3], [1, 3]).late.tolist() == [3]
    cache.plan(0, [5])  # swap 3; evicts 0
    second = cache.take_counts()
    cache.cancel(3)
    last = cache.take_counts()
    cache.check()

    assert (first.evaluated, first.hit_on_time, first.residual, first.late) == (2, 1, 1, 0)
    assert (first.loads, first.loads_used_first, first.wasted, first.evictions) == (3, 1, 0, 0)
    assert (first.predicted, first.predicted_active) == (2, 1)
    assert (second.evaluated, second.hit_on_time, second.residual, second.late) == (3, 2, 1, 1)
    assert (second.loads, second.loads_used_first, second.wasted, second.evictions) == (2, 1, 1, 2)
    assert (second.predicted, second.predicted_active) == (3, 3)
    assert (last.cancelled, last.evaluated) == (1, 0)
    # 5 = 2 used (1 and 0) + 1 wasted (2) + 1 cancelled (5) + 1 in flight (3)
    assert cache.totals == {"loads": 5, "used": 2, "wasted": 1, "cancelled": 1}
    assert cache.unused_yet == 1
    # Everything that was issued: swaps 0 and 1 landed, 3 was cancelled, 2 is in flight.
    assert list(cache.in_flight) == [2]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("trigger", ["attn_out", "serial", "after", "instant"])
def test_c15_nothing_active_and_everything_active(name: str, trigger) -> None:
    none, every = LayerStep([], [], []), LayerStep(list(range(6)), list(range(6)), list(range(6)))
    empty_chunk = LayerStep([], [], [], shares=True)
    # Layer 1 is never active; steps 0 and 3 are wholly empty.
    steps = [[none, none], *[[every, none]] * 5, [none, none], [empty_chunk, none], [every, none]]
    run = Run(6, [4, 4], steps, trigger, "predicted", threshold_scale=0.2)
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, None)
    records = drive(cache, run)
    shadow.agree()
    assert [record.evaluated for record in records] == [0, 6, 6, 6, 6, 6, 0, 0, 6]
    assert not any(e.swaps for e in shadow.events if isinstance(e, Planned) and e.layer == 1)
    assert all(
        swap.promote.size for e in shadow.events if isinstance(e, Planned) for swap in e.swaps
    )
    for record in (records[0], records[6], records[7]):
        assert record.hit_on_time == record.residual == record.hit_resident == record.late == 0

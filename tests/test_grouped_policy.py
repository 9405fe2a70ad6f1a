"""Policies over groups, and swaps in the order of host memory: adapters that decide nothing."""

from typing import get_args

import numpy as np
import pytest
from driving import LayerStep, Run, Shadow, drive, ids, moves, on_time, reactive, skewed_sets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Planned
from kairox_sim.groups import group_neurons
from kairox_sim.policies import POLICIES, Lfu, Lru, Static, Tam
from kairox_sim.policies.base import Observes, Policy, Trigger
from kairox_sim.policies.grouped import Grouped, group_of
from kairox_sim.policies.linked import Linked

PLAIN = [name for name, policy in POLICIES.items() if not policy.needs]


def members(n_layers: int, n_neurons: int, size: int, seed: int = 0) -> np.ndarray:
    return group_neurons(None, n_layers, n_neurons, size, "random", seed).members


def grouped(name: str, n_layers: int, n_neurons: int, size: int) -> Grouped:
    build = POLICIES[name]
    inner: Policy = build(n_layers, n_neurons // size)  # type: ignore[call-arg]
    return Grouped(inner, members(n_layers, n_neurons, size))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, int]:
    """(a run whose swaps are whole groups, the group size); budgets need not be."""
    size = draw(st.integers(1, 3))
    n_neurons = size * draw(st.integers(1, 5))
    n_layers = draw(st.integers(1, 2))
    some = st.lists(st.integers(0, n_neurons - 1), max_size=n_neurons)
    patterns = draw(st.lists(some, min_size=1, max_size=4))
    pick = st.integers(0, len(patterns) - 1)

    def layer_step(shares: bool) -> LayerStep:
        evaluated, predicted = patterns[draw(pick)], patterns[draw(pick)]
        if shares:
            evaluated, predicted = sorted(set(evaluated)), sorted(set(predicted))
        return LayerStep(evaluated, predicted, None, shares)

    steps = []
    for _ in range(draw(st.integers(1, 7))):
        shares = draw(st.integers(0, 3)) == 0
        steps.append([layer_step(shares) for _ in range(n_layers)])
    budget = st.integers(0, n_neurons + size)
    run = Run(
        n_neurons,
        draw(st.lists(budget, min_size=n_layers, max_size=n_layers)),
        steps,
        draw(st.sampled_from(get_args(Trigger))),
        draw(st.sampled_from(get_args(Observes))),
        draw(st.lists(st.integers(0, 23), min_size=1, max_size=8)),
        swap_neurons=size * draw(st.integers(1, 2)),
        max_swaps=draw(st.sampled_from([None, None, 0, 1, 2])),
    )
    return run, size


@pytest.mark.parametrize("name", PLAIN)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn=runs())
def test_groups_stay_whole_whatever_happens(name: str, drawn: tuple[Run, int]) -> None:
    run, size = drawn
    policy = grouped(name, run.n_layers, run.n_neurons, size)
    cache = run.cache(policy)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    shadow.agree()
    for event in shadow.events:
        if isinstance(event, Planned):
            for swap in event.swaps:
                assert swap.promote.size % size == 0
            moved = [event.evicted, *(swap.promote for swap in event.swaps)]
            for neurons in moved:
                owners = policy.touched(event.layer, neurons)
                assert set(neurons.tolist()) == set(policy.members[event.layer][owners].flat)
    for layer in range(run.n_layers):
        here = cache.state[layer][policy.members[layer]] > 0
        assert (here.all(axis=1) == here.any(axis=1)).all()


@pytest.mark.parametrize("name", ["lru", "lfu", "tam", "tam_released"])
def test_groups_of_one_change_nothing(name: str) -> None:
    sets = skewed_sets(30, 200, 4)
    plain = reactive(name, sets, 30, 8, swap_neurons=2)
    run = Run(30, [8], [[LayerStep(s, s)] for s in sets], "after", "active", swap_neurons=2)
    each = np.arange(30, dtype=np.int32).reshape(1, 30, 1)
    cache = run.cache(Grouped(POLICIES[name](1, 30), each))  # type: ignore[call-arg]
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    assert moves(shadow) == moves(plain)
    assert on_time(shadow) == on_time(plain)
    assert plain.evictions


@pytest.mark.parametrize("name", ["lru", "lfu"])
@pytest.mark.parametrize("slots", [12, 14])
def test_groups_do_what_the_inner_policy_does_over_groups(name: str, slots: int) -> None:
    """14 slots are four groups of three, like 12: the rest stays unused."""
    sets = skewed_sets(30, 300, 5)
    policy = grouped(name, 1, 30, 3)
    run = Run(30, [slots], [[LayerStep(s, s)] for s in sets], "after", "active", swap_neurons=3)
    cache = run.cache(policy)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    touched = [policy.touched(0, np.unique(s).astype(np.int32)).tolist() for s in sets]
    over_groups = reactive(name, touched, 10, 4, swap_neurons=1)
    wide = [
        [[n for g in groups for n in policy.members[0][g].tolist()] for groups in move]
        for move in moves(over_groups)
    ]
    assert [list(m) for m in moves(shadow)] == wide
    assert over_groups.evictions
    assert int((cache.state[0] > 0).sum()) == 12


class Told:
    """An inner policy that remembers what it is told and plans what it is given."""

    knobs = frozenset({"max_swaps"})
    admits = "filter"
    fills = "prior"
    needs: frozenset[str] = frozenset()
    evicts_seen = True
    default_trigger = "serial"
    default_observes = "predicted"
    default_late = "stall"

    def __init__(self, promote=(), evict=()):
        self.answer = ids(*promote), ids(*evict)

    def observe(self, layer, seen, share):
        self.observed = layer, seen.tolist(), share.tolist()
        assert seen.dtype == np.int32
        assert share.dtype == np.float32

    def plan(self, layer, seen, state, free_slots, limit, knobs):
        self.planned = layer, seen.tolist(), state.tolist(), free_slots, limit
        assert not state.flags.writeable
        return self.answer


PAIRS = np.array([[[0, 5], [1, 4], [2, 3]]], np.int32)


def test_shares_of_groups() -> None:
    inner = Told()
    policy = Grouped(inner, PAIRS)
    policy.observe(0, ids(0, 4, 5), None)
    assert inner.observed == (0, [0, 1], [1.0, 0.5])
    share = np.array([0.25, 1.0, 0.5], np.float32)  # of a prefill chunk
    policy.observe(0, ids(0, 2, 5), share)
    assert inner.observed == (0, [0, 2], [0.375, 0.5])
    policy.observe(0, ids(), None)
    assert inner.observed == (0, [], [])


def test_what_the_inner_policy_is_asked_and_answers() -> None:
    inner = Told(promote=(2, 0), evict=(1,))
    policy = Grouped(inner, PAIRS)
    state = np.array([0, 2, 0, 0, 2, 0], np.uint8)
    promote, evict = policy.plan(0, ids(1, 2, 3), state, 3, 2**31 - 1, Knobs())
    assert inner.planned == (0, [1, 2], [0, 2, 0], 1, 2**30 - 1)
    assert promote.tolist() == [2, 3, 0, 5]  # group by group, in the inner's order
    assert evict.tolist() == [1, 4]
    assert promote.dtype == evict.dtype == np.int32
    # Arriving if any is, its others landed; pinned if all are.
    policy.plan(0, ids(), np.array([2, 3, 0, 0, 3, 1], np.uint8), 1, 0, Knobs())
    assert inner.planned == (0, [], [1, 3, 0], 0, 0)


@pytest.mark.parametrize("members_are", [(0, 2), (0, 1), (2, 3), (1, 3)])
def test_a_split_group_is_refused(members_are: tuple[int, int]) -> None:
    state = np.zeros(6, np.uint8)
    state[[1, 4]] = members_are
    with pytest.raises(KairoxError, match="group 1 is split"):
        Grouped(Told(), PAIRS).plan(0, ids(), state, 0, 0, Knobs())


def test_a_warm_start_that_splits_groups_is_refused() -> None:
    cache = NeuronCache(1, 6, 4, Grouped(Lru(1, 3), PAIRS), Fixed(), warm=[[0, 1]], swap_neurons=2)
    with pytest.raises(KairoxError, match="give whole groups as warm"):
        cache.plan(0, [2])


@pytest.mark.parametrize("adapt", [lambda p: Grouped(p, PAIRS), lambda p: Linked(p, PAIRS)])
def test_an_adapter_passes_for_the_policy_inside(adapt) -> None:
    for inner in (Told(), Lru(1, 3), Static(1, 3)):
        for name in Policy.__annotations__:
            assert getattr(adapt(inner), name) == getattr(inner, name)
    assert adapt(adapt(Lfu(1, 3))).cost_class == "lfu"
    assert not hasattr(Lfu(1, 3), "cost_class")


def test_groups_that_are_no_partition_are_refused() -> None:
    assert group_of(PAIRS).tolist() == [[0, 1, 2, 2, 1, 0]]
    with pytest.raises(KairoxError, match="each of 6 neurons"):
        Grouped(Lru(1, 3), np.array([[[0, 5], [1, 4], [2, 5]]], np.int32))


def test_most_groups_are_seen_and_what_may_not_evict_them_freezes() -> None:
    """25 % of neurons active at random: nearly every group of 16 is seen, so there is no victim."""
    rng = np.random.default_rng(0)
    policy = Grouped(Lru(1, 16), group_neurons(None, 1, 256, 16, "chunks").members)
    warm = [policy.members[0][:8].ravel()]
    cache = NeuronCache(1, 256, 128, policy, Fixed(), warm=warm, swap_neurons=16)
    for _ in range(50):
        active = np.flatnonzero(rng.random(256) < 0.25)
        cache.lookup(0, active)
        cache.plan(0, active)
        cache.commit(list(cache.in_flight))
    counts = cache.take_counts()
    assert counts.loads < 0.05 * counts.residual
    assert 0.4 < counts.hit_on_time / counts.evaluated < 0.6  # eight groups of sixteen


# -- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lru", "lfu", "tam"])
def test_linked_swaps_are_stretches_of_memory_and_decide_the_same(name: str) -> None:
    sets = skewed_sets(30, 200, 6)
    position = np.random.default_rng(1).permutation(30).astype(np.int32)[None]
    steps = [[LayerStep(s, s)] for s in sets]
    run = Run(30, [8], steps, "after", "active", swap_neurons=3)
    shadows = []
    for policy in (POLICIES[name](1, 30), Linked(POLICIES[name](1, 30), position)):  # type: ignore[call-arg]
        cache = run.cache(policy)
        cache.journal = shadow = Shadow(cache, None)
        drive(cache, run)
        shadow.agree()
        shadows.append(shadow)
    plain, linked = (moves(s) for s in shadows)
    assert [(sorted(c), o) for c, o in plain] == [(sorted(c), o) for c, o in linked]
    assert on_time(shadows[0]) == on_time(shadows[1])
    for come, _ in linked:
        assert (np.diff(position[0][np.array(come, int)]) > 0).all()
    assert plain != linked


def test_links_and_groups() -> None:
    """Link the groups, then expand them: swaps keep whole groups, in the order of memory."""
    places = np.array([[2, 0, 1]], np.int32)
    policy = Grouped(Linked(Tam(1, 3, theta_promote=0.1), places), PAIRS)
    cache = NeuronCache(1, 6, 6, policy, Fixed(), swap_neurons=2)
    swaps = cache.plan(0, [0, 1, 2, 3, 4, 5])
    assert [swap.promote.tolist() for swap in swaps] == [[1, 4], [2, 3], [0, 5]]

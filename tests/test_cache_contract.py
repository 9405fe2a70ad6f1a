"""What every policy may rely on from the cache, and the cache enforce on every policy.

Policies come from the table: a new one is held to this by existing.
"""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from driving import LayerStep, Run, Shadow, drive
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Controller, Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES, Lru
from kairox_sim.policies.base import NOTHING, Observes, Trigger
from kairox_sim.replay import replay

TRIGGERS = get_args(Trigger)
MOVING = [name for name, policy in POLICIES.items() if policy.admits != "never"]
NOT_MOVING = [name for name in POLICIES if name not in MOVING]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    n_neurons = draw(st.integers(1, 12))
    n_layers = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, n_neurons - 1), max_size=n_neurons + 3)  # repeats, unsorted
    # Few patterns, repeated, so that something stays worth keeping.
    patterns = draw(st.lists(ids, min_size=1, max_size=4))
    pick = st.integers(0, len(patterns) - 1)
    knows_active = draw(st.booleans())

    def layer_step(shares: bool) -> LayerStep:
        evaluated, predicted = patterns[draw(pick)], patterns[draw(pick)]
        if shares:
            evaluated, predicted = sorted(set(evaluated)), sorted(set(predicted))
        active = evaluated[::2] if knows_active else None
        return LayerStep(evaluated, predicted, active, shares)

    steps = []
    for _ in range(draw(st.integers(1, 7))):
        shares = draw(st.integers(0, 3)) == 0
        steps.append([layer_step(shares) for _ in range(n_layers)])
    active = max(len(set(layer.evaluated)) for step in steps for layer in step)
    budgets = [
        0,
        1,
        max(0, active - 1),
        active,
        active + 1,
        n_neurons,
        n_neurons + 1,
        10 * n_neurons,
    ]
    slots = draw(st.lists(st.sampled_from(budgets), min_size=n_layers, max_size=n_layers))
    pinned, warm = [], []
    for budget in slots:
        room = min(budget, n_neurons)
        start = draw(st.lists(st.integers(0, n_neurons - 1), max_size=room, unique=True))
        cut = draw(st.integers(0, len(start)))
        pinned.append(start[:cut])
        warm.append(start[cut:])
    return Run(
        n_neurons,
        slots,
        steps,
        draw(st.sampled_from(TRIGGERS)),
        draw(st.sampled_from(get_args(Observes))),
        draw(st.lists(st.integers(0, 23), min_size=1, max_size=8)),
        pinned if draw(st.booleans()) else None,
        warm if draw(st.booleans()) else None,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([None, None, 0, 1, 2])),
        draw(st.sampled_from([1.0, 0.5, 0.2])),
    )


def limit_of(run: Run) -> int | None:
    return None if run.max_swaps is None else run.max_swaps * run.swap_neurons


class Spied:
    """A policy seen from inside: what it is handed is what the contract says."""

    def __init__(self, policy: object) -> None:
        self.inner = policy
        self.plans = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def observe(self, layer, seen, share):
        assert (np.diff(seen) > 0).all()
        assert seen.dtype == np.int32
        assert share is None or (share.dtype == np.float32 and share.shape == seen.shape)
        self.inner.observe(layer, seen, share)

    def plan(self, layer, seen, state, free_slots, limit, knobs):
        assert not state.flags.writeable
        kept, kept_seen = state.copy(), seen.copy()
        promote, evict = self.inner.plan(layer, seen, state, free_slots, limit, knobs)
        assert (state == kept).all()
        assert (seen == kept_seen).all()
        self.plans += 1
        return promote, evict


@pytest.mark.parametrize("name", POLICIES)
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(run=runs())
def test_any_calls(name: str, run: Run) -> None:
    policy = Spied(POLICIES[name](run.n_layers, run.n_neurons))
    controller: Controller = run.fixed()
    if "threshold_scale" in policy.knobs and run.luck[0] % 2:
        controller = Anb(initial=run.threshold_scale, lowest=0.1)
    cache = run.cache(policy, controller)
    shadow = Shadow(cache, limit_of(run) if isinstance(controller, Fixed) else None)
    cache.journal = shadow
    records = drive(cache, run)
    shadow.agree()
    for name_, total in (
        ("evaluated", shadow.evaluated),
        ("hit_on_time", shadow.hits),
        ("hit_resident", shadow.hit_resident),
        ("late", shadow.late),
        ("residual", shadow.residuals),
        ("loads", shadow.loads),
        ("loads_used_first", shadow.used),
        ("wasted", shadow.wasted),
        ("cancelled", shadow.given_up),
        ("evictions", shadow.evictions),
    ):
        assert sum(getattr(record, name_) for record in records) == total

    # The same calls give the same swaps.
    fresh = Anb(initial=run.threshold_scale, lowest=0.1) if controller.sets else run.fixed()
    assert replay(shadow.events, run.cache(name, fresh)).differences == []

    for swap_id in list(cache.in_flight):  # the end of a run
        cache.cancel(swap_id)
    shadow.agree()
    assert shadow.issued == shadow.landed + shadow.cancelled


def busy(trigger: Trigger, observes: Observes, **changed: object) -> Run:
    """A run in which everything happens: 60 steps whose sets persist and drift."""
    rng = np.random.default_rng(3)
    steps, weight = [], rng.random((3, 24))
    for _ in range(60):
        weight = 0.8 * weight + 0.2 * rng.random((3, 24))
        step = []
        for layer in range(3):
            top = np.argsort(-weight[layer])[:8].tolist()
            guess = top[:6] + rng.integers(0, 24, 2).tolist()
            step.append(LayerStep(top, guess, top))
        steps.append(step)
    luck = rng.integers(0, 24, 97).tolist()
    run = Run(24, [9, 7, 0], steps, trigger, observes, luck, threshold_scale=0.25)
    return replace(run, **changed)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("observes", get_args(Observes))
@pytest.mark.parametrize("name", MOVING)
def test_it_is_not_vacuous(name: str, trigger: Trigger, observes: Observes) -> None:
    run = busy(trigger, observes, pinned=[[23], [], []], warm=[[0, 1], [2], []])
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    shadow.agree()
    counted = [shadow.issued, shadow.landed, shadow.evictions, shadow.used, shadow.wasted]
    counted += [shadow.hits, shadow.residuals, shadow.hit_resident]
    if trigger != "instant":
        counted += [shadow.cancelled, shadow.late]
    assert min(counted) > 0, counted


@pytest.mark.parametrize("name", NOT_MOVING)
def test_policies_that_never_plan_move_nothing(name: str) -> None:
    run = busy("after", "active", pinned=[[1, 2], [3], []])
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    assert shadow.issued == shadow.evictions == 0
    assert shadow.hits == shadow.hit_resident > 0


@pytest.mark.parametrize("name", MOVING)
def test_max_swaps_0_moves_nothing_in(name: str) -> None:
    run = busy("after", "active", max_swaps=0)
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, 0)
    drive(cache, run)
    assert shadow.issued == shadow.hits == 0
    assert shadow.residuals == shadow.evaluated > 0


# -- before: what was resident ahead of this layer-step -------------------------------------------


def test_before_is_ahead_of_the_plan() -> None:
    cache = NeuronCache(1, 4, 1, Lru(1, 4), Fixed(), warm=[[0]], trigger="serial")
    (swap,) = cache.plan(0, [1])  # evicts 0
    cache.commit([swap.id])
    split = cache.lookup(0, [0, 1])
    assert split.on_time.tolist() == [1]
    assert split.hit_resident == 1  # 0 was; 1 came because of this layer-step's own plan


def test_before_is_ahead_of_the_first_of_two_plans() -> None:
    cache = NeuronCache(1, 4, 2, Lru(1, 4), Fixed(), trigger="serial")
    (swap,) = cache.plan(0, [1])
    cache.commit([swap.id])
    cache.plan(0, [1, 2])
    assert cache.lookup(0, [1]).hit_resident == 0


def test_pinned_neurons_that_are_also_warm_take_one_slot() -> None:
    cache = NeuronCache(1, 4, 2, Lru(1, 4), Fixed(), pinned=[[1]], warm=[[1, 2]])
    cache.check()
    assert cache.state[0].tolist() == [0, 3, 2, 0]


def test_after_before_is_ahead_of_this_polls_commits() -> None:
    cache = NeuronCache(2, 4, 2, Lru(2, 4), Fixed(), trigger="after")
    cache.commit([])
    cache.lookup(0, [1])
    (first,) = cache.plan(0, [1])
    cache.commit([])
    cache.lookup(1, [])
    # Step 2: 1 lands in the poll before this very lookup, so it was not resident before.
    cache.commit([first.id])
    split = cache.lookup(0, [1, 2])
    assert (split.hit_resident, split.on_time.tolist()) == (0, [1])
    (second,) = cache.plan(0, [1, 2])
    # 2 lands in the poll of layer 1: at layer 0's next lookup it has been there for a while.
    cache.commit([second.id])
    cache.lookup(1, [])
    cache.commit([])
    split = cache.lookup(0, [1, 2])
    assert (split.hit_resident, split.on_time.tolist()) == (2, [1, 2])


def test_after_an_evicted_neuron_was_not_resident_before() -> None:
    cache = NeuronCache(1, 4, 1, Lru(1, 4), Fixed(), warm=[[0]], trigger="after")
    cache.lookup(0, [1])
    cache.plan(0, [1])  # evicts 0
    assert cache.lookup(0, [0]).hit_resident == 0


def test_a_plan_after_the_lookup_is_no_prediction() -> None:
    cache = NeuronCache(1, 4, 1, Lru(1, 4), Fixed(), trigger="after")
    for _ in range(2):
        cache.lookup(0, [1], [1])
        cache.plan(0, [1])
    counts = cache.take_counts()
    assert np.isnan([counts.predicted, counts.predicted_active]).all()
    assert (counts.evaluated, counts.active) == (2, 2)


def test_predicted_and_active_are_counted_together() -> None:
    cache = NeuronCache(1, 8, 1, Lru(1, 8), Fixed(), trigger="serial")
    cache.plan(0, [1, 2, 3])
    cache.lookup(0, [2, 3, 4, 5], [3, 4])
    counts = cache.take_counts()
    assert (counts.predicted, counts.predicted_active, counts.active) == (3, 1, 2)
    cache.lookup(0, [6], [6])  # nothing was predicted for this one
    counts = cache.take_counts()
    assert np.isnan([counts.predicted, counts.predicted_active]).all()
    cache.plan(0, [1])
    cache.lookup(0, [1])  # what is active is not known
    counts = cache.take_counts()
    assert counts.predicted == 1
    assert np.isnan([counts.active, counts.predicted_active]).all()


# -- the suite bites: policies that break the contract --------------------------------------------


class Wrong(Lru):
    def __init__(self, promote: object, evict: object) -> None:
        super().__init__(1, 8)
        self.answer = promote, evict

    def plan(self, layer, seen, state, free_slots, limit, knobs):
        return self.answer


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# Layer of 8: pinned 0, resident 1 and 2, arriving 3, one slot free; seen are 2 and 4.
@pytest.mark.parametrize(
    ("promote", "evict", "says"),
    [
        (ids(4, 5), ids(), "promotes 2 neurons; 1 fit"),
        (ids(4, 5, 6), ids(1), "promotes 3 neurons; 2 fit"),
        (ids(4), ids(2), "seen in this very layer-step"),
        (ids(4), ids(0), "evicts neurons twice or not in state 2"),  # pinned
        (ids(4), ids(3), "evicts neurons twice or not in state 2"),  # arriving
        (ids(4), ids(7), "evicts neurons twice or not in state 2"),  # absent
        (ids(4, 5), ids(1, 1), "evicts neurons twice or not in state 2"),
        (ids(4, 4), ids(1), "promotes neurons twice or not in state 0"),
        (ids(3), ids(), "promotes neurons twice or not in state 0"),  # arriving
        (ids(2), ids(), "promotes neurons twice or not in state 0"),  # resident
        (ids(0), ids(), "promotes neurons twice or not in state 0"),  # pinned
        (ids(1), ids(1), "promotes neurons twice or not in state 0"),  # out and in again
        (ids(8), ids(), "not int32 neurons of the layer"),
        (ids(-1), ids(), "not int32 neurons of the layer"),
        (np.array([4.0]), ids(), "not int32 neurons of the layer"),
        (np.array([4]), ids(), "not int32 neurons of the layer"),
    ],
)
def test_a_policy_that_breaks_the_contract_is_refused(promote, evict, says: str) -> None:
    wrong = Wrong(promote, evict)
    cache = NeuronCache(1, 8, 5, wrong, Fixed(), pinned=[[0]], warm=[[1, 2]], trigger="serial")
    wrong.answer = ids(3), ids()
    cache.plan(0, [3])
    wrong.answer = promote, evict
    with pytest.raises(KairoxError, match=says):
        cache.plan(0, [2, 4])
    cache.check()  # and nothing was moved
    assert cache.state[0].tolist() == [3, 2, 2, 1, 0, 0, 0, 0]
    wrong.answer = ids(4), ids(1)
    assert [s.promote.tolist() for s in cache.plan(0, [2, 4])] == [[4]]


def test_a_policy_that_ignores_the_limit_is_refused() -> None:
    cache = NeuronCache(1, 8, 8, Wrong(ids(1, 2, 3), ids()), Fixed(max_swaps=1), swap_neurons=2)
    with pytest.raises(KairoxError, match="promotes 3 neurons; 2 fit"):
        cache.plan(0, [1, 2, 3])


def test_a_policy_cannot_write_to_the_state() -> None:
    class Writes(Lru):
        def plan(self, layer, seen, state, free_slots, limit, knobs):
            state[0] = 2
            return NOTHING, NOTHING

    with pytest.raises(ValueError, match="read-only"):
        NeuronCache(1, 8, 8, Writes(1, 8), Fixed()).plan(0, [1])


def slot_shared(cache: NeuronCache) -> None:
    cache.slot_of[0, 2] = cache.slot_of[0, 1]


def slot_lost(cache: NeuronCache) -> None:
    cache._free[0] = cache._free[0][:-1]


def slot_moved(cache: NeuronCache) -> None:
    cache.slot_of[0, [3, 4]] = cache.slot_of[0, [4, 3]]


def landed_unnoticed(cache: NeuronCache) -> None:
    cache.state[0, 3] = 2


def ghost(cache: NeuronCache) -> None:
    cache.state[0, 7] = 2


def copied_twice(cache: NeuronCache) -> None:
    cache.in_flight[99] = next(iter(cache.in_flight.values()))


def miscounted(cache: NeuronCache) -> None:
    cache.totals["used"] += 1


def used_unnoticed(cache: NeuronCache) -> None:
    cache._unused[0, 1] = False


def absent_and_unused(cache: NeuronCache) -> None:
    cache._unused[0, 7] = True


@pytest.mark.parametrize(
    "damage",
    [
        slot_shared,
        slot_lost,
        slot_moved,
        landed_unnoticed,
        ghost,
        copied_twice,
        miscounted,
        used_unnoticed,
        absent_and_unused,
    ],
)
def test_check_finds_damage(damage) -> None:
    cache = NeuronCache(1, 8, 6, Lru(1, 8), Fixed(), pinned=[[0]], trigger="serial")
    cache.commit([swap.id for swap in cache.plan(0, [1, 2])])
    cache.plan(0, [3, 4])
    cache.check()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()


# -- inputs ---------------------------------------------------------------------------------------


def lru_cache(**changed: object) -> NeuronCache:
    made = {"slots": 2, "policy": Lru(2, 4), "controller": Fixed(), **changed}
    return NeuronCache(2, 4, **made)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"slots": -1}, "slots must be 2 numbers of 0 or more"),
        ({"slots": [1]}, "slots must be 2 numbers of 0 or more"),
        ({"pinned": [[0]]}, "pinned must be one list of ids per layer"),
        ({"warm": [[0], [1], [2]]}, "warm must be one list of ids per layer"),
        ({"pinned": [[0, 1, 2], []]}, "3 pinned and 0 warm neurons do not fit in 2 slots"),
        ({"warm": [[], [0]], "slots": 0}, "layer 1: 0 pinned and 1 warm"),
        ({"warm": [[4], []]}, "neuron ids must be 0 to 3"),
        ({"swap_neurons": 0}, "swap_neurons must be 1 or more"),
    ],
)
def test_a_cache_that_cannot_be(changed, says: str) -> None:
    with pytest.raises(KairoxError, match=says):
        lru_cache(**changed)


@pytest.mark.parametrize(
    ("given_ids", "share", "says"),
    [
        ([4], None, "neuron ids must be 0 to 3, got 4 to 4"),
        ([-1, 2], None, "neuron ids must be 0 to 3, got -1 to 2"),
        ([True, False], None, "must be a list of integers"),  # a mask is not a list of ids
        ([0.5], None, "must be a list of integers"),
        ([[1], [2]], None, "must be a list of integers"),
        ([1, 2], [0.5], "sorted and unique and come with one share each"),
        ([2, 1], [0.5, 1.0], "sorted and unique and come with one share each"),
        ([1, 1], [0.5, 1.0], "sorted and unique and come with one share each"),
        ([1, 2], [0.5, 0.0], "above 0 and at most 1"),
        ([1, 2], [0.5, 1.5], "above 0 and at most 1"),
        ([1, 2], [0.5, np.nan], "above 0 and at most 1"),
    ],
)
def test_ids_and_shares_that_cannot_be(given_ids, share, says: str) -> None:
    cache = lru_cache()
    with pytest.raises(KairoxError, match=says):
        cache.plan(0, given_ids, share)
    with pytest.raises(KairoxError, match=says):
        cache.lookup(0, given_ids, share=share)
    cache.check()


def test_a_share_belongs_to_what_is_observed() -> None:
    cache = NeuronCache(1, 4, 4, Lru(1, 4), Fixed(), observes="active")
    cache.lookup(0, [0, 1, 2], [1, 2], [0.5, 1.0])
    with pytest.raises(KairoxError, match="one share each"):
        cache.lookup(0, [0, 1, 2], [1, 2], [0.5, 1.0, 1.0])


def test_a_swap_lands_or_is_cancelled_once() -> None:
    cache = NeuronCache(1, 4, 4, Lru(1, 4), Fixed())
    (swap,) = cache.plan(0, [1])
    cache.commit([swap.id])
    with pytest.raises(KairoxError, match="swap 0 landed, but is not in flight"):
        cache.commit([swap.id])
    with pytest.raises(KairoxError, match="swap 0 was cancelled, but is not in flight"):
        cache.cancel(swap.id)
    cache.check()


@pytest.mark.parametrize("name", MOVING)
def test_c25_a_neuron_named_twice_is_copied_once(name: str) -> None:
    cache = NeuronCache(1, 8, 8, POLICIES[name](1, 8), Fixed(threshold_scale=0.2), trigger="serial")
    (swap,) = cache.plan(0, [5, 5, 6])
    assert cache.plan(0, [5, 6]) == []  # while it is arriving
    split = cache.lookup(0, [5, 6])
    assert split.late.tolist() == split.residual.tolist() == [5, 6]
    cache.commit([swap.id])
    assert cache.plan(0, [5, 6]) == []  # and once it is there
    assert cache.totals["loads"] == 2
    cache.check()


def test_a_cancelled_neuron_may_come_again() -> None:
    cache = NeuronCache(1, 4, 1, Lru(1, 4), Fixed(), trigger="serial")
    (swap,) = cache.plan(0, [1])
    cache.cancel(swap.id)
    cache.check()
    (again,) = cache.plan(0, [1])
    assert (again.id, again.slots.tolist()) == (1, swap.slots.tolist())
    assert cache.lookup(0, [1]).late.tolist() == [1]


def test_slots_are_taken_from_the_lowest_and_swaps_name_whom_they_displace() -> None:
    cache = NeuronCache(1, 8, 4, Lru(1, 8), Fixed(), swap_neurons=2, trigger="serial")
    swaps = cache.plan(0, [1, 2, 3])
    assert [s.slots.tolist() for s in swaps] == [[0, 1], [2]]
    assert [s.evict.tolist() for s in swaps] == [[], []]
    cache.commit([s.id for s in swaps])
    swaps = cache.plan(0, [5, 6, 7])  # one slot is free; 1 and 2 go, all as old as 3
    assert [s.promote.tolist() for s in swaps] == [[5, 6], [7]]
    assert [s.evict.tolist() for s in swaps] == [[1, 2], []]
    assert [s.slots.tolist() for s in swaps] == [[0, 1], [3]]


def test_knobs_hold_from_the_next_step() -> None:
    class Closes:
        sets = frozenset({"max_swaps"})
        knobs = Knobs()

        def update(self, record):
            self.knobs = Knobs(max_swaps=0)
            return self.knobs

    run = busy("after", "active")
    cache = run.cache("lru", Closes())
    records = drive(cache, run)
    assert records[0].loads > 0
    assert [record.loads for record in records[1:]] == [0] * 59

"""What every policy may rely on from the cache, and the cache enforce on every policy.

Policies come from the table: a new one is held to this by existing.
"""

from typing import get_args

import numpy as np
import pytest
from driving import LayerStep, Run, Shadow, busy, drive
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Controller, Fixed
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
    policy = Spied(run.policy(name))
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


def test_a_swap_names_only_those_whose_slots_it_takes() -> None:
    wrong = Wrong(ids(), ids(1, 2))
    cache = NeuronCache(1, 8, 3, wrong, Fixed(), warm=[[1, 2, 3]], trigger="serial")
    wrong.answer = ids(5), ids(1, 2)  # gives up two for one
    (swap,) = cache.plan(0, [5])
    assert (swap.slots.tolist(), swap.evict.tolist()) == ([0], [1])
    cache.check()


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

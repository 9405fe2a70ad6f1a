"""NeuronCache by hand: what "before" means, what is refused, which slots are taken."""

import numpy as np
import pytest
from driving import LayerStep, Run, busy, drive

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES, Lru

MOVING = [name for name, policy in POLICIES.items() if policy.admits != "never"]


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
    run = Run(8, [8], [[LayerStep([5, 6], [5, 6])]], "serial", "active")
    cache = NeuronCache(1, 8, 8, run.policy(name), Fixed(threshold_scale=0.2), trigger="serial")
    swaps = cache.plan(0, [5, 5, 6]) or cache.plan(0, [5, 5, 6])  # one hit may not be enough
    (swap,) = swaps
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

        def start(self, swaps):
            pass

        def update(self, record, layers=None):
            self.knobs = Knobs(max_swaps=0)
            return self.knobs

    run = busy("after", "active")
    cache = run.cache("lru", Closes())
    records = drive(cache, run)
    assert records[0].loads > 0
    assert [record.loads for record in records[1:]] == [0] * 59

"""Replay finds every value that came out otherwise, and only those."""

from dataclasses import replace

import pytest
from driving import busy, drive, fresh, ids, plain, small_log

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Committed, Planned
from kairox_sim.replay import replay


def changed_swap(events: list, at: int, **changed: object) -> list:
    plan = events[at]
    return replaced(events, at, replace(plan, swaps=(replace(plan.swaps[0], **changed),)))


def changed_split(events: list, **changed: object) -> list:
    split = replace(events[2].split, **changed)
    return replaced(events, 2, replace(events[2], split=split))


def replaced(events: list, at: int, event: object) -> list:
    return [*events[:at], event, *events[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "call", "what"),
    [
        (lambda e: changed_swap(e, 0, id=5), 0, "plan of layer 0: swaps[0].id"),
        (lambda e: changed_swap(e, 0, layer=1), 0, "plan of layer 0: swaps[0].layer"),
        (lambda e: changed_swap(e, 0, promote=ids(2, 1)), 0, "plan of layer 0: swaps[0].promote"),
        (lambda e: changed_swap(e, 0, slots=ids(1, 0)), 0, "plan of layer 0: swaps[0].slots"),
        (lambda e: changed_swap(e, 3, evict=ids(2)), 3, "plan of layer 0: swaps[0].evict"),
        (lambda e: replaced(e, 3, replace(e[3], evicted=ids(2))), 3, "plan of layer 0: evicted"),
        (lambda e: changed_split(e, hit_resident=1), 2, "lookup of layer 0: hit_resident"),
        (lambda e: changed_split(e, on_time=ids(1)), 2, "lookup of layer 0: on_time"),
        (lambda e: changed_split(e, residual=ids()), 2, "lookup of layer 0: residual"),
        (lambda e: changed_split(e, late=ids(3)), 2, "lookup of layer 0: late"),
        (
            lambda e: replaced(e, 5, replace(e[5], knobs=Knobs(threshold_scale=1 + 2**-52))),
            5,
            "end_step of step 7: threshold_scale",
        ),
        (
            lambda e: replaced(e, 5, replace(e[5], knobs=Knobs(max_swaps=0))),
            5,
            "end_step of step 7: max_swaps",
        ),
        (
            lambda e: replaced(e, 5, replace(e[5], knobs=Knobs(decay=0.9))),
            5,
            "end_step of step 7: decay",
        ),
    ],
)
def test_one_changed_value_is_one_difference(change, call: int, what: str) -> None:
    assert replay(small_log(), fresh()).differences == []
    (difference,) = replay(change(small_log()), fresh()).differences
    assert (difference.call, difference.what) == (call, what)
    assert plain(difference.logged) != plain(difference.replayed)


def test_a_swap_more_or_less_is_a_difference() -> None:
    events = small_log()
    gone = replaced(events, 0, replace(events[0], swaps=()))
    found = {d.what: (d.logged, d.replayed) for d in replay(gone, fresh()).differences}
    assert found["plan of layer 0: swaps[0].id"] == (None, 0)
    assert len(found) == 5


def test_a_call_the_cache_refuses_is_a_difference() -> None:
    events = replaced(small_log(), 1, Committed((0, 0)))
    refused, *after = replay(events, fresh()).differences
    assert refused.what == "commit of swaps [0, 0]"
    assert refused.logged == "accepted"
    assert "not in flight" in refused.replayed
    # Nothing landed, so that 1 and 2 are late in the lookup that follows, and stay where they are.
    assert {d.what for d in after} >= {f"lookup of layer 0: {n}" for n in ("on_time", "late")}


def test_another_policy_differs() -> None:
    run = busy("after", "active")
    cache = run.cache("lru")
    events: list = []
    cache.journal = events.append
    drive(cache, run)
    assert replay(events, run.cache("lru")).differences == []
    assert replay(events, run.cache("lfu")).differences != []


def test_replay_leaves_the_journal_alone() -> None:
    cache = fresh()
    told: list = []
    cache.journal = told.append
    replay(small_log(), cache)
    assert told == []
    cache.commit([])
    assert len(told) == 1


def test_replay_refuses_a_cache_that_is_not_fresh_or_has_other_layers() -> None:
    cache = fresh()
    replay(small_log(), cache)
    with pytest.raises(KairoxError, match="fresh cache"):
        replay(small_log(), cache)
    with pytest.raises(KairoxError, match="layers 0 to 3, the cache has 1"):
        replay([*small_log(), Planned(3, ids(), None, (), ids())], fresh())

"""FIFO, SIEVE, S3-FIFO, ARC, W-TinyLFU, random and window: their own rules."""

from collections import Counter

import numpy as np
import plain_caches
import pytest
from driving import busy, drive, moves, on_time, reactive, skewed, skewed_sets

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies import (
    Arc,
    Lfu,
    RandomEvict,
    S3Fifo,
    S3FifoSegments,
    Sieve,
    Window,
    WTinyLfu,
    build_policy,
)
from kairox_sim.policies.arc import B1, B2, T1, T2
from kairox_sim.policies.s3fifo import GHOST, MAIN, SMALL
from kairox_sim.policies.wtinylfu import PROBATION, PROTECTED, WINDOW

ONE_BY_ONE = ("lru", "lfu", "fifo", "sieve", "s3fifo", "arc", "wtinylfu")


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Layer:
    """One layer with trigger = after, whose copies land at once."""

    def __init__(self, policy, n_neurons: int, slots: int, **given) -> None:
        self.cache = NeuronCache(1, n_neurons, slots, policy, Fixed(), trigger="after", **given)

    def step(self, *seen: int) -> tuple[list[int], list[int]]:
        """(loaded, evicted), in order."""
        was = self.cache.state[0].copy()
        self.cache.lookup(0, seen, seen)
        loaded = [int(i) for swap in self.cache.plan(0, seen) for i in swap.promote]
        gone = np.flatnonzero((was == 2) & (self.cache.state[0] == 0)).tolist()
        self.cache.commit(list(self.cache.in_flight))
        self.cache.check()
        return loaded, gone


# -- one neuron a step: the textbook --------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9, 17, 23, 24])
def test_one_id_a_step_is_the_textbook(name: str, slots: int) -> None:
    stream = skewed(24, 500, slots) + list(range(24)) * 2 + skewed(24, 200, 99)
    policy = Lfu(1, 24, forget=True) if name == "lfu" else build_policy(name, 1, 24)
    layer = Layer(policy, 24, slots)
    missed = []
    for neuron in stream:
        missed.append(layer.cache.state[0, neuron] == 0)
        layer.step(neuron)
    assert missed == getattr(plain_caches, name)(stream, slots)


@pytest.mark.parametrize("slots", [150, 220])
def test_w_tinylfu_with_a_window_of_more_than_one(slots: int) -> None:
    stream = skewed(400, 3000, 5)
    layer = Layer(WTinyLfu(1, 400), 400, slots)
    missed = []
    for neuron in stream:
        missed.append(layer.cache.state[0, neuron] == 0)
        layer.step(neuron)
    assert missed == plain_caches.wtinylfu(stream, slots)
    assert layer.cache.policy.uses.sum() < len(stream)  # counts were halved


# -- sets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 29])
def test_fifo_is_its_definition_on_sets(slots: int) -> None:
    sets = skewed_sets(30, 400, 2)
    queue: list[int] = []  # oldest first
    moved = []
    for seen in [sorted(set(s)) for s in sets]:
        want = [i for i in seen if i not in queue]
        missing = max(0, len(want) - (slots - len(queue)))
        out = [i for i in queue if i not in seen][:missing]
        come = want[: slots - len(queue) + len(out)]
        queue = [i for i in queue if i not in out] + come
        moved.append((come, out))
    shadow = reactive("fifo", sets, 30, slots, swap_neurons=3)
    assert moves(shadow) == moved
    assert slots == 0 or (shadow.hits and shadow.evictions)


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 29])
def test_sieve_is_its_definition_on_sets(slots: int) -> None:
    sets = skewed_sets(30, 400, 3)
    queue: list[int] = []  # oldest first
    used: set[int] = set()
    hand: int | None = None  # what it will look at next; None is the oldest
    moved = []
    for seen in [sorted(set(s)) for s in sets]:
        want = [i for i in seen if i not in queue]
        used |= set(seen) & set(queue)
        missing = max(0, len(want) - (slots - len(queue)))
        missing = min(missing, len([i for i in queue if i not in seen]))
        out: list[int] = []
        while len(out) < missing:
            at = 0 if hand is None else queue.index(hand)
            neuron = queue[at]
            hand = queue[at + 1] if at + 1 < len(queue) else None
            if neuron in seen:
                continue
            if neuron in used:
                used.discard(neuron)
            else:
                queue.remove(neuron)
                out.append(neuron)
        come = want[: slots - len(queue)]
        queue += come
        moved.append((come, out))
    shadow = reactive("sieve", sets, 30, slots, swap_neurons=3)
    assert moves(shadow) == moved
    assert slots == 0 or (shadow.hits and shadow.evictions)


def test_sieve_by_hand() -> None:
    """Loads 0, 1, 2; uses 0 and 1. For 3 and 4 the hand clears 0 and 1, takes 2, comes round and
    takes 0. For 5 it goes on at 1, which has no bit any more."""
    layer = Layer(Sieve(1, 8), 8, 3)
    assert layer.step(0, 1, 2) == ([0, 1, 2], [])
    assert layer.step(0, 1) == ([], [])
    assert layer.step(3, 4) == ([3, 4], [0, 2])
    assert layer.step(5) == ([5], [1])
    assert layer.step(3, 5, 6) == ([6], [4])  # 3 and 5 are seen: the hand passes them by


def test_s3_fifo_by_hand() -> None:
    """20 slots: small has 2, main 18, the ghost remembers 18.

    0 and 1 go to small, 2 to 19 to main, since nothing was evicted yet. 0 is used twice. For 20 and
    21: 0 moves to main, 1 is evicted and remembered; main, now over its 18, gives up 2, its oldest.
    When 1 comes back it is remembered and goes to main: which has 18, so that small gives up 20.
    """
    policy = S3Fifo(1, 30)
    layer = Layer(policy, 30, 20)
    layer.step(*range(20))
    assert np.flatnonzero(policy.queue_of[0] == SMALL).tolist() == [0, 1]
    layer.step(0)
    layer.step(0)
    assert layer.step(20, 21) == ([20, 21], [1, 2])
    queue_of = policy.queue_of[0]
    assert np.flatnonzero(queue_of == SMALL).tolist() == [20, 21]
    assert (queue_of[0], queue_of[1], queue_of[2]) == (MAIN, GHOST, 0)
    assert layer.step(1) == ([1], [20])
    assert (queue_of[1], queue_of[20]) == (MAIN, GHOST)
    assert layer.step(2) == ([2], [3])  # main is over; 2 was forgotten, so it starts in small
    assert np.flatnonzero(queue_of == SMALL).tolist() == [2, 21]


def test_s3_fifo_gives_a_used_one_of_main_another_round() -> None:
    policy = S3Fifo(1, 30)
    layer = Layer(policy, 30, 20)
    layer.step(*range(20))
    layer.step(0, 1)
    layer.step(0, 1, 2)  # 0 and 1 will move to main, and 2, its oldest, was used once
    assert layer.step(20) == ([20], [3])
    assert policy.uses[0, 2] == 0
    main = np.flatnonzero(policy.queue_of[0] == MAIN)
    # Behind what came from small before it: the youngest of main.
    assert main[np.argmax(policy.stamp[0, main])] == 2


def test_arc_by_hand() -> None:
    """4 slots. 0 and 1 are used twice: T2. 2 and 3 fill T1. 4 takes 2's slot, which goes to B1.

    2 comes back from B1: T1 may have 1 (target 0 + 1). T1 has 3 and 4, more than that: 3 goes to
    B1, 2 to T2. 3 comes back: T1 may have 2, and has 4 alone: 0, T2's oldest, goes to B2. 0 comes
    back from B2: T1 may have 1 again. It has 1, and for a return from B2 that is enough to give:
    4 goes to B1.
    """
    policy = Arc(1, 8)
    layer = Layer(policy, 8, 4)
    layer.step(0, 1)
    layer.step(0, 1)
    assert layer.step(2, 3) == ([2, 3], [])
    assert layer.step(4) == ([4], [2])
    assert policy.list_of[0].tolist() == [T2, T2, B1, T1, T1, 0, 0, 0]
    assert layer.step(2) == ([2], [3])
    assert (policy.target[0], policy.list_of[0, 2], policy.list_of[0, 3]) == (1, T2, B1)
    assert layer.step(3) == ([3], [0])
    assert (policy.target[0], policy.list_of[0, 0]) == (2, B2)
    assert layer.step(0) == ([0], [4])
    assert policy.target[0] == 1
    assert policy.list_of[0].tolist() == [T2, T2, T2, T2, B1, 0, 0, 0]


def test_w_tinylfu_by_hand() -> None:
    """3 slots: a window of 1, a main part of 2, of which int(0.8 * 2) = 1 is protected."""
    policy = WTinyLfu(1, 8)
    layer = Layer(policy, 8, 3)
    for _ in range(3):
        layer.step(0, 1)  # 0 is pushed from the window to probation, and protected when used
    layer.step(2)  # pushes 1 to probation, which has a slot
    assert policy.part_of[0, :3].tolist() == [PROTECTED, PROBATION, WINDOW]
    # 4 pushes 3 out, 3 pushed 2 out: neither was used more often than 1. 3 is not even loaded.
    assert layer.step(3, 4) == ([4], [2])
    assert layer.step(3, 4, 5) == ([], [])  # 4 was seen and stays; 3 and 5 lose
    for _ in range(2):
        layer.step(3)  # 3 then has 4 uses, 1 has 3
    assert layer.cache.state[0, 3] == 2
    assert layer.step(5) == ([5], [1])  # 3, pushed out, beats 1
    assert policy.part_of[0].tolist() == [PROTECTED, 0, 0, PROBATION, 0, WINDOW, 0, 0]


def test_w_tinylfu_halves_its_counts() -> None:
    policy = WTinyLfu(1, 4)
    layer = Layer(policy, 4, 2)
    for _ in range(19):
        layer.step(0)
    assert policy.uses[0].tolist() == [19, 0, 0, 0]
    layer.step(1, 2)  # 21 uses counted: 20 = 10 * 2 were reached
    assert policy.uses[0].tolist() == [9, 0, 0, 0]
    assert policy.counted[0] == 1


def test_lfu_that_forgets_by_hand() -> None:
    """0 was used three times, 2 and 1 twice, 2 longer ago. Forgetting takes 2, and 2 comes back
    with one use; counting on takes the lower index."""
    forgets, perfect = Layer(Lfu(1, 4, forget=True), 4, 3), Layer(Lfu(1, 4), 4, 3)
    for seen in (0, 0, 0, 2, 1, 2, 1):
        forgets.step(seen)
        perfect.step(seen)
    assert forgets.step(3) == ([3], [2])
    assert forgets.step(2) == ([2], [3])
    assert forgets.step(3) == ([3], [2])
    assert perfect.step(3) == ([3], [1])
    assert perfect.step(1) == ([1], [3])
    assert perfect.step(3) == ([3], [2])


# -- what may not move ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s3fifo", "arc", "wtinylfu"])
@pytest.mark.parametrize("trigger", ["after", "attn_out"])
@pytest.mark.parametrize("max_swaps", [None, 1])
def test_lists_follow_what_lands_and_what_is_cancelled(name: str, trigger, max_swaps) -> None:
    """After a plan that loads, a policy's lists are the cache's state. Copies are cancelled, every
    other one before it began, and neurons start resident and pinned."""
    given = {"pinned": [[23], [], []], "warm": [[0, 1], [2], []], "max_swaps": max_swaps}
    run = busy(trigger, "active", **given)
    cache = run.cache(name)
    policy, plan, cancel = cache.policy, cache.policy.plan, cache.cancel
    checked = cancelled = 0

    def watched(layer, seen, state, free_slots, *rest):
        nonlocal checked
        promote, evict = plan(layer, seen, state, free_slots, *rest)
        if promote.size:
            after = state.copy()
            after[evict], after[promote] = 0, 1
            capacity = np.count_nonzero((state == 1) | (state == 2)) + free_slots
            lists_hold(policy, layer, (after == 1) | (after == 2), int(capacity))
            checked += 1
        return promote, evict

    def now_and_then_restored(swap_id):
        nonlocal cancelled
        cancelled += 1
        cancel(swap_id, restore=cancelled % 2 == 0)

    policy.plan, cache.cancel = watched, now_and_then_restored
    drive(cache, run)
    assert checked > 20
    assert cancelled > 5


def lists_hold(policy, layer: int, here: np.ndarray, capacity: int) -> None:
    if isinstance(policy, Arc):
        list_of = policy.list_of[layer]
        assert (np.isin(list_of, (T1, T2)) == here).all()
        assert np.count_nonzero(list_of) <= 2 * capacity
        assert 0 <= policy.target[layer] <= capacity
    elif isinstance(policy, S3Fifo):
        queue_of = policy.queue_of[layer]
        assert (np.isin(queue_of, (SMALL, MAIN)) == here).all()
        assert np.count_nonzero(queue_of == GHOST) <= int(0.9 * capacity)
    else:
        part_of = policy.part_of[layer]
        assert ((part_of != 0) == here).all()
        assert np.count_nonzero(part_of == PROTECTED) <= int(0.8 * (capacity - 1))


# -- random, window, segments ---------------------------------------------------------------------


def test_random_takes_any_victim_and_each_layer_its_own_draws() -> None:
    state, knobs = np.full(12, 2, np.uint8), Knobs()
    state[[0, 1]] = 0, 3  # absent, pinned
    rng = np.random.default_rng(0)
    policy = RandomEvict(1, 12, rng=rng)
    drawn = Counter()
    for _ in range(900):
        promote, (victim,) = policy.plan(0, ids(0, 2), state, 0, 99, knobs)
        assert promote.tolist() == [0]
        drawn[int(victim)] += 1
    assert sorted(drawn) == list(range(3, 12))
    assert min(drawn.values()) > 60  # of 100 expected

    def of_layer_1(other: int) -> list[int]:
        policy = RandomEvict(2, 12, rng=np.random.default_rng(0))
        victims = []
        for _ in range(20):
            for _ in range(other):
                policy.plan(0, ids(0), state, 0, 99, knobs)
            victims.append(int(policy.plan(1, ids(0), state, 0, 99, knobs)[1][0]))
        return victims

    assert of_layer_1(0) == of_layer_1(3)
    assert len(set(of_layer_1(0))) > 3


def test_window_keeps_what_was_active_in_the_last_k_tokens() -> None:
    sets = skewed_sets(20, 200, 1)
    shadow = reactive("window", sets, 20, 20)
    for at, hits in enumerate(on_time(shadow)):
        window = {i for s in sets[max(0, at - 5) : at] for i in s}
        assert hits == sorted(set(sets[at]) & window)
    assert shadow.evictions > 0


def test_window_by_hand() -> None:
    layer = Layer(Window(1, 8, k=2), 8, 3)
    assert layer.step(0, 1) == ([0, 1], [])
    assert layer.step(1, 2) == ([2], [])
    assert layer.step(1) == ([], [0])  # left the window of two, with nothing to load
    assert layer.step(1, 3, 4) == ([3, 4], [2])
    # Too small a budget: 1, 3 and 4 are in the window, used at once; the lowest index goes.
    assert layer.step(5) == ([5], [1])
    # 3 and 4 left it. 5 did not, but goes for the third of those seen; the fourth does not fit.
    assert layer.step(0, 2, 6, 7) == ([0, 2, 6], [3, 4, 5])


def test_window_counts_what_starts_resident_as_just_used() -> None:
    layer = Layer(Window(1, 8, k=2), 8, 4, warm=[[6, 7]])
    assert layer.step(7) == ([], [])
    assert layer.step(0) == ([0], [6])


def plans_of(policy, steps, n: int, slots: int):
    layer = Layer(policy, n, slots)
    return [layer.step(*seen) for seen in steps]


def segments(n: int, admit: float, seed: int = 0, **given) -> S3FifoSegments:
    position = np.random.default_rng(1).permutation(n).astype(np.int32)[None]
    rng = np.random.default_rng(seed)
    return S3FifoSegments(1, n, rng=rng, position=position, segment_admit=admit, **given)


def test_segments_always_admitted_are_s3_fifo() -> None:
    sets = skewed_sets(40, 200, 4)
    assert plans_of(segments(40, 1.0), sets, 40, 20) == plans_of(S3Fifo(1, 40), sets, 40, 20)


def test_segments_never_admitted() -> None:
    """Runs of four places or more among what is missing are not loaded; all else is."""
    policy = segments(40, 0.0)
    layer = Layer(policy, 40, 40)
    place = policy.position[0]
    at = np.argsort(place)  # neuron at each place
    seen = at[[0, 1, 2, 5, 6, 7, 8, 9, 20, 22, 23, 36, 37, 38, 39]]
    loaded, _ = layer.step(*seen.tolist())
    assert sorted(place[loaded]) == [0, 1, 2, 20, 22, 23]
    # What is resident by now breaks a segment up: of 0 to 4, 3 and 4 are missing.
    loaded, _ = layer.step(*at[:5].tolist())
    assert sorted(place[loaded]) == [3, 4]


def test_segments_are_admitted_whole_and_by_half() -> None:
    policy = segments(40, 0.5)
    at = np.argsort(policy.position[0])
    state = np.zeros(40, np.uint8)
    seen = np.sort(at[[*range(0, 4), *range(10, 16), 30]]).astype(np.int32)
    outcomes = Counter()
    for _ in range(400):
        passed_by = policy.position[0][policy._passed_by(0, seen)]
        outcomes[tuple(sorted(passed_by.tolist()))] += 1
    whole = [(), tuple(range(4)), tuple(range(10, 16)), (*range(4), *range(10, 16))]
    assert set(outcomes) == set(whole)
    assert min(outcomes.values()) > 60  # of 100 expected
    promote, _ = policy.plan(0, seen, state, 40, 99, Knobs())
    assert at[30] in promote


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Window(1, 4, k=0), "got k = 0"),
        (lambda: segments(4, 1.5), "got 4 and 1.5"),
        (lambda: segments(4, 0.5, segment=0), "got 0 and 0.5"),
    ],
)
def test_parameters_that_cannot_be(build, says: str) -> None:
    with pytest.raises(KairoxError, match=says):
        build()

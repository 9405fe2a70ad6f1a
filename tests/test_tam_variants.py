"""The Kairox paper's TAM, the released code's, and eager top-k, by hand and against plain loops.

Hand-worked scores use a decay of 0.5, so that all of them are exact.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Controller, Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Planned
from kairox_sim.policies import Policy, TamPaper, TamReleased, TopK
from kairox_sim.policies.base import ABSENT, ARRIVING, NOTHING, PINNED, RESIDENT

UNLIMITED = 2**31 - 1
Moves = list[tuple[list[int], list[int]]]


def moves(
    policy: Policy,
    sets: Sequence[Sequence[int] | dict[int, float]],
    slots: int,
    *,
    n: int = 6,
    warm: Sequence[int] = (),
    controller: Controller | None = None,
) -> Moves:
    """(promoted, evicted) per plan of one layer; every copy has landed before the next plan.

    A dict gives shares by id.
    """
    told: list[Planned] = []
    cache = NeuronCache(
        1, n, slots, policy, controller or Fixed(), warm=[warm], swap_neurons=1, trigger="serial",
        observes="predicted", journal=lambda e: told.append(e) if isinstance(e, Planned) else None,
    )  # fmt: skip
    for seen in sets:
        ids = np.array(sorted(seen), np.int32)
        share = np.array([seen[i] for i in sorted(seen)]) if isinstance(seen, dict) else None
        cache.commit(swap.id for swap in cache.plan(0, ids, share))
        cache.check()
    return [([int(i) for swap in e.swaps for i in swap.promote], e.evicted.tolist()) for e in told]


# -- the paper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.05, 0.3, 0.5, 0.67, 0.85, 0.9, 0.95])
def test_one_full_hit_from_zero_scores_exactly_1_minus_decay_and_is_not_enough(
    decay: float,
) -> None:
    policy = TamPaper(1, 6, decay=decay, epsilon=0.0)
    assert moves(policy, [[3]], 2) == [([], [])]
    assert policy.momentum.values[0].tolist() == [0, 0, 0, np.float32(1 - decay), 0, 0]
    # (1 - d)(1 + d) > 1 - d
    assert moves(TamPaper(1, 6, decay=decay, epsilon=0.0), [[3], [3]], 2)[1] == ([3], [])


def test_scores_by_hand() -> None:
    policy = TamPaper(1, 6, decay=0.5)
    moves(policy, [[0], {0: 1.0, 1: 0.5}, [1, 2]], 2)
    # 0: .5, .75, .375; 1: 0, .25, .625; 2: .5
    assert policy.momentum.values[0].tolist() == [0.375, 0.625, 0.5, 0, 0, 0]
    assert policy.momentum.values.dtype == np.float32


def test_a_half_active_group_never_passes() -> None:
    """Its score nears 0.5 from below, and tau is 0.501."""
    assert moves(TamPaper(1, 6), [{3: 0.5}] * 30, 2) == [([], [])] * 30


def test_load_and_evict_by_hand() -> None:
    sets = [[0, 1], [0, 1], [2], [2], [1], []]
    assert moves(TamPaper(1, 6), sets, 2) == [
        ([], []),  # .5 each
        ([0, 1], []),  # .75 each
        ([], []),  # 2: .5; 0 and 1: .375, below tau, and nobody needs their slots
        ([2], [1]),  # 2: .75; 0 and 1: .1875 each, and the lowest index stays
        ([1], [0]),  # 1: .59375; 2: .375; 0: .09375
        ([], []),  # 1: .297, 2: .1875: both fail and stay
    ]


def test_what_was_seen_goes_when_others_score_higher() -> None:
    # 0: .5 .75 .375 .6875; 1: 0 0 .5 .75: both pass, one slot
    assert moves(TamPaper(1, 6), [[0], [0], [1], [0, 1]], 1)[2:] == [([], []), ([1], [0])]


def test_equals_keep_the_resident_then_the_lowest_index() -> None:
    assert moves(TamPaper(1, 6), [[1, 3, 5]] * 2, 2, warm=[5])[1] == ([1], [])
    assert moves(TamPaper(1, 6), [[1, 3, 5]] * 2, 1, warm=[5])[1] == ([], [])


def test_copies_start_with_the_highest_score() -> None:
    # 4: .5 .75 .875, 1: 0 .5 .75, 2: 0 0 .5
    knobs = Fixed(max_swaps=0)
    policy = TamPaper(1, 6)
    moves(policy, [[4], [1, 4], [1, 2, 4]], 6, controller=knobs)
    state = np.zeros(6, np.uint8)
    assert policy.plan(0, NOTHING, state, 6, UNLIMITED, Knobs())[0].tolist() == [4, 1]


def test_a_cap_leaves_the_best_and_only_their_victims() -> None:
    policy = TamPaper(1, 6)
    policy.momentum.values[0] = [0.9, 0.8, 0.7, 0.2, 0.1, 0.3]
    state = np.array([0, 0, 0, RESIDENT, RESIDENT, RESIDENT], np.uint8)

    def plan(limit: int) -> tuple[list[int], list[int]]:
        promote, evict = policy.plan(0, NOTHING, state, 0, limit, Knobs())
        return promote.tolist(), evict.tolist()

    assert plan(UNLIMITED) == ([0, 1, 2], [3, 4, 5])
    assert plan(2) == ([0, 1], [3, 4])
    assert plan(1) == ([0], [4])
    assert plan(0) == ([], [])


def test_pinned_and_arriving_do_not_compete() -> None:
    """Five slots: pinned, arriving, two resident, one free: three to compete for."""
    policy = TamPaper(1, 8)
    policy.momentum.values[0] = [0.9, 0.9, 0.6, 0.1, 0.8, 0.7, 0.9, 0.1]
    state = np.array([PINNED, ARRIVING, RESIDENT, RESIDENT, 0, 0, 0, 0], np.uint8)
    promote, evict = policy.plan(0, NOTHING, state, 1, UNLIMITED, Knobs())
    # 6 (.9), 4 (.8) and 5 (.7) are the best three of what may move; 2 and 3 leave.
    assert (promote.tolist(), evict.tolist()) == ([6, 4, 5], [2, 3])


def test_the_controllers_decay_goes_before_the_parameter() -> None:
    """At decay 0.25 one hit scores 0.75; what was observed waits for the plan that knows it."""
    policy = TamPaper(1, 4, decay=0.5)
    policy.observe(0, np.array([2], np.int32), None)
    policy.observe(0, np.array([1], np.int32), None)
    policy.plan(0, NOTHING, np.zeros(4, np.uint8), 4, UNLIMITED, Knobs(decay=0.25))
    assert policy.momentum.values[0].tolist() == [0, 0.75, 0.1875, 0]
    policy.plan(0, NOTHING, np.zeros(4, np.uint8), 4, UNLIMITED, Knobs())
    assert policy.momentum.values[0].tolist() == [0, 0.75, 0.1875, 0]  # each counts once


def test_layers_are_apart() -> None:
    class PerLayer:
        sets = frozenset({"decay"})
        knobs = Knobs(decay=(0.5, 0.25, 0.75))

        def start(self, swaps: Sequence[int]) -> None:
            pass

    policy = TamPaper(3, 4)
    cache = NeuronCache(3, 4, 2, policy, PerLayer(), trigger="serial")  # type: ignore[arg-type]
    for layer, ids in enumerate(([0], [1], [2])):
        cache.plan(layer, ids)
    assert policy.momentum.values.tolist() == [[0.5, 0, 0, 0], [0, 0.75, 0, 0], [0, 0, 0.25, 0]]
    # At 0.25 the second hit gives .9375 > tau = .751; at 0.75 it gives .4375 > .251.
    assert [len(cache.plan(layer, [1])) for layer in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("policy", [TamPaper, TamReleased, TopK])
def test_what_was_observed_is_copied(policy) -> None:
    made = policy(1, 4)
    seen, share = np.array([1, 2], np.int32), np.array([0.5, 1.0], np.float32)
    made.observe(0, seen, share)
    seen[:], share[:] = [0, 3], 0.1
    made.plan(0, NOTHING, np.zeros(4, np.uint8), 4, UNLIMITED, Knobs())
    assert made.momentum.values[0].nonzero()[0].tolist() == [1, 2]
    assert made.momentum.values[0, 2] == 2 * made.momentum.values[0, 1]


# -- the released code ----------------------------------------------------------------------------


def test_one_hit_is_enough_and_pairs_are_in_index_order() -> None:
    assert moves(TamReleased(1, 6), [[4, 5], [3]], 2, warm=[0, 1]) == [
        ([4, 5], [0, 1]),
        ([3], [5]),  # 3: .33; 4 and 5: .2211 each: the lowest index stays
    ]


def test_a_binding_cap_takes_the_first_pairs_by_index() -> None:
    """Not the best ones: 5 scores highest and waits."""
    sets = [{3: 0.25, 4: 0.5, 5: 1.0}, {3: 0.25, 4: 0.5, 5: 1.0}, []]
    found = moves(TamReleased(1, 6), sets, 3, warm=[0, 1, 2], controller=Fixed(max_swaps=1))
    assert found == [([3], [0]), ([4], [1]), ([5], [2])]


def test_free_slots_are_filled_first() -> None:
    assert moves(TamReleased(1, 6), [[4, 5]], 3) == [([4, 5], [])]
    assert moves(TamReleased(1, 6), [[4, 5]], 2, warm=[2]) == [([4, 5], [2])]
    assert moves(TamReleased(1, 6, ties="resident"), [[4, 5]], 3, warm=[2]) == [([4, 5], [])]


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        # Of four equal ones two are kept; 3 and 5 are resident.
        ("low", ([1, 2], [3, 5])),
        ("high", ([4], [3])),
        ("resident", ([], [])),
    ],
)
def test_ties_at_the_boundary(ties: str, expected: tuple[list[int], list[int]]) -> None:
    sets = [[1, 2, 3, 4, 5]]
    assert moves(TamReleased(1, 6, ties=ties), sets, 2, warm=[3, 5]) == [expected]
    assert moves(TopK(1, 6, ties=ties), sets, 2, warm=[3, 5]) == [expected]


@pytest.mark.parametrize("ties", ["low", "high", "resident"])
def test_what_never_scored_neither_comes_nor_goes_for_its_like(ties: str) -> None:
    for warm in ([4, 5], [0, 1]):
        assert moves(TamReleased(1, 6, ties=ties), [[]], 2, warm=warm) == [([], [])]
    assert moves(TamReleased(1, 6, tau=0.0), [[]], 2, warm=[4, 5]) == [([], [])]


def test_tau_033_is_the_papers_filter_at_067() -> None:
    policy = TamReleased(1, 6, tau=0.33)
    # 4: .33 (not above .33), .5511, .3692, .2474; 3: 0, 0, .33, .5511
    assert moves(policy, [[4], [4], [3], [3]], 1, warm=[0]) == [
        ([], []),
        ([4], [0]),
        ([], []),
        ([3], [4]),
    ]


def test_its_decay_is_fixed_unless_a_controller_sets_one() -> None:
    policy = TamReleased(1, 4)
    state = np.zeros(4, np.uint8)
    policy.observe(0, np.array([2], np.int32), None)
    policy.plan(0, NOTHING, state, 4, UNLIMITED, Knobs())
    assert policy.momentum.values[0, 2] == np.float32(1 - 0.67)
    policy.observe(0, np.array([2], np.int32), None)
    policy.plan(0, NOTHING, state, 4, UNLIMITED, Knobs(decay=0.5))
    assert policy.momentum.values[0, 2] == np.float32(0.5) * np.float32(1 - 0.67) + np.float32(0.5)


# -- eager top-k ----------------------------------------------------------------------------------


def test_topk_loads_what_is_active_now_and_forgets() -> None:
    sets = [[0, 1], [2, 3], [], [1, 2, 3], {0: 0.25, 4: 0.75, 5: 1.0}]
    assert moves(TopK(1, 6), sets, 2) == [
        ([0, 1], []),
        ([2, 3], [0, 1]),
        ([], []),  # nothing is loaded to fill up, nothing leaves
        ([1], [3]),  # more active than slots: the lowest indices
        ([4, 5], [1, 2]),  # the highest shares
    ]


def test_topk_is_released_at_decay_0_and_tau_0() -> None:
    rng = np.random.default_rng(2)
    sets = [rng.choice(20, rng.integers(0, 9), replace=False).tolist() for _ in range(60)]
    for ties in ("low", "high", "resident"):
        ours = moves(TopK(1, 20, ties=ties), sets, 5, n=20)
        released = TamReleased(1, 20, decay=0.0, tau=0.0, ties=ties)
        assert ours == moves(released, sets, 5, n=20)
        assert sum(len(load) for load, _ in ours) > 100


# -- against plain loops --------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], list[int], int, int]:
    """(score, state, free slots, limit) of a layer-step."""
    n = draw(st.integers(1, 14))
    score = draw(st.lists(st.sampled_from([0, 0.125, 0.33, 0.5, 0.501, 0.502, 0.625, 1]),
                          min_size=n, max_size=n))  # fmt: skip
    state = draw(st.lists(st.sampled_from([ABSENT, ABSENT, ARRIVING, RESIDENT, RESIDENT, PINNED]),
                          min_size=n, max_size=n))  # fmt: skip
    limit = draw(st.sampled_from([0, 1, 2, 5, UNLIMITED]))
    return score, state, draw(st.integers(0, n)), limit


def asked(policy, layer) -> tuple[list[int], list[int]]:
    score, state, free_slots, limit = layer
    policy.momentum.values[0] = score
    promote, evict = policy.plan(0, NOTHING, np.array(state, np.uint8), free_slots, limit, Knobs())
    assert promote.dtype == evict.dtype == np.int32
    return promote.tolist(), evict.tolist()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(layer=layers())
def test_the_paper_against_a_plain_loop(layer) -> None:
    score, state, free_slots, limit = layer
    promote, evict = asked(TamPaper(1, len(score)), layer)
    inside = {i for i, s in enumerate(state) if s == RESIDENT}
    movable = [i for i, s in enumerate(state) if s in (ABSENT, RESIDENT)]
    ranked = sorted(movable, key=lambda i: (-score[i], i not in inside, i))
    passing = [i for i in ranked if np.float32(score[i]) > np.float32(0.501)]
    failing = [i for i in ranked if i in inside and i not in passing]
    keep = set((passing + failing)[: len(inside) + free_slots])
    if limit == UNLIMITED:
        assert set(promote) == keep - inside
        assert set(evict) == inside - keep
    assert promote == [i for i in passing if i in keep - inside][:limit]
    assert len(evict) == max(0, len(promote) - free_slots)
    assert set(evict) <= inside - keep
    spared = inside - keep - set(evict)
    assert all(score[i] <= score[j] for i in evict for j in spared)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(layer=layers(), ties=st.sampled_from(["low", "high", "resident"]), tau=st.booleans())
def test_released_against_a_plain_loop(layer, ties: str, tau: bool) -> None:
    score, state, free_slots, limit = layer
    load, evict = asked(TamReleased(1, len(score), ties=ties, tau=0.33 if tau else None), layer)
    inside = {i for i, s in enumerate(state) if s == RESIDENT}
    orders = {
        "low": lambda i: (-score[i], i),
        "high": lambda i: (-score[i], -i),
        "resident": lambda i: (-score[i], i not in inside, i),
    }
    movable = [i for i, s in enumerate(state) if s in (ABSENT, RESIDENT)]
    movable = [i for i in movable if np.float32(score[i]) > np.float32(0.33 if tau else 0)]
    wanted = set(sorted(movable, key=orders[ties])[: len(inside) + free_slots])
    assert load == sorted(wanted - inside)[:limit]
    assert evict == sorted(inside - wanted)[: max(0, len(load) - free_slots)]
    if free_slots == 0:
        assert len(load) == len(evict)
    assert len(load) <= limit


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TamPaper(1, 4, decay=1.0), "tam_paper's decay must be in"),
        (lambda: TamPaper(1, 4, decay=float("nan")), "tam_paper's decay must be in"),
        (lambda: TamPaper(1, 4, epsilon=-1e-3), "tam_paper's epsilon must be 0 or more"),
        (lambda: TamReleased(1, 4, decay=-0.1), "tam_released's decay must be in"),
        (lambda: TamReleased(1, 4, tau=-0.1), "tam_released's tau must be 0 or more"),
        (lambda: TamReleased(1, 4, ties="first"), "one of low, high, resident, got 'first'"),
        (lambda: TopK(1, 4, ties=""), "topk's ties must be one of"),
    ],
)
def test_parameters_that_cannot_be(make, says: str) -> None:
    with pytest.raises(KairoxError, match=says):
        make()

"""Q-Infer's swaps by hand, and its stop rule against a loop that swaps one by one."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies import Known, QInfer, build_policy
from kairox_sim.policies.base import ABSENT, ARRIVING, NOTHING, PINNED, RESIDENT

UNLIMITED = 2**31 - 1
# Of ten: 0 to 3 are resident.
STATE = [RESIDENT] * 4 + [ABSENT] * 6


def swapped(
    active: list[int] | dict[int, float],
    ratio: float,
    *,
    state: list[int] = STATE,
    free: int = 0,
    limit: int = UNLIMITED,
    reverse: bool = False,
) -> tuple[list[int], list[int]]:
    policy = QInfer(1, len(state), gpu_over_cpu=ratio, reverse=reverse)
    ids = np.array(sorted(active), np.int32)
    share = None
    if isinstance(active, dict):
        share = np.array([active[i] for i in sorted(active)], np.float32)
    policy.observe(0, ids, share)
    promote, evict = policy.plan(0, ids, np.array(state, np.uint8), free, limit, Knobs())
    assert promote.dtype == evict.dtype == np.int32
    return promote.tolist(), evict.tolist()


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        # GPU 1, CPU 3. 3*8 > 1; 2*8 > 2; 1*8 > 3; then the CPU has nothing.
        (8.0, ([5, 6, 7], [1, 2, 3])),
        # 3*2 > 1; 2*2 > 2; 1*2 <= 3.
        (2.0, ([5, 6], [1, 2])),
        # 3*1 > 1; 2*1 <= 2: equal is balanced.
        (1.0, ([5], [1])),
        (0.5, ([5], [1])),
        # 3/3 <= 1: balanced.
        (1 / 3, ([], [])),
    ],
)
def test_until_both_would_take_as_long(ratio: float, expected) -> None:
    assert swapped([0, 5, 6, 7], ratio) == expected


def test_an_active_one_never_replaces_an_active_one_in_decode() -> None:
    assert swapped([0, 1, 2, 5, 6, 7], 8.0) == ([5], [3])
    assert swapped([0, 1, 2, 3, 5, 6], 8.0) == ([], [])


def test_free_slots_come_first() -> None:
    assert swapped([0, 5, 6, 7], 8.0, free=2) == ([5, 6, 7], [1])
    assert swapped([5, 6], 8.0, state=[ABSENT] * 10, free=1) == ([5], [])


def test_the_limit_counts_swaps() -> None:
    assert swapped([0, 5, 6, 7], 8.0, limit=2) == ([5, 6], [1, 2])
    assert swapped([0, 5, 6, 7], 8.0, limit=0) == ([], [])


def test_in_a_chunk_the_most_active_replaces_the_least_active() -> None:
    shares = {0: 0.25, 1: 0.5, 2: 1.0, 5: 0.5, 6: 1.0, 7: 0.75}
    # GPU 1.75, CPU 2.25. 6 for 3 (gain 1): 2.75 | 1.25, still 10 > 2.75. 7 for 0 (gain .5):
    # 3.25 | .75, 6 > 3.25. 5 for 1 gains nothing.
    assert swapped(shares, 8.0) == ([6, 7], [3, 0])
    # At ratio 2: 2.25*2 > 1.75; 1.25*2 <= 2.75.
    assert swapped(shares, 2.0) == ([6], [3])


def test_pinned_and_arriving_are_the_gpus_and_stay() -> None:
    state = [PINNED, ARRIVING, RESIDENT] + [ABSENT] * 7
    # GPU 2 (0 and 1), CPU 2: 2*1.5 > 2; then 1*1.5 <= 3.
    assert swapped([0, 1, 5, 6], 1.5, state=state) == ([5], [2])
    assert swapped([0, 1, 5, 6], 1.0, state=state) == ([], [])


def test_where_the_gpu_is_slower_nothing_moves_unless_asked() -> None:
    # GPU 3, CPU 1, a GPU half as fast as the CPU.
    assert swapped([0, 1, 2, 5], 0.5) == ([], [])
    # 3 > .5: 0 out for 4; 2 > 1: 1 out for 6; 1 <= 1.5.
    assert swapped([0, 1, 2, 5], 0.5, reverse=True) == ([4, 6], [0, 1])
    assert swapped([0, 1, 2, 5], 0.5, reverse=True, limit=1) == ([4], [0])
    # Forwards it is the same.
    assert swapped([0, 5, 6, 7], 2.0, reverse=True) == ([5, 6], [1, 2])


def test_only_the_latest_layer_step_counts() -> None:
    policy = QInfer(2, 10, gpu_over_cpu=8.0)
    state = np.array(STATE, np.uint8)
    for ids in ([5, 6, 7], [8]):
        policy.observe(0, np.array(ids, np.int32), None)
    policy.observe(1, np.array([9], np.int32), None)
    assert policy.plan(0, NOTHING, state, 0, UNLIMITED, Knobs())[0].tolist() == [8]
    assert policy.plan(1, NOTHING, state, 0, UNLIMITED, Knobs())[0].tolist() == [9]


def test_copies_that_have_not_begun_are_given_back() -> None:
    """Compute waits: late = cancel restores what the copy would have overwritten."""
    policy = build_policy("qinfer", 1, 10, Known(gpu_over_cpu=8.0))
    cache = NeuronCache(1, 10, 4, policy, Fixed(), warm=[[0, 1, 2, 3]], swap_neurons=1)
    first, second, third = cache.plan(0, [0, 5, 6, 7])
    assert [s.promote.tolist() for s in (first, second, third)] == [[5], [6], [7]]
    cache.cancel(third.id, restore=True)
    cache.commit([first.id])
    cache.check()
    assert (cache.state[0] == RESIDENT).nonzero()[0].tolist() == [0, 3, 5]
    split = cache.lookup(0, [0, 3, 5, 6, 7])
    assert (split.on_time.tolist(), split.residual.tolist()) == ([0, 3, 5], [6, 7])
    assert cache.take_counts().evictions == 2


@st.composite
def layers(draw: st.DrawFn):
    n = draw(st.integers(1, 12))
    state = draw(st.lists(st.sampled_from([ABSENT, ABSENT, ARRIVING, RESIDENT, RESIDENT, PINNED]),
                          min_size=n, max_size=n))  # fmt: skip
    ids = draw(st.lists(st.integers(0, n - 1), unique=True))
    share = {i: draw(st.sampled_from([0.25, 0.5, 1.0])) for i in ids}
    ratio = draw(st.sampled_from([0.1, 0.5, 1.0, 2.0, 8.0]))
    return state, share, ratio, draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 3, UNLIMITED]))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(layer=layers(), reverse=st.booleans())
def test_against_a_loop_that_swaps_one_by_one(layer, reverse: bool) -> None:
    state, share, ratio, free, limit = layer
    found = swapped(share, ratio, state=state, free=free, limit=limit, reverse=reverse)
    active = {i: share.get(i, 0.0) for i in range(len(state))}
    cpu = sum(a for i, a in active.items() if state[i] == ABSENT)
    gpu = sum(a for i, a in active.items() if state[i] != ABSENT)
    outside = {i for i, s in enumerate(state) if s == ABSENT}
    inside = {i for i, s in enumerate(state) if s == RESIDENT}
    back = reverse and gpu > cpu * ratio
    sign = 1 if back else -1
    promote: list[int] = []
    evict: list[int] = []
    while len(promote) < limit and outside:
        if not (gpu > cpu * ratio if back else cpu * ratio > gpu):
            break
        best = min(outside, key=lambda i: (sign * active[i], i))
        if free and not back:
            worst, gone = None, 0.0
        elif inside:
            worst = min(inside, key=lambda i: (-sign * active[i], i))
            gone = active[worst]
        else:
            break
        gain = (gone - active[best]) * sign
        if gain <= 0:
            break
        promote.append(best)
        outside.remove(best)
        if worst is None:
            free -= 1
        else:
            evict.append(worst)
            inside.remove(worst)
        cpu, gpu = cpu + sign * gain, gpu - sign * gain
    assert found == (promote, evict)


@pytest.mark.parametrize("ratio", [0.0, -1.0, inf, nan])
def test_a_ratio_that_cannot_be(ratio: float) -> None:
    with pytest.raises(KairoxError, match="gpu_over_cpu must be above 0"):
        QInfer(1, 4, gpu_over_cpu=ratio)


def test_it_is_not_built_without_the_rates_of_its_machine() -> None:
    with pytest.raises(KairoxError, match="'qinfer' cannot be built without the rates"):
        build_policy("qinfer", 1, 4)

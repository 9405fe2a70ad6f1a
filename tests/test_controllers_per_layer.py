"""Controllers that act per layer: the paper's decay and the released swap cap, by hand."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import CONTROLLERS, AnbPaper, Knobs, SwapCap
from kairox_sim.errors import KairoxError
from kairox_sim.policies import build_policy
from kairox_sim.record import LayerWaits, StepRecord

STEP = StepRecord.with_unknown()


def waits(io: list[int], cpu_s: list[float] | None = None) -> LayerWaits:
    return LayerWaits(np.array(io, bool), np.array(cpu_s or [0.0] * len(io)))


def test_decay_by_hand() -> None:
    anb = AnbPaper(alpha=0.5, initial=0.4, highest=0.9)
    anb.start([3, 3, 3, 3])
    assert anb.knobs == Knobs(decay=(0.4,) * 4)
    # I/O-bound, CPU-bound, both (I/O goes first), neither.
    step = waits([1, 0, 1, 0], [0.0, 1e-3, 1e-3, 0.0])
    assert anb.update(STEP, step).decay == pytest.approx((0.6, 0.2, 0.6, 0.4))
    # .6*1.5 = .9; .2*.5 = .1; .9 is the end.
    assert anb.update(STEP, step).decay == pytest.approx((0.9, 0.1, 0.9, 0.4))
    knobs = anb.update(STEP, step)
    assert knobs.decay == (0.9, 0.05, 0.9, 0.4)  # both ends
    assert knobs == anb.knobs
    assert (knobs.threshold_scale, knobs.max_swaps) == (1.0, None)


def test_decay_as_in_the_paper() -> None:
    anb = AnbPaper()
    anb.start([1, 1])
    found = [anb.update(STEP, waits([1, 0], [0, 1])).decay for _ in range(60)]
    assert found[0] == (0.5 * 1.05, 0.5 * 0.95)
    assert found[12][0] == pytest.approx(0.5 * 1.05**13)  # .943, the last below the end
    assert found[13][0] == found[-1][0] == 0.95
    assert found[43][1] == pytest.approx(0.5 * 0.95**44)  # .0523
    assert found[44][1] == found[-1][1] == 0.05


def test_the_swap_cap_by_hand() -> None:
    cap = SwapCap()
    cap.start([100, 100, 30, 0, 1])
    assert cap.knobs == Knobs(max_swaps=(100, 100, 30, 0, 1))
    waited, free = waits([1, 0, 1, 1, 1]), waits([0, 0, 0, 0, 0])
    # int(100*.95) = 95; capacity is the most; int(28.5) = 28; no slots; never below 1.
    assert cap.update(STEP, waited).max_swaps == (95, 100, 28, 0, 1)
    # int(99.75) = 99; int(29.4) = 29
    assert cap.update(STEP, free).max_swaps == (99, 100, 29, 0, 1)
    # int(94.05) = 94; int(27.55) = 27
    assert cap.update(STEP, waited).max_swaps == (94, 100, 27, 0, 1)
    assert cap.knobs.max_swaps == (94, 100, 27, 0, 1)


def test_below_20_the_cap_never_grows_again() -> None:
    """int(19 * 1.05) = 19, int(20 * 1.05) = 21: truncation, as released."""
    for highest in (19, 20, 21):
        cap = SwapCap()
        cap.start([highest])
        cap.update(STEP, waits([1]))
        below = cap.knobs.max_swaps
        assert below == (min(highest - 1, 19),)  # int(18.05), 19, int(19.95)
        for _ in range(50):
            cap.update(STEP, waits([0]))
        assert cap.knobs.max_swaps == below
    cap = SwapCap()
    cap.start([30])
    for _ in range(5):  # 28 26 24 22 20
        cap.update(STEP, waits([1]))
    assert cap.knobs.max_swaps == (20,)
    assert cap.update(STEP, waits([0])).max_swaps == (21,)
    for _ in range(60):
        cap.update(STEP, waits([1]))
    assert cap.knobs.max_swaps == (1,)


@given(
    steps=st.lists(
        st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 1e-4])), min_size=3, max_size=3),
        max_size=40,
    ),
    name=st.sampled_from(["anb_paper", "swap_cap"]),
)
def test_layers_do_not_touch_each_other(steps, name: str) -> None:
    """Each layer goes as it would alone, and stays in its range."""
    together = CONTROLLERS[name]()
    together.start([40, 40, 40])
    alone = [CONTROLLERS[name]() for _ in range(3)]
    for one in alone:
        one.start([40])
    for step in steps:
        io, cpu_s = [int(a) for a, _ in step], [b for _, b in step]
        knobs = together.update(STEP, waits(io, cpu_s))
        for at, one in enumerate(alone):
            assert one.update(STEP, waits([io[at]], [cpu_s[at]])).at(0) == knobs.at(at)
            assert knobs.decay is None or 0.05 <= knobs.at(at).decay <= 0.95
            assert knobs.max_swaps is None or 1 <= knobs.at(at).max_swaps <= 40


@pytest.mark.parametrize("name", ["anb_paper", "swap_cap"])
def test_what_acts_per_layer_needs_to_know_each_layers_waits(name: str) -> None:
    controller = CONTROLLERS[name]()
    with pytest.raises(KairoxError, match=f"{name} was not started"):
        controller.update(STEP, waits([0]))
    controller.start([4, 4])
    before = controller.knobs
    with pytest.raises(KairoxError, match=f"{name} acts per layer and was not told"):
        controller.update(STEP)
    with pytest.raises(KairoxError, match="started for 2 layers and told the waits of 3 and 3"):
        controller.update(STEP, waits([0, 0, 0]))
    with pytest.raises(KairoxError, match="cpu_s of 0 or more"):
        controller.update(STEP, waits([0, 0], [0.0, nan]))
    assert controller.knobs == before


def test_the_cache_says_how_many_swaps_fill_each_layer() -> None:
    """9, 7 and 0 slots by swaps of 2; more slots than neurons are the neurons."""
    cap = SwapCap()
    NeuronCache(4, 24, [9, 7, 0, 99], build_policy("topk", 4, 24), cap, swap_neurons=2)
    assert cap.knobs.max_swaps == (5, 4, 0, 12)

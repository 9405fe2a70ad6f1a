"""Controllers: the balancing laws by hand, and who may be combined with whom."""

from dataclasses import fields
from math import inf, nan

import numpy as np
import pytest
from driving import Run
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import (
    CONTROLLERS,
    Anb,
    AnbPaper,
    AnbProse,
    Controller,
    Fixed,
    Knobs,
    SwapCap,
)
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES, build_policy
from kairox_sim.record import LayerWaits, StepRecord

TIMES = st.floats(0, 10, allow_nan=False)
KNOBS = {f.name for f in fields(Knobs)}


def record(t_gpu: float, t_cpu: float, t_io: float) -> StepRecord:
    return StepRecord.with_unknown(gpu_busy_s=t_gpu, cpu_busy_s=t_cpu, swap_busy_s=t_io)


def waits(io: list[int], cpu_s: list[float]) -> LayerWaits:
    return LayerWaits(np.array(io, bool), np.array(cpu_s, float))


def scale_after(t_gpu: float, t_cpu: float, t_io: float, **given: float) -> float:
    return Anb(**given).update(record(t_gpu, t_cpu, t_io)).threshold_scale


# -- ANB by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t_gpu", "t_cpu", "t_io", "expected"),
    [
        # delta = 8 - max(4, 2) = 4 ms: 1 - 0.05 * 4/8
        (4e-3, 8e-3, 2e-3, 1 - 0.05 * 4e-3 / (8e-3 + 1e-8)),
        # the link is the slower of the two: delta = 8 - 6 = 2 ms: 1 - 0.05 * 2/8
        (4e-3, 8e-3, 6e-3, 1 - 0.05 * 2e-3 / (8e-3 + 1e-8)),
        # only the CPU worked: 1 - 0.05 * 8/8
        (0.0, 8e-3, 0.0, 1 - 0.05 * 8e-3 / (8e-3 + 1e-8)),
        # delta = 3 - 10 < 0 and T_io - T_gpu = 6 ms: 1 + 0.08 * 6/10
        (4e-3, 3e-3, 10e-3, 1 + 0.08 * 6e-3 / (10e-3 + 1e-8)),
        # delta = 0 is not above 0, and the link is slower than the GPU: 1 + 0.08 * 6/10
        (4e-3, 10e-3, 10e-3, 1 + 0.08 * 6e-3 / (10e-3 + 1e-8)),
        # the GPU is the slowest, or as slow as the link: nothing to balance
        (10e-3, 3e-3, 4e-3, 1.0),
        (10e-3, 10e-3, 10e-3, 1.0),
        (10e-3, 10e-3, 3e-3, 1.0),
        (0.0, 0.0, 0.0, 1.0),
    ],
)
def test_one_update(t_gpu: float, t_cpu: float, t_io: float, expected: float) -> None:
    assert scale_after(t_gpu, t_cpu, t_io) == expected


def test_about_as_large_as_worked_out_by_hand() -> None:
    assert scale_after(4e-3, 8e-3, 2e-3) == pytest.approx(0.975, abs=1e-6)
    assert scale_after(4e-3, 3e-3, 10e-3) == pytest.approx(1.048, abs=1e-6)


def test_epsilon_rules_where_there_is_next_to_nothing() -> None:
    """T_cpu = 1e-8 s, as long as epsilon: 1 - 0.05 * 1/2."""
    assert scale_after(0.0, 1e-8, 0.0) == pytest.approx(0.975, rel=1e-12)


def test_it_remembers() -> None:
    anb = Anb(eta_up=0.5, eta_down=0.25)
    assert anb.knobs == Knobs()
    # 1 - 0.5 * 1/2 = 0.75, again 0.5; then + 0.25 * 1/2 = 0.625
    for times, expected in (((1, 2, 0), 0.75), ((1, 2, 0), 0.5), ((1, 0, 2), 0.625)):
        knobs = anb.update(record(*times))
        assert knobs.threshold_scale == pytest.approx(expected, abs=1e-7)
        assert anb.knobs == knobs
        assert (knobs.max_swaps, knobs.decay) == (None, None)


def test_it_stops_at_its_ends() -> None:
    anb = Anb()
    slow_cpu, slow_link = record(0, 1, 0), record(0, 0, 1)
    falling = [anb.update(slow_cpu).threshold_scale for _ in range(20)]
    assert falling[:11] == pytest.approx([1 - 0.05 * k for k in range(1, 12)], abs=1e-6)
    assert set(falling[12:]) == {0.40}
    rising = [anb.update(slow_link).threshold_scale for _ in range(30)]
    assert rising[:19] == pytest.approx([0.4 + 0.08 * k for k in range(1, 20)], abs=1e-5)
    assert set(rising[20:]) == {2.00}
    ours = Anb(lowest=0.9, highest=1.1)
    assert [ours.update(slow_cpu).threshold_scale for _ in range(4)][2:] == [0.9, 0.9]
    assert [ours.update(slow_link).threshold_scale for _ in range(5)][3:] == [1.1, 1.1]


@given(t_gpu=TIMES, t_cpu=TIMES, t_io=TIMES, initial=st.floats(0.40, 2.00))
def test_directions_and_range(t_gpu: float, t_cpu: float, t_io: float, initial: float) -> None:
    after = scale_after(t_gpu, t_cpu, t_io, initial=initial)
    assert 0.40 <= after <= 2.00
    if t_cpu > max(t_gpu, t_io):
        assert initial - 0.05 <= after <= initial or after == 0.40
    elif t_io > t_gpu:
        assert initial <= after <= initial + 0.08 or after == 2.00
    else:
        assert after == initial


def test_it_is_a_ratchet() -> None:
    """Once lowered it stays there while the CPU and the link are hidden behind the GPU."""
    anb = Anb()
    for _ in range(4):
        anb.update(record(1.0, 2.0, 0.5))
    low = anb.knobs.threshold_scale
    assert low < 0.95
    for _ in range(1000):
        assert anb.update(record(1.0, 0.1, 0.9)).threshold_scale == low


@pytest.mark.parametrize("bad", [nan, inf, -1e-3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_unknown_times_are_refused(bad: float, at: int) -> None:
    times = [1.0, 1.0, 1.0]
    times[at] = bad
    anb = Anb()
    with pytest.raises(KairoxError, match=f"gpu_busy_s, cpu_busy_s and swap_busy_s.*{bad}"):
        anb.update(record(*times))
    assert anb.knobs == Knobs()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lowest": 0.0},
        {"lowest": 1.5},
        {"highest": 0.9},
        {"highest": inf},
        {"initial": nan},
        {"initial": 3.0},
        {"eta_up": -0.1},
        {"eta_down": nan},
    ],
)
def test_anb_parameters_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(KairoxError, match="ANB"):
        Anb(**wrong)


# -- the prose law by hand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t_gpu", "t_cpu", "t_io", "gamma"),
    [
        (4e-3, 8e-3, 2e-3, 1 + 0.1 * 4),  # delta = 8 - 4 = 4 ms
        (4e-3, 8e-3, 6e-3, 1 + 0.1 * 2),  # delta = 8 - 6 = 2 ms
        (2e-3, 3e-3, 6e-3, 1 - 0.1 * 3),  # the link is the slowest: |3 - 6| = 3 ms
        (0.0, 0.0, 2e-3, 1 - 0.1 * 2),
        (9e-3, 3e-3, 6e-3, 1.0),  # the GPU is
        (6e-3, 3e-3, 6e-3, 1.0),  # as slow as the link
        (3e-3, 6e-3, 6e-3, 1.0),  # delta = 0
        (0.0, 0.0, 0.0, 1.0),
    ],
)
def test_one_update_of_the_prose_law(t_gpu: float, t_cpu: float, t_io: float, gamma: float) -> None:
    prose = AnbProse(eta=0.1)
    knobs = prose.update(record(t_gpu, t_cpu, t_io))
    assert prose.gamma == pytest.approx(gamma, rel=1e-12)
    assert knobs.threshold_scale == pytest.approx(1 / gamma, rel=1e-12)
    assert knobs == prose.knobs


def test_the_prose_law_is_of_absolute_times() -> None:
    """A machine ten times slower moves ten times as far; the listing moves as far."""
    fast, slow = record(1e-3, 3e-3, 0.0), record(10e-3, 30e-3, 0.0)
    assert AnbProse().update(fast).threshold_scale == pytest.approx(1 / (1 + 0.005 * 2))
    assert AnbProse().update(slow).threshold_scale == pytest.approx(1 / (1 + 0.005 * 20))
    assert Anb().update(fast).threshold_scale == pytest.approx(
        Anb().update(slow).threshold_scale, rel=1e-6
    )


def test_the_prose_law_about_matches_the_listing_in_its_demo() -> None:
    """Its first steps: T_gpu 8.5 ms, T_cpu 10.8 ms, and the modifier goes to .989."""
    demo = record(8.5e-3, 10.8e-3, 0.0)
    assert AnbProse().update(demo).threshold_scale == pytest.approx(0.989, abs=5e-4)
    assert Anb().update(demo).threshold_scale == pytest.approx(0.989, abs=5e-4)


def test_the_prose_law_stops_at_its_ends_and_comes_back_at_once() -> None:
    prose = AnbProse(eta=0.1)
    slow_cpu, slow_link = record(0, 10e-3, 0), record(0, 0, 10e-3)
    assert [prose.update(slow_cpu).threshold_scale for _ in range(4)][1:] == [0.4] * 3
    assert prose.gamma == 2.5  # not beyond, so that one step back shows
    # 2.5 - 1 = 1.5, then .5 (the end is 1/2)
    assert prose.update(slow_link).threshold_scale == pytest.approx(1 / 1.5)
    assert [prose.update(slow_link).threshold_scale for _ in range(3)] == [2.0] * 3
    assert prose.gamma == 0.5


@given(t_gpu=TIMES, t_cpu=TIMES, t_io=TIMES, initial=st.floats(0.40, 2.00))
def test_range_of_the_prose_law(t_gpu: float, t_cpu: float, t_io: float, initial: float) -> None:
    after = AnbProse(initial=initial).update(record(t_gpu, t_cpu, t_io)).threshold_scale
    assert 0.40 <= after <= 2.00
    if t_cpu > max(t_gpu, t_io):
        assert after <= initial + 1e-12
    elif t_io > max(t_cpu, t_gpu):
        assert after >= initial - 1e-12
    else:
        assert after == initial


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AnbProse(eta=-1.0), "anb_prose's eta"),
        (lambda: AnbProse(eta=inf), "anb_prose's eta"),
        (lambda: AnbProse(lowest=0.0), "anb_prose needs 0 < lowest"),
        (lambda: AnbProse(initial=3.0), "anb_prose needs 0 < lowest"),
        (lambda: AnbPaper(alpha=1.0), "anb_paper's alpha"),
        (lambda: AnbPaper(initial=0.99), "anb_paper needs 0 < lowest"),
        (lambda: AnbPaper(highest=1.0), "anb_paper needs 0 < lowest"),
        (lambda: AnbPaper(lowest=nan), "anb_paper needs 0 < lowest"),
        (lambda: SwapCap(rate=-0.05), "swap_cap's rate"),
        (lambda: SwapCap(rate=nan), "swap_cap's rate"),
    ],
)
def test_parameters_that_cannot_be(make, says: str) -> None:
    with pytest.raises(KairoxError, match=says):
        make()


# -- fixed ----------------------------------------------------------------------------------------


def test_fixed_never_moves() -> None:
    fixed = Fixed(0.7, 3)
    assert fixed.update(record(1, 9, 1)) == Knobs(0.7, 3) == fixed.knobs
    assert fixed.update(record(nan, nan, nan)) == Knobs(0.7, 3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"threshold_scale": 0.0}, "threshold_scale must be above 0"),
        ({"threshold_scale": nan}, "threshold_scale must be above 0"),
        ({"threshold_scale": inf}, "threshold_scale must be above 0"),
        ({"max_swaps": -1}, "max_swaps must be 0 or more"),
    ],
)
def test_fixed_parameters_that_cannot_be(wrong, says: str) -> None:
    with pytest.raises(KairoxError, match=says):
        Fixed(**wrong)


# -- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_keeps_its_contract(name: str) -> None:
    controller, twin = CONTROLLERS[name](), CONTROLLERS[name]()
    assert controller.sets <= KNOBS
    default = Knobs()
    assert controller.knobs == default
    for either in (controller, twin):
        either.start([40, 40])
    seen_values = {controller.knobs}
    for step in range(50):
        seen = record(1e-3, 1e-3 * ((step * 7) % 5), 1e-3 * ((step * 3) % 4))
        layers = waits([step % 3 == 0, step % 5 == 0], [0.0, step % 2])
        knobs = controller.update(seen, layers)
        assert knobs == controller.knobs == twin.update(seen, layers)
        for layer in (0, 1):
            for knob in KNOBS - controller.sets:
                assert getattr(knobs.at(layer), knob) == getattr(default, knob)
        seen_values.add(knobs)
    assert (len(seen_values) > 5) == bool(controller.sets)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_reads_knobs_that_exist(name: str) -> None:
    assert POLICIES[name].knobs <= KNOBS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_nothing_in_common_is_refused_naming_both(policy: str, controller: str) -> None:
    made = Run(4, [2], [], "after", "active").policy(policy)
    control: Controller = CONTROLLERS[controller]()
    if not control.sets or control.sets & made.knobs:
        assert NeuronCache(1, 4, 2, made, control).controller is control
        return
    with pytest.raises(KairoxError) as error:
        NeuronCache(1, 4, 2, made, control)
    assert type(made).__name__ in str(error.value)
    assert type(control).__name__ in str(error.value)
    assert "nothing in common" in str(error.value)


def test_who_goes_with_whom() -> None:
    takers = {
        name: {p for p, policy in POLICIES.items() if policy.knobs & controller.sets}
        for name, controller in CONTROLLERS.items()
    }
    assert takers["fixed"] == set()  # it sets nothing, and goes with all
    assert takers["anb"] == takers["anb_prose"] == {"tam"}
    assert takers["anb_paper"] == {"tam_paper", "tam_released"}
    assert takers["swap_cap"] >= {"tam", "tam_paper", "tam_released", "topk", "qinfer", "lru"}
    assert not takers["swap_cap"] & {"static", "all", "none"}


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
def test_anb_is_refused_with_these(policy: str) -> None:
    made = build_policy(policy, 1, 4)
    with pytest.raises(KairoxError, match=f"Anb .*{type(made).__name__}"):
        NeuronCache(1, 4, 2, made, Anb())

"""The guide's constants: what they say, what is read into them, and what they do not say."""

from typing import Any

import pytest

from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import bundled_profiles, load_profile
from kairox_sim.model import find_shape, with_ffn_weights

SHAPE = find_shape("prosparse-13b")  # rows of 5,120 weights, as the guide's


def guide(weights: str | None = None, gating: str = "oracle", **more: Any) -> CostModel:
    shape = SHAPE if weights is None else with_ffn_weights(SHAPE, weights)
    return costs_for(
        load_profile("guide"), shape, gating, trace_layers=40, trace_neurons=SHAPE.n_neurons,
        predictor="lookahead", **more,
    )  # fmt: skip


def test_a_neuron_costs_what_the_guide_says() -> None:
    costs = guide()
    assert costs.ffn_gpu_s(1, 1) == pytest.approx(0.8e-6)
    assert costs.swap_s(1) == pytest.approx(1.8e-6)
    assert costs.ffn_cpu_s(1, 1) == pytest.approx(15e-6)
    assert costs.head_s(1) == pytest.approx(8.5e-3, rel=1e-6)


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.5), ("q8_0", 17 / 32), ("q4_0", 9 / 32)])
def test_rows_in_another_format_are_charged_by_their_bytes(weights: str, share: float) -> None:
    fp16, other = guide(), guide(weights)
    assert other.ffn_cpu_s(100, 1) == pytest.approx(share * fp16.ffn_cpu_s(100, 1), rel=1e-3)
    assert other.swap_s(100) == pytest.approx(share * fp16.swap_s(100), rel=1e-3)


@pytest.mark.parametrize("gating", ["exact", "screened"])
def test_deciding_costs_nothing(gating: str) -> None:
    assert guide(gating=gating).gate_s(1) < 1e-9


def test_fixed_point_is_refused_with_what_to_do() -> None:
    with pytest.raises(KairoxError) as error:
        guide(numerics="deterministic")
    for part in ("'guide' does not say", "[deterministic]", "cpu_ratio and gpu_ratio", "calibrate"):
        assert part in str(error.value)


def test_only_the_guides_constants_have_no_ratios() -> None:
    without = [name for name in bundled_profiles() if load_profile(name).deterministic is None]
    assert without == ["guide"]

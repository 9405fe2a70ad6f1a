"""What fixed-point sums cost: ratios of a profile, wider partial sums, which profile is valid."""

from dataclasses import replace

import pytest

from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import Deterministic, HardwareProfile, Quantity, load_profile
from kairox_sim.model import find_shape


def _costs(profile: HardwareProfile, numerics: str, gating: str = "exact") -> CostModel:
    return costs_for(
        profile,
        find_shape("prosparse-7b"),
        gating,
        trace_layers=32,
        trace_neurons=11008,
        predictor="lookahead",
        numerics=numerics,  # type: ignore[arg-type]
    )


def _pc1(cpu: float, gpu: float) -> HardwareProfile:
    ratios = Deterministic(
        cpu_ratio=Quantity(value=cpu, source="test"), gpu_ratio=Quantity(value=gpu, source="test")
    )
    return load_profile("pc1").model_copy(update={"deterministic": ratios})


def test_passes_take_the_ratio_longer_beyond_their_fixed_cost() -> None:
    fast, exact = (_costs(_pc1(2.0, 3.0), numerics) for numerics in ("fast", "deterministic"))
    for n in (1, 1000):
        assert exact.ffn_cpu_s(n, 1) - exact.cpu_fixed_s == pytest.approx(
            2 * (fast.ffn_cpu_s(n, 1) - fast.cpu_fixed_s)
        )
        assert exact.ffn_gpu_s(n, 64) - exact.ffn_gpu.fixed_s == pytest.approx(
            3 * (fast.ffn_gpu_s(n, 64) - fast.ffn_gpu.fixed_s)
        )
    assert exact.gate_s(1) - exact.gate.fixed_s == pytest.approx(
        3 * (fast.gate_s(1) - fast.gate.fixed_s)
    )
    # A guess needs no exact sums, and nothing else of the model has any.
    assert exact.predict_s(1) == fast.predict_s(1)
    assert exact.attention_s(1, 100) == fast.attention_s(1, 100)
    assert exact.head_s(1) == fast.head_s(1)


def test_partial_sums_are_eight_bytes() -> None:
    fast, exact = (_costs(_pc1(1.0, 1.0), numerics) for numerics in ("fast", "deterministic"))
    assert (fast.act_h2d_bytes(3), exact.act_h2d_bytes(3)) == (3 * 4096 * 4, 3 * 4096 * 8)
    assert replace(exact, numerics="fast") == fast


def test_a_machine_that_does_not_say_is_refused() -> None:
    pc1 = load_profile("pc1").model_copy(update={"deterministic": None})
    with pytest.raises(KairoxError, match=r"does not say.*\[deterministic\].*calibrate"):
        _costs(pc1, "deterministic")


@pytest.mark.parametrize("made_with", ["fast", "deterministic", None])
def test_a_calibration_is_valid_for_its_own_numerics(made_with: str | None) -> None:
    profile = _pc1(2.0, 3.0).model_copy(
        update={"kind": "calibrated", "calibrated_numerics": made_with}
    )
    own = made_with or "fast"
    other = "fast" if own == "deterministic" else "deterministic"
    as_timed = _costs(load_profile("pc1"), "fast").ffn_cpu_s(1000, 1)
    assert _costs(profile, own).ffn_cpu_s(1000, 1) == as_timed  # no ratio on top
    with pytest.raises(KairoxError, match=f"calibrated with numerics '{own}'"):
        _costs(profile, other)

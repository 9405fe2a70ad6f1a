"""Bounds of fixed-point sums: no sum is above its bound, and what cannot be bounded is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_exec.ffn_spec import ACTIVATIONS, FIXED_LIMIT, FfnSpec
from kairox_exec.formats import FORMATS, decode, encode
from kairox_exec.kernels import torch_ref
from kairox_exec.kernels.fixed_point import SumBounds
from kairox_sim.errors import KairoxError


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    fmt=st.sampled_from(FORMATS),
    activation=st.sampled_from(ACTIVATIONS),
    gated=st.booleans(),
    biased=st.booleans(),
    size=st.sampled_from([1e-20, 0.01, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=100)
def test_no_sum_exceeds_its_bound(
    fmt: str, activation: str, gated: bool, biased: bool, size: float, seed: int
) -> None:
    d, n = 64, 50
    gated = gated or activation == "drelu"
    spec = FfnSpec(d, gated, activation, 0.0, fmt, "deterministic")  # type: ignore[arg-type]
    rows = encode(normal(n, spec.rows_per_neuron, d, seed=seed), fmt)
    x = normal(2, d, seed=seed + 1) * size
    gate_b, up_b = (normal(n, seed=seed + 2) if biased else None for _ in range(2))
    bounds = SumBounds.of(rows[:, 0], rows, spec, gate_b, up_b)
    weights, wide = decode(rows, fmt).double(), x.double()
    act = torch_ref.gate_all(x, rows[:, 0], gate_b, spec)
    dots = wide.abs() @ weights[:, 0].abs().T
    a = act.double().abs()
    if gated:
        up = wide @ weights[:, 1].T
        a = a * (up if up_b is None else up + up_b.double()).abs()
        dots = torch.maximum(dots, wide.abs() @ weights[:, 1].abs().T)
    largest = max(float(dots.max()), float((a @ weights[:, -1].abs()).max()))
    assert largest <= bounds.largest(x) * (1 + 1e-6)
    assert largest <= bounds.largest(x, act) * (1 + 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_refused(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    with pytest.raises(KairoxError, match="layer 5's FFN is NaN or infinite"):
        bounds_of(torch.ones(3, 2, 8)).check(x, layer=5)


def bounds_of(rows: torch.Tensor) -> SumBounds:
    spec = FfnSpec(rows.shape[2], False, "relu", 0.0, "float32", "deterministic")
    return SumBounds.of(rows[:, 0], rows, spec)


def test_by_hand() -> None:
    """Two neurons of fc1 norms 3 and 4 whose fc2 rows share an output."""
    rows = torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[0.0, 4.0], [-2.0, 1.0]]])
    bounds = bounds_of(rows)
    assert bounds.coefficients == (0.0, 3.0 * 1 + 4.0 * 2)
    x = torch.tensor([[3.0, 4.0]])
    assert bounds.largest(x) == 11.0 * 5
    assert bounds.largest(x, torch.tensor([[9.0, 16.0]])) == 9.0 * 1 + 16.0 * 2


def test_the_limit_is_the_last_that_passes() -> None:
    bounds = bounds_of(torch.tensor([[[1.0], [1.0]]]))
    bounds.check(torch.tensor([[FIXED_LIMIT]]), layer=0)
    with pytest.raises(KairoxError, match=r"layer 2 may reach 4.19e\+06.*--numerics fast"):
        bounds.check(torch.tensor([[FIXED_LIMIT * (1 + 1e-6)]]), layer=2)


def test_known_gates_save_a_layer_that_norms_refuse() -> None:
    rows = torch.full((1000, 2, 4), 10.0)
    bounds, x = bounds_of(rows), torch.tensor([[100.0, -100.0, 100.0, -100.0]])
    with pytest.raises(KairoxError, match="may reach"):
        bounds.check(x, layer=0)
    spec = FfnSpec(4, False, "relu", 0.0, "float32", "deterministic")
    bounds.check(x, torch_ref.gate_all(x, rows[:, 0], None, spec), layer=0)


def test_damaged_weights_are_found() -> None:
    rows = torch.ones(3, 2, 8)
    rows[1, 1, 2] = float("nan")
    with pytest.raises(KairoxError, match="a weight is NaN"):
        bounds_of(rows)

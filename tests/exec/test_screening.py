"""A screen misses no neuron that any kernel would fire, whatever the weights and the input."""

from __future__ import annotations

from types import ModuleType
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_exec.ffn_spec import ACTIVATIONS, Activation, FfnSpec
from kairox_exec.formats import FORMATS, Format, decode, encode
from kairox_exec.kernels import numba_cpu, torch_ref
from kairox_exec.kernels.screening import (
    Screen,
    candidates,
    make_screen,
    smallest_margin,
    upper_bounds,
)
from kairox_sim.errors import KairoxError

KERNELS = (torch_ref, numba_cpu)
WEIGHTS = ("normal", "zeros", "denormal", "huge", "outlier", "equal", "wide")
INPUTS = ("normal", "zeros", "denormal", "large", "one", "wide", "aimed")


def some(kind: str, n: int, d: int, g: torch.Generator) -> torch.Tensor:
    w = torch.randn((n, d), generator=g)
    match kind:
        case "zeros":
            return torch.copysign(torch.zeros_like(w), w)
        case "denormal":
            return w * 1e-42
        case "huge":
            return w * 1e37
        case "large":
            return w * 1e4
        case "outlier":  # the rest of the row is lost in the rounding of its codes
            w[:, 0] *= 1e4
        case "equal":
            return torch.full_like(w, 0.1) * torch.sign(w[:, :1])
        case "one":
            return torch.zeros_like(w).scatter(1, torch.randint(0, d, (n, 1), generator=g), 1.0)
        case "wide":
            return w * torch.exp2(torch.randint(-60, 12, w.shape, generator=g).float())
    return w


def spec_of(activation: str, threshold: float, d: int, fmt: str, numerics: str) -> FfnSpec:
    return FfnSpec(
        d,
        True,
        cast(Activation, activation),
        threshold,
        cast(Format, fmt),
        "fast" if numerics == "fast" else "deterministic",
    )


def fires(kernel: ModuleType | str, case: tuple[torch.Tensor, ...], spec: FfnSpec) -> torch.Tensor:
    x, rows, bias = case
    if isinstance(kernel, ModuleType):
        act: torch.Tensor = kernel.gate_all(x, rows, bias, spec)
        return act != 0
    gate = x.double() @ decode(rows, spec.fmt).double().T + bias.double()  # float64
    return torch_ref.activate(gate, spec) != 0


@given(
    weights=st.sampled_from(WEIGHTS),
    inputs=st.sampled_from(INPUTS),
    fmt=st.sampled_from(FORMATS),
    activation=st.sampled_from(ACTIVATIONS),
    threshold=st.sampled_from([0.0, 0.01, 0.2, 3.0]),
    biases=st.sampled_from(["none", "normal", "large", "to the threshold"]),
    d=st.sampled_from([32, 64, 192]),
    seed=st.integers(0, 99_999),
)
@settings(deadline=None, max_examples=400)
def test_no_active_neuron_is_missed(
    weights: str,
    inputs: str,
    fmt: str,
    activation: str,
    threshold: float,
    biases: str,
    d: int,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    n, n_tokens = 40, 3
    if weights == "huge" and fmt in ("float16", "q8_0", "q4_0"):
        weights = "outlier"  # they cannot hold it
    rows = encode(some(weights, n, d, g), fmt)
    x = some(inputs, n_tokens, d, g) if inputs != "aimed" else some("normal", n_tokens, d, g)
    if inputs == "aimed":  # what is lost in the codes, magnified: the bound is nearly met
        screen = make_screen(rows, fmt)
        lost = decode(rows, fmt) - screen.codes.float() * screen.scale[:, None]
        x = torch.nn.functional.normalize(lost[:n_tokens], dim=1) * 10
    bias = torch.zeros(n)
    if biases in ("normal", "large"):
        bias = torch.randn(n, generator=g) * (1 if biases == "normal" else 1e6)
    elif biases == "to the threshold":  # gates end within rounding of it
        gate = torch_ref.gate_values(x, rows, None, spec_of("relu", 0, d, fmt, "fast"))[0]
        bias = torch.nan_to_num(threshold - gate, nan=0.0, posinf=0.0, neginf=0.0)
    screen = make_screen(rows, fmt)
    for numerics in ("fast", "deterministic"):
        spec = spec_of(activation, threshold, d, fmt, numerics)
        found = [candidates(x, screen, bias, spec, dots=k.code_dots) for k in KERNELS]
        for truth in (*KERNELS, "float64"):
            if numerics == "deterministic" and (truth == "float64" or too_large(x, rows, spec)):
                continue
            active = fires(truth, (x, rows, bias), spec)
            for may_fire in found:
                assert may_fire.dtype == torch.bool
                assert not bool((active & ~may_fire).any())
            assert smallest_margin(x, screen, bias, spec, active) >= 0


def too_large(x: torch.Tensor, rows: torch.Tensor, spec: FfnSpec) -> bool:
    """Fixed point refuses such sums before any kernel runs."""
    size = x.double().abs() @ decode(rows, spec.fmt).double().abs().T
    return float(size.max()) >= 2.0**22


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_upper_bounds_are_above_every_gate_and_near_it(fmt: str, numerics: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, rows = some("normal", 4, 512, g), encode(some("normal", 300, 512, g), fmt)
    bias = torch.randn(300, generator=g)
    spec, screen = spec_of("relu", 0.0, 512, fmt, numerics), make_screen(rows, fmt)
    scale = x.norm(dim=1)[:, None] * decode(rows, fmt).norm(dim=1)
    for kernel in KERNELS:
        room = upper_bounds(x, screen, bias, dots=kernel.code_dots)
        room = room - kernel.gate_values(x, rows, bias, spec).double()
        assert float(room.min()) > 0
        # Codes are off by 0.5 / 127 of the largest weight at most: some 1 % of a norm, and back.
        assert float((room / scale).max()) < 0.03


def test_a_screen_lets_few_silent_neurons_through() -> None:
    g = torch.Generator().manual_seed(0)
    x, rows = some("normal", 8, 1024, g), some("normal", 500, 1024, g) / 32
    spec, screen = spec_of("relu", 0.0, 1024, "float32", "fast"), make_screen(rows, "float32")
    bias = torch.full((500,), -1.0)  # 16 % active
    active = fires(torch_ref, (x, rows, bias), spec)
    share = [float(m.float().mean()) for m in (active, candidates(x, screen, bias, spec))]
    assert 0.1 < share[0] < share[1] < 2.5 * share[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__[20:])
def test_of_a_token_that_is_not_finite_everything_is_a_candidate(
    bad: float, activation: str, kernel: ModuleType
) -> None:
    g = torch.Generator().manual_seed(0)
    x, rows = some("normal", 2, 64, g), some("normal", 20, 64, g)
    rows[3] = 0
    x[1, 5] = bad
    spec, screen = spec_of(activation, 0.5, 64, "float32", "fast"), make_screen(rows, "float32")
    may_fire = candidates(x, screen, torch.full((20,), -1e3), spec, dots=kernel.code_dots)
    assert not bool(may_fire[0].any())
    assert bool(may_fire[1].all())


def test_sums_that_overflow_are_candidates() -> None:
    """The float32 gate overflows to infinity though the exact one is far below the threshold."""
    rows = torch.tensor([[3e38, 3e38, -3e38, -3e38]])
    x = torch.tensor([[1.0, 1.0, 1.0, 1.2]])
    spec = spec_of("relu", 0.0, 4, "float32", "fast")
    assert bool(candidates(x, make_screen(rows, "float32"), None, spec).all())


def test_of_nothing_nothing_fires() -> None:
    """x = 0: the bound is the bias itself."""
    rows, bias = some("normal", 3, 32, torch.Generator()), torch.tensor([-1e-30, 0.0, 1e-30])
    spec, screen = spec_of("relu", 0.0, 32, "float32", "fast"), make_screen(rows, "float32")
    assert candidates(torch.zeros(1, 32), screen, bias, spec).tolist() == [[False, False, True]]


def test_silu_is_largest_inside_an_interval() -> None:
    """Gates from -3 to -1: |silu| is 0.14 and 0.27 at the ends, and 0.2785 at -1.28."""
    screen = Screen(torch.tensor([[-2]], dtype=torch.int8), torch.ones(1), torch.ones(1))
    x = torch.ones(1, 1)
    found = [candidates(x, screen, None, spec_of("silu", t, 1, "float32", "fast")).item()
             for t in (0.275, 0.279)]  # fmt: skip
    assert found == [True, False]


def test_codes_by_hand() -> None:
    screen = make_screen(torch.tensor([[127.0, -63.0, 0.0, 1.0], [0.0, 0, 0, 0]]), "float32")
    assert screen.codes.tolist() == [[127, -63, 0, 1], [0, 0, 0, 0]]
    assert screen.scale.tolist() == [1.0, 0.0]
    assert 0 < float(screen.error[0]) < 2e-4  # rounding of sums alone
    assert float(screen.error[1]) == 0.0
    assert screen.stored_bytes == 2 * 4 + 2 * 4 + 2 * 4


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KairoxError, match="NaN or infinite"):
        make_screen(torch.tensor([[1.0, float("nan")]]), "float32")
    screen, spec = make_screen(torch.ones(2, 8), "float32"), spec_of("relu", 0, 8, "float32", "")
    with pytest.raises(ValueError, match=r"expected float32 \[tokens, 8\]"):
        candidates(torch.ones(1, 7), screen, None, spec)

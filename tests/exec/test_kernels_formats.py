"""Every format, activation and numerics: numba against torch, and both against float64.

Deterministic results are compared with torch.equal: between kernels, and over order, splits,
needless neurons and chunks of tokens. Fast ones with a float64 FFN of the decoded weights; two
float32 sums of d and n terms are off by (d + n) 2^-24 of the magnitudes summed, and 1e-5 of that is
allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_exec.ffn_spec import ACTIVATIONS, FfnSpec
from kairox_exec.formats import FORMATS, decode, encode
from kairox_exec.kernels import numba_cpu, torch_ref

KERNELS = (torch_ref, numba_cpu)
# Of kinds of values per weight and input: ordinary; nearly nothing; zeros of both signs; a wide
# range, as large as deterministic sums allow.
VALUES = ("normal", "denormal", "zeros", "wide")


@dataclass(frozen=True)
class Case:
    spec: FfnSpec
    rows: torch.Tensor  # stored, every row
    x: torch.Tensor
    gate_b: torch.Tensor | None
    up_b: torch.Tensor | None

    @property
    def n(self) -> int:
        return self.rows.shape[0]

    def gate(self, kernel: ModuleType) -> torch.Tensor:
        act: torch.Tensor = kernel.gate_all(self.x, self.rows[:, 0], self.gate_b, self.spec)
        return act

    def union(
        self,
        kernel: ModuleType,
        index: torch.Tensor,
        *,
        act: torch.Tensor | None = None,
        fired: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = kernel.ffn_union(
            self.x if x is None else x,
            self.rows if act is None else self.rows[:, 1:],
            index,
            self.spec,
            act=None if act is None else act[:, index],
            gate_b=None if self.gate_b is None else self.gate_b[index],
            up_b=None if self.up_b is None else self.up_b[index],
            fired=fired,
        )
        return y


def values(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if kind == "normal":
        return normal
    if kind == "denormal":
        return normal * 1e-41
    if kind == "zeros":
        return torch.copysign(torch.zeros(shape), normal)
    return normal * torch.exp2(torch.randint(-30, 7, shape, generator=generator).float())


def make(
    fmt: str,
    activation: str,
    numerics: str,
    *,
    d: int = 64,
    n: int = 90,
    n_tokens: int = 1,
    gated: bool = True,
    biased: bool = True,
    kinds: tuple[str, str] = ("normal", "normal"),
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    threshold = 0.1 if activation in ("relu", "silu") else 0.0
    spec = FfnSpec(d, gated, activation, threshold, fmt, numerics)  # type: ignore[arg-type]
    weights = values(kinds[0], (n, spec.rows_per_neuron, d), g) / d**0.5
    return Case(
        spec,
        encode(weights, fmt),
        values(kinds[1], (n_tokens, d), g),
        torch.randn(n, generator=g) / 4 if biased else None,
        torch.randn(n, generator=g) if biased and gated else None,
    )


@st.composite
def cases(draw: st.DrawFn, numerics: str) -> Case:
    fmt = draw(st.sampled_from(FORMATS))
    whole = fmt in ("q8_0", "q4_0")
    activation = draw(st.sampled_from(ACTIVATIONS))
    return make(
        fmt,
        activation,
        numerics,
        d=draw(st.sampled_from([32, 64, 96] if whole else [1, 7, 31, 32, 33, 64, 95])),
        n=draw(st.integers(1, 80)),
        n_tokens=draw(st.integers(1, 3)),
        gated=activation == "drelu" or draw(st.booleans()),
        biased=draw(st.booleans()),
        kinds=(draw(st.sampled_from(VALUES)), draw(st.sampled_from(VALUES))),
        seed=draw(st.integers(0, 9999)),
    )


@given(case=cases("deterministic"), data=st.data())
@settings(deadline=None, max_examples=150)
def test_deterministic_bits_are_the_same_everywhere(case: Case, data: st.DataObject) -> None:
    """Kernels, order, splits, neurons that do not fire, one token or several, act given or not."""
    act = case.gate(torch_ref)
    assert torch.equal(act, case.gate(numba_cpu))
    everyone = torch.arange(case.n)
    whole = case.union(torch_ref, everyone)
    assert whole.dtype == torch.int64
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999), label="order"))
    order = torch.randperm(case.n, generator=g)
    cut = data.draw(st.integers(0, case.n), label="cut")
    active = torch.nonzero((act != 0).any(dim=0))[:, 0]
    for kernel in KERNELS:
        parts = [
            case.union(kernel, part, act=act if i % 2 else None)
            for i, part in enumerate((order[:cut], order[cut:]))
        ]
        assert torch.equal(parts[0] + parts[1], whole)
        assert torch.equal(case.union(kernel, active), whole)  # the others add exactly nothing
        tokens = [case.union(kernel, order, x=token[None]) for token in case.x]
        assert torch.equal(torch.cat(tokens), whole)
    assert torch.equal(torch_ref.total(whole), numba_cpu.total(whole))


@given(case=cases("fast"), act_given=st.booleans())
@settings(deadline=None, max_examples=150)
def test_fast_is_a_float64_ffn_within_rounding(case: Case, act_given: bool) -> None:
    """Given `act`, so that a gate at the threshold cannot be decided both ways."""
    weights = decode(case.rows, case.spec.fmt).double()
    act = case.gate(torch_ref)
    everyone = torch.arange(case.n)
    x = case.x.double()
    a, size = act.double(), act.double().abs()
    if case.spec.gated:
        up, up_size = x @ weights[:, 1].T, x.abs() @ weights[:, 1].abs().T
        if case.up_b is not None:
            up, up_size = up + case.up_b.double(), up_size + case.up_b.double().abs()
        size = size * up_size
        a = a * (up.clamp(min=0) if case.spec.activation == "drelu" else up)
    tolerance = 1e-5 * (size @ weights[:, -1].abs()) + 1e-30
    for kernel in KERNELS:
        y = case.union(kernel, everyone, act=act)
        assert y.dtype == torch.float32
        assert bool(((y.double() - a @ weights[:, -1]).abs() <= tolerance).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_fast_gates_are_float64s_within_rounding(fmt: str) -> None:
    case = make(fmt, "relu", "fast", n_tokens=3, d=96)
    weights, x = decode(case.rows[:, 0], fmt).double(), case.x.double()
    assert case.gate_b is not None
    expected = x @ weights.T + case.gate_b.double()
    tolerance = 1e-6 * (x.abs() @ weights.abs().T + 1)
    for kernel in KERNELS:
        gate = kernel.gate_values(case.x, case.rows[:, 0], case.gate_b, case.spec)
        assert bool(((gate.double() - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fast_numba_bits_do_not_depend_on_the_company(fmt: str, activation: str) -> None:
    """Other rows of the call, other tokens, neurons that do not fire, act given or computed."""
    case = make(fmt, activation, "fast", n_tokens=5)
    act = case.gate(numba_cpu)
    some = torch.tensor([3, 50, 89])
    bias = case.gate_b[some] if case.gate_b is not None else None
    assert torch.equal(
        numba_cpu.gate_all(case.x, case.rows[some, 0], bias, case.spec), act[:, some]
    )
    whole = case.union(numba_cpu, torch.arange(case.n))
    assert torch.equal(case.union(numba_cpu, torch.arange(case.n), act=act), whole)
    for t in range(5):
        x = case.x[t : t + 1]
        active = torch.nonzero(act[t])[:, 0]
        assert 0 < len(active) < case.n
        assert torch.equal(case.union(numba_cpu, active, x=x), whole[t : t + 1])


@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("act_given", [False, True])
def test_fired_says_which_entries_add_something(
    numerics: str, activation: str, act_given: bool
) -> None:
    case = make("float32", activation, numerics, n_tokens=2)
    act = case.gate(torch_ref)
    expected = act != 0
    if activation == "drelu":
        assert case.up_b is not None
        up = case.x @ decode(case.rows[:, 1], "float32").T + case.up_b
        expected &= up > 0
    assert 0.1 < float(expected.float().mean()) < 0.9
    index = torch.randperm(case.n, generator=torch.Generator().manual_seed(3))
    for kernel in KERNELS:
        fired = torch.zeros((case.n, 2), dtype=torch.bool).T  # not contiguous
        case.union(kernel, index, act=act if act_given else None, fired=fired)
        assert torch.equal(fired, expected[:, index])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__[20:])
def test_fixed_point_by_hand(kernel: ModuleType) -> None:
    """2^-40 is the least product that counts; less is cut, of either sign."""
    spec = FfnSpec(2, False, "relu", 0.0, "float32", "deterministic")
    x = torch.tensor([[1.0, 0.5]])
    rows = torch.tensor([[[1.0, 2.0], [2.0**-41, 1.0]], [[3.0, 0.0], [-(2.0**-41), -(2.0**-40)]]])
    y = kernel.ffn_union(x, rows, torch.arange(2), spec)
    # Gates 2 and 3: 2 * 2^-41 is one step, 3 * 2^-41 is cut from 1.5 to one, 3 * 2^-40 is three.
    assert y.tolist() == [[1 - 1, 2 * 2**40 - 3]]
    assert kernel.total(y).tolist() == [[0.0, 2.0]]


def test_silu_is_the_libraries_within_a_last_bit() -> None:
    gate = torch.cat([torch.linspace(-120, 120, 5001), torch.tensor([0.0, -0.0, 1e-40, -1e30])])
    expected = torch.nn.functional.silu(gate.double()).float()
    torch.testing.assert_close(torch_ref.silu(gate), expected, rtol=2.0**-23, atol=1e-44)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_an_unwritten_slot_does_not_pass_for_zeros(fmt: str, numerics: str) -> None:
    """A slot of 0xFF bytes among the evaluated changes every output."""
    case = make(fmt, "relu", numerics, biased=False)
    act = case.gate(torch_ref)
    index = torch.nonzero(act[0])[:, 0]
    broken = case.rows[:, 1:].clone()
    broken[index[0]].view(torch.uint8).fill_(255)
    for kernel in KERNELS:
        right = case.union(kernel, index, act=act)
        wrong = kernel.ffn_union(case.x, broken, index, case.spec, act=act[:, index])
        assert bool((torch_ref.total(wrong) != torch_ref.total(right)).all())

"""FFN kernels: torch, numba and a float64 dense FFN agree; parts of a split add up to the whole.

Tolerance: a float32 dot product of d terms and a float32 sum of n terms are off by at most a few
(d + n) * 2^-24 of the sum of absolute values; 1e-5 of that sum is asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.kernels import numba_cpu, torch_ref

KERNELS = pytest.mark.parametrize("kernel", [torch_ref, numba_cpu], ids=lambda k: k.__name__[20:])


@dataclass(frozen=True)
class Ffn:
    """Float32 weights of one FFN; all arrays per neuron. up is None where not gated."""

    gate: torch.Tensor  # [n, d]
    up: torch.Tensor | None
    down: torch.Tensor  # [n, d]
    gate_b: torch.Tensor | None
    up_b: torch.Tensor | None
    threshold: float

    @property
    def gated(self) -> bool:
        return self.up is not None

    @property
    def spec(self) -> FfnSpec:
        return FfnSpec(self.gate.shape[1], self.gated, "relu", self.threshold, "float32")

    def rows(self, *, every: bool) -> torch.Tensor:
        parts = ([self.gate] if every else []) + [p for p in (self.up, self.down) if p is not None]
        return torch.stack(parts, dim=1).contiguous()

    def act64(self, x: torch.Tensor) -> torch.Tensor:
        gate = x.double() @ self.gate.double().T
        if self.gate_b is not None:
            gate = gate + self.gate_b.double()
        return torch.where(gate > self.threshold, gate, 0.0)

    def terms64(self, x: torch.Tensor) -> torch.Tensor:
        """Multipliers of the down rows in float64, [n_tokens, n]."""
        act = self.act64(x)
        if self.up is None:
            return act
        up = x.double() @ self.up.double().T
        return act * (up if self.up_b is None else up + self.up_b.double())

    def partial64(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.terms64(x)[:, ids] @ self.down[ids].double()

    def tolerance(self, x: torch.Tensor) -> float:
        act = self.act64(x).abs()
        up = 1.0 if self.up is None else x.abs().double() @ self.up.abs().double().T + 1.0
        return 1e-5 * float((act * up @ self.down.abs().double()).max()) + 1e-7


def make(
    n: int,
    d: int,
    *,
    gated: bool = True,
    biased: bool = False,
    threshold: float = 0.0,
    seed: int = 0,
) -> Ffn:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    return Ffn(
        gate=normal(n, d) / d**0.5,
        up=normal(n, d) / d**0.5 if gated else None,
        down=normal(n, d),
        gate_b=normal(n) if biased else None,
        up_b=normal(n) if biased and gated else None,
        threshold=threshold,
    )


def tokens(n_tokens: int, d: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((n_tokens, d), generator=torch.Generator().manual_seed(seed))


def take(values: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[ids]


def union(
    kernel: ModuleType, ffn: Ffn, x: torch.Tensor, ids: torch.Tensor, mode: str
) -> torch.Tensor:
    """ffn_union the three ways it is called: gate values given or not, gate row moved or not."""
    act = kernel.gate_all(x, ffn.gate, ffn.gate_b, ffn.spec)[:, ids]
    y: torch.Tensor = kernel.ffn_union(
        x,
        ffn.rows(every=mode != "exact"),
        ids,
        ffn.spec,
        act=None if mode == "predicted" else act,
        gate_b=take(ffn.gate_b, ids) if mode == "predicted" else None,
        up_b=take(ffn.up_b, ids),
    )
    return y


MODES = pytest.mark.parametrize("mode", ["exact", "oracle", "predicted"])
SHAPES = pytest.mark.parametrize(
    ("gated", "biased", "threshold"),
    [(True, False, 0.0), (True, True, 0.0), (True, False, 0.3), (False, True, 0.0)],
)


@KERNELS
@MODES
@SHAPES
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_equals_dense_float64_for_any_ids(
    kernel: ModuleType, mode: str, gated: bool, biased: bool, threshold: float, n_tokens: int
) -> None:
    n, d = 150, 40  # more neurons than one chunk of torch_ref, not a multiple of it
    ffn = make(n, d, gated=gated, biased=biased, threshold=threshold)
    x = tokens(n_tokens, d)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
    for count in (0, 1, 63, 64, 65, n):
        ids = order[:count].to(torch.int32)
        y = union(kernel, ffn, x, ids, mode)
        assert y.dtype == torch.float32
        assert y.shape == x.shape
        error = float((y.double() - ffn.partial64(x, ids.long())).abs().max())
        assert error <= ffn.tolerance(x)
    assert float(y.abs().max()) > 1.0  # all ids: not vacuous


@KERNELS
@MODES
def test_no_ids_give_exact_zeros(kernel: ModuleType, mode: str) -> None:
    ffn, x = make(10, 8), tokens(3, 8)
    y = union(kernel, ffn, x, torch.empty(0, dtype=torch.int32), mode)
    assert torch.equal(y, torch.zeros(3, 8))


@KERNELS
def test_index_names_places_not_neurons(kernel: ModuleType) -> None:
    """A slot tensor holds the same bundles elsewhere; values per entry follow the index."""
    ffn, x = make(30, 16, biased=True), tokens(1, 16)
    ids = torch.tensor([4, 9, 17, 2])
    slots = torch.tensor([5, 0, 3, 7])
    slot_rows = torch.full((8, 2, 16), float("nan"))
    slot_rows[slots] = ffn.rows(every=False)[ids]
    act = kernel.gate_all(x, ffn.gate, ffn.gate_b, ffn.spec)[:, ids]
    y = kernel.ffn_union(x, slot_rows, slots, ffn.spec, act=act, up_b=take(ffn.up_b, ids))
    assert torch.equal(y, union(kernel, ffn, x, ids, "exact"))


@KERNELS
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_split_into_disjoint_parts_sums_to_the_whole(
    kernel: ModuleType, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 140), label="n_neurons")
    n_tokens = data.draw(st.integers(1, 3), label="n_tokens")
    mode = data.draw(st.sampled_from(["exact", "oracle", "predicted"]), label="mode")
    threshold = data.draw(st.sampled_from([0.0, 0.25]), label="threshold")
    gated = data.draw(st.booleans(), label="gated")
    seed = data.draw(st.integers(0, 999), label="seed")
    ffn = make(n, 17, gated=gated, biased=True, threshold=threshold, seed=seed)
    x = tokens(n_tokens, 17, seed)
    # Where the two precisions disagree about who fires, FATReLU jumps by its threshold.
    gate = x.double() @ ffn.gate.double().T + ffn.gate_b.double()
    assume(float((gate - threshold).abs().min()) > 1e-5)

    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    parts = [torch.nonzero(owner == k)[:, 0] for k in range(3)]
    y = sum(union(kernel, ffn, x, part, mode) for part in parts)
    whole = ffn.partial64(x, torch.arange(n))
    assert float((y - whole).abs().max()) <= ffn.tolerance(x)


@KERNELS
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_gate_all_is_zero_exactly_where_the_gate_does_not_exceed(
    kernel: ModuleType, threshold: float
) -> None:
    ffn, x = make(200, 32, biased=True, threshold=threshold), tokens(4, 32)
    act = kernel.gate_all(x, ffn.gate, ffn.gate_b, ffn.spec)
    expected = ffn.act64(x)
    assert torch.equal(act > 0, expected > 0)
    assert 0.1 < float((act > 0).double().mean()) < 0.9
    torch.testing.assert_close(act.double(), expected, rtol=0, atol=1e-5)


@KERNELS
def test_a_gate_at_the_threshold_does_not_fire(kernel: ModuleType) -> None:
    x = torch.ones(1, 4)
    gate_w = torch.tensor([[0.5, 0, 0, 0], [0.5, 0.25, 0, 0], [0, 0, 0, 0], [-0.0, 0, 0, 0]])
    rows = torch.stack([gate_w, torch.eye(4)], dim=1)  # fc1 and fc2: y holds the activations
    ids = torch.arange(4)
    for threshold, expected in ((0.5, [0.0, 0.75, 0.0, 0.0]), (0.0, [0.5, 0.75, 0.0, 0.0])):
        spec = FfnSpec(4, False, "relu", threshold, "float32")
        assert kernel.gate_all(x, gate_w, None, spec).tolist() == [expected]
        assert kernel.ffn_union(x, rows, ids, spec).tolist() == [expected]


@KERNELS
def test_neurons_evaluated_needlessly_add_exactly_nothing(kernel: ModuleType) -> None:
    """One token: silent neurons among the ids change no bit in numba, nothing beyond rounding in
    torch, whose sums are over chunks of another make-up."""
    ffn, x = make(300, 48), tokens(1, 48)
    act = kernel.gate_all(x, ffn.gate, None, ffn.spec)[0]
    active = torch.nonzero(act)[:, 0]
    assert 0 < len(active) < 300
    lean = union(kernel, ffn, x, active, "exact")
    wide = union(kernel, ffn, x, torch.arange(300), "exact")
    if kernel is numba_cpu:
        assert torch.equal(lean, wide)
    else:
        assert float((lean - wide).abs().max()) <= ffn.tolerance(x)


def test_numba_rows_do_not_depend_on_the_company() -> None:
    ffn, x = make(97, 192), tokens(1, 192)
    everything = numba_cpu.gate_all(x, ffn.gate, None, ffn.spec)
    some = torch.tensor([0, 3, 50, 96])
    assert torch.equal(numba_cpu.gate_all(x, ffn.gate[some], None, ffn.spec), everything[:, some])


def test_numba_from_several_threads_at_once_gives_the_same_bits() -> None:
    ffn, x = make(2000, 192), tokens(1, 192)
    parts = list(torch.arange(2000).split(250))

    def one(part: torch.Tensor) -> torch.Tensor:
        return union(numba_cpu, ffn, x, part, "oracle")

    alone = [one(part) for part in parts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, parts * 5))
    assert all(torch.equal(a, b) for a, b in zip(alone * 5, together, strict=True))


@KERNELS
def test_works_on_inference_tensors_and_views(kernel: ModuleType) -> None:
    ffn = make(70, 20)
    with torch.inference_mode():
        x = tokens(6, 20)[1::2]  # rows of a larger tensor: not contiguous
        y = union(kernel, ffn, x, torch.arange(70), "predicted")
        gate_view = ffn.rows(every=True)[:, 0]  # as the bundles of oracle gating hold it
        act = kernel.gate_all(x, gate_view, None, ffn.spec)
    assert float((y - ffn.partial64(x, torch.arange(70))).abs().max()) <= ffn.tolerance(x)
    torch.testing.assert_close(act.double(), ffn.act64(x), rtol=0, atol=1e-5)


@KERNELS
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k, f, x, i: k.ffn_union(x, f.rows(every=False), i, f.spec), "without act"),
        (lambda k, f, x, i: k.ffn_union(x[:, :7], f.rows(every=True), i, f.spec), "x is"),
        (
            lambda k, f, x, i: k.ffn_union(
                x, f.rows(every=False), i, f.spec, act=torch.zeros(2, 9)
            ),
            "act is",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    kernel: ModuleType, call: Callable[..., object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call(kernel, make(20, 8), tokens(2, 8), torch.arange(5))

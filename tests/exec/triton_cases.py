"""What the Triton kernels must give. Run by test_triton.py, in a process of its own.

With TRITON_INTERPRET=1 the kernels run in Triton's interpreter, on the CPU; without, on the GPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kairox_exec.cuda import CudaDevice
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.ffn_spec import ACTIVATIONS, FIXED_LIMIT, FfnSpec
from kairox_exec.formats import FORMATS, encode
from kairox_exec.kernels import numba_cpu, torch_ref, triton_cuda
from kairox_exec.loading import load_bundled
from kairox_exec.runner import run_bundles
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import POLICIES
from tests.exec.tiny_families import N_LAYERS, N_NEURONS, VOCAB, save_tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D, N, N_PLACES = 96, 13, 17  # more than one block of columns in `down`, parts of blocks elsewhere


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Toy sizes, and still several programs in every direction."""
    was = triton_cuda.ENTRIES, triton_cuda.GATHER_BLOCK
    triton_cuda.ENTRIES, triton_cuda.GATHER_BLOCK = 8, 16
    yield
    triton_cuda.ENTRIES, triton_cuda.GATHER_BLOCK = was


def _inputs(adversarial: bool, large: float = 300.0) -> tuple[torch.Tensor, torch.Tensor]:
    """x [2, D] and weights [N_PLACES, 3, D]. `large` keeps sums within what fixed point holds."""
    draw = torch.Generator().manual_seed(11)
    x = torch.randn((2, D), generator=draw)
    weights = torch.randn((N_PLACES, 3, D), generator=draw) / D**0.5
    if adversarial:
        odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e-39, 1.0, -large, 1e-13, large])
        pick = torch.randint(0, odd.numel(), (2, D), generator=draw)
        x = torch.where(torch.rand((2, D), generator=draw) < 0.5, odd[pick], x)
        # float16's denormals among the weights, and denormal products with a normal x.
        tiny = torch.tensor([6e-8, -6e-8, 0.0, -0.0, 1e-30, 1e-38, 1.0])
        pick = torch.randint(0, tiny.numel(), weights.shape, generator=draw)
        weights = torch.where(torch.rand(weights.shape, generator=draw) < 0.5, tiny[pick], weights)
        weights[3] = 0.0
        x[1, : D // 2] = 0.0
    return x, weights


def _biases(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(12)
    return torch.randn(n, generator=draw) / 4, torch.randn(n, generator=draw) / 4


def _to(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(DEVICE) for t in tensors]


def _threshold(activation: str) -> float:
    return {"relu": 0.1, "silu": 0.05}.get(activation, 0.0)


# Whether the gate is decided before or in the kernel changes from case to case.
CASES = [
    (fmt, activation, True, k % 2 == 0)
    for k, (fmt, activation) in enumerate(itertools.product(FORMATS, (*ACTIVATIONS, "relu")))
] + [
    (fmt, activation, False, given)
    for fmt in ("float16", "q4_0")
    for activation, given in [("relu", True), ("relu2", False)]
]


@pytest.mark.parametrize("numerics", ["deterministic", "fast"])
@pytest.mark.parametrize(("fmt", "activation", "gated", "given"), CASES)
def test_kernels_give_what_the_reference_gives(
    fmt: str, activation: str, gated: bool, given: bool, numerics: str
) -> None:
    spec = FfnSpec(D, gated, activation, _threshold(activation), fmt, numerics)  # type: ignore[arg-type]
    x, weights = _inputs(numerics == "deterministic", 300.0 if activation == "relu" else 20.0)
    weights = weights if gated else weights[:, [0, 2]]
    stored = encode(weights, fmt)
    index = torch.randperm(N_PLACES, generator=torch.Generator().manual_seed(13))[:N].int()
    gate_b, up_b = _biases(N_PLACES)
    here_gate_b, here_up_b = gate_b[index], up_b[index] if gated else None

    gate = torch_ref.gate_all(x, stored[:, 0].contiguous(), gate_b, spec)
    fired = torch.zeros((2, N), dtype=torch.bool)
    act = gate[:, index] if given else None
    rows = stored[:, 1:].contiguous() if given else stored
    ask = {"gate_b": None if given else here_gate_b, "up_b": here_up_b}
    y = torch_ref.ffn_union(x, rows, index, spec, act=act, fired=fired, **ask)
    assert bool(fired.any())
    assert not bool(fired.all())

    x_d, gate_rows_d, gate_b_d = _to(x, stored[:, 0].contiguous(), gate_b)
    got_gate = triton_cuda.gate_all(x_d, gate_rows_d, gate_b_d, spec)
    got_fired = torch.ones((2, N), dtype=torch.bool, device=DEVICE)
    rows_d, index_d, act_d, bias_d, up_b_d = _to(rows, index, act, ask["gate_b"], ask["up_b"])
    got = triton_cuda.ffn_union(
        x_d, rows_d, index_d, spec, act=act_d, gate_b=bias_d, up_b=up_b_d, fired=got_fired
    )
    if numerics == "deterministic":
        assert float(torch_ref.total(y).abs().max()) < FIXED_LIMIT
        assert torch.equal(got_gate.cpu(), gate)
        assert got.dtype == y.dtype == torch.int64
        assert torch.equal(got.cpu(), y)
        assert torch.equal(got_fired.cpu(), fired)
        assert torch.equal(triton_cuda.total(got).cpu(), torch_ref.total(y))
        assert bool(y.any())
    else:
        assert got.dtype == y.dtype
        total, expected = triton_cuda.total(got).cpu(), torch_ref.total(y)
        scale = float(gate.abs().max())
        torch.testing.assert_close(got_gate.cpu(), gate, rtol=1e-5, atol=1e-5 * scale)
        scale = float(expected.abs().max())
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("fmt", FORMATS)
def test_deterministic_bits_are_those_of_the_numba_kernels(fmt: str) -> None:
    spec = FfnSpec(D, True, "relu", 0.0, fmt, "deterministic")  # type: ignore[arg-type]
    x, weights = _inputs(True)
    stored = encode(weights, fmt)
    index = torch.arange(N_PLACES, dtype=torch.int32)
    y = numba_cpu.ffn_union(x, stored, index, spec)
    x_d, stored_d, index_d = _to(x, stored, index)
    assert torch.equal(triton_cuda.ffn_union(x_d, stored_d, index_d, spec).cpu(), y)
    assert bool(y.any())


def test_a_screens_dot_products_are_torchs() -> None:
    x, weights = _inputs(False)
    codes = (weights[:, 0] * 300).clamp(-127, 127).to(torch.int8)
    x_d, codes_d = _to(x, codes)
    got, expected = triton_cuda.code_dots(x_d, codes_d).cpu(), torch_ref.code_dots(x, codes)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-2)  # of sums of about 1e3
    assert float(expected.abs().max()) > 500


def test_parts_of_a_split_add_up_to_the_same_bits() -> None:
    spec = FfnSpec(D, True, "relu", 0.0, "float16", "deterministic")
    x, weights = _inputs(True)
    x_d, stored = _to(x, encode(weights, "float16"))
    index = torch.randperm(N_PLACES, device="cpu").int().to(DEVICE)
    whole = triton_cuda.ffn_union(x_d, stored, index, spec)
    parts = [triton_cuda.ffn_union(x_d, stored, part, spec) for part in (index[:5], index[5:])]
    assert torch.equal(parts[0] + parts[1], whole)


@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_the_slot_that_a_neuron_is_in_changes_no_bit(numerics: str) -> None:
    spec = FfnSpec(D, True, "relu", 0.0, "float16", numerics)  # type: ignore[arg-type]
    x, weights = _inputs(False)
    stored, moved = encode(weights, "float16"), torch.empty(N_PLACES, 3, D, dtype=torch.float16)
    places = torch.randperm(N_PLACES, generator=torch.Generator().manual_seed(15))
    moved[places] = stored
    x_d, stored_d, moved_d = _to(x, stored, moved)
    index_d, places_d = _to(torch.arange(N, dtype=torch.int32), places[:N].int())
    here = triton_cuda.ffn_union(x_d, stored_d, index_d, spec)
    there = triton_cuda.ffn_union(x_d, moved_d, places_d, spec)
    assert torch.equal(here, there)
    reverse = triton_cuda.ffn_union(x_d, stored_d, index_d.flip(0), spec)
    assert torch.equal(here, reverse) == (numerics == "deterministic")  # the order does


def test_slots_that_are_not_in_the_index_are_not_read() -> None:
    spec = FfnSpec(D, True, "relu", 0.0, "float32", "fast")
    x, weights = _inputs(False)
    x_d, stored = _to(x, weights)
    stored[5:] = torch.nan
    index = torch.arange(5, dtype=torch.int32, device=DEVICE)
    assert bool(torch.isfinite(triton_cuda.ffn_union(x_d, stored, index, spec)).all())


def test_no_entries_are_no_sum() -> None:
    for numerics, kept in (("fast", torch.float32), ("deterministic", torch.int64)):
        spec = FfnSpec(D, True, "relu", 0.0, "float32", numerics)  # type: ignore[arg-type]
        x, weights = _inputs(False)
        x_d, stored, none = _to(x, weights, torch.empty(0, dtype=torch.int32))
        y = triton_cuda.ffn_union(x_d, stored, none, spec)
        assert y.dtype == kept
        assert not bool(y.any())


def test_rows_of_another_format_are_refused() -> None:
    spec = FfnSpec(D, True, "relu", 0.0, "float16", "deterministic")
    x, weights = _inputs(False)
    x_d, stored, index = _to(x, weights, torch.arange(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"float32.*expected torch.float16 for float16"):
        triton_cuda.ffn_union(x_d, stored, index, spec)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n_programs", [1, 4, 64])
def test_gather_copies_rows_into_their_places_and_nothing_else(
    dtype: torch.dtype, n_programs: int
) -> None:
    draw = torch.Generator().manual_seed(14)
    rows = torch.randint(-(2**31), 2**31, (40, 37), generator=draw).to(dtype)
    if DEVICE == "cuda":
        rows = rows.pin_memory()
    ids = torch.tensor([39, 0, 7, 7, 20, 3], dtype=torch.int32)
    places = torch.tensor([4, 9, 0, 2, 1, 8], dtype=torch.int32)
    slots = torch.full((10, 37), -1, dtype=dtype)
    expected = slots.index_copy(0, places.long(), rows.index_select(0, ids))
    slots_d, ids_d, places_d = _to(slots, ids, places)
    triton_cuda.gather_rows(rows, ids_d, slots_d, places_d, n_programs)
    assert torch.equal(slots_d.cpu(), expected)
    triton_cuda.gather_rows(rows, ids_d[:0], slots_d, places_d[:0], n_programs)
    assert torch.equal(slots_d.cpu(), expected)


def test_gather_refuses_what_it_would_misread() -> None:
    rows, slots = torch.zeros((4, 6), dtype=torch.int64), torch.zeros((4, 5), dtype=torch.int64)
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected \\[n, words\\] both"):
        triton_cuda.gather_rows(rows, ids, slots, ids, 4)
    with pytest.raises(ValueError, match="expected both int32 or int64"):
        triton_cuda.gather_rows(rows.float(), ids, rows, ids, 4)
    with pytest.raises(ValueError, match=r"ids torch\.int64"):
        triton_cuda.gather_rows(rows, ids.long(), rows, ids, 4)
    with pytest.raises(ValueError, match="n_programs must be 1 or more"):
        triton_cuda.gather_rows(rows, ids, rows, ids, 0)


@pytest.mark.parametrize("gating", ["exact", "screened"])
def test_whole_model_has_the_bits_of_the_reference(tmp_path: Path, gating: str) -> None:
    """The executor with Triton's kernels on its device, numba's on the host; and with torch's."""
    directory = save_tiny("llama", tmp_path / "llama")
    loaded = load_bundled(directory, gating=gating, numerics="deterministic")
    tokens = torch.randint(0, VOCAB, (6,), generator=torch.Generator().manual_seed(15)).numpy()
    found = []
    for on_device, on_host in ((triton_cuda, numba_cpu), (torch_ref, torch_ref)):
        cache = NeuronCache(
            N_LAYERS, N_NEURONS, 40, POLICIES["lru"](N_LAYERS, N_NEURONS), Fixed(0.3),
            warm=[np.arange(30)] * N_LAYERS, swap_neurons=7, trigger="after",
        )  # fmt: skip
        # The reference is computed on the CPU.
        card = DEVICE == "cuda" and on_device is triton_cuda
        with CudaDevice() if card else EmulatedDevice() as device:
            runner = run_bundles(
                copy.deepcopy(loaded.model), loaded.config, loaded.family, loaded.bundles,
                lambda *_, given=cache: given, device,
                host_kernels=on_host, device_kernels=on_device,
            )  # fmt: skip
            found.append([runner.logits.cpu() for _ in runner.run([tokens], prefill=3)])
            runner.finish()
    for a, b in zip(*found, strict=True):
        if DEVICE == "cuda":  # attention there is another kernel than here
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        else:
            assert torch.equal(a, b)

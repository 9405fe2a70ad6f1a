"""Row formats: what a round trip loses, ggml's layout by hand and against its own package."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_exec.formats import (
    FORMATS,
    decode,
    encode,
    require_format,
    row_bytes,
    row_width,
    storage_dtype,
)
from kairox_sim.errors import KairoxError

BLOCKED = ("q8_0", "q4_0")


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    fmt=st.sampled_from(FORMATS),
    blocks=st.integers(1, 4),
    rest=st.integers(0, 31),
    n=st.integers(1, 5),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=150)
def test_a_round_trip_is_off_by_half_a_step_at_most(
    fmt: str, blocks: int, rest: int, n: int, exponent: int, seed: int
) -> None:
    d = 32 * blocks + (0 if fmt in BLOCKED else rest)
    w = weights(n, 2, d, seed=seed) * 2.0**exponent
    rows = encode(w, fmt)
    assert rows.shape == (n, 2, row_width(fmt, d))
    assert rows.dtype == storage_dtype(fmt)
    assert rows.is_contiguous()
    assert rows.element_size() * rows.shape[-1] == row_bytes(fmt, d)
    off = (decode(rows, fmt) - w).abs()
    assert bool((off <= largest_error(w, fmt)).all())


def largest_error(w: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt == "float32":
        return torch.zeros_like(w)
    if fmt == "bfloat16":
        return w.abs() * 2.0**-8
    if fmt == "float16":
        return w.abs() * 2.0**-11 + 2.0**-25
    if fmt == "int8":
        return (w.abs().amax(-1, keepdim=True) / 127 * 0.501).expand_as(w)
    largest = w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # The scale is a float16 (2^-11), and denormal for the smallest blocks: up to 127 or 8 codes.
    if fmt == "q8_0":
        step = largest / 127
        error = 0.501 * step + largest * 2.0**-11 + 127 * 2.0**-25
    else:  # one end of the 16 codes is a step short of the largest magnitude
        step = largest / 8
        error = 1.001 * step + largest * 2.0**-11 + 8 * 2.0**-25
    return error.expand(*error.shape[:-1], 32).flatten(-2)


@pytest.mark.parametrize("fmt", FORMATS)
def test_decoded_rows_encode_to_themselves(fmt: str) -> None:
    """A second start from stored rows is the first."""
    once = decode(encode(weights(6, 96), fmt), fmt)
    again = decode(encode(once, fmt), fmt)
    torch.testing.assert_close(again, once, rtol=1e-3 if fmt in BLOCKED else 1e-6, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_zeros(fmt: str) -> None:
    assert torch.equal(decode(encode(torch.zeros(3, 64), fmt), fmt), torch.zeros(3, 64))


@pytest.mark.parametrize("fmt", FORMATS)
def test_unwritten_memory_decodes_to_nan(fmt: str) -> None:
    rows = torch.full((2, 3, row_bytes(fmt, 64)), 255, dtype=torch.uint8)
    decoded = decode(rows.view(storage_dtype(fmt)), fmt)
    assert decoded.shape == (2, 3, 64)
    assert bool(torch.isnan(decoded).all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(fmt: str, bad: float) -> None:
    w = weights(4, 32)
    w[2, 7] = bad
    with pytest.raises(KairoxError, match="NaN or infinite"):
        encode(w, fmt)


@pytest.mark.parametrize(("fmt", "value"), [("float16", 1e5), ("q8_0", 1e7), ("q4_0", 1e6)])
def test_weights_too_large_for_the_format_are_refused(fmt: str, value: float) -> None:
    w = weights(4, 32)
    w[2, 7] = value
    with pytest.raises(KairoxError, match=f"too large for {fmt}; use float32"):
        encode(w, fmt)


@pytest.mark.parametrize("fmt", BLOCKED)
def test_rows_that_are_not_whole_blocks_are_refused(fmt: str) -> None:
    with pytest.raises(KairoxError, match=r"not whole blocks of 32.*use int8"):
        encode(weights(2, 48), fmt)


def test_an_unknown_format_names_the_known() -> None:
    with pytest.raises(KairoxError, match=r"unknown weights 'int4'; allowed: float32, .*q4_0"):
        require_format("int4")


def test_bytes_of_a_row() -> None:
    """ggml: 34 bytes of 32 weights in q8_0, 18 in q4_0."""
    assert [row_bytes(fmt, 4096) for fmt in FORMATS] == [
        16_384, 8_192, 8_192, 4_100, 128 * 34, 128 * 18,
    ]  # fmt: skip


def test_int8_by_hand() -> None:
    rows = encode(torch.tensor([[127.0, -63.5, 1.4, 0.0]]), "int8")
    assert rows[0, :4].tolist() == [127, -64, 1, 0]  # halves to even
    assert rows[0, 4:].contiguous().view(torch.float32).tolist() == [1.0]


def test_q4_0_by_hand() -> None:
    """The scale is -8th of the largest magnitude, with its sign; low halves come first."""
    w = torch.zeros(32)
    w[0], w[1], w[16], w[17] = -8.0, 3.0, 7.0, -1.0
    rows = encode(w, "q4_0")
    assert rows[:2].view(torch.float16).tolist() == [1.0]
    assert rows[2:5].tolist() == [0 | (15 << 4), 11 | (7 << 4), 8 | (8 << 4)]
    assert torch.equal(decode(rows, "q4_0"), w)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_row_of_a_tensor_decodes_alone(fmt: str) -> None:
    """Also where its bytes start at an odd address."""
    d = 64 if fmt in BLOCKED else 61
    rows = encode(weights(5, 3, d), fmt)
    every = decode(rows, fmt)
    for i in range(5):
        assert torch.equal(decode(rows[i, 1], fmt), every[i, 1])
        assert torch.equal(decode(rows[i : i + 1, 1:], fmt), every[i : i + 1, 1:])


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None,
    reason="needs the package gguf: `pip install gguf`; ggml's layout is tested by hand only",
)
@pytest.mark.parametrize("fmt", BLOCKED)
def test_ggmls_own_package_agrees(fmt: str) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize

    kind = GGMLQuantizationType[fmt.upper()]
    w = weights(40, 256) * torch.exp2(torch.arange(40.0) % 9 - 4)[:, None]
    w[3] = 0
    theirs = quantize(w.numpy(), kind)
    ours = encode(w, fmt)
    np.testing.assert_array_equal(decode(torch.from_numpy(theirs), fmt), dequantize(theirs, kind))
    np.testing.assert_array_equal(decode(ours, fmt), dequantize(ours.numpy(), kind))
    assert float((ours.numpy() == theirs).mean()) == 1.0

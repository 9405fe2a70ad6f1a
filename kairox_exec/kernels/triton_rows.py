"""Triton's side of `triton_cuda`: what runs on the GPU, one function per launch. Imports triton.

Compile-time arguments are upper case. Under DET each float32 product is scaled by 2^40, cut
towards zero and added as int64: the launcher switches fused multiply-add off, so that a product is
rounded once, as on the CPU. Loops have compile-time bounds, or are `while`: Triton 3.6's
interpreter fails on a `range` with a bound known only at run time (NumPy 2.4). Counts that change
from step to step are not specialised, so that nothing is compiled again in the middle of a run.
"""

# Triton reads annotations as its own, and knows none but constexpr.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_scale(row, live, D: tl.constexpr, FMT: tl.constexpr):
    """Scale of an int8 row, the four bytes after its codes; 1 in other formats. Shape of `row`.

    Format "codes" is int8 without a scale, as a screen holds them.
    """
    if FMT == "int8":
        # Byte by byte: rows of d_model + 4 bytes need not be aligned.
        bits = tl.load(row + D, mask=live, other=0).to(tl.int32) & 0xFF
        bits |= (tl.load(row + D + 1, mask=live, other=0).to(tl.int32) & 0xFF) << 8
        bits |= (tl.load(row + D + 2, mask=live, other=0).to(tl.int32) & 0xFF) << 16
        bits |= (tl.load(row + D + 3, mask=live, other=0).to(tl.int32) & 0xFF) << 24
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.full(row.shape, 1.0, tl.float32)


@triton.jit
def _weights(row, scale, cols, live, FMT: tl.constexpr):
    """float32 [rows, cols] of stored rows at row [rows, 1], columns cols [1, cols]; 0 elsewhere.

    scale: of `_row_scale`, [rows, 1].
    """
    if FMT == "int8":
        return tl.load(row + cols, mask=live, other=0).to(tl.float32) * scale
    elif FMT == "q8_0" or FMT == "q4_0":
        BYTES: tl.constexpr = 34 if FMT == "q8_0" else 18
        block = row + cols // 32 * BYTES
        inside = cols % 32
        bits = tl.load(block, mask=live, other=0).to(tl.uint16)
        bits |= tl.load(block + 1, mask=live, other=0).to(tl.uint16) << 8
        of_block = bits.to(tl.float16, bitcast=True).to(tl.float32)
        if FMT == "q8_0":
            codes = tl.load(block + 2 + inside, mask=live, other=0).to(tl.int8, bitcast=True)
            return codes.to(tl.float32) * of_block
        else:
            pair = tl.load(block + 2 + inside % 16, mask=live, other=0).to(tl.int32)
            nibble = (pair >> (inside // 16 * 4)) & 15
            return (nibble - 8).to(tl.float32) * of_block
    else:
        return tl.load(row + cols, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _dots(
    x,  # pointer to one token's [D]
    row,  # pointers to stored rows, [BLOCK_N]
    live,  # [BLOCK_N]
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FMT: tl.constexpr,
    DET: tl.constexpr,
):
    """row . x, float32 [BLOCK_N]; 0 where not live."""
    scale = _row_scale(row[:, None], live[:, None], D, FMT)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.int64 if DET else tl.float32)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        inside = cols < D
        here = live[:, None] & inside[None, :]
        w = _weights(row[:, None], scale, cols[None, :], here, FMT)
        product = w * tl.load(x + cols, mask=inside, other=0.0)[None, :]
        if DET:
            acc += (product * 1099511627776.0).to(tl.int64)  # 2^40
        else:
            acc += product
    if DET:
        exact = tl.sum(acc, axis=1).to(tl.float64) * 9.094947017729282e-13  # 2^-40
        return exact.to(tl.float32)
    else:
        return tl.sum(acc, axis=1)


@triton.jit
def _silu(gate):
    """`torch_ref.silu`, operation by operation."""
    wide = gate.to(tl.float64)
    t = -tl.minimum(tl.abs(wide), 700.0)
    k = tl.floor(t * 1.4426950408889634 + 0.5)
    r = (t - k * 0.6931471803691238) - k * 1.9082149292705877e-10
    p = tl.full(r.shape, 1.0, tl.float64)
    for done in tl.static_range(13):
        p = p * r / (13.0 - done) + 1.0
    p = p * ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return (wide * (tl.where(wide >= 0.0, 1.0, p) / (1.0 + p))).to(tl.float32)


@triton.jit
def _activate(gate, threshold, ACT: tl.constexpr, DET: tl.constexpr):
    if ACT == "silu":
        value = _silu(gate) if DET else gate / (1.0 + tl.exp(-gate))
        return tl.where(tl.abs(value) > threshold, value, 0.0)
    elif ACT == "none":
        return gate
    else:
        value = gate * gate if ACT == "relu2" else gate
        return tl.where(gate > threshold, value, 0.0)


@triton.jit(do_not_specialize=["n"])
def gate_kernel(
    x,  # float32 [n_tokens, D]
    rows,  # [n, width] of FMT
    gate_b,  # float32 [n] where HAS_B
    out,  # float32 [n_tokens, n]
    n,
    row_stride,
    threshold,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FMT: tl.constexpr,
    ACT: tl.constexpr,
    DET: tl.constexpr,
    HAS_B: tl.constexpr,
):
    """One program per BLOCK_N neurons and token."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    live = entry < n
    row = rows + entry.to(tl.int64) * row_stride
    gate = _dots(x + token * D, row, live, D, BLOCK_N, BLOCK_D, FMT, DET)
    if HAS_B:
        gate += tl.load(gate_b + entry, mask=live, other=0.0)
    tl.store(out + token * n + entry, _activate(gate, threshold, ACT, DET), mask=live)


@triton.jit(do_not_specialize=["n", "act_stride", "fired_stride"])
def hidden_kernel(
    x,  # float32 [n_tokens, D]
    rows,  # [places, n_rows, width] of FMT
    index,  # [n]
    act,  # float32 [n_tokens, n] where ACT_GIVEN
    gate_b,  # float32 [n] where HAS_GATE_B
    up_b,  # float32 [n] where HAS_UP_B
    hidden,  # float32 [n_tokens, n]
    fired,  # uint8 [n_tokens, n] where TELL
    n,
    place_stride,
    up_offset,
    act_stride,
    fired_stride,
    threshold,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FMT: tl.constexpr,
    ACT: tl.constexpr,
    DET: tl.constexpr,
    GATED: tl.constexpr,
    ACT_GIVEN: tl.constexpr,
    HAS_GATE_B: tl.constexpr,
    HAS_UP_B: tl.constexpr,
    TELL: tl.constexpr,
):
    """What multiplies each entry's down row; rows of entries that do not fire are not read."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    live = entry < n
    place = tl.load(index + entry, mask=live, other=0).to(tl.int64)
    row = rows + place * place_stride
    if ACT_GIVEN:
        a = tl.load(act + token * act_stride + entry, mask=live, other=0.0)
    else:
        gate = _dots(x + token * D, row, live, D, BLOCK_N, BLOCK_D, FMT, DET)
        if HAS_GATE_B:
            gate += tl.load(gate_b + entry, mask=live, other=0.0)
        a = _activate(gate, threshold, ACT, DET)
    fires = live & (a != 0.0)
    if GATED:
        up = _dots(x + token * D, row + up_offset, fires, D, BLOCK_N, BLOCK_D, FMT, DET)
        if HAS_UP_B:
            up += tl.load(up_b + entry, mask=live, other=0.0)
        if ACT == "drelu":
            fires = fires & (up > 0.0)
            up = tl.where(up > 0.0, up, 0.0)
        a = a * up
    tl.store(hidden + token * n + entry, tl.where(fires, a, 0.0), mask=live)
    if TELL:
        tl.store(fired + token * fired_stride + entry, fires.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["n", "n_tokens"])
def down_kernel(
    hidden,  # float32 [n_tokens, n]
    rows,  # [places, n_rows, width] of FMT
    index,  # [n]
    y,  # DET: int64 [n_tokens, D], added to; else float32 [splits, n_tokens, D]
    n,
    n_tokens,
    place_stride,
    down_offset,
    D: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FMT: tl.constexpr,
    DET: tl.constexpr,
):
    """Sum of ENTRIES entries' down rows in BLOCK_D columns, for one token."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2).to(tl.int64)
    inside = cols < D
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.int64 if DET else tl.float32)
    for start in range(0, ENTRIES, BLOCK_N):
        entry = split * ENTRIES + start + tl.arange(0, BLOCK_N)
        a = tl.load(hidden + token * n + entry, mask=entry < n, other=0.0)
        live = (entry < n) & (a != 0.0)
        place = tl.load(index + entry, mask=live, other=0).to(tl.int64)
        row = (rows + place * place_stride + down_offset)[:, None]
        scale = _row_scale(row, live[:, None], D, FMT)
        w = _weights(row, scale, cols[None, :], live[:, None] & inside[None, :], FMT)
        product = a[:, None] * w
        if DET:
            acc += (product * 1099511627776.0).to(tl.int64)
        else:
            acc += product
    added = tl.sum(acc, axis=0)
    if DET:
        tl.atomic_add(y + token * D + cols, added, mask=inside, sem="relaxed")
    else:
        tl.store(y + (split * n_tokens + token) * D + cols, added, mask=inside)


@triton.jit(do_not_specialize=["n_copies"])
def gather_kernel(
    rows,  # int32 or int64 [n, WORDS], pinned host memory
    ids,  # int32 [n_copies]
    slots,  # of the same type, [m, WORDS], device memory
    places,  # int32 [n_copies]
    n_copies,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slots[places] = rows[ids]. Each program takes every num_programs'th copy."""
    copy = tl.program_id(0)
    while copy < n_copies:
        source = rows + tl.load(ids + copy).to(tl.int64) * WORDS
        target = slots + tl.load(places + copy).to(tl.int64) * WORDS
        for start in range(0, WORDS, BLOCK):
            words = start + tl.arange(0, BLOCK)
            here = words < WORDS
            tl.store(target + words, tl.load(source + words, mask=here), mask=here)
        copy += tl.num_programs(0)

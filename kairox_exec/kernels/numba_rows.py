"""Loops over one stored row, written as vectors of 32 lanes: dot products and sums of rows.

LLVM does not vectorise a loop that decodes bfloat16, float16 or ggml's blocks, so the loops are
built from vector instructions here, one way for every format: decode a block of 32 weights to
float32, multiply, add. What a row gives therefore depends on nothing but the row and x: not on the
other rows of the call, not on whether the row was decoded beforehand, not on the compiler's choice.
LLVM splits the vectors into what the machine has (AVX-512, AVX2, NEON).

Arrays are passed as addresses: one compiled function serves every format, shape and stride.
While a loop reads its row it asks for the lines of another, `ahead`, that is read soon: random rows
defeat the hardware's prefetcher, which also stops at every page of 4 KiB.

Fixed point: a float32 product is rounded once, times 2^40, cut to int64 and added. None of these
operations carries a fast-math flag, so no compiler may fuse or reorder them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _intrinsic

from kairox_exec.ffn_spec import ACTIVATIONS, FIXED_BITS
from kairox_exec.formats import BLOCK, FORMATS
from kairox_exec.kernels.numba_ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    cgutils,
    copy_bytes,
    load,
    padded,
    plus,
    prefetch,
    splat,
    store,
    sum_lanes,
    the_rest,
    vector,
    zeroed,
)

intrinsic: Callable[[Callable[..., Any]], Any] = _intrinsic

# How a loop is told the format of a row. CODES: int8 without a scale, as a screen holds them.
FORMAT_CODES = {fmt: code for code, fmt in enumerate(FORMATS)}
CODES = len(FORMATS)

_BLOCKS = ("q8_0", "q4_0")  # whole blocks only

Decode = Callable[[ir.IRBuilder, ir.Value], ir.Value]  # (builder, block's address) -> <32 x float>


def _decode(fmt: str, row: ir.Value, d: ir.Value, b: ir.IRBuilder) -> tuple[int, Decode]:
    """Bytes of a block of 32 weights, and how one is decoded; what a whole row shares is read now.

    The products with a scale are rounded to float32, as `formats.decode` does it.
    """
    match fmt:
        case "float32":
            return 128, lambda b, at: load(b, at, vector(F32))
        case "float16":
            return 64, lambda b, at: b.fpext(load(b, at, vector(F16)), vector(F32))
        case "bfloat16":
            return 64, _decode_bfloat16
        case "int8":
            scale = splat(b, load(b, b.add(row, d), F32))
            return 32, lambda b, at: b.fmul(_decode_codes(b, at), scale)
        case "codes":
            return 32, _decode_codes
        case "q8_0":
            return 34, lambda b, at: b.fmul(_decode_codes(b, plus(b, at, 2)), _block_scale(b, at))
        case "q4_0":
            return 18, lambda b, at: b.fmul(_decode_q4(b, plus(b, at, 2)), _block_scale(b, at))
    raise AssertionError(fmt)


def _decode_bfloat16(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    bits = b.zext(load(b, at, vector(I16)), vector(I32))
    return b.bitcast(b.shl(bits, ir.Constant(vector(I32), [16] * BLOCK)), vector(F32))


def _decode_codes(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    return b.sitofp(load(b, at, vector(I8)), vector(F32))


def _decode_q4(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    """Byte j holds weight j in its low and weight j + 16 in its high four bits, as q + 8."""
    half = BLOCK // 2
    packed = load(b, at, vector(I8, half))
    low = b.and_(packed, ir.Constant(packed.type, [15] * half))
    high = b.lshr(packed, ir.Constant(packed.type, [4] * half))
    both = b.shuffle_vector(low, high, ir.Constant(vector(I32), list(range(BLOCK))))
    return b.sitofp(b.sub(both, ir.Constant(both.type, [8] * BLOCK)), vector(F32))


def _block_scale(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    return splat(b, b.fpext(load(b, at, F16), F32))


def _fused(b: ir.IRBuilder, w: ir.Value, x: ir.Value, to: ir.Value) -> ir.Value:
    """w * x + to, rounded once where the machine can."""
    kind = ir.FunctionType(w.type, [w.type] * 3)
    name = f"llvm.fmuladd.v{BLOCK}f32"
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [w, x, to])


def _fixed(b: ir.IRBuilder, w: ir.Value, x: ir.Value, to: ir.Value) -> ir.Value:
    """to + the product in fixed point, <32 x i64>."""
    scale = ir.Constant(vector(F32), [float(2**FIXED_BITS)] * BLOCK)
    return b.add(to, b.fptosi(b.fmul(b.fmul(w, x), scale), vector(I64)))


def _per_format(b: ir.IRBuilder, code: ir.Value, emit: Callable[[str], None]) -> None:
    """`emit` the loop of every format; `code` chooses among them at run time."""
    done = b.append_basic_block("done")
    unknown = b.append_basic_block("unknown")
    choice = b.switch(code, unknown)
    for number, fmt in enumerate((*FORMATS, "codes")):
        block = b.append_basic_block(fmt)
        choice.add_case(I64(number), block)
        b.position_at_end(block)
        emit(fmt)
        b.branch(done)
    b.position_at_end(unknown)
    b.unreachable()
    b.position_at_end(done)


def _emit_dot(b: ir.IRBuilder, args: Any, deterministic: bool) -> ir.Value:
    code, row, x, d, ahead = args
    step = _fixed if deterministic else _fused
    kind = I64 if deterministic else F32
    result = cgutils.alloca_once(b, kind)
    sums = cgutils.alloca_once(b, vector(kind))

    def emit(fmt: str) -> None:
        n_bytes, decode = _decode(fmt, row, d, b)
        b.store(ir.Constant(vector(kind), None), sums)

        def add(row_at: ir.Value, x_at: ir.Value) -> None:
            b.store(step(b, decode(b, row_at), load(b, x_at, vector(F32)), b.load(sums)), sums)

        with cgutils.for_range(b, b.udiv(d, I64(BLOCK)), intp=I64) as loop:
            offset = b.mul(loop.index, I64(n_bytes))
            prefetch(b, b.add(ahead, offset), n_bytes)
            add(b.add(row, offset), b.add(x, b.mul(loop.index, I64(4 * BLOCK))))
        if fmt not in _BLOCKS:
            with the_rest(b, d) as (whole, rest):
                each = n_bytes // BLOCK
                add(padded(b, row, whole, rest, each), padded(b, x, whole, rest, 4))
        b.store(sum_lanes(b, b.load(sums)), result)

    _per_format(b, code, emit)
    return b.load(result)


def _emit_add_rows(b: ir.IRBuilder, args: Any, n_rows: int, deterministic: bool) -> None:
    code, factors, rows, y, d, ahead = args
    step = _fixed if deterministic else _fused
    kind = I64 if deterministic else F32
    size = 8 if deterministic else 4
    each = range(n_rows)
    row = [load(b, plus(b, rows, 8 * i), I64) for i in each]
    a = [splat(b, load(b, plus(b, factors, 4 * i), F32)) for i in each]

    def emit(fmt: str) -> None:
        decoders = [_decode(fmt, row[i], d, b) for i in each]
        n_bytes = decoders[0][0]

        def add(rows_at: list[ir.Value], y_at: ir.Value) -> None:
            value = load(b, y_at, vector(kind))
            for i in each:  # one after the other, as if each row had a pass of its own
                value = step(b, decoders[i][1](b, rows_at[i]), a[i], value)
            store(b, value, y_at)

        with cgutils.for_range(b, b.udiv(d, I64(BLOCK)), intp=I64) as loop:
            offset = b.mul(loop.index, I64(n_bytes))
            prefetch(b, b.add(ahead, offset), n_bytes)
            y_at = b.add(y, b.mul(loop.index, I64(size * BLOCK)))
            add([b.add(r, offset) for r in row], y_at)
        if fmt not in _BLOCKS:
            with the_rest(b, d) as (whole, rest):
                y_rest = padded(b, y, whole, rest, size)
                add([padded(b, r, whole, rest, n_bytes // BLOCK) for r in row], y_rest)
                y_at = b.add(y, b.mul(whole, I64(size)))
                copy_bytes(b, y_at, y_rest, b.mul(rest, I64(size)))

    _per_format(b, code, emit)


def _emit_decode(b: ir.IRBuilder, args: Any) -> None:
    code, row, out, d = args

    def emit(fmt: str) -> None:
        n_bytes, decode = _decode(fmt, row, d, b)
        with cgutils.for_range(b, b.udiv(d, I64(BLOCK)), intp=I64) as loop:
            value = decode(b, b.add(row, b.mul(loop.index, I64(n_bytes))))
            store(b, value, b.add(out, b.mul(loop.index, I64(4 * BLOCK))))
        if fmt not in _BLOCKS:
            with the_rest(b, d) as (whole, rest):
                values = zeroed(b, 4 * BLOCK)
                store(b, decode(b, padded(b, row, whole, rest, n_bytes // BLOCK)), values)
                copy_bytes(b, b.add(out, b.mul(whole, I64(4))), values, b.mul(rest, I64(4)))

    _per_format(b, code, emit)


def _addresses(n: int) -> tuple[types.Type, ...]:
    return (types.int64,) * n


@intrinsic
def _dot(typing: Any, code: Any, row: Any, x: Any, d: Any, ahead: Any) -> Any:
    """row . x -> float32."""
    return types.float32(*_addresses(5)), lambda c, b, s, args: _emit_dot(b, args, False)


@intrinsic
def _dot_fixed(typing: Any, code: Any, row: Any, x: Any, d: Any, ahead: Any) -> Any:
    """row . x -> int64."""
    return types.int64(*_addresses(5)), lambda c, b, s, args: _emit_dot(b, args, True)


def _adds_rows(n_rows: int, deterministic: bool) -> Any:
    @intrinsic
    def add(typing: Any, code: Any, factors: Any, rows: Any, y: Any, d: Any, ahead: Any) -> Any:
        def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            _emit_add_rows(b, args, n_rows, deterministic)
            return context.get_dummy_value()

        return types.void(*_addresses(6)), emit

    return add


_STEP = 2.0**-FIXED_BITS
_RELU2, _DRELU, _SILU = (ACTIVATIONS.index(name) for name in ("relu2", "drelu", "silu"))
RAW = len(ACTIVATIONS)  # no activation

# y += factor * row for one row, or four: y is then read and written once.
AT_ONCE = 4
# Neurons between the one that is read and the one that is asked for from memory.
AHEAD = 4
_add_row, _add_rows = _adds_rows(1, False), _adds_rows(AT_ONCE, False)
_add_row_fixed, _add_rows_fixed = _adds_rows(1, True), _adds_rows(AT_ONCE, True)


@intrinsic
def _decode_row(typing: Any, code: Any, row: Any, out: Any, d: Any) -> Any:
    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_decode(b, args)
        return context.get_dummy_value()

    return types.void(*_addresses(4)), emit


@njit(nogil=True, cache=True)
def row_dot(deterministic: bool, code: int, row: int, x: int, d: int, ahead: int) -> Any:
    """row . x -> float32, of either numerics."""
    if deterministic:
        return np.float32(np.float64(_dot_fixed(code, row, x, d, ahead)) * _STEP)
    return _dot(code, row, x, d, ahead)


@njit(nogil=True, cache=True)
def _add_to(
    deterministic: bool, code: int, factors: Any, rows: Any, n: int, y: int, d: int, ahead: int
) -> None:
    """y += factors[:n] @ rows[:n], one after the other."""
    at, row = factors.ctypes.data, rows.ctypes.data
    if n == AT_ONCE:
        if deterministic:
            _add_rows_fixed(code, at, row, y, d, ahead)
        else:
            _add_rows(code, at, row, y, d, ahead)
        return
    for i in range(n):
        if deterministic:
            _add_row_fixed(code, at + 4 * i, row + 8 * i, y, d, ahead)
        else:
            _add_row(code, at + 4 * i, row + 8 * i, y, d, ahead)


@njit(nogil=True, cache=True)
def silu(gate: Any) -> Any:
    """As torch_ref.silu: plain float64 operations in a stated order, then float32."""
    t = -min(abs(np.float64(gate)), 700.0)
    k = np.floor(t * 1.4426950408889634 + 0.5)
    r = (t - k * 0.6931471803691238) - k * 1.9082149292705877e-10
    p = 1.0
    for n in range(13, 0, -1):
        p = p * r / n + 1.0
    p = math.ldexp(p, int(k))
    return np.float32(np.float64(gate) * ((1.0 if gate >= 0 else p) / (1.0 + p)))


@njit(nogil=True, cache=True)
def activate(gate: Any, rule: int, threshold: Any) -> Any:
    """torch_ref.activate of one value; rule: the place of the name in ACTIVATIONS."""
    zero = np.float32(0.0)
    if rule == _SILU:
        value = silu(gate)
        return value if abs(value) > threshold else zero
    if not gate > threshold:
        return zero
    return gate * gate if rule == _RELU2 else gate


@njit(nogil=True, cache=True)
def gates(
    deterministic: bool,
    code: int,
    rows: int,  # address of the first
    row_stride: int,  # bytes from one row to the next
    n: int,
    d: int,
    x: Any,  # float32 [n_tokens, d]
    bias: Any,  # float32 [n] or empty
    rule: int,  # place in ACTIVATIONS, or RAW
    threshold: Any,
    out: Any,  # float32 [n_tokens, n]
) -> None:
    n_tokens, x_at = x.shape[0], x.ctypes.data
    decoded = np.empty(d if n_tokens > 1 else 0, np.float32)
    for i in range(n):
        row = rows + i * row_stride
        ahead, kind = row + row_stride, code
        if n_tokens > 1:  # decoded once for all
            _decode_row(code, row, decoded.ctypes.data, d)
            row, kind = decoded.ctypes.data, 0
        for t in range(n_tokens):
            gate = row_dot(deterministic, kind, row, x_at + 4 * d * t, d, ahead)
            if bias.shape[0]:
                gate += bias[i]
            out[t, i] = gate if rule == RAW else activate(gate, rule, threshold)


@njit(nogil=True, cache=True)
def union(
    deterministic: bool,
    code: int,
    rows: int,  # address of the first bundle
    place_stride: int,  # bytes
    row_stride: int,  # bytes
    n_rows: int,  # of a bundle
    index: Any,  # int32 [n]
    gated: bool,
    x: Any,  # float32 [n_tokens, d]
    act_given: bool,
    act: Any,  # float32 [n_tokens, n] or empty
    gate_b: Any,  # float32 [n] or empty
    up_b: Any,  # float32 [n] or empty
    rule: int,
    threshold: Any,
    fired: Any,  # bool [n_tokens, n] or empty; out
    y_at: int,  # address of float32 or int64 [n_tokens, d], zeros on entry
) -> None:
    """What neurons add waits until AT_ONCE of them fired, so that y is passed over once for all.

    Of several tokens, rows are decoded once, some neurons at a time.
    """
    n, (n_tokens, d), x_at = index.shape[0], x.shape, x.ctypes.data
    y_stride = d * (8 if deterministic else 4)
    factors, downs = np.empty(AT_ONCE, np.float32), np.empty(AT_ONCE, np.int64)
    chunk = n if n_tokens == 1 else 2 * AT_ONCE
    decoded = np.empty(chunk * n_rows * d if n_tokens > 1 else 0, np.float32)
    kind, row_bytes, buffer = code, row_stride, decoded.ctypes.data
    if n_tokens > 1:
        kind, row_bytes = 0, 4 * d
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        if n_tokens > 1:
            for i in range(start, stop):
                for r in range(n_rows):
                    row = rows + index[i] * place_stride + r * row_stride
                    _decode_row(code, row, buffer + ((i - start) * n_rows + r) * row_bytes, d)
        for t in range(n_tokens):
            waiting, x_t, y_t = 0, x_at + 4 * d * t, y_at + y_stride * t
            for i in range(start, stop):
                if n_tokens > 1:
                    bundle = buffer + (i - start) * n_rows * row_bytes
                    ahead = bundle + n_rows * row_bytes
                else:
                    bundle = rows + index[i] * place_stride
                    ahead = rows + index[min(i + AHEAD, n - 1)] * place_stride
                up, down = (n_rows - 2) * row_bytes, (n_rows - 1) * row_bytes
                if act_given:
                    a = act[t, i]
                else:
                    a = row_dot(deterministic, kind, bundle, x_t, d, ahead)
                    if gate_b.shape[0]:
                        a += gate_b[i]
                    a = activate(a, rule, threshold)
                fires = a != 0
                if gated and fires:
                    u = row_dot(deterministic, kind, bundle + up, x_t, d, ahead + up)
                    if up_b.shape[0]:
                        u += up_b[i]
                    fires = rule != _DRELU or u > 0
                    a *= u
                if fired.shape[0]:
                    fired[t, i] = fires
                if fires:
                    factors[waiting], downs[waiting] = a, bundle + down
                    waiting += 1
                    if waiting == AT_ONCE:
                        _add_to(deterministic, kind, factors, downs, waiting, y_t, d, ahead + down)
                        waiting = 0
            _add_to(deterministic, kind, factors, downs, waiting, y_t, d, y_t)

"""Vector instructions that `numba_rows` is built from: a block of 32 lanes at an address.

numba's cache on disk does not see changes in this file: after one, touch numba_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba.core.cgutils
from llvmlite import ir

from kairox_exec.formats import BLOCK

cgutils: Any = numba.core.cgutils

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_CACHE_LINE_BYTES = 64


def vector(element: ir.Type, lanes: int = BLOCK) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def load(b: ir.IRBuilder, address: ir.Value, what: ir.Type) -> ir.Value:
    return b.load(b.inttoptr(address, what.as_pointer()), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def splat(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    one = b.insert_element(ir.Constant(vector(value.type), ir.Undefined), value, I32(0))
    zeros = ir.Constant(vector(I32), [0] * BLOCK)
    return b.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), zeros)


def plus(b: ir.IRBuilder, address: ir.Value, n_bytes: int) -> ir.Value:
    return b.add(address, I64(n_bytes))


def prefetch(b: ir.IRBuilder, address: ir.Value, n_bytes: int) -> None:
    """Ask for a block's lines; an address that is not mapped does no harm."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, n_bytes, _CACHE_LINE_BYTES):
        at = b.inttoptr(plus(b, address, line), pointer)
        b.call(
            function, [at, I32(0), I32(2), I32(1)]
        )  # to read, not into L1 (x and y are there), data


def sum_lanes(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Halves added to halves: the same order for every row."""
    element, lanes = value.type.element, BLOCK
    add = b.fadd if element == F32 else b.add
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        masks = (range(lanes), range(lanes, 2 * lanes))
        low, high = (
            b.shuffle_vector(value, undefined, ir.Constant(vector(I32, lanes), list(mask)))
            for mask in masks
        )
        value = add(low, high)
    return b.extract_element(value, I32(0))


def zeroed(b: ir.IRBuilder, n_bytes: int) -> ir.Value:
    """Address of zeros on the stack."""
    kind = ir.ArrayType(I8, n_bytes)
    place = cgutils.alloca_once(b, kind)
    b.store(ir.Constant(kind, None), place)
    return b.ptrtoint(place, I64)


def copy_bytes(b: ir.IRBuilder, to: ir.Value, source: ir.Value, n_bytes: ir.Value) -> None:
    pointer = I8.as_pointer()
    cgutils.raw_memcpy(b, b.inttoptr(to, pointer), b.inttoptr(source, pointer), n_bytes, itemsize=1)


@contextmanager
def the_rest(b: ir.IRBuilder, d: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Where d is not whole blocks: weights before the rest, and in it."""
    rest = b.urem(d, I64(BLOCK))
    with b.if_then(b.icmp_unsigned("!=", rest, I64(0)), likely=False):
        yield b.sub(d, rest), rest


def padded(
    b: ir.IRBuilder, address: ir.Value, whole: ir.Value, rest: ir.Value, each: int
) -> ir.Value:
    """Address of a copy of the rest of an array of `each` bytes an element, then zeros."""
    place = zeroed(b, each * BLOCK)
    copy_bytes(b, place, b.add(address, b.mul(whole, I64(each))), b.mul(rest, I64(each)))
    return place

"""How one row of a neuron is stored: `d_model` weights as floats, as int8, or in ggml's blocks.

A format says the dtype and the width of a stored row; `encode` and `decode` go between float32 and
it. Every tensor of rows is [..., width] of the format's dtype, so that a bundle is [n_rows, width]
and moves as bytes. Memory filled with 0xFF decodes to NaN in every format: a slot that is read
before anything was copied into it cannot pass for zeros.

  float32, float16, bfloat16   the weights themselves
  int8    d_model int8, then the row's scale as float32: w = scale * q, scale = max|w| / 127
  q8_0    blocks of 32: a float16 scale, then 32 int8                       (ggml block_q8_0)
  q4_0    blocks of 32: a float16 scale, then 16 bytes; byte j holds weight j in its low and weight
          j + 16 in its high four bits, as q + 8                             (ggml block_q4_0)

Source of the blocks: ggml-common.h and ggml-quants.c of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError

Format = Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"]
FORMATS: tuple[str, ...] = get_args(Format)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK = 32
SCALE_BYTES = {"int8": 4, "q8_0": 2, "q4_0": 2}  # of a row; of a block


def storage_dtype(fmt: str) -> torch.dtype:
    """The dtype of a tensor of stored rows."""
    require_format(fmt)
    return FLOATS.get(fmt, torch.int8 if fmt == "int8" else torch.uint8)


def row_width(fmt: str, d_model: int) -> int:
    """Elements of `storage_dtype` in a stored row of `d_model` weights."""
    require_format(fmt)
    if fmt in FLOATS:
        return d_model
    if fmt == "int8":
        return d_model + SCALE_BYTES[fmt]
    if d_model % BLOCK:
        raise KairoxError(
            f"rows of {d_model} weights are not whole blocks of {BLOCK}, so they cannot be {fmt}; "
            "use int8, which has one scale a row"
        )
    per_block = BLOCK if fmt == "q8_0" else BLOCK // 2
    return d_model // BLOCK * (SCALE_BYTES[fmt] + per_block)


def row_bytes(fmt: str, d_model: int) -> int:
    """Bytes of a stored row."""
    return row_width(fmt, d_model) * storage_dtype(fmt).itemsize


def encode(weights: torch.Tensor, fmt: str) -> torch.Tensor:
    """weights [..., d_model], any float dtype -> stored rows [..., width], contiguous.

    KairoxError where a weight is not finite, or too large for a float16 (scale).
    """
    if not finite(weights):
        raise KairoxError("a weight is NaN or infinite; the model's files are damaged")
    width = row_width(fmt, weights.shape[-1])
    if fmt in FLOATS:
        rows = weights.to(FLOATS[fmt]).contiguous()
    elif fmt == "int8":
        rows = _int8_rows(weights.float())
    else:
        rows = _blocks(weights.float(), fmt)
    if fmt in ("float16", "q8_0", "q4_0") and not finite(_scales(rows, fmt)):
        raise KairoxError(f"a weight is too large for {fmt}; use float32, bfloat16 or int8")
    assert rows.shape == (*weights.shape[:-1], width)
    return rows


def decode(rows: torch.Tensor, fmt: str) -> torch.Tensor:
    """Stored rows [..., width] -> float32 [..., d_model]."""
    require_format(fmt)
    if fmt in FLOATS:
        return rows.float()
    if fmt == "int8":
        return rows[..., :-4].float() * _scales(rows, fmt)
    d_bytes = SCALE_BYTES[fmt] + (BLOCK if fmt == "q8_0" else BLOCK // 2)
    blocks = rows.reshape(*rows.shape[:-1], -1, d_bytes)
    scale = _bytes_as(blocks[..., :2], torch.float16).float()
    codes = blocks[..., 2:]
    if fmt == "q8_0":
        values = codes.contiguous().view(torch.int8).float()
    else:
        low, high = (codes & 15).float() - 8, (codes >> 4).float() - 8
        values = torch.cat([low, high], dim=-1)
    return (values * scale).flatten(-2)


def finite(values: torch.Tensor) -> bool:
    """Whether all are; by the extremes, 40 times as fast on a CPU as asking every value."""
    if values.numel() == 0:
        return True
    least, most = torch.aminmax(values)  # both are NaN if one value is
    return bool(torch.isfinite(least) & torch.isfinite(most))


def as_bytes(rows: torch.Tensor) -> NDArray[np.uint8]:
    """[n, n_bytes of a bundle], the same host memory: NumPy has no bfloat16."""
    n_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    return rows.view(torch.uint8).numpy().reshape(len(rows), n_bytes)


def copy_rows(
    rows: torch.Tensor, ids: NDArray[np.int32], to: torch.Tensor, places: NDArray[np.int32]
) -> None:
    """to[places] = rows[ids]; NumPy takes half the time of torch's two ops (measured)."""
    as_bytes(to)[places] = as_bytes(rows)[ids]


def require_format(fmt: str) -> None:
    if fmt not in FORMATS:
        raise KairoxError(f"unknown weights {fmt!r}; allowed: {', '.join(FORMATS)}")


def _int8_rows(weights: torch.Tensor) -> torch.Tensor:
    scale = weights.abs().amax(dim=-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    codes = (weights * inverse).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1).contiguous()


def _blocks(weights: torch.Tensor, fmt: str) -> torch.Tensor:
    blocks = weights.reshape(*weights.shape[:-1], -1, BLOCK)
    if fmt == "q8_0":
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    else:  # ggml divides the value of largest magnitude, with its sign, by -8
        at = blocks.abs().argmax(dim=-1, keepdim=True)
        scale = blocks.gather(-1, at) / -8
    inverse = torch.where(scale != 0, 1 / scale, torch.zeros_like(scale))
    if fmt == "q8_0":
        codes = (blocks * inverse).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        whole = (blocks * inverse + 8.5).floor().clamp(0, 15).to(torch.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    stored_scale = scale.to(torch.float16).contiguous().view(torch.uint8)
    return torch.cat([stored_scale, codes], dim=-1).flatten(-2).contiguous()


def _scales(rows: torch.Tensor, fmt: str) -> torch.Tensor:
    """What must be finite: the weights of a float format, the scales of another, as float."""
    if fmt in FLOATS:
        return rows
    if fmt == "int8":
        return _bytes_as(rows[..., -4:], torch.float32)
    d_bytes = SCALE_BYTES[fmt] + (BLOCK if fmt == "q8_0" else BLOCK // 2)
    blocks = rows.reshape(*rows.shape[:-1], -1, d_bytes)
    return _bytes_as(blocks[..., :2], torch.float16)


def _bytes_as(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, always: rows of odd bytes put what they hold where no wider type may be read."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)

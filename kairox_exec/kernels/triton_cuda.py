"""The functions of torch_ref for CUDA tensors, in Triton; and copies that the GPU makes itself.

Same arguments and meaning as `torch_ref`. `deterministic` gives the bits that torch_ref and
numba_cpu give on the CPU. `fast` hands more than FEW_TOKENS tokens to torch, whose matrix products
read each row once for all of them.

Import it only where triton is installed (the extra `cuda`).
"""

from __future__ import annotations

from typing import Any

import torch

from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.formats import storage_dtype
from kairox_exec.kernels import torch_ref
from kairox_exec.kernels.torch_ref import check_shapes, total
from kairox_exec.kernels.triton_rows import down_kernel, gate_kernel, gather_kernel, hidden_kernel

__all__ = ["code_dots", "ffn_union", "gate_all", "gather_rows", "total"]

FEW_TOKENS = 4
BLOCK_N = 4  # neurons of a program that takes dot products
ENTRIES = 32  # down rows added by one program
DOWN_N, DOWN_D = 8, 256  # rows at a time, and columns of a program
GATHER_BLOCK = 4096  # words in flight per program


def gate_all(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    n_tokens, n = x.shape[0], gate_rows.shape[0]
    if _is_torchs(n_tokens, spec):
        return torch_ref.gate_all(x, gate_rows, gate_b, spec)
    _check_rows(gate_rows, spec)
    out = torch.empty((n_tokens, n), dtype=torch.float32, device=x.device)
    if n and n_tokens:
        gate_kernel[(-(-n // BLOCK_N), n_tokens)](
            x.contiguous(), gate_rows, _or(gate_b, x), out, n, gate_rows.stride(0),
            spec.threshold, ACT=spec.activation, HAS_B=gate_b is not None,
            BLOCK_N=BLOCK_N, **how_compiled(spec),
        )  # fmt: skip
    return out


def ffn_union(
    x: torch.Tensor,
    rows: torch.Tensor,
    index: torch.Tensor,
    spec: FfnSpec,
    *,
    act: torch.Tensor | None = None,
    gate_b: torch.Tensor | None = None,
    up_b: torch.Tensor | None = None,
    fired: torch.Tensor | None = None,
) -> torch.Tensor:
    n_tokens, n = x.shape[0], index.shape[0]
    if _is_torchs(n_tokens, spec):
        return torch_ref.ffn_union(
            x, rows, index, spec, act=act, gate_b=gate_b, up_b=up_b, fired=fired
        )
    check_shapes(x, rows, index, spec, act)
    _check_rows(rows, spec)
    deterministic = spec.numerics == "deterministic"
    kept = torch.int64 if deterministic else torch.float32
    if not (n and n_tokens):
        return torch.zeros(x.shape, dtype=kept, device=x.device)
    x = x.contiguous()
    if act is not None and act.stride(1) != 1:
        act = act.contiguous()
    if fired is not None and fired.stride(1) != 1:
        raise ValueError(f"fired has strides {fired.stride()}; its entries must be adjacent")
    hidden = torch.empty((n_tokens, n), dtype=torch.float32, device=x.device)
    how = how_compiled(spec)
    hidden_kernel[(-(-n // BLOCK_N), n_tokens)](
        x, rows, index, _or(act, x), _or(gate_b, x), _or(up_b, x), hidden,
        x if fired is None else fired.view(torch.uint8), n, rows.stride(0),
        rows.stride(1) * (rows.shape[1] - 2),
        0 if act is None else act.stride(0), 0 if fired is None else fired.stride(0),
        spec.threshold, ACT=spec.activation, GATED=spec.gated, ACT_GIVEN=act is not None,
        HAS_GATE_B=gate_b is not None, HAS_UP_B=up_b is not None, TELL=fired is not None,
        BLOCK_N=BLOCK_N, **how,
    )  # fmt: skip
    splits = -(-n // ENTRIES)
    if deterministic:
        y = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    else:
        y = torch.empty((splits, *x.shape), dtype=torch.float32, device=x.device)
    how["BLOCK_D"] = min(how["BLOCK_D"], DOWN_D)
    down_kernel[(-(-spec.d_model // how["BLOCK_D"]), splits, n_tokens)](
        hidden, rows, index, y, n, n_tokens, rows.stride(0),
        rows.stride(1) * (rows.shape[1] - 1), ENTRIES=ENTRIES, BLOCK_N=DOWN_N, **how,
    )  # fmt: skip
    return y if deterministic else y.sum(dim=0)


def code_dots(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    n_tokens, n = x.shape[0], codes.shape[0]
    if n_tokens > FEW_TOKENS:
        return torch_ref.code_dots(x, codes)
    if codes.dtype != torch.int8 or codes.stride(-1) != 1:
        raise ValueError(f"codes are {codes.dtype} with strides {codes.stride()}; expected int8")
    out = torch.empty((n_tokens, n), dtype=torch.float32, device=x.device)
    if n and n_tokens:
        gate_kernel[(-(-n // BLOCK_N), n_tokens)](
            x.contiguous(), codes, x, out, n, codes.stride(0), 0.0, ACT="none", HAS_B=False,
            BLOCK_N=BLOCK_N, D=x.shape[1], BLOCK_D=min(512, _power_of_two(x.shape[1])),
            FMT="codes", DET=False, num_warps=4,
        )  # fmt: skip
    return out


def gather_rows(
    rows: torch.Tensor,
    ids: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    n_programs: int,
) -> None:
    """slots[places] = rows[ids], on the current stream, without the CPU and its copy engines.

    rows [n, words] int32 or int64, pinned host memory, which the GPU reads over the link; slots
    [m, words] of the same type on the device; ids, places int32 [k] on the device, places
    distinct. n_programs: how many of the GPU's programs copy; more of them fill the link sooner and
    leave less to kernels that run beside.
    """
    if rows.dtype not in (torch.int32, torch.int64) or rows.dtype != slots.dtype:
        raise ValueError(f"rows {rows.dtype}, slots {slots.dtype}; expected both int32 or int64")
    if rows.ndim != 2 or slots.ndim != 2 or rows.shape[1] != slots.shape[1]:
        raise ValueError(
            f"rows {tuple(rows.shape)}, slots {tuple(slots.shape)}; expected [n, words] both"
        )
    if not (rows.is_contiguous() and slots.is_contiguous()):
        raise ValueError("rows and slots must be contiguous")
    if ids.shape != places.shape or ids.dtype != torch.int32 or places.dtype != torch.int32:
        raise ValueError(
            f"ids {ids.dtype} {tuple(ids.shape)}, places {places.dtype} {tuple(places.shape)}; "
            "expected int32 [k] both"
        )
    if n_programs < 1:
        raise ValueError(f"n_programs must be 1 or more, got {n_programs}")
    k, words = ids.shape[0], rows.shape[1]
    if k:
        block = min(GATHER_BLOCK, _power_of_two(words))
        gather_kernel[(min(n_programs, k),)](
            rows, ids, slots, places, k, WORDS=words, BLOCK=block, num_warps=8
        )


def _is_torchs(n_tokens: int, spec: FfnSpec) -> bool:
    return spec.numerics == "fast" and n_tokens > FEW_TOKENS


def how_compiled(spec: FfnSpec) -> dict[str, Any]:
    """Compile-time arguments that all kernels of the FFN share."""
    deterministic = spec.numerics == "deterministic"
    return {
        "D": spec.d_model,
        "BLOCK_D": min(512, _power_of_two(spec.d_model)),
        "FMT": spec.fmt,
        "DET": deterministic,
        "num_warps": 4,
        "enable_fp_fusion": not deterministic,
    }


def _check_rows(rows: torch.Tensor, spec: FfnSpec) -> None:
    if rows.dtype != storage_dtype(spec.fmt) or rows.stride(-1) != 1:
        raise ValueError(
            f"rows are {rows.dtype} with strides {rows.stride()}; expected "
            f"{storage_dtype(spec.fmt)} for {spec.fmt}, each row's elements adjacent"
        )


def _or(tensor: torch.Tensor | None, never_read: torch.Tensor) -> torch.Tensor:
    """Triton wants a pointer even where the compiled kernel does not use it."""
    return never_read if tensor is None else tensor


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

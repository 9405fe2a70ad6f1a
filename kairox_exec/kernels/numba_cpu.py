"""The functions of torch_ref for the host's residual rows: each row read once, by one thread.

Same arguments and meaning as `torch_ref`, every format, activation and numerics; CPU tensors only.
The compiled loops (`numba_rows`) are serial and release the GIL, so a pool of Python threads runs
them side by side on disjoint parts of `index` (numba's own `parallel=True` is not safe to enter
from two threads). They compile once for everything, on the first call, and are cached on disk:
call `warm_up` before timing anything.

`fast`: a row's gate does not depend on the other rows of the call, nor on how many tokens there
are; y is added up in the order of `index`, so neurons that do not fire change no bit of it.
`deterministic`: bit-equal to torch_ref, in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kairox_exec.ffn_spec import ACTIVATIONS, FfnSpec
from kairox_exec.kernels import numba_rows
from kairox_exec.kernels.torch_ref import check_shapes, total

__all__ = ["code_dots", "ffn_union", "gate_all", "gate_values", "total", "warm_up"]

_NONE = np.empty(0, dtype=np.float32)
_NO_ACT = np.empty((0, 0), dtype=np.float32)
_NO_FIRED = np.empty((0, 0), dtype=np.bool_)


def gate_all(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    return _gates(x, gate_rows, gate_b, spec, ACTIVATIONS.index(spec.activation))


def gate_values(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    return _gates(x, gate_rows, gate_b, spec, numba_rows.RAW)


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
    check_shapes(x, rows, index, spec, act)
    deterministic = spec.numerics == "deterministic"
    y = torch.zeros(x.shape, dtype=torch.int64 if deterministic else torch.float32)
    out = None if fired is None else np.empty(fired.shape, np.bool_)
    if index.shape[0]:
        size = rows.element_size()
        numba_rows.union(
            deterministic,
            numba_rows.FORMAT_CODES[spec.fmt],
            _address(rows),
            rows.stride(0) * size,
            rows.stride(1) * size,
            rows.shape[1],
            index.to(torch.int32).contiguous().numpy(),
            spec.gated,
            x.contiguous().numpy(),
            act is not None,
            _NO_ACT if act is None else act.contiguous().numpy(),
            _array(gate_b),
            _array(up_b),
            ACTIVATIONS.index(spec.activation),
            np.float32(spec.threshold),
            _NO_FIRED if out is None else out,
            y.data_ptr(),
        )
    if fired is not None:
        fired.copy_(torch.from_numpy(out))
    return y


def code_dots(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """x float32 [n_tokens, d] by int8 codes [n, d] -> float32 [n_tokens, n]: see `screening`."""
    out = torch.empty((x.shape[0], codes.shape[0]), dtype=torch.float32)
    assert codes.dtype == torch.int8
    _call_gates(x, codes, None, False, numba_rows.CODES, numba_rows.RAW, 0.0, out)
    return out


def warm_up() -> None:
    """Compile, or load what was compiled before: seconds the first time, whatever the model."""
    spec = FfnSpec(1, False, "relu", 0.0, "float32")
    x = torch.zeros((1, 1))
    gate_all(x, x, None, spec)
    ffn_union(x, torch.zeros((1, 2, 1)), torch.zeros(1, dtype=torch.int32), spec)


def _gates(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, spec: FfnSpec, rule: int
) -> torch.Tensor:
    if rows.shape[1:] != (spec.width,) or x.shape[1:] != (spec.d_model,):
        raise ValueError(
            f"gate rows are {tuple(rows.shape)} and x is {tuple(x.shape)}; expected "
            f"[neurons, {spec.width}] and [tokens, {spec.d_model}] ({spec})"
        )
    out = torch.empty((x.shape[0], rows.shape[0]), dtype=torch.float32)
    fixed, code = spec.numerics == "deterministic", numba_rows.FORMAT_CODES[spec.fmt]
    _call_gates(x, rows, bias, fixed, code, rule, spec.threshold, out)
    return out


def _call_gates(
    x: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    deterministic: bool,
    code: int,
    rule: int,
    threshold: float,
    out: torch.Tensor,
) -> None:
    numba_rows.gates(
        deterministic,
        code,
        _address(rows),
        rows.stride(0) * rows.element_size(),
        rows.shape[0],
        x.shape[1],
        x.contiguous().numpy(),
        _array(bias),
        rule,
        np.float32(threshold),
        out.numpy(),
    )


def _address(rows: torch.Tensor) -> int:
    """Of the first row. Rows may lie apart, their elements may not."""
    assert rows.device.type == "cpu"
    assert rows.stride(-1) == 1 or rows.shape[-1] == 1
    return rows.data_ptr()


def _array(values: torch.Tensor | None) -> Any:
    return _NONE if values is None else values.contiguous().numpy()

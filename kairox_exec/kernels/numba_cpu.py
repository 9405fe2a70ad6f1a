"""The functions of torch_ref for the host's residual rows: each row read once, by one thread.

Same arguments and meaning as `torch_ref`; CPU tensors only. The compiled loops are serial and
release the GIL, so a pool of Python threads runs them side by side on disjoint parts of `index`
(numba's own `parallel=True` is not safe to enter from two threads). They compile on first use and
are cached on disk: make one call before timing anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.kernels.torch_ref import check_shapes, total

__all__ = ["ffn_union", "gate_all", "total"]

# Reordering sums and fusing multiply-add is what lets LLVM vectorise a float32 dot product. NaN and
# infinity keep their meaning. A row's result does not depend on which other rows are in the call.
_FASTMATH = {"reassoc", "contract", "nsz"}
_NONE = np.empty(0, dtype=np.float32)


def gate_all(
    x: torch.Tensor, gate_rows: torch.Tensor, gate_b: torch.Tensor | None, spec: FfnSpec
) -> torch.Tensor:
    _require_built(spec)
    out = torch.empty((x.shape[0], gate_rows.shape[0]), dtype=torch.float32)
    threshold = np.float32(spec.threshold)
    _gate_all(x.numpy(), gate_rows.numpy(), _array(gate_b), threshold, out.numpy())
    return out


def _require_built(spec: FfnSpec) -> None:
    if (spec.activation, spec.fmt, spec.numerics) != ("relu", "float32", "fast"):
        raise NotImplementedError(f"numba kernels of {spec}")


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
    _require_built(spec)
    assert fired is None
    check_shapes(x, rows, index, spec, act)
    y = torch.zeros(x.shape, dtype=torch.float32)
    if index.shape[0]:
        _ffn(
            x.numpy(),
            rows.numpy(),
            index.numpy(),
            spec.gated,
            act is not None,
            np.empty((0, 0), dtype=np.float32) if act is None else act.contiguous().numpy(),
            _array(gate_b),
            _array(up_b),
            np.float32(spec.threshold),
            y.numpy(),
        )
    return y


def _array(values: torch.Tensor | None) -> Any:
    return _NONE if values is None else values.numpy()


@njit(nogil=True, cache=True, fastmath=_FASTMATH)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@njit(nogil=True, cache=True, fastmath=_FASTMATH)
def _gate_all(x: Any, gate_w: Any, gate_b: Any, threshold: Any, out: Any) -> None:
    for i in range(gate_w.shape[0]):
        for t in range(x.shape[0]):
            gate = _dot(gate_w[i], x[t])
            if gate_b.shape[0]:
                gate += gate_b[i]
            out[t, i] = gate if gate > threshold else np.float32(0.0)


@njit(nogil=True, cache=True, fastmath=_FASTMATH)
def _ffn(
    x: Any,  # [n_tokens, d_model]
    rows: Any,  # [n_places, n_rows, d_model]
    index: Any,  # [n]
    gated: bool,
    act_given: bool,
    act: Any,  # [n_tokens, n] or empty
    gate_b: Any,  # [n] or empty
    up_b: Any,  # [n] or empty
    threshold: Any,
    y: Any,  # [n_tokens, d_model], zeros on entry
) -> None:
    last = rows.shape[1] - 1
    for i in range(index.shape[0]):
        bundle = rows[index[i]]
        for t in range(x.shape[0]):
            if act_given:
                a = act[t, i]
                if a == 0.0:
                    continue
            else:
                a = _dot(bundle[0], x[t])
                if gate_b.shape[0]:
                    a += gate_b[i]
                if not a > threshold:
                    continue
            if gated:
                up = _dot(bundle[last - 1], x[t])
                if up_b.shape[0]:
                    up += up_b[i]
                a *= up
            down = bundle[last]
            out = y[t]
            for j in range(out.shape[0]):
                out[j] += a * down[j]

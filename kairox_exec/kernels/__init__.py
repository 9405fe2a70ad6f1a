"""The FFN kernels: a readable torch reference; the same few functions fast, in numba and Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kairox_exec.ffn_spec import FfnSpec


class Kernels(Protocol):
    """What a module of kernels offers; `torch_ref` says what each function gives."""

    def gate_all(
        self,
        x: torch.Tensor,
        gate_rows: torch.Tensor,
        gate_b: torch.Tensor | None,
        spec: FfnSpec,
    ) -> torch.Tensor: ...

    def ffn_union(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        spec: FfnSpec,
        *,
        act: torch.Tensor | None = None,
        gate_b: torch.Tensor | None = None,
        up_b: torch.Tensor | None = None,
        fired: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def code_dots(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor: ...

    def total(self, y: torch.Tensor) -> torch.Tensor: ...

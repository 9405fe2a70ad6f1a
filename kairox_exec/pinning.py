"""Page-locking the rows where they lie.

`cudaHostRegister` locks exactly the pages given; torch's pinned allocator rounds up to a power of
two (PyTorch issue 95823). Where it is refused the rows stay pageable, and `Held` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_CUDA: Any = torch.cuda  # parts of it are untyped


@dataclass(slots=True)
class Held:
    """What has been locked. `refused`: bytes that stayed pageable, and why the last did."""

    pinned_bytes: int = 0
    pageable_bytes: int = 0
    refused: str = ""
    _locked: list[torch.Tensor] = field(default_factory=list)

    @property
    def memory(self) -> str:
        return "pageable" if self.pageable_bytes else "pinned"

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        n_bytes = rows.numel() * rows.element_size()
        if not n_bytes or any(rows.data_ptr() == other.data_ptr() for other in self._locked):
            return rows
        if not rows.is_pinned():
            error = _CUDA.cudart().cudaHostRegister(rows.data_ptr(), n_bytes, 0)
            if int(error) != 0:
                self.pageable_bytes += n_bytes
                self.refused = f"cudaHostRegister of {n_bytes} bytes: error {int(error)}"
                return rows
            self._locked.append(rows)
        self.pinned_bytes += n_bytes
        return rows

    def release(self) -> None:
        for rows in self._locked:
            _CUDA.cudart().cudaHostUnregister(rows.data_ptr())
        self._locked.clear()

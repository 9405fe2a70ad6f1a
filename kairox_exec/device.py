"""What the hybrid FFN needs of a machine: one small protocol, of `emulated` and of `cuda`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.lanes import Job
from kairox_exec.oplog import Op, Size

if TYPE_CHECKING:
    from kairox_sim.costs import CostModel
    from kairox_sim.events import Swap
    from kairox_sim.hardware import HardwareProfile


@dataclass(slots=True, eq=False)
class HandOver:
    """Residual neurons given to the host; `join` brings back their partial sums."""

    layer: int
    size: Size
    given_ns: int  # when the host could start at the earliest
    jobs: tuple[Job, ...]  # one for each part, in the order in which they are added


class Device(Protocol):
    """What the hybrid FFN needs of a machine. Called from the model's thread only.

    The gpu lane: `begin` .. `end` around each op, `think` .. `thought` around each decision,
    `reading` .. `read` around a decision on slots whose op is still to come.
    """

    costs: CostModel | None
    profile: HardwareProfile | None  # the machine whose memory budgets are planned for
    ops: list[Op]  # logged since they were last taken
    n_ops: int
    n_overruns: int

    @property
    def where(self) -> torch.device:
        """Of its memory, as torch names it."""
        ...

    @property
    def host_threads(self) -> int: ...

    @property
    def decide_blocks_gpu(self) -> bool:
        """Whether the gpu lane stands still while a policy thinks."""
        ...

    @property
    def status(self) -> dict[str, str | float]:
        """What a reader of its times has to know."""
        ...

    def hold(self, rows: torch.Tensor) -> torch.Tensor:
        """Host rows as copies want them (pinned, where that means something)."""
        ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor in device memory."""
        ...

    def send(self, ids: NDArray[np.int32]) -> torch.Tensor:
        """int32 in device memory, for ops that are launched from now on; they may not change."""
        ...

    def new_slots(
        self, n_slots: int, n_rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Device memory for bundles: bytes of 0xFF, NaN in every format, until copied into."""
        ...

    def fill(
        self,
        rows: torch.Tensor,
        ids: NDArray[np.int32],
        slots: torch.Tensor,
        places: NDArray[np.int32],
    ) -> None:
        """slots[places] = rows[ids], at once and before the run: no op."""
        ...

    def start_step(self) -> int:
        """The gpu lane is free from now on; returns now, in ns."""
        ...

    def end_step(self) -> int:
        """Now, in ns; transfers that have started by now are logged."""
        ...

    def begin(self) -> int: ...

    def end(self, t0_ns: int, kind: str, layer: int, size: Size) -> None: ...

    def think(self) -> None: ...

    def thought(self, layer: int, size: Size) -> None: ...

    def wait_decided(self, layer: int) -> None:
        """Let the gpu lane wait until the layer's latest decision is made."""
        ...

    def hand_over(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        works: Sequence[Callable[..., torch.Tensor]],
        size: Size,
    ) -> HandOver:
        """Copy inputs to the host and start every `work(*inputs)` there: partial sums.

        Of disjoint neurons, one for each thread of the host's pool; `join` adds them in order.
        """
        ...

    def join(self, handed: HandOver) -> torch.Tensor:
        """Wait for the host's partial sums; they are in device memory until the next hand-over.

        KairoxError, here and wherever something is waited for, where it never comes.
        """
        ...

    def copy(
        self,
        swaps: Sequence[Swap],
        rows: torch.Tensor,
        slots: torch.Tensor,
        *,
        at_once: bool = False,
    ) -> None:
        """Queue the copies of one plan's swaps from host `rows` to `slots`, after earlier ones.

        Between `think` and `thought` they are queued when thinking ends.

        at_once: the copies are made before returning and never reported as landed; the link is
        still busy for their time.
        """
        ...

    def reading(self) -> None:
        """Copies that are queued from now on overwrite nothing until `read`."""
        ...

    def read(self) -> None:
        """Every op that reads what they may overwrite has ended, or been launched."""
        ...

    def landed(self) -> list[int]:
        """Ids of swaps that have landed by now and were not returned before, in issue order."""
        ...

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        """Let the gpu lane wait until these have landed; `landed` returns them afterwards."""
        ...

    def drop_copies(self) -> None:
        """Let no copy land any more; returns when nothing writes to slots."""
        ...

    def close(self) -> None: ...

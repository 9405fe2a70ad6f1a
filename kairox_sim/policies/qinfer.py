"""Q-Infer's background swaps, which balance the two processors of a layer."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import (
    ABSENT,
    NOTHING,
    RESIDENT,
    Fills,
    Ids,
    Late,
    Observes,
    Share,
    State,
    Trigger,
)


class QInfer:
    """Swap the best uncached id for the worst cached one until CPU and GPU would take as long.

    Q-Infer (ACM TACO 2025, doi:10.1145/3764589; code: github.com/PDS-Lab/Q-Infer). The activity of
    a layer-step is the sum of shares of what was observed for it: cached (pinned and arriving too)
    it is the GPU's, else the CPU's. While cpu_active / cpu_rate > gpu_active / gpu_rate the most
    active uncached id takes a free slot, or that of the least active cached one; ties go to the
    lowest index. Every swap is a copy of its own, up/gate and down together. The paper's other stop
    rule, that compute waits, is late = cancel: what has not begun when the layer's FFN begins is
    given back.

    Decided: no swap that gains nothing (in decode, where all shares are 1, an active id never
    replaces an active one); and nothing moves where the GPU is the slower side. The released code
    then moves active ids out and inactive ones in, which copies rows that nobody reads only so that
    the CPU computes more; `reverse` does that too.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset({"gpu_over_cpu"})
    evicts_seen: ClassVar[bool] = True  # in a chunk, for one seen more often; and in reverse
    default_trigger: ClassVar[Trigger] = "attn_out"
    default_observes: ClassVar[Observes] = "predicted"
    default_late: ClassVar[Late] = "cancel"

    def __init__(
        self, n_layers: int, n_neurons: int, *, gpu_over_cpu: float, reverse: bool = False
    ) -> None:
        if not 0 < gpu_over_cpu < np.inf:
            raise KairoxError(f"qinfer's gpu_over_cpu must be above 0, got {gpu_over_cpu}")
        self.gpu_over_cpu, self.reverse = gpu_over_cpu, reverse
        self.activity = np.zeros((n_layers, n_neurons), np.float32)  # of the latest observation

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.activity[layer] = 0
        self.activity[layer][seen.astype(np.intp)] = 1 if share is None else share

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        activity = self.activity[layer]
        on_cpu = float(activity[state == ABSENT].sum(dtype=np.float64))
        on_gpu = float(activity[state != ABSENT].sum(dtype=np.float64))
        cached = (state == RESIDENT).nonzero()[0].astype(np.int32)
        if on_cpu * self.gpu_over_cpu > on_gpu:
            want = ((state == ABSENT) & (activity > 0)).nonzero()[0].astype(np.int32)
            want = want[np.argsort(-activity[want], kind="stable")]
            give = cached[np.argsort(activity[cached], kind="stable")]
            n = min(want.size, free_slots + give.size, limit)
            lost = np.concatenate([np.zeros(free_slots, np.float32), activity[give]])[:n]
            gain = activity[want[:n]].astype(np.float64) - lost
            moved = _before(gain)
            go = (gain > 0) & ((on_cpu - moved) * self.gpu_over_cpu > on_gpu + moved)
            n = _leading(go)
            return want[:n], give[: max(0, n - free_slots)]
        if not self.reverse:
            return NOTHING, NOTHING
        want = (state == ABSENT).nonzero()[0].astype(np.int32)
        want = want[np.argsort(activity[want], kind="stable")]
        give = cached[np.argsort(-activity[cached], kind="stable")]
        n = min(want.size, give.size, limit)
        gain = activity[give[:n]].astype(np.float64) - activity[want[:n]]
        moved = _before(gain)
        n = _leading((gain > 0) & (on_gpu - moved > (on_cpu + moved) * self.gpu_over_cpu))
        return want[:n], give[:n]


def _before(gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the swaps ahead of each have moved from one side to the other."""
    return np.cumsum(gain) - gain


def _leading(go: NDArray[np.bool_]) -> int:
    """How many at the front are true."""
    return int(go.size if go.all() else np.argmin(go))

"""StepRecord: what one forward pass did and how long it took; the same columns simulated and live.

Counts are neurons summed over the layers of the step unless the name says bytes. Unknown is nan,
never 0. `unexplained_s` (wall - gpu_busy - waits) is derived in `metrics`, never stored here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXACT = "exact"
LOSSY = "lossy: only what is predicted is computed"
APPROXIMATE = "approximate: neurons below an activation threshold are left out"


def exactness_of(gating: str, *, approximate: bool) -> str:
    """What is promised of the neurons that are computed, for labels: EXACT, or what is missing.

    approximate: silent neurons are not zero, and thresholds leave them out all the same.
    """
    if gating == "dense":
        return EXACT
    said = [APPROXIMATE] * approximate + [LOSSY] * (gating == "predicted")
    return "; ".join(said) or EXACT


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What the cache counted in one step; see StepRecord for the meaning of each."""

    evaluated: int
    active: float  # nan when the true set was not known (gating = predicted, live)
    predicted: float  # nan when nothing was predicted for any layer
    predicted_active: float
    hit_resident: int
    hit_on_time: int
    late: int
    residual: int
    loads: int
    loads_used_first: int
    wasted: int
    cancelled: int
    evictions: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerWaits:
    """What each layer of one step waited for: what a controller that acts per layer is told."""

    io: NDArray[np.bool_]  # [n_layers] copies planned for the layer were unfinished at its FFN
    cpu_s: NDArray[np.float64]  # [n_layers] the GPU waited for the host's partial sums


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass: a decode token, or one prefill chunk."""

    seq: int
    step: int  # counts forward passes over the whole run
    phase: str  # "prefill" | "decode"
    n_tokens: int
    context_len: int  # tokens in the KV cache after this step
    exact: bool  # False: neurons that the model would have fired may be missing, see exactness_of
    wall_s: float
    gpu_busy_s: float  # T_gpu: union of GPU work inside the step
    cpu_busy_s: float  # T_cpu: union of the pool's work on residual rows
    swap_busy_s: float  # T_io: union of h2d time carrying swaps and copies made on demand
    act_busy_s: float  # transfers of x and of partial sums, both directions
    predict_s: float  # part of gpu_busy_s
    decide_s: float  # the policy's own thinking
    wait_cpu_s: float  # GPU idle, waiting for the host's partial sums
    wait_io_s: float  # GPU idle, waiting for swaps
    wait_decide_s: float  # GPU idle, waiting for the policy
    evaluated: float
    active: float
    predicted: float
    predicted_active: float  # predicted and active
    hit_resident: float  # evaluated and resident before this layer-step planned anything
    hit_on_time: float  # evaluated on the GPU
    late: float  # evaluated while still arriving
    fetched: float  # evaluated on the GPU from a copy made on demand, which takes no slot
    residual: float  # evaluated on the CPU
    loads: float  # neurons whose copy was issued
    loads_used_first: float  # loads met by their first on-time use in this step
    wasted: float  # loads evicted before their first use
    cancelled: float
    evictions: float  # less those taken back where a copy was called off, of an earlier step
    # perhaps: then it may be below 0, and its sum over the run still is what was evicted
    h2d_bytes: float  # of the loads issued (landed, if copies are called off) and of the fetched;
    # gaps read through included
    threshold_scale: float  # the knob in force during this step; nan if nothing reads it

    @classmethod
    def of(cls, counts: StepCounts, **known: Any) -> StepRecord:
        """The cache's counts, and everything else as given."""
        return cls(**{f.name: getattr(counts, f.name) for f in fields(counts)}, **known)

    @classmethod
    def with_unknown(cls, **known: Any) -> StepRecord:
        """A record whose numeric fields are nan except the ones given."""
        blank: dict[str, Any] = {f.name: nan for f in fields(cls)}
        blank |= {"seq": 0, "step": 0, "phase": "decode", "n_tokens": 1}
        blank |= {"context_len": 0, "exact": True}
        return cls(**(blank | known))

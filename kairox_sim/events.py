"""What a NeuronCache answers, and what its journal is told: one event per call and its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from kairox_sim.controllers import Knobs
from kairox_sim.policies.base import Ids, Share
from kairox_sim.record import LayerWaits, StepRecord


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Neurons copied in together; lands as a whole."""

    id: int
    layer: int
    promote: Ids  # [n] in issue order
    slots: Ids  # [n] the slot each one takes
    evict: Ids  # whose slots these were, if taken from somebody in this plan


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Who computes what in one layer-step: on_time and residual, disjoint, are all evaluated."""

    hit_resident: int
    on_time: Ids
    residual: Ids  # late ones included
    late: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    layer: int
    predicted: Ids
    share: Share | None
    swaps: tuple[Swap, ...]
    evicted: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    swap_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    layer: int
    evaluated: Ids
    active: Ids | None
    share: Share | None
    split: Split


@dataclass(frozen=True, slots=True, eq=False)
class Cancelled:
    swap_id: int
    restored: bool  # what was evicted for it is resident again


@dataclass(frozen=True, slots=True, eq=False)
class StepEnded:
    record: StepRecord
    layers: LayerWaits | None
    knobs: Knobs


Event = Planned | Committed | LookedUp | Cancelled | StepEnded

"""What a policy is, in words and as a protocol.

A policy keeps statistics per layer and neuron and never residency: `state` tells it what is where.
It is pure: its only clock is its own calls, and randomness comes only through a passed Generator.
Statistics are float32 or int64 (half precision saturates). Every parameter has a default.

The cache enforces, and raises on, anything else:
  * promote: distinct, absent, len <= min(limit, free_slots + len(evict)), in the order to issue;
  * evict: distinct, resident (2), not pinned (3), not arriving (1), none of `seen`.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs

Ids = NDArray[np.int32]  # sorted, unique neuron ids of one layer
State = NDArray[np.uint8]  # [n_neurons]
Share = NDArray[np.float32]  # per id, in (0, 1]: part of a chunk's tokens that fired; 1 in decode

ABSENT, ARRIVING, RESIDENT, PINNED = 0, 1, 2, 3

Trigger = Literal["attn_in", "attn_out", "serial", "after", "instant"]
Observes = Literal["predicted", "active"]
Late = Literal["cpu", "stall"]
Fills = Literal["slots", "prior", "all", "none"]


class Policy(Protocol):
    """`observe` is told what was seen; `plan` says what to copy in and what to give up for it."""

    knobs: ClassVar[frozenset[str]]  # what it reads of Knobs
    admits: ClassVar[Literal["must", "filter", "never"]]  # must: everything seen that fits
    fills: ClassVar[Fills]  # what is resident at the start: chosen by Settings, or fixed by a bound
    default_trigger: ClassVar[Trigger]
    default_observes: ClassVar[Observes]
    default_late: ClassVar[Late]

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        """`share` is None where every id has share 1 (decode)."""
        ...

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        """(promote, evict) for one layer-step."""
        ...


NOTHING: Ids = np.zeros(0, np.int32)

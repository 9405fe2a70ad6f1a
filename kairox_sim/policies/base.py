"""What a policy is, in words and as a protocol.

A policy keeps statistics per layer and neuron and never residency: `state` tells it what is where.
It is pure: its only clock is its own calls, and randomness comes only through a passed Generator.
Statistics are float32 or int64 (half precision saturates). Every parameter has a default.

The cache enforces, and raises on, anything else:
  * promote: distinct, absent, len <= min(limit, free_slots + len(evict)), in the order to issue;
  * evict: distinct, resident (2), not pinned (3), not arriving (1), and none of `seen` unless the
    class says `evicts_seen`: policies that replace the whole set by a top-k, and the bypass oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs

if TYPE_CHECKING:
    from kairox_sim.policies.future import Future

Ids = NDArray[np.int32]  # sorted, unique neuron ids of one layer
State = NDArray[np.uint8]  # [n_neurons]
Share = NDArray[np.float32]  # per id, in (0, 1]: part of a chunk's tokens that fired; 1 in decode

ABSENT, ARRIVING, RESIDENT, PINNED = 0, 1, 2, 3

Trigger = Literal["attn_in", "attn_out", "serial", "after", "instant"]
Observes = Literal["predicted", "active", "evaluated"]
Late = Literal["cpu", "stall", "cancel"]
Fills = Literal["slots", "prior", "all", "none"]


@dataclass(frozen=True, slots=True)
class Known:
    """What a policy may be given beyond its own calls; None where it is not known.

    A class names what it takes in `needs`; each is a keyword of its constructor.
    """

    rng: np.random.Generator | None = None
    future: Future | None = None  # the uses of the very trace it is measured on: for oracles
    gpu_over_cpu: float | None = None  # neurons/s of the device over those of the host
    position: NDArray[np.int32] | None = None  # [n_layers, n_neurons] place in host memory


class Policy(Protocol):
    """`observe` is told what was seen; `plan` says what to copy in and what to give up for it.

    A constructor takes (n_layers, n_neurons), then keywords: what it `needs`, and its parameters.
    """

    knobs: ClassVar[frozenset[str]]  # what it reads of Knobs
    admits: ClassVar[Literal["must", "filter", "never"]]  # must: everything seen that fits
    fills: ClassVar[Fills]  # what is resident at the start: chosen by Settings, or fixed by a bound
    needs: ClassVar[frozenset[str]]  # fields of Known
    evicts_seen: ClassVar[bool]  # whether it may give up what was seen in this very layer-step
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

"""Future: when each neuron of a recorded trace is used next. Only an oracle knows it.

Steps count from 0, per layer: the i-th set seen by a layer is step i, prefill chunks included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kairox_sim.policies.base import Ids

NEVER = 2**62  # a step that does not come

NextUse = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Future:
    """The sets that each layer will see, and for every member of them the step of its next use."""

    seen: tuple[tuple[Ids, ...], ...]  # [n_layers][n_steps] sorted unique ids
    after: tuple[tuple[NextUse, ...], ...]  # [n_layers][n_steps], beside `seen`; NEVER if none
    first: NextUse  # [n_layers, n_neurons] step of the first use; NEVER if none

    @classmethod
    def of(cls, sets: Sequence[Sequence[Ids]], n_neurons: int) -> Future:
        """From the sets of each layer, [n_layers][n_steps] sorted unique ids."""
        first = np.full((len(sets), n_neurons), NEVER, np.int64)
        after: list[tuple[NextUse, ...]] = []
        for layer, steps in enumerate(sets):
            coming = first[layer]
            found: list[NextUse] = []
            for step in range(len(steps) - 1, -1, -1):
                at = steps[step].astype(np.intp)
                found.append(coming[at])
                coming[at] = step
            after.append(tuple(reversed(found)))
        return cls(tuple(tuple(steps) for steps in sets), tuple(after), first)

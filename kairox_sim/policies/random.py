"""Random eviction: the baseline that knows nothing."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from kairox_sim.controllers import Knobs
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


class RandomEvict:
    """Admit everything seen that fits; every victim is drawn from what is resident and not seen.

    When more is wanted than fits, the lowest indices go first. A generator per layer is spawned
    from the one given, so that a layer's draws do not depend on how calls of layers alternate.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset({"rng"})
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int, *, rng: np.random.Generator) -> None:
        self.rng = rng.spawn(n_layers)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        pass

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        want = seen.compress(state.take(at) == ABSENT)
        if want.size == 0 or limit == 0:
            return NOTHING, NOTHING
        victims = NOTHING
        missing = min(want.size, limit) - free_slots
        if missing > 0:
            may_go = state == RESIDENT
            may_go[at] = False
            candidates = may_go.nonzero()[0].astype(np.int32)
            n = min(missing, candidates.size)
            victims = self.rng[layer].choice(candidates, n, replace=False)
        return want[: min(want.size, limit, free_slots + victims.size)], victims

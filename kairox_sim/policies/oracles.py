"""Belady's oracle over sets of neurons, twice: one must admit what was seen, one may pass it by.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5 (2), 1966: give up what is used again last. Where the host can compute what is missing,
as here, a miss need not be admitted, and the least possible number of misses is lower.

Both know the future of one recorded trace and refuse to decide for anything else. Their clock is
the number of sets a layer has shown them: planning ahead of a layer-step, the next use includes
the one to come. Optimal where plans come after lookups and every copy has landed by the next.
"""

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
from kairox_sim.policies.future import NEVER, Future
from kairox_sim.policies.ranked import admit_seen


class Belady:
    """Admit everything seen that fits; the victim is the resident neuron whose next use is last.

    Fewest misses of all policies that must admit, where every step's set fits the budget. Nothing
    seen is a victim; ties go to the lowest index.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset({"future"})
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int, *, future: Future) -> None:
        self.clock = _Clock(n_layers, n_neurons, future)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.clock.advance(layer, seen)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        return admit_seen(seen, -self.clock.next_use[layer], state, free_slots, limit)


class BeladyBypass:
    """Keep, of what is resident and what was seen, as many as fit of the nearest next use.

    Fewest misses of all policies. What is never used again is never loaded, and what was seen may
    be given up at once for what is needed sooner. A tie moves nothing; ties among victims and among
    loads go to the lowest index.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset({"future"})
    evicts_seen: ClassVar[bool] = True
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int, *, future: Future) -> None:
        self.clock = _Clock(n_layers, n_neurons, future)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.clock.advance(layer, seen)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        next_use, never = self.clock.next_use[layer], self.clock.n_steps(layer)
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        want = seen.compress((state.take(at) == ABSENT) & (next_use.take(at) < never))
        if want.size == 0 or limit == 0:
            return NOTHING, NOTHING
        # Both ids ascend, so that a stable sort keeps the lowest index first.
        want = want[np.argsort(next_use[want], kind="stable")[:limit]]
        into_free, rest = want[:free_slots], want[free_slots:]
        may_go = (state == RESIDENT).nonzero()[0].astype(np.int32)
        may_go = may_go[np.argsort(-next_use[may_go], kind="stable")]
        n = min(rest.size, may_go.size)
        # Loads of ever later use against victims of ever earlier use: the first n pairs pay.
        n = int(np.count_nonzero(next_use[rest[:n]] < next_use[may_go[:n]]))
        return np.concatenate([into_free, rest[:n]]), may_go[:n]


class _Clock:
    """Where each layer is in its future, and the step of every neuron's next use from there."""

    def __init__(self, n_layers: int, n_neurons: int, future: Future) -> None:
        if future.first.shape != (n_layers, n_neurons):
            raise KairoxError(
                f"a future of {future.first.shape[0]} layers x {future.first.shape[1]} neurons was "
                f"given to an oracle of {n_layers} x {n_neurons}; read it from the trace it runs on"
            )
        self._future = future
        self._at = [0] * n_layers  # sets seen
        # [n_layers, n_neurons]; the layer's number of steps stands for never, so that scores are
        # small enough to be ranked together with an index.
        self.next_use: NDArray[np.int64] = future.first.copy()
        for layer in range(n_layers):
            self._soften(layer, self.next_use[layer])

    def n_steps(self, layer: int) -> int:
        return len(self._future.seen[layer])

    def advance(self, layer: int, seen: Ids) -> None:
        at, sets = self._at[layer], self._future.seen[layer]
        if at == len(sets) or not np.array_equal(sets[at], seen):
            where = f"layer {layer}, step {at}"
            known = f"{sets[at].size} neurons" if at < len(sets) else "nothing more"
            raise KairoxError(
                f"the run is not the trace the future was read from: at {where} it uses "
                f"{seen.size} neurons and the future says {known}"
                + (", others" if at < len(sets) and sets[at].size == seen.size else "")
                + "; an oracle needs the future of the very trace it is run on, and must observe "
                "the sets that were read"
            )
        coming = self._future.after[layer][at].copy()
        self._soften(layer, coming)
        self.next_use[layer][seen.astype(np.intp)] = coming
        self._at[layer] = at + 1

    def _soften(self, layer: int, steps: NDArray[np.int64]) -> None:
        steps[steps == NEVER] = self.n_steps(layer)

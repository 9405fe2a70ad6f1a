"""S3-FIFO over sets of neurons, and the same with segments admitted by chance."""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import (
    ABSENT,
    ARRIVING,
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
from kairox_sim.policies.ranked import lowest

NOWHERE, SMALL, MAIN, GHOST = range(4)
MOST_USES = 3  # a counter of two bits
TO_MAIN = 2  # uses in small that lead to main


class S3Fifo:
    """Three FIFO queues (Yang et al., SOSP '23): small for newcomers, main, and a ghost of small.

    Per layer, of c slots that are not pinned: small is int(0.1 c), the ghost remembers int(0.9 c).
    As libCacheSim has it: two uses while in small lead to main (the paper's algorithm asks for more
    than one, too), counters stop at three and begin at zero in main, and until something was first
    evicted, what does not fit in small goes to main. Here small is never less than one.

    A step's neurons are one set: the ghost is asked for all of them before any moves, and those
    that fit, lowest index first, enter together. What was seen or is arriving keeps its place when
    it is come upon. What does not fit is bypassed. What starts resident is in main, as old as can
    be. The use that a neuron is loaded for does not count, if observed before the plan.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "must"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.queue_of = np.zeros((n_layers, n_neurons), np.uint8)
        self.uses = np.zeros((n_layers, n_neurons), np.int64)  # up to MOST_USES
        # Order within a queue; equal within a step, where the lowest index counts as oldest.
        self.stamp = np.zeros((n_layers, n_neurons), np.int64)
        self.now = np.zeros(n_layers, np.int64)
        self.evicted_yet = np.zeros(n_layers, bool)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        uses = self.uses[layer]
        uses[at] = np.minimum(uses.take(at) + 1, MOST_USES)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        at = seen.astype(np.intp)
        want = seen.compress(state.take(at) == ABSENT)
        if want.size == 0 or limit == 0:
            return NOTHING, NOTHING
        queue_of, stamp = self.queue_of[layer], self.stamp[layer]
        here = (state == RESIDENT) | (state == ARRIVING)
        self._follow(layer, here)
        capacity = int(np.count_nonzero(here)) + free_slots
        may_go = state == RESIDENT
        may_go[at] = False
        promote = want[: min(want.size, limit, free_slots + np.count_nonzero(may_go))]
        remembered = queue_of[promote] == GHOST
        queue_of[promote] = NOWHERE
        n_small = max(1, int(0.1 * capacity))
        victims = self._evict(layer, may_go, promote.size - free_slots, capacity - n_small)

        to_main = remembered
        if not self.evicted_yet[layer]:
            room = n_small - int(np.count_nonzero(queue_of == SMALL))
            to_main = remembered | (np.cumsum(~remembered) > room)
        queue_of[promote] = np.where(to_main, np.uint8(MAIN), np.uint8(SMALL))
        self.uses[layer][promote] = 0
        self.now[layer] += 1
        stamp[promote] = self.now[layer]
        ghosts = (queue_of == GHOST).nonzero()[0].astype(np.int32)
        queue_of[lowest(ghosts, stamp, ghosts.size - int(0.9 * capacity))] = NOWHERE
        return promote, victims

    def _follow(self, layer: int, here: NDArray[np.bool_]) -> None:
        """What came or went without this policy: copies that never landed, what was resident."""
        queue_of = self.queue_of[layer]
        queued = (queue_of == SMALL) | (queue_of == MAIN)
        queue_of[queued & ~here] = NOWHERE
        back = here & ~queued
        queue_of[back], self.stamp[layer][back] = MAIN, 0

    def _evict(self, layer: int, may_go: NDArray[np.bool_], k: int, n_main: int) -> Ids:
        """k victims, which there are, in order; `n_main` is main's share of the slots."""
        if k <= 0:
            return NOTHING
        queue_of, uses, stamp = self.queue_of[layer], self.uses[layer], self.stamp[layer]
        self.evicted_yet[layer] = True
        now = int(self.now[layer])
        n = {name: int(np.count_nonzero(queue_of == name)) for name in (SMALL, MAIN)}
        queues = {SMALL: _oldest_first(queue_of == SMALL, stamp)}  # main is long, and often let be
        victims: list[int] = []
        while len(victims) < k:
            name = MAIN if n[MAIN] > n_main or not queues[SMALL] else SMALL
            if name == MAIN and MAIN not in queues:
                queues[MAIN] = _oldest_first(queue_of == MAIN, stamp)
            if not queues[name]:  # nothing left in it may go
                name = SMALL
            queue = queues[name]
            while queue:
                oldest = queue.popleft()
                now += 1
                if name == SMALL and uses[oldest] >= TO_MAIN:
                    queue_of[oldest], uses[oldest], stamp[oldest] = MAIN, 0, now
                    if MAIN in queues:
                        queues[MAIN].append(oldest)
                    n[SMALL] -= 1
                    n[MAIN] += 1
                elif name == MAIN and uses[oldest]:
                    uses[oldest] -= 1
                    stamp[oldest] = now
                    queue.append(oldest)
                elif may_go[oldest]:
                    queue_of[oldest], stamp[oldest] = GHOST if name == SMALL else NOWHERE, now
                    n[name] -= 1
                    victims.append(oldest)
                    break
                # What may not go and was come upon keeps its stamp, and with it its place.
        self.now[layer] = now
        return np.array(victims, np.int32)


def _oldest_first(members: NDArray[np.bool_], stamp: NDArray[np.int64]) -> deque[int]:
    ids = members.nonzero()[0].astype(np.int32)
    return deque(lowest(ids, stamp, ids.size).tolist())


class S3FifoSegments:
    """S3-FIFO whose long segments are admitted by chance: Ripple's linking-aligned caching.

    Ripple (arXiv 2410.19274; Neuralink, ASPLOS '25) puts neurons that fire together side by side
    and admits a long stretch of them with lower probability than a neuron on its own, since it is
    cheap to read again. Length and probability are decided here: `segment` or more missing neurons
    at consecutive places of `position` are a segment; one draw of the given generator per segment
    and step, lowest place first, admits all of it with `segment_admit`.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset({"rng", "position"})
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(
        self,
        n_layers: int,
        n_neurons: int,
        *,
        rng: np.random.Generator,
        position: NDArray[np.int32],
        segment: int = 4,
        segment_admit: float = 0.5,
    ) -> None:
        if segment < 1 or not 0 <= segment_admit <= 1:
            raise KairoxError(
                "segment must be 1 neuron or more and segment_admit a probability, "
                f"got {segment} and {segment_admit}"
            )
        self.inner = S3Fifo(n_layers, n_neurons)
        self.rng = rng.spawn(n_layers)  # a layer's draws do not depend on how layers alternate
        self.position = position  # [n_layers, n_neurons]
        self.segment, self.segment_admit = segment, segment_admit

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.inner.observe(layer, seen, share)

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        missing = seen.compress(state.take(seen) == ABSENT)
        passed_by = self._passed_by(layer, missing)
        if passed_by.size:
            # They are absent, so that leaving them out of what was seen exposes nothing.
            seen = seen[~np.isin(seen, passed_by, assume_unique=True)]
        return self.inner.plan(layer, seen, state, free_slots, limit, knobs)

    def _passed_by(self, layer: int, missing: Ids) -> Ids:
        if missing.size < self.segment:
            return NOTHING
        place = self.position[layer].take(missing)
        order = np.argsort(place)
        starts = np.flatnonzero(np.diff(place[order], prepend=-2) != 1)
        lengths = np.diff(starts, append=missing.size)
        long = lengths >= self.segment
        admitted = np.ones(starts.size, bool)
        admitted[long] = self.rng[layer].random(np.count_nonzero(long)) < self.segment_admit
        passed_by: Ids = missing[order[np.repeat(~admitted, lengths)]]
        return passed_by

"""W-TinyLFU over sets of neurons: a newcomer stays if it was used more than what it replaces."""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
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

NOWHERE, WINDOW, PROBATION, PROTECTED = range(4)


class WTinyLfu:
    """A small LRU window before a segmented LRU (Einziger, Friedman, Manes, ACM ToS 13(4), 2017).

    Per layer, of c slots that are not pinned: the window has max(1, c // 100); of the rest,
    probation has 20 % and protected 80 %, rounded down. A use in probation protects; the longest
    unused of a full protected part goes back to probation. What the window pushes out when no slot
    is free is up against the longest unused of probation (or else of protected): the one with
    more uses stays, and the resident of the main part in a tie. Uses are exact counts, in the cache
    or not, one per step, halved whenever 10 c more have been counted.

    A step's neurons are one set. Newcomers enter the window one after the other, most uses first,
    ties to the lowest index; one that is pushed out in the same step and loses is not loaded at
    all. What was seen or is arriving cannot be given up: it stays in the window, and the next in
    the window's order is up instead. What starts resident is in probation, the rest of it, from the
    highest index down, in the window.
    """

    knobs: ClassVar[frozenset[str]] = frozenset({"max_swaps"})
    admits: ClassVar[Literal["must", "filter", "never"]] = "filter"
    fills: ClassVar[Fills] = "slots"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.part_of = np.zeros((n_layers, n_neurons), np.uint8)
        self.uses = np.zeros((n_layers, n_neurons), np.int64)
        self.counted = np.zeros(n_layers, np.int64)  # uses since the last halving
        # Order within a part; of uses in one step, the lowest index counts as oldest.
        self.stamp = np.zeros((n_layers, n_neurons), np.int64)
        self.now = np.zeros(n_layers, np.int64)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        self.uses[layer][at] += 1
        self.counted[layer] += at.size
        self.now[layer] += 1
        was = self.part_of[layer].take(at)
        here = at[was != NOWHERE]
        self.stamp[layer][here] = self.now[layer]
        self.part_of[layer][at[was == PROBATION]] = PROTECTED

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        at = seen.astype(np.intp)
        here = (state == RESIDENT) | (state == ARRIVING)
        capacity = int(np.count_nonzero(here)) + free_slots
        n_window = max(1, capacity // 100)
        self._follow(layer, here, capacity - n_window)
        self._age(layer, capacity)
        self._demote(layer, int(0.8 * (capacity - n_window)))
        want = seen.compress(state.take(at) == ABSENT)
        if want.size == 0 or limit == 0 or capacity == 0:
            return NOTHING, NOTHING
        want = want[np.argsort(-self.uses[layer][want], kind="stable")]
        may_go = state == RESIDENT
        may_go[at] = False
        return self._admit(layer, want, may_go, free_slots, limit, n_window)

    def _follow(self, layer: int, here: NDArray[np.bool_], n_main: int) -> None:
        """What came or went without this policy: copies that never landed, what was resident."""
        part_of = self.part_of[layer]
        listed = part_of != NOWHERE
        part_of[listed & ~here] = NOWHERE
        back = (here & ~listed).nonzero()[0]
        if back.size:
            room = max(0, n_main - int(np.count_nonzero(part_of >= PROBATION)))
            part_of[back[:room]], part_of[back[room:]] = PROBATION, WINDOW
            self.stamp[layer][back] = 0

    def _age(self, layer: int, capacity: int) -> None:
        while capacity and self.counted[layer] >= 10 * capacity:
            self.uses[layer] >>= 1
            self.counted[layer] -= 10 * capacity

    def _demote(self, layer: int, n_protected: int) -> None:
        part_of, stamp = self.part_of[layer], self.stamp[layer]
        excess = int(np.count_nonzero(part_of == PROTECTED)) - n_protected
        if excess > 0:
            members = (part_of == PROTECTED).nonzero()[0].astype(np.int32)
            down = lowest(members, stamp, excess)
            part_of[down] = PROBATION
            # To the young end of probation, in the order they had.
            stamp[down] = self.now[layer] + 1 + np.arange(excess)
            self.now[layer] += excess

    def _admit(
        self,
        layer: int,
        want: Ids,
        may_go: NDArray[np.bool_],
        free_slots: int,
        limit: int,
        n_window: int,
    ) -> tuple[Ids, Ids]:
        part_of, uses, stamp = self.part_of[layer], self.uses[layer], self.stamp[layer]
        window = _oldest_first(part_of == WINDOW, stamp, part_of.size)
        n_in_window = len(window)
        # Victims in order, as many as could be needed; probation first.
        probation = _oldest_first((part_of == PROBATION) & may_go, stamp, want.size)
        protected = _oldest_first((part_of == PROTECTED) & may_go, stamp, want.size)
        now = int(self.now[layer])
        loaded: dict[int, None] = {}
        victims: list[int] = []

        def to_main(neuron: int) -> None:
            nonlocal now
            now += 1
            part_of[neuron], stamp[neuron] = PROBATION, now
            if may_go[neuron]:
                probation.append(neuron)

        def give_up(neuron: int) -> None:
            part_of[neuron] = NOWHERE
            victims.append(neuron)

        for newcomer in want.tolist():
            if len(loaded) == limit:
                break
            now += 1
            part_of[newcomer], stamp[newcomer] = WINDOW, now
            loaded[newcomer] = None
            window.append(newcomer)
            n_in_window += 1
            over = n_in_window > n_window
            main = probation or protected
            if free_slots:
                free_slots -= 1
                if over:
                    to_main(window.popleft())
                    n_in_window -= 1
                continue
            if not over and main:  # the window has its share, and main more than its own
                give_up(main.popleft())
                continue
            n_in_window -= 1
            waiting: list[int] = []
            while True:
                pushed = window.popleft()
                if main and uses[pushed] > uses[main[0]]:
                    give_up(main.popleft())
                    to_main(pushed)
                    break
                if pushed in loaded:
                    del loaded[pushed]
                    part_of[pushed] = NOWHERE
                    break
                if may_go[pushed]:
                    give_up(pushed)
                    break
                waiting.append(pushed)
            window.extendleft(reversed(waiting))
        self.now[layer] = now
        return np.array(list(loaded), np.int32), np.array(victims, np.int32)


def _oldest_first(members: NDArray[np.bool_], stamp: NDArray[np.int64], k: int) -> deque[int]:
    ids = members.nonzero()[0].astype(np.int32)
    return deque(lowest(ids, stamp, min(k, ids.size)).tolist())

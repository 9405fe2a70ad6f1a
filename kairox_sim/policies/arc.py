"""ARC over sets of neurons: recency against frequency, balanced by what was given up too early."""

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

NOWHERE, T1, T2, B1, B2 = range(5)  # the paper's four lists
GHOST = B1 - T1  # from a list of what is here to the list of what was given up from it


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST '03, figure 4), the target not rounded.

    Per layer: T1 holds what was used in one step since it came, T2 what was used in more; B1 and B2
    remember what was given up from each. A neuron that returns from B1 (B2) makes T1's target
    larger (smaller). c is the slots that are not pinned.

    A step's neurons are one set: which list each was in is settled before any moves. Those that
    fit, lowest index first, are taken one after the other. Nothing seen or arriving is given up:
    where the list that should give up a neuron has none, the other one does. What does not fit is
    bypassed and leaves no trace. What starts resident is in T1, older than anything loaded.
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
        self.list_of = np.zeros((n_layers, n_neurons), np.uint8)
        # Order within a list; equal within a step, where the lowest index counts as oldest.
        self.stamp = np.zeros((n_layers, n_neurons), np.int64)
        self.now = np.zeros(n_layers, np.int64)
        self.target = np.zeros(n_layers)  # of T1, in neurons

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        self.now[layer] += 1
        at = seen.astype(np.intp)  # indexing with int32 takes several times as long
        was = self.list_of[layer].take(at)
        here = at[(was == T1) | (was == T2)]
        self.list_of[layer][here] = T2
        self.stamp[layer][here] = self.now[layer]

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        at = seen.astype(np.intp)
        want = seen.compress(state.take(at) == ABSENT)
        if want.size == 0 or limit == 0:
            return NOTHING, NOTHING
        self._follow(layer, state)
        may_go = state == RESIDENT
        may_go[at] = False
        promote = want[: min(want.size, limit, free_slots + np.count_nonzero(may_go))]
        return promote, self._admit(layer, promote, may_go, free_slots)

    def _follow(self, layer: int, state: State) -> None:
        """What came or went without this policy: copies that never landed, what was resident."""
        list_of = self.list_of[layer]
        here = (state == RESIDENT) | (state == ARRIVING)
        listed = (list_of == T1) | (list_of == T2)
        list_of[listed & ~here] = NOWHERE
        back = here & ~listed
        self.stamp[layer][back] = 0
        list_of[back] = np.where(list_of[back] == B2, np.uint8(T2), np.uint8(T1))

    def _admit(self, layer: int, promote: Ids, may_go: NDArray[np.bool_], free_slots: int) -> Ids:
        list_of, stamp = self.list_of[layer], self.stamp[layer]
        was = list_of[promote]
        size = np.bincount(list_of, minlength=5).tolist()
        capacity = size[T1] + size[T2] + free_slots
        oldest: dict[int, deque[int]] = {}  # of each list that was asked for, what may leave it

        now, target, room = int(self.now[layer]), float(self.target[layer]), free_slots
        victims: list[int] = []

        def leaving(name: int) -> deque[int]:
            if name not in oldest:
                members = list_of == name
                members[promote] = False
                if name in (T1, T2):
                    members &= may_go
                ids = members.nonzero()[0].astype(np.int32)
                enough = min(promote.size, ids.size)  # no list loses more
                oldest[name] = deque(lowest(ids, stamp, enough).tolist())
            return oldest[name]

        def give_up(name: int, remember: bool = True) -> None:
            nonlocal now
            if not leaving(name):
                name = T1 + T2 - name
            gone = leaving(name).popleft()
            victims.append(gone)
            size[name] -= 1
            list_of[gone] = NOWHERE
            if remember:
                now += 1
                list_of[gone], stamp[gone] = name + GHOST, now
                size[name + GHOST] += 1
                if name + GHOST in oldest:
                    oldest[name + GHOST].append(gone)

        def replace(from_b2: bool) -> None:
            above = size[T1] > target or (from_b2 and size[T1] == target)
            give_up(T1 if (size[T1] and above) or not size[T2] else T2)

        def forget(name: int) -> None:
            if leaving(name):
                list_of[leaving(name).popleft()] = NOWHERE
                size[name] -= 1

        now += 1
        for neuron, name in zip(promote.tolist(), was.tolist(), strict=True):
            if name == B1:
                target = min(target + max(size[B2] / size[B1], 1), capacity)
            elif name == B2:
                target = max(target - max(size[B1] / size[B2], 1), 0)
            if name != NOWHERE:
                size[name] -= 1
            if room:
                room -= 1
            elif name != NOWHERE:
                replace(name == B2)
            elif size[T1] + size[B1] >= capacity:
                if size[B1]:
                    forget(B1)
                    replace(False)
                else:
                    give_up(T1, remember=False)
            else:
                if sum(size[T1:]) >= 2 * capacity:
                    forget(B2 if size[B2] else B1)
                replace(False)
            to = T1 if name == NOWHERE else T2
            list_of[neuron] = to
            size[to] += 1
        stamp[promote] = now + 1
        self.now[layer], self.target[layer] = now + 1, target
        return np.array(victims, np.int32)

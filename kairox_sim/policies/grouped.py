"""A policy over neurons that runs another one over groups: OSDI '26 paper, section 5.2.

The cache, the drivers and the records stay at neurons; only what decides sees groups.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import (
    ARRIVING,
    NOTHING,
    RESIDENT,
    Fills,
    Ids,
    Late,
    Observes,
    Policy,
    Share,
    State,
    Trigger,
)

Members = NDArray[np.int32]  # [n_layers, n_groups, size]


class Grouped:
    """`inner`, built for [n_layers, n_groups], decides; its groups' members move together.

    A group is seen if a member is, with share = active members / size; in a prefill chunk the
    members' shares are summed instead. It loads and evicts whole. What is left of a budget or a
    limit that is no multiple of the size stays unused; warm and pinned neurons must be whole
    groups (`groups.hottest`), and swaps whole groups too, if copies may be cancelled.

    At 10 to 25 % of neurons active nearly every group of 16 is seen in every layer-step. A policy
    that may not evict what was seen then finds no victim and freezes, and recency says nothing; a
    policy that weighs shares, and may evict what was seen, is what groups were made for.
    """

    # The inner's, set on each instance; class variables to whoever asks for a Policy.
    knobs: ClassVar[frozenset[str]]
    admits: ClassVar[Literal["must", "filter", "never"]]
    fills: ClassVar[Fills]
    needs: ClassVar[frozenset[str]]
    evicts_seen: ClassVar[bool]
    default_trigger: ClassVar[Trigger]
    default_observes: ClassVar[Observes]
    default_late: ClassVar[Late]

    def __init__(self, inner: Policy, members: Members) -> None:
        self.inner, self.members = inner, members
        self.size: int = members.shape[2]
        self.group_of = group_of(members)  # [n_layers, n_neurons]
        take_over(self, inner)

    def touched(self, layer: int, ids: Ids) -> Ids:
        """The groups that these neurons are in; sorted, unique."""
        here = np.zeros(self.members.shape[1], bool)
        here[self.group_of[layer].take(ids)] = True
        return here.nonzero()[0].astype(np.int32)

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        n_groups = self.members.shape[1]
        total = np.bincount(self.group_of[layer].take(seen), weights=share, minlength=n_groups)
        groups = total.nonzero()[0].astype(np.int32)
        part = total[groups].astype(np.float32) / np.float32(self.size)
        # A sum of shares may round to just above 1.
        self.inner.observe(layer, groups, np.minimum(part, np.float32(1.0)))

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        promote, evict = self.inner.plan(
            layer,
            self.touched(layer, seen),
            self._state(layer, state),
            free_slots // self.size,
            limit // self.size,
            knobs,
        )
        return self._expand(layer, promote), self._expand(layer, evict)

    def _state(self, layer: int, state: State) -> State:
        """[n_groups] absent, resident or pinned if all members are; arriving if any is."""
        of_members = state.take(self.members[layer])  # [n_groups, size]
        lowest, highest = of_members.min(axis=1), of_members.max(axis=1)
        broken = (lowest != highest) & ~((lowest == ARRIVING) & (highest == RESIDENT))
        if broken.any():
            group = int(np.flatnonzero(broken)[0])
            raise KairoxError(
                f"layer {layer}: group {group} is split, its members' states are "
                f"{of_members[group].tolist()} (0 absent, 1 arriving, 2 resident, 3 pinned); "
                f"groups of {self.size} start, load and leave whole: give whole groups as warm or "
                f"pinned neurons, and swaps of a multiple of {self.size} neurons"
            )
        lowest.flags.writeable = False
        state_of_groups: State = lowest
        return state_of_groups

    def _expand(self, layer: int, groups: Ids) -> Ids:
        if groups.size == 0:
            return NOTHING
        ids: Ids = self.members[layer][groups].reshape(-1)
        return ids


def group_of(members: Members) -> NDArray[np.int32]:
    """int32[n_layers, n_neurons]: the group of each neuron. Groups share no neuron."""
    n_layers, n_groups, size = members.shape
    flat = members.reshape(n_layers, -1)
    if not np.array_equal(np.sort(flat, axis=1), np.tile(np.arange(flat.shape[1]), (n_layers, 1))):
        raise KairoxError(f"groups must hold each of {flat.shape[1]} neurons of a layer once")
    result = np.empty(flat.shape, np.int32)
    np.put_along_axis(
        result,
        flat.astype(np.int64),
        np.tile(np.repeat(np.arange(n_groups, dtype=np.int32), size), (n_layers, 1)),
        axis=1,
    )
    return result


def take_over(adapter: object, inner: Policy) -> None:
    """Give an adapter the class variables of the policy inside, and the name its deciding costs by.

    `cost_class` is what the engine looks a policy's time up by; without it, its class's name.
    """
    for name in Policy.__annotations__:
        setattr(adapter, name, getattr(inner, name))
    cost_class = getattr(inner, "cost_class", type(inner).__name__.lower())
    setattr(adapter, "cost_class", cost_class)  # noqa: B010  (the protocol need not know it)

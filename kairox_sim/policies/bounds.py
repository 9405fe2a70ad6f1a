"""Policies that never move anything: a static hot set from a prior, and the two bounds."""

from __future__ import annotations

from typing import ClassVar, Literal

from kairox_sim.controllers import Knobs
from kairox_sim.policies.base import NOTHING, Fills, Ids, Late, Observes, Share, State, Trigger


class Static:
    """The most frequent neurons of a profiling trace, resident for the whole run.

    PowerInfer's placement (SOSP '24) without its solver: per layer, the top of the counts.
    """

    knobs: ClassVar[frozenset[str]] = frozenset()
    admits: ClassVar[Literal["must", "filter", "never"]] = "never"
    fills: ClassVar[Fills] = "prior"
    needs: ClassVar[frozenset[str]] = frozenset()
    evicts_seen: ClassVar[bool] = False
    default_trigger: ClassVar[Trigger] = "after"
    default_observes: ClassVar[Observes] = "active"
    default_late: ClassVar[Late] = "cpu"

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        pass

    def observe(self, layer: int, seen: Ids, share: Share | None) -> None:
        pass

    def plan(
        self, layer: int, seen: Ids, state: State, free_slots: int, limit: int, knobs: Knobs
    ) -> tuple[Ids, Ids]:
        return NOTHING, NOTHING


class AllResident(Static):
    """Upper bound: every neuron in device memory, whether or not it would fit."""

    fills: ClassVar[Fills] = "all"


class NoneResident(Static):
    """Lower bound: no slots, the CPU computes every evaluated neuron."""

    fills: ClassVar[Fills] = "none"

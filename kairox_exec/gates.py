"""Gates G1 and G2: the simulator decides what the live run decided, on the live run's own trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import ClassVar

import numpy as np

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Knobs
from kairox_sim.costs import CostModel
from kairox_sim.engine import run_trace
from kairox_sim.events import Committed, Event, Planned, StepEnded
from kairox_sim.policies.base import Late, Trigger
from kairox_sim.prediction import Predictions
from kairox_sim.record import LayerWaits, StepRecord
from kairox_sim.replay import Replay, replay
from kairox_sim.trace import Trace

EXACT = (
    "n_tokens", "context_len", "evaluated", "active", "predicted", "predicted_active",
    "hit_resident", "hit_on_time", "late", "fetched", "residual", "loads", "loads_used_first",
    "wasted", "evictions", "h2d_bytes", "threshold_scale",
)  # fmt: skip


class ReplayedKnobs:
    """A controller that returns what a live run's controller returned, step by step."""

    sets: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, original: NeuronCache, events: Sequence[Event]) -> None:
        self.knobs = original.controller.knobs
        self._next = iter([event.knobs for event in events if isinstance(event, StepEnded)])

    def start(self, swaps: Sequence[int]) -> None:
        pass

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        self.knobs = next(self._next)
        return self.knobs


@dataclass(frozen=True, slots=True)
class G2:
    """What differed between the live run and its simulation with landings and knobs replayed."""

    differences: tuple[str, ...]
    steps: int
    swaps: int
    hits: int
    residuals: int

    @property
    def holds(self) -> bool:
        """No difference, and something that could have differed did happen."""
        return not self.differences and self.steps > 0 and self.hits + self.residuals > 0


def g1(events: Sequence[Event], fresh: NeuronCache) -> Replay:
    """The live call log, replayed in order through a fresh cache; see `replay`."""
    return replay(events, fresh)


def g2(
    trace: Trace,
    events: Sequence[Event],
    live: Sequence[StepRecord],
    fresh: NeuronCache,
    costs: CostModel,
    *,
    trigger: Trigger,
    late: Late,
    predictions: Predictions | None,
) -> G2:
    """Simulate `trace` with the live run's landings and controller outputs; compare step by step.

    trace: what the live run recorded of itself. live: its records. fresh: a cache as the live one
    was at the start.
    """
    fresh.controller = ReplayedKnobs(fresh, events)
    made: list[Event] = []
    fresh.journal = made.append
    run = run_trace(
        trace,
        fresh,
        costs,
        trigger=trigger,
        late=late,
        predictions=predictions,
        landings=[event.swap_ids for event in events if isinstance(event, Committed)],
    )
    found = []
    if len(run.records) != len(live):
        found.append(f"{len(live)} steps live, {len(run.records)} simulated")
    for ours, theirs in zip(run.records, live, strict=False):
        for name in EXACT:
            simulated, measured = float(getattr(ours, name)), float(getattr(theirs, name))
            if simulated != measured and not (np.isnan(simulated) and np.isnan(measured)):
                found.append(f"step {ours.step} {name}: {measured:g} live, {simulated:g} simulated")
    found += _swap_differences(events, made)
    return G2(
        tuple(found),
        steps=len(live),
        swaps=sum(len(event.swaps) for event in made if isinstance(event, Planned)),
        hits=int(sum(record.hit_on_time for record in run.records)),
        residuals=int(sum(record.residual for record in run.records)),
    )


def _swap_differences(live: Sequence[Event], simulated: Sequence[Event]) -> list[str]:
    theirs = [event for event in live if isinstance(event, Planned)]
    ours = [event for event in simulated if isinstance(event, Planned)]
    if len(theirs) != len(ours):
        return [f"{len(theirs)} plans live, {len(ours)} simulated"]
    found = []
    for at, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        same = a.layer == b.layer and len(a.swaps) == len(b.swaps)
        same = same and np.array_equal(a.evicted, b.evicted)
        for x, y in zip(a.swaps, b.swaps, strict=False):
            same = same and (x.id, x.layer) == (y.id, y.layer)
            for name in ("promote", "slots", "evict"):
                same = same and np.array_equal(getattr(x, name), getattr(y, name))
        if not same:
            found.append(f"plan {at} of layer {a.layer} differs")
    return found


@dataclass(frozen=True, slots=True)
class FreeRunning:
    """Live against simulated when the simulator decides landings and knobs by its own time."""

    hit_resident_points: float  # simulated - live, in points of a percent
    hit_on_time_points: float
    loads_share: float  # simulated / live - 1; 0 where neither loads, nan where only live does not


def free_running(live: Sequence[StepRecord], simulated: Sequence[StepRecord]) -> FreeRunning:
    """Over the decode steps of both."""

    def total(records: Sequence[StepRecord], name: str) -> float:
        return float(sum(getattr(r, name) for r in records if r.phase == "decode"))

    def ratio(records: Sequence[StepRecord], name: str) -> float:
        evaluated = total(records, "evaluated")
        return total(records, name) / evaluated if evaluated else nan

    loads, ours = total(live, "loads"), total(simulated, "loads")
    same = 0.0 if ours == 0 else nan
    return FreeRunning(
        100 * (ratio(simulated, "hit_resident") - ratio(live, "hit_resident")),
        100 * (ratio(simulated, "hit_on_time") - ratio(live, "hit_on_time")),
        ours / loads - 1 if loads else same,
    )

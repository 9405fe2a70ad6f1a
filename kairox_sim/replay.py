"""Replay: drive a fresh NeuronCache with logged calls, and say where it decides otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned, StepEnded


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """One value that came out otherwise."""

    call: int  # which of the events, from 0
    what: str  # "plan of layer 3: swaps[0].promote"
    logged: object
    replayed: object


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What differed, and how much there was to differ; the counts are of neurons unless said."""

    differences: list[Difference]
    plans: int  # calls
    swaps: int
    loads: int
    evictions: int
    landed: int  # swaps
    cancelled: int  # swaps
    lookups: int  # calls
    hit_resident: int
    hits: int  # on time
    residuals: int  # late ones included
    late: int
    steps: int


def replay(events: Sequence[Event], cache: NeuronCache) -> Replay:
    """Repeat the calls on `cache`, made as the logged one was and not yet used.

    A call that the cache refuses is a difference too; what follows it is still compared.
    """
    if cache.in_flight or any(cache.totals.values()):
        raise KairoxError("replay needs a fresh cache; this one has already loaded neurons")
    layers = [e.layer for e in events if isinstance(e, Planned | LookedUp)]
    if layers and not 0 <= min(layers) <= max(layers) < cache.n_layers:
        raise KairoxError(
            f"the log has calls for layers {min(layers)} to {max(layers)}, the cache has "
            f"{cache.n_layers}; rebuild it from the header of the same log"
        )
    differences: list[Difference] = []
    made: list[Event] = []
    journal, cache.journal = cache.journal, made.append
    try:
        for call, logged in enumerate(events):
            n_made = len(made)
            try:
                _repeat(logged, cache)
            except KairoxError as error:
                differences.append(Difference(call, _name(logged), "accepted", str(error)))
            else:
                differences += _compare(call, logged, made[n_made])
    finally:
        cache.journal = journal

    planned = [e for e in made if isinstance(e, Planned)]
    looked_up = [e.split for e in made if isinstance(e, LookedUp)]
    swaps = [swap for e in planned for swap in e.swaps]
    return Replay(
        differences,
        plans=len(planned),
        swaps=len(swaps),
        loads=sum(swap.promote.size for swap in swaps),
        evictions=sum(e.evicted.size for e in planned),
        landed=sum(len(e.swap_ids) for e in made if isinstance(e, Committed)),
        cancelled=sum(isinstance(e, Cancelled) for e in made),
        lookups=len(looked_up),
        hit_resident=sum(split.hit_resident for split in looked_up),
        hits=sum(split.on_time.size for split in looked_up),
        residuals=sum(split.residual.size for split in looked_up),
        late=sum(split.late.size for split in looked_up),
        steps=sum(isinstance(e, StepEnded) for e in made),
    )


def _repeat(event: Event, cache: NeuronCache) -> None:
    match event:
        case Planned():
            cache.plan(event.layer, event.predicted, event.share)
        case Committed():
            cache.commit(event.swap_ids)
        case LookedUp():
            cache.lookup(event.layer, event.evaluated, event.active, event.share)
        case Cancelled():
            cache.cancel(event.swap_id, restore=event.restored)
        case StepEnded():
            cache.end_step(event.record, event.layers)


def _compare(call: int, logged: Event, made: Event) -> list[Difference]:
    before, now = _outcome(logged), _outcome(made)
    return [
        Difference(call, f"{_name(logged)}: {what}", before.get(what), now.get(what))
        for what in {**before, **now}  # in order
        if not _same(before.get(what), now.get(what))
    ]


def _outcome(event: Event) -> dict[str, object]:
    """What the cache, its policy or its controller decided; the inputs are the same anyway."""
    match event:
        case Planned():
            found: dict[str, object] = {"evicted": event.evicted}
            for i, swap in enumerate(event.swaps):
                for name in ("id", "layer", "promote", "slots", "evict"):
                    found[f"swaps[{i}].{name}"] = getattr(swap, name)
            return found
        case LookedUp():
            return {f.name: getattr(event.split, f.name) for f in fields(event.split)}
        case StepEnded():
            return {f.name: getattr(event.knobs, f.name) for f in fields(event.knobs)}
        case _:
            return {}


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return type(a) is type(b) and a == b


def _name(event: Event) -> str:
    match event:
        case Planned():
            return f"plan of layer {event.layer}"
        case LookedUp():
            return f"lookup of layer {event.layer}"
        case Committed():
            return f"commit of swaps {list(event.swap_ids)}"
        case Cancelled():
            return f"cancel of swap {event.swap_id}"
        case StepEnded():
            return f"end_step of step {event.record.step}"

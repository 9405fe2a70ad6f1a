"""Swaps on their way into a CUDA card's slots: planned, gathered, on the promotion stream, landed.

Knows no policy: `cuda` says when a plan may start and who waits for it. Where rows are gathered on
the host, a thread of its own does that, so that the model's thread can launch meanwhile; it touches
host memory only. Streams are the model's thread's: `go_on` queues each copy whose rows have been
gathered, in issue order, behind what had been launched when the copy was asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kairox_exec.lanes import Job, Worker
from kairox_exec.oplog import Op, Size
from kairox_exec.pinning import Held, Ring
from kairox_exec.promote import WAYS, Promote, choose_promotion, possible_ways, promote_with
from kairox_exec.streams import Event, Streams
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.events import Swap

BATCH_ROWS = 128  # swaps of a plan that are copied, and land, together: a launch costs 10 us


@dataclass(slots=True, eq=False)
class Timed:
    """An op whose times are known when its events are done."""

    op: Op
    before: Event
    after: Event


@dataclass(slots=True, eq=False)
class Flight:
    """Swaps that are copied together."""

    swap_ids: tuple[int, ...]
    layer: int
    size: Size
    free: Event  # what was launched on the slots before is done
    gathering: Job | None
    queue: Callable[[], None]
    after: Event | None = None  # the copy's; None until it is queued

    @property
    def named(self) -> str:
        return f"swaps {list(self.swap_ids)}, layer {self.layer}"

    @property
    def is_gathered(self) -> bool:
        return self.gathering is None or self.gathering.done.is_set()


class Flights:
    """promotion: see `promote`; auto measures on the first rows. on_timed: told every batch."""

    def __init__(
        self,
        streams: Streams,
        ring: Ring,
        held: Held,
        promotion: str,
        on_timed: Callable[[Timed], None],
    ) -> None:
        self.way, self.rates = promotion, dict[str, float]()
        self.flying: list[Flight] = []  # not yet told as landed; those that are copied at once not
        self._streams, self._ring, self._held = streams, ring, held
        self._on_timed = on_timed
        self._promote: Promote | None = None  # not yet chosen
        if promotion != "auto":
            self._promote = promote_with(promotion, streams, ring)
        self._planned: list[tuple[Sequence[Swap], torch.Tensor, torch.Tensor]] = []
        self._unqueued: deque[Flight] = deque()
        self._gatherer: Worker | None = None  # started by the first rows to be gathered

    def suit(self, rows: torch.Tensor) -> None:
        """Choose a way on these rows, unless it has been; KairoxError for one that cannot be."""
        if self._promote is None and len(rows):
            self._choose(rows)
        if self.way == "uva_gather" and not self._held.is_pinned:
            raise KairoxError(
                "promotion 'uva_gather' lets the GPU read host memory, which is "
                f"{self._held.memory}; raise the limit of locked memory (ulimit -l), or use "
                f"promotion {' or '.join(WAYS[1:])}"
            )

    def plan(self, swaps: Sequence[Swap], rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Remember copies for `start_planned`."""
        self._planned.append((swaps, rows, slots))

    def start_planned(self) -> None:
        """Start what has been planned, in order."""
        for swaps, rows, slots in self._planned:
            self.flying += self.start(swaps, rows, slots)
        self._planned.clear()

    def start(self, swaps: Sequence[Swap], rows: torch.Tensor, slots: torch.Tensor) -> list[Flight]:
        """Ask for copies, behind everything that has been launched on what they overwrite."""
        if self._promote is None:
            self._choose(rows)
        assert self._promote is not None
        free = self._streams.compute.record()
        row_bytes = float(math.prod(rows.shape[1:]) * rows.element_size())
        flights = []
        for batch in _batches(swaps):
            ids = np.concatenate([swap.promote for swap in batch])
            places = np.concatenate([swap.slots for swap in batch])
            promotion = self._promote(rows, ids, slots, places)
            gathering = None if promotion.gather is None else Job(promotion.gather)
            n = int(ids.size)
            size = Size(neurons=n, n_bytes=n * row_bytes, n_swaps=len(batch))
            swap_ids = tuple(swap.id for swap in batch)
            flight = Flight(swap_ids, batch[0].layer, size, free, gathering, promotion.queue)
            flights.append(flight)
            if gathering is not None:
                self._gather(gathering)
        self._unqueued += flights
        self.go_on()
        return flights

    @property
    def is_gathering(self) -> bool:
        """Whether there is anything for `go_on` to come back for."""
        return bool(self._unqueued)

    def go_on(self) -> None:
        """Queue what has been gathered, in issue order; raise what went wrong there."""
        while self._unqueued and self._unqueued[0].is_gathered:
            if self._gatherer is not None:
                self._gatherer.raise_error()  # known before the work is said to be done
            flight, stream = self._unqueued.popleft(), self._streams.promotion
            stream.wait(flight.free)
            before = stream.record()
            flight.queue()
            flight.after = stream.record()
            op = Op("h2d", "swap", flight.layer, 0, 0, flight.size)
            self._on_timed(Timed(op, before, flight.after))

    def landed(self) -> list[int]:
        """Ids of swaps whose copies are done and were not returned before."""
        self.go_on()
        landed: list[int] = []
        while self.flying:  # one stream: in issue order
            after = self.flying[0].after
            if after is None or not after.query():
                break
            landed += self.flying.pop(0).swap_ids
        return landed

    def drop(self) -> list[Flight]:
        """What has not been queued never is; returns what was being gathered, and may still be."""
        self._planned.clear()
        dropped, self._unqueued = list(self._unqueued), deque()  # their buffers are not used again
        return dropped

    def close(self, stuck_after_s: float | None) -> None:
        """End the thread that gathers; nothing is queued any more. See Worker.close."""
        self.drop()
        if self._gatherer is not None:
            self._gatherer.close(stuck_after_s)

    def _gather(self, job: Job) -> None:
        if self._gatherer is None:
            self._gatherer = Worker("kairox-gather")
        self._gatherer.submit(job)

    def _choose(self, rows: torch.Tensor) -> None:
        ways = possible_ways(self._streams, rows, pinned=self._held.is_pinned)
        self.way, self.rates = choose_promotion(self._streams, self._ring, rows, ways)
        self._promote = promote_with(self.way, self._streams, self._ring)


def _batches(swaps: Sequence[Swap]) -> Iterator[list[Swap]]:
    """Neighbours, in order, of about BATCH_ROWS neurons."""
    batch: list[Swap] = []
    for swap in swaps:
        batch.append(swap)
        if sum(one.promote.size for one in batch) >= BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch

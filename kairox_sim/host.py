"""The host side of the engine: CPU pool, both directions of the link and DRAM, as SimPy callbacks.

The GPU's process gives it swaps and residual neurons and asks what has landed. It decides nothing;
`HostTraffic` holds the arithmetic and this the events, of which there are as few as can be: nothing
wakes up for a swap that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import simpy

from kairox_sim.costs import CostModel
from kairox_sim.events import Swap
from kairox_sim.flows import NEVER, NS, Ended, HostTraffic

Note = Callable[[str, str, int, int, int], None]
"""(lane, name, layer, began_ns, end_ns): keep a busy interval."""


def to_ns(seconds: float) -> int:
    """The nearest whole nanosecond."""
    return round(seconds * NS)


@dataclass(slots=True, eq=False)
class HandOver:
    """Residual neurons of one layer-step on their way through the host."""

    layer: int
    n_residual: int
    n_tokens: int
    began_ns: int  # the pool's work
    arrived: simpy.Event  # the partial sums are on the device; its value is when they can be added


class Host:
    """Keeps `busy_ns` of the CPU pool and of activation transfers, summed over the run."""

    def __init__(self, env: simpy.Environment, costs: CostModel, note: Note | None) -> None:
        self._env, self._costs, self._note = env, costs, note
        self.traffic = HostTraffic(costs.h2d_bytes_per_s, costs.dram_bytes_per_s)
        self.cpu_busy_ns = self.act_busy_ns = 0
        self._landed: list[int] = []  # swap ids not yet polled, in issue order
        self._awaited: set[int] = set()  # swap ids the GPU waits for
        self._all_landed: simpy.Event | None = None
        self._wake_ns = NEVER

    def submit(self, swaps: Sequence[Swap]) -> None:
        """Queue a plan's copies now, in order; equal ones as one run."""
        self.settle()
        for n, run in groupby(swaps, lambda swap: swap.promote.size):
            setup_ns = to_ns(self._costs.swap_fixed_s(n))
            self.traffic.submit_swaps(list(run), self._costs.swap_bytes(n), setup_ns)
        self.settle()

    def poll(self) -> tuple[int, ...]:
        """Swaps that have landed by now and were not returned before, in issue order."""
        self.settle()
        landed, self._landed = tuple(self._landed), []
        return landed

    def landing_of(self, swap_ids: Iterable[int]) -> simpy.Event | None:
        """An event for when all of these have landed; None if they have."""
        self.settle()
        self._awaited = set(swap_ids).difference(self._landed)
        if not self._awaited:
            return None
        self._all_landed = self._env.event()
        self._arm()
        return self._all_landed

    def hand_over(self, layer: int, n_residual: int, n_tokens: int) -> simpy.Event:
        """x and the gate's values go down, the pool computes, the partial sums come back.

        The event's value is when the partial sums can be added, which is later than the event.
        The GPU waits for it before it hands over again, so d2h and the pool are free now.
        """
        costs, now_ns = self._costs, self._now_ns
        down_ns = now_ns + to_ns(costs.act_d2h_s(n_tokens))
        self.act_busy_ns += down_ns - now_ns
        self._keep("d2h", "x", layer, now_ns, down_ns)
        began_ns = down_ns + to_ns(costs.handover_s)
        arrived = self._env.event()
        job = HandOver(layer, n_residual, n_tokens, began_ns, arrived)
        reads_ns = began_ns + to_ns(costs.cpu_fixed_s)
        self._at(reads_ns, lambda: self._read_rows(job))
        return arrived

    def settle(self) -> None:
        """Let everything that has ended by now take effect, and arm the next wake-up."""
        now_ns = self._now_ns
        while ended := self.traffic.settle(now_ns):  # an end may let something start, or even end
            for item in ended:
                self._on_end(item)
        self._arm()

    def note_unfinished(self) -> None:
        """Keep the interval of a swap that is still under way at the end of the run."""
        under_way = self.traffic.on_link()
        if under_way is not None:
            _, swap, began_ns = under_way
            assert isinstance(swap, Swap)
            self._keep("h2d", "swap", swap.layer, began_ns, self._now_ns)

    @property
    def _now_ns(self) -> int:
        return int(self._env.now)

    # -- inside ---------------------------------------------------------------------------------

    def _read_rows(self, job: HandOver) -> None:
        costs = self._costs
        cap = costs.cpu_rate_cap_bytes_per_s(job.n_tokens)
        self.settle()
        self.traffic.start_cpu(job, costs.cpu_bytes(job.n_residual), cap, self._now_ns)
        self._arm()

    def _on_end(self, item: Ended) -> None:
        key = item.key
        if isinstance(key, Swap):
            self._landed.append(key.id)
            self._keep("h2d", "swap", key.layer, item.began_ns, item.end_ns)
            if self._all_landed is not None:
                self._awaited.discard(key.id)
                if not self._awaited:
                    self._all_landed.succeed()
                    self._all_landed = None
            return
        assert isinstance(key, HandOver)
        costs = self._costs
        if item.kind == "cpu":
            self.cpu_busy_ns += item.end_ns - key.began_ns
            self._keep("cpu", "residual", key.layer, key.began_ns, item.end_ns)
            n_bytes = costs.act_h2d_bytes(key.n_tokens)
            self.traffic.submit_critical(key, n_bytes, to_ns(costs.act_h2d_fixed_s))
        else:
            self.act_busy_ns += item.end_ns - item.began_ns
            self._keep("h2d", "partial sums", key.layer, item.began_ns, item.end_ns)
            key.arrived.succeed(item.end_ns + to_ns(costs.handover_s))

    def _arm(self) -> None:
        at_ns = self.traffic.next_change_ns(each_copy=self._all_landed is not None)
        if at_ns not in (NEVER, self._wake_ns):
            self._wake_ns = at_ns
            self._at(at_ns, lambda: self._wake(at_ns))

    def _wake(self, at_ns: int) -> None:
        if at_ns == self._wake_ns:  # else something has changed since this was armed
            self._wake_ns = NEVER
            self.settle()

    def _at(self, at_ns: int, call: Callable[[], None]) -> None:
        event = self._env.timeout(at_ns - self._now_ns)
        event.callbacks.append(lambda _: call())

    def _keep(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        if self._note is not None:
            self._note(lane, name, layer, began_ns, end_ns)

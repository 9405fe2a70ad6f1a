"""The host side of the engine: CPU pool, both directions of the link and DRAM, as SimPy callbacks.

The GPU's process gives it swaps and residual neurons and asks what has landed. It decides nothing.
`HostTraffic` holds the arithmetic; an event is only made of what cannot be worked out when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    path: _Path
    began_ns: int  # the pool's work
    answered: simpy.Event  # fires when the pool is done; its value is when the sums can be added


@dataclass(frozen=True, slots=True)
class _Path:
    """What a hand-over of so many tokens costs whatever the number of neurons."""

    down_ns: int
    handover_ns: int  # each way
    cpu_fixed_ns: int
    cpu_cap_bytes_per_s: float
    sums_bytes: float
    sums_setup_ns: int


class Host:
    """Keeps the busy nanoseconds of the CPU pool and of activation transfers, over the run."""

    def __init__(self, env: simpy.Environment, costs: CostModel, note: Note | None) -> None:
        self._env, self._costs, self._note = env, costs, note
        self._traffic = HostTraffic(costs.h2d_bytes_per_s, costs.dram_bytes_per_s)
        self.cpu_busy_ns = self.act_busy_ns = 0
        self._landed: list[int] = []  # swap ids not yet polled, in issue order
        self._wake_ns = NEVER
        self._paths: dict[int, _Path] = {}  # by number of tokens
        self._copies: dict[int, tuple[float, int]] = {}  # neurons of a swap -> bytes, set-up

    def submit(self, swaps: Sequence[Swap]) -> None:
        """Queue a plan's copies now, in order; equal ones as one run."""
        self._settle()
        for n, run in groupby(swaps, lambda swap: swap.promote.size):
            if n not in self._copies:
                costs = self._costs
                self._copies[n] = costs.swap_bytes(n), to_ns(costs.swap_fixed_s(n))
            self._traffic.submit_swaps(list(run), *self._copies[n])
        self._settle()

    def poll(self) -> tuple[int, ...]:
        """Swaps that have landed by now and were not returned before, in issue order."""
        self._settle()
        landed, self._landed = tuple(self._landed), []
        return landed

    def landing_ns(self, swaps: Sequence[Swap]) -> int:
        """When all of these, given in issue order, have or will have landed. The pool is idle."""
        self._settle()
        if not swaps or swaps[-1].id in self._landed:
            return self._now_ns
        return self._traffic.landing_ns(swaps[-1])

    def hand_over(self, layer: int, n_residual: int, n_tokens: int) -> simpy.Event:
        """x and the gate's values go down, the pool computes, the partial sums come back.

        The event's value is when the partial sums can be added, which is later than the event.
        The GPU waits until then before it hands over again, so d2h and the pool are free now.
        """
        now_ns, path = self._now_ns, self._path(n_tokens)
        down_ns = now_ns + path.down_ns
        self.act_busy_ns += path.down_ns
        began_ns = down_ns + path.handover_ns
        job = HandOver(layer, path, began_ns, self._env.event())
        self._keep("d2h", "x", layer, now_ns, down_ns)
        self._settle()
        self._traffic.submit_cpu(
            job, self._costs.cpu_bytes(n_residual), path.cpu_cap_bytes_per_s,
            began_ns + path.cpu_fixed_ns, now_ns,
        )  # fmt: skip
        self._arm()
        return job.answered

    def busy_ns(self) -> tuple[int, int, int]:
        """(CPU pool, swaps on the link, activations) up to now, while the pool is idle."""
        self._settle()
        return self.cpu_busy_ns, self._traffic.swap_busy_ns(self._now_ns), self.act_busy_ns

    def note_unfinished(self) -> None:
        """Keep the interval of a swap that is still under way at the end of the run."""
        under_way = self._traffic.on_link()
        if under_way is not None:
            _, swap, began_ns = under_way
            assert isinstance(swap, Swap)
            self._keep("h2d", "swap", swap.layer, began_ns, self._now_ns)

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _now_ns(self) -> int:
        return int(self._env.now)

    def _settle(self) -> None:
        """Let everything that has ended by now take effect, and arm the next wake-up."""
        now_ns = self._now_ns
        while ended := self._traffic.settle(now_ns):  # an end may let something start, or even end
            for item in ended:
                self._on_end(item)
        self._arm()

    def _on_end(self, item: Ended) -> None:
        end_ns, kind, key, began_ns = item
        if isinstance(key, Swap):
            self._landed.append(key.id)
            self._keep("h2d", "swap", key.layer, began_ns, end_ns)
            return
        assert isinstance(key, HandOver)
        if kind == "cpu":
            self.cpu_busy_ns += end_ns - key.began_ns
            self._keep("cpu", "residual", key.layer, key.began_ns, end_ns)
            path = key.path
            arrival_ns = self._traffic.submit_critical(
                key, path.sums_bytes, path.sums_setup_ns, end_ns
            )  # fmt: skip
            key.answered.succeed(arrival_ns + path.handover_ns)
        else:
            self.act_busy_ns += end_ns - began_ns
            self._keep("h2d", "partial sums", key.layer, began_ns, end_ns)

    def _arm(self) -> None:
        at_ns = self._traffic.next_change_ns()
        if at_ns not in (NEVER, self._wake_ns):
            self._wake_ns = at_ns
            event = self._env.timeout(at_ns - self._now_ns)
            event.callbacks.append(lambda _: self._wake(at_ns))

    def _wake(self, at_ns: int) -> None:
        if at_ns == self._wake_ns:  # else something has changed since this was armed
            self._wake_ns = NEVER
            self._settle()

    def _path(self, n_tokens: int) -> _Path:
        known = self._paths.get(n_tokens)
        if known is None:
            costs = self._costs
            known = self._paths[n_tokens] = _Path(
                down_ns=to_ns(costs.act_d2h_s(n_tokens)),
                handover_ns=to_ns(costs.handover_s),
                cpu_fixed_ns=to_ns(costs.cpu_fixed_s),
                cpu_cap_bytes_per_s=costs.cpu_rate_cap_bytes_per_s(n_tokens),
                sums_bytes=costs.act_h2d_bytes(n_tokens),
                sums_setup_ns=to_ns(costs.act_h2d_fixed_s),
            )
        return known

    def _keep(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        if self._note is not None:
            self._note(lane, name, layer, began_ns, end_ns)

"""The host side of the engine: CPU pool, both directions of the link and DRAM, as SimPy callbacks.

The GPU's process gives it swaps, fetches and residual neurons and asks what has landed. It decides
nothing.
`HostTraffic` holds the arithmetic; an event is only made of what cannot be worked out when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import simpy

from kairox_sim.cost_model import CostModel
from kairox_sim.events import Swap
from kairox_sim.flows import NEVER, Ended, HostTraffic, to_ns
from kairox_sim.policies.base import Ids

Note = Callable[[str, str, int, int, int], None]
"""(lane, name, layer, began_ns, end_ns): keep a busy interval."""


@dataclass(slots=True, eq=False)
class HandOver:
    """Residual neurons of one layer-step on their way through the host."""

    layer: int
    path: _Path
    began_ns: int  # the pool's work
    answered: simpy.Event  # fires when the pool is done; its value is when the sums can be added


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """One of the copies made on demand for a layer-step."""

    layer: int


@dataclass(frozen=True, slots=True)
class _Path:
    """What the hand-overs of so many tokens cost whatever the number of neurons.

    Where there are several in a layer-step, their costs are added and paid as one: x and the
    pre-activations before the pool's work, all partial sums after it.
    """

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
        self._last_fetch: _Fetch | None = None  # of the latest ones, while it has not landed
        self._fetched_ns = 0  # when the latest ones had landed, once they have
        self._wake_ns = NEVER
        self._paths: dict[int, _Path] = {}  # by number of tokens
        self._copies: dict[int, tuple[float, int]] = {}  # neurons of a swap -> bytes, set-up

    def submit(self, swaps: Sequence[Swap]) -> None:
        """Queue a plan's copies now, in order; equal ones as one run."""
        self._settle()
        for (n_bytes, setup_ns), run in groupby(swaps, lambda s: self._copy_of(s.layer, s.promote)):
            self._traffic.submit_swaps(list(run), n_bytes, setup_ns)
        self._settle()

    def fetch(self, layer: int, ids: Ids, part: int) -> float:
        """Copy these on demand, `part` at a time, before swaps that have not begun: their bytes."""
        self._settle()
        total_bytes = 0.0
        parts = [ids[at : at + part] for at in range(0, ids.size, part)]
        for (n_bytes, setup_ns), run in groupby(parts, lambda ids: self._copy_of(layer, ids)):
            keys = [_Fetch(layer) for _ in run]
            total_bytes += len(keys) * n_bytes
            self._traffic.submit_fetches(keys, n_bytes, setup_ns)
            self._last_fetch = keys[-1]
        self._settle()
        return total_bytes

    def fetched_ns(self) -> int:
        """When the latest fetches have or will have landed. The pool is idle."""
        self._settle()
        if self._last_fetch is None:
            return self._fetched_ns
        return self._traffic.landing_ns(self._last_fetch)

    def call_off(self, swaps: Sequence[Swap]) -> list[Swap]:
        """Of these, none of which has landed, those that have not begun. They never will."""
        self._settle()
        under_way = self._traffic.on_link()
        off = [swap for swap in swaps if under_way is None or swap is not under_way[1]]
        self._traffic.cancel_swaps(frozenset(off))
        return off

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
            job, self._costs.cpu_bytes(n_residual, n_tokens), path.cpu_cap_bytes_per_s,
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
        if isinstance(key, _Fetch):
            if key is self._last_fetch:
                self._last_fetch, self._fetched_ns = None, end_ns
            self._keep("h2d", "fetch", key.layer, began_ns, end_ns)
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
            costs, times = self._costs, self._costs.handovers
            known = self._paths[n_tokens] = _Path(
                down_ns=times * to_ns(costs.act_d2h_s(n_tokens)),
                handover_ns=times * to_ns(costs.handover_s),
                cpu_fixed_ns=to_ns(costs.cpu_fixed_s),
                cpu_cap_bytes_per_s=costs.cpu_rate_cap_bytes_per_s(n_tokens),
                sums_bytes=times * costs.act_h2d_bytes(n_tokens),
                sums_setup_ns=times * to_ns(costs.act_h2d_fixed_s),
            )
        return known

    def _copy_of(self, layer: int, ids: Ids) -> tuple[float, int]:
        """(bytes, set-up ns) of copying these as one swap."""
        costs = self._costs
        if costs.position is not None:
            n_bytes, fixed_s = costs.swap_of(layer, ids)
            return n_bytes, to_ns(fixed_s)
        known = self._copies.get(ids.size)
        if known is None:
            n_bytes, fixed_s = costs.swap_of(layer, ids)
            known = self._copies[ids.size] = n_bytes, to_ns(fixed_s)
        return known

    def _keep(self, lane: str, name: str, layer: int, began_ns: int, end_ns: int) -> None:
        if self._note is not None:
            self._note(lane, name, layer, began_ns, end_ns)

"""Host memory traffic in integer nanoseconds: the h2d link, the CPU pool's reads, shared DRAM.

Plain arithmetic without a clock or an event loop: the caller brings `now`, asks what has ended, and
is told when to ask again. A copy is set up for a fixed time, then its bytes flow; bytes on the link
and bytes read by the pool share DRAM by max-min water-filling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

NS = 1_000_000_000
NEVER = 2**62


def water_fill(caps: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair rates: nobody above its cap, the sum at most `capacity`."""
    rates = [0.0] * len(caps)
    left, waiting = capacity, len(caps)
    for i in sorted(range(len(caps)), key=lambda i: caps[i]):
        rates[i] = min(caps[i], left / waiting)
        left -= rates[i]
        waiting -= 1
    return rates


class Ended(NamedTuple):
    end_ns: int
    kind: str  # "swap" | "critical" | "cpu"
    key: Hashable
    began_ns: int


@dataclass(slots=True)
class _Flow:
    """Bytes that move from `since_ns` on; while a copy is being set up that is still to come."""

    kind: str
    key: Hashable
    began_ns: int  # set-up included
    since_ns: int  # `left` and `rate` hold from here
    left: float  # bytes
    rate: float  # bytes/s
    end_ns: int = NEVER
    moving: bool = False  # set up, as far as the sharing of DRAM has taken notice


@dataclass(slots=True)
class _Queued:
    """Equal copies, one after the other."""

    kind: str
    keys: Sequence[Hashable]
    n_bytes: float  # each
    setup_ns: int  # each
    n_started: int = 0


class HostTraffic:
    """One h2d link (critical activations before swaps, a swap is not preempted) and one CPU pool.

    Equal swaps are queued as one run. While the link and the pool leave each other alone, nothing
    needs to happen when a swap ends: the landings of a whole run are worked out when asked for.
    """

    def __init__(self, h2d_bytes_per_s: float, dram_bytes_per_s: float = inf) -> None:
        self.h2d_bytes_per_s, self.dram_bytes_per_s = h2d_bytes_per_s, dram_bytes_per_s
        self._swaps: deque[_Queued] = deque()
        self._critical: deque[_Queued] = deque()
        self._link: _Flow | None = None
        self._cpu: _Flow | None = None
        self._cpu_cap = 0.0  # bytes/s
        self._contended = False  # the pool and the link want more than DRAM gives
        self._swap_busy_ns = 0  # of swaps that have ended

    def submit_swaps(self, keys: Sequence[Hashable], n_bytes: float, setup_ns: int) -> None:
        """Copies of `n_bytes` each, in order. They start at the next `settle`."""
        self._swaps.append(_Queued("swap", keys, n_bytes, setup_ns))

    def submit_critical(self, key: Hashable, n_bytes: float, setup_ns: int) -> None:
        """A copy that goes ahead of every swap that has not begun."""
        self._critical.append(_Queued("critical", (key,), n_bytes, setup_ns))

    def start_cpu(self, key: Hashable, n_bytes: float, cap: float, now_ns: int) -> None:
        """The pool begins to read. Call after `settle(now_ns)`."""
        if self._cpu is not None:
            raise RuntimeError("the CPU pool works on one layer-step at a time")
        self._cpu = _Flow("cpu", key, now_ns, now_ns, n_bytes, 0.0)
        self._cpu_cap = cap
        self._contended = self.h2d_bytes_per_s + cap > self.dram_bytes_per_s
        if self._link is not None:
            self._link.moving = self._link.since_ns <= now_ns
        self._share(now_ns)

    def settle(self, now_ns: int) -> list[Ended]:
        """What ended at or before `now_ns`, in order of time; when nothing did, start what can.

        Call until it returns nothing: what an end at `now_ns` makes the caller submit goes before
        what starts at `now_ns`.
        """
        ended: list[Ended] = []
        while True:
            cpu_ns = NEVER if self._cpu is None else self._cpu.end_ns
            link_ns = self._link_change_ns()
            at_ns = min(cpu_ns, link_ns)
            if at_ns > now_ns:
                break
            if at_ns == cpu_ns:
                assert self._cpu is not None
                ended.append(Ended(at_ns, "cpu", self._cpu.key, self._cpu.began_ns))
                self._cpu = None
                self._share(at_ns)
                self._contended = False
                continue
            assert self._link is not None
            if self._link.end_ns > at_ns:  # set up: its bytes begin to move
                self._link.moving = True
                self._share(at_ns)
                continue
            ended.append(self._end_link())
            if at_ns < now_ns:  # nobody submitted anything in between, or we would have been asked
                self._start_link(at_ns)
            self._share(at_ns)
        if not ended and self._link is None and self._start_link(now_ns):
            self._share(now_ns)
        return ended

    def next_change_ns(self, *, each_copy: bool = False) -> int:
        """When to settle next if nothing is submitted; NEVER when that makes no difference.

        A swap that lands while nobody waits for the link makes none, unless `each_copy` is asked.
        """
        at_ns = NEVER if self._cpu is None else self._cpu.end_ns
        if self._link is not None and (
            each_copy or self._contended or self._critical or self._link.kind == "critical"
        ):
            at_ns = min(at_ns, self._link_change_ns())
        return at_ns

    def swap_busy_ns(self, now_ns: int) -> int:
        """Time the link has carried swaps up to now. Call after `settle(now_ns)`."""
        if self._link is not None and self._link.kind == "swap":
            return self._swap_busy_ns + now_ns - self._link.began_ns
        return self._swap_busy_ns

    def on_link(self) -> tuple[str, Hashable, int] | None:
        """(kind, key, began_ns) of the copy that is under way."""
        link = self._link
        return None if link is None else (link.kind, link.key, link.began_ns)

    # -- inside ---------------------------------------------------------------------------------

    def _link_change_ns(self) -> int:
        """When the copy on the link ends, or, where that matters, begins to move its bytes."""
        link = self._link
        if link is None:
            return NEVER
        return link.since_ns if self._contended and not link.moving else link.end_ns

    def _end_link(self) -> Ended:
        flow = self._link
        assert flow is not None
        if flow.kind == "swap":
            self._swap_busy_ns += flow.end_ns - flow.began_ns
        self._link = None
        return Ended(flow.end_ns, flow.kind, flow.key, flow.began_ns)

    def _start_link(self, now_ns: int) -> bool:
        """Put the next copy on the idle link, if there is one."""
        queue = self._critical or self._swaps
        if not queue:
            return False
        run = queue[0]
        key = run.keys[run.n_started]
        run.n_started += 1
        if run.n_started == len(run.keys):
            queue.popleft()
        flow = _Flow(run.kind, key, now_ns, now_ns + run.setup_ns, run.n_bytes, 0.0)
        flow.moving = run.setup_ns == 0
        _set_rate(flow, min(self.h2d_bytes_per_s, self.dram_bytes_per_s), now_ns)
        self._link = flow
        return True

    def _share(self, now_ns: int) -> None:
        """Recompute the rates: called at each start and end, and nowhere else."""
        link, cpu = self._link, self._cpu
        if cpu is None:
            if link is not None and self._contended:
                _set_rate(link, min(self.h2d_bytes_per_s, self.dram_bytes_per_s), now_ns)
        elif link is not None and self._contended and link.moving:
            caps = (self.h2d_bytes_per_s, self._cpu_cap)
            link_rate, cpu_rate = water_fill(caps, self.dram_bytes_per_s)
            _set_rate(link, link_rate, now_ns)
            _set_rate(cpu, cpu_rate, now_ns)
        else:
            _set_rate(cpu, min(self._cpu_cap, self.dram_bytes_per_s), now_ns)


def _set_rate(flow: _Flow, rate: float, now_ns: int) -> None:
    if rate == flow.rate:
        return
    if rate <= 0:
        raise RuntimeError(f"{flow.kind} {flow.key!r} would move at {rate} bytes/s")
    if now_ns > flow.since_ns:
        flow.left = max(0.0, flow.left - flow.rate * (now_ns - flow.since_ns) / NS)
        flow.since_ns = now_ns
    flow.rate = rate
    # Rounded up, with 1e-6 ns of slack: a quotient a hair above a whole ns is that ns.
    flow.end_ns = flow.since_ns + max(0, ceil(flow.left / rate * NS - 1e-6))

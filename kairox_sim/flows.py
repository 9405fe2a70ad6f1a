"""Host memory traffic in integer nanoseconds: the h2d link, the CPU pool's reads, shared DRAM.

Plain arithmetic without a clock or an event loop: the caller brings `now`, asks what has ended, and
is told when to ask again. A copy is set up for a fixed time, then its bytes flow; bytes on the link
and bytes read by the pool share DRAM by max-min water-filling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

NS = 1_000_000_000
NEVER = 2**62


def to_ns(seconds: float) -> int:
    """The nearest whole nanosecond."""
    return round(seconds * NS)


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
    kind: str  # "swap" | "fetch" | "critical" | "cpu"
    key: Hashable
    began_ns: int


@dataclass(slots=True)
class _Flow:
    """Bytes that move from `since_ns` on, which is to come while a copy is being set up."""

    kind: str
    key: Hashable
    began_ns: int  # set-up included
    since_ns: int  # `left` and `rate` hold from here
    left: float  # bytes
    rate: float  # bytes/s
    end_ns: int
    moving: bool = False  # as far as the sharing of DRAM has taken notice


@dataclass(slots=True)
class _Queued:
    """Equal copies, one after the other."""

    kind: str
    keys: Sequence[Hashable]
    n_bytes: float  # each
    setup_ns: int  # each
    alone_ns: int  # each, set-up included, while the pool does not disturb it
    n_started: int = 0

    @property
    def ahead_ns(self) -> int:
        """Of all that have not begun, while the pool does not disturb them."""
        return (len(self.keys) - self.n_started) * self.alone_ns


class HostTraffic:
    """One h2d link and one CPU pool.

    What the GPU waits for in this very layer-step, fetches and activations, goes over the link
    before swaps, in the order it was given; a copy that has begun is not preempted.

    Nothing needs to happen when a copy ends while the pool and the link leave each other alone: the
    landings of a whole run of equal swaps are worked out when asked for.
    """

    def __init__(self, h2d_bytes_per_s: float, dram_bytes_per_s: float = inf) -> None:
        self.h2d_bytes_per_s, self.dram_bytes_per_s = h2d_bytes_per_s, dram_bytes_per_s
        self._link_rate = min(h2d_bytes_per_s, dram_bytes_per_s)  # with the pool idle
        self._swaps: deque[_Queued] = deque()
        self._urgent: deque[_Queued] = deque()  # fetches, then at most one critical copy
        self._link: _Flow | None = None
        self._cpu: _Flow | None = None
        self._cpu_cap = 0.0  # bytes/s
        self._contended = False  # the pool and the link want more than DRAM gives
        self._swap_busy_ns = 0  # of swaps and fetches that have ended

    def submit_swaps(self, keys: Sequence[Hashable], n_bytes: float, setup_ns: int) -> None:
        """Copies of `n_bytes` each, in order. They start at the next `settle`."""
        alone_ns = setup_ns + _duration_ns(n_bytes, self._link_rate)
        self._swaps.append(_Queued("swap", keys, n_bytes, setup_ns, alone_ns))

    def submit_fetches(self, keys: Sequence[Hashable], n_bytes: float, setup_ns: int) -> None:
        """Copies of `n_bytes` each that go before every swap that has not begun.

        They start at the next `settle`; call it before, too.
        """
        alone_ns = setup_ns + _duration_ns(n_bytes, self._link_rate)
        self._urgent.append(_Queued("fetch", keys, n_bytes, setup_ns, alone_ns))

    def submit_critical(self, key: Hashable, n_bytes: float, setup_ns: int, now_ns: int) -> int:
        """A copy that goes before every swap that has not begun; returns when it ends.

        The caller lets the pool rest until then, so that nothing can change it. Call after
        `settle(now_ns)` has returned everything that ended.
        """
        if self._cpu is not None or self._critical_is_open():
            raise RuntimeError("a critical copy with the pool, or another one, still at work")
        alone_ns = setup_ns + _duration_ns(n_bytes, self._link_rate)
        begins_ns = now_ns if self._link is None else self._link.end_ns
        begins_ns += sum(run.ahead_ns for run in self._urgent)
        self._urgent.append(_Queued("critical", (key,), n_bytes, setup_ns, alone_ns))
        return begins_ns + alone_ns

    def cancel_swaps(self, keys: Collection[Hashable]) -> None:
        """Take those of these that have not begun off the queue.

        Call after `settle(now_ns)`: what could begin by now has.
        """
        kept: deque[_Queued] = deque()
        for run in self._swaps:
            waiting = run.keys[run.n_started :]
            left = [key for key in waiting if key not in keys]
            if len(left) == len(waiting):
                kept.append(run)
            elif left:
                kept.append(_Queued(run.kind, left, run.n_bytes, run.setup_ns, run.alone_ns))
        self._swaps = kept

    def submit_cpu(
        self, key: Hashable, n_bytes: float, cap: float, begins_ns: int, now_ns: int
    ) -> None:
        """The pool reads `n_bytes` from `begins_ns` on. Call after `settle(now_ns)`."""
        link = self._link
        if self._cpu is not None or self._critical_is_open():
            raise RuntimeError("the CPU pool works on one layer-step at a time")
        rate = min(cap, self.dram_bytes_per_s)
        end_ns = begins_ns + _duration_ns(n_bytes, rate)
        self._cpu = _Flow("cpu", key, begins_ns, begins_ns, n_bytes, rate, end_ns)
        self._cpu_cap = cap
        self._contended = self.h2d_bytes_per_s + cap > self.dram_bytes_per_s
        if link is not None:
            link.moving = link.since_ns <= now_ns

    def settle(self, now_ns: int) -> list[Ended]:
        """What ended at or before `now_ns`, in order of time; when nothing did, start what can.

        Call until it returns nothing: what an end at `now_ns` makes the caller submit goes before
        what starts at `now_ns`.
        """
        ended: list[Ended] = []
        while True:
            cpu, link = self._cpu, self._link
            cpu_ns = NEVER if cpu is None else self._change_ns(cpu)
            link_ns = NEVER if link is None else self._change_ns(link)
            if cpu_ns > now_ns and link_ns > now_ns:
                break
            if cpu is not None and cpu_ns <= link_ns:
                if cpu.end_ns == cpu_ns:
                    ended.append(Ended(cpu_ns, "cpu", cpu.key, cpu.began_ns))
                    self._cpu = None
                else:
                    cpu.moving = True
                self._share(cpu_ns)
                self._contended = self._contended and self._cpu is not None
                continue
            assert link is not None
            if link.end_ns == link_ns:
                ended.append(Ended(link_ns, link.kind, link.key, link.began_ns))
                if link.kind != "critical":
                    self._swap_busy_ns += link_ns - link.began_ns
                self._link = None
                # Nobody submitted anything in between, or we would have been asked.
                if link_ns < now_ns:
                    self._start_link(link_ns)
            else:
                link.moving = True
            if self._contended:
                self._share(link_ns)
        if not ended and self._link is None:
            self._start_link(now_ns)
        return ended

    def next_change_ns(self) -> int:
        """When to settle next if nothing is submitted; NEVER when it can wait until one asks."""
        if self._cpu is None:
            return NEVER
        at_ns = self._change_ns(self._cpu)
        if self._contended and self._link is not None:
            at_ns = min(at_ns, self._change_ns(self._link))
        return at_ns

    def landing_ns(self, key: Hashable) -> int:
        """When a swap or fetch that has not ended will, if the pool stays idle until then."""
        if self._cpu is not None or self._link is None:
            raise RuntimeError("landings are certain only while the pool is idle, after settling")
        at_ns = self._link.end_ns
        if self._link.key == key:
            return at_ns
        for run in chain(self._urgent, self._swaps):
            waiting = run.keys[run.n_started :]
            if key in waiting:
                return at_ns + (1 + waiting.index(key)) * run.alone_ns
            at_ns += run.ahead_ns
        raise RuntimeError(f"{key!r} is neither on the link nor waiting for it")

    def swap_busy_ns(self, now_ns: int) -> int:
        """Time the link has carried swaps and fetches up to now. Call after `settle(now_ns)`."""
        if self._link is not None and self._link.kind != "critical":
            return self._swap_busy_ns + now_ns - self._link.began_ns
        return self._swap_busy_ns

    def on_link(self) -> tuple[str, Hashable, int] | None:
        """(kind, key, began_ns) of the copy that is under way."""
        link = self._link
        return None if link is None else (link.kind, link.key, link.began_ns)

    # -- inside ---------------------------------------------------------------------------------

    def _change_ns(self, flow: _Flow) -> int:
        """When a flow ends, or, where that matters to the other one, begins to move its bytes."""
        return flow.since_ns if self._contended and not flow.moving else flow.end_ns

    def _critical_is_open(self) -> bool:
        """Whether a critical copy is under way or waits."""
        on_link = self._link is not None and self._link.kind == "critical"
        return on_link or bool(self._urgent and self._urgent[-1].kind == "critical")

    def _start_link(self, now_ns: int) -> None:
        """Put the next copy on the idle link, if there is one."""
        queue = self._urgent or self._swaps
        if not queue:
            return
        run = queue[0]
        key = run.keys[run.n_started]
        run.n_started += 1
        if run.n_started == len(run.keys):
            queue.popleft()
        self._link = _Flow(
            run.kind, key, now_ns, now_ns + run.setup_ns, run.n_bytes, self._link_rate,
            now_ns + run.alone_ns,
        )  # fmt: skip

    def _share(self, now_ns: int) -> None:
        """Recompute the rates: called when a flow begins or ends to move, and nowhere else."""
        link, cpu = self._link, self._cpu
        link_rate, cpu_rate = self._link_rate, min(self._cpu_cap, self.dram_bytes_per_s)
        if link is not None and cpu is not None and link.moving and cpu.moving:
            caps = (self.h2d_bytes_per_s, self._cpu_cap)
            link_rate, cpu_rate = water_fill(caps, self.dram_bytes_per_s)
        if link is not None:
            _set_rate(link, link_rate, now_ns)
        if cpu is not None:
            _set_rate(cpu, cpu_rate, now_ns)


def _set_rate(flow: _Flow, rate: float, now_ns: int) -> None:
    if rate == flow.rate:
        return
    if now_ns > flow.since_ns:
        flow.left = max(0.0, flow.left - flow.rate * (now_ns - flow.since_ns) / NS)
        flow.since_ns = now_ns
    flow.rate = rate
    flow.end_ns = flow.since_ns + _duration_ns(flow.left, rate)


def _duration_ns(n_bytes: float, bytes_per_s: float) -> int:
    if bytes_per_s <= 0:
        raise RuntimeError(f"{n_bytes} bytes would move at {bytes_per_s} bytes/s")
    # Rounded up, with 1e-6 ns of slack: a quotient a hair above a whole ns is that ns.
    return max(0, ceil(n_bytes / bytes_per_s * NS - 1e-6))

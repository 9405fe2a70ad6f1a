"""Host memory traffic in integer nanoseconds: the h2d queue, the CPU pool's rows, shared DRAM.

Plain arithmetic without a clock or an event loop: the engine brings `now`, asks what ended, and is
told when the rates change next. Every transfer is a flow with a byte count and a cap; a fixed cost
is folded into the cap (bytes / (fixed + bytes / rate)), so that an undisturbed copy takes exactly
fixed + bytes / rate. Active flows share DRAM by max-min water-filling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil, inf

NS = 1_000_000_000


def water_fill(caps: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair rates: nobody above its cap, the sum at most `capacity`."""
    rates = [0.0] * len(caps)
    left, waiting = capacity, len(caps)
    for i in sorted(range(len(caps)), key=lambda i: caps[i]):
        rates[i] = min(caps[i], left / waiting)
        left -= rates[i]
        waiting -= 1
    return rates


def capped(n_bytes: float, fixed_s: float, bytes_per_s: float) -> float:
    """The cap [bytes/s] at which `n_bytes` take fixed_s + n_bytes / bytes_per_s."""
    return n_bytes / (fixed_s + n_bytes / bytes_per_s)


@dataclass(slots=True)
class _Flow:
    kind: str  # "swap" | "critical" | "cpu"
    key: Hashable
    n_bytes: float
    cap: float  # bytes/s
    began_ns: int = 0
    since_ns: int = 0  # `left` and `rate` hold from here
    left: float = 0.0  # bytes
    rate: float = 0.0  # bytes/s

    @property
    def end_ns(self) -> int:
        if self.rate <= 0:
            raise RuntimeError(f"{self.kind} {self.key!r} has a rate of {self.rate} bytes/s")
        # 1e-6 ns of slack: a quotient a hair above a whole ns is that ns, not the next one.
        return self.since_ns + max(0, ceil(self.left / self.rate * NS - 1e-6))


@dataclass(frozen=True, slots=True)
class Ended:
    end_ns: int
    kind: str
    key: Hashable
    began_ns: int


class HostTraffic:
    """One h2d link (critical activations before swaps, a swap is not preempted) and one CPU pool.

    A queued run of swaps of equal cap is one flow with a landing time each: nothing but the last
    end changes the rates, so it costs one wake-up however many swaps it carries.
    """

    def __init__(self, dram_bytes_per_s: float = inf) -> None:
        self.dram_bytes_per_s = dram_bytes_per_s
        self._swaps: deque[_Flow] = deque()
        self._critical: deque[_Flow] = deque()
        self._link: _Flow | None = None
        self._cpu: _Flow | None = None
        self._swap_busy_ns = 0  # of swaps that have ended

    def submit_swap(self, key: Hashable, n_bytes: float, cap: float) -> None:
        self._swaps.append(_Flow("swap", key, n_bytes, cap))

    def submit_critical(self, key: Hashable, n_bytes: float, cap: float) -> None:
        self._critical.append(_Flow("critical", key, n_bytes, cap))

    def submit_cpu(self, key: Hashable, n_bytes: float, cap: float) -> None:
        if self._cpu is not None:
            raise RuntimeError("the CPU pool works on one layer-step at a time")
        self._cpu = _Flow("cpu", key, n_bytes, cap, began_ns=-1)

    def settle(self, now_ns: int) -> list[Ended]:
        """Everything that ended at or before `now_ns`, in order of time; then start what can."""
        ended: list[Ended] = []
        while True:
            link_end = self._link.end_ns if self._link is not None else now_ns + 1
            cpu = self._cpu if self._cpu is not None and self._cpu.began_ns >= 0 else None
            cpu_end = cpu.end_ns if cpu is not None else now_ns + 1
            if min(link_end, cpu_end) > now_ns:
                break
            if cpu is not None and cpu_end <= link_end:
                ended.append(Ended(cpu_end, "cpu", cpu.key, cpu.began_ns))
                self._cpu = None
                self._share(cpu_end)
            else:
                ended.append(self._end_link(link_end))
        self._start(now_ns)
        return ended

    def next_change_ns(self) -> int | None:
        """When a rate changes next if nothing is submitted; None when all is idle."""
        ends = []
        if self._cpu is not None:
            ends.append(self._cpu.end_ns)
        if self._link is not None:
            end_ns = self._link.end_ns
            if not self._critical:
                for flow in self._run_behind():
                    end_ns += max(0, ceil(flow.left / self._link.rate * NS - 1e-6))
            ends.append(end_ns)
        return min(ends, default=None)

    def swap_busy_ns(self, now_ns: int) -> int:
        """Time the link has carried swaps up to now. Call after `settle(now_ns)`."""
        if self._link is not None and self._link.kind == "swap":
            return self._swap_busy_ns + now_ns - self._link.began_ns
        return self._swap_busy_ns

    def queued(self) -> list[Hashable]:
        """Keys of swaps that have not landed, in order."""
        head = [self._link.key] if self._link is not None and self._link.kind == "swap" else []
        return head + [flow.key for flow in self._swaps]

    # -- inside ---------------------------------------------------------------------------------

    def _run_behind(self) -> list[_Flow]:
        """The swaps that follow the one on the link without a change of rate."""
        if self._link is None or self._link.kind != "swap":
            return []
        run = []
        for flow in self._swaps:
            if flow.cap != self._link.cap:
                break
            flow.left = flow.n_bytes
            run.append(flow)
        return run

    def _end_link(self, end_ns: int) -> Ended:
        flow = self._link
        assert flow is not None
        if flow.kind == "swap":
            self._swap_busy_ns += end_ns - flow.began_ns
        self._link = None
        self._start_link(end_ns)
        # The same cap again is the same rate: the CPU's flow needs no new start.
        if self._link is None or self._link.cap != flow.cap:
            self._share(end_ns)
        else:
            self._link.rate = flow.rate
        return Ended(end_ns, flow.kind, flow.key, flow.began_ns)

    def _start(self, now_ns: int) -> None:
        started = self._start_link(now_ns)
        if self._cpu is not None and self._cpu.began_ns < 0:
            self._begin(self._cpu, now_ns)
            started = True
        if started:
            self._share(now_ns)

    def _start_link(self, now_ns: int) -> bool:
        if self._link is not None or not (self._critical or self._swaps):
            return False
        self._link = (self._critical or self._swaps).popleft()
        self._begin(self._link, now_ns)
        return True

    def _begin(self, flow: _Flow, now_ns: int) -> None:
        flow.began_ns = flow.since_ns = now_ns
        flow.left = flow.n_bytes

    def _share(self, now_ns: int) -> None:
        """Recompute every rate: called at each start and end, and nowhere else."""
        active = [f for f in (self._link, self._cpu) if f is not None and f.began_ns >= 0]
        rates = water_fill([flow.cap for flow in active], self.dram_bytes_per_s)
        for flow, rate in zip(active, rates, strict=True):
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now_ns - flow.since_ns) / NS)
                flow.since_ns, flow.rate = now_ns, rate

"""Controllers: watch what a step took and return the next step's knobs. The cache applies them.

Add one: a class here, a row in CONTROLLERS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar, Protocol

from kairox_sim.errors import KairoxError
from kairox_sim.record import LayerWaits, StepRecord


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a controller may set. A policy's class names the knobs it reads."""

    threshold_scale: float = 1.0  # multiplies theta_promote: lower means more migration
    max_swaps: int | tuple[int, ...] | None = None  # per layer-step; None is unlimited
    decay: float | tuple[float, ...] | None = None  # a ranking policy's; None keeps its own

    def at(self, layer: int) -> Knobs:
        """The knobs of one layer: the same, with its own entry of each tuple."""
        max_swaps, decay = self.max_swaps, self.decay
        if not isinstance(max_swaps, tuple) and not isinstance(decay, tuple):
            return self
        return Knobs(
            self.threshold_scale,
            max_swaps[layer] if isinstance(max_swaps, tuple) else max_swaps,
            decay[layer] if isinstance(decay, tuple) else decay,
        )


class Controller(Protocol):
    """`update` sees the step that ended and returns the knobs of the next.

    `start` is called once, by the cache, with the number of swaps that fill each layer's slots.
    `layers` is None where the driver does not know waits per layer; who needs them raises.
    """

    sets: ClassVar[frozenset[str]]

    @property
    def knobs(self) -> Knobs:
        """The knobs in force for the coming step."""
        ...

    def start(self, swaps: Sequence[int]) -> None: ...

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs: ...


class Fixed:
    """Never changes anything: the baseline every controller is measured against."""

    sets: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, threshold_scale: float = 1.0, max_swaps: int | None = None) -> None:
        if not 0 < threshold_scale < inf:
            raise KairoxError(f"threshold_scale must be above 0, got {threshold_scale}")
        if max_swaps is not None and max_swaps < 0:
            raise KairoxError(f"max_swaps must be 0 or more, got {max_swaps}")
        self.knobs = Knobs(threshold_scale=threshold_scale, max_swaps=max_swaps)

    def start(self, swaps: Sequence[int]) -> None:
        pass

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        return self.knobs


class Anb:
    """Adaptive neuron balancing as the Kairox Guide's listing gives it.

    delta = T_cpu - max(T_gpu, T_io). A slow CPU (delta > 0) lowers threshold_scale, so that more
    neurons are promoted; otherwise a slow link (T_io > T_gpu) raises it. It never relaxes while
    neither holds. The OSDI '26 paper's ANB (per-layer decay) is a different controller.
    """

    sets: ClassVar[frozenset[str]] = frozenset({"threshold_scale"})

    EPSILON_S = 1e-8  # the guide's 1e-5 ms; keeps the ratios finite

    def __init__(
        self,
        eta_up: float = 0.05,
        eta_down: float = 0.08,
        lowest: float = 0.40,
        highest: float = 2.00,
        initial: float = 1.0,
    ) -> None:
        if not 0 < lowest <= initial <= highest < inf:
            raise KairoxError(
                f"ANB needs 0 < lowest <= initial <= highest, got {lowest}, {initial}, {highest}"
            )
        if not (0 <= eta_up < inf and 0 <= eta_down < inf):
            raise KairoxError(f"ANB's rates must be 0 or more, got {eta_up} and {eta_down}")
        self.eta_up, self.eta_down = eta_up, eta_down
        self.lowest, self.highest = lowest, highest
        self.knobs = Knobs(threshold_scale=initial)

    def start(self, swaps: Sequence[int]) -> None:
        pass

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        t_gpu, t_cpu, t_io = _busy_times(record, "ANB")
        scale = self.knobs.threshold_scale
        delta = t_cpu - max(t_gpu, t_io)
        if delta > 0:
            scale -= self.eta_up * (delta / (t_cpu + self.EPSILON_S))
        elif t_io > t_gpu:
            scale += self.eta_down * ((t_io - t_gpu) / (t_io + self.EPSILON_S))
        self.knobs = Knobs(threshold_scale=min(max(scale, self.lowest), self.highest))
        return self.knobs


class AnbProse:
    """The law in the Kairox Guide's prose, which is not that of its listing (see Anb).

    gamma is a balancing intensity: gamma + eta*delta where T_cpu > max(T_gpu, T_io), and
    gamma - eta*|delta| where T_io is the largest; delta = T_cpu - max(T_gpu, T_io) in MILLISECONDS.
    threshold_scale = 1 / gamma, kept in the listing's range. The prose gives eta no value: 0.005
    per ms is about what the listing's 0.05 comes to in its own demo (0.05 / 10.8 ms).
    """

    sets: ClassVar[frozenset[str]] = frozenset({"threshold_scale"})

    def __init__(
        self,
        eta: float = 0.005,  # per ms
        lowest: float = 0.40,  # of threshold_scale
        highest: float = 2.00,
        initial: float = 1.0,
    ) -> None:
        if not 0 < lowest <= initial <= highest < inf:
            raise KairoxError(
                "anb_prose needs 0 < lowest <= initial <= highest, "
                f"got {lowest}, {initial}, {highest}"
            )
        if not 0 <= eta < inf:
            raise KairoxError(f"anb_prose's eta must be 0 or more, got {eta}")
        self.eta, self.lowest, self.highest = eta, lowest, highest
        self.gamma = 1.0 / initial
        self.knobs = Knobs(threshold_scale=initial)

    def start(self, swaps: Sequence[int]) -> None:
        pass

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        t_gpu, t_cpu, t_io = _busy_times(record, "anb_prose")
        delta_ms = 1e3 * (t_cpu - max(t_gpu, t_io))
        if delta_ms == 0 or (delta_ms < 0 and t_io <= t_gpu):
            return self.knobs
        # delta is negative where the link is slowest, so its sign does for both branches.
        gamma = self.gamma + self.eta * delta_ms
        self.gamma = min(max(gamma, 1 / self.highest), 1 / self.lowest)
        scale = min(max(1 / self.gamma, self.lowest), self.highest)
        self.knobs = Knobs(threshold_scale=scale)
        return self.knobs


class AnbPaper:
    """The OSDI '26 paper's adaptive neuron balancing: a decay per layer (section 7, Algorithm 1).

    Where the layer's copies were unfinished at its FFN (I/O-bound) the decay rises to
    decay*(1 + alpha): smoother momentum, fewer reloads. Else, where the GPU waited for the host's
    partial sums (CPU-bound), it falls to decay*(1 - alpha). Kept in [lowest, highest].
    """

    sets: ClassVar[frozenset[str]] = frozenset({"decay"})

    def __init__(
        self,
        alpha: float = 0.05,
        lowest: float = 0.05,
        highest: float = 0.95,
        initial: float = 0.5,
    ) -> None:
        if not 0 < lowest <= initial <= highest < 1:
            raise KairoxError(
                "anb_paper needs 0 < lowest <= initial <= highest < 1, "
                f"got {lowest}, {initial}, {highest}"
            )
        if not 0 <= alpha < 1:
            raise KairoxError(f"anb_paper's alpha must be in [0, 1), got {alpha}")
        self.alpha, self.lowest, self.highest, self.initial = alpha, lowest, highest, initial
        self.decay: tuple[float, ...] = ()  # per layer, once started
        self.knobs = Knobs()

    def start(self, swaps: Sequence[int]) -> None:
        self.decay = (self.initial,) * len(swaps)
        self.knobs = Knobs(decay=self.decay)

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        io, cpu_s = _waits_of(layers, len(self.decay), "anb_paper")
        self.decay = tuple(map(self._next, self.decay, io, cpu_s))
        self.knobs = Knobs(decay=self.decay)
        return self.knobs

    def _next(self, decay: float, io_bound: bool, cpu_s: float) -> float:
        if io_bound:
            return min(decay * (1 + self.alpha), self.highest)
        if cpu_s > 0:
            return max(decay * (1 - self.alpha), self.lowest)
        return decay


class SwapCap:
    """The released artifact's adaptation: the most swaps per layer-step, K, of every layer.

    K starts at what fills the layer's slots. A step in which the layer waited for its copies makes
    it int(K * (1 - rate)), any other int(K * (1 + rate)), in [1, capacity]. Truncated as released:
    below 1 / rate (20) K does not grow again, since int(10 * 1.05) = 10.
    """

    sets: ClassVar[frozenset[str]] = frozenset({"max_swaps"})

    def __init__(self, rate: float = 0.05) -> None:
        if not 0 <= rate < 1:
            raise KairoxError(f"swap_cap's rate must be in [0, 1), got {rate}")
        self.rate = rate
        self.highest: tuple[int, ...] = ()  # per layer, once started; 0 where it has no slots
        self.caps: tuple[int, ...] = ()
        self.knobs = Knobs()

    def start(self, swaps: Sequence[int]) -> None:
        self.highest = self.caps = tuple(swaps)
        self.knobs = Knobs(max_swaps=self.caps)

    def update(self, record: StepRecord, layers: LayerWaits | None = None) -> Knobs:
        io, _ = _waits_of(layers, len(self.caps), "swap_cap")
        self.caps = tuple(map(self._next, self.caps, self.highest, io))
        self.knobs = Knobs(max_swaps=self.caps)
        return self.knobs

    def _next(self, cap: int, highest: int, waited: bool) -> int:
        grown = int(cap * ((1 - self.rate) if waited else (1 + self.rate)))
        return min(max(grown, 1), highest)


def _busy_times(record: StepRecord, owner: str) -> tuple[float, float, float]:
    """(T_gpu, T_cpu, T_io) in s, all known."""
    times = record.gpu_busy_s, record.cpu_busy_s, record.swap_busy_s
    if not all(isfinite(t) and t >= 0 for t in times):
        raise KairoxError(
            f"{owner} needs times of 0 or more for gpu_busy_s, cpu_busy_s and swap_busy_s, "
            f"got {times[0]}, {times[1]} and {times[2]}; nan is unknown: fill them in, or use fixed"
        )
    return times


def _waits_of(
    layers: LayerWaits | None, n_layers: int, owner: str
) -> tuple[list[bool], list[float]]:
    """(io, cpu_s) of every layer; raises where they are not known or of another model."""
    if not n_layers:
        raise KairoxError(f"{owner} was not started: it has to be told each layer's swaps first")
    if layers is None:
        raise KairoxError(
            f"{owner} acts per layer and was not told what each layer waited for; give end_step "
            "the LayerWaits of the step, or use the fixed controller"
        )
    io, cpu_s = layers.io.tolist(), layers.cpu_s.tolist()
    if not len(io) == len(cpu_s) == n_layers:
        raise KairoxError(
            f"{owner} was started for {n_layers} layers and told the waits of {len(io)} and "
            f"{len(cpu_s)}; give one entry per layer"
        )
    if not all(isfinite(s) and s >= 0 for s in cpu_s):
        raise KairoxError(f"{owner} needs cpu_s of 0 or more for every layer, got {cpu_s}")
    return io, cpu_s


CONTROLLERS: dict[str, type[Controller]] = {
    "fixed": Fixed,
    "anb": Anb,
    "anb_prose": AnbProse,
    "anb_paper": AnbPaper,
    "swap_cap": SwapCap,
}

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
        t_gpu, t_cpu, t_io = record.gpu_busy_s, record.cpu_busy_s, record.swap_busy_s
        if not all(isfinite(t) and t >= 0 for t in (t_gpu, t_cpu, t_io)):
            raise KairoxError(
                "ANB needs times of 0 or more for gpu_busy_s, cpu_busy_s and swap_busy_s, "
                f"got {t_gpu}, {t_cpu} and {t_io}; nan is unknown: fill them in, or use fixed"
            )
        scale = self.knobs.threshold_scale
        delta = t_cpu - max(t_gpu, t_io)
        if delta > 0:
            scale -= self.eta_up * (delta / (t_cpu + self.EPSILON_S))
        elif t_io > t_gpu:
            scale += self.eta_down * ((t_io - t_gpu) / (t_io + self.EPSILON_S))
        self.knobs = Knobs(threshold_scale=min(max(scale, self.lowest), self.highest))
        return self.knobs


CONTROLLERS: dict[str, type[Fixed] | type[Anb]] = {"fixed": Fixed, "anb": Anb}

"""What has to be in device memory, and whether it fits: slots of neurons, or whole layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kairox_sim.errors import KairoxError
from kairox_sim.model import ModelShape, mean_slots

if TYPE_CHECKING:  # the live path takes costs without pydantic
    from kairox_sim.hardware import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Device memory, in bytes, of the whole model: all layers of the target, not of the trace."""

    profile: str
    model: str
    gating: str
    slots_per_layer: float  # in neurons of the model
    attention: int
    head: int
    predictor: int
    gate: int
    kv: int
    slots: int
    margin: int
    vram: int
    whole_layers: int | None = None  # on the device; None: slots, and the attention of every layer

    @property
    def total(self) -> int:
        """All parts and the margin."""
        return (
            self.attention + self.head + self.predictor + self.gate + self.kv + self.slots
            + self.margin
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether the total is within the device's memory."""
        return self.total <= self.vram

    def explain(self) -> str:
        """The arithmetic in GB, for an error message or a report."""
        names = ("attention", "head", "predictor", "gate", "kv", "slots", "margin")
        terms = " + ".join(f"{name} {getattr(self, name) / 1e9:.3f}" for name in names)
        sign, verdict = ("<=", "fits") if self.fits else (">", "does not fit")
        what = f"{self.slots_per_layer:g} slots per layer"
        if self.whole_layers is not None:
            what = f"{self.whole_layers} whole layers"
        return (
            f"{self.model} ({self.gating}, {what}) {verdict} on {self.profile}: {terms} = "
            f"{self.total / 1e9:.3f} GB {sign} {self.vram / 1e9:.3f} GB "
            "(embedding table in host memory unless it is the head)"
        )


def fits(
    profile: HardwareProfile,
    shape: ModelShape,
    gating: str,
    slots_per_layer: int | Sequence[int],
    context_len: int,
    *,
    trace_neurons: int | None = None,
    predictor: str = "rank",
    vram_bytes: float | None = None,
    dispatch: str = "concurrent",
) -> MemoryPlan:
    """The memory plan of all layers of `shape`. `slots_per_layer` counts neurons of the trace.

    `trace_neurons`: neurons per layer of the trace, when it stands in for `shape`; each then holds
    n_neurons / trace_neurons bundles. `vram_bytes` replaces the profile's. Under `dense` gating
    there is neither a gate beside the slots nor a predictor. dispatch `layers`: the slots are of
    whole layers of the model, the fewest that hold them; only theirs are the attention, the keys
    and values, and the head if they are all.
    """
    n_trace = trace_neurons or shape.n_neurons
    trace_slots = mean_slots(slots_per_layer)
    if not 0 <= trace_slots <= n_trace:
        raise KairoxError(f"{trace_slots:g} slots per layer; allowed are 0 to {n_trace}")
    slots = trace_slots * shape.n_neurons / n_trace
    if gating == "dense":
        predictor = "none"
    parts = shape.device_parts(gating, slots, context_len, predictor=predictor)
    n_whole = None
    if dispatch == "layers":
        n_whole = math.ceil(shape.n_layers * slots / shape.n_neurons - 1e-9)  # a mean's rounding
        parts = _of_whole_layers(shape, n_whole, context_len)
    return MemoryPlan(
        profile=profile.name,
        model=shape.name,
        gating=gating,
        slots_per_layer=slots,
        margin=round(profile.vram_margin_bytes.value),
        vram=round(profile.vram_bytes.value if vram_bytes is None else vram_bytes),
        whole_layers=n_whole,
        **parts,
    )


def max_slots(
    profile: HardwareProfile,
    shape: ModelShape,
    gating: str,
    context_len: int,
    *,
    trace_neurons: int | None = None,
    predictor: str = "rank",
    vram_bytes: float | None = None,
) -> int:
    """The most slots per layer, in neurons of the trace, that fit. Raises if not even 0 do."""
    empty = fits(
        profile, shape, gating, 0, context_len,
        trace_neurons=trace_neurons, predictor=predictor, vram_bytes=vram_bytes,
    )  # fmt: skip
    if not empty.fits:
        raise KairoxError(f"{empty.explain()}, with no neuron resident; use a larger device")
    n_trace = trace_neurons or shape.n_neurons
    per_slot = shape.n_layers * shape.bundle_bytes(gating) * shape.n_neurons / n_trace
    return min(n_trace, int((empty.vram - empty.total) / per_slot))


def max_layers(
    profile: HardwareProfile,
    shape: ModelShape,
    context_len: int,
    *,
    vram_bytes: float | None = None,
) -> int:
    """The most whole layers of the model that fit; 0 where not even one does.

    All of them only where the head fits beside them.
    """
    vram = round(profile.vram_bytes.value if vram_bytes is None else vram_bytes)
    room = vram - round(profile.vram_margin_bytes.value)
    if sum(_of_whole_layers(shape, shape.n_layers, context_len).values()) <= room:
        return shape.n_layers
    per_layer = sum(_of_whole_layers(shape, 1, context_len).values())
    if shape.n_layers == 1:
        return 0
    return max(0, min(shape.n_layers - 1, room // per_layer))


def _of_whole_layers(shape: ModelShape, n_layers: int, context_len: int) -> dict[str, int]:
    """`device_parts` of so many dense layers with all that is theirs."""
    return {
        "attention": n_layers * shape.attention_bytes,
        "head": shape.head_bytes if n_layers == shape.n_layers else 0,
        "predictor": 0,
        "gate": 0,
        "kv": n_layers * shape.kv_bytes_per_token * context_len,
        "slots": n_layers * shape.n_neurons * shape.neuron_bytes,
    }

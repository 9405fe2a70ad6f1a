"""What each operation of a step costs on one machine, in seconds and bytes: plain numbers.

A `CostModel` joins a hardware profile and a model shape once; both drivers then only call it.
It knows the *trace's* layers and neurons, which differ from the model's when a small model's
activations stand in for a large one: then one trace neuron carries `bundles_per_neuron` bundles,
and what is paid once per step is multiplied by `layers_ratio`. Fixed costs stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kairox_sim.errors import KairoxError
from kairox_sim.model import GATINGS, PREDICTORS, ModelShape, mean_slots

if TYPE_CHECKING:  # the live path takes costs without pydantic
    from kairox_sim.hardware import HardwareProfile, Op

PARTIAL_SUM_BYTES = 4  # partial sums are exchanged in float32
DEFAULT_SWAP_NEURONS = 16


@dataclass(frozen=True, slots=True)
class PassCost:
    """A pass over weights on one device: a fixed cost, then the larger of bytes and flops."""

    fixed_s: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, n_bytes: float, n_flops: float) -> float:
        """Duration of one pass. The fixed cost is charged even when there is nothing to read."""
        return self.fixed_s + max(n_bytes / self.bytes_per_s, n_flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class DecideCost:
    """One plan of one policy class: fixed + neurons / rate + swaps x per_swap."""

    fixed_s: float
    neurons_per_s: float
    per_swap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds and bytes of one layer-step. Every `n_neurons` counts neurons of the trace."""

    shape: ModelShape
    gating: str
    predictor: str
    bundles_per_neuron: float  # n_neurons of the model / of the trace
    layers_ratio: float  # layers of the trace / of the model
    swap_neurons: int  # trace neurons per swap; as many bytes as the asked number on the model

    attention: PassCost
    gate: PassCost
    low_rank: PassCost
    ffn_gpu: PassCost
    head: PassCost

    cpu_fixed_s: float
    cpu_cap_bytes_per_s: float  # of the sparse kernel alone, memory-bound
    cpu_flops_per_s: float
    dram_bytes_per_s: float  # shared by CPU work and host-to-device copies

    bundle_bytes: float  # of one trace neuron
    copies_per_bundle: int  # 0: a swap is gathered into one copy; 1: a copy per bundle
    h2d_copy_fixed_s: float
    h2d_bytes_per_s: float
    act_h2d_fixed_s: float
    d2h_copy_fixed_s: float
    d2h_bytes_per_s: float
    handover_s: float  # each way: x down to the host, partial sums back up

    decide: Mapping[str, DecideCost]
    decide_neurons: int  # neurons a plan goes over
    decide_blocks_gpu: bool

    def attention_s(self, n_tokens: int, context_len: int) -> float:
        """One layer. Reads the keys and values of all `context_len` tokens, these ones included."""
        shape = self.shape
        n_bytes = shape.attention_bytes + shape.kv_bytes_per_token * context_len
        return self.attention.seconds(n_bytes, shape.attention_flops(n_tokens, context_len))

    def gate_s(self, n_tokens: int) -> float:
        """Deciding what is evaluated: the gate pass (exact), its int8 screen (screened), else 0.

        `oracle` knows and `predicted` has paid in `predict_s`, so neither runs a kernel here.
        """
        if self.gating not in ("exact", "screened"):
            return 0.0
        return self._gate_pass_s(n_tokens)

    def predict_s(self, n_tokens: int) -> float:
        """One layer: the low-rank predictor, the gate pass that the look-ahead one is, or 0."""
        if self.predictor == "none":
            return 0.0
        if self.predictor == "lookahead":
            return self._gate_pass_s(n_tokens)
        shape = self.shape
        return self.low_rank.seconds(shape.predictor_bytes, shape.predictor_flops * n_tokens)

    def _gate_pass_s(self, n_tokens: int) -> float:
        shape = self.shape
        n_bytes = shape.screen_bytes if self.gating == "screened" else shape.gate_bytes
        return self.gate.seconds(n_bytes, shape.gate_flops * n_tokens)

    def head_s(self, n_tokens: int) -> float:
        """Once per step, for the tokens that get logits (1 in prefill): a layer's share of it each.

        Includes reading their embedding rows. All of it is multiplied by `layers_ratio`, so that a
        trace of fewer layers pays the same head per layer.
        """
        shape = self.shape
        n_bytes = shape.head_bytes + n_tokens * shape.row_bytes
        return self.layers_ratio * self.head.seconds(n_bytes, shape.head_flops * n_tokens)

    def ffn_gpu_s(self, n_neurons: int, n_tokens: int) -> float:
        """Resident neurons on the device. Launched, and charged its fixed cost, even for none."""
        return self.ffn_gpu.seconds(
            n_neurons * self.bundle_bytes, self._ffn_flops(n_neurons, n_tokens)
        )

    def cpu_bytes(self, n_neurons: int) -> float:
        """What the host reads from DRAM for residual neurons."""
        return n_neurons * self.bundle_bytes

    def cpu_rate_cap_bytes_per_s(self, n_tokens: int) -> float:
        """The fastest the host reads while also doing the arithmetic for `n_tokens`."""
        flops = self._ffn_flops(1, n_tokens)
        return min(self.cpu_cap_bytes_per_s, self.bundle_bytes * self.cpu_flops_per_s / flops)

    def ffn_cpu_s(self, n_neurons: int, n_tokens: int) -> float:
        """Residual neurons on an otherwise idle host; 0 for none. Copies under way slow it."""
        if n_neurons == 0:
            return 0.0
        rate = min(self.cpu_rate_cap_bytes_per_s(n_tokens), self.dram_bytes_per_s)
        return self.cpu_fixed_s + self.cpu_bytes(n_neurons) / rate

    def swap_bytes(self, n_neurons: int) -> float:
        """Bytes over the link for a swap of so many trace neurons."""
        return n_neurons * self.bundle_bytes

    def swap_copies(self, n_neurons: int) -> float:
        """Copies a swap is: one gather, or one per bundle."""
        if n_neurons == 0:
            return 0.0
        return n_neurons * self.bundles_per_neuron if self.copies_per_bundle else 1.0

    def swap_fixed_s(self, n_neurons: int) -> float:
        """Time of a swap that no bandwidth takes away."""
        return self.swap_copies(n_neurons) * self.h2d_copy_fixed_s

    def swap_s(self, n_neurons: int) -> float:
        """A swap alone on the link and on DRAM."""
        rate = min(self.h2d_bytes_per_s, self.dram_bytes_per_s)
        return self.swap_fixed_s(n_neurons) + self.swap_bytes(n_neurons) / rate

    def act_d2h_bytes(self, n_tokens: int) -> float:
        """The FFN's input, and what says which neurons fired.

        Under `exact` and `screened` gating that is the gate's value for every neuron, otherwise a
        bit for each.
        """
        shape = self.shape
        if self.gating in ("exact", "screened"):
            fired = shape.n_neurons * shape.bytes_per_weight
        else:
            fired = -(-shape.n_neurons // 8)
        return float(n_tokens * (shape.row_bytes + fired))

    def act_d2h_s(self, n_tokens: int) -> float:
        """One copy from device to host, before the host can start."""
        return self.d2h_copy_fixed_s + self.act_d2h_bytes(n_tokens) / self.d2h_bytes_per_s

    def act_h2d_bytes(self, n_tokens: int) -> float:
        """The host's partial sums: n_tokens x d_model in float32."""
        return float(n_tokens * self.shape.d_model * PARTIAL_SUM_BYTES)

    def act_h2d_s(self, n_tokens: int) -> float:
        """The partial sums alone on the link."""
        return self.act_h2d_fixed_s + self.act_h2d_bytes(n_tokens) / self.h2d_bytes_per_s

    def decide_s(self, policy_class: str, n_swaps: int) -> float:
        """One plan by a policy of this class; a class not in the table costs the default."""
        cost = self.decide.get(policy_class, self.decide["default"])
        return cost.fixed_s + self.decide_neurons / cost.neurons_per_s + n_swaps * cost.per_swap_s

    def _ffn_flops(self, n_neurons: int, n_tokens: int) -> float:
        per_neuron = self.shape.bundle_flops(self.gating) * self.bundles_per_neuron
        return n_neurons * per_neuron * n_tokens


def costs_for(
    profile: HardwareProfile,
    shape: ModelShape,
    gating: str,
    *,
    trace_layers: int,
    trace_neurons: int,
    predictor: str = "rank",
    swap_neurons: int = DEFAULT_SWAP_NEURONS,
) -> CostModel:
    """The costs of replaying a trace of `trace_layers` x `trace_neurons` as `shape` on `profile`.

    `predictor`: `rank` (the published low-rank one), `lookahead` (the next layer's own gate) or
    `none`. Under `predicted` gating the predictor decides what is computed, so every policy pays
    for it, one that never plans included: `none` is refused. `swap_neurons` counts bundles of the
    model, so that a swap is as many bytes in a stand-in as it would be on the model itself.
    """
    if gating not in GATINGS:
        raise KairoxError(f"unknown gating {gating!r}; allowed: {', '.join(GATINGS)}")
    if predictor not in PREDICTORS:
        raise KairoxError(f"unknown predictor {predictor!r}; allowed: {', '.join(PREDICTORS)}")
    if gating == "predicted" and predictor == "none":
        raise KairoxError(
            "gating 'predicted' computes what a predictor says, so predictor 'none' cannot be; "
            "allowed: rank, lookahead"
        )
    if predictor == "rank":
        shape.predictor_bytes  # noqa: B018  (raises where no predictor is published)
    if profile.calibrated_as not in (None, shape.name):
        raise KairoxError(
            f"profile {profile.name!r} was calibrated with the costs of {profile.calibrated_as!r} "
            f"and is valid only with them, got {shape.name!r}; calibrate again, or use "
            f"--as {profile.calibrated_as}"
        )
    for label, number in (
        ("trace_layers", trace_layers),
        ("trace_neurons", trace_neurons),
        ("swap_neurons", swap_neurons),
    ):
        if number < 1:
            raise KairoxError(f"{label} is {number}, must be at least 1")
    bundles_per_neuron = shape.n_neurons / trace_neurons
    gpu_flops_per_s = profile.gpu_flops_per_s.value

    def on_gpu(op: Op) -> PassCost:
        return PassCost(op.fixed_s.value, op.bytes_per_s.value, gpu_flops_per_s)

    return CostModel(
        shape=shape,
        gating=gating,
        predictor=predictor,
        bundles_per_neuron=bundles_per_neuron,
        layers_ratio=trace_layers / shape.n_layers,
        swap_neurons=max(1, round(swap_neurons / bundles_per_neuron)),
        attention=on_gpu(profile.attention),
        gate=on_gpu(profile.gate),
        low_rank=on_gpu(profile.predictor),
        ffn_gpu=on_gpu(profile.ffn_gpu),
        head=on_gpu(profile.head),
        cpu_fixed_s=profile.ffn_cpu.fixed_s.value,
        cpu_cap_bytes_per_s=profile.ffn_cpu.bytes_per_s.value,
        cpu_flops_per_s=profile.cpu_flops_per_s.value,
        dram_bytes_per_s=profile.dram_bytes_per_s.value,
        bundle_bytes=shape.bundle_bytes(gating) * bundles_per_neuron,
        copies_per_bundle=int(profile.copies_per_bundle.value),
        h2d_copy_fixed_s=profile.h2d.copy_fixed_s.value,
        h2d_bytes_per_s=profile.h2d.bytes_per_s.value,
        act_h2d_fixed_s=profile.h2d.copy_fixed_s.value,
        d2h_copy_fixed_s=profile.d2h.copy_fixed_s.value,
        d2h_bytes_per_s=profile.d2h.bytes_per_s.value,
        handover_s=profile.handover_fixed_s.value,
        decide={
            name: DecideCost(entry.fixed_s.value, entry.neurons_per_s.value, entry.per_swap_s.value)
            for name, entry in profile.decide.items()
        },
        # A calibration with a stand-in timed plans over the trace's neurons; elsewhere a plan goes
        # over the model's own.
        decide_neurons=trace_neurons if profile.calibrated_as else shape.n_neurons,
        decide_blocks_gpu=profile.decide_blocks_gpu,
    )


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
        return (
            f"{self.model} ({self.gating}, {self.slots_per_layer:g} slots per layer) {verdict} on "
            f"{self.profile}: {terms} = {self.total / 1e9:.3f} GB {sign} {self.vram / 1e9:.3f} GB "
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
) -> MemoryPlan:
    """The memory plan of all layers of `shape`. `slots_per_layer` counts neurons of the trace.

    `trace_neurons`: neurons per layer of the trace, when it stands in for `shape`; each then holds
    n_neurons / trace_neurons bundles. `vram_bytes` replaces the profile's.
    """
    n_trace = trace_neurons or shape.n_neurons
    trace_slots = mean_slots(slots_per_layer)
    if not 0 <= trace_slots <= n_trace:
        raise KairoxError(f"{trace_slots:g} slots per layer; allowed are 0 to {n_trace}")
    slots = trace_slots * shape.n_neurons / n_trace
    parts = shape.device_parts(gating, slots, context_len, predictor=predictor)
    return MemoryPlan(
        profile=profile.name,
        model=shape.name,
        gating=gating,
        slots_per_layer=slots,
        margin=round(profile.vram_margin_bytes.value),
        vram=round(profile.vram_bytes.value if vram_bytes is None else vram_bytes),
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

"""The costs of replaying a trace as one model on one machine: a profile and a shape, joined once.

What is charged for what is in `cost_model`; what has to fit, in `memory`. Both are exported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cost_model import (
    COPIES,
    PARTIAL_SUM_BYTES,
    Copies,
    CostModel,
    DecideCost,
    PassCost,
)
from kairox_sim.errors import KairoxError
from kairox_sim.memory import MemoryPlan, fits, max_layers, max_slots
from kairox_sim.model import GATINGS, PREDICTORS, ModelShape, Numerics

if TYPE_CHECKING:  # the live path takes costs without pydantic
    from kairox_sim.hardware import HardwareProfile, Op

__all__ = [
    "COPIES", "DEFAULT_SWAP_NEURONS", "PARTIAL_SUM_BYTES", "Copies", "CostModel", "DecideCost",
    "MemoryPlan", "PassCost", "costs_for", "fits", "max_layers", "max_slots",
]  # fmt: skip

DEFAULT_SWAP_NEURONS = 16


def costs_for(
    profile: HardwareProfile,
    shape: ModelShape,
    gating: str,
    *,
    trace_layers: int,
    trace_neurons: int,
    predictor: str = "rank",
    swap_neurons: int = DEFAULT_SWAP_NEURONS,
    copies: str | None = None,
    copies_per_sync: int | None = None,
    handovers: int = 1,
    position: NDArray[np.int32] | None = None,
    numerics: Numerics = "fast",
) -> CostModel:
    """The costs of replaying a trace of `trace_layers` x `trace_neurons` as `shape` on `profile`.

    `predictor`: `rank` (the published low-rank one), `lookahead` (the next layer's own gate) or
    `none`. Under `predicted` gating the predictor decides what is computed, so every policy pays
    for it, one that never plans included: `none` is refused. `swap_neurons` counts bundles of the
    model, so that a swap is as many bytes in a stand-in as it would be on the model itself. Under
    `dense` gating nothing is predicted and `predictor` plays no part.

    copies: one of COPIES; the profile's copies_per_bundle says it by default. Rows are those that
    move: under `exact` gating the deciding row is no copy. copies_per_sync: the host waits for the
    device after so many copies, and each bears its share of that. handovers: merges per layer-step
    with residual work; the released Kairox code has two, before the activation and after the down
    projection (github.com/brothergiven/kairox.cpp). position: [trace_layers, trace_neurons] places
    in host memory; each read of neighbours is a copy then. numerics: deterministic passes take
    longer by the ratios of the profile; a calibrated profile was made with one kind and is it.
    """
    if gating not in GATINGS:
        raise KairoxError(f"unknown gating {gating!r}; allowed: {', '.join(GATINGS)}")
    if gating == "dense":
        predictor = "none"
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
        ("handovers", handovers),
    ):
        if number < 1:
            raise KairoxError(f"{label} is {number}, must be at least 1")
    chosen = _copies(profile, copies)
    if position is not None:
        _require_positions(position, trace_layers, trace_neurons, chosen)
    bundles_per_neuron = shape.n_neurons / trace_neurons
    gpu_flops_per_s = profile.gpu_flops_per_s.value
    slower_gpu, slower_cpu = _slower_in(numerics, profile)

    def on_gpu(op: Op, slower: float = 1.0) -> PassCost:
        rate = op.bytes_per_s.value / slower
        return PassCost(op.fixed_s.value, rate, gpu_flops_per_s / slower)

    return CostModel(
        shape=shape,
        gating=gating,
        predictor=predictor,
        bundles_per_neuron=bundles_per_neuron,
        layers_ratio=trace_layers / shape.n_layers,
        swap_neurons=max(1, round(swap_neurons / bundles_per_neuron)),
        attention=on_gpu(profile.attention),
        gate=on_gpu(profile.gate, slower_gpu),
        # A datasheet has the look-ahead as the pass of a gate that it is; a calibration timed the
        # predictor that ran, whose kernels are not the gate's.
        look_ahead=on_gpu(profile.predictor if profile.kind == "calibrated" else profile.gate),
        low_rank=on_gpu(profile.predictor),
        ffn_gpu=on_gpu(profile.ffn_gpu, slower_gpu),
        head=on_gpu(profile.head),
        cpu_fixed_s=profile.ffn_cpu.fixed_s.value,
        cpu_cap_bytes_per_s=profile.ffn_cpu.bytes_per_s.value / slower_cpu,
        cpu_flops_per_s=profile.cpu_flops_per_s.value / slower_cpu,
        dram_bytes_per_s=profile.dram_bytes_per_s.value,
        bundle_bytes=shape.bundle_bytes(gating) * bundles_per_neuron,
        copies=chosen,
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
        numerics=numerics,
        copy_sync_s=_copy_sync_s(profile, copies_per_sync),
        handovers=handovers,
        evaluated_share=_evaluated_share(shape, gating),
        position=position,
    )


def _slower_in(numerics: Numerics, profile: HardwareProfile) -> tuple[float, float]:
    """(GPU, CPU): how many times as long as the profile says the FFN's passes take."""
    if profile.kind == "calibrated":
        made_with = profile.calibrated_numerics or "fast"
        if made_with != numerics:
            raise KairoxError(
                f"profile {profile.name!r} was calibrated with numerics {made_with!r} and is valid "
                f"only with them, got {numerics!r}; calibrate again with --numerics {numerics}"
            )
        return 1.0, 1.0
    if numerics == "fast":
        return 1.0, 1.0
    ratios = profile.deterministic
    if ratios is None:
        raise KairoxError(
            f"profile {profile.name!r} does not say what numerics {numerics!r} cost: give it a "
            "table [deterministic] with cpu_ratio and gpu_ratio, or calibrate with --numerics "
            f"{numerics}"
        )
    return ratios.gpu_ratio.value, ratios.cpu_ratio.value


def _copies(profile: HardwareProfile, asked: str | None) -> Copies:
    if asked is None:
        return "bundle" if profile.copies_per_bundle.value else "gather"
    if asked not in COPIES:
        raise KairoxError(f"unknown copies {asked!r}; allowed: {', '.join(COPIES)}")
    return asked  # type: ignore[return-value]


def _copy_sync_s(profile: HardwareProfile, copies_per_sync: int | None) -> float:
    if copies_per_sync is None:
        return 0.0
    if copies_per_sync < 1:
        raise KairoxError(f"copies_per_sync is {copies_per_sync}, must be at least 1")
    sync = profile.h2d.sync_fixed_s
    if sync is None:
        raise KairoxError(
            f"copies_per_sync is {copies_per_sync} and profile {profile.name!r} does not say what "
            "a synchronisation costs; give it h2d.sync_fixed_s, or leave copies_per_sync out"
        )
    return sync.value / copies_per_sync


def _evaluated_share(shape: ModelShape, gating: str) -> float:
    if gating != "dense":
        return 1.0
    return shape.dense_neurons / shape.n_neurons


def _require_positions(
    position: NDArray[np.int32], n_layers: int, n_neurons: int, copies: str
) -> None:
    if position.shape != (n_layers, n_neurons):
        raise KairoxError(
            f"positions are of {' x '.join(map(str, position.shape))} and the trace has "
            f"{n_layers} layers of {n_neurons} neurons; link the neurons of the same model"
        )
    if copies not in ("bundle", "row"):
        raise KairoxError(
            f"a layout in host memory shortens reads of single neurons, and copies {copies!r} does "
            "not read them one by one; use copies bundle or row, or no layout"
        )

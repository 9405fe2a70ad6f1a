"""Gating: which neurons a layer-step evaluates, and how much is then known of which are active.

  oracle     the gate of all neurons, on the host and in no time: a test, and an upper bound
  exact      the gate (OPT: fc1) of all neurons, kept on the device; its values go into the FFN
  screened   an int8 copy of the gate, half of float16's memory, with a bound on its error: the
             survivors hold every active neuron, and each decides again with its own row
  predicted  what the look-ahead predictor says, alone: what it misses is left out, so it is lossy
             (PowerInfer, arXiv:2312.12456, decides so); tokens of one prefill chunk share the
             union of their predictions, so that the loss depends on how a prefill is divided

Where no gate value is at hand (`act` is None) the kernels decide, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kairox_exec.device import Device
from kairox_exec.kernels import Kernels
from kairox_exec.kernels.screening import Screen, candidates, make_screen
from kairox_exec.layer_step import Decision, Mask
from kairox_exec.oplog import Size
from kairox_exec.weights import NeuronBundles
from kairox_sim.errors import KairoxError

LOSSLESS = ("oracle", "exact", "screened")


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The part of a layer's FFN that stays on the device whatever is resident."""

    gate_w: torch.Tensor | None  # exact: all neurons' gate (OPT: fc1)
    screen: Screen | None  # screened
    gate_b: torch.Tensor | None
    up_b: torch.Tensor | None
    down_b: torch.Tensor | None


Decide = Callable[[int, torch.Tensor, Size, Mask | None], Decision]
"""(layer, x [n_tokens, d_model] float32, size of the op, what was predicted for the layer)"""


def keep_on_device(device: Device, bundle: NeuronBundles) -> OnDevice:
    """Copy to the device what does not depend on residency."""
    biases = (bundle.gate_b, bundle.up_b, bundle.down_b)
    return OnDevice(
        device.put(bundle.gate_w) if bundle.gating == "exact" else None,
        _screen_on(device, bundle) if bundle.gating == "screened" else None,
        *(None if t is None else device.put(t) for t in biases),
    )


def _screen_on(device: Device, bundle: NeuronBundles) -> Screen:
    screen = bundle.screen
    if screen is None:
        screen = make_screen(bundle.gate_w, bundle.spec.fmt)
    return Screen(device.put(screen.codes), device.put(screen.scale), device.put(screen.error))


def decide_with(
    gating: str,
    device: Device,
    bundles: Sequence[NeuronBundles],
    on_device: Sequence[OnDevice],
    *,
    host_kernels: Kernels,
    device_kernels: Kernels,
) -> Decide:
    """The function that decides under `gating`; its time on the device is logged as "gate"."""
    # Of drelu the gate is half of the truth: the up row decides the rest, in the kernels.
    decided = bundles[0].spec.activation != "drelu"

    def oracle(layer: int, x: torch.Tensor, size: Size, predicted: Mask | None) -> Decision:
        bundle = bundles[layer]  # known without a cost, so no op
        act = host_kernels.gate_all(x.cpu(), bundle.gate_w, bundle.gate_b, bundle.spec)
        return Decision((act != 0).numpy(), act.to(x.device), decided)

    def exact(layer: int, x: torch.Tensor, size: Size, predicted: Mask | None) -> Decision:
        here = on_device[layer]
        assert here.gate_w is not None
        t0_ns = device.begin()
        act = device_kernels.gate_all(x, here.gate_w, here.gate_b, bundles[layer].spec)
        mask: Mask = (act != 0).numpy(force=True)
        device.end(t0_ns, "gate", layer, size)
        return Decision(mask, act, decided)

    def screened(layer: int, x: torch.Tensor, size: Size, predicted: Mask | None) -> Decision:
        here = on_device[layer]
        assert here.screen is not None
        t0_ns = device.begin()
        may_fire = candidates(
            x, here.screen, here.gate_b, bundles[layer].spec, dots=device_kernels.code_dots
        )
        mask: Mask = may_fire.numpy(force=True)
        device.end(t0_ns, "gate", layer, size)
        return Decision(mask, None, False)

    def by_prediction(layer: int, x: torch.Tensor, size: Size, predicted: Mask | None) -> Decision:
        assert predicted is not None, f"layer {layer}: nothing was predicted"
        return Decision(predicted, None, False)

    match gating:
        case "oracle":
            return oracle
        case "exact":
            return exact
        case "screened":
            return screened
        case "predicted":
            return by_prediction
        case _:
            raise KairoxError(
                f"gating {gating!r} cannot be run; allowed: {', '.join(LOSSLESS)}, predicted"
            )

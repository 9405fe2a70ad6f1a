"""Neuron bundles in host memory: per layer, the rows that move together and the part that stays.

Rows are stored in one of `formats`.

Row-column bundling is "LLM in a flash" (arXiv:2312.11514, section 3.2): a neuron's up row and down
column lie next to each other, so that one neuron is one contiguous copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kairox_exec.families import Family, decoder_layers
from kairox_exec.ffn_spec import Activation, FfnSpec, Numerics
from kairox_exec.formats import Format, encode, storage_dtype
from kairox_exec.kernels.screening import Screen, make_screen
from kairox_sim.errors import KairoxError

GATINGS = ("oracle", "exact", "screened", "predicted")


@dataclass(frozen=True, slots=True)
class NeuronBundles:
    """One layer. Contiguous, host memory; biases float32, None where the model has none."""

    layer: int
    gating: str
    spec: FfnSpec
    row_names: tuple[str, ...]  # of `rows`, in order
    rows: torch.Tensor  # [n_neurons, n_rows, spec.width] of spec.fmt; what moves
    # [n_neurons, spec.width]: the gate (OPT: fc1) of all neurons. exact: a tensor of its own, to
    # be kept on the device. Other gatings: a view of rows[:, 0], host only.
    gate_w: torch.Tensor
    gate_b: torch.Tensor | None  # [n_neurons]; small, kept on both sides
    up_b: torch.Tensor | None  # [n_neurons]; kept on both sides
    down_b: torch.Tensor | None  # [d_model]; added once per token, on the device
    screen: Screen | None = None  # gating screened: of all neurons' gate

    @property
    def n_neurons(self) -> int:
        return self.rows.shape[0]

    @property
    def d_model(self) -> int:
        return self.spec.d_model

    @property
    def bundle_bytes(self) -> int:
        """Bytes that move to make one neuron resident."""
        return self.rows.shape[1] * self.rows.shape[2] * self.rows.element_size()

    @property
    def stationary_bytes(self) -> int:
        """Device bytes of this layer that do not depend on the number of slots."""
        kept = [b for b in (self.gate_b, self.up_b, self.down_b) if b is not None]
        if self.gating == "exact":
            kept.append(self.gate_w)
        if self.screen is not None:
            kept += [self.screen.codes, self.screen.scale, self.screen.error]
        return sum(t.numel() * t.element_size() for t in kept)


def row_names(family: Family, gating: str) -> tuple[str, ...]:
    """What a bundle holds under a gating mode, in order. The down row is always the last."""
    if gating not in GATINGS:
        raise KairoxError(f"gating {gating!r} is not known here (known: {', '.join(GATINGS)})")
    every = ("gate", "up", "down") if family.gated else ("fc1", "fc2")
    return every[1:] if gating == "exact" else every


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """One layer's FFN as a checkpoint holds it, of any float dtype; `gate` is fc1 without one."""

    gate: torch.Tensor  # [n_neurons, d_model]
    up: torch.Tensor | None  # [n_neurons, d_model]
    down: torch.Tensor  # [d_model, n_neurons]
    gate_b: torch.Tensor | None = None  # [n_neurons]
    up_b: torch.Tensor | None = None  # [n_neurons]
    down_b: torch.Tensor | None = None  # [d_model]


def bundle_weights(
    weights: FfnWeights,
    family: Family,
    *,
    layer: int,
    gating: str,
    threshold: float,
    activation: Activation = "relu",
    fmt: Format = "float32",
    numerics: Numerics = "fast",
) -> NeuronBundles:
    """Encode one layer's FFN weights into bundles, which share no memory with them."""
    names = row_names(family, gating)
    gate, up, down = weights.gate, weights.up, weights.down
    n_neurons, d_model = gate.shape
    if down.shape != (d_model, n_neurons):
        raise KairoxError(
            f"layer {layer}: {family.down} is {tuple(down.shape)}, expected "
            f"{(d_model, n_neurons)} from {family.gate}; is this a {family.name} model?"
        )
    # Per neuron: gate and up are rows of their matrices, down is a column.
    parts = [gate] + ([up] if up is not None else []) + [down.T.contiguous()]
    moving = parts[len(parts) - len(names) :]
    spec = FfnSpec(d_model, family.gated, activation, threshold, fmt, numerics)
    rows = torch.empty((n_neurons, len(names), spec.width), dtype=storage_dtype(fmt))
    for i, part in enumerate(moving):
        rows[:, i] = encode(part, fmt)
    own = encode(gate, fmt) if gating == "exact" else rows[:, 0]
    if own.data_ptr() == gate.data_ptr():  # a float tensor that has the format already
        own = own.clone()
    return NeuronBundles(
        layer=layer,
        gating=gating,
        spec=spec,
        row_names=names,
        rows=rows,
        gate_w=own,
        gate_b=None if weights.gate_b is None else _copy(weights.gate_b),
        up_b=None if weights.up_b is None else _copy(weights.up_b),
        down_b=None if weights.down_b is None else _copy(weights.down_b),
        screen=make_screen(own, fmt) if gating == "screened" else None,
    )


def bundle_layer(module: nn.Module, family: Family, *, layer: int, **how: Any) -> NeuronBundles:
    """Copy one decoder layer's FFN weights into bundles. The module is not changed.

    how: of `bundle_weights`.
    """
    gate = _linear(module, family.gate)
    up = None if family.up is None else _linear(module, family.up)
    down = _linear(module, family.down)
    weights = FfnWeights(  # bundles are in host memory, wherever the model is
        gate.weight.detach().cpu(),
        None if up is None else up.weight.detach().cpu(),
        down.weight.detach().cpu(),
        gate.bias,
        None if up is None else up.bias,
        down.bias,
    )
    return bundle_weights(weights, family, layer=layer, **how)


def bundle_model(
    model: nn.Module,
    family: Family,
    *,
    gating: str,
    threshold: float | Sequence[float],
    activation: Activation = "relu",
    fmt: Format = "float32",
    numerics: Numerics = "fast",
) -> list[NeuronBundles]:
    """Bundles of every layer, first to last. threshold: of all layers, or one a layer."""
    layers = decoder_layers(model, family)
    each = [threshold] * len(layers) if isinstance(threshold, int | float) else threshold
    return [
        bundle_layer(
            module,
            family,
            layer=i,
            gating=gating,
            threshold=own,
            activation=activation,
            fmt=fmt,
            numerics=numerics,
        )
        for i, (module, own) in enumerate(zip(layers, each, strict=True))
    ]


def _linear(module: nn.Module, path: str) -> nn.Linear:
    found = module.get_submodule(path)
    if not isinstance(found, nn.Linear):
        raise KairoxError(
            f"{path} is a {type(found).__name__}, not a Linear: bundles are made from the plain "
            "model, before its FFNs are replaced or quantised"
        )
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(dtype=torch.float32, device="cpu", copy=True).contiguous()

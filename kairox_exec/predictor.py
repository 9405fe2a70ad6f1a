"""Training-free look-ahead: layer l+1's own norm and gate, on the hidden state at hand in layer l.

The residual stream changes slowly from layer to layer (Deja Vu, arXiv:2310.17157, section 4.3), so
what fires in l+1 can be guessed before l is finished. At trigger `attn_out` the hidden state is the
residual after the attention of l, which is the input of l's FFN norm; at `attn_in` it is the state
entering l. A guess decides what is fetched; under exact gating it never decides what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import nn

from kairox_exec.device import Device
from kairox_exec.families import Family, decoder_layers, fires
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.gating import OnDevice
from kairox_exec.kernels import Kernels, torch_ref
from kairox_exec.kernels.screening import Screen
from kairox_exec.weights import NeuronBundles


class Learnt(Protocol):
    """A predictor that was trained: `mlp_predictor`."""

    @property
    def trigger(self) -> str:
        """When it must be asked: attn_out or attn_in."""
        ...

    def predict(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., d_model], of the layer before -> bool [n_tokens, n_neurons]"""
        ...

    def to(self, device: torch.device) -> Learnt: ...


@dataclass(frozen=True, slots=True)
class LayerGate:
    """What decides in one layer: its FFN norm and gate (OPT: fc1), on the device that predicts."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    gate_w: torch.Tensor | None  # [n_neurons, spec.width]; None: the screen stands for it
    gate_b: torch.Tensor | None  # [n_neurons]
    spec: FfnSpec
    screen: Screen | None = None


def gates_of(model: nn.Module, family: Family, bundles: Sequence[NeuronBundles]) -> list[LayerGate]:
    """Every layer's deciding parts, with the gate as `bundles` holds it (no copy)."""
    return [
        LayerGate(layer.get_submodule(family.ffn_norm), b.gate_w, b.gate_b, b.spec)
        for layer, b in zip(decoder_layers(model, family), bundles, strict=True)
    ]


def ffn_norms(model: nn.Module, family: Family) -> list[nn.Module]:
    """The norm before each layer's FFN."""
    return [layer.get_submodule(family.ffn_norm) for layer in decoder_layers(model, family)]


def gates_on(
    device: Device,
    norms: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    bundles: Sequence[NeuronBundles],
    on_device: Sequence[OnDevice],
) -> list[LayerGate]:
    """Deciding parts in device memory: what gating keeps there, else a copy of the gate."""
    gates = []
    for norm, bundle, here in zip(norms, bundles, on_device, strict=True):
        gate_w = here.gate_w
        if gate_w is None and here.screen is None:
            gate_w = device.put(bundle.gate_w)
        gates.append(LayerGate(norm, gate_w, here.gate_b, bundle.spec, here.screen))
    return gates


@torch.inference_mode()
def predict(gate: LayerGate, hidden: torch.Tensor, kernels: Kernels = torch_ref) -> torch.Tensor:
    """Which neurons of the layer that `gate` belongs to will fire.

    hidden [..., d_model], a state of the layer before -> bool [n_tokens, n_neurons].
    """
    x = gate.norm(hidden.reshape(-1, hidden.shape[-1])).float()
    if gate.gate_w is None:
        assert gate.screen is not None
        value = kernels.code_dots(x, gate.screen.codes) * gate.screen.scale
        value = value if gate.gate_b is None else value + gate.gate_b
    else:  # a guess, so in float32 sums: no bit of the output depends on it
        spec = gate.spec if gate.spec.numerics == "fast" else replace(gate.spec, numerics="fast")
        return kernels.gate_all(x, gate.gate_w, gate.gate_b, spec) != 0
    # Of drelu the gate's half; the up row is not asked.
    activation = "relu" if gate.spec.activation == "drelu" else gate.spec.activation
    return fires(value, gate.spec.threshold, activation)


@dataclass(frozen=True, slots=True)
class LayerRecall:
    """Counts over tokens. A ratio without a denominator is nan."""

    layer: int
    predicted: int
    active: int
    predicted_active: int

    @property
    def recall(self) -> float:
        """Share of the active that were predicted."""
        return self.predicted_active / self.active if self.active else float("nan")

    @property
    def precision(self) -> float:
        """Share of the predicted that were active."""
        return self.predicted_active / self.predicted if self.predicted else float("nan")


class RecallTally:
    """Running counts per layer. A layer that was never predicted (layer 0) stays at zero."""

    def __init__(self, n_layers: int) -> None:
        # [n_layers, 3]: predicted, active, both
        self._counts = np.zeros((n_layers, 3), dtype=np.int64)

    def add(self, layer: int, predicted: torch.Tensor, active: torch.Tensor) -> None:
        """predicted, active: bool [n_tokens, n_neurons], of the same tokens."""
        if predicted.shape != active.shape:
            raise ValueError(
                f"predicted is {tuple(predicted.shape)}, active is {tuple(active.shape)}; "
                "they must be of the same tokens and neurons"
            )
        counts = self._counts[layer]
        counts[0] += int(predicted.sum())
        counts[1] += int(active.sum())
        counts[2] += int((predicted & active).sum())

    def table(self) -> list[LayerRecall]:
        """One row per layer."""
        return [LayerRecall(i, *(int(c) for c in row)) for i, row in enumerate(self._counts)]


def recall_table(rows: Sequence[LayerRecall]) -> str:
    """The table as text; layers that were never predicted show a dash."""
    lines = ["layer  recall  precision  predicted  active"]
    for row in rows:
        if row.predicted or row.active:
            recall, precision = f"{row.recall:.3f}", f"{row.precision:.3f}"
        else:
            recall = precision = "-"
        lines.append(
            f"{row.layer:5d}  {recall:>6}  {precision:>9}  {row.predicted:9d}  {row.active:6d}"
        )
    return "\n".join(lines)

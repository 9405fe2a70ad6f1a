"""What transformers has no module for, put into its models: FATReLU, thresholded SiLU, dReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kairox_exec.families import Family, Rule, decoder_layers
from kairox_exec.ffn_spec import Activation

# The activation a dense model is built with, before `use_rule`.
BUILT_WITH: dict[Activation, str] = {
    "relu": "relu", "relu2": "relu2", "drelu": "relu", "silu": "silu",
}  # fmt: skip


class FatRelu(nn.Module):
    """x where x > threshold, else 0 (ProSparse, section 3.3). Threshold 0 is ReLU."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > self.threshold, x, torch.zeros_like(x))


class ThresholdedSilu(nn.Module):
    """silu(x) where |silu(x)| > threshold, else 0 (CATS, arXiv:2404.08763, section 3.2)."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = nn.functional.silu(x)
        return torch.where(value.abs() > self.threshold, value, torch.zeros_like(value))


def use_rule(model: nn.Module, family: Family, rule: Rule) -> None:
    """Make a dense model, built with BUILT_WITH, compute what the rule says."""
    for layer, threshold in zip(decoder_layers(model, family), rule.thresholds, strict=True):
        if rule.activation == "silu":
            layer.set_submodule(family.act, ThresholdedSilu(threshold))
        elif threshold > 0:
            layer.set_submodule(family.act, FatRelu(threshold))
        if rule.activation == "drelu":
            assert family.up is not None
            # A hook, so that the projection stays a Linear: bundles are made from it.
            layer.get_submodule(family.up).register_forward_hook(_relu)


def _relu(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(output)

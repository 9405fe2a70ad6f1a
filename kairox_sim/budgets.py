"""Budgets: how many slots each layer gets, from what `Settings.slots` says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile
from kairox_sim.memory import max_layers, max_slots
from kairox_sim.model import ModelShape, find_shape, with_ffn_weights
from kairox_sim.placement import whole_layers
from kairox_sim.policies import POLICIES
from kairox_sim.predictor_file import rank_of
from kairox_sim.settings_file import Settings
from kairox_sim.settings_rules import predictor_of
from kairox_sim.shape_config import shape_from_config
from kairox_sim.trace import Trace
from kairox_sim.trace_stats import counts
from kairox_sim.units import is_size, parse_bytes


def slots_per_layer(
    settings: Settings,
    n_layers: int,
    n_neurons: int,
    *,
    prior: Trace | None = None,
    shape: ModelShape | None = None,
    profile: HardwareProfile | None = None,
    context_len: int | None = None,
) -> list[int]:
    """The budget of each layer, in neurons of the trace, at most n_neurons.

    profile, context_len: the machine, and the longest context, whose memory "vram" and "ngl" fill.
    """
    fills, slots = POLICIES[settings.policy].fills, settings.slots
    if fills == "all":
        return [n_neurons] * n_layers
    if fills == "none":
        return [0] * n_layers
    if slots is None and settings.vram is not None:
        slots = "vram"
    if slots is None:
        return [n_neurons // 4] * n_layers
    if isinstance(slots, int):
        return [min(slots, n_neurons)] * n_layers
    if isinstance(slots, tuple):
        if len(slots) != n_layers:
            raise KairoxError(
                f"slots has {len(slots)} numbers and the trace or model {n_layers} layers; give "
                "one number, or one for each layer"
            )
        return [min(s, n_neurons) for s in slots]
    if slots == "all":
        return [n_neurons] * n_layers
    if slots == "vram" or slots.startswith("ngl"):
        return _what_fits(settings, slots, n_layers, n_neurons, shape, profile, context_len)
    if is_size(slots):
        return [_slots_in(parse_bytes(slots), settings, n_neurons, shape)] * n_layers
    if prior is None:
        raise KairoxError(
            f"slots {slots!r} shares the budget by the density of a prior and there is none; give "
            "--prior, or a number of slots"
        )
    _, _, mean = slots.partition(":")
    return share_by_density(int(mean) if mean else n_neurons // 4, prior)


def resident_label(slots: Sequence[int], n_neurons: int) -> str:
    """The budget in words: of each layer, or on average where layers differ."""
    mean = " on average" if len(set(slots)) > 1 else ""
    return f"{sum(slots) / len(slots):,.4g} of {n_neurons:,} neurons of a layer resident{mean}"


def _what_fits(
    settings: Settings,
    rule: str,
    n_layers: int,
    n_neurons: int,
    shape: ModelShape | None,
    profile: HardwareProfile | None,
    context_len: int | None,
) -> list[int]:
    target = target_of(settings, shape)
    n_of_model = n_layers if target is None else target.n_layers
    _, _, asked = rule.partition(":")
    if asked:
        n_on_device = int(asked)
    elif target is None or profile is None or context_len is None:
        raise KairoxError(
            f"slots {rule!r} is what fits beside the rest of the model, so it needs a model, a "
            "machine and a trace; give a number of slots"
        )
    elif rule == "vram":
        most = max_slots(
            profile, target, settings.gating, context_len,
            trace_neurons=n_neurons, predictor=predictor_of(settings),
        )  # fmt: skip
        return [most] * n_layers
    else:
        n_on_device = max_layers(profile, target, context_len)
    n_on_device = min(n_on_device, n_of_model)
    return list(whole_layers(n_layers, n_neurons, n_on_device, of=n_of_model).slots)


def _slots_in(n_bytes: int, settings: Settings, n_neurons: int, shape: ModelShape | None) -> int:
    target = target_of(settings, shape)
    if target is None:
        raise KairoxError(
            f"slots {settings.slots!r} is a size, and the model whose bytes count is not known; "
            "name it with --as, or give a number of slots"
        )
    bundles_per_neuron = target.n_neurons / n_neurons
    per_slot = target.n_layers * target.bundle_bytes(settings.gating) * bundles_per_neuron
    return min(n_neurons, math.floor(n_bytes / per_slot))


def share_by_density(mean_slots: int, prior: Trace) -> list[int]:
    """`mean_slots` per layer on average, in proportion to how often the layer's neurons fire.

    No layer gets more than its neurons; what is left over goes to the others. Whole numbers by
    largest remainder, ties to the lowest layer; the sum is kept.
    """
    n_layers, n_neurons = prior.header.n_layers, prior.header.n_neurons
    weight = counts(prior).sum(axis=1).astype(np.float64)  # [n_layers]
    total = min(mean_slots, n_neurons) * n_layers
    if weight.sum() == 0:
        weight = np.ones(n_layers)
    given = np.zeros(n_layers)  # [n_layers]
    open_layers = np.ones(n_layers, bool)
    while (left := total - given.sum()) > 1e-9:
        share = np.where(open_layers, weight, 0.0)
        if share.sum() == 0:  # only silent layers are left
            share = open_layers.astype(np.float64)
        given = np.minimum(given + left * share / share.sum(), n_neurons)
        open_layers = given < n_neurons
    whole = np.floor(given + 1e-9)
    order = np.argsort(-(given - whole), kind="stable")
    whole[order[: int(total - whole.sum())]] += 1
    return [int(w) for w in whole]


def target_of(settings: Settings, own: ModelShape | None) -> ModelShape | None:
    """The model whose bytes count: `own` or what stands in for it, its FFN rows as they are kept.

    With the predictor that was trained for `own`; thresholds make a dense SwiGLU model one whose
    neurons may be left out. None where neither model is known.
    """
    target = own if settings.model_as is None else shape_of(settings.model_as)
    if target is None:
        return None
    if settings.model_as is None and settings.predictor_file is not None:
        target = replace(target, predictor_rank=rank_of(settings.predictor_file))
    if settings.thresholds is not None and not target.relu_sparse:
        target = replace(target, approximate=True)
    return target if settings.weights is None else with_ffn_weights(target, settings.weights)


def shape_of(name_or_path: str) -> ModelShape:
    """A model of the catalogue by name, or one described by a config.json or the folder with it.

    A SwiGLU one is dense, unless something says which of its neurons to leave out.
    """
    if not ("/" in name_or_path or "\\" in name_or_path or name_or_path.endswith(".json")):
        return find_shape(name_or_path)
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise KairoxError(f"cannot read the model's {str(file)!r}: {error}") from error
    if not isinstance(config, dict):
        raise KairoxError(f"{str(file)!r} holds a JSON {type(config).__name__}, not an object")
    dense = config.get("hidden_act") == "silu"
    shape = shape_from_config(config, name=file.parent.name or None, approximate=dense)
    return replace(shape, approximate=False)

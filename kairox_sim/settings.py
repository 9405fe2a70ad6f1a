"""From Settings to objects: the one place where names are resolved, budgets included.

What a Settings file may hold is settings_file.py's concern.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event
from kairox_sim.model import ModelShape, find_shape, shape_from_config
from kairox_sim.policies import POLICIES
from kairox_sim.settings_file import (
    Settings,
    make_controller,
    make_policy,
    quality_of,
)
from kairox_sim.settings_rules import label, predictor_of, trigger_of
from kairox_sim.trace import Trace, read_trace
from kairox_sim.trace_stats import counts, overlaps
from kairox_sim.units import is_size, parse_bytes

__all__ = [
    "Settings",
    "build_cache",
    "label",
    "load_prior",
    "make_controller",
    "make_policy",
    "most_frequent",
    "predictor_of",
    "quality_of",
    "require_usable",
    "shape_of",
    "share_by_density",
    "slots_per_layer",
    "swap_neurons",
    "trigger_of",
]


def build_cache(
    settings: Settings,
    n_layers: int,
    n_neurons: int,
    *,
    prior: Trace | None = None,
    shape: ModelShape | None = None,
    journal: Callable[[Event], None] | None = None,
) -> NeuronCache:
    """The cache that `settings` describes, for the layers and neurons of a trace or a live model.

    prior: profiling trace, needed by `static`, a warm start and density budgets; see `load_prior`.
    shape: the model whose bytes count, needed where the budget is a size; `model_as` by default.
    """
    policy = make_policy(settings, n_layers, n_neurons)
    slots = slots_per_layer(settings, n_layers, n_neurons, prior=prior, shape=shape)
    everything = np.arange(n_neurons, dtype=np.int32)
    warm = None
    if policy.fills == "prior" or (policy.fills == "slots" and settings.start == "warm"):
        if prior is None:
            raise KairoxError(
                f"policy {settings.policy!r} with start {settings.start!r} needs a prior, a trace "
                "of other text to learn from; give --prior, or `prior` in the settings"
            )
        warm = most_frequent(prior, slots)
    return NeuronCache(
        n_layers,
        n_neurons,
        slots,
        policy,
        make_controller(settings),
        pinned=[everything] * n_layers if policy.fills == "all" else None,
        warm=warm,
        swap_neurons=swap_neurons(settings, n_neurons),
        observes=settings.observes,
        trigger=settings.trigger,
        journal=journal,
    )


def swap_neurons(settings: Settings, n_neurons: int) -> int:
    """Neurons per swap. In a stand-in so many of the trace's as make the target's bytes."""
    if settings.model_as is None:
        return settings.swap_neurons
    bundles_per_neuron = shape_of(settings.model_as).n_neurons / n_neurons
    return max(1, round(settings.swap_neurons / bundles_per_neuron))


def slots_per_layer(
    settings: Settings,
    n_layers: int,
    n_neurons: int,
    *,
    prior: Trace | None = None,
    shape: ModelShape | None = None,
) -> list[int]:
    """The budget of each layer, in neurons of the trace, at most n_neurons."""
    fills, slots = POLICIES[settings.policy].fills, settings.slots
    if fills == "all":
        return [n_neurons] * n_layers
    if fills == "none":
        return [0] * n_layers
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
    if is_size(slots):
        return [_slots_in(parse_bytes(slots), settings, n_neurons, shape)] * n_layers
    if prior is None:
        raise KairoxError(
            f"slots {slots!r} shares the budget by the density of a prior and there is none; give "
            "--prior, or a number of slots"
        )
    _, _, mean = slots.partition(":")
    return share_by_density(int(mean) if mean else n_neurons // 4, prior)


def _slots_in(n_bytes: int, settings: Settings, n_neurons: int, shape: ModelShape | None) -> int:
    target = shape if settings.model_as is None else shape_of(settings.model_as)
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


def most_frequent(prior: Trace, slots: list[int]) -> list[NDArray[np.int32]]:
    """Per layer the `slots` neurons that fired most in the prior, ties to the lowest index."""
    fired = counts(prior)  # [n_layers, n_neurons]
    return [
        np.sort(np.argsort(-fired[layer], kind="stable")[:k]).astype(np.int32)
        for layer, k in enumerate(slots)
    ]


def load_prior(settings: Settings, prior: Trace | str | Path | None = None) -> Trace | None:
    """The prior, given or named by the settings, its content checked against `prior_sha256`."""
    found = settings.prior if prior is None else prior
    if found is None:
        return None
    trace = found if isinstance(found, Trace) else read_trace(found)
    if settings.prior_sha256 not in (None, trace.sha256):
        raise KairoxError(
            f"the prior {trace.path or 'given'} has sha256 {trace.sha256[:12]}... and the settings "
            f"were made with {str(settings.prior_sha256)[:12]}...; use that trace, or remove "
            "prior_sha256"
        )
    return trace


def require_usable(prior: Trace, evaluated: Trace) -> None:
    """Refuse a prior of another model, or one that has seen the tokens it is measured on."""
    ours, theirs = evaluated.header, prior.header
    for name in ("model_sha256", "n_layers", "n_neurons"):
        if getattr(ours, name) != getattr(theirs, name):
            raise KairoxError(
                f"the prior was recorded with {theirs.model} ({name} {getattr(theirs, name)!r}) "
                f"and the trace with {ours.model} ({getattr(ours, name)!r}); both must be of the "
                "same model"
            )
    if overlaps(prior, evaluated):
        raise KairoxError(
            "the prior overlaps the tokens it would be evaluated on (same source text, meeting "
            "token ranges); record the prior from other text"
        )


def shape_of(name_or_path: str) -> ModelShape:
    """A model of the catalogue by name, or one described by a config.json or the folder with it."""
    if not ("/" in name_or_path or "\\" in name_or_path or name_or_path.endswith(".json")):
        return find_shape(name_or_path)
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KairoxError(f"cannot read the model's {str(file)!r}: {error}") from error
    if not isinstance(config, dict):
        raise KairoxError(f"{str(file)!r} holds a JSON {type(config).__name__}, not an object")
    return shape_from_config(config, name=file.parent.name or None)

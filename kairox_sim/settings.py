"""From Settings to objects: the one place where names are resolved, budgets included.

What a Settings file may hold is settings_file.py's concern.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kairox_sim.budgets import shape_of, share_by_density, slots_per_layer, target_of
from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event
from kairox_sim.future_uses import future_of
from kairox_sim.groups import group_neurons, read_groups, require_unseen
from kairox_sim.hardware import HardwareProfile
from kairox_sim.linking import link_order
from kairox_sim.model import ModelShape
from kairox_sim.placement import (
    SHIPPED_BATCH,
    SOLVER_BATCH,
    Placed,
    balanced,
    by_counts,
    by_first_use,
    first,
    least_per_layer,
    solved,
    solved_as_shipped,
)
from kairox_sim.policies import POLICIES, Known
from kairox_sim.policies.future import Future
from kairox_sim.policies.grouped import Grouped
from kairox_sim.policies.linked import Linked
from kairox_sim.settings_file import (
    Settings,
    make_controller,
    make_policy,
    quality_of,
)
from kairox_sim.settings_rules import label, predictor_of, trigger_of
from kairox_sim.trace import Trace, read_trace
from kairox_sim.trace_stats import counts, overlaps

__all__ = [
    "Settings",
    "build_cache",
    "gpu_over_cpu",
    "group_size",
    "groups_of",
    "label",
    "load_prior",
    "longest_context",
    "make_controller",
    "make_policy",
    "predictor_of",
    "quality_of",
    "require_usable",
    "shape_of",
    "share_by_density",
    "slots_per_layer",
    "swap_neurons",
    "target_of",
    "trigger_of",
]


def build_cache(
    settings: Settings,
    n_layers: int,
    n_neurons: int,
    *,
    prior: Trace | None = None,
    shape: ModelShape | None = None,
    profile: HardwareProfile | None = None,
    evaluated: Trace | None = None,
    context_len: int | None = None,
    journal: Callable[[Event], None] | None = None,
) -> NeuronCache:
    """The cache that `settings` describes, for the layers and neurons of a trace or a live model.

    prior: profiling trace, needed by `static`, a warm start, density budgets, groups and links made
    on the spot; see `load_prior`. shape: the model whose bytes count, needed where the budget is a
    size or what fits; `model_as` by default. profile: the machine, where a budget or a placement
    depends on it. evaluated: the trace it will be run on, of which oracles know the future.
    context_len: instead of its longest sequence, where there is no trace.
    """
    if evaluated is not None:
        context_len = longest_context(settings, evaluated)
    slots = slots_per_layer(
        settings, n_layers, n_neurons,
        prior=prior, shape=shape, profile=profile, context_len=context_len,
    )  # fmt: skip
    members = (
        None
        if settings.groups is None
        else groups_of(settings, n_layers, n_neurons, prior, evaluated)
    )
    position = (
        None if settings.layout == "natural" else link_order(_needed(prior, "layout 'linked'"))
    )
    known = Known(
        rng=np.random.default_rng(settings.seed),
        future=_future(settings, evaluated, members),
        gpu_over_cpu=None if profile is None else gpu_over_cpu(profile),
        # Segments of memory are of ids where nothing says otherwise.
        position=np.tile(np.arange(n_neurons, dtype=np.int32), (n_layers, 1))
        if position is None
        else position,
    )
    n_units = n_neurons if members is None else members.shape[1]
    policy = make_policy(settings, n_layers, n_units, known)
    if members is not None:
        policy = Grouped(policy, members)
    if position is not None:
        policy = Linked(policy, position)
    placed = _place(settings, slots, n_neurons, prior, members, profile, shape, known.future)
    everything = np.arange(n_neurons, dtype=np.int32)
    return NeuronCache(
        n_layers,
        n_neurons,
        slots if placed is None else placed.slots,
        policy,
        make_controller(settings),
        pinned=[everything] * n_layers if policy.fills == "all" else None,
        warm=None if placed is None else placed.resident,
        swap_neurons=swap_neurons(settings, n_neurons, members),
        observes=settings.observes,
        trigger=settings.trigger,
        journal=journal,
    )


def groups_of(
    settings: Settings,
    n_layers: int,
    n_neurons: int,
    prior: Trace | None,
    evaluated: Trace | None = None,
) -> NDArray[np.int32]:
    """[n_layers, n_groups, size] members of the groups that `settings` names.

    Groups of a file that were learnt from tokens of `evaluated` are refused.
    """
    named = str(settings.groups)
    if named.endswith(".parquet"):
        groups = read_groups(named)
        if evaluated is not None:
            require_unseen(groups, evaluated)
    else:
        method, size = named.partition(":")[0], group_size(settings, n_neurons)
        groups = group_neurons(prior, n_layers, n_neurons, size, method, settings.seed)
    found = groups.members.shape
    if found[0] != n_layers or found[1] * found[2] != n_neurons:
        raise KairoxError(
            f"groups {named!r} are of {found[0]} layers of {found[1] * found[2]} neurons, and the "
            f"trace or model has {n_layers} of {n_neurons}; make them from a trace of this model"
        )
    return groups.members


def group_size(settings: Settings, n_neurons: int) -> int:
    """Neurons of the trace that move together: 1 without groups.

    METHOD:SIZE counts neurons of the model, as swap_neurons does: in a stand-in a group is about as
    many bytes as on the model, a divisor of n_neurons and one neuron at least. A file's groups are
    of the trace.
    """
    if settings.groups is None:
        return 1
    if settings.groups.endswith(".parquet"):
        return read_groups(settings.groups).size
    asked = int(settings.groups.partition(":")[2])
    if settings.model_as is None:
        return asked
    n_model = shape_of(settings.model_as).n_neurons
    if asked > n_model:
        raise KairoxError(
            f"groups {settings.groups!r}: a layer of {settings.model_as} has {n_model} neurons; "
            "give a size that divides them"
        )
    bundles_per_neuron = n_model / n_neurons
    if bundles_per_neuron == 1:
        return asked
    most = max(1, round(asked / bundles_per_neuron))
    return max(size for size in range(1, most + 1) if n_neurons % size == 0)


def gpu_over_cpu(profile: HardwareProfile) -> float:
    """How many times as many neurons a second the device computes as the host."""
    host = min(profile.ffn_cpu.bytes_per_s.value, profile.dram_bytes_per_s.value)
    return profile.ffn_gpu.bytes_per_s.value / host


def _future(
    settings: Settings, evaluated: Trace | None, members: NDArray[np.int32] | None
) -> Future | None:
    if "future" not in POLICIES[settings.policy].needs or evaluated is None:
        return None
    observes = settings.observes or POLICIES[settings.policy].default_observes
    if observes == "predicted":
        raise KairoxError(
            f"policy {settings.policy!r} knows what will be evaluated, not what will be predicted; "
            "let it observe 'evaluated' or 'active'"
        )
    return future_of(evaluated, members, observes=observes)


def longest_context(settings: Settings, trace: Trace) -> int:
    """Tokens in the KV cache at the end of the trace's longest sequence."""
    steps = (trace.at(i).context_len for i in range(trace.n_steps))
    return settings.context_start + max(steps, default=0)


def _place(
    settings: Settings,
    slots: list[int],
    n_neurons: int,
    prior: Trace | None,
    members: NDArray[np.int32] | None,
    profile: HardwareProfile | None,
    shape: ModelShape | None,
    future: Future | None,
) -> Placed | None:
    """Who is resident at the start; None: nobody, or everybody by the policy's own rule.

    An oracle that starts warm begins with what is used first.
    """
    fills = POLICIES[settings.policy].fills
    if fills not in ("prior", "slots") or (fills == "slots" and settings.start == "empty"):
        return None
    size = 1 if members is None else members.shape[2]
    units = [k // size for k in slots]
    n_units = n_neurons // size
    if min(slots) == n_neurons or settings.placement == "layers" or settings.start == "first":
        placed = first(n_units, units)
    elif future is not None:
        placed = by_first_use(future.first, units)
    else:
        why = f"policy {settings.policy!r} with placement {settings.placement!r}"
        fired = counts(_needed(prior, f"{why}, start {settings.start!r},"))
        if members is not None:
            fired = np.stack([fired[layer][own].sum(axis=1) for layer, own in enumerate(members)])
        placed = _placed(settings, fired, units, n_neurons, profile, shape)
    if members is None:
        return placed
    neurons = tuple(np.sort(members[i][ids].ravel()) for i, ids in enumerate(placed.resident))
    moved = tuple(k * size for k in placed.slots)
    return Placed(moved if settings.placement.startswith("solver") else tuple(slots), neurons)


def _placed(
    settings: Settings,
    fired: NDArray[np.int64],
    units: list[int],
    n_neurons: int,
    profile: HardwareProfile | None,
    shape: ModelShape | None,
) -> Placed:
    # A batch counts neurons of the model, so that in a stand-in it is as many bytes.
    bundles_per_neuron = 1.0 if shape is None else shape.n_neurons / n_neurons
    match settings.placement:
        case "solver-shipped":
            batch = max(1, round(SHIPPED_BATCH / bundles_per_neuron))
            return solved_as_shipped(fired, sum(units), batch=batch)
        case "solver":
            least = 0
            if profile is not None and shape is not None:
                least = least_per_layer(
                    bundle_bytes=shape.bundle_bytes(settings.gating) * bundles_per_neuron,
                    gpu_bytes_per_s=profile.ffn_gpu.bytes_per_s.value,
                    cpu_bytes_per_s=profile.ffn_cpu.bytes_per_s.value,
                    sync_s=2 * profile.handover_fixed_s.value
                    + profile.h2d.copy_fixed_s.value
                    + profile.d2h.copy_fixed_s.value,
                )
            batch = max(1, round(SOLVER_BATCH / bundles_per_neuron))
            return solved(fired, sum(units), least=least, batch=batch)
        case "balanced":
            if profile is None:
                raise KairoxError("placement 'balanced' needs the rates of a machine")
            return balanced(fired, units, gpu_over_cpu(profile))
        case _:
            return by_counts(fired, units)


def _needed(prior: Trace | None, what: str) -> Trace:
    if prior is None:
        raise KairoxError(
            f"{what} needs a prior, a trace of other text to learn from; give --prior, or `prior` "
            "in the settings"
        )
    return prior


def swap_neurons(
    settings: Settings, n_neurons: int, members: NDArray[np.int32] | None = None
) -> int:
    """Neurons per swap: a group, or in a stand-in so many of the trace's as make the target's
    bytes."""
    if members is not None:
        return int(members.shape[2])
    if settings.model_as is None:
        return settings.swap_neurons
    bundles_per_neuron = shape_of(settings.model_as).n_neurons / n_neurons
    return max(1, round(settings.swap_neurons / bundles_per_neuron))


def load_prior(settings: Settings, prior: Trace | str | Path | None = None) -> Trace | None:
    """The prior, given or named by the settings, its content checked against `prior_sha256`."""
    found = settings.prior if prior is None else prior
    if found is None:
        return None
    trace = found if isinstance(found, Trace) else read_trace(found)
    if trace.n_tokens == 0:
        raise KairoxError(
            f"the prior {trace.path or 'given'} has no tokens, so nothing can be learnt from it; "
            "record one, or leave it out"
        )
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

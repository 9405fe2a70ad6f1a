"""simulate: a trace, Settings and a machine -> RunResult. Checks that the three go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from kairox_sim.advice import advice
from kairox_sim.budgets import resident_label
from kairox_sim.cache import NeuronCache
from kairox_sim.cost_model import CostModel
from kairox_sim.costs import costs_for
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    HardwareProfile,
    LinkProfile,
    load_link,
    load_profile,
    with_link,
    with_vram,
)
from kairox_sim.lower_bound import common_bound, run_bound
from kairox_sim.memory import MemoryPlan, fits
from kairox_sim.metrics import RunResult, against, steps_frame, summarise
from kairox_sim.model import ModelShape, require_sparse
from kairox_sim.oracle import oracle_tpot_s
from kairox_sim.policies import BOUNDS, POLICIES
from kairox_sim.policies.linked import Linked
from kairox_sim.prediction import OfQuality, Perfect, Predictions, as_predicted, predictions_for
from kairox_sim.provenance import code_version, inputs_of
from kairox_sim.record import StepRecord, exactness_of
from kairox_sim.settings import (
    Settings,
    build_cache,
    label,
    load_prior,
    longest_context,
    predictor_of,
    quality_of,
    require_usable,
    shape_of,
    target_of,
    trigger_of,
)
from kairox_sim.trace import Trace, TraceHeader, read_trace
from kairox_sim.units import parse_bytes


def simulate(
    trace: Trace | str | Path,
    settings: Settings,
    *,
    hardware: HardwareProfile | str | Path = "pc1",
    link: LinkProfile | str | Path | None = None,
    prior: Trace | str | Path | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    keep_slices: bool = False,
    oracle: bool = False,
) -> RunResult:
    """Replay `trace` under `settings` on `hardware`, with `link` as its bus where given.

    prior: instead of the one `settings` name. on_step: called after each step, for progress.
    oracle: also simulate the bypass oracle in the same slots, for the regret against it.
    keep_slices: keep the busy intervals of every resource, for a Gantt chart.

    Refuses (KairoxError) what does not go together: a trace of another model, a prior that has seen
    the tokens, predictions made for another trigger, a policy and a controller with nothing in
    common, a budget that does not fit; the all-resident bound alone may not fit.
    A trace without steps gives an empty report: nan, and a warning.
    """
    trace = trace if isinstance(trace, Trace) else read_trace(trace)
    header = trace.header
    profile = machine(hardware, link)
    if settings.vram is not None:
        profile = with_vram(profile, parse_bytes(settings.vram))
    _require_same_thresholds(settings, header)
    shape = target_shape(settings, header)
    require_sparse(shape, settings.gating)
    _require_one_copy(settings)
    learnt_from = load_prior(settings, prior)
    if learnt_from is not None:
        require_usable(learnt_from, trace)
    trace = _as_gated(trace, settings)
    cache = build_cache(
        settings, header.n_layers, header.n_neurons,
        prior=learnt_from, shape=shape, profile=profile, evaluated=trace,
    )  # fmt: skip
    costs = costs_of(settings, profile, shape, cache)
    predictions, prediction_label = _predictions(trace, settings, cache)
    plan = memory_plan(settings, trace, profile, shape, cache)
    if not plan.fits and settings.policy not in BOUNDS:
        counted = ""
        if isinstance(settings.slots, int) and settings.slots > header.n_neurons:
            counted = f" (slots are counted in the trace's {header.n_neurons} neurons of a layer)"
        raise KairoxError(
            f"{plan.explain()}; give fewer slots{counted}, or a machine with more device memory"
        )
    run = run_trace(
        trace,
        cache,
        costs,
        trigger=settings.trigger,
        late=settings.late,
        predictions=predictions,
        dispatch=settings.dispatch,
        lookahead_from=settings.lookahead_from,
        context_start=settings.context_start,
        keep_slices=keep_slices,
        on_step=on_step,
    )
    steps = steps_frame(run.records)
    summary = summarise(steps, header.n_layers, costs.layers_ratio)
    n_predicted = None if predictions is not None or settings.gating == "predicted" else 0
    own = run_bound(
        trace, costs, plan,
        context_start=settings.context_start, n_predicted=n_predicted,
        dense_host=settings.dispatch == "layers",
    )  # fmt: skip
    common = common_bound(trace, costs, plan, context_start=settings.context_start)
    summary |= against(
        summary,
        bound_s=own.tpot_s,
        common_bound_s=common.tpot_s,
        oracle_s=oracle_tpot_s(trace, settings, cache.capacity, profile) if oracle else math.nan,
    )
    return RunResult(
        steps=steps,
        summary=summary,
        labels=_labels(settings, header, shape, profile, prediction_label)
        | {"budget": _budget_label(cache, shape, plan, longest_context(settings, trace))},
        unused_yet=run.unused_yet,
        cancelled_at_end=run.cancelled_at_end,
        slices=run.slices,
        warnings=(*trace.warnings, *_warnings(settings, cache, costs, plan, summary)),
        settings=_as_run(settings, learnt_from).model_dump(mode="json"),
        provenance={
            **code_version(),
            **inputs_of(trace, learnt_from, profile, settings),
            "slots": list(cache.capacity),
            "device_bytes": plan.total,
            "vram_bytes": plan.vram,
            "fits": plan.fits,
        },
    )


def costs_of(
    settings: Settings, profile: HardwareProfile, shape: ModelShape, cache: NeuronCache
) -> CostModel:
    """What each operation costs under `settings`, for the layers and neurons of the cache."""
    policy = cache.policy
    costs = costs_for(
        profile,
        shape,
        settings.gating,
        trace_layers=cache.n_layers,
        trace_neurons=cache.n_neurons,
        predictor=predictor_of(settings),
        swap_neurons=settings.swap_neurons,
        copies=settings.copies,
        copies_per_sync=settings.copies_per_sync,
        handovers=settings.handovers,
        numerics=settings.numerics,
        position=policy.position if isinstance(policy, Linked) else None,
    )
    return costs if settings.groups is None else of_groups(costs, cache.swap_neurons)


def of_groups(costs: CostModel, size: int) -> CostModel:
    """The same where groups of `size` move: a plan goes over groups, and a swap is one."""
    n_trace = round(costs.shape.n_neurons / costs.bundles_per_neuron)
    decide_neurons = max(1, n_trace // size)
    return dataclasses.replace(costs, swap_neurons=size, decide_neurons=decide_neurons)


def machine(
    hardware: HardwareProfile | str | Path, link: LinkProfile | str | Path | None = None
) -> HardwareProfile:
    """A profile, by name or path where it is not one yet, with another bus put on it."""
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    if link is None:
        return profile
    return with_link(profile, link if isinstance(link, LinkProfile) else load_link(link))


def target_shape(settings: Settings, header: TraceHeader) -> ModelShape:
    """The model whose costs are charged: the stand-in's target, or the trace's own."""
    approximate = header.approximate is not None
    if settings.model_as is not None:
        return _target(settings, None, approximate)
    try:
        shape = shape_of(header.model)
    except KairoxError as error:
        raise KairoxError(
            f"the trace is of model {header.model!r}, whose costs are not known ({error}); name "
            "one whose costs to use with --as, or the path of its config.json"
        ) from error
    for name in ("n_layers", "n_neurons", "d_model"):
        if getattr(header, name) != getattr(shape, name):
            raise KairoxError(
                f"the trace says model {header.model!r} with {name} {getattr(header, name)}, and "
                f"that model has {getattr(shape, name)}; record the trace with it, or name "
                "another model's costs with --as"
            )
    if settings.dtype != "float32":
        shape = dataclasses.replace(shape, bytes_per_weight=2.0, kv_bytes_per_value=None)
    return _target(settings, shape, approximate)


def _target(settings: Settings, own: ModelShape | None, approximate: bool) -> ModelShape:
    target = target_of(settings, own)
    assert target is not None, "neither a model of its own nor a stand-in"
    # What is charged for are the sets of the trace, whatever made them.
    return dataclasses.replace(target, approximate=approximate and not target.relu_sparse)


def memory_plan(
    settings: Settings,
    trace: Trace,
    profile: HardwareProfile,
    shape: ModelShape,
    cache: NeuronCache,
) -> MemoryPlan:
    """Device memory at the longest context of the trace."""
    return fits(
        profile,
        shape,
        settings.gating,
        cache.capacity,
        longest_context(settings, trace),
        trace_neurons=trace.header.n_neurons,
        predictor=predictor_of(settings),
        dispatch=settings.dispatch,
    )


def _as_run(settings: Settings, prior: Trace | None) -> Settings:
    """The settings with the prior that was used, so that they are enough to run it again."""
    if prior is None:
        return settings
    path = settings.prior if prior.path is None else str(prior.path)
    return settings.model_copy(update={"prior": path, "prior_sha256": prior.sha256})


def _require_one_copy(settings: Settings) -> None:
    """Refuse what would copy a miss on demand, and then once more for its slot."""
    moves = POLICIES[settings.policy].admits != "never"
    if settings.dispatch in ("gpu", "cost") and moves and trigger_of(settings) == "after":
        raise KairoxError(
            f"dispatch {settings.dispatch!r} copies on demand what is missing, and trigger 'after' "
            f"would copy it again for its slot; let {settings.policy!r} plan before the layer "
            "computes (--set trigger=serial), or use dispatch concurrent"
        )


def _require_same_thresholds(settings: Settings, header: TraceHeader) -> None:
    if settings.thresholds is not None and header.approximate is None:
        raise KairoxError(
            f"thresholds {settings.thresholds!r} say which neurons of a dense model are left out, "
            "and the trace was recorded without any: record it with them, or leave them out"
        )


def _as_gated(trace: Trace, settings: Settings) -> Trace:
    """The trace whose evaluated sets are what `settings` evaluate; refused where it cannot be."""
    asked, recorded = settings.gating, trace.header.gating
    if recorded in ("screened", "predicted") and asked not in (recorded, "dense"):
        raise KairoxError(
            f"the trace was recorded with gating {recorded!r}, so what it evaluated is not what "
            f"{asked!r} would; set gating to {recorded!r}, or record with exact gating"
        )
    if asked != "predicted" or recorded == "predicted" or settings.prediction == "perfect":
        return trace
    quality = quality_of(settings.prediction)
    if quality is None:
        raise KairoxError(
            f"gating 'predicted' computes what a predictor says, and the trace, recorded with "
            f"gating {recorded!r}, holds the true sets; give the predictor's recall and precision "
            "(--set prediction=0.95,0.5), or say prediction = perfect, which is an upper bound, or "
            "record with gating predicted"
        )
    return as_predicted(trace, quality, trigger_of(settings), settings.seed)


def _predictions(
    trace: Trace, settings: Settings, cache: NeuronCache
) -> tuple[Predictions | None, str]:
    trigger = trigger_of(settings)
    quality = quality_of(settings.prediction)
    if settings.gating == "predicted":  # what is evaluated is what was predicted
        if quality is not None and trace.header.gating == "predicted":
            said = OfQuality(*quality, n_neurons=1).label
        else:
            said = "recorded prediction" if trace.header.gating == "predicted" else Perfect().label
        silent = cache.policy.admits == "never" or trigger in ("after", "instant")
        return (None if silent else Perfect(said)), said
    if cache.policy.admits == "never" or trigger == "after":
        return None, "no prediction"
    if settings.gating == "dense":
        raise KairoxError(
            f"gating 'dense' computes every neuron, so there is nothing to predict and trigger "
            f"{trigger!r} has nothing to plan from; use trigger after, or a policy that never moves"
        )
    if trigger == "instant":
        return Perfect(), "predicted = active, landed at once"
    if settings.predictor == "none":
        raise KairoxError(
            f"trigger {trigger!r} plans by what a predictor says and predictor is 'none'; use "
            "trigger after, or another predictor (--set predictor=lookahead)"
        )
    predictions = predictions_for(
        trace,
        trigger,
        perfect=settings.prediction == "perfect",
        quality=quality,
        seed=settings.seed,
    )
    return predictions, predictions.label


def _labels(
    settings: Settings,
    header: TraceHeader,
    shape: ModelShape,
    profile: HardwareProfile,
    prediction: str,
) -> dict[str, str]:
    """What stands beside every number of this run."""
    whose = f"synthetic {header.model}" if header.synthetic else header.model
    own = header.model == shape.name and settings.model_as in (None, header.model)
    labels = {
        "setting": label(settings),
        "time": "simulated",
        "costs": f"{whose}, its own costs"
        if own
        else f"stand-in: {whose} activations, {shape.name} costs",
        "hardware": profile.name,
        "gating": settings.gating,
        "exactness": exactness_of(settings.gating, approximate=header.approximate is not None),
        "prediction": prediction,
        "activations": "synthetic" if header.synthetic else "recorded",
    }
    if settings.gating == "screened" and header.gating != "screened":
        labels["evaluated"] = "survivors = active (a perfect screen)"
    return labels


def _budget_label(cache: NeuronCache, shape: ModelShape, plan: MemoryPlan, context_len: int) -> str:
    """Slots of the trace's neurons, of how many of the model's they stand for, and the memory."""
    said = resident_label(cache.capacity, cache.n_neurons)
    if cache.n_neurons != shape.n_neurons:
        of_model = sum(cache.capacity) / cache.n_layers * shape.n_neurons / cache.n_neurons
        said += f", for {of_model:,.0f} of {shape.n_neurons:,} of {shape.name}"
    gb = f"{plan.total / 1e9:.2f} of {plan.vram / 1e9:.2f} GB of device memory"
    fit = "" if plan.fits else ", so it does not fit"
    return f"{said}; {gb} at {context_len:,} tokens of context{fit}"


def _warnings(
    settings: Settings,
    cache: NeuronCache,
    costs: CostModel,
    plan: MemoryPlan,
    summary: dict[str, float],
) -> list[str]:
    said = []
    if summary["n_decode"] == 0:
        said.append("the trace has no decode steps: the report is empty (null is unknown)")
    demand = summary["evaluated_per_token"] / cache.n_layers
    said += advice(settings, costs, cache.capacity, demand)
    if not plan.fits:
        said.append(plan.explain())
    return said

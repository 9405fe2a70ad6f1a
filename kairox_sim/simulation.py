"""simulate: a trace, Settings and a machine -> RunResult. Checks that the three go together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kairox_sim.cache import NeuronCache
from kairox_sim.costs import MemoryPlan, costs_for, fits
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, LinkProfile, load_link, load_profile, with_link
from kairox_sim.metrics import RunResult, steps_frame, summarise
from kairox_sim.model import ModelShape
from kairox_sim.policies import BOUNDS
from kairox_sim.prediction import Perfect, Predictions, predictions_for
from kairox_sim.provenance import code_version, inputs_of
from kairox_sim.record import StepRecord
from kairox_sim.settings import (
    Settings,
    build_cache,
    label,
    load_prior,
    predictor_of,
    quality_of,
    require_usable,
    shape_of,
    trigger_of,
)
from kairox_sim.trace import Trace, TraceHeader, read_trace


def simulate(
    trace: Trace | str | Path,
    settings: Settings,
    *,
    hardware: HardwareProfile | str | Path = "pc1",
    link: LinkProfile | str | Path | None = None,
    prior: Trace | str | Path | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    keep_slices: bool = False,
) -> RunResult:
    """Replay `trace` under `settings` on `hardware`, with `link` as its bus where given.

    prior: instead of the one `settings` name. on_step: called after each step, for progress.
    keep_slices: keep the busy intervals of every resource, for a Gantt chart.

    Refuses (KairoxError) what does not go together: a trace of another model, a prior that has seen
    the tokens, predictions made for another trigger, a policy and a controller with nothing in
    common, a budget that does not fit; the all-resident bound alone may not fit.
    A trace without steps gives an empty report: nan, and a warning.
    """
    trace = trace if isinstance(trace, Trace) else read_trace(trace)
    header = trace.header
    profile = machine(hardware, link)
    shape = target_shape(settings, header)
    learnt_from = load_prior(settings, prior)
    if learnt_from is not None:
        require_usable(learnt_from, trace)
    _require_gating(settings, header)
    costs = costs_for(
        profile,
        shape,
        settings.gating,
        trace_layers=header.n_layers,
        trace_neurons=header.n_neurons,
        predictor=predictor_of(settings),
        swap_neurons=settings.swap_neurons,
    )
    cache = build_cache(settings, header.n_layers, header.n_neurons, prior=learnt_from, shape=shape)
    predictions, prediction_label = _predictions(trace, settings, cache)
    plan = memory_plan(settings, trace, profile, shape, cache)
    if not plan.fits and settings.policy not in BOUNDS:
        raise KairoxError(
            f"{plan.explain()}; give fewer slots, or a machine with more device memory"
        )
    run = run_trace(
        trace,
        cache,
        costs,
        trigger=settings.trigger,
        late=settings.late,
        predictions=predictions,
        keep_slices=keep_slices,
        on_step=on_step,
    )
    steps = steps_frame(run.records)
    summary = summarise(steps, header.n_layers, costs.layers_ratio)
    return RunResult(
        steps=steps,
        summary=summary,
        labels=_labels(settings, header, shape, profile, prediction_label),
        unused_yet=run.unused_yet,
        cancelled_at_end=run.cancelled_at_end,
        slices=run.slices,
        warnings=(*trace.warnings, *_warnings(settings, trace, cache, plan, summary)),
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
    if settings.model_as is not None:
        return shape_of(settings.model_as)
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
    return shape


def memory_plan(
    settings: Settings,
    trace: Trace,
    profile: HardwareProfile,
    shape: ModelShape,
    cache: NeuronCache,
) -> MemoryPlan:
    """Device memory at the longest context of the trace."""
    context_len = max((trace.at(i).context_len for i in range(trace.n_steps)), default=0)
    return fits(
        profile,
        shape,
        settings.gating,
        cache.capacity,
        context_len,
        trace_neurons=trace.header.n_neurons,
        predictor=predictor_of(settings),
    )


def _as_run(settings: Settings, prior: Trace | None) -> Settings:
    """The settings with the prior that was used, so that they are enough to run it again."""
    if prior is None:
        return settings
    path = settings.prior if prior.path is None else str(prior.path)
    return settings.model_copy(update={"prior": path, "prior_sha256": prior.sha256})


def _require_gating(settings: Settings, header: TraceHeader) -> None:
    """What a trace's evaluated set means must be what the settings say is evaluated."""
    asked, recorded = settings.gating, header.gating
    if recorded in ("screened", "predicted") and asked != recorded:
        raise KairoxError(
            f"the trace was recorded with gating {recorded!r}, so what it evaluated is not what "
            f"{asked!r} would; set gating to {recorded!r}, or record with exact gating"
        )
    if asked == "predicted" and recorded != "predicted" and settings.prediction != "perfect":
        raise KairoxError(
            f"gating 'predicted' computes what a predictor says, and the trace, recorded with "
            f"gating {recorded!r}, holds the true sets; record with gating predicted, or say "
            "prediction = perfect (--set prediction=perfect), which is an upper bound"
        )


def _predictions(
    trace: Trace, settings: Settings, cache: NeuronCache
) -> tuple[Predictions | None, str]:
    trigger = trigger_of(settings)
    if cache.policy.admits == "never" or trigger == "after":
        if settings.gating != "predicted":
            return None, "no prediction"
        perfect = trace.header.gating != "predicted"
        return None, Perfect().label if perfect else "recorded prediction"
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
        quality=quality_of(settings.prediction),
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
    own = header.model == shape.name and settings.model_as in (None, header.model)
    labels = {
        "setting": label(settings),
        "time": "simulated",
        "costs": f"{header.model}, its own costs"
        if own
        else f"stand-in: {header.model} activations, {shape.name} costs",
        "hardware": profile.name,
        "gating": settings.gating,
        "prediction": prediction,
    }
    if settings.gating == "screened" and header.gating != "screened":
        labels["evaluated"] = "survivors = active (a perfect screen)"
    if header.synthetic:
        labels["activations"] = "synthetic"
    return labels


def _warnings(
    settings: Settings,
    trace: Trace,
    cache: NeuronCache,
    plan: MemoryPlan,
    summary: dict[str, float],
) -> list[str]:
    said = []
    asked = settings.slots if isinstance(settings.slots, tuple) else (settings.slots,)
    most = max((s for s in asked if isinstance(s, int)), default=0)
    if most > cache.n_neurons:
        said.append(
            f"{most} slots asked for and a layer has {cache.n_neurons} neurons: every neuron has "
            "a slot; slots count neurons of the trace, also in a stand-in"
        )
    if summary["n_decode"] == 0:
        said.append("the trace has no decode steps: the report is empty (null is unknown)")
    mean_slots = sum(cache.capacity) / cache.n_layers
    wanted = summary["evaluated_per_token"] / cache.n_layers
    if mean_slots == 0 and cache.policy.fills != "none":
        said.append("the budget is smaller than one neuron: 0 slots, everything is residual")
    elif cache.policy.admits == "must" and mean_slots < wanted:
        said.append(
            f"no policy headroom: {mean_slots:g} slots per layer and {wanted:.0f} neurons wanted "
            "in a layer-step, so that what is admitted is gone before it is used again"
        )
    if not plan.fits:
        said.append(plan.explain())
    return said

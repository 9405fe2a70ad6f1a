"""Warnings: what the shape of model, machine and settings alone forbids. Needs no run.

They are about a typical layer-step: `demand`, the neurons it evaluates by the published share.
Where no share is published there is no advice. `simulate` gives them with its result, and the share
that its trace has.
"""

from __future__ import annotations

from collections.abc import Sequence

from kairox_sim.costs import CostModel
from kairox_sim.policies import POLICIES
from kairox_sim.settings_file import Settings
from kairox_sim.settings_rules import predictor_of, trigger_of

SORTED_ALIKE = 10  # layers 0 to 9 are in the same order as text and as numbers
HEADROOM = 0.5  # slots over demand below which no policy can tell itself from another


def demand_of(costs: CostModel) -> float | None:
    """Neurons of the trace that a layer-step evaluates, by the published share; None: unknown."""
    shape = costs.shape
    n_trace = shape.n_neurons / costs.bundles_per_neuron
    if costs.gating == "dense":
        return n_trace
    share = shape.predicted_share if costs.gating == "predicted" else shape.active_share
    if share is None and costs.gating == "predicted":
        share = shape.active_share
    return None if share is None else share * n_trace


def advice(
    settings: Settings, costs: CostModel, slots: Sequence[int], demand: float | None = None
) -> list[str]:
    """What to know before running `settings` with these `slots` per layer, in trace neurons.

    demand: neurons evaluated in a layer-step, where it is known better than published.
    """
    policy = POLICIES[settings.policy]
    n_neurons = costs.shape.n_neurons / costs.bundles_per_neuron
    said = []
    asked = settings.slots if isinstance(settings.slots, tuple) else (settings.slots,)
    most = max((s for s in asked if isinstance(s, int)), default=0)
    if most > n_neurons:
        said.append(
            f"budget above population: {most} slots asked for and a layer has {n_neurons:g} "
            "neurons: every neuron has a slot; slots count neurons of the trace, also in a stand-in"
        )
    if settings.placement == "solver-shipped" and len(slots) <= SORTED_ALIKE:
        said.append(
            f"placement 'solver-shipped' has the right ids: of {len(slots)} layers the order of "
            "names is the order of numbers, and its defect begins beyond 10"
        )
    said += _at_odds(settings)
    mean = sum(slots) / len(slots)
    if policy.fills in ("all", "none") or settings.dispatch == "layers":
        return said
    if mean == 0:
        said.append("the budget is smaller than one neuron: 0 slots, everything is residual")
        return said
    if settings.groups is not None and max(slots) < costs.swap_neurons:
        said.append(
            f"the budget is smaller than one group: groups of {costs.swap_neurons} neurons and "
            f"{max(slots)} slots per layer at most, so that none ever moves in"
        )
    expected = demand_of(costs) if demand is None else demand
    if expected is None or not expected > 0:
        return said
    if policy.admits == "must" and mean < expected:
        said.append(
            f"budget below one step's demand: {mean:.0f} slots per layer and about "
            f"{expected:.0f} neurons evaluated in a layer-step, so that what {settings.policy} "
            "admits is gone before it is used again"
        )
    if mean < HEADROOM * expected:
        said.append(
            f"no policy headroom: {mean:.0f} slots per layer hold at most "
            f"{mean / expected:.0%} of the about {expected:.0f} neurons of a layer-step, whatever "
            "the policy; it is no ranking of policies"
        )
    said += _too_late(settings, costs, mean, expected)
    return said


def _at_odds(settings: Settings) -> list[str]:
    """Settings that do not go with the others: those that change nothing, so that a sweep over one
    would compare a system with itself, and copies of what does not lie together."""
    policy, ahead = POLICIES[settings.policy], trigger_of(settings) in ("attn_in", "attn_out")
    moves = policy.admits != "never"
    copied = moves or settings.dispatch in ("gpu", "cost")
    placed = policy.fills != "slots" or settings.start == "warm"
    rows_lie_apart = settings.copies == "matrix" and settings.groups is None and copied
    nothing_copied = f"policy {settings.policy!r} moves nothing"
    without = {
        "placement": None if placed else f"start is {settings.start!r}; give start warm",
        "late": None if moves else nothing_copied,
        "copies": None if copied else nothing_copied,
        "copies_per_sync": None if copied else nothing_copied,
        "layout": None if copied else nothing_copied,
        "swap_neurons": None if settings.groups is None else "a swap is a group",
        "lookahead_from": None if ahead else f"trigger is {trigger_of(settings)!r}",
        "dtype": None if settings.model_as is None else f"{settings.model_as} is as published",
        "predictor_file": _no_predictor_file(settings),
        "handovers": f"dispatch is {settings.dispatch!r}"
        if settings.dispatch in ("gpu", "layers")
        else None,
    }
    said = [
        f"{key} {getattr(settings, key)} plays no part: {why}"
        for key, why in without.items()
        if why is not None and getattr(settings, key) != Settings.model_fields[key].default
    ]
    if rows_lie_apart:
        said.append(
            "copies matrix takes the rows of a swap to lie side by side, and without groups they "
            "do not: it is faster than any machine; give groups, or copies gather or row"
        )
    return said


def _no_predictor_file(settings: Settings) -> str | None:
    """Why a trained predictor is not what is charged; None: it is."""
    if predictor_of(settings) != "rank":
        return f"predictor is {predictor_of(settings)!r}; give predictor rank"
    if settings.model_as is not None:
        return f"the published predictor of {settings.model_as} is charged"
    return None


def _too_late(settings: Settings, costs: CostModel, slots: float, demand: float) -> list[str]:
    """Copies of one layer-step that cannot land behind the work they are hidden by."""
    policy = POLICIES[settings.policy]
    if policy.admits != "must" or trigger_of(settings) not in ("attn_in", "attn_out"):
        return []
    resident = min(slots, demand)
    window_s = costs.attention_s(1, 1) + costs.gate_s(1) + costs.ffn_gpu_s(round(resident), 1)
    loads = round(demand)  # a policy that must admit may have to load all of it
    n_swaps = -(-loads // costs.swap_neurons)
    swap_s = costs.swap_s(costs.swap_neurons)
    if n_swaps * swap_s <= window_s:
        return []
    fit = int(window_s / swap_s) * costs.swap_neurons
    return [
        f"loads cannot fit the overlap window: a layer's work hides {window_s * 1e3:.2f} ms of "
        f"copies, about {fit} neurons; {loads} would take {n_swaps * swap_s * 1e3:.2f} ms"
    ]

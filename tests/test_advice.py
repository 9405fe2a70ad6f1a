"""Each warning fires where the shape alone forbids, and keeps quiet where it does not."""

from __future__ import annotations

import dataclasses

import pytest
from toys import random_trace

from kairox_sim import Settings, simulate
from kairox_sim.advice import advice, demand_of
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape

N_LAYERS, N_NEURONS = 32, 11008
SHAPE = dataclasses.replace(find_shape("prosparse-7b"), predicted_share=0.2, active_share=0.1)


def costs(gating: str = "predicted", machine: str = "pc1", trace_neurons: int = N_NEURONS,
          **more: object) -> CostModel:  # fmt: skip
    return costs_for(
        load_profile(machine), SHAPE, gating, trace_layers=N_LAYERS, trace_neurons=trace_neurons,
        **more,
    )  # fmt: skip


def said(slots: int, cost_model: CostModel | None = None, demand: float | None = None,
         asked: object = "vram", **given: object) -> list[str]:  # fmt: skip
    chosen = Settings().with_overrides({"gating": "predicted", "slots": asked, **given})
    told = advice(chosen, cost_model or costs(), [slots] * N_LAYERS, demand)
    return [text.split(":")[0] for text in told]


def test_demand_is_the_published_share_of_what_is_evaluated() -> None:
    assert demand_of(costs()) == pytest.approx(0.2 * N_NEURONS)
    assert demand_of(costs(trace_neurons=1000)) == pytest.approx(200)
    assert demand_of(costs("exact")) == pytest.approx(0.1 * N_NEURONS)
    assert demand_of(costs("dense")) == N_NEURONS
    silent = dataclasses.replace(SHAPE, predicted_share=None, active_share=None)
    assert demand_of(dataclasses.replace(costs(), shape=silent)) is None
    only_active = dataclasses.replace(SHAPE, predicted_share=None)
    assert demand_of(dataclasses.replace(costs(), shape=only_active)) == pytest.approx(1100.8)


LRU_CLIFF = "budget below one step's demand"
HEADROOM = "no policy headroom"
POPULATION = "budget above population"
WINDOW = "loads cannot fit the overlap window"


@pytest.mark.parametrize(
    ("slots", "policy", "warned"),
    [
        (2000, "lru", True),  # 2201.6 are evaluated
        (2200, "lru", True),
        (2203, "lru", False),
        (2000, "fifo", True),
        (2000, "tam", False),  # a filter chooses whom it admits
        (2000, "static", False),
    ],
)
def test_a_policy_that_must_admit_falls_off_the_cliff(
    slots: int, policy: str, warned: bool
) -> None:
    assert (LRU_CLIFF in said(slots, policy=policy)) == warned


@pytest.mark.parametrize(("slots", "warned"), [(1000, True), (1100, True), (1101, False)])
@pytest.mark.parametrize("policy", ["tam", "lru", "static"])
def test_no_headroom_below_half_the_demand(slots: int, warned: bool, policy: str) -> None:
    assert (HEADROOM in said(slots, policy=policy)) == warned
    assert HEADROOM not in said(slots, policy="all")


def test_a_known_demand_goes_before_the_published_one() -> None:
    assert said(2000, policy="lru", demand=100.0) == []
    assert LRU_CLIFF in said(4000, policy="lru", demand=5000.0)
    assert said(2000, policy="lru", demand=0.0) == []


def test_budget_above_population() -> None:
    assert said(N_NEURONS, asked=N_NEURONS + 1) == [POPULATION]
    assert said(N_NEURONS, asked=N_NEURONS) == []
    assert said(N_NEURONS, asked=[5] * (N_LAYERS - 1) + [N_NEURONS + 1]) == [POPULATION]
    # Slots count neurons of the trace, also in a stand-in.
    assert POPULATION in said(896, costs(trace_neurons=896), asked=11008)
    assert POPULATION not in said(896, costs(trace_neurons=896), asked=896)


def test_a_budget_of_nothing_is_said() -> None:
    assert said(0, asked=0) == ["the budget is smaller than one neuron"]
    assert said(0, asked=0, policy="none") == []


@pytest.mark.parametrize(
    ("given", "demand", "warned"),
    [
        ({"policy": "lru", "trigger": "attn_out"}, 2000.0, True),
        ({"policy": "lru", "trigger": "attn_in"}, 2000.0, True),
        ({"policy": "lru", "trigger": "attn_out"}, 16.0, False),  # one swap of 16 lands in time
        ({"policy": "lru", "trigger": "after"}, 2000.0, False),  # nothing waits for it
        ({"policy": "tam", "trigger": "attn_out"}, 2000.0, False),  # loads what it can
        ({"policy": "static"}, 2000.0, False),
    ],
)
def test_loads_that_cannot_land_behind_a_layer(
    given: dict[str, object], demand: float, warned: bool
) -> None:
    assert (WINDOW in said(4000, demand=demand, **given)) == warned


def test_the_window_is_the_layers_own_work_by_hand() -> None:
    model = costs()
    window_s = model.attention_s(1, 1) + model.gate_s(1) + model.ffn_gpu_s(2000, 1)
    fit = int(window_s / model.swap_s(16)) * 16
    chosen = Settings(policy="lru", trigger="attn_out", gating="predicted", slots=4000)
    (text,) = advice(chosen, model, [4000] * N_LAYERS, 2000.0)
    assert f"about {fit} neurons; 2000 would take {125 * model.swap_s(16) * 1e3:.2f} ms" in text
    enough = fit - fit % 16
    assert said(4000, demand=float(enough) / 2, policy="lru", trigger="attn_out") == []


def test_of_few_layers_a_placement_cannot_be_another_layers() -> None:
    shipped = Settings(policy="static", placement="solver-shipped", gating="predicted", slots=4000)
    (text,) = advice(shipped, costs(), [4000] * 10)
    assert "has the right ids: of 10 layers" in text
    assert advice(shipped, costs(), [4000] * 11) == []
    right = shipped.with_overrides({"placement": "solver"})
    assert advice(right, costs(), [4000] * 10) == []


def test_a_run_says_it_with_what_it_evaluated() -> None:
    """About 13 of 64 neurons a layer-step."""
    trace = random_trace()
    base = Settings(policy="lru", model_as="prosparse-7b", prediction="perfect")
    tight = simulate(trace, base.with_overrides({"slots": 4}))
    assert sum(LRU_CLIFF in text for text in tight.warnings) == 1
    assert sum(HEADROOM in text for text in tight.warnings) == 1
    roomy = simulate(trace, base.with_overrides({"slots": 40}))
    assert roomy.warnings == ()

"""simulate(): what goes together, what is refused, what is said beside the numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from toys import header, of_chunks, random_trace

from kairox_sim import KairoxError, Settings, simulate, summarise
from kairox_sim.advice import advice
from kairox_sim.costs import costs_for
from kairox_sim.hardware import load_profile
from kairox_sim.metrics import RunResult
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import Trace, write_trace

TRACE = random_trace()
PRIOR = random_trace(seed=1, source="b")
BASE = Settings(slots=24, model_as="prosparse-7b", prediction="perfect")


def run(trace: Trace = TRACE, settings: Settings = BASE, **other: object) -> RunResult:
    of_call = ("hardware", "link", "prior", "on_step", "keep_slices")
    rest = {k: v for k, v in other.items() if k in of_call}
    values = {k: v for k, v in other.items() if k not in of_call}
    return simulate(trace, settings.with_overrides(values), **rest)  # type: ignore[arg-type]


def assert_identities(result: RunResult) -> None:
    totals = result.totals
    assert totals["evaluated"] == totals["hit_on_time"] + totals["fetched"] + totals["residual"]
    assert totals["loads"] == (
        totals["used"] + totals["wasted"] + totals["cancelled"] + totals["unused_yet"]
    )
    assert totals["late"] <= totals["residual"] or totals["late"] == 0
    parts = ("hit_on_time", "fetched_share", "residual_share")
    assert sum(result.summary[part] for part in parts) == pytest.approx(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_and_its_counts_add_up(policy: str) -> None:
    result = run(policy=policy, prior=PRIOR)
    assert_identities(result)
    assert result.totals["evaluated"] == sum(
        step.active(layer).size for step in TRACE.steps() for layer in range(2)
    )
    assert result.summary["n_decode"] == 24
    assert len(result.steps) == 25
    if POLICIES[policy].admits != "never":  # not in vain
        assert result.totals["used"] > 0
        assert result.summary["loads_per_layer_step"] > 0


@pytest.mark.parametrize("trigger", ["attn_in", "attn_out", "serial", "after", "instant"])
@pytest.mark.parametrize("late", ["cpu", "stall"])
def test_every_trigger_keeps_the_identities(trigger: str, late: str) -> None:
    result = run(policy="lru", trigger=trigger, late=late)
    assert_identities(result)
    assert result.totals["used"] > 0


def test_stalling_waits_for_what_would_be_late() -> None:
    choices = {"policy": "lru", "trigger": "attn_out", "link": "pcie3", "slots": 16}
    residual, stalled = (run(late=late, **choices).summary for late in ("cpu", "stall"))
    assert residual["late_share"] > 0
    assert residual["wait_io_s"] == 0
    assert stalled["late_share"] == 0
    assert stalled["wait_io_s"] > 0
    assert stalled["hit_on_time"] > residual["hit_on_time"]


def test_none_is_slowest_and_all_is_fastest() -> None:
    speed = {p: run(policy=p, prior=PRIOR).summary["tok_s"] for p in ("none", "static", "all")}
    assert speed["none"] < speed["static"] < speed["all"]


def test_lru_by_hand() -> None:
    """Three slots in one layer, 20 accesses in 10 decode steps after a prefill of {0, 1} twice.

    seen    hits  loads  evicted                       | resident after
    0 1     (prefill: 2 misses, 2 loads)               | 0 1
    0 1     2
    0 2     1     2                                    | 0 1 2
    1 2     2
    3 4     0     3 4    0, last seen earliest, and 1  | 2 3 4
    3 4     2
    0 2     1     0      3 (of the tie 3, 4 the lower) | 0 2 4
    0 4     2
    5 6     0     5 6    2, then 0 (of the tie 0, 4)   | 4 5 6
    4 7     1     7      5, never used: wasted         | 4 6 7
    4 7     1 + 1 (7 landed meanwhile)
    Decode: 13 hits of 22. Never used at the end: 6.
    """
    sets = [[0, 1], [0, 2], [1, 2], [3, 4], [3, 4], [0, 2], [0, 4], [5, 6], [4, 7], [4, 7]]
    chunks = [[[[0, 1], [0, 1]]], *([[ids]] for ids in sets)]
    trace = of_chunks(chunks, 8, n_prefill=1)
    result = run(trace, policy="lru", slots=3, model_as="tiny-reglu")
    summary, totals = result.summary, result.totals
    hits = [2, 1, 2, 0, 2, 1, 2, 0, 1, 2]
    assert result.steps["hit_on_time"].tolist() == [0, *hits]
    assert summary["hit_on_time"] == pytest.approx(13 / 20)  # decode only, unique per step
    # Resident before this step's landings: without the 7 that are used the step after their load.
    assert summary["hit_resident"] == pytest.approx(6 / 20)
    assert summary["residual_share"] == pytest.approx(7 / 20)
    assert summary["residual_per_token"] == pytest.approx(7 / 10)
    assert summary["late_share"] == 0
    assert summary["loads_per_layer_step"] == pytest.approx(7 / 10)
    assert summary["wasted_share"] == pytest.approx(1 / 8)
    assert summary["evaluated_per_token"] == 2
    assert totals["evaluated"] == 22  # prefill counts {0, 1} once, not once per token
    assert totals["loads"] == 9
    assert (totals["used"], totals["wasted"], totals["cancelled"]) == (7, 1, 0)
    assert totals["unused_yet"] == 1
    bundle_bytes = find_shape("tiny-reglu").bundle_bytes("exact") * 896 / 8
    assert summary["h2d_bytes_per_token"] == pytest.approx(7 * bundle_bytes / 10)
    warm = summarise(result.steps, 1, warmup=2)
    assert warm["hit_on_time"] == pytest.approx(10 / 16)


def test_paths_and_traces_are_the_same(tmp_path: Path) -> None:
    path = write_trace(TRACE, tmp_path / "t.kxtrace")
    prior = write_trace(PRIOR, tmp_path / "p.kxtrace")
    results = [
        simulate(trace, BASE.with_overrides({"policy": "static"}), prior=given, hardware=hardware)
        for trace, given, hardware in (
            (TRACE, PRIOR, load_profile("pc1")),
            (path, prior, "pc1"),
            (str(path), str(prior), "pc1"),
        )
    ]
    assert results[0].summary["tok_s"] > 0
    for other in results[1:]:
        assert other.summary == pytest.approx(results[0].summary, nan_ok=True)
        assert other.provenance == results[0].provenance
        assert other.settings["prior"] == str(prior)
        assert other.settings["prior_sha256"] == PRIOR.sha256


@pytest.mark.parametrize("given", ["missing.kxtrace", Path("missing.kxtrace")])
def test_missing_trace(given: str | Path) -> None:
    with pytest.raises(KairoxError, match=r"missing\.kxtrace"):
        simulate(given, BASE)


def test_the_link_matters() -> None:
    slow = run(policy="lru", trigger="serial", link="pcie3")
    fast = run(policy="lru", trigger="serial", link="pcie5")
    assert slow.labels["hardware"] == "pc1+pcie3"
    assert fast.summary["tok_s"] > 1.1 * slow.summary["tok_s"]


def test_labels_say_what_the_numbers_are_of() -> None:
    labels = run(link="pcie3", controller="anb").labels
    assert labels["setting"] == "tam+anb 24"
    assert labels["time"] == "simulated"
    assert labels["costs"] == "stand-in: toy activations, prosparse-7b costs"
    assert labels["prediction"] == "perfect prediction"
    assert run(policy="lru").labels["prediction"] == "no prediction"
    assert run(prediction="0.9,0.8").labels["prediction"] == (
        "prediction of recall 0.9, precision 0.8"
    )
    predicted = run(policy="static", prior=PRIOR, gating="predicted").labels
    assert predicted["prediction"] == "perfect prediction"
    assert "perfect screen" in run(gating="screened").labels["evaluated"]
    made_up = random_trace(synthetic=True)
    assert run(made_up).labels["activations"] == "synthetic"


def test_the_budget_is_said_in_neurons_of_the_trace_and_of_the_model() -> None:
    said = run(policy="lru").labels["budget"]
    assert said.startswith("24 of 64 neurons of a layer resident, for 4,128 of 11,008 of prosparse")
    assert " of 12.88 GB of device memory at " in said
    assert run(policy="all").labels["budget"].endswith("tokens of context, so it does not fit")
    own = run(random_trace(6, 896, 3, model="tiny-reglu", d_model=192), model_as=None)
    assert own.labels["budget"].startswith("24 of 896 neurons of a layer resident; 1.3")


def test_own_costs_are_no_stand_in() -> None:
    trace = random_trace(6, 896, 3, model="tiny-reglu", d_model=192)
    result = run(trace, model_as=None)
    assert result.labels["costs"] == "tiny-reglu, its own costs"
    assert result.summary["tok_s_scaled"] == result.summary["tok_s"]
    assert run().summary["tok_s_scaled"] == pytest.approx(run().summary["tok_s"] * 2 / 32)


def test_prediction_quality_is_measured() -> None:
    trace = random_trace(n_decode=60)
    summary = run(trace, prediction="0.7,0.5").summary
    perfect = run(trace).summary
    assert summary["recall"] < perfect["recall"]
    assert summary["precision"] < perfect["precision"]
    again = run(trace, prediction="0.7,0.5").summary
    assert again == pytest.approx(summary, nan_ok=True)
    assert run(trace, prediction="0.7,0.5", seed=1).summary["recall"] != summary["recall"]


# -- what does not go together ------------------------------------------------------------------


def test_trace_of_an_unknown_model() -> None:
    with pytest.raises(KairoxError, match=r"model 'toy', whose costs are not known .* --as"):
        run(model_as=None)
    with pytest.raises(KairoxError, match="unknown model 'prosparse'"):
        run(model_as="prosparse")


def test_trace_that_says_it_is_a_model_it_is_not() -> None:
    with pytest.raises(KairoxError, match="'tiny-reglu' with n_layers 2, and that model has 6"):
        run(random_trace(model="tiny-reglu"), model_as=None)
    with pytest.raises(KairoxError, match="with d_model 32, and that model has 192"):
        run(random_trace(6, 896, 1, model="tiny-reglu"), model_as=None)


def test_budgets_for_another_number_of_layers() -> None:
    with pytest.raises(KairoxError, match="3 numbers and the trace or model 2 layers"):
        run(slots=(1, 2, 3))


def test_controller_and_policy_with_nothing_in_common() -> None:
    with pytest.raises(KairoxError, match="nothing in common"):
        run(policy="lru", controller="anb")


def test_static_without_a_prior_or_with_one_that_saw_the_tokens() -> None:
    with pytest.raises(KairoxError, match="needs a prior"):
        run(policy="static")
    with pytest.raises(KairoxError, match="overlaps the tokens"):
        run(policy="static", prior=random_trace(seed=1))
    with pytest.raises(KairoxError, match="overlaps the tokens"):
        run(policy="tam", prior=TRACE)


def test_what_does_not_fit_is_refused_but_the_bound_is_not() -> None:
    with pytest.raises(KairoxError, match=r"does not fit on pc1: attention .* = 14\.\d+ GB > 12"):
        run(slots=64)
    with pytest.raises(KairoxError, match=r"are counted in the trace's 64 neurons of a layer\)"):
        run(slots=5000)
    bound = run(policy="all")
    assert bound.provenance["fits"] is False
    assert any("does not fit" in text for text in bound.warnings)
    assert run().provenance["fits"] is True


def test_gating_must_mean_what_the_trace_says() -> None:
    with pytest.raises(KairoxError, match="say prediction = perfect"):
        run(gating="predicted", prediction="trace")
    told = run(gating="predicted", prediction="0.9,0.9")
    assert told.labels["prediction"] == "prediction of recall 0.9, precision 0.9"
    assert told.totals["evaluated"] != run().totals["evaluated"]  # its cost is what was predicted
    assert run(gating="dense", policy="none").totals["evaluated"] == 25 * 2 * 64  # every neuron
    lossy = random_trace(gating="predicted", complete=False)
    with pytest.raises(KairoxError, match="recorded with gating 'predicted'"):
        run(lossy)
    assert run(lossy, gating="predicted", policy="lru", prediction="trace").labels[
        "prediction"
    ] == ("recorded prediction")


@pytest.mark.parametrize("dispatch", ["gpu", "cost"])
def test_a_miss_is_not_copied_twice(dispatch: str) -> None:
    with pytest.raises(KairoxError, match=r"copy it again.*trigger=serial"):
        run(policy="lru", dispatch=dispatch)
    once = run(policy="lru", dispatch=dispatch, trigger="serial")
    assert once.totals["loads"] > 0
    assert run(policy="static", dispatch=dispatch, prior=PRIOR).totals["fetched"] > 0


def test_predictions_must_be_there() -> None:
    with pytest.raises(KairoxError, match="the trace has none"):
        run(prediction="trace")
    assert run(prediction="trace", policy="lru").summary["n_decode"] == 24  # it needs none


def test_published_predictor_must_be_known() -> None:
    with pytest.raises(KairoxError, match="no published predictor"):
        run(model_as="tiny-reglu", predictor="rank")


# -- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, "1kB"])
@pytest.mark.parametrize("policy", ["tam", "lru", "lfu", "static"])
def test_a_budget_below_one_neuron_is_all_residual(policy: str, slots: object) -> None:
    result = run(policy=policy, slots=slots, prior=PRIOR)
    assert result.provenance["slots"] == [0, 0]
    assert any("0 slots, everything is residual" in text for text in result.warnings)
    assert result.totals["residual"] == result.totals["evaluated"] > 0
    assert result.totals["loads"] == 0
    none = run(policy="none")
    assert none.warnings == ()
    assert none.totals["evaluated"] == result.totals["evaluated"]


def test_no_policy_headroom_is_said() -> None:
    few = run(policy="lru", slots=3)
    assert any(text.startswith("no policy headroom: 3 slots") for text in few.warnings)
    assert run(policy="lru", slots=24).warnings == ()
    assert any("budget below one step's demand" in text for text in few.warnings)
    filtered = run(policy="tam", slots=3).warnings  # chooses what to keep, of next to nothing
    assert [text.partition(":")[0] for text in filtered] == ["no policy headroom"]


def test_a_budget_below_one_group_is_said() -> None:
    few = run(policy="tam_paper", groups="random:11008", slots=24)
    assert any(text.startswith("the budget is smaller than one group") for text in few.warnings)
    assert few.totals["loads"] == 0
    for size in (11009, 10**18):
        with pytest.raises(KairoxError, match="has 11008 neurons"):
            run(policy="tam_paper", groups=f"random:{size}")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"policy": "lru", "placement": "solver"}, "start is 'empty'"),
        ({"policy": "static", "late": "stall"}, "moves nothing"),
        ({"policy": "static", "copies": "row"}, "moves nothing"),
        ({"policy": "static", "copies_per_sync": 4}, "moves nothing"),
        ({"policy": "lru", "groups": "random:2", "swap_neurons": 2}, "a swap is a group"),
        ({"policy": "lru", "lookahead_from": 2}, "trigger is 'after'"),
        (
            {"policy": "lru", "dispatch": "gpu", "trigger": "serial", "handovers": 2},
            "dispatch is 'gpu'",
        ),
    ],
)
def test_what_changes_nothing_is_said(changed: dict[str, Any], why: str) -> None:
    key = list(changed)[-1]
    without = {k: v for k, v in changed.items() if k != key}
    result, other = run(**changed, prior=PRIOR), run(**without, prior=PRIOR)
    mine = [text for text in result.warnings if text.startswith(f"{key} ")]
    assert len(mine) == 1
    assert "plays no part" in mine[0]
    assert why in mine[0]
    pd.testing.assert_frame_equal(result.steps, other.steps)
    assert not any("plays no part" in text for text in other.warnings)


def test_a_copy_per_matrix_needs_groups() -> None:
    said = [run(policy="lru", copies="matrix", **g).warnings for g in ({}, {"groups": "random:2"})]
    assert [any("side by side" in text for text in texts) for texts in said] == [True, False]


@pytest.mark.parametrize("slots", [24, "density"])
def test_a_prior_without_tokens_teaches_nothing_and_is_refused(slots: object) -> None:
    empty = PRIOR.select(seqs=[], steps=[])
    with pytest.raises(KairoxError, match="has no tokens"):
        run(policy="static", slots=slots, prior=empty)


def test_no_system_sets_what_changes_nothing() -> None:
    pc1 = load_profile("pc1")
    shape = find_shape("prosparse-7b")
    costs = costs_for(pc1, shape, "oracle", trace_layers=6, trace_neurons=896)
    for name in SYSTEMS:
        said = advice(Settings.of({"system": name}), costs, [500] * 6)
        assert not any("plays no part" in text for text in said), name


def test_more_slots_than_neurons_is_said() -> None:
    n, pc1 = TRACE.header.n_neurons, load_profile("pc1")
    roomy = pc1.model_copy(update={"vram_bytes": pc1.vram_bytes.model_copy(update={"value": 1e12})})
    more = run(policy="lru", slots=n + 1, hardware=roomy)
    assert any(text.startswith(f"budget above population: {n + 1} slots") for text in more.warnings)
    assert run(policy="lru", slots=n, hardware=roomy).warnings == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_without_tokens_is_an_empty_report(policy: str) -> None:
    empty = of_chunks([], 64, n_layers=2)
    result = run(empty, policy=policy, prior=PRIOR)
    assert result.summary["n_decode"] == 0
    assert all(math.isnan(v) for name, v in result.summary.items() if name != "n_decode")
    assert set(result.totals.values()) == {0}
    assert "no decode steps" in result.warnings[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_layers", [1, 2])
def test_one_token(policy: str, n_layers: int) -> None:
    trace = of_chunks([[[[1, 5]]] * n_layers], 64, n_layers=n_layers)
    prior = random_trace(n_layers=n_layers, source="b")
    result = run(trace, policy=policy, prior=prior)
    assert_identities(result)
    assert result.totals["evaluated"] == 2 * n_layers
    assert result.summary["tok_s"] > 0


def test_only_prefill() -> None:
    trace = of_chunks([[[[1, 2], [2, 3]]]], 64, n_prefill=1)
    result = run(trace)
    assert result.summary["ttft_s"] > 0
    assert math.isnan(result.summary["tok_s"])


def test_a_cut_trace_is_said_to_be_cut() -> None:
    cut = Trace(
        header(2, 64),
        {name: array.copy() for name, array in TRACE._columns.items()},
        truncated_at=28,
        warnings=("truncated at token 28",),
    )
    assert "truncated at token 28" in run(cut).warnings


def test_progress_and_slices() -> None:
    seen = []
    result = run(on_step=seen.append, keep_slices=True)
    assert len(seen) == 25
    assert {s.lane for s in result.slices} >= {"gpu", "cpu", "h2d"}
    assert run().slices == ()


def test_the_same_bytes_for_the_same_inputs() -> None:
    one, two = run(controller="anb"), run(controller="anb")
    assert one.to_dict() == two.to_dict()
    assert one.steps.equals(two.steps)
    assert run(hardware="pc2").provenance["profile_sha256"] != one.provenance["profile_sha256"]
    assert np.isfinite(one.steps["wall_s"]).all()

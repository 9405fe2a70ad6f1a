"""Synthetic traces: every statistic a workload claims comes out of what it makes."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim import workload_sets
from kairox_sim.cache import NeuronCache
from kairox_sim.cli import main
from kairox_sim.commands.workload import with_fields
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.firing_rates import Rates, beta_for, carried_by
from kairox_sim.groups import co_activation_within, group_neurons
from kairox_sim.model import CATALOGUE
from kairox_sim.policies import Lru
from kairox_sim.settings import require_usable
from kairox_sim.sweeps import Sweep, sweep
from kairox_sim.trace import read_trace, write_trace
from kairox_sim.trace_stats import counts, trace_stats
from kairox_sim.workload import Workload, expected_co_activation, fit_co_activation, generate
from kairox_sim.workload_presets import CO_ACTIVATION, PRESETS, find_workload
from kairox_sim.workload_stats import hot_overlap, measure

REGLU = Rates(0.112, 0.43, 0.80)
SMALL = Workload("small", "toy", n_layers=2, n_neurons=1200, d_model=8, active=REGLU)
WITH_PREDICTED = dataclasses.replace(SMALL, predicted=Rates(0.23, 0.47, 0.70), recall=0.95)


def measured(workload, n_tokens, **options):
    trace = generate(workload, n_tokens, **options)
    return {s.name: s.measured for s in measure(trace, workload)}


# -- rates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "top_share", "carries", "beta", "percent_of_top"),
    [  # top 2.5, 5, 10, 20, 40, 60 %; the middle row is the model-wide figure of the same paper
        (0.03, 0.26, 0.80, (0.343, 11.08), (20, 32, 50, 72, 92, 98)),
        (0.03, 0.17, 0.80, (0.182, 5.88), (27, 43, 63, 85, 98, 100)),
        (0.18, 0.43, 0.80, (0.753, 3.43), (10, 18, 31, 51, 77, 92)),
        (0.112, 0.43, 0.80, (0.834, 6.61), (11, 19, 32, 52, 77, 92)),
        (0.23, 0.47, 0.70, (2.12, 7.10), (7, 12, 22, 38, 63, 81)),
    ],
)
def test_beta_reproduces_published_coverage(mean, top_share, carries, beta, percent_of_top):
    found = beta_for(mean, top_share, carries)
    assert found == pytest.approx(beta, rel=0.01)
    assert found[0] / sum(found) == pytest.approx(mean)
    assert carried_by(*found, top_share) == pytest.approx(carries, abs=1e-4)
    curve = [100 * carried_by(*found, share) for share in (0.025, 0.05, 0.1, 0.2, 0.4, 0.6)]
    assert curve == pytest.approx(percent_of_top, abs=1.0)  # both rounded


def test_carried_share_against_a_large_sample():
    sample = np.sort(np.random.default_rng(0).beta(0.5, 4.0, 400_000))[::-1]
    for share in (0.05, 0.3, 0.7):
        top = sample[: round(share * sample.size)].sum() / sample.sum()
        assert carried_by(0.5, 4.0, share) == pytest.approx(top, abs=0.004)


def test_uniform_rates_by_hand():
    # Beta(1, 1): the top half lies in [1/2, 1] and carries 3/4 of the mass.
    assert carried_by(1.0, 1.0, 0.5) == pytest.approx(0.75, abs=1e-6)


@given(
    mean=st.floats(0.01, 0.4), share=st.floats(0.05, 0.6), part=st.floats(0.1, 0.9),
    n=st.integers(50, 400),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_quantiles_have_the_mean_and_are_rates(mean, share, part, n):
    most = min(1.0, share / mean)
    carries = share + part * (0.9 * most - share)
    if carries <= share:
        return
    rates = Rates(mean, share, carries).quantiles(n)
    assert rates.mean() == pytest.approx(mean, rel=1e-6)
    assert ((rates >= 0) & (rates <= 1)).all()
    assert (np.diff(rates) >= 0).all()


@pytest.mark.parametrize("carries", [0.43, 0.2, 1.0])
def test_impossible_skew_is_refused(carries):
    with pytest.raises(KairoxError, match="cannot carry"):
        Rates(0.1, 0.43, carries)


# -- what a trace claims ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_preset_statistics(name):
    """In two layers, of fewer neurons than the model's: shares do not depend on the width."""
    full = find_workload(name)
    small = dataclasses.replace(full, n_neurons=2048)
    trace = generate(small, 768, n_layers=2)
    targets = {s.name: s for s in measure(trace, small)}
    assert targets["density"].target == full.active.mean
    for s in targets.values():
        if s.target is not None:
            assert s.measured == pytest.approx(s.target, abs=0.015, rel=0.02), s
    assert "density" in full.source
    assert trace.header.synthetic


def test_presets_have_the_shapes_of_the_catalogue():
    for w in PRESETS.values():
        shape = CATALOGUE[w.model]
        assert (w.n_layers, w.n_neurons, w.d_model) == (
            shape.n_layers, shape.n_neurons, shape.d_model,
        )  # fmt: skip


def test_density_of_each_layer_follows_the_profile():
    rising = dataclasses.replace(SMALL, n_layers=3, layer_profile=(1.0, 3.0))
    found = trace_stats(generate(rising, 400)).density
    # 1 : 2 : 3, on average 0.112
    assert found == pytest.approx([0.056, 0.112, 0.168], rel=0.03)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_persistence_is_p_of_staying_active(rho, monkeypatch):
    """Neurons of one rate p: P(1 -> 1) = p + rho (1 - p), from the first token on."""
    monkeypatch.setattr(workload_sets, "_BLOCK_VALUES", 3 * 1200)  # across blocks of 3 tokens, too
    workload = dataclasses.replace(SMALL, persistence=rho)
    trace = generate(workload, 600, n_layers=1)
    rows = np.unpackbits(trace.bits, axis=1, count=1200, bitorder="little")
    rate = rows.mean(axis=0)
    some = (rate > 0.25) & (rate < 0.35)
    before, after = rows[:-1, some], rows[1:, some]
    stays = (before & after).sum() / before.sum()
    assert stays == pytest.approx(0.3 + rho * 0.7, abs=0.04)
    assert rows.mean() == pytest.approx(0.112, rel=0.05)
    assert rows[0].mean() == pytest.approx(0.112, abs=0.03)  # stationary: no warming up
    assert measured(workload, 600)["persistence"] == pytest.approx(rho, abs=0.02)


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("base", [SMALL, WITH_PREDICTED])
def test_one_hit_share(rho, base):
    workload = dataclasses.replace(base, one_hit_share=0.3, persistence=rho)
    trace = generate(workload, 400)
    found = {s.name: s for s in measure(trace, workload)}
    assert found["one_hit_share"].measured == pytest.approx(0.3, abs=0.01)
    assert found["density"].measured == pytest.approx(0.112, rel=0.04)
    if base is SMALL:
        assert (counts(trace) == 1).sum() / (counts(trace) > 0).sum() == pytest.approx(
            0.3, abs=0.01
        )
    else:
        assert found["predicted"].measured == pytest.approx(0.23, rel=0.04)


def test_one_hit_share_that_is_exceeded_anyway_is_refused():
    with pytest.raises(KairoxError, match="anyway"):
        generate(dataclasses.replace(SMALL, one_hit_share=0.05), 5)


def test_a_topic_shift_exchanges_hot_neurons():
    share, top = 0.4, 0.2
    workload = dataclasses.replace(SMALL, shift_every=1500, shift_share=share)
    trace = generate(workload, 3000)
    topics = [trace.select(steps=range(s, s + 750)) for s in (0, 750, 1500, 2250)]
    within = [hot_overlap(topics[0], topics[1], top), hot_overlap(topics[2], topics[3], top)]
    across = hot_overlap(topics[1], topics[2], top)
    # Hot ones stay with 1 - share + share * top, but for what sampling blurs within a topic.
    kept = 1 - share + share * top
    assert min(within) > 0.75
    assert across == pytest.approx(np.mean(within) * kept / (2 - kept), abs=0.07)
    assert trace_stats(trace).density == pytest.approx(0.112, rel=0.03)


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_co_activation_is_what_was_asked(rho):
    fitted = fit_co_activation(dataclasses.replace(SMALL, n_neurons=2400, group_size=16), 0.4)
    assert expected_co_activation(fitted) == pytest.approx(0.4)
    workload = dataclasses.replace(fitted, persistence=rho)
    trace = generate(workload, 500)
    chunks = group_neurons(None, 2, 2400, 16, "chunks")
    assert co_activation_within(chunks, trace).mean() == pytest.approx(0.4, abs=0.012)
    strangers = group_neurons(None, 2, 2400, 16, "random")
    assert co_activation_within(strangers, trace).mean() == pytest.approx(0.112, abs=0.012)
    marginal = counts(trace).mean(axis=1) / 500
    assert marginal == pytest.approx([0.112, 0.112], rel=0.08)


def test_published_co_activation_is_reached_on_predicted_sets():
    workload = find_workload("prosparse-7b")
    assert expected_co_activation(workload) == pytest.approx(CO_ACTIVATION["prosparse-7b"])
    assert 0 < workload.co_activation < 0.5
    narrow = dataclasses.replace(workload, n_neurons=4096, n_layers=2)
    assert measured(narrow, 400)["co-activation"] == pytest.approx(0.275, abs=0.01)


def test_co_activation_out_of_reach_is_refused():
    in_groups = dataclasses.replace(SMALL, group_size=16)
    for target in (0.05, 0.99):
        with pytest.raises(KairoxError, match="allow"):
            fit_co_activation(in_groups, target)


def test_recall_and_precision():
    found = measured(WITH_PREDICTED, 300)
    assert found["recall"] == pytest.approx(0.95, abs=0.01)
    assert found["precision"] == pytest.approx(0.95 * 0.112 / 0.23, abs=0.01)
    assert found["predicted"] == pytest.approx(0.23, rel=0.02)


def test_hot_neurons_do_not_lie_together():
    hot = np.sort(np.argsort(-counts(generate(SMALL, 300))[0])[:240])
    # Of 240 among 1200 in random order, each has its next neighbour hot with 1/5: 48, sd < 7.
    assert int((np.diff(hot) == 1).sum()) == pytest.approx(48, abs=28)


# -- the trace itself ------------------------------------------------------------------------------


def test_same_seed_same_trace_and_each_seed_matters():
    first = generate(SMALL, 20, seed=3)
    assert generate(SMALL, 20, seed=3).sha256 == first.sha256
    assert generate(SMALL, 20, seed=4).sha256 != first.sha256
    assert generate(SMALL, 20, seed=3, model_seed=1).sha256 != first.sha256


def test_a_prior_is_of_the_same_model_and_another_text():
    evaluated, prior = generate(SMALL, 600, seed=1), generate(SMALL, 600, seed=0)
    require_usable(prior, evaluated)
    same = hot_overlap(prior, evaluated, 0.2)
    other = hot_overlap(generate(SMALL, 600, model_seed=1), evaluated, 0.2)
    assert same > 0.7
    assert other == pytest.approx(0.2 / 1.8, abs=0.05)  # as many in common as by chance
    with pytest.raises(KairoxError, match="same model"):
        require_usable(generate(SMALL, 5, model_seed=1), evaluated)
    with pytest.raises(KairoxError, match="overlaps"):
        require_usable(generate(SMALL, 9, seed=1), evaluated)


def test_prefill_is_one_chunk_and_the_trace_survives_its_file(tmp_path):
    trace = generate(WITH_PREDICTED, 3, n_prefill=5)
    assert [(s.phase, s.n_tokens) for s in trace.steps()] == [("prefill", 5)] + [("decode", 1)] * 3
    assert read_trace(write_trace(trace, tmp_path / "made_up.arrow")).sha256 == trace.sha256


def test_gating():
    predicted = generate(WITH_PREDICTED, 4)
    assert (predicted.header.gating, predicted.header.complete) == ("predicted", False)
    step = predicted.at(0)
    assert np.array_equal(step.evaluated(0), step.predicted(0))
    assert not np.array_equal(step.evaluated(0), step.active(0))
    exact = generate(WITH_PREDICTED, 4, gating="exact")
    assert (exact.header.gating, exact.evaluated_bits) == ("exact", None)
    assert np.array_equal(exact.bits, predicted.bits)
    with pytest.raises(KairoxError, match="no predicted sets"):
        generate(SMALL, 4, gating="predicted")


@pytest.mark.parametrize(
    "wrong",
    [
        {"recall": 1.5}, {"persistence": 1}, {"one_hit_share": 1.0}, {"shift_every": 0},
        {"layer_profile": ()}, {"layer_profile": (1.0, math.nan)}, {"co_activation": 0.5},
        {"group_size": 0},
    ],
)  # fmt: skip
def test_wrong_workloads_are_refused(wrong):
    with pytest.raises(KairoxError, match=next(iter(wrong))):
        dataclasses.replace(SMALL, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"model_seed": -1}, {"predicted_trigger": "after"}], ids=str
)
def test_a_workload_is_not_made_of_what_no_run_could_use(wrong):
    said = "trigger 'after'" if "predicted_trigger" in wrong else next(iter(wrong))
    with pytest.raises(KairoxError, match=said):
        generate(SMALL, 4, **wrong)


# -- what caches make of it ------------------------------------------------------------------------


def lru_hits(trace, slots):
    """Share of what fires in layer 0 that was resident before; every copy lands at once."""
    n = trace.header.n_neurons
    cache = NeuronCache(1, n, slots, Lru(1, n), Fixed(), trigger="instant")
    hits = wanted = 0
    for step in trace.steps():
        active = step.active(0)
        cache.commit(swap.id for swap in cache.plan(0, active))
        hits += cache.lookup(0, active).hit_resident
        wanted += active.size
    return hits / wanted


def static_oracle(trace, slots):
    fired = np.sort(counts(trace), axis=1)[:, ::-1]
    return fired[:, :slots].sum() / fired.sum()


def test_persistence_decides_between_static_and_lru():
    """Independent tokens: the most frequent neurons are the best guess. With persistence the last
    tokens know more. Budget 22 % of the neurons, twice what a token needs."""
    slots = 264
    for rho, lru_wins in ((0.0, False), (0.6, True)):
        trace = generate(dataclasses.replace(SMALL, persistence=rho), 250, n_layers=1)
        fixed, lru = static_oracle(trace, slots), lru_hits(trace, slots)
        low, high = (fixed, lru) if lru_wins else (lru, fixed)
        assert low + 0.05 < high


def test_no_cache_hits_more_than_it_holds():
    """A neuron fires once per token at most: hits per token <= slots, so rate <= slots / active."""
    trace = generate(dataclasses.replace(SMALL, persistence=0.9), 60, n_layers=1)
    for slots in (20, 60):
        bound = slots / (counts(trace).sum() / 60)
        assert lru_hits(trace, slots) <= bound < 1
        assert static_oracle(trace, slots) <= bound


# -- labels and the command ------------------------------------------------------------------------


def test_tables_say_synthetic(tmp_path):
    path = write_trace(generate(SMALL, 4), tmp_path / "made_up.arrow")
    base = {"slots": 100, "policy": "lru", "trigger": "after", "model_as": "prosparse-7b"}
    row = sweep(Sweep(trace=str(path), base=base)).iloc[0]
    assert row["activations"] == "synthetic"
    assert row["costs"] == "stand-in: synthetic toy activations, prosparse-7b costs"


def test_figures_say_synthetic(tmp_path):
    from kairox_sim.plot_series import drawable, provenance

    path = write_trace(generate(SMALL, 4), tmp_path / "made_up.arrow")
    base = {"slots": 100, "policy": "lru", "trigger": "after", "model_as": "prosparse-7b"}
    table = sweep(Sweep(trace=str(path), base=base))
    assert "synthetic" in provenance(drawable(table), table)


def test_command_prints_what_came_out(tmp_path, capsys):
    out = tmp_path / "made_up.arrow"
    wanted = ["--tokens", "40", "--layers", "1", "--persistence", "0.4"]
    main_ok(["workload", "opt-6.7b", "-o", str(out), *wanted, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["synthetic"] is True
    assert said["statistics"]["persistence"]["target"] == 0.4
    assert said["statistics"]["density"]["measured"] == pytest.approx(0.0328, rel=0.05)
    assert read_trace(out).sha256 == said["sha256"]
    main_ok(["workload", "--list", "--json"])
    assert set(json.loads(capsys.readouterr().out)) == set(PRESETS)
    main_ok(["workload", "opt-6.7b", "-o", str(out), "--tokens", "4", "--layers", "1"])
    captured = capsys.readouterr()
    assert "synthetic: opt-6.7b" in captured.out
    assert "--as opt-6.7b" in captured.err


def test_command_refuses_with_one_line(tmp_path, capsys):
    out = str(tmp_path / "made_up.arrow")
    for arguments, said in (
        (["opt-7b", "-o", out], "no workload 'opt-7b'"),
        (["opt-6.7b"], "--list"),
        (["opt-6.7b", "-o", out, "--set", "density=0.1"], "no 'density' to set"),
        (["opt-6.7b", "-o", out, "--set", "recall=much"], "recall: "),
        (["opt-6.7b", "-o", out, "--set", "recall=2"], "recall is 2.0, not in"),
        (["opt-6.7b", "-o", out, "--layers", "33"], "1 to 32"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["workload", *arguments])
        assert stopped.value.code == 2
        assert re.search(re.escape(said), capsys.readouterr().err)
    assert not (tmp_path / "made_up.arrow").exists()


def test_set_fields():
    changed = with_fields(
        SMALL, {"active.mean": 0.2, "predicted.mean": 0.3, "layer_profile": [1, 2]}
    )
    assert changed.active == Rates(0.2, 0.43, 0.80)
    assert changed.predicted == Rates(0.3, 0.43, 0.80)  # skewed as the active ones
    assert changed.layer_profile == (1.0, 2.0)
    assert with_fields(WITH_PREDICTED, {"predicted": None}).predicted is None


def main_ok(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert not stopped.value.code


def test_a_fitted_workload_says_so() -> None:
    fitted = find_workload("prosparse-7b")
    assert fitted.co_activation > 0
    assert "co_activation fitted to C(16) = " in fitted.source

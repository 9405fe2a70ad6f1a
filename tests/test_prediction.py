"""What a predictor says: recorded for one trigger, perfect, or of a given quality."""

import numpy as np
import pytest

from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.prediction import OfQuality, Perfect, Recorded, predictions_for
from kairox_sim.trace import Trace
from tests.toy_engine import Journal, Scripted, costs, new_cache
from tests.toys import header, of_chunks

N = 400


def bits(*sets):
    rows = np.zeros((len(sets), 8), bool)
    for row, ids in zip(rows, sets, strict=True):
        row[list(ids)] = True
    return rows


def recorded(known=(True,) * 4):
    """A chunk of two tokens, then two decode steps; one layer of 8."""
    return Trace.from_arrays(
        header(1, 8, predicted_trigger="attn_out"),
        seq=[0] * 4,
        step=[0, 0, 1, 2],
        token=[1, 2, 3, 4],
        layer=[0] * 4,
        phase=[0, 0, 1, 1],
        bits=bits({0}, {0, 1}, {2}, {3}),
        evaluated_bits=bits({0, 4}, {0, 1}, {2, 4}, {3}),
        predicted_bits=bits({0, 5}, {5}, {2, 6}, {7}),
        predicted_known=known,
    )


def of(predictions, step, layer=0):
    ids, share = predictions.of(step, layer, step.evaluated(layer))
    return ids.tolist(), None if share is None else share.tolist()


def test_recorded():
    trace = recorded()
    predictions = predictions_for(trace, "attn_out")
    assert predictions == Recorded()
    assert [of(predictions, step) for step in trace.steps()] == [
        ([0, 5], [0.5, 1.0]), ([2, 6], None), ([7], None),
    ]  # fmt: skip


def test_recorded_says_where_nothing_was_predicted():
    trace = recorded(known=(True, True, False, True))
    with pytest.raises(KairoxError, match="step 1, layer 0: the trace has no prediction here"):
        of(Recorded(), trace.at(1))


def test_perfect_is_what_is_evaluated():
    trace = recorded()
    predictions = predictions_for(trace, "serial", perfect=True)
    assert predictions == Perfect()
    assert [of(predictions, step) for step in trace.steps()] == [
        ([0, 1, 4], [1.0, 0.5, 0.5]), ([2, 4], None), ([3], None),
    ]  # fmt: skip


def test_predictions_are_for_one_trigger():
    with pytest.raises(KairoxError, match="made for trigger 'attn_out', not 'attn_in'"):
        predictions_for(recorded(), "attn_in")
    with pytest.raises(
        KairoxError, match=r"trigger 'attn_in' needs predictions.*prediction=perfect"
    ):
        predictions_for(of_chunks([[[[1]]]], 8), "attn_in")


def test_labels_say_what_they_are():
    assert Recorded().label == "recorded prediction"
    assert Perfect().label == "perfect prediction"
    assert OfQuality(0.9, 0.5, 8).label == "prediction of recall 0.9, precision 0.5"


def many_steps(n_tokens=1):
    rng = np.random.default_rng(1)
    chunks = [
        [[np.flatnonzero(rng.random(N) < 0.2).tolist() for _ in range(n_tokens)]]
        for _ in range(100)
    ]
    return list(of_chunks(chunks, N, n_prefill=100 if n_tokens > 1 else 0).steps())


@pytest.mark.parametrize(("recall", "precision"), [(0.9, 0.5), (0.6, 0.95), (1.0, 0.3)])
def test_a_quality_is_met_on_average(recall, precision):
    predictions = OfQuality(recall, precision, N, seed=5)
    found = said = true = 0
    for step in many_steps():
        truth = set(step.active(0).tolist())
        ids, share = of(predictions, step)
        assert share is None
        assert ids == sorted(set(ids))
        found += len(truth & set(ids))
        said += len(ids)
        true += len(truth)
    # 8000 true ones: a standard deviation of the mean is below 0.006
    assert found / true == pytest.approx(recall, abs=0.02)
    assert found / said == pytest.approx(precision, abs=0.02)


def test_the_best_quality_is_perfect_and_the_worst_says_nothing():
    step = many_steps()[0]
    assert of(OfQuality(1, 1, N), step) == of(Perfect(), step)
    assert of(OfQuality(0, 0.5, N), step) == ([], None)
    nobody = of_chunks([[[[]]]], N).at(0)
    assert of(OfQuality(1, 0.1, N), nobody) == ([], None)
    everybody = of_chunks([[[range(N)]]], N).at(0)
    assert of(OfQuality(1, 0.1, N), everybody) == (list(range(N)), None)


def test_a_quality_depends_on_its_seed_and_on_where_not_on_when():
    steps = many_steps()[:5]
    forwards = [of(OfQuality(0.8, 0.8, N, seed=1), step) for step in steps]
    backwards = [of(OfQuality(0.8, 0.8, N, seed=1), step) for step in steps[::-1]]
    assert forwards == backwards[::-1]
    assert forwards != [of(OfQuality(0.8, 0.8, N, seed=2), step) for step in steps]


def test_shares_of_a_chunk():
    """True neurons keep theirs; a false alarm is one token's."""
    step = many_steps(n_tokens=4)[0]
    true = dict(zip(*of(Perfect(), step), strict=True))
    ids, shares = of(OfQuality(0.7, 0.7, N, seed=1), step)
    alarms = 0
    for neuron, share in zip(ids, shares, strict=True):
        assert share == true.get(neuron, 0.25)
        alarms += neuron not in true
    assert alarms > 10


@pytest.mark.parametrize(("recall", "precision"), [(1.1, 0.5), (-0.1, 0.5), (0.5, 0), (0.5, 1.1)])
def test_qualities_that_cannot_be(recall, precision):
    with pytest.raises(KairoxError, match="recall must be in"):
        predictions_for(recorded(), "serial", quality=(recall, precision))


def test_the_engine_plans_from_what_was_predicted_and_computes_what_was_evaluated():
    trace = recorded()
    policy = Shares()
    cache = new_cache(policy, n_layers=1, observes="active")
    run = run_trace(
        trace, cache, costs(gating="screened"), trigger="serial", predictions=Recorded()
    )  # fmt: skip
    assert policy.asked == [(0, [0, 5]), (0, [2, 6]), (0, [7])]
    assert policy.observed == [([0, 1], [1.0, 0.5]), ([2], None), ([3], None)]  # the active ones
    assert [(r.evaluated, r.active, r.predicted, r.predicted_active) for r in run.records] == [
        (3, 2, 2, 1), (2, 1, 2, 1), (1, 1, 1, 0),
    ]  # fmt: skip
    assert isinstance(cache.journal, Journal)
    assert [sorted(on_time + residual) for on_time, residual, _ in cache.journal.splits] == [
        [0, 1, 4], [2, 4], [3],
    ]  # fmt: skip


@pytest.mark.parametrize("observes", ["active", "predicted"])
def test_shares_of_a_chunk_reach_a_reactive_policy(observes):
    policy = Shares()
    cache = new_cache(policy, n_layers=1, trigger="after", observes=observes)
    trace = of_chunks([[[[0, 1], [1]]], [[[2]]]], 8, n_prefill=1)
    run_trace(trace, cache, costs(), trigger="after")
    assert policy.observed == [([0, 1], [0.5, 1.0]), ([2], None)]
    assert policy.asked == [(0, [0, 1]), (0, [2])]


class Shares(Scripted):
    """Also writes down what it is told was seen."""

    def __init__(self):
        super().__init__()
        self.observed = []

    def observe(self, layer, seen, share):
        self.observed.append((seen.tolist(), None if share is None else share.tolist()))

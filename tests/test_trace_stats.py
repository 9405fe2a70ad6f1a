"""Statistics against sets worked out by hand, and against plain Python on random traces."""

import json
import math
from collections import Counter
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import from_masks, header, recording, write

from kairox_sim.trace import SequenceInfo, TraceWriter, read_trace
from kairox_sim.trace_stats import (
    Loop,
    counts,
    find_loops,
    jaccard,
    overlaps,
    reuse_distances,
    trace_stats,
)


def masks_of(sets_of_tokens, n_neurons):
    """Per token, per layer, a set of ids -> bool[n_tokens, n_layers, n_neurons]."""
    masks = np.zeros((len(sets_of_tokens), len(sets_of_tokens[0]), n_neurons), bool)
    for token, layers in enumerate(sets_of_tokens):
        for layer, ids in enumerate(layers):
            masks[token, layer, list(ids)] = True
    return masks


def test_a_trace_worked_out_by_hand():
    # Layer 0: {0,1} {0,2} {0,2} {0};  layer 1: never.  10 neurons, 4 tokens.
    sets = [[{0, 1}, set()], [{0, 2}, set()], [{0, 2}, set()], [{0}, set()]]
    stats = trace_stats(from_masks(masks_of(sets, 10)))
    assert (stats.n_tokens, stats.n_prefill_tokens, stats.n_steps) == (4, 0, 4)
    assert stats.activations == 7
    assert stats.density.tolist() == [7 / 40, 0.0]
    # |{0}|/|{0,1,2}|, |{0,2}|/|{0,2}|, |{0}|/|{0,2}|; two empty sets are the same set: 1.
    assert stats.jaccard == pytest.approx([(1 / 3 + 1 + 1 / 2) / 3, 1.0])
    assert stats.one_hit_share.tolist() == [1 / 3, 0.0]  # of 0, 1 and 2 only 1 fired once
    # Counts 4, 2, 1: 80 % of 7 is 5.6, reached by two neurons (6).
    assert stats.skew.tolist() == [2 / 10, 0.0]
    # Neuron 0 comes back after 1, 1, 1 tokens, neuron 2 after 1.
    assert stats.reuse_median_tokens == 1.0
    assert stats.reuse_histogram.tolist() == [4]
    assert stats.zero_layers == (1,)
    assert (stats.loops, stats.loop_share) == ((), 0.0)


def test_reuse_distances_of_one_neuron():
    # Fires in tokens 0, 1, 3, 8: distances 1, 2, 5, in bins (.5,1], (1,2], (4,8].
    fired = [{0} if token in (0, 1, 3, 8) else set() for token in range(9)]
    trace = from_masks(masks_of([[s] for s in fired], 3))
    assert {d: n for d, n in enumerate(reuse_distances(trace)) if n} == {1: 1, 2: 1, 5: 1}
    stats = trace_stats(trace)
    assert stats.reuse_histogram.tolist() == [1, 1, 0, 1]
    assert stats.reuse_median_tokens == 2.0


def test_each_layer_gets_its_own_counts_with_more_than_ten_layers(tmp_path):
    """Layers are numbers, not names: 10 does not sort before 2."""
    rng = np.random.default_rng(0)
    made = recording([(0, 2)], rng, n_layers=12, n_neurons=40)
    for layer_step in made.layer_steps:
        layer_step.active = np.tile(np.arange(40) < layer_step.layer + 1, (2, 1))
    made.layer_steps.reverse()  # written last layer first
    stats = trace_stats(read_trace(write(tmp_path / "t", made)))
    assert stats.density.tolist() == [(layer + 1) / 40 for layer in range(12)]


@settings(max_examples=40, deadline=None)
@given(
    n_tokens=st.integers(1, 12),
    n_layers=st.integers(1, 3),
    n_neurons=st.integers(1, 90),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_statistics_agree_with_sets(n_tokens, n_layers, n_neurons, density, seed):
    rng = np.random.default_rng(seed)
    masks = rng.random((n_tokens, n_layers, n_neurons)) < density
    seqs = np.sort(rng.integers(0, 2, n_tokens))
    trace = from_masks(masks, seqs=seqs)
    assert np.array_equal(counts(trace), masks.sum(axis=0))
    gaps = Counter()
    for layer in range(n_layers):
        last = {}
        overlaps_here = []
        for token in range(n_tokens):
            ids = set(np.flatnonzero(masks[token, layer]))
            for i in ids:
                if i in last:
                    gaps[token - last[i]] += 1
                last[i] = token
            if token and seqs[token] == seqs[token - 1]:
                before = set(np.flatnonzero(masks[token - 1, layer]))
                overlaps_here.append(len(ids & before) / len(ids | before) if ids | before else 1)
        if overlaps_here:
            assert jaccard(trace)[layer] == pytest.approx(np.mean(overlaps_here))
        else:
            assert math.isnan(jaccard(trace)[layer])
    assert {d: n for d, n in enumerate(reuse_distances(trace)) if n} == gaps
    stats = trace_stats(trace)
    if gaps:
        assert stats.reuse_median_tokens == median(gaps.elements())
        assert stats.reuse_histogram.sum() == gaps.total()
    else:
        assert math.isnan(stats.reuse_median_tokens)
    ranked = np.sort(masks.sum(axis=0), axis=1)[:, ::-1]
    for layer in range(n_layers):
        k = round(stats.skew[layer] * n_neurons)
        total = ranked[layer].sum()
        assert 5 * ranked[layer, :k].sum() >= 4 * total
        assert k == 0 or 5 * ranked[layer, : k - 1].sum() < 4 * total


def test_counts_stay_exact_past_what_half_and_single_bytes_hold():
    n_tokens = 70_000  # a uint8 holds 255, float16 counts to 2,048 and overflows at 65,504
    masks = np.zeros((n_tokens, 1, 3), bool)
    masks[:, 0, 0] = True
    masks[::2, 0, 1] = True
    trace = from_masks(masks)
    assert counts(trace).tolist() == [[70_000, 35_000, 0]]
    assert trace_stats(trace).density.tolist() == [105_000 / 210_000]


@pytest.mark.parametrize("value", [False, True])
def test_nothing_or_everything_active_gives_no_nan(value):
    stats = trace_stats(from_masks(np.full((5, 2, 65), value)))
    for ratio in (stats.density, stats.jaccard, stats.one_hit_share, stats.skew):
        assert np.isfinite(ratio).all()
    assert stats.density.tolist() == [float(value)] * 2
    assert stats.zero_layers == (() if value else (0, 1))


def test_a_trace_of_no_tokens_gives_an_empty_report(tmp_path):
    with TraceWriter(tmp_path / "t", header()):
        pass
    stats = trace_stats(read_trace(tmp_path / "t"))
    assert (stats.n_tokens, stats.n_steps, stats.n_sequences, stats.activations) == (0, 0, 0, 0)
    assert np.isnan(stats.density).all()
    assert stats.zero_layers == ()  # nothing was recorded, so nothing is known to be inert
    report = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert report["density"] == [None, None]
    assert report["reuse_median_tokens"] is None
    assert report["loop_share"] is None


def test_one_token_has_a_density_but_no_overlap_and_no_reuse():
    stats = trace_stats(from_masks(masks_of([[{1, 2}]], 8)))
    assert stats.density.tolist() == [0.25]
    assert np.isnan(stats.jaccard).all()
    assert math.isnan(stats.reuse_median_tokens)
    assert stats.one_hit_share.tolist() == [1.0]


def test_the_report_is_plain_json_and_counts_prefill(tmp_path):
    rng = np.random.default_rng(1)
    path = write(tmp_path / "t", recording([(0, 5), (0, 1), (1, 2), (1, 1)], rng))
    report = json.loads(json.dumps(trace_stats(read_trace(path)).to_dict(), allow_nan=False))
    assert (report["n_tokens"], report["n_prefill_tokens"], report["n_sequences"]) == (9, 7, 2)
    assert report["truncated_at"] is None
    cut = path.read_bytes()[:-9]
    path.write_bytes(cut)
    assert trace_stats(read_trace(path)).to_dict()["truncated_at"] == 6  # the last batch held 3


# --- loops


def trace_of_tokens(tokens, seqs=None):
    return from_masks(np.zeros((len(tokens), 1, 1), bool), tokens=tokens, seqs=seqs)


def test_a_repeated_phrase_is_one_loop_with_its_shortest_period():
    tokens = [90, 91, 92] + [1, 2, 3] * 7 + [93, 94]
    stats = trace_stats(trace_of_tokens(tokens))
    assert stats.loops == (Loop(seq=0, start=3, n_tokens=21, period=3),)
    assert stats.loop_share == 21 / 26
    assert stats.to_dict()["loops"] == [{"seq": 0, "start": 3, "n_tokens": 21, "period": 3}]


def test_short_or_few_repeats_are_no_loop():
    assert find_loops(trace_of_tokens([1] * 15)) == ()
    assert find_loops(trace_of_tokens([1] * 16)) == (Loop(0, 0, 16, 1),)
    assert find_loops(trace_of_tokens(list(range(10)) * 2)) == ()
    assert find_loops(trace_of_tokens(list(range(10)) * 3)) == (Loop(0, 0, 30, 10),)
    assert find_loops(trace_of_tokens(list(range(64)))) == ()


def test_loops_belong_to_one_sequence():
    assert find_loops(trace_of_tokens([1] * 20, seqs=[0] * 10 + [1] * 10)) == ()
    both = find_loops(trace_of_tokens([1] * 40, seqs=[0] * 20 + [1] * 20))
    assert both == (Loop(0, 0, 20, 1), Loop(1, 0, 20, 1))


# --- overlap of a prior with what is measured


@pytest.mark.parametrize(
    ("source", "start", "stop", "expected"),
    [
        ("a", 0, 10, True),
        ("a", 9, 30, True),
        ("a", 10, 30, False),  # half-open ranges only touch
        ("a", 3, 3, False),  # no tokens
        ("b", 0, 10, False),
    ],
)
def test_overlap_is_of_tokens_of_the_same_source(source, start, stop, expected):
    def trace(*sequences):
        return from_masks(np.zeros((1, 1, 4), bool), sequences=sequences)

    prior = trace(
        SequenceInfo(0, "code", "x", "z", 0, 99), SequenceInfo(1, "code", "x", "a", 0, 10)
    )
    evaluated = trace(SequenceInfo(0, "other", "y", source, start, stop))
    assert overlaps(prior, evaluated) is expected
    assert overlaps(evaluated, prior) is expected
    assert not overlaps(prior.select(seqs=[0]), evaluated)

"""Who is where when a run begins: by hand, and PowerInfer's against an exact integer program."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import random_trace

from kairox_sim import KairoxError, Settings
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.placement import (
    balanced,
    by_counts,
    first,
    least_per_layer,
    solved,
    solved_as_shipped,
    whole_layers,
)
from kairox_sim.settings import build_cache, gpu_over_cpu
from kairox_sim.trace_stats import counts


def ids(placed: object) -> list[list[int]]:
    return [own.tolist() for own in placed.resident]  # type: ignore[attr-defined]


def test_by_counts_takes_the_most_frequent_ties_to_the_lowest() -> None:
    placed = by_counts(np.array([[1, 5, 5, 0], [2, 2, 2, 9]]), [1, 3])
    assert ids(placed) == [[1], [0, 1, 3]]
    assert placed.slots == (1, 3)
    assert ids(first(4, [2, 0, 9])) == [[0, 1], [], [0, 1, 2, 3]]


def test_whole_layers_are_the_last_ones() -> None:
    placed = whole_layers(4, 3, 2)
    assert placed.slots == (0, 0, 3, 3)
    assert ids(placed) == [[], [], [0, 1, 2], [0, 1, 2]]
    assert whole_layers(2, 3, 0).slots == (0, 0)
    assert whole_layers(2, 3, 2).slots == (3, 3)
    with pytest.raises(KairoxError, match="3 layers on the device; allowed: 0 to 2"):
        whole_layers(2, 3, 3)


def test_of_a_stand_in_the_boundary_may_be_within_a_layer() -> None:
    """Of 40 layers 17 are 2.55 of 6: 2 whole ones, and 492.8 neurons of 896."""
    placed = whole_layers(6, 896, 17, of=40)
    assert placed.slots == (0, 0, 0, 492, 896, 896)
    assert placed.resident[3].tolist() == list(range(492))
    assert whole_layers(6, 896, 20, of=40).slots == (0, 0, 0, 896, 896, 896)
    assert whole_layers(6, 896, 0, of=40).slots == (0,) * 6
    assert whole_layers(6, 896, 40, of=40).slots == (896,) * 6
    assert whole_layers(1, 12, 31, of=32).slots == (11,)  # rounded it would be the whole model
    with pytest.raises(KairoxError, match="41 layers on the device; allowed: 0 to 40"):
        whole_layers(6, 896, 41, of=40)


def exact(fired: np.ndarray, total: int, least: int) -> int:
    """PowerInfer's program by trying every split: a layer holds none or at least `least`."""
    n_layers, n_neurons = fired.shape
    best = np.concatenate(
        [np.zeros((n_layers, 1), int), np.cumsum(-np.sort(-fired, axis=1), axis=1)], axis=1
    )  # [n_layers, n_neurons + 1] activations of the k most frequent
    allowed = [k for k in range(n_neurons + 1) if k == 0 or k >= min(least, n_neurons)]
    return max(
        sum(int(best[layer, k]) for layer, k in enumerate(split))
        for split in product(allowed, repeat=n_layers)
        if sum(split) <= total
    )


def gain(fired: np.ndarray, placed: object) -> int:
    return sum(int(fired[layer][own].sum()) for layer, own in enumerate(ids(placed)))


TINY = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=3)


@given(TINY, st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_without_a_minimum_and_batches_of_one_it_is_the_optimum(
    rows: list[list[int]], total: int
) -> None:
    fired = np.array(rows)
    placed = solved(fired, total, least=0, batch=1)
    assert gain(fired, placed) == exact(fired, total, 0)
    assert sum(placed.slots) == min(total, fired.size)


@given(TINY, st.integers(0, 12), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_minimum_is_kept_and_never_better_than_the_optimum(
    rows: list[list[int]], total: int, least: int, batch: int
) -> None:
    fired = np.array(rows)
    placed = solved(fired, total, least=least, batch=batch)
    assert sum(placed.slots) <= total
    assert all(k == 0 or k >= min(least, 4) for k in placed.slots)
    assert [len(own) for own in ids(placed)] == list(placed.slots)
    assert gain(fired, placed) <= exact(fired, total, least)


def test_a_layer_below_its_minimum_gives_its_neurons_to_the_others() -> None:
    fired = np.array([[9, 1, 1, 1], [8, 7, 6, 5]])
    assert solved(fired, 3, least=0, batch=1).slots == (1, 2)
    placed = solved(fired, 3, least=2, batch=1)
    assert ids(placed) == [[], [0, 1, 2]]
    assert gain(fired, placed) == exact(fired, 3, 2) == 21


def test_least_per_layer_by_hand() -> None:
    """1 MB bundles at 100 and 10 GB/s: 10 us against 100 us a neuron, 180 us to hand over."""
    rates = {"bundle_bytes": 1e6, "gpu_bytes_per_s": 1e11, "cpu_bytes_per_s": 1e10}
    assert least_per_layer(**rates, sync_s=180e-6) == 2
    assert least_per_layer(**rates, sync_s=181e-6) == 3
    assert least_per_layer(**rates, sync_s=0.0) == 0
    slow = {"bundle_bytes": 1e6, "gpu_bytes_per_s": 1e10, "cpu_bytes_per_s": 1e10}
    assert least_per_layer(**slow, sync_s=1e-6) > 10**9


def test_as_shipped_reads_layers_in_the_order_of_their_names() -> None:
    """Of 12 layers the files are read as 0, 1, 10, 11, 2, 3, ...: all but two are another's."""
    hot = np.arange(12)  # the one neuron that fires in each layer
    fired = np.zeros((12, 12), int)
    fired[hot, hot] = 100
    placed = solved_as_shipped(fired, 12, batch=1)
    assert placed.slots == solved(fired, 12, least=0, batch=1).slots == (1,) * 12
    assert [own[0] for own in ids(placed)] == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert gain(fired, placed) == 200
    few = fired[:10]  # up to ten layers the two orders are the same
    assert ids(solved_as_shipped(few, 10, batch=1)) == ids(solved(few, 10, least=0, batch=1))


def test_as_shipped_has_batches_of_256_and_no_minimum() -> None:
    fired = np.zeros((2, 512), int)
    fired[0, :300], fired[1, :10] = 5, 9
    assert solved_as_shipped(fired, 256).slots == (256, 0)
    assert solved_as_shipped(fired, 257).slots in ((256, 1), (257, 0))


def test_balanced_stops_where_both_sides_take_as_long() -> None:
    """Counts 40, 30, 20, 10: a device 4 times as fast has its share at 90 to 10."""
    fired = np.array([[10, 40, 20, 30]])
    assert ids(balanced(fired, [4], 4.0)) == [[1, 2, 3]]  # 70 < 4 x 30, 90 >= 4 x 10
    assert ids(balanced(fired, [4], 2.0)) == [[1, 3]]  # 70 >= 2 x 30
    assert ids(balanced(fired, [4], 0.5)) == [[1]]
    assert ids(balanced(fired, [2], 100.0)) == [[1, 3]]  # no more than it has slots
    assert balanced(fired, [4], 2.0).slots == (4,)  # what is left is for its swaps
    assert ids(balanced(np.zeros((1, 4), int), [2], 4.0)) == [[0, 1]]


# -- through Settings ---------------------------------------------------------------------------

PRIOR = random_trace(n_layers=12, n_neurons=64, seed=1, source="b", n_decode=40)
FIRED = counts(PRIOR)
PC1, SHAPE = load_profile("pc1"), find_shape("prosparse-7b")


def cache_of(**given_: object) -> object:
    chosen = Settings().with_overrides(
        {"model_as": "prosparse-7b", "gating": "predicted", **given_}
    )
    return build_cache(chosen, 12, 64, prior=PRIOR, shape=SHAPE, profile=PC1)


def test_settings_place_as_the_functions_do() -> None:
    """In a stand-in a batch and a minimum are as many bytes as on the model."""
    ratio = SHAPE.n_neurons / 64
    least = least_per_layer(
        bundle_bytes=SHAPE.bundle_bytes("predicted") * ratio,
        gpu_bytes_per_s=PC1.ffn_gpu.bytes_per_s.value,
        cpu_bytes_per_s=PC1.ffn_cpu.bytes_per_s.value,
        sync_s=2 * PC1.handover_fixed_s.value
        + PC1.h2d.copy_fixed_s.value
        + PC1.d2h.copy_fixed_s.value,
    )
    assert least == 1
    wanted = {
        "counts": by_counts(FIRED, [44] * 12),
        "solver": solved(FIRED, 528, least=least, batch=1),
        "solver-shipped": solved_as_shipped(FIRED, 528, batch=round(256 / ratio)),
        "balanced": balanced(FIRED, [44] * 12, gpu_over_cpu(PC1)),
    }
    assert len({str(ids(placed)) for placed in wanted.values()}) == 4
    for placement, placed in wanted.items():
        cache = cache_of(policy="static", placement=placement, slots=44)
        found = [np.flatnonzero(row).tolist() for row in cache.state]  # type: ignore[attr-defined]
        assert found == ids(placed), placement
        assert tuple(cache.capacity) == placed.slots  # type: ignore[attr-defined]


def test_a_placement_without_what_it_needs_is_refused() -> None:
    chosen = Settings(policy="static", placement="solver", slots=20)
    with pytest.raises(KairoxError, match="placement 'solver', start 'empty', needs a prior"):
        build_cache(chosen, 12, 64)
    chosen = Settings(policy="static", placement="balanced", slots=20)
    with pytest.raises(KairoxError, match="'balanced' needs the rates of a machine"):
        build_cache(chosen, 12, 64, prior=PRIOR)


def test_groups_are_placed_whole() -> None:
    cache = cache_of(
        policy="static", placement="counts", slots=24, groups="chunks:1376"
    )  # 8 of these
    for layer, row in enumerate(cache.state):  # type: ignore[attr-defined]
        per_group = (row.reshape(8, 8) > 0).sum(axis=1)
        assert sorted(per_group.tolist()) == [0] * 5 + [8] * 3
        sums = FIRED[layer].reshape(8, 8).sum(axis=1)
        best = max(combinations(range(8), 3), key=lambda own: sum(sums[list(own)]))
        assert np.flatnonzero(per_group).tolist() == list(best)

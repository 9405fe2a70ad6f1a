"""Co-activation linking: paths, reads, and what they are worth on tokens not learnt from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import from_masks

from kairox_sim.coactivation import Edges
from kairox_sim.errors import KairoxError
from kairox_sim.linking import link, link_order, reads
from kairox_sim.trace import read_trace

SAMPLES = Path(__file__).parents[1] / "traces"


def edges_of(pairs: dict[tuple[int, int], int]) -> Edges:
    low, high = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    return Edges(low, high, np.array([pairs[p] for p in sorted(pairs)], np.int64))


def test_link_by_hand() -> None:
    # 9: 1-2. 8: 2-4. 7: 2-3 refused, 2 has two links. 6: 1-4 refused, it would close a ring.
    # 5: 0-1. 4: 1-3 refused, 1 has two by now. 3: 3-5.
    pairs = {(1, 2): 9, (2, 4): 8, (2, 3): 7, (1, 4): 6, (0, 1): 5, (1, 3): 4, (3, 5): 3}
    assert [p.tolist() for p in link(edges_of(pairs), 7)] == [[0, 1, 2, 4], [3, 5], [6]]


def test_equal_edges_go_by_lowest_id() -> None:
    pairs = {(0, 1): 1, (0, 2): 1, (0, 3): 1, (2, 3): 1}
    assert [p.tolist() for p in link(edges_of(pairs), 4)] == [[1, 0, 2, 3]]


def test_paths_lie_hottest_first() -> None:
    masks = np.zeros((6, 1, 5), bool)
    masks[:2, 0, [0, 4]] = True  # 0-4 fire twice, 1-3 four times, 2 never
    masks[2:, 0, [1, 3]] = True
    order = np.argsort(link_order(from_masks(masks))[0])
    assert order.tolist() == [1, 3, 0, 4, 2]
    with pytest.raises(KairoxError, match="empty"):
        link_order(from_masks(masks[:0]))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.data(), n=st.integers(2, 14))
def test_link_invariants(data: st.DataObject, n: int) -> None:
    """Every neuron once, at most two links each, all of them edges, and no edge could be added."""
    ids = st.integers(0, n - 1)
    pair = st.tuples(ids, ids).filter(lambda p: p[0] < p[1])
    pairs = data.draw(st.dictionaries(pair, st.integers(1, 4), min_size=1, max_size=40))
    paths = link(edges_of(pairs), n)
    assert sorted(i for path in paths for i in path.tolist()) == list(range(n))
    links = {i: 0 for i in range(n)}
    for path in paths:
        for a, b in zip(path.tolist(), path[1:].tolist(), strict=False):
            assert (min(a, b), max(a, b)) in pairs
            links[a] += 1
            links[b] += 1
    assert max(links.values()) <= 2
    path_of = {i: at for at, path in enumerate(paths) for i in path.tolist()}
    for a, b in pairs:
        assert links[a] == 2 or links[b] == 2 or path_of[a] == path_of[b]


# -- reads ----------------------------------------------------------------------------------------


def test_reads_by_hand() -> None:
    at = np.array([3, 4, 7, 12])  # gaps of 0, 2 and 4 bundles
    # A bundle takes 100 B / 100 B/s = 1 s. Two seconds of gap are not less than two.
    assert reads(at, 100, 100, 2.0) == (3, 400)
    assert reads(at, 100, 100, 2.5) == (2, 600)
    assert reads(at, 100, 100, 9.0) == (1, 1000)
    assert reads(at, 100, 100, 0.0) == (3, 400)  # neighbours are one read at any cost
    assert reads(at[:1], 100, 100, 1.0) == (1, 100)
    assert reads(at[:0], 100, 100, 1.0) == (0, 0)


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.floats(1, 1e5),
    st.floats(1, 1e9),
    st.floats(0, 1e-2),
)
def test_collapsed_reads_are_the_cheapest(
    places: set[int], bundle_bytes: float, bytes_per_s: float, copy_fixed_s: float
) -> None:
    """No other way of merging takes less time: neither none at all nor everything in one."""
    at = np.array(sorted(places))

    def time_s(n_reads: int, n_bytes: float) -> float:
        return n_reads * copy_fixed_s + n_bytes / bytes_per_s

    n_reads, n_bytes = reads(at, bundle_bytes, bytes_per_s, copy_fixed_s)
    stretches = 1 + int((np.diff(at) > 1).sum())
    assert 1 <= n_reads <= stretches
    assert len(at) * bundle_bytes <= n_bytes <= (at[-1] - at[0] + 1) * bundle_bytes
    taken = time_s(n_reads, n_bytes) * (1 - 1e-9)
    assert taken <= time_s(stretches, len(at) * bundle_bytes)
    assert taken <= time_s(1, (at[-1] - at[0] + 1) * bundle_bytes)


def test_reads_are_longer_and_fewer_on_held_out_tokens() -> None:
    """In every layer, against the order of the weights and a random one; access collapse off and
    on, with a copy's fixed cost worth 3.5 bundles. The lengths are of these traces."""
    prior = read_trace(SAMPLES / "tiny-reglu-profile.arrow")
    held_out = read_trace(SAMPLES / "tiny-reglu-eval.arrow").select(seqs=[0, 3])
    rng = np.random.default_rng(0)
    orders = {
        "linked": link_order(prior),
        "identity": np.tile(np.arange(896, dtype=np.int32), (6, 1)),
        "random": np.stack([rng.permutation(896) for _ in range(6)]),
    }
    assert np.array_equal(np.sort(orders["linked"], axis=1), orders["identity"])
    wanted_per_read = {
        0.0: {"linked": 1.551, "identity": 1.193, "random": 1.190},
        3.5: {"linked": 2.323, "identity": 1.762, "random": 1.760},
    }
    for gap, lengths in wanted_per_read.items():
        n_reads = {name: np.zeros(6) for name in orders}
        n_bytes = {name: np.zeros(6) for name in orders}
        active = np.zeros(6)
        for step in held_out.steps():
            for layer in range(6):
                ids = step.active(layer)
                active[layer] += ids.size
                for name, position in orders.items():
                    found = reads(np.sort(position[layer][ids]), 1, 1, gap)
                    n_reads[name][layer] += found[0]
                    n_bytes[name][layer] += found[1]
        length = {name: active.sum() / n_reads[name].sum() for name in orders}
        assert length == pytest.approx(lengths, rel=1e-3)
        for name in ("identity", "random"):
            assert (n_reads["linked"] < n_reads[name] / 1.05).all()
            time = {k: (gap * n_reads[k] + n_bytes[k]).sum() for k in orders}
            assert gap == 0 or time["linked"] < time[name]


def test_the_order_of_a_prior_is_learnt_once() -> None:
    layers: list[int] = []
    prior, other = (from_masks(np.random.default_rng(s).random((6, 1, 9)) < 0.4) for s in (1, 2))
    first = link_order(prior, on_layer=layers.append)
    expected = first.copy()
    first[:] = -1  # whoever has it may do what they like
    assert np.array_equal(link_order(prior, on_layer=layers.append), expected)
    assert layers == [0]
    link_order(other, on_layer=layers.append)
    link_order(prior, k=1, on_layer=layers.append)
    assert layers == [0, 0, 0]

"""Id sets: what is accepted and how, and counts by marks against NumPy's set operations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.errors import KairoxError
from kairox_sim.idsets import Marks, share_of, sorted_ids

ids = st.lists(st.integers(0, 19), max_size=30)


def test_sorted_unique_int32():
    assert sorted_ids([5, 5, 5, 7], 8).tolist() == [5, 7]
    assert sorted_ids([7, 0, 3], 8).tolist() == [0, 3, 7]
    assert sorted_ids(np.array([1, 2], np.uint16), 8).dtype == np.int32
    assert sorted_ids([], 8).size == 0
    ready = np.array([1, 4], np.int32)
    assert sorted_ids(ready, 8) is ready


@pytest.mark.parametrize("bad", [[8], [-1, 3], [[1, 2]], [0.5], [True]])
def test_what_is_no_set_of_ids(bad):
    with pytest.raises(KairoxError, match="neuron ids must be"):
        sorted_ids(bad, 8)


def test_shares():
    seen = np.array([2, 5], np.int32)
    assert share_of(seen, [2, 5], None) is None
    share = share_of(seen, [2, 5], np.array([0.5, 1], np.float16))
    assert share is not None
    assert (share.dtype, share.tolist()) == (np.float32, [0.5, 1.0])
    for given_ids, shares in (([5, 2], [0.5, 1]), ([2, 5], [0.5]), ([2, 2, 5], [1, 1, 1])):
        with pytest.raises(KairoxError, match="sorted and unique"):
            share_of(seen, given_ids, shares)
    for shares in ([0, 1], [0.5, 1.5], [np.nan, 1]):
        with pytest.raises(KairoxError, match="above 0 and at most 1"):
            share_of(seen, [2, 5], shares)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5))
def test_counts_are_those_of_sets_every_time(pairs):
    marks = Marks(20)
    for some, others in pairs:  # one call leaves no mark for the next
        a, b = np.array(some, np.int32), np.array(others, np.int32)
        assert marks.n_distinct(a) == np.unique(a).size
        assert marks.n_common(np.unique(a), np.unique(b)[::-1]) == np.intersect1d(a, b).size

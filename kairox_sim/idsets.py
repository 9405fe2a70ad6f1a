"""Sets of neuron ids as the cache takes them: checked, sorted, unique, int32; and their counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import NOTHING, Ids, Share


def sorted_ids(ids: ArrayLike, n_neurons: int) -> Ids:
    """`ids` in order and once each; the array itself where it is so already."""
    array = np.asarray(ids)
    if array.size == 0:
        return NOTHING
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise KairoxError(f"neuron ids must be a list of integers, got {array.dtype} {array.shape}")
    if array.size > 1 and not (array[1:] > array[:-1]).all():
        array = np.unique(array)
    if array[0] < 0 or array[-1] >= n_neurons:
        raise KairoxError(f"neuron ids must be 0 to {n_neurons - 1}, got {array[0]} to {array[-1]}")
    return array.astype(np.int32, copy=False)


def share_of(seen: Ids, given: ArrayLike, share: ArrayLike | None) -> Share | None:
    """`share` in float32 [n], one per id of `seen`, however it was stored."""
    if share is None:
        return None
    part = np.asarray(share, np.float32)
    if part.shape != seen.shape or not np.array_equal(np.asarray(given), seen):
        raise KairoxError(
            f"with a share, ids must be sorted and unique and come with one share each; got "
            f"{part.shape} shares for {np.shape(given)} ids, {seen.size} of them different"
        )
    if part.size and not (part.min() > 0 and part.max() <= 1):
        raise KairoxError(
            f"shares must be above 0 and at most 1, got {part.min():g} to {part.max():g}"
        )
    return part


class Marks:
    """Counts over id arrays in any order through one mark per neuron, without sorting them."""

    def __init__(self, n_neurons: int) -> None:
        self._mark = np.zeros(n_neurons, bool)  # all False between calls

    def n_distinct(self, ids: Ids) -> int:
        """How many different ones. Ids must be neurons of the layer."""
        if ids.size == 0:
            return 0
        self._mark[ids] = True
        n = int(np.count_nonzero(self._mark))
        self._mark[ids] = False
        return n

    def n_common(self, ids: Ids, others: Ids) -> int:
        """How many are in both. Each must be without repetition."""
        few, many = (ids, others) if ids.size < others.size else (others, ids)
        if few.size == 0:
            return 0
        self._mark[few] = True
        n = int(np.count_nonzero(self._mark.take(many)))
        self._mark[few] = False
        return n

"""Slot tensors on the device: the bundles that are resident, and the copies that bring them there.

Knows no policy and no time: the cache says which neuron takes which slot, the device when a copy
has landed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.device import Device
from kairox_exec.weights import NeuronBundles
from kairox_sim.cache import NeuronCache
from kairox_sim.events import Swap


class SlotStore:
    """`slots[layer]` is [capacity, n_rows, width]; an unowned slot holds NaN or leftovers.

    Pinned and warm neurons of the cache are copied in here, before the run.
    """

    def __init__(
        self, device: Device, bundles: Sequence[NeuronBundles], cache: NeuronCache
    ) -> None:
        self._device, self._cache = device, cache
        self.slots: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # in host memory
        moves = cache.policy.admits != "never"
        for layer, bundle in enumerate(bundles):
            rows = device.hold(bundle.rows) if moves else bundle.rows
            _, n_rows, width = rows.shape
            slots = device.new_slots(cache.capacity[layer], n_rows, width, rows.dtype)
            here = np.flatnonzero(cache.slot_of[layer] >= 0).astype(np.int32)
            if here.size:
                device.fill(rows, here, slots, cache.slot_of[layer, here])
            self.slots.append(slots)
            self._rows.append(rows)

    def start(self, layer: int, swaps: Sequence[Swap], *, at_once: bool = False) -> None:
        """Queue the copies of a plan; `at_once`: make them before returning (see Device.copy)."""
        if swaps:
            self._device.copy(swaps, self._rows[layer], self.slots[layer], at_once=at_once)

    def landed(self) -> list[int]:
        """Ids of the swaps that landed since the last call, in issue order."""
        return self._device.landed()

    def places(self, layer: int, ids: NDArray[np.int32]) -> torch.Tensor:
        """int32 [n], on the device: the slot of each of these neurons, which must be resident."""
        return self._device.send(self._cache.slot_of[layer, ids])

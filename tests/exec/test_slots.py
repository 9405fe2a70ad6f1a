"""Slots: what the cache says is resident is what lies in the slot tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import FAMILIES
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.slots import SlotStore
from kairox_exec.weights import NeuronBundles, row_names
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import Lru

N_LAYERS, N_NEURONS, D_MODEL = 2, 12, 4


@pytest.fixture
def bundles() -> list[NeuronBundles]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(N_NEURONS, 2, D_MODEL, generator=generator) for _ in range(N_LAYERS)]
    names = row_names(FAMILIES[0], "exact")
    spec = FfnSpec(D_MODEL, True, "relu", 0.0, "float32")
    return [
        NeuronBundles(i, "exact", spec, names, r, torch.zeros(N_NEURONS, D_MODEL),
                      None, None, None)
        for i, r in enumerate(rows)
    ]  # fmt: skip


def _same_as_cache(store: SlotStore, cache: NeuronCache, bundles: list[NeuronBundles]) -> int:
    n_resident = 0
    for layer in range(N_LAYERS):
        ids = np.flatnonzero(cache.state[layer] >= 2).astype(np.int32)
        places = store.places(layer, ids)
        assert torch.equal(store.slots[layer][places], bundles[layer].rows[ids])
        n_resident += ids.size
    return n_resident


def test_pinned_and_warm_neurons_are_there_at_the_start(bundles: list[NeuronBundles]) -> None:
    cache = NeuronCache(
        N_LAYERS, N_NEURONS, [5, 3], Lru(N_LAYERS, N_NEURONS), Fixed(),
        pinned=[[7], []], warm=[[3, 1], [0, 11, 4]],
    )  # fmt: skip
    with EmulatedDevice() as device:
        store = SlotStore(device, bundles, cache)
        assert [s.shape[0] for s in store.slots] == [5, 3]
        assert _same_as_cache(store, cache, bundles) == 6
        assert store.slots[0][3:].isnan().all()


def test_copies_follow_the_cache_through_evictions(bundles: list[NeuronBundles]) -> None:
    rng = np.random.default_rng(1)
    cache = NeuronCache(N_LAYERS, N_NEURONS, 4, Lru(N_LAYERS, N_NEURONS), Fixed(), swap_neurons=2)
    n_evictions = 0
    with EmulatedDevice() as device:
        store = SlotStore(device, bundles, cache)
        for _ in range(30):
            for layer in range(N_LAYERS):
                seen = np.unique(rng.integers(0, N_NEURONS, 3)).astype(np.int32)
                cache.commit(store.landed())
                cache.lookup(layer, seen)
                swaps = cache.plan(layer, seen)
                n_evictions += sum(swap.evict.size for swap in swaps)
                store.start(layer, swaps)
                if rng.random() < 0.5:
                    device.wait_landed([s.id for s in swaps])
        device.wait_landed([s.id for s in cache.in_flight.values()])
        cache.commit(store.landed())
        assert not cache.in_flight
        assert _same_as_cache(store, cache, bundles) == 8
    assert n_evictions > 10
    cache.check()


def test_no_slots_is_legal(bundles: list[NeuronBundles]) -> None:
    cache = NeuronCache(N_LAYERS, N_NEURONS, 0, Lru(N_LAYERS, N_NEURONS), Fixed())
    with EmulatedDevice() as device:
        store = SlotStore(device, bundles, cache)
        assert store.slots[0].shape == (0, 2, D_MODEL)
        assert store.places(0, np.zeros(0, np.int32)).shape == (0,)

"""Miss counts equal libCacheSim's exactly, with trigger = after on layer-steps of one neuron.

libCacheSim (https://github.com/1a1a11a/libCacheSim) is GPL: a tool of the tests and nothing else.
"""

import random
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import plain_caches
import pytest

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import Known, build_policy
from kairox_sim.policies.future import Future
from kairox_sim.trace import read_trace

libcachesim = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed: pip install 'kairox[dev]'"
)

THEIRS = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "sieve": libcachesim.Sieve,
    "s3fifo": libcachesim.S3FIFO,
    "arc": libcachesim.ARC,
    "belady": libcachesim.Belady,
}
PARAMS = {"lfu": {"forget": True}}  # libCacheSim's LFU knows no counts but those in the cache
FROM = {"s3fifo": 20}  # libCacheSim aborts where the small queue would hold nothing
TRACE = Path(__file__).parents[1] / "traces" / "tiny-reglu-eval.arrow"


def ours(name: str, stream: list[int], capacity: int) -> int:
    """Misses of a NeuronCache of one layer; every copy has landed by the next lookup."""
    n = max(stream) + 1
    steps = [np.array([neuron], np.int32) for neuron in stream]
    known = Known(future=Future.of([steps], n))
    policy = build_policy(name, 1, n, known, **PARAMS.get(name, {}))
    cache = NeuronCache(1, n, capacity, policy, Fixed(), trigger="after", observes="active")
    for seen in steps:
        cache.commit(list(cache.in_flight))
        cache.lookup(0, seen, seen)
        cache.plan(0, seen)
    cache.check()
    return cache.take_counts().residual


def theirs(build, stream: list[int], capacity: int) -> int:
    following, coming = [2**62] * len(stream), {}
    for at in range(len(stream) - 1, -1, -1):
        following[at] = coming.get(stream[at], 2**62)
        coming[stream[at]] = at
    cache = build(cache_size=capacity, hashpower=12)
    request = libcachesim.Request()
    request.obj_size = 1
    missed = 0
    for neuron, at in zip(stream, following, strict=True):
        request.obj_id, request.next_access_vtime = neuron, at
        missed += not cache.get(request)
    return missed


def skewed(length: int, n: int, seed: int, repeats: int) -> list[int]:
    """Few ids come often, which ones drifts, and each comes up to `repeats` times in a row.

    From random.Random, whose draws are the same on every version of Python.
    """
    draw = random.Random(seed)
    stream: list[int] = []
    while len(stream) < length:
        neuron = (int(n * draw.random() ** 3) + 3 * (len(stream) // 200)) % n
        stream += [neuron] * (1 + int(repeats * draw.random()))
    return stream[:length]


def scanned(length: int, n: int, seed: int) -> list[int]:
    """Skewed draws that a scan of all ids interrupts now and then."""
    parts = [skewed(3 * n, n, seed + at, 1) + list(range(n)) for at in range(length // (4 * n) + 1)]
    return [neuron for part in parts for neuron in part][:length]


STREAMS = {
    "skewed": skewed(700, 40, 1, 1),
    "scans": scanned(700, 40, 2),
    "loop": [at % 31 for at in range(300)],
}
REPEATS = skewed(600, 50, 28, 3)


def capacities(name: str, stream: list[int], *between: int) -> list[int]:
    n = len(set(stream))
    wanted = {1, 2, 3, *between, n - 3, n - 2, n - 1, n}
    return sorted(c for c in wanted if c >= FROM.get(name, 1))


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("kind", STREAMS)
def test_synthetic_streams(name: str, kind: str) -> None:
    stream = STREAMS[kind]
    for capacity in capacities(name, stream, 10, 20):
        expected = theirs(THEIRS[name], stream, capacity)
        assert ours(name, stream, capacity) == expected, capacity
        assert len(set(stream)) <= expected <= len(stream)


def recorded(layer: int, length: int) -> list[int]:
    """One layer's sets of successive tokens, flattened: every neuron is a layer-step."""
    stream: list[int] = []
    for step in read_trace(TRACE).steps():
        stream += step.active(layer).tolist()
        if len(stream) >= length:
            break
    return stream[:length]


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_recorded_trace(name: str, layer: int) -> None:
    stream = recorded(layer, 500)
    for capacity in capacities(name, stream, 60):
        expected = theirs(THEIRS[name], stream, capacity)
        assert ours(name, stream, capacity) == expected, capacity


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_more_of_a_recorded_trace(name: str) -> None:
    stream = recorded(5, 5000)
    assert 4 * len(set(stream)) < len(stream)  # there is reuse
    expected = theirs(THEIRS[name], stream, 400)
    assert ours(name, stream, 400) == expected < len(stream)


@pytest.mark.parametrize("name", THEIRS)
def test_immediate_repeats(name: str) -> None:
    assert sum(a == b for a, b in pairwise(REPEATS)) > 200
    for capacity in capacities(name, REPEATS, 25):
        assert ours(name, REPEATS, capacity) == theirs(THEIRS[name], REPEATS, capacity), capacity


def test_no_two_of_the_seven_are_the_same() -> None:
    misses = {name: ours(name, REPEATS, 25) for name in THEIRS}
    assert len(set(misses.values())) == 7, misses
    assert min(misses, key=misses.__getitem__) == "belady"
    assert misses == {name: theirs(build, REPEATS, 25) for name, build in THEIRS.items()}


@pytest.mark.parametrize("capacity", [100, 200])
def test_w_tinylfu_against_our_own_reference(
    capacity: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """libCacheSim's counts are a sketch's, its window and parts other than ours: printed only."""
    stream = skewed(3000, 400, 3, 2)
    misses = ours("wtinylfu", stream, capacity)
    assert misses == sum(plain_caches.wtinylfu(stream, capacity))
    assert misses < ours("lru", stream, capacity)
    other = theirs(libcachesim.WTinyLFU, stream, capacity)
    with capsys.disabled():
        sys.stdout.write(f"\nW-TinyLFU, {capacity} slots: {misses}, libCacheSim {other} misses\n")

"""The policies' own rules, against references that share nothing with them, and by hand."""

from dataclasses import dataclass

import cachetools
import numpy as np
import pytest
from driving import LayerStep, Run, Shadow, drive, moves, on_time, reactive, skewed, skewed_sets

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, Knobs
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES, Lfu, Lru, Tam

MUST = [name for name, policy in POLICIES.items() if policy.admits == "must"]
NOT_MUST = [name for name in POLICIES if name not in MUST]


# -- against other implementations ----------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_lru_is_cachetools_lru_with_one_id_a_step(slots: int, seed: int) -> None:
    trace = skewed(20, 1000, seed)
    reference = cachetools.LRUCache(slots)
    expected = []
    for neuron in trace:
        expected.append(neuron in reference)
        reference[neuron] = None
    shadow = reactive("lru", [[neuron] for neuron in trace], 20, slots)
    assert [bool(hits) for hits in on_time(shadow)] == expected
    assert sorted(shadow.resident[0] | shadow._flying(0)) == sorted(reference)
    assert 0 < sum(expected) < len(expected)


def ranked_reference(sets, slots: int, scores) -> tuple[list[list[int]], list]:
    """Admit what was seen, highest score first; give up the lowest; ties to the lowest id."""
    here: set[int] = set()
    hits, moved = [], []
    for at, ids in enumerate(sets):
        seen = set(ids)
        hits.append(sorted(seen & here))
        score = scores(at, seen)
        want = sorted(seen - here, key=lambda i: (-score(i), i))
        others = sorted(here - seen, key=lambda i: (score(i), i))
        out = others[: max(0, len(want) - (slots - len(here)))]
        come = want[: slots - len(here) + len(out)]
        here = (here - set(out)) | set(come)
        moved.append((come, out))
    return hits, moved


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 29])
def test_lfu_is_its_definition(slots: int) -> None:
    sets = skewed_sets(30, 400, 2)
    counts: dict[int, int] = {}

    def score(at: int, seen: set[int]):
        for neuron in seen:
            counts[neuron] = counts.get(neuron, 0) + 1
        return lambda i: counts.get(i, 0)

    hits, moved = ranked_reference(sets, slots, score)
    shadow = reactive("lfu", sets, 30, slots, swap_neurons=3)
    assert on_time(shadow) == hits
    assert moves(shadow) == moved
    assert slots == 0 or (shadow.hits and shadow.evictions and shadow.residuals)


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 29])
def test_lru_is_its_definition_on_sets(slots: int) -> None:
    sets = skewed_sets(30, 400, 3)
    last: dict[int, int] = {}

    def score(at: int, seen: set[int]):
        last.update(dict.fromkeys(seen, at))
        return lambda i: last.get(i, -1)

    hits, moved = ranked_reference(sets, slots, score)
    shadow = reactive("lru", sets, 30, slots, swap_neurons=3)
    assert on_time(shadow) == hits
    assert moves(shadow) == moved


@dataclass
class Scales:
    """A controller that sets the threshold_scale it was told to, step by step."""

    scales: list[float]
    at: int = 0
    sets = frozenset({"threshold_scale"})

    @property
    def knobs(self) -> Knobs:
        return Knobs(threshold_scale=self.scales[self.at])

    def start(self, swaps):
        pass

    def update(self, record, layers=None):
        self.at = min(self.at + 1, len(self.scales) - 1)
        return self.knobs


def tam_reference(sets, slots: int, scales, beta=0.90, promote=0.35, evict=0.08):
    """M = beta*M + (1-beta)*a in float32, multiply then add; evict resident M < theta_evict, not
    seen; fill free slots with the highest M >= theta_promote * scale, ties to the lowest id."""
    single = np.float32
    momentum: dict[int, np.float32] = {}
    here: set[int] = set()
    hits, moved, ties = [], [], 0
    for ids, scale in zip(sets, scales, strict=True):
        seen = set(ids)
        hits.append(sorted(seen & here))
        for i in momentum:
            momentum[i] = single(momentum[i] * single(beta))
        for i in seen:
            momentum[i] = single(momentum.get(i, single(0)) + single(1 - beta))
        out = sorted(i for i in here - seen if momentum[i] < single(evict))
        here -= set(out)
        warm = [i for i in momentum if i not in here and momentum[i] >= single(promote * scale)]
        warm.sort(key=lambda i: (-momentum[i], i))
        come = warm[: slots - len(here)]
        if len(come) < len(warm) and come and momentum[come[-1]] == momentum[warm[len(come)]]:
            ties += 1
        here |= set(come)
        moved.append((come, out))
    return hits, moved, ties


@pytest.mark.parametrize("slots", [0, 1, 3, 6, 30])
@pytest.mark.parametrize("seed", [0, 1])
def test_tam_is_its_rule(slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Neurons 3k, 3k+1, 3k+2 fire together, so that their momenta tie.
    sets = [[3 * i + j for i in ids for j in range(3)] for ids in skewed_sets(10, 400, seed)]
    scales = rng.uniform(0.40, 2.00, len(sets)).tolist()
    hits, moved, ties = tam_reference(sets, slots, scales)
    shadow = reactive("tam", sets, 30, slots, Scales(scales), swap_neurons=2)
    assert on_time(shadow) == hits
    assert moves(shadow) == moved
    if 0 < slots < 30:
        assert shadow.hits
        assert shadow.evictions
        assert ties or slots % 3 == 0
    # The scale matters.
    assert slots == 0 or tam_reference(sets, slots, [1.0] * len(sets))[1] != moved


def test_tam_weighs_a_chunk_by_share() -> None:
    tam = Tam(1, 4)
    tam.observe(0, np.array([1, 3], np.int32), np.array([0.5, 1.0], np.float32))
    assert tam.momentum[0] == pytest.approx([0, 0.05, 0, 0.1])
    tam.observe(0, np.array([1], np.int32), None)
    assert tam.momentum[0] == pytest.approx([0, 0.9 * 0.05 + 0.1, 0, 0.09])


def test_tam_at_its_thresholds() -> None:
    """Exactly theta_promote is promoted, exactly theta_evict is kept: fractions of 2 are exact."""
    tam = Tam(1, 2, beta=0.5, theta_promote=0.5, theta_evict=0.25)
    cache = NeuronCache(1, 2, 1, tam, Fixed(), trigger="serial")
    (swap,) = cache.plan(0, [0])  # M = 0.5
    cache.commit([swap.id])
    cache.plan(0, [])  # M = 0.25
    assert cache.state[0].tolist() == [2, 0]
    cache.plan(0, [])  # M = 0.125
    assert cache.state[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", [n for n in POLICIES if "rng" not in POLICIES[n].needs])
def test_layers_do_not_mix(name: str) -> None:
    """Two layers in one cache do what each does alone."""
    traces = [skewed_sets(16, 120, 5), skewed_sets(16, 120, 6)]
    alone = [moves(reactive(name, sets, 16, 6)) for sets in traces]
    steps = [[LayerStep(a, a, a), LayerStep(b, b, b)] for a, b in zip(*traces, strict=True)]
    run = Run(16, [6, 6], steps, "after", "active")
    cache = run.cache(name)
    cache.journal = shadow = Shadow(cache, None)
    drive(cache, run)
    both = moves(shadow)
    assert [both[0::2], both[1::2]] == alone


@pytest.mark.parametrize(
    "wrong",
    [{"beta": 1.0}, {"beta": -0.1}, {"theta_promote": 0.0}, {"theta_evict": -1.0}],
)
def test_tam_parameters_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(KairoxError, match=f"got {next(iter(wrong.values()))}|and -1.0"):
        Tam(1, 4, **wrong)


# -- numerics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.9, 0.999])
def test_c14_momentum_of_ones_is_one(beta: float) -> None:
    tam = Tam(1, 2, beta=beta)
    cache = NeuronCache(1, 2, 0, tam, Fixed(), observes="predicted")
    share = np.ones(1, np.float16)
    ids = np.array([1], np.int32)
    for _ in range(100_000):
        tam.observe(0, ids, None)
    cache.plan(0, ids, share)
    assert tam.momentum.dtype == np.float32
    assert tam.momentum[0, 1] == pytest.approx(1.0, abs=1e-4)  # float16 stops at 0.75 for 0.999
    for _ in range(int(20 / (1 - beta))):
        tam.observe(0, ids[:0], None)
    assert tam.momentum[0, 1] < 1e-8  # float16 sticks at 2.4e-7


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_c14_a_share_in_any_float_is_float32_inside(dtype) -> None:
    tam = Tam(1, 4)
    cache = NeuronCache(1, 4, 0, tam, Fixed(), observes="predicted")
    share = np.array([0.5, 0.25], dtype)
    for _ in range(3000):
        cache.plan(0, [1, 2], share)
    assert tam.momentum.dtype == np.float32
    assert tam.momentum[0].tolist() == pytest.approx([0, 0.5, 0.25, 0], rel=1e-5)
    assert share.dtype == dtype


def test_c14_counts_are_exact() -> None:
    lfu, lru = Lfu(1, 2), Lru(1, 2)
    ids = np.array([1], np.int32)
    for _ in range(70_000):
        lfu.observe(0, ids, np.ones(1, np.float32))
        lru.observe(0, ids, None)
    assert lfu.uses.tolist() == [[0, 70_000]]  # float16 stops at 2048
    assert lru.last_use.tolist() == [[0, 70_000]]


# -- orderings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_misses_lie_between_the_bounds(name: str, seed: int) -> None:
    """After: nothing misses less than what must be touched first, or more than everything."""
    sets = skewed_sets(20, 100, seed)
    touched = len({i for s in sets for i in s})
    shadow = reactive(name, sets, 20, 8, threshold_scale=0.5)
    assert touched <= shadow.residuals <= shadow.evaluated == sum(len(set(s)) for s in sets)


@pytest.mark.parametrize("name", POLICIES)
def test_everything_resident_hits_everything(name: str) -> None:
    shadow = reactive(name, skewed_sets(20, 50, 1), 20, 20, pinned=[list(range(20))])
    assert shadow.residuals == shadow.loads == 0
    assert shadow.hits == shadow.hit_resident == shadow.evaluated > 0


def test_lru_keeps_its_promise_of_stack_inclusion() -> None:
    """With one id a step, more slots never hit less."""
    trace = [[i] for i in skewed(20, 600, 4)]
    hits = [reactive("lru", trace, 20, slots).hits for slots in range(0, 21, 2)]
    assert hits == sorted(hits)
    assert hits[0] == 0 < hits[-1]


def test_is_whole_where_every_neuron_is_resident() -> None:
    cache = NeuronCache(2, 3, [3, 2], Lru(2, 3), Fixed(), pinned=[[0, 1], []])
    assert not cache.is_whole(0)
    (swap,) = cache.plan(0, [2])
    assert not cache.is_whole(0)
    cache.commit([swap.id])
    assert cache.is_whole(0)
    assert not cache.is_whole(1)

"""No run beats the lower bound: any trace, policy, dispatch, gating and machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import isnan

import numpy as np
import pytest
import toys
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from toy_engine import costs as toy_costs

from kairox_sim.cost_model import PassCost
from kairox_sim.dispatch import DISPATCHES
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, Link, Op, Quantity, load_profile
from kairox_sim.lower_bound import Bound, common_bound, rates_of, run_bound
from kairox_sim.memory import MemoryPlan
from kairox_sim.metrics import RunResult
from kairox_sim.policies import POLICIES
from kairox_sim.prediction import as_predicted
from kairox_sim.reuse import fewest_misses
from kairox_sim.settings import Settings, build_cache, quality_of, trigger_of
from kairox_sim.simulation import costs_of, memory_plan, simulate, target_shape
from kairox_sim.trace import Trace

ROUNDING_S = 1e-7  # a step: some 100 operations to the nearest nanosecond


# -- any run --------------------------------------------------------------------------------------


def drawn(value: float) -> Quantity:
    return Quantity(value=value, source="drawn")


def a_machine(
    gpu: float, cpu: float, link: float, dram: float, *, fixed_s: float = 0.0, vram: float = 1e15
) -> HardwareProfile:
    """Rates in bytes/s, the same for every operation; one fixed cost for everything."""
    base = load_profile("pc1")
    op = Op(fixed_s=drawn(fixed_s), bytes_per_s=drawn(gpu))
    bus = Link(copy_fixed_s=drawn(fixed_s), bytes_per_s=drawn(link))
    return base.model_copy(
        update={
            **dict.fromkeys(("attention", "gate", "predictor", "ffn_gpu", "head"), op),
            "ffn_cpu": Op(fixed_s=drawn(fixed_s), bytes_per_s=drawn(cpu)),
            "dram_bytes_per_s": drawn(dram),
            "h2d": bus,
            "d2h": bus,
            "gpu_flops_per_s": drawn(1e18),
            "cpu_flops_per_s": drawn(1e18),
            "handover_fixed_s": drawn(fixed_s),
            "vram_bytes": drawn(vram),
            "vram_margin_bytes": drawn(1e3),
        }
    )


def held_against(
    trace: Trace, chosen: Settings, machine: HardwareProfile, spare_bytes: float, prior: Trace
) -> tuple[RunResult, Bound, Bound]:
    """A run on the machine with so much more device memory than it needs, and its bounds."""
    header = trace.header
    quality = quality_of(chosen.prediction)
    if chosen.gating == "predicted" and quality is not None:  # it computes what is predicted
        trace = as_predicted(trace, quality, trigger_of(chosen), chosen.seed)
    shape = target_shape(chosen, header)
    made = build_cache(
        chosen, header.n_layers, header.n_neurons,
        prior=prior, shape=shape, profile=machine, evaluated=trace,
    )  # fmt: skip
    plan = memory_plan(chosen, trace, machine, shape, made)
    vram = max(plan.margin + 1.0, plan.total + spare_bytes)
    machine = machine.model_copy(update={"vram_bytes": drawn(vram)})
    plan = memory_plan(chosen, trace, machine, shape, made)
    run = simulate(trace, chosen, hardware=machine, prior=prior)
    costs = costs_of(chosen, machine, shape, made)
    predicts = run.summary["predict_s"] > 0 or chosen.gating == "predicted"
    own = run_bound(
        trace, costs, plan,
        n_predicted=None if predicts else 0,
        dense_host=chosen.dispatch == "layers",
    )  # fmt: skip
    return run, own, common_bound(trace, costs, plan)


def assert_not_beaten(run: RunResult, bound: Bound) -> None:
    wall_s = run.steps["wall_s"].to_numpy()
    assert (wall_s >= bound.by_step_s - ROUNDING_S).all()
    assert wall_s.sum() >= bound.total_s - ROUNDING_S * len(wall_s)
    if not isnan(bound.tpot_s):
        assert run.summary["tpot_s"] >= bound.tpot_s - ROUNDING_S


def activations(seed: int, n_layers: int, steps: list[tuple[int, int]], density: float) -> Trace:
    """Steps of (sequence, tokens); 1 token is a decode step. A part of each set stays."""
    rng = np.random.default_rng(seed)
    often = rng.random((n_layers, 12)) ** 2 * 2 * density
    rows: list[tuple[int, int, int, int, int]] = []
    bits: list[np.ndarray] = []
    for number, (seq, n_tokens) in enumerate(steps):
        for layer, token in product(range(n_layers), range(n_tokens)):
            rows.append((seq, number, 7 * number + token, layer, int(n_tokens == 1)))
            bits.append(rng.random(12) < often[layer])
    seq, step, token, layer, phase = np.array(rows).T
    return Trace.from_arrays(
        toys.header(n_layers, 12, sequences=tuple(toys.header(1, 1).sequences) + _second()),
        seq=seq, step=step, token=token, layer=layer, phase=phase, bits=np.array(bits),
    )  # fmt: skip


def _second():
    first = toys.header(1, 1).sequences[0]
    return (replace(first, seq=1, source_sha256="b" * 64),)


SHAPES = {
    "decode": [(0, 1)] * 8,
    "prefill first": [(0, 3)] + [(0, 1)] * 5,
    "two sequences": [(0, 2), (0, 1), (0, 1), (1, 4), (1, 1), (1, 1), (1, 1)],
}


@st.composite
def chosen_settings(draw: st.DrawFn) -> Settings:
    gating = draw(st.sampled_from(["exact", "oracle", "screened", "predicted", "dense"]))
    still = ["static", "all", "none"]  # dense computing leaves nothing to predict
    policy = draw(st.sampled_from(still if gating == "dense" else sorted(POLICIES)))
    dispatch = draw(st.sampled_from(sorted(DISPATCHES)))
    given = {
        "policy": policy,
        "gating": gating,
        "dispatch": dispatch,
        "slots": draw(st.sampled_from([0, 1, 4, 9, 12])),
        "swap_neurons": draw(st.sampled_from([16, 5000, 20000])),
        "late": draw(st.sampled_from([None, "cpu", "stall", "cancel"])),
        # Not `instant`: see test_instant_is_not_of_this_world.
        "trigger": draw(st.sampled_from([None, None, "after", "attn_in", "attn_out", "serial"])),
        "start": draw(st.sampled_from(["empty", "warm"])),
        "copies": draw(st.sampled_from([None, "gather", "row"])),
        "lookahead_from": draw(st.sampled_from([1, 1, 2])),
        "prediction": draw(st.sampled_from(["perfect", "0.8,0.7"])),
        "predictor": draw(st.sampled_from([None, "rank", "lookahead"])),
        "model_as": "prosparse-7b",
    }
    if draw(st.integers(0, 4)) == 0:  # llama.cpp
        given |= {
            "policy": "static", "gating": "dense", "dispatch": "layers", "placement": "layers",
            "slots": draw(st.sampled_from([f"ngl:{n}" for n in (0, 1, 11, 16, 31, 32)])),
            "trigger": None,
            "late": None,
        }  # fmt: skip
    if POLICIES[given["policy"]].needs >= {"future"}:  # it is shown what is computed
        given["observes"] = "evaluated"
    return Settings.of({key: value for key, value in given.items() if value is not None})


machines = st.builds(
    a_machine,
    gpu=st.sampled_from([2e10, 2e11, 2e12]),
    cpu=st.sampled_from([1e9, 2e10, 9e10]),
    link=st.sampled_from([1e9, 2.5e10, 2e11]),
    dram=st.sampled_from([1e10, 7e10, 1e15]),
    fixed_s=st.sampled_from([0.0, 0.0, 1e-6, 3e-4]),
)


@settings(max_examples=120, deadline=None)
@given(
    chosen=chosen_settings(),
    machine=machines,
    shape=st.sampled_from(sorted(SHAPES)),
    n_layers=st.sampled_from([1, 2, 4]),
    density=st.sampled_from([0.1, 0.4, 0.9]),
    seed=st.integers(0, 99),
    spare_bytes=st.sampled_from([0.0, 3e8, 1e12]),
)
def test_no_run_beats_it(chosen, machine, shape, n_layers, density, seed, spare_bytes) -> None:
    trace = activations(seed, n_layers, SHAPES[shape], density)
    prior = prior_of(n_layers)
    try:
        run, own, common = held_against(trace, chosen, machine, spare_bytes, prior)
    except KairoxError:  # what does not go together
        reject()
    assert_not_beaten(run, own)
    lossy = chosen.gating == "predicted" and chosen.prediction != "perfect"
    if not lossy and run.provenance["fits"]:
        assert_not_beaten(run, common)


@cache
def prior_of(n_layers: int) -> Trace:
    made = activations(1000, n_layers, [(0, 1)] * 30, 0.4)
    sequences = tuple(replace(s, source_sha256="c" * 64) for s in made.header.sequences)
    return Trace(replace(made.header, sequences=sequences), dict(made._columns))


def reach(chosen: dict, machine: HardwareProfile, **given) -> tuple[float, float]:
    """The bound over the run's time: (by itself, common to all)."""
    trace = activations(5, given.pop("n_layers", 2), SHAPES["decode"], 0.4)
    asked = Settings.of({"model_as": "prosparse-7b", "gating": "oracle", **chosen})
    spare = given.pop("spare", 0.0)
    run, own, common = held_against(trace, asked, machine, spare, prior_of(trace.header.n_layers))
    assert_not_beaten(run, own)
    assert_not_beaten(run, common)
    tpot_s = run.summary["tpot_s"]
    return own.tpot_s / tpot_s, common.tpot_s / tpot_s


def test_it_is_reached_where_nothing_overlaps() -> None:
    """Memory that is all, or all but, on one side leaves nothing to gain."""
    slow_link = a_machine(gpu=4e11, cpu=4e9, link=1e5, dram=4e10)
    own, common = reach({"policy": "all", "dispatch": "gpu"}, slow_link)
    assert own == pytest.approx(4e11 / (4e11 + 4e9), rel=0.01)
    assert common == pytest.approx(4e11 / (4e11 + 4e10), rel=0.01)
    # The host computes every neuron while the GPU, much faster, is as good as idle.
    own, _ = reach({"policy": "none"}, a_machine(gpu=4e14, cpu=4e9, link=1e8, dram=4e10))
    assert own > 0.9
    # All of it comes over a link that is faster than the host computes.
    own, _ = reach(
        {"policy": "static", "slots": 0, "dispatch": "gpu"},
        a_machine(gpu=4e14, cpu=1e9, link=2e10, dram=7e10),
    )
    assert 0.9 < own <= 1


@pytest.mark.parametrize("layers", ["ngl:0", "ngl:1", "ngl:11", "ngl:16", "ngl:31", "ngl:32"])
def test_llama_cpp_is_at_or_above_it(layers: str) -> None:
    own, common = reach(
        {
            "policy": "static", "gating": "dense", "dispatch": "layers", "placement": "layers",
            "slots": layers,
        },
        a_machine(gpu=4e11, cpu=3e10, link=2e10, dram=7e10),
    )  # fmt: skip
    assert 0.5 < own <= 1
    assert common < own  # it computes every neuron


@pytest.mark.parametrize("dispatch", sorted(set(DISPATCHES) - {"layers"}))
@pytest.mark.parametrize("policy", ["lru", "belady_bypass", "static"])
def test_the_random_runs_are_not_in_vain(dispatch: str, policy: str) -> None:
    """Each of these goes together with gating and machine, and is within ten times its bound."""
    own, _ = reach(
        {
            "policy": policy, "dispatch": dispatch, "slots": 4,
            "trigger": "serial" if dispatch in ("gpu", "cost") else None, "prediction": "perfect",
        },
        a_machine(gpu=4e11, cpu=3e10, link=2.5e10, dram=7e10),
    )  # fmt: skip
    assert 0.1 < own <= 1


def test_instant_is_not_of_this_world() -> None:
    """Resident before their bytes have moved, neurons are where nothing could have put them."""
    trace = activations(5, 2, SHAPES["decode"], 0.9)
    chosen = Settings(
        policy="lru", trigger="instant", gating="oracle", slots=12, model_as="prosparse-7b"
    )
    machine = a_machine(gpu=4e11, cpu=3e10, link=1e8, dram=7e10)
    prior, without = prior_of(2), chosen.with_overrides({"slots": 0})
    run, own, _ = held_against(trace, without, machine, 0.0, prior)
    assert_not_beaten(run, own)
    free, _, _ = held_against(trace, chosen, machine, 0.0, prior)
    assert free.summary["tpot_s"] < own.tpot_s


# -- the arithmetic -------------------------------------------------------------------------------


def by_hand(**changes) -> tuple[Trace, MemoryPlan, object]:
    """Two layers: 800 bytes of attention, 40 of keys and values a token, bundles of 40, and a head
    of 160; gate 8 x 20. Rates in bytes/ns: GPU 100, CPU 4, link 3, DRAM 5."""
    chunks = [[[[0, 1]], [[2]]], [[[0]], [[2, 3]]], [[[0, 1]], [[2, 3]]]]
    trace = toys.of_chunks(chunks, 8, n_layers=2)
    op = PassCost(0.0, 100e9, float("inf"))
    costs = replace(
        toy_costs(cpu_cap=4, h2d=3, dram=5, gating=changes.pop("gating", "exact")),
        attention=op, gate=op, look_ahead=op, low_rank=op, ffn_gpu=op, head=op,
        predictor="lookahead",
    )  # fmt: skip
    parts = {
        "attention": 1600, "head": 160, "predictor": 0, "gate": 320, "kv": 240, "slots": 80,
        "margin": 50, "vram": 2450,
    } | changes  # fmt: skip
    plan = MemoryPlan(profile="x", model="toy", gating="exact", slots_per_layer=1.0, **parts)
    return trace, plan, costs


def test_a_bound_by_hand() -> None:
    trace, plan, costs = by_hand()
    assert plan.fits
    got = run_bound(trace, costs, plan, n_predicted=1, dense_host=False)
    # Dense: 1600 + 160 + 320 + 80 a token of context. The look-ahead reads a layer's gate again.
    w = np.array([2160 + 3 * 40, 2240 + 3 * 40, 2320 + 4 * 40])
    # V: what is not margin, without keys and values reserved for tokens to come. Two slots.
    v = np.array([2400 - 160, 2400 - 80, 2400])
    ns = np.maximum((w + 160) / (100 + 4), (w - v) / 5)
    assert got.by_step_s == pytest.approx(1e-9 * ns)
    assert got.slots == 2
    # 0 and 2 are kept throughout, or 0 and 1: three steps want 3, 3 and 4.
    assert got.misses == 4
    assert got.total_s == pytest.approx(1e-9 * max(ns.sum(), 4 * 40 / 5))
    assert got.tpot_s == pytest.approx(got.total_s / 3)
    streams = run_bound(trace, costs, plan, n_predicted=1)
    assert streams.by_step_s == pytest.approx(1e-9 * np.maximum((w + 160) / (100 + 5), (w - v) / 5))


def test_the_common_bound_by_hand() -> None:
    """60 bytes a neuron and no gate; of the plan only memory and margin count."""
    trace, plan, costs = by_hand()
    w = np.array([1840 + 3 * 60, 1920 + 3 * 60, 2000 + 4 * 60])
    ns = np.maximum(w / (100 + 5), (w - 2400) / 5)
    got = common_bound(trace, costs, plan)
    assert got.by_step_s == pytest.approx(1e-9 * ns)
    assert got.slots == 10  # 2400 - 1840 bytes, rounded up
    assert got.misses == 0
    smaller = common_bound(trace, costs, replace(plan, vram=1950))
    assert smaller.by_step_s == pytest.approx(1e-9 * np.maximum(w / 105, (w - 1900) / 5))
    assert (smaller.slots, smaller.misses) == (1, 10 - 3)
    # Of attention, head, keys and values 0, 20 and 100 bytes are not kept.
    run_ns = (7 * 60 + 120) / 5
    assert smaller.total_s == pytest.approx(1e-9 * max(smaller.by_step_s.sum() * 1e9, run_ns))


def test_what_does_not_fit_is_bounded_by_what_it_holds() -> None:
    trace, plan, costs = by_hand(vram=1000, slots=640)
    assert not plan.fits
    got = run_bound(trace, costs, plan, n_predicted=0)
    assert got.slots == 16
    assert got.misses == 0
    w = np.array([2160 + 3 * 40, 2240 + 3 * 40, 2320 + 4 * 40])
    assert got.by_step_s == pytest.approx(1e-9 * w / 105)


def test_a_look_ahead_alone_reads_the_gate_of_the_layers_it_predicts() -> None:
    trace, plan, costs = by_hand(gating="oracle")
    with_it = run_bound(trace, costs, plan, n_predicted=1)
    without = run_bound(trace, costs, plan, n_predicted=0)
    assert with_it.by_step_s - without.by_step_s == pytest.approx(1e-9 * np.full(3, 160 / 105))
    assert with_it.slots == without.slots == 2  # reserved, and so of no use to anybody


def test_rates_are_the_highest() -> None:
    costs = replace(toy_costs(cpu_cap=4, h2d=3, dram=5), head=PassCost(0.0, 7e9, 1.0))
    finite = {
        name: PassCost(0.0, 1e9, 1.0) for name in ("attention", "gate", "low_rank", "ffn_gpu")
    }
    got = rates_of(replace(costs, **finite), dense_host=False)
    assert (got.gpu, got.cpu, got.link, got.dram) == (7e9, 4e9, 3e9, 5e9)
    assert (got.anywhere, got.from_host) == (11e9, 5e9)
    assert rates_of(costs).cpu == 5e9
    wide = rates_of(toy_costs(cpu_cap=4, h2d=3, dram=50), dense_host=False)
    assert wide.from_host == 7e9


# -- the fewest misses ----------------------------------------------------------------------------


def least_misses(steps: list[frozenset[int]], slots: int) -> int:
    """By trying everything that may be resident at first and kept after each step."""
    everything = frozenset().union(*steps)

    def subsets(base: frozenset[int]) -> list[frozenset[int]]:
        sizes = range(min(slots, len(base)) + 1)
        return [frozenset(c) for k in sizes for c in combinations(sorted(base), k)]

    @cache
    def least(at: int, here: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        seen = steps[at]
        return len(seen - here) + min(least(at + 1, keep) for keep in subsets(here | seen))

    return min(least(0, start) for start in subsets(everything))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.frozensets(st.integers(0, 5), max_size=4), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_fewest_misses_is_the_least_of_all(steps, slots: int) -> None:
    """Six ids as two layers of three."""
    chunks = [
        [[[i for i in range(3) if i in s]], [[i for i in range(3) if i + 3 in s]]] for s in steps
    ]
    trace = toys.of_chunks(chunks, 3, n_layers=2)
    assert fewest_misses(trace, "active", 0, len(steps), slots) == least_misses(steps, slots)


def test_of_everything_what_has_no_slot_is_missed() -> None:
    trace = toys.random_trace(2, 16, 5, prefill=0)
    full = toys.of_chunks([[[range(16)]] * 2] * 5, 16, n_layers=2)
    for slots in (0, 7, 31, 32, 40):
        every = fewest_misses(trace, "all", 0, 5, slots)
        assert every == fewest_misses(full, "active", 0, 5, slots) == 5 * max(0, 32 - slots)


def test_a_prefill_between_stretches_of_decoding_loads_for_nothing() -> None:
    """One slot, A then B: two misses at most one of which a start can save, unless prefill is
    between them."""
    together = [[[[0]]], [[[1]]]]
    apart = [[[[0]]], [[[2], [3]]], [[[1]]]]
    machine = a_machine(gpu=1e14, cpu=1e9, link=1e9, dram=1e9)
    tpot_s = []
    for chunks in (together, apart):
        rows = [(i, len(step[0])) for i, step in enumerate(chunks)]
        trace = Trace.from_arrays(
            toys.header(1, 4),
            seq=[0 for i, n in rows for _ in range(n)],
            step=[i for i, n in rows for _ in range(n)],
            token=[t for _, n in rows for t in range(n)],
            layer=[0 for _, n in rows for _ in range(n)],
            phase=[int(n == 1) for _, n in rows for _ in range(n)],
            bits=np.array([[k in t for k in range(4)] for step in chunks for t in step[0]]),
        )
        chosen = Settings(policy="lru", slots=1, gating="oracle", model_as="prosparse-7b")
        shape = target_shape(chosen, trace.header)
        made = build_cache(chosen, 1, 4, shape=shape, profile=machine, evaluated=trace)
        plan = memory_plan(chosen, trace, machine, shape, made)
        plan = replace(plan, vram=plan.total)
        tpot_s.append(run_bound(trace, costs_of(chosen, machine, shape, made), plan).tpot_s)
    bundle_s = 11008 // 4 * 3 * 4096 * 2 / 1e9
    assert tpot_s[0] == pytest.approx(bundle_s / 2, rel=1e-3)
    assert tpot_s[1] < 0.05 * bundle_s

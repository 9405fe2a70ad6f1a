"""The audit's last column: what our own objects say of a row of the guide.

Rows about a rule or a cost are answered by the object itself; rows about the throughput of a system
by runs of the systems on the guide's first machine (guide_runs), where they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from experiments.published.audit_basis import Basis, ms
from experiments.published.data import number, table
from experiments.published.guide_listing import demo_case, replay
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.policies import Tam
from kairox_sim.workload_presets import PRESETS

SYSTEM_ROWS = {"T1": "llama.cpp", "T2": "PowerInfer", "T3": "Q-Infer", "T4": "Neuralink",
               "T5": "Kairox"}  # fmt: skip
NOT_SIMULATED, NOT_RUN = "-", "not run"


def simulated(item: str, basis: Basis, runs: Mapping[str, str] | None = None) -> str:
    """What our simulator says of one row. `runs`: system -> what its runs say."""
    if item in SYSTEM_ROWS:
        return (runs or {}).get(SYSTEM_ROWS[item], NOT_RUN)
    return ANSWERS[item](basis) if item in ANSWERS else NOT_SIMULATED


def costs_13b(basis: Basis) -> CostModel:
    """The guide's model on its first machine, as it is run: predicted, every row moves."""
    shape = basis.pc1.shape
    return costs_for(
        basis.pc1.profile, shape, "predicted",
        trace_layers=shape.n_layers, trace_neurons=shape.n_neurons,
    )  # fmt: skip


def _burst(basis: Basis) -> str:
    costs = costs_13b(basis)
    said = [
        f"{n:,.0f}: {ms(costs.ffn_cpu_s(int(n), 1))}"
        for n in (number("guide", "burst", k) for k in ("smallest", "cold_neurons", "largest"))
    ]
    return "residual neurons of one layer on the host, alone: " + ", ".join(said)


def _constants(basis: Basis) -> str:
    costs = costs_13b(basis)
    n = 1000
    return (
        f"{n:,} neurons: {ms(costs.ffn_gpu_s(n, 1))} on the GPU, {ms(costs.swap_s(n))} over the "
        f"link, {ms(costs.ffn_cpu_s(n, 1))} on the host, fixed costs included"
    )


def _size(basis: Basis) -> str:
    costs = costs_13b(basis)
    n_bytes = costs.swap_bytes(1000)
    return f"{n_bytes / 1e6:.1f} MB in {ms(costs.swap_s(1000))} (13B, one gather, pc1)"


def _prefetch(basis: Basis) -> str:
    costs, shape = costs_13b(basis), basis.pc1.shape
    window_s = number("guide", "time_breakdown", "kairox_prefetch") * 1e-3
    link = number("guide", "hardware_box", "link") * 1e9
    per_layer = window_s * link / shape.neuron_bytes / shape.n_layers
    each = costs.swap_neurons
    n_swaps = per_layer / each
    seconds = shape.n_layers * n_swaps * costs.swap_s(each)
    return (
        f"{per_layer:.0f} neurons a layer in swaps of {each}: {ms(seconds)} of link time a token "
        f"at {basis.pc1.link / 1e9:g} GB/s with a fixed cost each"
    )


def _residual(basis: Basis) -> str:
    costs, shape = costs_13b(basis), basis.pc1.shape
    n = round(basis.pc1.active(basis.predicted_share)) - basis.pc1.slots
    seconds = shape.n_layers * costs.ffn_cpu_s(n, 1)
    return (
        f"predicted and not resident, {n:,} a layer, on the sparse kernel alone: {ms(seconds)} a "
        "token"
    )


def _floor(basis: Basis) -> str:
    costs, shape = costs_13b(basis), basis.pc1.shape
    seconds = shape.n_layers * (costs.attention_s(1, 512) + costs.predict_s(1)) + costs.head_s(1)
    return f"attention, predictor and head with launches: {ms(seconds)} a token"


def _listing(basis: Basis) -> str:
    lines = replay(demo_case())
    hits = ", ".join(f"{x.hit_percent:.1f}" for x in lines)
    return f"NeuronCache, Tam and Anb print the same ten lines: hits {hits} %"


def _same_step(basis: Basis) -> str:
    lines = replay(demo_case())
    return "resident before: " + ", ".join(f"{x.before_percent:.1f}" for x in lines) + " %"


def filled_by_noise(n_steps: int = 300, seed: int = 0) -> tuple[float, float, float]:
    """(share of slots filled, loads a step late, hit_resident) of the guide's Tam.

    One layer of 2,000 neurons that fire independently, at the rates of the synthetic ProSparse-13B;
    400 slots; the last third of the steps is counted.
    """
    rng = np.random.default_rng(seed)
    n, slots = 2000, 400
    rates = PRESETS["prosparse-13b"].active.quantiles(n)
    cache = NeuronCache(1, n, slots, Tam(1, n), Fixed())
    late = n_steps * 2 // 3
    loads = hits = evaluated = 0
    for step in range(n_steps):
        fired = np.flatnonzero(rng.random(n) < rates).astype(np.int32)
        cache.commit([swap.id for swap in cache.plan(0, fired)])
        cache.lookup(0, fired, fired)
        counts = cache.take_counts()
        if step >= late:
            loads += counts.loads
            hits += counts.hit_resident
            evaluated += counts.evaluated
    filled = float((cache.state[0] >= 2).sum()) / slots
    return filled, loads / (n_steps - late), hits / evaluated


def _filling(basis: Basis) -> str:
    filled, loads, hit = filled_by_noise()
    return (
        f"independent neurons of ProSparse-like skew, no persistence: {filled:.0%} of the slots "
        f"fill, {loads:.1f} loads a layer-step go on, {hit:.0%} of the active are resident before "
        "(synthetic)"
    )


def _hits(basis: Basis) -> str:
    base = table("fork", "baseline")
    return (
        "both definitions are columns of every table here: hit_resident and hit_on_time; the "
        f"fork's {base['hit_of_active']} % counts after the plan"
    )


def _rules(basis: Basis) -> str:
    return "our controllers give the numbers in this row"


ANSWERS: dict[str, Callable[[Basis], str]] = {
    "T6": _residual, "T7": _floor, "4": _residual, "5": _burst, "6": _constants, "7": _size,
    "9": _prefetch, "10": lambda b: b.plan_of_slots(b.pc1.slots), "13": _hits, "19": _residual,
    "20": _rules, "21": _rules, "22": _rules, "24": _listing, "25": _filling, "26": _same_step,
    "28": _listing,
}  # fmt: skip

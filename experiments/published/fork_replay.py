"""The released Kairox policy on synthetic sets, counted as the fork of its artifact counts.

No clock: a layer-step waits for its copies if they take longer than the compute of one layer-step,
as the fork's own law splits its times (16,330 ms over 511 tokens of 32 layers; 16.86 us a copy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from experiments.published.data import number, table
from experiments.published.shipped_sort import ShippedSort
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed, SwapCap
from kairox_sim.model import find_shape
from kairox_sim.policies.grouped import Grouped
from kairox_sim.policies.tam_released import TamReleased
from kairox_sim.record import LayerWaits, StepRecord
from kairox_sim.workload import Workload, generate
from kairox_sim.workload_presets import find_workload

MODEL = "prosparse-7b@q8_0"
NO_FILTER = 1e-4  # the fork's "off": KAIROX_TAU_LOAD=0.0001; whatever was never seen stays out
UNSEEN = StepRecord.with_unknown()

Sets = list[list[NDArray[np.int32]]]  # [step][layer] evaluated ids


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, scaled to all layers of the model."""

    hit_percent: float  # of the evaluated, resident after the plan of the same layer-step
    before_percent: float  # the same before that plan
    loads: float  # neurons
    copies: float  # one per matrix and group
    wasted_percent: float  # of the loads: evicted before their first use
    resident_percent: float
    passing_percent: float  # groups above tau after the last step, of those that fit; nan without


@cache
def workload(persistence: float) -> Workload:
    """ProSparse-7B's predicted sets, C(16) fitted to 27.5 %."""
    return dataclasses.replace(find_workload("prosparse-7b"), persistence=persistence)


@cache
def sets_of(persistence: float, n_tokens: int, n_layers: int, seed: int = 0) -> Sets:
    """Evaluated ids. Layers of the workload are equally dense, so a few stand for all."""
    trace = generate(workload(persistence), n_tokens, n_layers=n_layers, seed=seed)
    return [[step.evaluated(layer) for layer in range(n_layers)] for step in trace.steps()]


def capacity(gibibytes: float) -> int:
    """Neurons a layer at `-vb`: 5,187 at 6 GiB, as logged, and what each GiB more holds."""
    shape = find_shape(MODEL)
    more = (gibibytes - 6) * 2**30 / (shape.n_layers * shape.neuron_bytes)
    return round(number("fork", "budget", "resident_neurons") + more)


def window_s() -> float:
    """Time of one layer-step without copies."""
    steps = number("fork", "setting", "decode_tokens") * number("fork", "setting", "layers")
    return number("fork", "copy_law", "base_ms") * 1e-3 / steps


def consecutive(n_layers: int, n_neurons: int, size: int) -> NDArray[np.int32]:
    """[n_layers, n_groups, size]: the fork cuts one and the same order of neurons by every size."""
    ids = np.arange(n_neurons, dtype=np.int32).reshape(1, -1, size)
    return np.repeat(ids, n_layers, axis=0)


def replay(
    sets: Sets,
    size: int,
    slots: int,
    *,
    capped: bool = True,
    tau: float | None = None,
    ties: str = "low",
    per_copy_s: float | None = None,
    shipped_sort: bool = False,
) -> Outcome:
    """Run the released policy over `sets` in groups of `size`, plan and count as the fork does.

    shipped_sort: zeros fill up the top K in the order that the fork's own sort leaves them in.
    """
    shape = find_shape(MODEL)
    n_layers, n_neurons = len(sets[0]), shape.n_neurons
    n_groups, whole = n_neurons // size, slots // size * size
    tam = (
        ShippedSort(n_layers, n_groups, tau=tau or 0.0)
        if shipped_sort
        else TamReleased(n_layers, n_groups, tau=tau, ties=ties)
    )
    cache = NeuronCache(
        n_layers, n_neurons, whole,
        Grouped(tam, consecutive(n_layers, n_neurons, size)),
        SwapCap() if capped else Fixed(),
        warm=[np.arange(whole, dtype=np.int32)] * n_layers,
        swap_neurons=size, trigger="instant",
    )  # fmt: skip
    matrices = shape.rows_per_neuron
    each_s = number("fork", "copy_law", "per_copy_us") * 1e-6 if per_copy_s is None else per_copy_s
    may_s = window_s()
    idle = np.zeros(n_layers)
    n_copies = evaluated = after = before = 0
    for step in sets:
        waited = np.zeros(n_layers, bool)
        for layer, ids in enumerate(step):
            swaps = cache.plan(layer, ids)
            copies = matrices * len(swaps)
            waited[layer] = copies * each_s > may_s
            n_copies += copies
            cache.commit([swap.id for swap in swaps])
            split = cache.lookup(layer, ids, ids)
            evaluated += ids.size
            after += split.on_time.size
            before += split.hit_resident
        cache.end_step(UNSEEN, LayerWaits(waited, idle))
    scale = shape.n_layers / n_layers
    totals = cache.totals
    passing = np.nan
    if tau is not None:
        scores = np.stack([tam.momentum.at(layer, tam.decay) for layer in range(n_layers)])
        passing = 100 * float((scores > tau).sum()) / (n_layers * (whole // size))
    return Outcome(
        hit_percent=100 * after / evaluated,
        before_percent=100 * before / evaluated,
        loads=totals["loads"] * scale,
        copies=n_copies * scale,
        wasted_percent=100 * totals["wasted"] / totals["loads"] if totals["loads"] else np.nan,
        resident_percent=100 * whole / n_neurons,
        passing_percent=passing,
    )


def static_oracle(sets: Sets, slots: int) -> float:
    """Hits in % of the most frequent neurons of this very run, as many a layer as fit."""
    n_neurons = find_shape(MODEL).n_neurons
    hits = total = 0
    for layer in range(len(sets[0])):
        counts = np.bincount(np.concatenate([step[layer] for step in sets]), minlength=n_neurons)
        hits += int(np.sort(counts)[::-1][:slots].sum())
        total += int(counts.sum())
    return 100 * hits / total


def measured_c16(sets: Sets) -> float:
    """C(16) in % of the sets: of the other members of an evaluated neuron's group, how many are."""
    size = find_workload("prosparse-7b").group_size
    n_groups = find_shape(MODEL).n_neurons // size
    pairs = members = 0
    for step in sets:
        for ids in step:
            in_group = np.bincount(ids // size, minlength=n_groups)
            pairs += int((in_group * (in_group - 1)).sum())
            members += ids.size
    return 100 * pairs / ((size - 1) * members)


def sizes() -> Sequence[int]:
    """Group sizes of the fork's sweep."""
    found: Sequence[int] = table("fork", "sweep")["group_size"]
    return found

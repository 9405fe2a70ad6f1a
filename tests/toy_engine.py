"""Costs in whole nanoseconds and a policy that follows a script: timelines to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

import numpy as np
import pytest

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Controller, Fixed
from kairox_sim.costs import CostModel, DecideCost, PassCost
from kairox_sim.engine import run_trace
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned
from kairox_sim.model import ModelShape
from kairox_sim.policies.base import NOTHING
from kairox_sim.prediction import Perfect
from tests.toys import of_chunks

NS = 1e-9  # s
PER_NS = 1e9  # bytes/s: one byte per ns
BUNDLE = 40  # bytes

SHAPE = ModelShape(
    name="toy",
    n_layers=2,
    d_model=10,  # partial sums: 40 bytes a token
    n_neurons=8,
    n_heads=1,
    n_kv_heads=1,
    head_dim=10,
    vocab=8,
    gated=True,
    activation="relu",
    activation_threshold=0.0,
    bytes_per_weight=2,
    tied_embedding=False,
    predictor_rank=1,
    source="made up",
)


def costs(
    *,
    attention=100,
    gate=10,
    predict=20,
    ffn=30,
    ffn_rate=40,
    ffn_flops_per_ns=inf,
    head=50,
    head_flops_per_ns=inf,
    cpu_fixed=7,
    cpu_cap=10,
    cpu_flops_per_ns=inf,
    dram=inf,
    copy_fixed=6,
    h2d=20,
    rowcopies=False,
    copies=None,
    copy_sync=0,
    position=None,
    act_fixed=4,
    d2h_fixed=5,
    handover=3,
    handovers=1,
    decide=8,
    decide_per_swap=1,
    decide_blocks_gpu=False,
    gating="exact",
    bundle=BUNDLE,
    swap_neurons=16,
) -> CostModel:
    """Durations in ns, rates in bytes (or flops) per ns.

    As given: GPU ops of a fixed time each, the FFN 30 + 1 a neuron; a swap 6 + 2 a neuron; a
    hand-over d2h 5, 3, pool 7 + 4 a neuron, sums 4 + 2 a token, 3; a decision 8 + 1 a swap.
    """

    def fixed(ns):
        return PassCost(ns * NS, inf, inf)

    return CostModel(
        shape=SHAPE,
        gating=gating,
        predictor="none" if gating == "dense" else "rank",
        bundles_per_neuron=1.0,
        layers_ratio=1.0,
        swap_neurons=swap_neurons,
        attention=fixed(attention),
        gate=fixed(gate),
        look_ahead=fixed(gate),
        low_rank=fixed(predict),
        ffn_gpu=PassCost(ffn * NS, ffn_rate * PER_NS, ffn_flops_per_ns * PER_NS),
        head=PassCost(head * NS, inf, head_flops_per_ns * PER_NS),
        cpu_fixed_s=cpu_fixed * NS,
        cpu_cap_bytes_per_s=cpu_cap * PER_NS,
        cpu_flops_per_s=cpu_flops_per_ns * PER_NS,
        dram_bytes_per_s=dram * PER_NS,
        bundle_bytes=float(bundle),
        copies=copies or ("bundle" if rowcopies else "gather"),
        h2d_copy_fixed_s=copy_fixed * NS,
        h2d_bytes_per_s=h2d * PER_NS,
        act_h2d_fixed_s=act_fixed * NS,
        d2h_copy_fixed_s=d2h_fixed * NS,
        d2h_bytes_per_s=inf,
        handover_s=handover * NS,
        decide={"default": DecideCost(decide * NS, inf, decide_per_swap * NS)},
        decide_neurons=8,
        decide_blocks_gpu=decide_blocks_gpu,
        copy_sync_s=copy_sync * NS,
        handovers=handovers,
        position=None if position is None else np.array(position, np.int32),
    )


class Scripted:
    """Promotes and evicts what the script says for its n-th plan; nothing after its end."""

    knobs: ClassVar = frozenset({"max_swaps"})
    admits: ClassVar = "filter"
    fills: ClassVar = "slots"
    default_trigger: ClassVar = "attn_out"
    default_observes: ClassVar = "predicted"
    default_late: ClassVar = "cpu"
    needs: ClassVar = frozenset()
    evicts_seen: ClassVar = False

    def __init__(self, *script):
        self.script = list(script)  # (promote, evict) each
        self.asked = []  # (layer, seen) each

    def observe(self, layer, seen, share):
        pass

    def plan(self, layer, seen, state, free_slots, limit, knobs):
        self.asked.append((layer, seen.tolist()))
        if not self.script:
            return NOTHING, NOTHING
        promote, evict = self.script.pop(0)
        return np.array(promote, np.int32), np.array(evict, np.int32)


class Journal:
    """What a cache was asked and answered; landings as `run_trace` replays them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def landings(self) -> list[tuple[int, ...]]:
        return [e.swap_ids for e in self.events if isinstance(e, Committed)]

    @property
    def issued(self) -> list[int]:
        return [s.id for e in self.events if isinstance(e, Planned) for s in e.swaps]

    @property
    def landed(self) -> list[int]:
        return [swap_id for swap_ids in self.landings for swap_id in swap_ids]

    @property
    def cancelled(self) -> list[int]:
        return [e.swap_id for e in self.events if isinstance(e, Cancelled)]

    @property
    def splits(self) -> list[tuple[list[int], list[int], list[int]]]:
        """(on time, residual, late) per lookup."""
        looked_up = [e.split for e in self.events if isinstance(e, LookedUp)]
        return [(s.on_time.tolist(), s.residual.tolist(), s.late.tolist()) for s in looked_up]


def new_cache(
    policy,
    *,
    n_layers=2,
    n_neurons=8,
    slots: int | Sequence[int] = 8,
    controller: Controller | None = None,
    **options,
) -> NeuronCache:
    return NeuronCache(
        n_layers, n_neurons, slots, policy, controller or Fixed(), journal=Journal(), **options
    )


def lanes(run) -> dict[str, list[tuple]]:
    """lane -> (name, layer, began, end), in order of time."""
    found: dict[str, list[tuple]] = {}
    for s in sorted(run.slices, key=lambda s: s.began_ns):
        found.setdefault(s.lane, []).append((s.name, s.layer, s.began_ns, s.end_ns))
    return found


def in_ns(seconds: float) -> float:
    return seconds / NS


BOTH = [[[0, 1]], [[2, 3]]]  # one decode step: layer 0 fires 0 and 1, layer 1 fires 2 and 3


def simulate(chunks, cache, cost_model, *, n_layers=2, n_prefill=0, **options):
    trace = of_chunks(chunks, 8, n_layers=n_layers, n_prefill=n_prefill)
    options.setdefault("predictions", Perfect())
    run = run_trace(trace, cache, cost_model, keep_slices=True, **options)
    for record in run.records:
        waits = record.wait_cpu_s + record.wait_io_s + record.wait_decide_s
        assert record.wall_s - record.gpu_busy_s - waits == pytest.approx(0, abs=1e-15)
    return run


def ns(record, *names):
    return [round(in_ns(getattr(record, name))) for name in names]

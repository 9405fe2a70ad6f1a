"""Random traces, policies and machines for the engine's invariants."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kairox_sim.controllers import Anb
from kairox_sim.engine import run_trace
from kairox_sim.policies import Lfu, Lru, NoneResident, Static, Tam
from kairox_sim.prediction import OfQuality, Perfect
from tests.toy_engine import costs, in_ns, new_cache
from tests.toys import of_chunks

N_NEURONS = 12
TRIGGERS = ("attn_in", "attn_out", "serial", "after", "instant")
WAITS = ("wait_cpu_s", "wait_io_s", "wait_decide_s")


@dataclass(frozen=True)
class Case:
    chunks: list  # [step][layer][token] -> ids
    n_layers: int
    n_prefill: int
    policy: str
    trigger: str
    late: str
    slots: int
    swap_neurons: int
    anb: bool
    perfect: bool
    machine: dict
    dispatch: str = "concurrent"
    lookahead_from: int = 1

    def trace(self):
        return of_chunks(
            self.chunks, N_NEURONS, n_layers=self.n_layers, n_prefill=self.n_prefill
        )  # fmt: skip

    def cache(self, journal=None):
        size = (self.n_layers, N_NEURONS)
        policy = {
            "tam": lambda: Tam(*size, beta=0.5),
            "lru": lambda: Lru(*size),
            "lfu": lambda: Lfu(*size),
            "static": lambda: Static(*size),
            "none": lambda: NoneResident(*size),
        }[self.policy]()
        slots = 0 if self.policy == "none" else self.slots
        warm = [range(slots)] * self.n_layers if self.policy == "static" else None
        cache = new_cache(
            policy,
            n_layers=self.n_layers,
            n_neurons=N_NEURONS,
            slots=slots,
            controller=Anb() if self.anb and self.policy == "tam" else None,
            warm=warm,
            swap_neurons=self.swap_neurons,
            trigger=self.trigger,
        )
        cache.journal = journal
        return cache

    def run(self, machine=None, journal=None, landings=None):
        cache = self.cache(journal)
        run = run_trace(
            self.trace(),
            cache,
            costs(**(machine or self.machine)),
            trigger=self.trigger,
            late=self.late,
            predictions=Perfect() if self.perfect else OfQuality(0.7, 0.6, N_NEURONS, seed=3),
            landings=landings,
            dispatch=self.dispatch,
            lookahead_from=self.lookahead_from,
            keep_slices=True,
        )
        return run, cache


@st.composite
def chunks(draw, n_layers):
    sizes = draw(st.sampled_from([[1] * 4, [3, 1, 1], [1], [1] * 6, [2, 4, 1]]))
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mask = rng.random(N_NEURONS) < density
    made = []
    for n_tokens in sizes:
        step = []
        for _ in range(n_layers):
            tokens = []
            for _ in range(n_tokens):
                fresh = rng.random(N_NEURONS) < 0.4
                mask = np.where(fresh, rng.random(N_NEURONS) < density, mask)
                tokens.append(np.flatnonzero(mask).tolist())
            step.append(tokens)
        made.append(step)
    return made, sum(n > 1 for n in sizes)


@st.composite
def machines(draw, new=False, **fixed):
    """new: with what later systems may choose."""
    machine = {
        "attention": draw(st.sampled_from([0, 5, 100])),
        "gate": draw(st.sampled_from([0, 10])),
        "predict": draw(st.sampled_from([0, 20])),
        "ffn": draw(st.sampled_from([1, 30])),
        "ffn_rate": draw(st.sampled_from([5, 40])),
        "head": draw(st.sampled_from([0, 50])),
        "cpu_fixed": draw(st.sampled_from([0, 7])),
        "cpu_cap": draw(st.sampled_from([1, 2, 8])),
        "dram": draw(st.sampled_from([float("inf"), 3, 6, 20])),
        "copy_fixed": draw(st.sampled_from([0, 6, 60])),
        "h2d": draw(st.sampled_from([1, 4, 20])),
        "rowcopies": draw(st.booleans()),
        "act_fixed": draw(st.sampled_from([0, 4])),
        "d2h_fixed": draw(st.sampled_from([0, 5])),
        "handover": draw(st.sampled_from([0, 3, 40])),
        "decide": draw(st.sampled_from([0, 8, 150])),
        "decide_per_swap": draw(st.sampled_from([0, 1])),
        "decide_blocks_gpu": draw(st.booleans()),
        "gating": draw(st.sampled_from(["exact", "oracle", "predicted"])),
    }
    if new:
        machine["gating"] = draw(st.sampled_from(["exact", "oracle", "predicted", "dense"]))
        machine["handovers"] = draw(st.sampled_from([1, 2]))
        machine["copies"] = draw(st.sampled_from(["gather", "bundle", "matrix", "row"]))
        machine["copy_sync"] = draw(st.sampled_from([0, 3]))
        if machine["copies"] in ("bundle", "row") and draw(st.booleans()):
            rng = np.random.default_rng(draw(st.integers(0, 9)))
            order = [rng.permutation(N_NEURONS).tolist() for _ in range(3)]
            machine["position"] = order
    return machine | fixed


@st.composite
def systems(draw, **fixed):
    """Any dispatch of neurons, with calling off, look-ahead from a layer on and copies modes."""
    case = draw(cases())
    return replace(
        case,
        machine=draw(machines(new=True, **fixed)),
        dispatch=draw(st.sampled_from(["concurrent", "serial", "gpu", "cost"])),
        late=draw(st.sampled_from(["cpu", "stall", "cancel"])),
        lookahead_from=draw(st.sampled_from([0, 1, 2, 3])),
    )


@st.composite
def cases(draw, triggers=TRIGGERS, **fixed):
    n_layers = draw(st.integers(1, 3))
    sets, n_prefill = draw(chunks(n_layers))
    return Case(
        chunks=sets,
        n_layers=n_layers,
        n_prefill=n_prefill,
        policy=draw(st.sampled_from(["tam", "tam", "lru", "lfu", "static", "none"])),
        trigger=draw(st.sampled_from(triggers)),
        late=draw(st.sampled_from(["cpu", "stall"])),
        slots=draw(st.sampled_from([0, 1, 4, 9, 12])),
        swap_neurons=draw(st.integers(1, 4)),
        anb=draw(st.booleans()),
        perfect=draw(st.booleans()),
        machine=draw(machines(**fixed)),
    )


def total_ns(run, *names):
    return sum(round(in_ns(getattr(r, name))) for r in run.records for name in names)

"""Runs of the guide's systems on its first machine: its model, synthetic sets, our engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.published.audit_basis import CONTEXT
from experiments.published.machines import margined
from kairox_sim import simulate
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Fixed
from kairox_sim.policies import Lru, Tam
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings
from kairox_sim.trace import Trace
from kairox_sim.workload import generate
from kairox_sim.workload_presets import find_workload

MODEL, MACHINE = "prosparse-13b", "pc1"
# What the guide compares, by our names; of Kairox there are three.
SYSTEMS = {
    "llama.cpp": ("llama.cpp",),
    "PowerInfer": ("powerinfer", "powerinfer-serial", "powerinfer-shipped"),
    "Neuralink": ("neuralink-eager",),
    "Q-Infer": ("qinfer",),
    "Kairox": ("kairox-guide", "kairox-paper", "kairox-released"),
}
# METIS has nothing to find in sets without co-activation; whole groups of like frequency do.
GROUPED = ("neuralink-eager", "kairox-paper", "kairox-released")
GROUPS = "frequency:16"


@dataclass(frozen=True, slots=True)
class Ran:
    """One system, per token of the whole model."""

    tokens_per_s: float
    gpu_ms: float
    cpu_ms: float
    io_ms: float
    hit_resident: float  # %
    hit_on_time: float  # %
    loads_per_layer_step: float


@cache
def _sets(persistence: float, n_layers: int, n_tokens: int, seed: int) -> Trace:
    workload = dataclasses.replace(find_workload(MODEL), persistence=persistence)
    return generate(workload, n_tokens, n_layers=n_layers, seed=seed)


@cache
def run(system: str, persistence: float, n_layers: int = 4, n_tokens: int = 100) -> Ran:
    """`system` at a context that ends at 1,024. Layers are alike, so a few stand for all 40.

    llama.cpp, whose layers are either here or there, runs all of them, for four tokens.
    """
    if system == "llama.cpp":
        n_layers, n_tokens = find_workload(MODEL).n_layers, 4
    fields: dict[str, object] = {
        "system": system,
        "model_as": MODEL,
        "context_start": CONTEXT - n_tokens,
    }
    if system in GROUPED:
        fields["groups"] = GROUPS
    settings = Settings.model_validate(fields)
    trace, prior = (_sets(persistence, n_layers, n_tokens, seed) for seed in (1, 2))
    s = simulate(trace, settings, hardware=margined(MACHINE), prior=prior).summary
    whole = find_workload(MODEL).n_layers / n_layers * 1e3
    return Ran(
        s["tok_s_scaled"], s["gpu_s"] * whole, s["cpu_busy_s"] * whole, s["swap_busy_s"] * whole,
        100 * s["hit_resident"], 100 * s["hit_on_time"], s["loads_per_layer_step"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hits:
    """Hit rates in %, under the definitions that 'hit rate' could mean; second half of a run."""

    before: float  # resident before this step's plan
    after: float  # after it, its loads landed at once: what the guide's listing counts
    of_resident: float  # resident neurons that fire, after the plan


@cache
def hits(policy: str, budget: float, persistence: float, n_tokens: int = 120) -> Hits:
    """One layer of what fires in the guide's model (11.2 %), `budget` of its neurons resident.

    The guide's rules with its controller at times that leave it at rest, or LRU. Loads land at once
    and cost nothing: no policy of this kind hits more.
    """
    trace = _sets(persistence, 1, n_tokens, 1)
    n = trace.header.n_neurons
    slots = round(budget * n)
    chosen = Tam(1, n) if policy == "tam" else Lru(1, n)
    controller = Anb() if policy == "tam" else Fixed()
    cache = NeuronCache(1, n, slots, chosen, controller, trigger="instant", observes="predicted")
    rest = StepRecord.with_unknown(gpu_busy_s=1.0, cpu_busy_s=0.0, swap_busy_s=0.0)
    before = after = evaluated = resident = 0
    for step, at in enumerate(trace.steps()):
        fired = at.active(0)
        cache.commit([swap.id for swap in cache.plan(0, fired)])
        split = cache.lookup(0, fired, fired)
        cache.end_step(rest)
        if 2 * step >= n_tokens:
            before += split.hit_resident
            after += split.on_time.size
            evaluated += fired.size
            resident += int(np.count_nonzero(cache.state[0] >= 2))
    of_resident = 100 * after / resident if resident else float("nan")
    return Hits(100 * before / evaluated, 100 * after / evaluated, of_resident)


def described(persistences: tuple[float, ...] = (0.0, 0.9)) -> dict[str, str]:
    """Tokens/s of every system the guide compares, its name for them -> what a table cell says."""
    said = {}
    for name, ours in SYSTEMS.items():
        found = {system: [run(system, p).tokens_per_s for p in persistences] for system in ours}
        parts = [f"{system} {min(v):.2f}-{max(v):.2f}" for system, v in found.items()]
        said[name] = f"{', '.join(parts)} tokens/s (synthetic, persistence " + (
            f"{min(persistences):g} to {max(persistences):g})"
        )
    return said

"""Simulation speed at the shape of a 7B model, as steps/s and as a ratio to a naive replay.

    python benchmarks/bench_simulation.py [--steps 64] [--repeats 5] [--json]

One thread, process CPU time, median of the repeats, warm-up steps left out. The reference is a
plain Python replay of the Kairox Guide's TAM with a set per layer, timed on the same trace in the
same run: on a busy machine trust the ratio, not the steps/s. The trace is synthetic (skewed rates,
each neuron keeps its state from one token to the next with a chosen probability): fit to measure
speed with, not to rank policies with.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.engine import run_trace
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.prediction import Perfect
from kairox_sim.trace import SequenceInfo, Trace, TraceHeader

MODEL, HARDWARE, GATING = "prosparse-7b", "pc1", "exact"
N_LAYERS, N_NEURONS, SLOTS = 32, 11_008, 2_500
DENSITY = 0.11  # mean share of neurons active
KEEP = 0.6  # probability that a neuron's next state is its last one and not a fresh draw
WARM_UP = 16  # steps before timing: TAM promotes nothing in its first few
POLICY_NAMES = ("tam", "lru", "static")


@dataclass(frozen=True)
class Result:
    name: str
    steps_per_s: float  # of CPU time
    spread: float  # (max - min) / median over the repeats
    ratio: float  # to the reference
    hit_on_time: float  # of evaluated
    loads_per_layer_step: float
    simulated_tok_s: float


def activity(n_steps: int, seed: int) -> Iterator[NDArray[np.bool_]]:
    """bool[n_layers, n_neurons] per step. Rates belong to the shape, draws to the seed."""
    rate = np.random.default_rng(0).pareto(1.2, (N_LAYERS, N_NEURONS))
    rate = np.minimum(rate * DENSITY / rate.mean(), 0.95).astype(np.float32)
    for _ in range(20):  # what the cap cut off is made up for by the others
        rate = np.minimum(rate * np.float32(DENSITY / rate.mean()), np.float32(0.95))
    rng = np.random.default_rng(seed)
    active = rng.random(rate.shape, np.float32) < rate
    for _ in range(n_steps):
        yield active
        fresh = rng.random(rate.shape, np.float32) >= KEEP
        active = np.where(fresh, rng.random(rate.shape, np.float32) < rate, active)


def synthetic_trace(n_steps: int, seed: int = 1) -> Trace:
    n_rows = n_steps * N_LAYERS
    header = TraceHeader(
        model=MODEL,
        model_sha256="0" * 64,
        n_layers=N_LAYERS,
        n_neurons=N_NEURONS,
        d_model=4096,
        activation="fatrelu",
        activation_threshold=0.01,
        gating=GATING,
        complete=True,
        tokenizer_sha256="0" * 64,
        sequences=(SequenceInfo(0, "synthetic", "synthetic", "0" * 64, 0, n_steps),),
        synthetic=True,
    )
    return Trace.from_arrays(
        header,
        seq=np.zeros(n_rows, int),
        step=np.repeat(np.arange(n_steps), N_LAYERS),
        token=np.zeros(n_rows, int),
        layer=np.tile(np.arange(N_LAYERS), n_steps),
        phase=np.ones(n_rows, int),
        bits=np.concatenate(list(activity(n_steps, seed))),
    )


def costs() -> CostModel:
    return costs_for(
        load_profile(HARDWARE),
        find_shape(MODEL),
        GATING,
        trace_layers=N_LAYERS,
        trace_neurons=N_NEURONS,
        predictor="lookahead",
    )


def new_cache(name: str) -> NeuronCache:
    policy = POLICIES[name](N_LAYERS, N_NEURONS)
    warm = None
    if policy.fills == "prior":
        counts = sum(mask.astype(np.int32) for mask in activity(16, seed=2))
        order = np.argsort(-counts, axis=1, kind="stable")
        warm = [np.sort(layer[:SLOTS]) for layer in order]
    return NeuronCache(N_LAYERS, N_NEURONS, SLOTS, policy, Fixed(), warm=warm)


def simulate(name: str, trace: Trace) -> tuple[float, list]:
    """(CPU seconds per step after the warm-up, records)."""
    cache, marks = new_cache(name), []
    run = run_trace(
        trace,
        cache,
        costs(),
        predictions=Perfect(),
        on_step=lambda _: marks.append(time.process_time()),
    )
    return (marks[-1] - marks[WARM_UP - 1]) / (trace.n_steps - WARM_UP), list(run.records)


def naive_tam(trace: Trace, n_steps: int) -> float:
    """CPU seconds per step of the guide's listing: momentum in NumPy, residency in Python sets."""
    beta, theta_promote, theta_evict = 0.90, 0.35, 0.08
    momentum = np.zeros((N_LAYERS, N_NEURONS), np.float32)
    resident: list[set[int]] = [set() for _ in range(N_LAYERS)]
    hits = promoted = 0
    began_s = time.process_time()
    for t, step in enumerate(trace.steps()):
        if t == WARM_UP:
            began_s = time.process_time()
        if t == WARM_UP + n_steps:
            break
        for layer in range(N_LAYERS):
            active = set(step.active(layer).tolist())
            m = momentum[layer]
            m *= np.float32(beta)
            m[list(active)] += np.float32(1 - beta)
            here = resident[layer]
            here -= {i for i in here if m[i] < theta_evict}
            wanted = [i for i in np.flatnonzero(m >= theta_promote).tolist() if i not in here]
            wanted.sort(key=lambda i, m=m: m[i], reverse=True)
            new = wanted[: SLOTS - len(here)]
            here.update(new)
            promoted += len(new)
            hits += len(active & here)
    assert hits
    assert promoted
    return (time.process_time() - began_s) / n_steps


def measure(trace: Trace, repeats: int) -> tuple[float, list[Result]]:
    """Reference and candidates take turns, so that a busy minute hits them alike."""
    reference_s: list[float] = []
    took_s: dict[str, list[float]] = {name: [] for name in POLICY_NAMES}
    records: dict[str, list] = {}
    for _ in range(repeats):
        reference_s.append(naive_tam(trace, 8))
        for name in POLICY_NAMES:
            seconds, records[name] = simulate(name, trace)
            took_s[name].append(seconds)
    reference = median(reference_s)
    results = []
    for name, seconds in took_s.items():
        steady = records[name][WARM_UP:]
        evaluated = sum(r.evaluated for r in steady)
        results.append(
            Result(
                name=name,
                steps_per_s=1 / median(seconds),
                spread=(max(seconds) - min(seconds)) / median(seconds),
                ratio=reference / median(seconds),
                hit_on_time=sum(r.hit_on_time for r in steady) / evaluated,
                loads_per_layer_step=sum(r.loads for r in steady) / len(steady) / N_LAYERS,
                simulated_tok_s=len(steady) / sum(r.wall_s for r in steady),
            )
        )
    return 1 / reference, results


def where_time_goes(run: Callable[[], object], top: int) -> dict[str, dict[str, float]]:
    """Shares of the profiled time, own time only, by module and by function."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(run)
    functions: dict[str, float] = {}
    modules: dict[str, float] = {}
    total = 0.0
    for (path, _, function), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():
        module = "NumPy and builtins" if path == "~" else Path(path).stem
        if "simpy" in path:
            module = "simpy"
        elif "site-packages" in path:
            module = "NumPy and builtins"
        total += own_s
        modules[module] = modules.get(module, 0) + own_s
        label = function if path == "~" else f"{module}.{function}"
        functions[label] = functions.get(label, 0) + own_s

    def shares(seconds: dict[str, float]) -> dict[str, float]:
        largest = sorted(seconds.items(), key=lambda item: -item[1])[:top]
        return {name: own_s / total for name, own_s in largest}

    return {"modules": shares(modules), "functions": shares(functions)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64, help="steps per run, 16 of them warm-up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", default="tam", choices=POLICY_NAMES, help="what to profile")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.steps < WARM_UP + 8:
        parser.error(f"--steps must be at least {WARM_UP + 8}, got {options.steps}")
    trace = synthetic_trace(options.steps)
    density = sum(trace.at(0).active(layer).size for layer in range(N_LAYERS))
    density /= N_LAYERS * N_NEURONS
    reference, results = measure(trace, options.repeats)
    profile = where_time_goes(lambda: simulate(options.profile, trace), top=14)
    out = sys.stdout.write
    if options.json:
        conditions = {
            "shape": [N_LAYERS, N_NEURONS], "slots": SLOTS, "model": MODEL, "hardware": HARDWARE,
            "gating": GATING, "synthetic": True, "density": density, "steps": options.steps,
            "warm_up": WARM_UP, "repeats": options.repeats, "clock": "process CPU time",
            "python": sys.version.split()[0], "numpy": np.__version__,
        }  # fmt: skip
        rows = {r.name: {k: v for k, v in vars(r).items() if k != "name"} for r in results}
        report = {
            "conditions": conditions,
            "reference": {"name": "naive TAM replay", "steps_per_s": reference},
            "results": rows,
            "profile": {"of": options.profile, **profile},
        }
        out(json.dumps(report, indent=2) + "\n")
        return
    out(
        f"{N_LAYERS} x {N_NEURONS}, {density:.1%} active (synthetic), {SLOTS} slots, {MODEL} on "
        f"{HARDWARE}, {GATING} gating; median of {options.repeats}, CPU time\n"
        f"{'naive TAM replay (reference)':30}{reference:9.1f} steps/s\n"
    )
    for r in results:
        out(
            f"{r.name:30}{r.steps_per_s:9.1f} steps/s  x{r.ratio:5.1f}  spread {r.spread:.0%}  "
            f"({r.loads_per_layer_step:.0f} loads per layer-step, {r.hit_on_time:.0%} on time)\n"
        )
    for what, shares in profile.items():
        out(f"\nwhere the time of {options.profile} goes, by {what} (profiled, own time):\n")
        for name, share in shares.items():
            out(f"  {share:6.1%}  {name}\n")


if __name__ == "__main__":
    main()

"""Figure 12: tokens per second, hits and wasted loads while more of the neurons fire only once.

    python -m experiments.fig12_thrash --make out/fig12_thrash.parquet -o out/figures

The Kairox Guide (failure modes; TAM) says that one-hit neurons make a cache thrash and that TAM
filters them: one hit reaches 0.10 of its 0.35. The filter holds (at most 0.3 wasted loads a
layer-step, LRU up to 18), and yet LRU is 24 to 43 % faster where a swap is one copy. At a copy a
neuron and persistence 0.9 it falls from 19 to 24 % faster to 4 to 13 % slower as the share grows.
--make simulates first.
"""

import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.failures import synthetic
from experiments.figure import command_line
from kairox_sim.groups import group_neurons, write_groups
from kairox_sim.plot_failures import plot_thrash
from kairox_sim.policies import BOUNDS
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
from kairox_sim.trace import Trace
from kairox_sim.trace_stats import counts
from kairox_sim.workload import generate

STEM = "fig12_thrash"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_thrash


def once(trace: Trace) -> dict[str, float]:
    """Of the neurons that fire, and of all activations: those that fire once in the trace."""
    fired = counts(trace)
    n_once = int((fired == 1).sum())
    return {
        "one_hit_share": n_once / int((fired > 0).sum()),
        "one_hit_activations": n_once / int(fired.sum()),
    }


def make(table: Path, spec: dict[str, Any] = SPEC) -> None:
    """A row per policy, machine, way of copying, persistence and share: its summary, and the share
    measured."""
    method, _, size = spec["groups"].partition(":")
    rows = []
    for persistence, share in product(spec["persistences"], spec["one_hit_shares"]):
        made = {"persistence": persistence, "one_hit_share": share}
        workload = synthetic(spec["workload"] | made)
        trace = generate(workload, spec["n_tokens"], n_layers=spec["n_layers"])
        prior = generate(workload, spec["prior_tokens"], n_layers=spec["n_layers"], seed=1)
        learnt = group_neurons(prior, spec["n_layers"], workload.n_neurons, int(size), method)
        groups = write_groups(learnt, table.with_name(f"{table.stem}.groups.parquet"))
        for hardware, copies, policy in product(spec["hardware"], spec["copies"], spec["policies"]):
            given = {**spec["base"], "policy": policy, "copies": copies}
            if policy in BOUNDS:
                given["trigger"] = None
            if policy in spec["grouped"]:
                given["groups"] = str(groups)
            run = simulate(trace, Settings.of(given), hardware=hardware, prior=prior)
            slots = run.provenance["slots"][0]
            said = {"policy": policy, "machine": hardware, "copies": copies, "slots": slots}
            rows.append(run.summary | run.labels | made | once(trace) | said)
    pd.DataFrame(rows).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

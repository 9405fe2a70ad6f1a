"""Figure 12: tokens per second, hits and wasted loads while more of the neurons fire only once.

    python -m experiments.fig12_thrash --make out/fig12_thrash.parquet -o out/figures

The Kairox Guide (failure modes; TAM) says that one-hit neurons make a cache thrash and that TAM
filters them: one hit reaches 0.10 of its 0.35. The filter holds (under 0.3 wasted loads a
layer-step, against 5.4), and LRU is 33 to 41 % faster or 11 to 16 % slower than TAM as a load costs
a part of one copy or a copy of its own. --make simulates first.
"""

import tomllib
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
    """A row per policy, machine, way of copying and share: its summary, and the share measured."""
    method, _, size = spec["groups"].partition(":")
    rows = []
    for share in spec["one_hit_shares"]:
        workload = synthetic(spec["workload"] | {"one_hit_share": share})
        trace = generate(workload, spec["n_tokens"], n_layers=spec["n_layers"])
        prior = generate(workload, spec["n_tokens"], n_layers=spec["n_layers"], seed=1)
        learnt = group_neurons(prior, spec["n_layers"], workload.n_neurons, int(size), method)
        groups = write_groups(learnt, table.with_name(f"{table.stem}.groups.parquet"))
        for hardware in spec["hardware"]:
            for copies in spec["copies"]:
                for policy in spec["policies"]:
                    given = {**spec["base"], "policy": policy, "copies": copies}
                    if policy in BOUNDS:
                        given["trigger"] = None
                    if policy in spec["grouped"]:
                        given |= {"groups": str(groups)}
                    run = simulate(trace, Settings.of(given), hardware=hardware, prior=prior)
                    said = {"policy": policy, "machine": hardware, "copies": copies}
                    rows.append(run.summary | run.labels | once(trace) | said)
    pd.DataFrame(rows).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

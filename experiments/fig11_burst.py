"""Figure 11: how much longer a token takes when a burst of cold neurons fires in one layer.

    python -m experiments.fig11_burst --make out/fig11_burst.parquet -o out/figures

The Kairox Guide (failure modes) says that 1,500 cold neurons take more than 80 ms, 53 us each; its
listing charges 15 us, and the host's memory needs 0.45 us (30,720 B at 68 GB/s, 13B, pc1). The
OSDI '26 paper (section 3) saw OPT-6.7B's layer 0 swing by 0 to 3,000 between adjacent tokens.
Here 1,500 add 0.9 to 2.1 ms on pc1, 1.5 to 3.2 on pc2. --make simulates with and without them.
"""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.failures import cold_ids, decode_steps, planted, run_system, synthetic
from experiments.figure import command_line
from experiments.published.data import number
from kairox_sim.groups import group_neurons, write_groups
from kairox_sim.hardware import load_profile
from kairox_sim.plot_failures import plot_burst
from kairox_sim.settings import shape_of
from kairox_sim.workload import generate

STEM = "fig11_burst"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_burst


def make(table: Path, spec: dict[str, Any] = SPEC) -> None:
    """A row per system, machine and token with a burst: its size, and the time it adds."""
    burst, swings = spec["burst"], spec["swings"]
    single = [{burst["step"]: size} for size in burst["sizes"]]
    steps = swings["step"] + np.arange(swings["n_tokens"])
    sizes = np.random.default_rng(0).integers(0, swings["largest"], len(steps))
    many = [dict(zip(steps.tolist(), sizes.tolist(), strict=True))]
    rows = []
    for panel, part, plans in (("burst", burst, single), ("swings", swings, many)):
        workload = synthetic(part["workload"])
        shape, n_layers = shape_of(workload.model), spec["n_layers"]
        ratio = shape.n_neurons / workload.n_neurons  # of the model's neurons
        prior = generate(workload, spec["prior_tokens"], n_layers=n_layers, seed=1)
        calm = generate(workload, max(plans[0]) + 1, n_layers=n_layers)
        method, _, size = spec["groups"].partition(":")
        groups = table.with_name(f"{table.stem}.{panel}.groups.parquet")
        write_groups(group_neurons(prior, n_layers, workload.n_neurons, int(size), method), groups)
        cold = cold_ids(prior, part["layer"])
        plans = [{step: round(n / ratio) for step, n in plan.items()} for plan in plans]
        traces = [planted(calm, part["layer"], cold, plan) for plan in plans]
        for hardware in spec["hardware"]:
            roofline_s = shape.neuron_bytes / load_profile(hardware).dram_bytes_per_s.value
            guide_s = 1e-3 * number("guide", "burst", "more_than")
            said = {
                "panel": panel, "machine": hardware, "model": workload.model,
                "roofline_s": roofline_s,
                "prose_s": guide_s / number("guide", "burst", "cold_neurons"),
                "listing_s": 1e-3 * number("guide", "listing_time", "cpu_per_residual"),
            }  # fmt: skip
            for system in spec["systems"]:
                given = system, hardware, prior, str(groups)
                asked = {"model_as": workload.model}
                without = decode_steps(run_system(calm, *given, **asked), **said)
                for plan, trace in zip(plans, traces, strict=True):
                    run = decode_steps(run_system(trace, *given, **asked), **said)
                    at = run["step"].isin(plan)
                    added_s = run.loc[at, "wall_s"] - without.loc[at, "wall_s"]
                    cold_neurons = [n * ratio for n in plan.values()]
                    rows.append(run[at].assign(
                        system=system, cold_neurons=cold_neurons, added_s=added_s,
                    ))  # fmt: skip
    pd.concat(rows, ignore_index=True).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

"""Figure 13: the guide's controller never relaxes while the CPU is the faster side.

    python -m experiments.fig13_ratchet --make out/fig13_ratchet.parquet -o out/figures

The Kairox Guide's listing moves threshold_scale down where T_cpu is the largest and up only where
T_io exceeds T_gpu; its prose has the same two cases. Neither acts in between. The OSDI '26 paper's
controller (section 7, Algorithm 1) moves a decay per layer by what each layer waited for. Here both
laws stay at 0.40 for all 120 steps of the fast phase, and of the decays only layer 0's comes back.
--make simulates phases of more, fewer and again more active neurons first.
"""

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.failures import decode_steps, joined, knobs_in_force, run_system, synthetic
from experiments.figure import command_line
from kairox_sim.firing_rates import Rates
from kairox_sim.plot_adaptation import plot_ratchet
from kairox_sim.trace import Trace
from kairox_sim.workload import generate

STEM = "fig13_ratchet"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_ratchet


def phase(spec: dict[str, Any], density: float, n_tokens: int, seed: int) -> Trace:
    """A trace of one density; the same neurons are hot in each."""
    fields = dict(spec["workload"])
    active = Rates(density, fields.pop("top_share"), fields.pop("carries"))
    return generate(
        synthetic(fields | {"active": active}), n_tokens, n_layers=spec["n_layers"], seed=seed
    )


def make(table: Path, spec: dict[str, Any] = SPEC) -> None:
    """A row per run and step: busy times, and the knobs that were in force."""
    n_tokens, densities = spec["phase_tokens"], spec["densities"]
    trace = joined([phase(spec, d, n_tokens, seed) for seed, d in enumerate(densities)])
    prior = phase(spec, densities[0], spec["prior_tokens"], len(densities))
    frames = []
    for name, (system, controller) in spec["runs"].items():
        given = system, spec["hardware"], prior, spec["groups"]
        asked = {"controller": controller, "model_as": spec["workload"]["preset"]}
        run = run_system(trace, *given, **asked)
        knobs = knobs_in_force(trace, *given, **asked)
        decays = {
            f"decay_{layer}": [knob.at(layer).decay for knob in knobs]
            for layer in range(spec["n_layers"])
        }
        steps = decode_steps(run, controlled=name).assign(**decays)
        steps["threshold_scale"] = [knob.threshold_scale for knob in knobs]
        steps["density"] = [densities[at // n_tokens] for at in steps["decode_step"]]
        steps["shown_layers"] = ",".join(map(str, spec["shown_layers"]))
        frames.append(steps)
    pd.concat(frames, ignore_index=True).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

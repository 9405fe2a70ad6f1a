"""Figure 10: time per token of every system while the text changes domain, its prior of one domain.

    python -m experiments.fig10_domain_shift --make out/fig10_domain_shift.parquet -o out/figures

The Kairox Guide (failure modes) and the OSDI '26 paper (section 3) say that a static hot set fails
when the activations shift. Here PowerInfer's set, profiled on prose alone, is held against itself
profiled on all five domains (7 to 8 % longer a token after the shift), and against systems that
move neurons (LRU 2 to 4 %, Kairox as released 4 %, as the paper has it 16 to 18 %, as the guide has
it 39 to 41 %). --make simulates first.
"""

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.failures import decode_steps, run_system
from experiments.figure import command_line
from kairox_sim.plot_failures import plot_domain_shift
from kairox_sim.trace import Trace, read_trace

STEM = "fig10_domain_shift"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_domain_shift


def make(table: Path, trace: Trace | None = None, prior: Trace | None = None) -> None:
    """Simulate every system with the prior of one domain, and the reference with all of them."""
    evaluated = read_trace(SPEC["trace"], strict=True) if trace is None else trace
    whole = read_trace(SPEC["prior"], strict=True) if prior is None else prior
    domains = {s.seq: s.domain for s in evaluated.header.sequences}
    one = whole.select(seqs=SPEC["profiled_seqs"])
    profiled = one.header.sequences[0].domain
    cases = [(system, one, profiled) for system in SPEC["systems"]]
    cases.append((SPEC["reference"], whole, "all domains"))
    frames = []
    for hardware in SPEC["hardware"]:
        for system, learnt, name in cases:
            run = run_system(evaluated, system, hardware, learnt, SPEC["groups"], **SPEC["base"])
            said = {"system": system, "profiled_on": name, "machine": hardware}
            steps = decode_steps(run, **said)
            frames.append(steps.assign(domain=steps["seq"].map(domains)))
    pd.concat(frames, ignore_index=True).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

"""Figure 14: tokens per second of every system while the context grows from 256 to 4,096.

    python -m experiments.fig14_context --make out/fig14_context.parquet -o out/figures

The Kairox Guide claims its speed-ups across context lengths; the OSDI '26 paper measures 1,024. A
token of KV cache is 0.52 MB at 7B and 0.82 MB at 13B: VRAM that neurons, or llama.cpp's layers,
no longer have: 68 to 45 % of the neurons at 7B, none at 13B from 1,606 on. --make simulates first.
"""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.failures import run_system, synthetic
from experiments.figure import command_line
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.groups import group_neurons, write_groups
from kairox_sim.hardware import load_profile
from kairox_sim.plot_adaptation import plot_context
from kairox_sim.settings import shape_of
from kairox_sim.trace import Trace, read_trace
from kairox_sim.workload import generate

STEM = "fig14_context"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_context


def beginnings(trace: Trace, n_steps: int) -> Trace:
    """The first steps of each sequence."""
    of = [np.unique(trace.step[trace.seq == s.seq]) for s in trace.header.sequences]
    return trace.select(steps=np.concatenate([steps[:n_steps] for steps in of]).tolist())


def make(table: Path, trace: Trace | None = None, prior: Trace | None = None) -> None:
    """A row per system, model and context: its summary and what is resident, or why not."""
    whole = read_trace(SPEC["trace"], strict=True) if trace is None else trace
    learnt = read_trace(SPEC["prior"], strict=True) if prior is None else prior
    part = beginnings(whole, SPEC["steps_per_seq"])
    method, _, size = SPEC["groups"].partition(":")
    groups = table.with_name(f"{table.stem}.groups.parquet")
    n_layers, n_neurons = part.header.n_layers, part.header.n_neurons
    write_groups(group_neurons(learnt, n_layers, n_neurons, int(size), method), groups)
    rows = []
    for model in SPEC["models"]:
        shape = shape_of(model)
        per_layer = costs_for(
            load_profile(SPEC["hardware"]), shape, "dense",
            trace_layers=shape.n_layers, trace_neurons=shape.n_neurons,
        )  # fmt: skip
        dense = generate(synthetic({"preset": model, "n_neurons": 64}), 2)
        for system in (SPEC["whole_layers"], *SPEC["systems"]):
            whole_layers = system == SPEC["whole_layers"]
            ours, known = (dense, None) if whole_layers else (part, learnt)
            longest = max(step.context_len for step in ours.steps())
            for context in SPEC["contexts"]:
                attention_s = shape.n_layers * per_layer.attention_s(1, context)
                said = {"system": system, "model": model, "context": context,
                        "attention_s": attention_s}  # fmt: skip
                asked = {"model_as": model, "context_start": context - longest}
                try:
                    run = run_system(ours, system, SPEC["hardware"], known, str(groups), **asked)
                except KairoxError as error:
                    if "does not fit" not in str(error):
                        raise
                    rows.append(said | {"status": "refused", "why": str(error)})
                    continue
                share = float(np.mean(run.provenance["slots"])) / ours.header.n_neurons
                got = {"status": "ok", "resident_share": share, "slots": share * shape.n_neurons}
                rows.append(run.summary | run.labels | said | got)
    pd.DataFrame(rows).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

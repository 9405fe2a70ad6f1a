"""Figure 9: METIS groups against random and frequency-sorted ones, on held-out tokens.

    python -m experiments.fig09_groups --make out/fig09_groups.csv -o out/figures

Without --make it draws a table made before.
"""

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.figure import command_line
from kairox_sim.group_report import compare_groups
from kairox_sim.plot_systems import plot_groups
from kairox_sim.policies import build_policy
from kairox_sim.trace import Trace, read_trace

STEM = "fig09_groups"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_groups


def make(table: Path, trace: Trace | None = None, prior: Trace | None = None) -> None:
    """Count hits of every size, method and policy, and write them; the spec's traces by default."""
    evaluated, learnt = trace or read_trace(SPEC["trace"]), prior or read_trace(SPEC["prior"])
    rows = compare_groups(
        learnt, evaluated, SPEC["slots"],
        {name: partial(build_policy, name) for name in SPEC["policies"]},
        sizes=SPEC["sizes"], methods=SPEC["methods"],
    )  # fmt: skip
    pd.DataFrame(rows).assign(
        slots=SPEC["slots"], n_neurons=evaluated.header.n_neurons,
        trace=Path(SPEC["trace"]).stem, prior=Path(SPEC["prior"]).stem,
    ).to_csv(table, index=False)  # fmt: skip


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

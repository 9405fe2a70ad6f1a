"""Figure 4: two layers of one token, serialized and as a Live Pipeline, on one time axis.

    python -m experiments.fig04_pipeline --make out/fig04_pipeline.parquet -o out/figures

Without --make it draws a table made before.
"""

import tomllib
from pathlib import Path
from typing import Any

from experiments.figure import command_line
from kairox_sim.figure_data import pipeline_table
from kairox_sim.plots import plot_pipeline
from kairox_sim.settings import Settings
from kairox_sim.simulation import simulate
from kairox_sim.trace import Trace, read_trace

STEM = "fig04_pipeline"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_pipeline


def make(table: Path, trace: Trace | None = None) -> None:
    """Simulate a run for each panel and write the window's busy intervals."""
    whole = read_trace(SPEC["trace"], strict=True) if trace is None else trace
    part = whole.select(steps=range(SPEC["n_steps"]))
    runs = {
        f"{title} (trigger: {trigger})": simulate(
            part,
            Settings.of(SPEC["base"] | {"trigger": trigger}),
            hardware=SPEC["hardware"],
            keep_slices=True,
        )
        for title, trigger in SPEC["panels"].items()
    }
    window = pipeline_table(runs, step=SPEC["step"], first_layer=SPEC["first_layer"])
    window.to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

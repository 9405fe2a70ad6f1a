"""Figure 5: TAM's momentum of a one-hit and a sustained neuron against its thresholds.

    python -m experiments.fig05_momentum --make out/fig05_momentum.csv -o out/figures

Without --make it draws a table made before.
"""

import tomllib
from pathlib import Path
from typing import Any

from experiments.figure import command_line
from kairox_sim.figure_data import momentum_table
from kairox_sim.plots import plot_momentum

STEM = "fig05_momentum"
SPEC: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
draw = plot_momentum


def make(table: Path) -> None:
    """Let the policy compute the momenta, and write them."""
    parameters = ("n_steps", "beta", "theta_promote", "theta_evict")
    momenta = momentum_table(
        {name: range(*steps) for name, steps in SPEC["fires"].items()},
        **{name: SPEC[name] for name in parameters},
    )
    momenta.to_csv(table, index=False)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

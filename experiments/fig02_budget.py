"""Figure 2: hit rates against budget, and the tokens per second they came with.

kairox sweep experiments/fig02_budget.toml -o out/fig02_budget.parquet
python -m experiments.fig02_budget out/fig02_budget.parquet -o out/figures
"""

from experiments.figure import command_line
from kairox_sim.plots import plot_budget

STEM = "fig02_budget"
draw = plot_budget

if __name__ == "__main__":
    command_line(__doc__, STEM, draw)

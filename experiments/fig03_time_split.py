"""Figure 3: time per token, split by what the GPU did or waited for.

kairox sweep experiments/fig03_time_split.toml -o out/fig03_time_split.parquet
python -m experiments.fig03_time_split out/fig03_time_split.parquet -o out/figures
"""

from experiments.figure import command_line
from kairox_sim.plots import plot_time_split

STEM = "fig03_time_split"
draw = plot_time_split

if __name__ == "__main__":
    command_line(__doc__, STEM, draw)

"""Figure 1: tokens per second by policy and PCIe generation, with the bounds.

kairox sweep experiments/fig01_throughput.toml -o out/fig01_throughput.parquet
python -m experiments.fig01_throughput out/fig01_throughput.parquet -o out/figures
"""

from experiments.figure import command_line
from kairox_sim.plots import plot_throughput

STEM = "fig01_throughput"
draw = plot_throughput

if __name__ == "__main__":
    command_line(__doc__, STEM, draw)

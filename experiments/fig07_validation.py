"""Figure 7: live tokens per second against simulated ones, beside two null models.

python -m experiments.validate --out out/validate
python -m experiments.fig07_validation out/validate/validation.parquet -o out/figures
"""

from experiments.figure import command_line
from kairox_sim.plots import plot_validation

STEM = "fig07_validation"
draw = plot_validation

if __name__ == "__main__":
    command_line(__doc__, STEM, draw)

"""Figure 8: tokens per second against hit rate, every system with the same machine's memory.

kairox sweep experiments/fig08_hits_and_throughput.toml -o out/fig08_hits_and_throughput.parquet
python -m experiments.fig08_hits_and_throughput out/fig08_hits_and_throughput.parquet -o out/figures

A table of several machines is drawn of pc1, or of --hardware NAME. With --tables DIR it also writes
fig08_<machine>.md, a table of every machine of the sweep.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.figure import draw_to
from kairox_sim.errors import KairoxError
from kairox_sim.plot_systems import plot_hits_and_throughput, systems_table
from kairox_sim.plots import read_figure_table

STEM = "fig08_hits_and_throughput"
MACHINE = "pc1"  # of a table with several, this one


def draw(table: pd.DataFrame, hardware: str | None = None) -> Figure:
    """Of one machine: the one named, or the table's only one, or MACHINE."""
    several = table["hardware"].nunique() > 1
    chosen = MACHINE if hardware is None and several else hardware
    return plot_hits_and_throughput(table, hardware=chosen)


def write_tables(table: Path, folder: Path) -> None:
    """fig08_<machine>.md for every machine."""
    rows = read_figure_table(table)
    folder.mkdir(parents=True, exist_ok=True)
    for machine in sorted(rows["hardware"].unique()):
        place = folder / f"fig08_{machine}.md"
        place.write_text(systems_table(rows, machine), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="Parquet")
    parser.add_argument("-o", "--out", type=Path, default=Path("out/figures"))
    parser.add_argument("--hardware", help=f"of a table with several; otherwise {MACHINE}")
    parser.add_argument("--tables", type=Path, help="a folder for the tables in Markdown")
    given = parser.parse_args()
    try:
        draw_to(given.table, given.out, STEM, partial(draw, hardware=given.hardware))
        if given.tables is not None:
            write_tables(given.table, given.tables)
    except KairoxError as error:
        sys.exit(f"{STEM}: {error}")

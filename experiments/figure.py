"""What the figure scripts share: one command line each, the table from disk, the figure to disk."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kairox_sim.errors import KairoxError
from kairox_sim.plots import read_figure_table, save


def draw_to(table: Path, out: Path, stem: str, draw: Callable[[pd.DataFrame], Figure]) -> None:
    """Read the table, draw it, save PNG and PDF."""
    save(draw(read_figure_table(table)), out, stem)


def command_line(
    doc: str | None,
    stem: str,
    draw: Callable[[pd.DataFrame], Figure],
    make: Callable[[Path], object] | None = None,
) -> None:
    """TABLE -o DIR; with `make`, --make simulates and writes the table first."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="Parquet or .csv")
    parser.add_argument("-o", "--out", type=Path, default=Path("out/figures"))
    if make is not None:
        parser.add_argument("--make", action="store_true", help="simulate, and write TABLE first")
    given = parser.parse_args()
    try:
        if make is not None and given.make:
            given.table.parent.mkdir(parents=True, exist_ok=True)
            make(given.table)
        draw_to(given.table, given.out, stem, draw)
    except KairoxError as error:
        sys.exit(f"{stem}: {error}")

"""Figures of the tables that leave no runs: the fork's sweep, and copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.published.pairs import SMALL_PRINT, Pair, draw_pairs, key, panels
from kairox_sim.errors import KairoxError
from kairox_sim.plot_style import SKY, VERMILLION, footer

SETTINGS = {"no filter": None, "tau 0.33": "^"}  # of the sweep: the bar, and the marker


def _rows(folder: Path, stem: str) -> pd.DataFrame:
    path = folder / f"{stem}.csv"
    if not path.is_file():
        raise KairoxError(f"there is no {path.name} to draw; make it with experiments.published")
    return pd.read_csv(path)


def draw_sweep(folder: Path) -> Figure:
    """Hits after the plan and loads by group size, as the fork's sweep printed them."""
    rows = _rows(folder, "fork_sweep")
    figure, grid = panels(2, 2, 1.9)
    shown = (("hit", "hits after the plan (%)", 1.0), ("loads", "loads (million neurons)", 1e-6))
    for axes, (what, unit, scale) in zip(grid, shown, strict=True):
        pairs = []
        for size in (1, 2, 4, 8, 16, 32, 64):
            found = {}
            for setting in SETTINGS:
                named = f"{what}, group size {size}, {setting}, "
                found[setting] = rows[rows["what"].str.startswith(named)]
            bar = found["no filter"]
            if bar.empty:
                raise KairoxError(f"fork_sweep.csv has no row of {what} at group size {size}")
            pairs.append(
                Pair(
                    str(size), scale * float(bar["published"].iloc[0]),
                    [scale * v for v in bar["simulated"]], VERMILLION,
                    {marker: scale * median(found[setting]["simulated"])
                     for setting, marker in SETTINGS.items() if marker},
                )
            )  # fmt: skip
        draw_pairs(axes, pairs, unit)
        axes.set_xlabel("group size")
    key(figure, {"^": "with tau 0.33"})
    footer(figure, "github.com/brothergiven/kairox.cpp, ProSparse-7B, RTX 3070, against the "
           "released policy without a filter; whether the fork's sweep had one is not said. "
           f"{SMALL_PRINT} Co-activation fitted on C(16) alone.")  # fmt: skip
    return figure


def draw_copies(folder: Path) -> Figure:
    """What copies reach and cost; nothing here is synthetic but the link."""
    rows = _rows(folder, "copies")
    rows = rows[rows["kind"] != "audit"]
    figure, grid = panels(4, 2, 1.9)
    table_2 = rows["what"].str.startswith("pcie")
    short: tuple[tuple[str, pd.DataFrame, Callable[[str], str]], ...] = (
        ("GB/s", rows[(rows["unit"] == "GB/s") & ~table_2], _size),
        ("GB/s", rows[table_2], _link),
        ("us per copy", rows[rows["unit"] == "us"], _every),
        ("ms", rows[rows["unit"] == "ms"], _scattered),
    )
    for axes, (unit, mine, name) in zip(grid, short, strict=True):
        pairs = [
            Pair(name(what), published, [simulated], SKY, {})
            for what, published, simulated in zip(
                mine["what"], mine["published"], mine["simulated"], strict=True
            )
        ]
        draw_pairs(axes, pairs, unit)
        axes.tick_params(axis="x", labelsize=6)
    # Bars have no foot on a log axis: dots, whose position is all that is read.
    _dots(grid[3], rows[rows["unit"] == "ms"])
    grid[0].set_title("queued copies by size")
    grid[1].set_title("table 2: a neuron or a group of 24")
    grid[2].set_title("a 68 KB copy: synchronised every n; the law")
    grid[3].set_title("scattered rows: one by one or gathered")
    key(figure, {}, simulated="simulated (our link)")
    footer(figure, "The fork's micro-benchmark and law, and table 2 of the Kairox paper, "
           "against profiles/links. law: a copy over the whole sweep, synchronised every 4; not of "
           "the micro-benchmark beside it. Dots: published hollow, log scale.")  # fmt: skip
    return figure


def _dots(axes: Axes, mine: pd.DataFrame) -> None:
    axes.clear()
    at = range(len(mine))
    axes.plot(at, mine["published"], "o", color=SKY, markersize=7, markerfacecolor="white")
    axes.plot(at, mine["simulated"], "o", color=SKY, markersize=3)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_xlim(-0.6, len(mine) - 0.4)
    axes.set_xticks(at, [_scattered(what) for what in mine["what"]])
    axes.tick_params(axis="x", length=0, labelsize=6)


def _link(what: str) -> str:
    return f"PCIe {what[4]}\n{'group' if 'group' in what else 'neuron'}"


def _every(what: str) -> str:
    return "law" if "our link" in what else "n = " + what.rsplit(" ", 1)[1]


def _size(what: str) -> str:
    n_bytes = int(re.sub(r"\D", "", what))
    return f"{n_bytes / 1024:.0f}\nKiB" if n_bytes < 2**20 else f"{n_bytes / 2**20:.0f}\nMiB"


def _scattered(what: str) -> str:
    return (
        f"{int(re.sub(r'[^0-9]', '', what)) // 1024}k\n{'each' if 'one by one' in what else 'once'}"
    )

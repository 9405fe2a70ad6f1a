"""One look for every figure: sizes, colours, markers, what stands below it, and how it is saved.

Colours are Okabe and Ito's eight, told apart with any colour vision (jfly.uni-koeln.de/color). A
policy has the same colour and marker in every figure; variants of it (a controller, another
trigger) differ by hatch and by how the marker is filled, never by colour alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

COLUMN_IN = 3.5  # width of one column of a two-column page
PNG_DPI = 300
SMALL_PT = 6.0

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT_GREY = "#6E6E6E", "#D9D9D9"

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same letters on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT_GREY,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "kairox",  # the same bytes for the same figure
}


@dataclass(frozen=True, slots=True)
class Look:
    name: str  # as written in legends
    color: str
    marker: str


POLICY_LOOKS: dict[str, Look] = {  # a colour per family, a marker within it
    "tam": Look("TAM", VERMILLION, "o"),
    "lru": Look("LRU", BLUE, "s"),
    "lfu": Look("LFU", PURPLE, "^"),
    "static": Look("static", GREEN, "D"),
    "all": Look("all resident", BLACK, "v"),
    "none": Look("none resident", GREY, "X"),
    "tam_paper": Look("TAM of the paper", VERMILLION, "p"),
    "tam_released": Look("TAM as released", VERMILLION, "H"),
    "topk": Look("top-k", VERMILLION, "*"),
    "qinfer": Look("Q-Infer", GREEN, "P"),
    "fifo": Look("FIFO", BLUE, "<"),
    "sieve": Look("SIEVE", BLUE, ">"),
    "s3fifo": Look("S3-FIFO", BLUE, "d"),
    "s3fifo_segments": Look("S3-FIFO of segments", BLUE, "8"),
    "window": Look("window", BLUE, "h"),
    "arc": Look("ARC", PURPLE, "v"),
    "wtinylfu": Look("W-TinyLFU", PURPLE, "P"),
    "random": Look("random", GREY, "<"),
    "belady": Look("Belady", BLACK, "*"),
    "belady_bypass": Look("Belady with bypass", BLACK, "P"),
}
OTHER_COLORS = (ORANGE, SKY, YELLOW)
OTHER_MARKERS = ("P", "*", "h")

# Systems look as their policy does, but for those that never move anything.
SYSTEM_LOOKS: dict[str, Look] = {
    "llama.cpp": Look("llama.cpp", GREY, "o"),
    "powerinfer-serial": Look("powerinfer-serial", GREEN, "s"),
    "powerinfer-shipped": Look("powerinfer-shipped", GREEN, "^"),
    "dejavu": Look("dejavu", GREEN, "v"),
    "fiddler": Look("fiddler", GREEN, "X"),
}

# Variants of a policy, by index: as it is, with a controller, with another trigger, anything else.
HATCHES = ("", "////", "....", "xxxx")
FILLS = ("full", "none", "bottom", "left")


def look_of(policy: str) -> Look:
    """Colour and marker of a policy; one not in the table gets its own by its name's letters."""
    if policy in POLICY_LOOKS:
        return POLICY_LOOKS[policy]
    at = sum(policy.encode()) % len(OTHER_COLORS)
    return Look(policy, OTHER_COLORS[at], OTHER_MARKERS[at])


def look_of_system(system: str, policy: str) -> Look:
    """Colour and marker of a system that runs `policy`, under the system's own name."""
    if system in SYSTEM_LOOKS:
        return SYSTEM_LOOKS[system]
    look = look_of(policy)
    return Look(system, look.color, look.marker)


def tint(color: str, towards_white: float) -> tuple[float, float, float]:
    """The colour mixed with white: 0 is itself, 1 is white."""
    red, green, blue = (c + (1 - c) * towards_white for c in to_rgb(color))
    return red, green, blue


@contextmanager
def house_style() -> Iterator[None]:
    """Everything drawn inside has the one look, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        for key, value in RC.items():
            mpl.rcParams[key] = value  # type: ignore[index]
        yield


def new_figure(
    n_rows: int = 1,
    *,
    height_in: float,
    width_in: float = COLUMN_IN,
    heights: Sequence[float] | None = None,
    share_x: bool = True,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of panels one above the other. No window, no global state."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(
        n_rows,
        1,
        sharex=share_x,
        sharey=share_y,
        squeeze=False,
        gridspec_kw=None if heights is None else {"height_ratios": list(heights)},
    )
    return figure, list(axes[:, 0])


def footer(figure: Figure, *lines: str) -> None:
    """Small print below the figure: what the numbers are of. Empty lines are left out."""
    width = int(figure.get_figwidth() * 72 / (SMALL_PT * 0.53))  # letters that fit
    text = "\n".join(textwrap.fill(line, width) for line in lines if line)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL_PT, color=GREY, linespacing=1.25)


def legend(figure: Figure, handles: Sequence[Any], *, n_columns: int) -> None:
    """A legend above the panels, where it covers nothing."""
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=n_columns,
        handlelength=2.0,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.3,
        borderaxespad=0.2,
    )


def save(
    figure: Figure, out_dir: str | Path, stem: str, formats: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Write the figure in each format; the paths. PNG at 300 dpi; the same bytes every time."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    dateless: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None},
        "svg": {"Date": None},
        "png": {"Software": None},
    }
    paths = []
    with house_style():
        for kind in formats:
            path = folder / f"{stem}.{kind}"
            figure.savefig(path, dpi=PNG_DPI, metadata=dateless.get(kind))
            paths.append(path)
    return paths

"""A published bar beside a simulated one: what the figures of published comparisons share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kairox_sim.plot_style import BLACK, GREY, tint

SMALL_PRINT = (
    "Published bars light, simulated ones full: median over persistence 0, 0.3, 0.6, 0.9 of "
    "synthetic sets, whiskers their range."
)
FITTED = (
    "DRAM efficiency and VRAM margin fitted on the llama.cpp bars alone; sparse share of the CPU "
    "chosen (fitted.toml)."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One published bar and what was simulated for it, at each persistence."""

    label: str
    published: float
    simulated: Sequence[float]
    color: str
    marks: Mapping[str, float]  # other readings of the same bar, by marker


def draw_pairs(axes: Axes, pairs: Sequence[Pair], unit: str) -> None:
    """Two bars a label; what was not simulated has one."""
    for at, pair in enumerate(pairs):
        axes.bar(at - 0.2, pair.published, 0.38, color=tint(pair.color, 0.6), edgecolor=pair.color)
        if pair.simulated:
            middle = median(pair.simulated)
            reach = [[middle - min(pair.simulated)], [max(pair.simulated) - middle]]
            axes.bar(at + 0.2, middle, 0.38, color=pair.color, edgecolor=pair.color)
            if len(pair.simulated) > 1:
                axes.errorbar(at + 0.2, middle, reach, color=BLACK, linewidth=0.8, capsize=1.5)
        else:
            axes.text(
                at + 0.2,
                0,
                "does not fit\n(with our margin)",
                rotation=90,
                ha="center",
                va="bottom",
                size=5,
            )
        # Side by side over the bar, as two of them are often equal.
        apart = [(i - (len(pair.marks) - 1) / 2) * 0.16 for i in range(len(pair.marks))]
        for shift, (marker, value) in zip(apart, pair.marks.items(), strict=True):
            axes.plot(
                at + 0.2 + shift, value, marker, color=BLACK, markersize=3, markerfacecolor="white"
            )
    axes.set_xticks(range(len(pairs)), [pair.label for pair in pairs])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(unit)
    axes.set_xlim(-0.6, len(pairs) - 0.4)
    axes.set_ylim(bottom=0)


def panels(n: int, n_columns: int, height_in: float) -> tuple[Figure, list[Axes]]:
    """n panels in rows of n_columns, on a page's width."""
    n_rows = -(-n // n_columns)
    figure = Figure(figsize=(7.1, n_rows * height_in + 0.7), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes in grid.ravel()[n:]:
        axes.set_visible(False)
    return figure, list(grid.ravel()[:n])


def key(
    figure: Figure, marks: Mapping[str, str], simulated: str = "simulated (synthetic sets)"
) -> None:
    """Published and simulated, and what the markers are."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=tint(GREY, 0.6), edgecolor=GREY, label="published"),
        Patch(facecolor=GREY, edgecolor=GREY, label=simulated),
    ]
    handles += [
        Line2D([], [], marker=marker, color=BLACK, markerfacecolor="white", linestyle="none",
               markersize=3, label=label)
        for marker, label in marks.items()
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.4,
                  columnspacing=1.2, borderaxespad=0.2)  # fmt: skip

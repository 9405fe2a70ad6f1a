"""The figure of a validation: live tokens per second against simulated ones, and two null models.

It reads the table that `kairox validate` writes, a row per setting.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.plot_style import (
    BLACK,
    BLUE,
    GREY,
    LIGHT_GREY,
    SMALL_PT,
    VERMILLION,
    footer,
    house_style,
    legend,
    new_figure,
)

MODELS = (  # (column, name, colour, marker), ours first
    ("simulated_tok_s", "simulated", VERMILLION, "o"),
    ("null_linear_tok_s", "linear in residual", BLUE, "^"),
    ("null_constant_tok_s", "constant", GREY, "s"),
)


def time_errors(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    """Per setting, the relative error of the time per token that `column` stands for."""
    live = rows["live_tok_s"].to_numpy(np.float64)
    error: NDArray[np.float64] = live / rows[column].to_numpy(np.float64) - 1
    return error


def plot_validation(table: pd.DataFrame, *, conditions: str = "") -> Figure:
    """Live tokens per second against what each model said; below, each setting's error.

    Columns: setting, live_tok_s (median of the repeats), live_spread ((max - min) / median),
    simulated_tok_s, null_constant_tok_s, null_linear_tok_s, uses_lookahead_or_stall; where it is
    there, `time` (emulated or measured). `conditions`: more for the footer.
    """
    rows = table[table["live_tok_s"].notna()].sort_values("live_tok_s").reset_index(drop=True)
    if rows.empty:
        raise KairoxError("no row has live_tok_s: there is nothing to compare with")
    with house_style():
        below_in = 0.27 * len(rows) + 0.1
        figure, (scatter, errors) = new_figure(
            2, height_in=4.1 + below_in, heights=[2.6, below_in], share_x=False
        )
        _scatter(scatter, rows)
        _errors(errors, rows)
        handles: list[Line2D | Patch] = []
        for column, name, color, marker in MODELS:
            error = np.abs(time_errors(rows, column))
            known = error[~np.isnan(error)]
            said = f"{np.median(known):.1%}" if known.size else "unknown"
            handles.append(
                Line2D([], [], ls="", color=color, marker=marker, label=f"{name} ({said})")
            )
        handles.append(Line2D([], [], color=BLACK, lw=0.8, label="equal"))
        handles.append(Patch(facecolor=LIGHT_GREY, label="range of the repeats"))
        legend(figure, handles, n_columns=2)
        times = sorted({str(t) for t in rows["time"].dropna()}) if "time" in rows else []
        footer(
            figure,
            f"Live: {' / '.join(times) or 'emulated or measured as the report says'}. In brackets: "
            "median error of the time per token. Filled: uses look-ahead or stalls. Axes do not "
            "start at 0.",
            conditions,
        )
    return figure


def _scatter(axes: Axes, rows: pd.DataFrame) -> None:
    live = rows["live_tok_s"].to_numpy(np.float64)
    half = rows["live_spread"].fillna(0.0).to_numpy(np.float64) * live / 2
    ahead = rows["uses_lookahead_or_stall"].astype(bool).to_numpy()
    for column, _, color, marker in reversed(MODELS):
        said = rows[column].to_numpy(np.float64)
        for on, fill in ((ahead, "full"), (~ahead, "none")):
            axes.errorbar(
                live[on],
                said[on],
                xerr=half[on],
                ls="",
                color=color,
                marker=marker,
                fillstyle=fill,
                elinewidth=0.6,
                capsize=1.5,
            )
    drawn = rows[[column for column, *_ in MODELS]]
    low = 0.95 * min(float((live - half).min()), float(drawn.min().min()))
    high = 1.05 * max(float((live + half).max()), float(drawn.max().max()))
    axes.plot([low, high], [low, high], color=BLACK, lw=0.8, zorder=1)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(visible=True, axis="both")
    axes.set_xlabel("live (tokens/s)")
    axes.set_ylabel("as modelled (tokens/s)")


def _errors(axes: Axes, rows: pd.DataFrame) -> None:
    half = rows["live_spread"].fillna(0.0).to_numpy(np.float64) / 2 * 100
    axes.barh(rows.index, 2 * half, 0.4, left=-half, color=LIGHT_GREY, zorder=0)
    axes.axvline(0, color=BLACK, lw=0.8, zorder=1)
    ahead = rows["uses_lookahead_or_stall"].astype(bool).to_numpy()
    for column, _, color, marker in reversed(MODELS):
        error = time_errors(rows, column) * 100
        for on, fill in ((ahead, "full"), (~ahead, "none")):
            axes.plot(error[on], rows.index[on], ls="", color=color, marker=marker, fillstyle=fill)
    for i, setting in enumerate(rows["setting"]):  # inside: names are long and the column narrow
        axes.annotate(
            str(setting),
            (0.01, i + 0.24),
            xycoords=axes.get_yaxis_transform(),
            va="bottom",
            fontsize=SMALL_PT,
            color=GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        ).set_in_layout(False)
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(rows) - 0.05)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("error of the time per token (%)")

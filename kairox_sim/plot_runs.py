"""Figures of single runs: two layers as a Gantt chart, momenta, a controller over steps.

They read the tables that `figure_data` makes, from disk or from memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kairox_sim.errors import KairoxError
from kairox_sim.figure_data import controller_moves
from kairox_sim.plot_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    SKY,
    SMALL_PT,
    VERMILLION,
    YELLOW,
    footer,
    house_style,
    legend,
    new_figure,
    tint,
)

LANES = (  # (lane of a slice, name on the axis), top to bottom
    ("gpu", "GPU"),
    ("planner", "policy"),
    ("h2d", "link h2d"),
    ("d2h", "link d2h"),
    ("cpu", "CPU"),
)
OPS: dict[str, tuple[str, str, str]] = {  # op of a slice: (name in the legend, colour, hatch)
    "attention": ("attention", BLUE, ""),
    "predict": ("predict", SKY, "////"),
    "gate": ("gate", YELLOW, ""),
    "ffn": ("FFN, resident", GREEN, ""),
    "head": ("head", LIGHT_GREY, ""),
    "decide": ("decide", PURPLE, "xxxx"),
    "swap": ("swaps", VERMILLION, "...."),
    "x": ("activations", BLACK, ""),
    "partial sums": ("activations", BLACK, ""),
    "residual": ("FFN, residual", ORANGE, ""),
}
US = 1e6  # per second
NUMBERED = 0.035  # blocks of at least this share of the window carry their layer's number
NEXT_TINT = 0.45  # the second layer's operations are lighter than the first's
ROLLING_STEPS = 25


def labels_of(table: pd.DataFrame) -> str:
    """The footer of a run's table: simulated, emulated or measured, and of what."""
    said = []
    for column in ("time", "costs", "prediction", "hardware"):
        texts = sorted({str(t) for t in table[column].dropna()} - {"", "no prediction"})
        if texts:
            said.append(" / ".join(texts))
    gating = " / ".join(sorted(set(map(str, table["gating"]))))
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}; gating {gating}."


# -- two layers of one token ---------------------------------------------------------------------


def plot_pipeline(table: pd.DataFrame) -> Figure:
    """What each resource did during a few layers of one step; a panel per run, one time axis."""
    panels = list(dict.fromkeys(table["panel"]))
    longest_s = float(table["window_s"].max())
    lanes = [pair for pair in LANES if pair[0] in set(table["lane"])]
    with house_style():
        figure, all_axes = new_figure(
            len(panels), height_in=1.2 + 0.28 * len(panels) * (len(lanes) + 0.6)
        )
        used: dict[str, Patch] = {}
        for axes, panel in zip(all_axes, panels, strict=True):
            ours = table[table["panel"] == panel]
            window_s = float(ours["window_s"].iloc[0])
            first = int(ours.loc[ours["op"] == "attention", "layer"].min())
            _gantt(axes, ours, [lane for lane, _ in lanes], first, used)
            axes.axvline(window_s * US, color=BLACK, lw=0.9, ls="--")
            axes.set_title(f"{panel}: {window_s * US:.0f} µs", loc="left", pad=3)
            axes.set_yticks(range(len(lanes)), [name for _, name in lanes])
            axes.set_ylim(len(lanes) - 0.45, -0.55)
            axes.set_xlim(0, longest_s * US * 1.03)
            axes.grid(visible=False, axis="y")
            axes.grid(visible=True, axis="x")
        all_axes[-1].set_xlabel("time from the first layer's attention (µs)")
        legend(figure, list(used.values()), n_columns=3)
        layers = sorted(set(table.loc[table["op"] == "ffn", "layer"]))
        footer(
            figure,
            f"{labels_of(table)} Step {table['step'].iloc[0]}; numbers are layers; a dashed line "
            f"ends layer {layers[-1]}. Lighter: of the layer after the first one shown; grey: of "
            "other layers.",
        )
    return figure


def _gantt(
    axes: Axes, rows: pd.DataFrame, lanes: list[str], first: int, used: dict[str, Patch]
) -> None:
    window_s = float(rows["window_s"].iloc[0])
    for op, lane, layer, block_began_s, block_end_s in _blocks(rows):
        began_s, end_s = max(block_began_s, 0.0), min(block_end_s, window_s)  # what is shown
        name, color, hatch = OPS.get(op, (op, GREY, ""))
        face = color if layer == first else tint(color, NEXT_TINT)
        if lane != "gpu" and layer not in (first, first + 1):
            face = LIGHT_GREY
        y = lanes.index(lane)
        axes.barh(
            y, (end_s - began_s) * US, 0.72, left=began_s * US, facecolor=face, edgecolor=BLACK,
            linewidth=0.3, hatch=hatch,
        )  # fmt: skip
        used.setdefault(
            name, Patch(facecolor=color, edgecolor=BLACK, lw=0.3, hatch=hatch, label=name)
        )
        if layer >= 0 and end_s - began_s > NUMBERED * window_s:
            axes.annotate(
                str(layer), ((began_s + end_s) / 2 * US, y), ha="center", va="center",
                fontsize=SMALL_PT,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
            )  # fmt: skip


def _blocks(rows: pd.DataFrame) -> Iterator[tuple[str, str, int, float, float]]:
    """(op, lane, layer, began_s, end_s); copies of a layer that touch are one block."""
    keys = rows.sort_values(["lane", "began_s"], kind="stable")
    held: tuple[str, str, int, float, float] | None = None
    for op, lane, layer, began_s, end_s in zip(
        keys["op"], keys["lane"], keys["layer"], keys["began_s"], keys["end_s"], strict=True
    ):
        if held is not None and held[:3] == (op, lane, layer) and began_s - held[4] < 1e-9:
            held = (*held[:4], end_s)
            continue
        if held is not None:
            yield held
        held = (op, lane, int(layer), began_s, end_s)
    if held is not None:
        yield held


# -- momentum ------------------------------------------------------------------------------------

NEURON_PENS = ((VERMILLION, "o"), (BLUE, "s"), (GREEN, "D"), (PURPLE, "^"))


def plot_momentum(table: pd.DataFrame) -> Figure:
    """TAM's momentum of each neuron over steps, its thresholds, and while it is resident."""
    names = list(dict.fromkeys(table["neuron"]))
    if len(names) > len(NEURON_PENS):
        raise KairoxError(f"{len(names)} neurons; at most {len(NEURON_PENS)} can be told apart")
    with house_style():
        figure, (axes, resident) = new_figure(
            2, height_in=2.9, heights=[1, 0.07 + 0.07 * len(names)]
        )
        handles: list[Line2D] = []
        for y, (name, (color, marker)) in enumerate(zip(names, NEURON_PENS, strict=False)):
            ours = table[table["neuron"] == name].sort_values("step")
            axes.plot(ours["step"], ours["momentum"], color=color)
            fires = ours[ours["active"]]
            axes.plot(fires["step"], fires["momentum"], color=color, marker=marker, ls="", ms=3)
            handles.append(Line2D([], [], color=color, marker=marker, label=name))
            for began, end in _runs(ours["resident"].to_numpy(bool), ours["step"].to_numpy()):
                resident.barh(y, end - began, 0.6, left=began, color=color, edgecolor=BLACK, lw=0.3)
        first = table.iloc[0]
        for threshold, style in (("theta_promote", "--"), ("theta_evict", ":")):
            axes.axhline(float(first[threshold]), color=BLACK, lw=0.9, ls=style)
            label = f"{threshold} {first[threshold]:g}"
            handles.append(Line2D([], [], color=BLACK, lw=0.9, ls=style, label=label))
        axes.set_ylabel(f"momentum (beta {first['beta']:g})")
        axes.set_ylim(0, 1)
        resident.set_yticks(range(len(names)), names)
        resident.set_ylim(len(names) - 0.4, -0.6)
        resident.set_title("resident", loc="left", pad=2)
        resident.grid(visible=False)
        resident.set_xlabel("step (decode tokens)")
        legend(figure, handles, n_columns=2)
        footer(
            figure,
            "Computed by the policy itself, in a cache with a free slot for each neuron, every "
            "copy landing at once; markers are steps at which the neuron fires.",
        )
    return figure


def _runs(on: np.ndarray, steps: np.ndarray) -> Iterator[tuple[int, int]]:
    """[began, end) of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(np.int8), [0]])))
    for began, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(steps[began]), int(steps[end - 1]) + 1


# -- a controller over steps ---------------------------------------------------------------------

BUSY = (
    ("gpu_busy_s", "T_gpu", BLUE, "-"),
    ("cpu_busy_s", "T_cpu", ORANGE, "--"),
    ("swap_busy_s", "T_io", VERMILLION, "-."),
)


def plot_controller(table: pd.DataFrame) -> Figure:
    """threshold_scale and the busy times over decode steps; a line at each change of domain.

    A column `note`, where there is one, is printed below: why this setting is shown.
    """
    moves = controller_moves(table)
    decode = table[table["phase"] == "decode"].reset_index(drop=True)
    x = np.arange(len(decode))
    with house_style():
        figure, (scale, times) = new_figure(2, height_in=4.0, heights=[1, 1.25])
        scale.step(x, decode["threshold_scale"], where="mid", color=BLACK, lw=0.9)
        scale.set_ylabel("threshold_scale")
        for column, name, color, style in BUSY:
            ms = decode[column] * 1e3
            times.plot(x, ms, color=color, lw=0.3, alpha=0.45)
            smooth = ms.rolling(ROLLING_STEPS, center=True, min_periods=1).median()
            times.plot(x, smooth, color=color, lw=1.1, ls=style, label=name)
        times.set_ylim(0, None)
        times.set_ylabel("busy time per step (ms)")
        times.set_xlabel("decode step")
        _domains([scale, times], decode)
        legend(figure, times.get_legend_handles_labels()[0], n_columns=3)
        setting = f"{decode['setting'].iloc[0]}: {moves.in_words()}."
        footer(
            figure,
            labels_of(table),
            setting,
            f"Thin: each step; thick: median of {ROLLING_STEPS} steps. Lower threshold_scale: more "
            "migration.",
            *sorted(set(table.get("note", pd.Series(dtype=str)).dropna())),
        )
    return figure


def _domains(panels: list[Axes], decode: pd.DataFrame) -> None:
    changes = np.flatnonzero(decode["seq"].to_numpy()[1:] != decode["seq"].to_numpy()[:-1]) + 1
    starts = [0, *map(int, changes)]
    for axes in panels:
        for start in starts[1:]:
            axes.axvline(start - 0.5, color=GREY, lw=0.7, ls=(0, (4, 2)))
        axes.set_xlim(-0.5, len(decode) - 0.5)
    for start, stop in zip(starts, [*starts[1:], len(decode)], strict=True):
        panels[0].annotate(
            str(decode["domain"].iloc[start]), ((start + stop) / 2, 1.0),
            xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
            ha="center", va="bottom", fontsize=7, annotation_clip=False,
        )  # fmt: skip

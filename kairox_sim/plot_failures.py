"""Figures of failure modes: a domain shift, a burst of cold neurons, neurons that fire once.

Each reads a table that a script of experiments/ makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from kairox_sim.plot_runs import labels_of
from kairox_sim.plot_style import (
    BLACK,
    COLUMN_IN,
    FILLS,
    GREY,
    Look,
    footer,
    house_style,
    legend,
    look_of,
    look_of_system,
)
from kairox_sim.systems import find_system

MS = 1e3  # per second
_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
SMOOTH_STEPS = 60


def pens(looks: Iterable[Look]) -> dict[str, dict[str, Any]]:
    """How to plot each look, by its name: those of one colour differ in line and in
    how the marker is filled."""
    found: dict[str, dict[str, Any]] = {}
    for look in looks:
        same = sum(pen["color"] == look.color for pen in found.values())
        found[look.name] = {
            "color": look.color, "marker": look.marker, "ms": 3.6, "mew": 0.7,
            "ls": _STYLES[same % len(_STYLES)], "fillstyle": FILLS[same % len(FILLS)],
        }  # fmt: skip
    return found


def system_pens(systems: Iterable[object]) -> dict[str, dict[str, Any]]:
    """The same of systems, by their names."""
    names = dict.fromkeys(map(str, systems))
    return pens(look_of_system(name, find_system(name).settings["policy"]) for name in names)


def handles_of(drawn: Mapping[str, Mapping[str, Any]]) -> list[Line2D]:
    """Of a legend."""
    return [Line2D([], [], label=name, **pen) for name, pen in drawn.items()]


def grid(
    n_rows: int, n_columns: int, height_in: float, **shared: Any
) -> tuple[Figure, NDArray[np.object_]]:
    """Panels [n_rows, n_columns] over two columns of a page."""
    figure = Figure(figsize=(2 * COLUMN_IN, height_in), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **shared)


# -- a domain shift ------------------------------------------------------------------------------


def plot_domain_shift(table: pd.DataFrame) -> Figure:
    """Time per token over steps, and against static placement profiled on all domains."""
    machines = list(dict.fromkeys(table["machine"]))
    drawn = {
        system: pen | {"marker": "", "lw": 1.8 if system == "powerinfer" else 1.0}
        for system, pen in system_pens(table["system"]).items()
    }
    with house_style():
        figure, axes = grid(2, len(machines), 4.3, sharex=True, sharey="row")
        for column, machine in enumerate(machines):
            ours = table[table["machine"] == machine]
            of_all = ours["profiled_on"] == "all domains"
            reference = _smooth(ours[of_all])
            for system, steps in ours[~of_all].groupby("system", sort=False):
                smooth = _smooth(steps)
                axes[0, column].plot(smooth * MS, **drawn[str(system)])
                axes[1, column].plot(smooth / reference, **drawn[str(system)])
            axes[0, column].plot(reference * MS, color=BLACK, ls="--")
            axes[1, column].axhline(1, color=BLACK, ls="--")
            axes[0, column].set_title(machine, loc="left", pad=12)
            axes[1, column].set_xlabel("decode step")
            _mark_domains(axes[:, column], ours[of_all].reset_index(drop=True))
        axes[0, 0].set_ylim(0, None)
        axes[0, 0].set_ylabel("time per token (ms)")
        axes[1, 0].set_ylabel("against static, profiled\non all five domains")
        handles = handles_of(drawn)
        handles.append(Line2D([], [], color=BLACK, ls="--", label="powerinfer, all five domains"))
        legend(figure, handles, n_columns=4)
        footer(
            figure,
            labels_of(table),
            f"Median of {SMOOTH_STEPS} steps around each, within its domain; times at the model's "
            "number of layers. What a system profiles is the first domain; black: all five.",
            *(_after_the_shift(table[table["machine"] == m], m) for m in machines),
        )
    return figure


def _smooth(steps: pd.DataFrame) -> pd.Series:
    """Rolling median of token_s within each domain, by decode step."""
    parts = [
        part.rolling(SMOOTH_STEPS, center=True, min_periods=SMOOTH_STEPS // 4).median()
        for _, part in steps.groupby("seq", sort=False)["token_s"]
    ]
    smooth: pd.Series = pd.concat(parts).reset_index(drop=True)
    return smooth


def _mark_domains(panels: NDArray[np.object_], steps: pd.DataFrame) -> None:
    starts = np.flatnonzero(steps["seq"].diff().to_numpy() != 0)
    for axes in panels:
        for start in starts[1:]:
            axes.axvline(start - 0.5, color=GREY, lw=0.7, ls=(0, (4, 2)))
        axes.set_xlim(-0.5, len(steps) - 0.5)
    for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
        panels[0].annotate(
            str(steps["domain"].iloc[start]), ((start + stop) / 2, 1.0),
            xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
            ha="center", va="bottom", fontsize=7, annotation_clip=False,
        )  # fmt: skip


def domain_shift_costs(table: pd.DataFrame) -> pd.Series:
    """Mean token_s after the shift over that of the reference, by system; one machine."""
    after = table[table["seq"] != table["seq"].iloc[0]]
    of_all = after["profiled_on"] == "all domains"
    means = after[~of_all].groupby("system", sort=False)["token_s"].mean()
    costs: pd.Series = means / float(after.loc[of_all, "token_s"].mean())
    return costs


def _after_the_shift(rows: pd.DataFrame, machine: str) -> str:
    costs = domain_shift_costs(rows)
    each = ", ".join(f"{s} {v - 1:+.0%}" for s, v in costs.items())
    return f"{machine}, mean after the shift against the black line: {each}."


# -- a burst of cold neurons ----------------------------------------------------------------------

_PER_NEURON = (  # (column, name, line style): seconds per cold neuron
    ("prose_s", "guide's text", "-"),
    ("listing_s", "guide's listing", "--"),
    ("roofline_s", "host memory's rate", ":"),
)
_PANELS = (("burst", "one burst"), ("swings", "a burst every token"))


def plot_burst(table: pd.DataFrame) -> Figure:
    """What a burst of cold neurons adds to its token, over the size of the burst."""
    machines, drawn = list(dict.fromkeys(table["machine"])), system_pens(table["system"])
    with house_style():
        figure, axes = grid(2, len(machines), 5.0, sharex=True, sharey="row")
        for row, (panel, title) in enumerate(_PANELS):
            for column, machine in enumerate(machines):
                ours = table[(table["panel"] == panel) & (table["machine"] == machine)]
                _draw_bursts(axes[row, column], ours, drawn)
                said = f"{machine}, {ours['model'].iloc[0]}: {title}"
                axes[row, column].set_title(said, loc="left", pad=3)
        for axis in axes[-1]:
            axis.set_xlabel("cold neurons in one layer (of the model's)")
        for axis in axes[:, 0]:
            axis.set_ylabel("added to the token (ms)")
        handles = handles_of(drawn)
        handles += [
            Line2D([], [], color=BLACK, lw=0.9, ls=style, label=name)
            for _, name, style in _PER_NEURON
        ]
        legend(figure, handles, n_columns=4)
        hidden = int((table["added_s"] <= 0).sum())
        size = _near(table.loc[table["panel"] == "burst", "cold_neurons"], 1500)
        footer(
            figure,
            labels_of(table),
            "The token's time less that of the same token without the burst. Black lines, us a "
            f"neuron: {'; '.join(_microseconds(table))}. Below the last one, part of a burst was "
            "resident or hidden behind the GPU's work.",
            *(_stalls(table[table["machine"] == m], m, size) for m in machines),
            f"{hidden} tokens that a burst did not lengthen are not drawn." if hidden else "",
        )  # fmt: skip
    return figure


def _draw_bursts(axes: Axes, rows: pd.DataFrame, drawn: Mapping[str, Mapping[str, Any]]) -> None:
    sizes = np.array([rows["cold_neurons"].min(), rows["cold_neurons"].max()])
    for column, _, style in _PER_NEURON:
        axes.plot(sizes, sizes * float(rows[column].iloc[0]) * MS, color=BLACK, lw=0.9, ls=style)
    one_burst = rows["panel"].iloc[0] == "burst"
    for system, ours in rows.groupby("system", sort=False):
        longer = ours[ours["added_s"] > 0].sort_values("cold_neurons")
        pen = {**drawn[str(system)], **({} if one_burst else {"ls": ""})}
        axes.plot(longer["cold_neurons"], longer["added_s"] * MS, **pen)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks([100, 300, 1000, 3000])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _near(sizes: pd.Series, wanted: float) -> float:
    """The size in the table that is nearest to `wanted`."""
    return float(sizes.iloc[(sizes - wanted).abs().argmin()])


def _stalls(rows: pd.DataFrame, machine: str, size: float) -> str:
    """What one burst of `size` adds, least and most, and what the guide says of it."""
    ours = rows[(rows["panel"] == "burst") & (rows["cold_neurons"] == size)]
    by_added = ours.sort_values("added_s")
    ends = [
        f"{row['added_s'] * MS:.1f} ms ({row['system']})"
        for _, row in by_added.iloc[[0, -1]].iterrows()
    ]
    said_ms = size * float(ours["prose_s"].iloc[0]) * MS
    said = f"{size:,g} cold neurons add {' to '.join(ends)}"
    return f"{machine}: {said}; the guide says {said_ms:.0f} ms or more."


def _microseconds(table: pd.DataFrame) -> list[str]:
    """Each line with its us a neuron, and of what machine and model where that matters."""
    said = []
    for column, name, _ in _PER_NEURON:
        each = table.drop_duplicates(["machine", "model"])
        values = [f"{v * 1e6:.2g}" for v in each[column]]
        where = (each["machine"] + " " + each["model"]).tolist()
        if len(set(values)) == 1:
            said.append(f"{name} {values[0]}")
        else:
            of = ", ".join(f"{v} ({w})" for v, w in zip(values, where, strict=True))
            said.append(f"{name} {of}")
    return said


# -- neurons that fire once ------------------------------------------------------------------------

_COPIED = {"gather": "one copy a swap", "bundle": "one copy a neuron"}


def plot_thrash(table: pd.DataFrame) -> Figure:
    """Speed at each persistence, hits and wasted loads at the highest, over the share of neurons
    that fire once."""
    names = {policy: look_of(str(policy)).name for policy in dict.fromkeys(table["policy"])}
    drawn = pens(look_of(str(policy)) for policy in names)
    cases = list(dict.fromkeys(zip(table["machine"], table["copies"], strict=True)))
    persistences = sorted(table["persistence"].unique())
    highest = persistences[-1]
    panels = [("tok_s_scaled", "tokens/s", rho) for rho in persistences]
    panels += [
        ("hit_on_time", "hit_on_time", highest),
        ("wasted_per_layer_step", "wasted loads", highest),
    ]
    with house_style():
        figure, axes = grid(
            len(panels), len(cases), 1.3 * len(panels) + 1, sharex=True, sharey="row"
        )
        for column, (machine, copies) in enumerate(cases):
            ours = table[(table["machine"] == machine) & (table["copies"] == copies)]
            for axis, (value, _, rho) in zip(axes[:, column], panels, strict=True):
                for policy, line in ours[ours["persistence"] == rho].groupby("policy", sort=False):
                    axis.plot(line["one_hit_share"], line[value], **drawn[names[policy]])
            axes[0, column].set_title(f"{machine}, {_COPIED[copies]}", loc="left", pad=3)
            axes[-1, column].set_xlabel("share that fires once")
        for axis, (value, name, rho) in zip(axes[:, 0], panels, strict=True):
            lowest = table.loc[table["policy"] == "none", value].min()
            axis.set_ylim(lowest * 0.8 if value == "tok_s_scaled" else 0, None)
            axis.set_ylabel(f"{name}\npersistence {rho:g}")
        legend(figure, handles_of(drawn), n_columns=5)
        most = float(table["one_hit_activations"].max())
        footer(
            figure,
            labels_of(table),
            "Share of the neurons that fire at all in the trace; the number that fire per token is "
            f"held, so the others fire more. At the right end they are {most:.0%} of all "
            "activations. Wasted loads are per layer-step; axes of tokens/s do not begin at 0. One "
            f"trigger, {_slots(table)} slots and perfect prediction for all. LRU, LFU, S3-FIFO and "
            "ARC nearly coincide from 0.6 on.",
        )
    return figure


def _slots(table: pd.DataFrame) -> str:
    """The budget of all policies but "none", which has none."""
    given = table.loc[table["policy"] != "none", "slots"]
    return " to ".join(f"{v:.0f}" for v in sorted({given.min(), given.max()}))

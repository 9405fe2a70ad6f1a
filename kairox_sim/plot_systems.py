"""Figures and tables of systems: tokens per second against hit rate, and ways of grouping.

They read tables from disk and simulate nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kairox_sim.errors import KairoxError
from kairox_sim.plot_series import drawable, layers_ratio, only, provenance
from kairox_sim.plot_style import (
    BLACK,
    BLUE,
    FILLS,
    GREEN,
    GREY,
    SMALL_PT,
    VERMILLION,
    Look,
    footer,
    house_style,
    legend,
    look_of,
    new_figure,
    tint,
)
from kairox_sim.policies import BOUNDS, ORACLES

LINES = {  # of a panel: (policy, line style)
    "all": "--",
    "belady_bypass": "-.",
    "none": ":",
}
NAMES_FROM = 1.13  # where on the axis of shares the names begin
METHOD_LOOKS = {
    "metis": Look("METIS", VERMILLION, "o"),
    "frequency": Look("by frequency", GREEN, "D"),
    "random": Look("at random", GREY, "X"),
    "chunks": Look("neighbours", BLUE, "s"),
}


def plot_hits_and_throughput(
    table: pd.DataFrame, *, hardware: str | None = None, link: str | None = None
) -> Figure:
    """Tokens per second against hit_on_time, a point per system with its name, a panel per model.

    A thin line begins at hit_resident: what is between came in time to count. Lines across are the
    bounds, the bypass oracle in the same memory, and the time that no system can beat. hardware,
    link: needed where the table has several.
    """
    rows = drawable(table if hardware is None else only(table, "hardware", hardware))
    rows = only(only(rows, "machine_name"), "link_name", link)
    models = sorted(rows["costs"].unique(), key=lambda c: -_budget(rows[rows["costs"] == c]))
    with house_style():
        figure, panels = new_figure(len(models), height_in=1.0 + 2.35 * len(models))
        for axes, model in zip(panels, models, strict=True):
            ours = rows[rows["costs"] == model]
            top = _lines(axes, ours)
            _points(axes, _systems(ours), top)
            axes.set_title(_of_slots(ours), fontsize=SMALL_PT, loc="left", color=GREY, pad=4)
            axes.set_ylabel("tokens/s")
        panels[-1].set_xlabel("share of evaluated neurons that are hits", x=0.3)
        legend(figure, _line_handles(rows), n_columns=2)
        notes = ["Point: hit_on_time; its line begins at hit_resident"]
        here = table[table["hardware"].isin(rows["hardware"])]
        if refused := sorted(set(here.loc[here["status"] == "refused", "label"])):
            notes.append(f"Refused: {', '.join(refused)}")
        footer(figure, provenance(rows, here, *notes))
    return figure


def _systems(rows: pd.DataFrame) -> pd.DataFrame:
    chosen = rows[~rows["policy"].isin((*BOUNDS, *ORACLES))]
    if chosen.empty:
        raise KairoxError("the table has bounds and oracles only: no system to draw")
    return chosen


def _budget(rows: pd.DataFrame) -> float:
    """Slots per layer of the systems that take what fits, or else the most that any has."""
    ours = _systems(rows)
    fits = ours.loc[ours["slots_asked"] == "vram", "slots"]
    return float((fits if len(fits) else ours["slots"]).max())


def _of_slots(rows: pd.DataFrame) -> str:
    """ "big costs: 24 of 64 slots per layer fit", as far as the table says it."""
    everything = rows.loc[rows["policy"] == "all", "slots"]  # as many as there are neurons
    of = f" of {everything.max():.0f}" if len(everything) else ""
    how = "fit" if (_systems(rows)["slots_asked"] == "vram").any() else "at most"
    return f"{_target(str(rows['costs'].iloc[0]))}: {_budget(rows):.0f}{of} slots per layer {how}"


def _target(costs: str) -> str:
    """ "stand-in: tiny activations, big costs" -> "big costs"."""
    return costs.rpartition(", ")[2]


def _points(axes: Axes, rows: pd.DataFrame, top: float) -> None:
    """The points, and their names in a column at the right, each with a line to its point."""
    rows = rows.sort_values("tok_s_scaled")
    several = set(rows.loc[rows["series"].duplicated(), "series"])  # budgets of one system
    speeds = [float(speed) for speed in rows["tok_s_scaled"]]
    heights = spread(speeds, least=0.057 * top, highest=top)
    for (_, row), y, height in zip(rows.iterrows(), speeds, heights, strict=True):
        series = row["series"]
        look, x = series.look, float(row["hit_on_time"])
        axes.plot([float(row["hit_resident"]), x], [y, y], color=look.color, lw=0.7, zorder=2)
        axes.plot([x, 1.03, NAMES_FROM - 0.01], [y, height, height], color=tint(look.color, 0.55),
                  lw=0.4, zorder=1)  # fmt: skip
        axes.plot([x], [y], ls="", color=look.color, marker=look.marker, ms=3.2, zorder=3,
                  fillstyle=FILLS[series.variant], markerfacecoloralt="white")  # fmt: skip
        name = series.name + (f" {row['slots']:.4g}" if series in several else "")
        axes.text(NAMES_FROM, height, name, color=look.color, fontsize=SMALL_PT,
                  va="center")  # fmt: skip
    axes.set_xlim(-0.02, 1.72)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylim(0, top)
    axes.spines["bottom"].set_bounds(0, 1)
    axes.grid(visible=False)  # it would run through the names


def spread(wanted: Sequence[float], *, least: float, highest: float) -> list[float]:
    """Places for names at `wanted`, which ascends: in order, `least` apart, as near as that allows.

    Within 0 and `highest`; closer, evenly, where they do not all fit.
    """
    n = len(wanted)
    gap = min(least, highest / max(1, n))
    blocks: list[tuple[float, int]] = []  # names that touch: mean of what they want less i gaps
    for i, value in enumerate(wanted):
        mean, size = value - gap * i, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, size = (mean * size + other * more) / (size + more), size + more
        blocks.append((mean, size))
    starts = [mean for mean, size in blocks for _ in range(size)]
    low, high = gap / 2, highest - gap / 2 - gap * (n - 1)
    return [min(max(start, low), high) + gap * i for i, start in enumerate(starts)]


def _lines(axes: Axes, rows: pd.DataFrame) -> float:
    """Across: bounds, the oracle and what no system can beat. Returns the top of the axis."""
    for policy, style in LINES.items():
        ours = rows.loc[rows["policy"] == policy, "tok_s_scaled"]
        if len(ours):
            axes.plot([0, 1], [ours.mean()] * 2, color=look_of(policy).color, lw=0.9, ls=style,
                      zorder=1)  # fmt: skip
    best = float(np.max(1 / (rows["common_bound_s"] * layers_ratio(rows))))
    axes.plot([0, 1], [best, best], color=BLACK, lw=0.9, ls="-", zorder=1)
    return 1.04 * best


def _line_handles(rows: pd.DataFrame) -> list[Line2D]:
    fits = rows.loc[rows["policy"] == "all", "fits"].astype(bool).all()
    handles = [Line2D([], [], color=BLACK, lw=0.9, label="no system can be faster")]
    for policy, style in LINES.items():
        if policy in set(rows["policy"]):
            look = look_of(policy)
            name = look.name + (" (does not fit)" if policy == "all" and not fits else "")
            handles.append(Line2D([], [], color=look.color, ls=style, lw=0.9, label=name))
    return handles


def plot_groups(table: pd.DataFrame) -> Figure:
    """Groups of each size and method on held-out tokens: co-activation, and hits per policy.

    Columns: size, method, policy, c_within, hit_resident, slots, n_neurons, trace, prior.
    """
    policies = list(dict.fromkeys(table["policy"]))
    methods = [m for m in METHOD_LOOKS if m in set(table["method"])]
    with house_style():
        figure, panels = new_figure(1 + len(policies), height_in=1.1 + 1.3 * (1 + len(policies)))
        quantities = [("c_within", policies[0]), *(("hit_resident", p) for p in policies)]
        for axes, (column, policy) in zip(panels, quantities, strict=True):
            for method in methods:
                ours = table[(table["method"] == method) & (table["policy"] == policy)]
                ours = ours.sort_values("size")
                look = METHOD_LOOKS[method]
                axes.plot(ours["size"], ours[column], color=look.color, marker=look.marker)
            axes.set_ylim(0, 1.1 * float(table[column].max()))
            if column == "c_within":
                axes.set_ylabel("co-activation\nwithin groups")
            else:
                axes.set_ylabel(f"hit_resident\n{look_of(policy).name}")
        sizes = sorted(table["size"].unique())
        panels[-1].set_xscale("log", base=2)
        panels[-1].set_xticks(sizes, [f"{size:g}" for size in sizes])
        panels[-1].minorticks_off()
        panels[-1].set_xlabel("neurons in a group")
        handles = [
            Line2D([], [], color=look.color, marker=look.marker, label=look.name)
            for look in (METHOD_LOOKS[m] for m in methods)
        ]
        legend(figure, handles, n_columns=len(handles))
        one = table.iloc[0]
        footer(
            figure,
            f"Decisions only, no time. {one['trace']}, groups from {one['prior']}, no token in "
            f"both; {one['slots']:g} of {one['n_neurons']:g} slots per layer at every size, filled "
            "with the prior's hottest groups. Plans follow lookups and copies land at once. "
            f"{where_metis_loses(table)}",
        )
    return figure


def where_metis_loses(table: pd.DataFrame) -> str:
    """One sentence: at which sizes other ways of grouping have more hits than METIS."""
    said = []
    for other in [m for m in METHOD_LOOKS if m in set(table["method"]) and m != "metis"]:
        where = []
        for policy, rows in table.groupby("policy", sort=False):
            hits = rows.pivot_table(index="size", columns="method", values="hit_resident")
            if sizes := [f"{size:g}" for size in hits.index[hits[other] > hits["metis"]]]:
                where.append(f"{look_of(str(policy)).name} at {', '.join(sizes)}")
        if where:
            said.append(f"than groups {METHOD_LOOKS[other].name} under {', '.join(where)}")
    if not said:
        return "METIS has the most hits everywhere."
    return f"METIS has fewer hits {'; '.join(said)}."


COLUMNS = (  # of a table of systems: (name, column, scale, format)
    ("tokens/s", "tok_s_scaled", 1.0, ".1f"),
    ("hit_resident", "hit_resident", 1.0, ".3f"),
    ("hit_on_time", "hit_on_time", 1.0, ".3f"),
    ("fetched", "fetched_share", 1.0, ".3f"),
    ("loads / layer-step", "loads_per_layer_step", 1.0, ".1f"),
    ("host to device, MB/token", "h2d_bytes_per_token", 1e-6, ".1f"),
    ("over the common bound", "over_common_bound", 1.0, ".0%"),
    ("over its own bound", "over_bound", 1.0, ".0%"),
    ("over the oracle", "over_oracle", 1.0, ".0%"),
)


def systems_table(table: pd.DataFrame, hardware: str) -> str:
    """Markdown: every cell of one machine, fastest first; what was refused, with why.

    Loads are neurons of the trace; bytes and tokens/s are scaled to the model's layers.
    """
    rows = only(table, "hardware", hardware)
    said = [f"# Systems on {hardware}, simulated"]
    for model, ours in rows.groupby("model_as", sort=True):
        names = ["system", *(name for name, *_ in COLUMNS)]
        lines = [f"| {' | '.join(names)} |", f"|---{'|---:' * len(COLUMNS)}|"]
        for _, row in (
            ours[ours["status"] == "ok"].sort_values("tok_s_scaled", ascending=False).iterrows()
        ):
            ratio = row["tok_s"] / row["tok_s_scaled"] if row["tok_s_scaled"] else 1.0
            cells = [
                _cell(row[key] * scale * (ratio if key.startswith("h2d") else 1.0), form)
                for _, key, scale, form in COLUMNS
            ]
            name = str(row["label"]) + ("" if row["fits"] else " (does not fit)")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        known = ours[ours["status"] == "ok"]
        best_s = float((known["common_bound_s"] * layers_ratio(known)).min())
        refused = [
            f"- {r['label']}: {r['why']}" for _, r in ours[ours["status"] != "ok"].iterrows()
        ]
        said += [
            f"## {model}",
            f"{known['costs'].iloc[0]}. No system that computes every active neuron can be faster "
            f"than {1 / best_s:.1f} tokens/s (the common bound). The oracle has the fewest misses "
            "in the same slots, and loads for them: a system that moves less can be faster.",
            "\n".join(lines),
            *(["Refused:", "\n".join(refused)] if refused else []),
        ]
    return "\n\n".join(said) + "\n"


def _cell(value: float, form: str) -> str:
    return "unknown" if value != value else format(value, form)

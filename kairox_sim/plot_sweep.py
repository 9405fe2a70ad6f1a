"""Figures of a sweep's table: tokens per second, hit rates against budget, where the time goes.

They read columns that `sweep` writes and simulate nothing. A hit rate is never drawn without the
tokens per second it came with. `tok_s_scaled` is drawn, which is `tok_s` where nothing stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kairox_sim.errors import KairoxError
from kairox_sim.plot_series import (
    Series,
    at_budget,
    budget_words,
    drawable,
    layers_ratio,
    link_label,
    middle_budget,
    middle_link,
    only,
    provenance,
)
from kairox_sim.plot_style import (
    BLACK,
    BLUE,
    FILLS,
    GREY,
    HATCHES,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    SKY,
    SMALL_PT,
    VERMILLION,
    footer,
    house_style,
    legend,
    look_of,
    new_figure,
    tint,
)
from kairox_sim.policies import BOUNDS

__all__ = [
    "PARTS",
    "contrast",
    "drawable",
    "middle_link",
    "plot_budget",
    "plot_throughput",
    "plot_time_split",
    "time_parts",
]

TOK_S_LABEL = "tokens/s"
SAME = 0.01  # bounds that differ less from link to link are one line


def plot_throughput(table: pd.DataFrame, *, slots: float | None = None) -> Figure:
    """Tokens per second by policy and link at one budget, a panel per gating, bounds as lines."""
    every = only(only(drawable(table), "machine_name"), "costs")
    budget = middle_budget(every) if slots is None else slots
    rows = at_budget(every, budget)
    gatings, whole = _panels(rows)
    links = sorted(rows["link_name"].unique())
    names = sorted(set(rows.loc[~rows["policy"].isin(BOUNDS), "series"]))
    with house_style():
        figure, panels = new_figure(
            len(gatings), height_in=0.95 + 1.75 * len(gatings), share_y=True
        )
        for axes, gating in zip(panels, gatings, strict=True):
            ours = rows[(rows["gating"] == gating) | whole]
            _bars(axes, ours, names, links)
            _bound_lines(axes, ours)
            axes.set_ylabel(f"{TOK_S_LABEL}\ngating: {gating}")
            axes.set_title(contrast(ours), fontsize=SMALL_PT, loc="left", color=GREY, pad=4)
        panels[-1].set_xticks(
            range(len(names)), [s.name for s in names], rotation=30, ha="right",
            rotation_mode="anchor",
        )  # fmt: skip
        shades = [
            Patch(facecolor=tint(BLACK, _shade(i, len(links))), edgecolor=BLACK, lw=0.4,
                  label=link_label(link))
            for i, link in enumerate(links)
        ]  # fmt: skip
        said = f"Budget {budget_words(rows, every, budget)}"
        if len(links) == 1:  # nothing to tell apart by shade
            shades, said = [], f"{link_label(links[0])}. {said}"
        legend(figure, [*shades, *_bound_handles(rows)], n_columns=2)
        if set(BOUNDS) <= set(rows["policy"]):
            said += ". Ceiling: all resident / none resident"
        footer(figure, provenance(rows, table, said))
    return figure


def _panels(rows: pd.DataFrame) -> tuple[list[str], Any]:
    """The gatings that have a panel, and per row whether every panel has it.

    Dense rows have no gate to be told apart by: they stand in every panel, like the bounds, or in
    one of their own where there is no other or a series runs both ways.
    """
    dense = rows["gating"] == "dense"
    order = ("predicted", "exact", "screened", "oracle")
    gated = [g for g in order if g in set(rows["gating"])]
    whole = dense & ~rows["policy"].isin(BOUNDS) & ~rows["series"].isin(rows["series"][~dense])
    alone = not gated or bool((dense & ~whole).any())
    return [*gated, *(["dense"] if alone else [])], whole


def _bars(axes: Axes, rows: pd.DataFrame, names: Sequence[Series], links: Sequence[str]) -> None:
    width = 0.8 / len(links)
    by_bar: dict[tuple[Series, str], float] = dict(
        zip(zip(rows["series"], rows["link_name"], strict=True), rows["tok_s_scaled"], strict=True)
    )
    for i, link in enumerate(links):
        for x, series in enumerate(names):
            if (series, link) not in by_bar:
                continue
            axes.bar(
                x - 0.4 + (i + 0.5) * width,
                by_bar[series, link],
                width,
                facecolor=tint(series.look.color, _shade(i, len(links))),
                edgecolor=BLACK,
                linewidth=0.4,
                hatch=HATCHES[series.variant],
            )
    axes.set_xlim(-0.6, len(names) - 0.4)


def _shade(i: int, n: int) -> float:
    """Lightest first: a newer generation is darker."""
    return 0.65 * (1 - i / (n - 1)) if n > 1 else 0.0


BOUND_LINES = {"all": "--", "none": ":"}


def _bound_lines(axes: Axes, rows: pd.DataFrame) -> None:
    """A line per bound, or one for each link where they differ."""
    for policy in BOUNDS:
        values = rows.loc[rows["policy"] == policy, "tok_s_scaled"].to_numpy(np.float64)
        if values.size == 0:
            continue
        one = values.max() - values.min() <= SAME * values.max()
        for value in [values.mean()] if one else values:
            axes.axhline(value, color=look_of(policy).color, lw=1.1, ls=BOUND_LINES[policy])


def _bound_handles(rows: pd.DataFrame) -> list[Line2D]:
    handles = []
    for policy in BOUNDS:
        ours = rows[rows["policy"] == policy]
        if ours.empty:
            continue
        look = look_of(policy)
        fits = policy != "all" or ours["fits"].astype(bool).all()
        name = look.name if fits else f"{look.name} (does not fit)"
        handles.append(Line2D([], [], color=look.color, ls=BOUND_LINES[policy], label=name))
    return handles


def contrast(rows: pd.DataFrame) -> str:
    """How far apart settings are, in words: best / worst without and with the bounds, the ceiling
    (all resident / none resident), and first link to last.
    """
    settings = rows[~rows["policy"].isin(BOUNDS)]
    tok_s = settings["tok_s_scaled"]
    everything, gained = rows["tok_s_scaled"], []
    said = [] if settings.empty else [f"best / worst {tok_s.max() / tok_s.min():.2f}x"]
    if len(settings) < len(rows):
        said.append(f"with the bounds {everything.max() / everything.min():.2f}x")
    bounds = rows.groupby("policy")["tok_s_scaled"]
    if set(BOUNDS) <= set(rows["policy"]):
        said.append(f"ceiling {bounds.max()['all'] / bounds.min()['none']:.2f}x")
    links = sorted(set(settings["link_name"]) - {"own"})  # its own is of no generation
    if len(links) > 1:
        by_link = settings.pivot_table(index="series", columns="link_name", values="tok_s_scaled")
        gain = (by_link[links[-1]] / by_link[links[0]]).dropna()
        if not gain.empty:
            first, last = (link_label(link).removeprefix("PCIe ") for link in (links[0], links[-1]))
            best = gain.idxmax()
            assert isinstance(best, Series)
            gained.append(f"{last} over {first} up to {gain.max() - 1:+.0%} ({best.name})")
    return ", ".join(said) + "".join(f"\n{more}" for more in gained)


def plot_budget(
    table: pd.DataFrame, *, link: str | None = None, gating: str | None = None
) -> Figure:
    """hit_resident and hit_on_time against budget, and tokens per second below them."""
    rows = only(only(only(drawable(table), "machine_name"), "costs"), "gating", gating)
    rows = only(rows, "link_name", link)
    swept = rows[~rows["policy"].isin(BOUNDS)]
    names = sorted(set(swept["series"]))
    if not names:
        raise KairoxError("the table has bounds only: no setting with a budget to draw")
    with house_style():
        figure, (hits, speed) = new_figure(2, height_in=4.6 + 0.13 * ((len(names) + 1) // 2))
        for series in names:
            ours = swept[swept["series"] == series].sort_values("slots")
            pen = _pen(series)
            hits.plot(ours["slots"], ours["hit_on_time"], ls="-", **pen)
            hits.plot(ours["slots"], ours["hit_resident"], ls=":", **pen)
            speed.plot(ours["slots"], ours["tok_s_scaled"], ls="-", **pen)
        hits.set_ylabel("share of evaluated neurons")
        hits.set_ylim(0, 1)
        _bound_lines(speed, rows)
        speed.set_ylim(0, None)
        speed.set_ylabel(TOK_S_LABEL)
        speed.set_xlabel(f"budget (slots per layer{_of_neurons(rows)})")
        handles = [Line2D([], [], ls="-", label=s.name, **_pen(s)) for s in names]
        kinds = [
            Line2D([], [], color=BLACK, ls="-", label="hit_on_time"),
            Line2D([], [], color=BLACK, ls=":", label="hit_resident"),
        ]
        legend(figure, [*handles, *kinds, *_bound_handles(rows)], n_columns=2)
        held = f"Gating {rows['gating'].iloc[0]}, {link_label(rows['link_name'].iloc[0])}"
        footer(figure, provenance(rows, table, held))
    return figure


def _pen(series: Series) -> dict[str, Any]:
    look = series.look
    return {
        "color": look.color,
        "marker": look.marker,
        "fillstyle": FILLS[series.variant],
        "markerfacecoloralt": "white",
    }


def _of_neurons(rows: pd.DataFrame) -> str:
    """The all-resident bound has as many slots as there are neurons."""
    everything = rows.loc[rows["policy"] == "all", "slots"]
    return f" of {everything.max():g}" if len(everything) else ""


PARTS: tuple[tuple[str, str, str, str], ...] = (  # (column, name, colour, hatch)
    ("compute_s", "GPU: attention, gate, FFN, head", BLUE, ""),
    ("predict_s", "GPU: prediction", SKY, "////"),
    ("wait_cpu_s", "waiting for the CPU", ORANGE, ""),
    ("wait_io_s", "waiting for I/O", VERMILLION, "...."),
    ("wait_decide_s", "waiting for the policy", PURPLE, "xxxx"),
    ("unexplained_s", "unexplained", LIGHT_GREY, ""),
)


def time_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Per row, seconds per token of each of PARTS, scaled as `tok_s_scaled` is; they add up to it.

    Prediction is GPU time; in a table without `predict_s` it is left inside `compute_s` and its
    own part is nan.
    """
    parts = rows[["wait_cpu_s", "wait_io_s", "wait_decide_s", "unexplained_s"]].copy()
    known = "predict_s" in rows
    parts["predict_s"] = rows["predict_s"] if known else np.nan
    parts["compute_s"] = rows["gpu_s"] - (rows["predict_s"] if known else 0.0)
    return parts[[column for column, *_ in PARTS]].mul(layers_ratio(rows), axis=0)


def plot_time_split(
    table: pd.DataFrame,
    *,
    slots: float | None = None,
    link: str | None = None,
    gating: str | None = None,
) -> Figure:
    """Time per token at one budget and link, split by what the GPU did or waited for."""
    rows = only(only(only(drawable(table), "machine_name"), "costs"), "gating", gating)
    rows = only(rows, "link_name", link)
    every = rows
    budget = middle_budget(rows) if slots is None else slots
    rows = at_budget(rows, budget).sort_values("series", ascending=False).reset_index(drop=True)
    parts = time_parts(rows) * 1e3  # ms
    with house_style():
        figure, (axes,) = new_figure(1, height_in=1.35 + 0.24 * len(rows))
        left = np.zeros(len(rows))
        drawn = []
        for column, name, color, hatch in PARTS:
            values = parts[column].fillna(0.0).to_numpy(np.float64)
            if not (values > 0).any():
                continue
            axes.barh(
                rows.index, values, 0.7, left=left, facecolor=color, edgecolor=BLACK,
                linewidth=0.4, hatch=hatch,
            )  # fmt: skip
            drawn.append(Patch(facecolor=color, edgecolor=BLACK, lw=0.4, hatch=hatch, label=name))
            left += values
        for y, (total, tok_s) in enumerate(zip(left, rows["tok_s_scaled"], strict=True)):
            axes.annotate(
                f"{tok_s:.3g}/s", (total, y), xytext=(2, 0), textcoords="offset points",
                va="center", fontsize=6,
            )  # fmt: skip
        axes.set_yticks(rows.index, [series.name for series in rows["series"]])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlim(0, float(left.max()) * 1.14)
        axes.set_xlabel("time per token (ms)")
        legend(figure, drawn, n_columns=2)
        missing = [name for column, name, *_ in PARTS if parts[column].isna().all()]
        held = [
            f"Gating {rows['gating'].iloc[0]}, {link_label(rows['link_name'].iloc[0])}, "
            f"{budget_words(rows, every, budget)}"
        ]
        if missing:
            held.append(f"Not told apart in this table: {', '.join(missing)}")
        footer(figure, provenance(rows, table, *held))
    return figure

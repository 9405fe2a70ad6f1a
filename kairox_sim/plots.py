"""Every figure, each drawn from a table on disk; nothing here simulates.

A figure function takes a DataFrame and returns a matplotlib Figure; `save` writes it. `plot_all`
draws whatever a table has the columns for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from kairox_sim.errors import KairoxError
from kairox_sim.plot_runs import plot_controller, plot_momentum, plot_pipeline
from kairox_sim.plot_series import drawable, middle_link, only
from kairox_sim.plot_style import save
from kairox_sim.plot_sweep import plot_budget, plot_throughput, plot_time_split
from kairox_sim.plot_systems import plot_hits_and_throughput
from kairox_sim.plot_validation import plot_validation
from kairox_sim.policies import BOUNDS

__all__ = [
    "FIGURES",
    "plot_all",
    "plot_budget",
    "plot_controller",
    "plot_hits_and_throughput",
    "plot_momentum",
    "plot_pipeline",
    "plot_throughput",
    "plot_time_split",
    "plot_validation",
    "read_figure_table",
    "save",
]

_CELL = (
    "status", "policy", "slots", "gating", "link", "machine", "costs", "prediction_label",
    "tok_s", "tok_s_scaled",
)  # fmt: skip
_RUN = ("time", "costs", "gating", "prediction", "hardware")

# Columns without which a figure cannot be drawn.
FIGURES: dict[str, tuple[str, ...]] = {
    "throughput": (*_CELL, "fits"),
    "budget": (*_CELL, "fits", "hit_resident", "hit_on_time"),
    "systems": (
        *_CELL, "fits", "hit_resident", "hit_on_time", "system", "slots_asked", "common_bound_s",
    ),
    "time_split": (*_CELL, "gpu_s", "wait_cpu_s", "wait_io_s", "wait_decide_s", "unexplained_s"),
    "pipeline": ("panel", "lane", "op", "layer", "began_s", "end_s", "window_s", "step", *_RUN),
    "momentum": (
        "neuron", "step", "active", "momentum", "resident", "beta", "theta_promote", "theta_evict",
    ),
    "controller": (
        "seq", "step", "phase", "domain", "setting", "threshold_scale", "gpu_busy_s", "cpu_busy_s",
        "swap_busy_s", *_RUN,
    ),
    "validation": (
        "setting", "live_tok_s", "live_spread", "simulated_tok_s", "null_constant_tok_s",
        "null_linear_tok_s", "uses_lookahead_or_stall",
    ),
}  # fmt: skip
ONE_FIGURE: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "pipeline": plot_pipeline,
    "momentum": plot_momentum,
    "controller": plot_controller,
    "validation": plot_validation,
}
_NOTHING = {  # why a kind has no figure at all
    "systems": "a figure of systems needs two systems or more on one machine",
    **dict.fromkeys(("throughput", "budget", "time_split"), "the table has bounds only"),
}
OnSkip = Callable[[str, str], None]


def read_figure_table(path: str | Path) -> pd.DataFrame:
    """A table to draw from: Parquet, or CSV by its suffix."""
    try:
        if Path(path).suffix.lower() == ".csv":
            return pd.read_csv(path)
        return pq.read_table(os.fspath(path)).to_pandas()  # type: ignore[no-any-return]
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error
        raise KairoxError(
            f"cannot read {os.fspath(path)!r} as a table: {why}; give a Parquet or .csv file such "
            "as `kairox sweep` or `kairox validate` writes"
        ) from error


NO_COLUMNS = "the table lacks"  # how the reason begins where a figure is of another kind of table


def plot_all(
    table: pd.DataFrame | str | Path,
    out_dir: str | Path,
    *,
    hardware: str | None = None,
    link: str | None = None,
    gating: str | None = None,
    slots: float | None = None,
    formats: Sequence[str] = ("png", "pdf"),
    on_skip: OnSkip | None = None,
) -> list[Path]:
    """Draw every figure the table allows into `out_dir`; the files written.

    A sweep's table gives a throughput figure per machine and model, for each gating a budget figure
    and a split of the time, and of two systems or more, per machine, their hits and throughput.
    hardware, gating: only these; link, slots: for figures of one bus or one budget, by default the
    middle of those swept. on_skip(figure, why) is told what was not drawn. KairoxError if nothing
    can be.
    """
    rows = table if isinstance(table, pd.DataFrame) else read_figure_table(table)
    if link is not None and "link" in rows:
        known = sorted({"own" if pd.isna(name) else str(name) for name in rows["link"]})
        if link not in known:
            raise KairoxError(f"the table has no link {link!r}; it has {', '.join(known)}")
    skipped: dict[str, str] = {}
    paths: list[Path] = []
    for name, needed in FIGURES.items():
        missing = [column for column in needed if column not in rows]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            skipped[name] = f"{NO_COLUMNS} {', '.join(missing[:3])}{more}"
            continue
        try:
            if name in ONE_FIGURE:
                parts: list[tuple[str, Callable[[], Figure]]]
                parts = [(name, partial(ONE_FIGURE[name], rows))]
            else:
                parts = list(_parts(name, _chosen(rows, hardware, gating), link, slots))
                if not parts:
                    raise KairoxError(_NOTHING[name])
        except KairoxError as error:
            skipped[name] = str(error)
            continue
        for stem, draw in parts:
            try:
                paths += save(draw(), out_dir, stem, formats)
            except KairoxError as error:
                skipped[stem] = str(error)
    if not paths:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise KairoxError(f"no figure can be drawn from this table. {why}")
    if on_skip is not None:
        for name, reason in skipped.items():
            on_skip(name, reason)
    return paths


def _chosen(rows: pd.DataFrame, hardware: str | None, gating: str | None) -> pd.DataFrame:
    """The rows that ran, of one machine (as it was asked for) and one gating where given."""
    ok = rows[rows["status"] == "ok"]
    if ok.empty:
        raise KairoxError("no row of the table has status ok: there is nothing to draw")
    if hardware is not None:
        ok = only(ok, "hardware", hardware)
    return ok if gating is None else only(ok, "gating", gating)


def _parts(
    name: str, rows: pd.DataFrame, link: str | None, slots: float | None
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(stem, draw) of each figure of one kind."""
    if name == "systems":
        yield from _systems_parts(rows, link)
        return
    several_models = rows["costs"].nunique() > 1
    machines = rows["machine"].map(lambda text: str(text).split("+")[0])
    for (machine, costs), group in rows.groupby([machines, "costs"], sort=True):
        whose = f"_{machine}" + (f"_{_slug(str(costs))}" if several_models else "")
        if name == "throughput":
            yield f"throughput{whose}", partial(plot_throughput, group, slots=slots)
            continue
        for gating, ours in group.groupby("gating", sort=True):
            swept = ours[~ours["policy"].isin(BOUNDS)]
            if swept.empty:
                continue
            if name == "budget" and swept["slots"].nunique() < 2:
                yield f"budget{whose}_{gating}", _one_budget
                continue  # such as whole layers, beside gatings whose budgets were swept
            bus = middle_link(drawable(ours)) if link is None else link
            stem = f"{name}{whose}_{gating}_{bus}"
            if name == "budget":
                yield stem, partial(plot_budget, ours, link=bus)
            else:
                yield stem, partial(plot_time_split, ours, slots=slots, link=bus)


def _one_budget() -> Figure:
    raise KairoxError("a figure against budget needs two budgets or more")


def _systems_parts(
    rows: pd.DataFrame, link: str | None
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(stem, draw) for each machine on which two systems or more ran."""
    machines = rows["machine"].map(lambda text: str(text).split("+")[0])
    for machine, group in rows.groupby(machines, sort=True):
        if group["system"].nunique() >= 2:
            bus = middle_link(drawable(group)) if link is None else link
            yield f"systems_{machine}_{bus}", partial(plot_hits_and_throughput, group, link=bus)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-")

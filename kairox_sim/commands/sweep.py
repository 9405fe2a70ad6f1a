"""kairox sweep: a grid of settings and machines over one trace, to one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.live_options import Vram
from kairox_sim.commands.options import (
    Json,
    print_json,
    print_warnings,
    progress,
    say,
    wide_console,
)
from kairox_sim.commands.record import INTERRUPTED
from kairox_sim.record import EXACT

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 20
SHOWN = (
    "tok_s_scaled", "hit_on_time", "residual_share", "loads_per_layer_step", "over_bound",
)  # fmt: skip


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="FILE.toml", help="What to sweep.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The table to write, Parquet.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. \\[default: one per core]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of the file's trace. Paths start where you are.")
    ] = None,
    prior: Annotated[Path | None, typer.Option(help="Instead of the file's prior.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Instead of the file's hardware: a profile or a .toml.")
    ] = None,
    vram: Vram = None,
    as_json: Json = False,
) -> None:
    """Simulate every cell of a sweep file; each row of the table says ok, refused or failed.

    Shows the fastest cells. A sweep file is TOML; the least is a trace and something to vary:

    \b
    trace = "eval.arrow"           # paths start where you are
    prior = "prior.arrow"          # only where something learns from it
    seeds = [0, 1]                 # only where predictions are drawn
    \\[base]                         # of every cell: any setting, hardware, link
    model_as = "prosparse-7b"
    hardware = "pc1"               # or gpu+cpu+link; link = "pcie3", or "own"
    \\[grid]                         # every combination of these lists
    slots = [128, 256]
    "tam.beta" = [0.8, 0.9]        # "policy.param": only where the policy is tam
    system = ["powerinfer", "kairox-paper"]
    rule = [{ policy = "tam", slots = 64 }, { policy = "lru" }]  # keys together
    \\[\\[cells]]                      # one more cell; repeat it for others
    policy = "none"

    Example: kairox sweep experiments/demo.toml -o demo.parquet
    """
    import joblib

    from kairox_sim.sweeps import Sweep
    from kairox_sim.sweeps import sweep as run

    plan = Sweep.load(spec)
    given = {"trace": trace, "prior": prior}
    plan = plan.model_copy(update={k: str(v) for k, v in given.items() if v is not None})
    plan = plan.on(hardware, vram=vram)
    try:
        with progress() as bar:
            task = bar.add_task("sweeping", total=None)
            table = run(
                plan,
                out,
                workers=workers or joblib.cpu_count(),
                on_cell=lambda done, of: bar.update(task, completed=done, total=of),
            )
    except KeyboardInterrupt as stop:
        say(f"kairox: {stop}")
        raise typer.Exit(INTERRUPTED) from stop
    statuses = {s: int((table["status"] == s).sum()) for s in ("ok", "refused", "failed")}
    if as_json:
        print_json({"table": str(out), "cells": len(table), **statuses})
    else:
        print_fastest(table)
        say(f"{out}: {len(table)} cells, " + ", ".join(f"{n} {s}" for s, n in statuses.items()))
        for status in ("refused", "failed"):
            for why, rows in table[table["status"] == status].groupby("why", sort=False):
                last_line = str(why).strip().splitlines()[-1]
                say(f"{status}, {len(rows)} x: {rows['label'].iloc[0]}: {last_line}")
        print_warnings(distinct_warnings(table))


def print_fastest(table: pd.DataFrame) -> None:
    """The fastest cells that ran, at most MOST_ROWS."""
    from rich.table import Table

    ran = table[table["status"] == "ok"].sort_values("tok_s_scaled", ascending=False, kind="stable")
    if ran.empty:
        return
    costs = "; ".join(sorted(set(ran["costs"])))
    shown = Table(title=f"simulated: {costs}; tok_s_scaled is tokens/s of the whole model")
    several = ran["costs"].nunique() > 1
    shown.add_column("setting", overflow="fold")
    shown.add_column("hardware", overflow="fold")
    for name in (*(("costs",) if several else ()), *SHOWN, "fits", "warnings"):
        shown.add_column(name, justify="right", overflow="fold")
    for _, row in ran.head(MOST_ROWS).iterrows():
        shown.add_row(
            row["label"] if row["exactness"] == EXACT else f"{row['label']} ({_short(row)})",
            row["machine"],
            *((row["costs"].rpartition(", ")[2],) if several else ()),
            *("unknown" if row[key] != row[key] else f"{row[key]:.4g}" for key in SHOWN),
            "yes" if row["fits"] else "no",
            str(len(warnings_of(row["warnings"]))),
        )
    console = wide_console()
    console.print(shown)
    if len(ran) > MOST_ROWS:
        console.print(f"and {len(ran) - MOST_ROWS} slower ones, in the table", highlight=False)


def _short(row: pd.Series) -> str:
    """lossy or approximate: the first word of each of what is promised."""
    return ", ".join(part.partition(":")[0] for part in row["exactness"].split("; "))


def warnings_of(text: str | None) -> list[str]:
    """The warnings of a cell, a line each of its row's text."""
    return text.splitlines() if isinstance(text, str) else []


def distinct_warnings(table: pd.DataFrame) -> list[str]:
    """Each text once, with how many cells have it."""
    counted: dict[str, int] = {}
    for text in table["warnings"]:
        for warning in dict.fromkeys(warnings_of(text)):
            counted[warning] = counted.get(warning, 0) + 1
    return [f"{warning} ({n} of {len(table)} cells)" for warning, n in counted.items()]

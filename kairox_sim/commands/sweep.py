"""kairox sweep: a grid of settings and machines over one trace, to one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kairox_sim.commands.options import Json, print_json, progress, say
from kairox_sim.commands.record import INTERRUPTED


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="FILE.toml", help="What to sweep.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The table to write, Parquet.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. [default: one per core]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of the file's trace. Paths start where you are.")
    ] = None,
    prior: Annotated[Path | None, typer.Option(help="Instead of the file's prior.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Instead of the file's hardware: a profile or a .toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate every cell of a sweep file; each row of the table says ok, refused or failed.

    Example: kairox sweep experiments/demo.toml -o demo.parquet
    """
    import joblib

    from kairox_sim.sweeps import Sweep
    from kairox_sim.sweeps import sweep as run

    plan = Sweep.load(spec)
    given = {"trace": trace, "prior": prior}
    plan = plan.model_copy(update={k: str(v) for k, v in given.items() if v is not None})
    if hardware is not None:
        plan = plan.on(hardware)
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
        say(f"{out}: {len(table)} cells, " + ", ".join(f"{n} {s}" for s, n in statuses.items()))
        for status in ("refused", "failed"):
            for why, rows in table[table["status"] == status].groupby("why", sort=False):
                last_line = str(why).strip().splitlines()[-1]
                say(f"{status}, {len(rows)} x: {rows['label'].iloc[0]}: {last_line}")

"""kairox plot: the figures of a sweep's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, print_json, say
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def plot(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="What `kairox sweep` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to put the figures in.")],
    hardware: Annotated[
        str | None, typer.Option(help="One of the table's machines. [default: each]")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="For figures of one bus. [default: the middle one]")
    ] = None,
    gating: Annotated[
        str | None, typer.Option(help="For figures of one gating. [default: each]")
    ] = None,
    slots: Annotated[
        float | None, typer.Option(help="For figures of one budget. [default: the middle one]")
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="png, pdf or svg. [default: png and pdf]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw tokens/s by policy and bus, hit rates against budget, and where the time goes.

    A figure that the table does not hold enough for is left out, saying why.

    Example: kairox plot demo.parquet -o figures --hardware pc1 --link pcie4
    """
    from kairox_sim.plot_style import save
    from kairox_sim.sweeps import read_table

    kinds = tuple(formats or ("png", "pdf"))
    if unknown := sorted(set(kinds) - {"png", "pdf", "svg"}):
        raise KairoxError(f"--format {', '.join(unknown)}; allowed: png, pdf, svg")
    rows = read_table(table)
    drawn: list[Path] = []
    left_out: dict[str, str] = {}
    for stem, figure in _figures(rows, hardware, link, gating, slots):
        if isinstance(figure, KairoxError):
            left_out[stem] = str(figure)
        else:
            drawn += save(figure, out, stem, kinds)
    if not drawn:
        raise KairoxError(f"{table}: {next(iter(left_out.values()))}")
    if as_json:
        print_json({"figures": [str(path) for path in drawn], "left_out": left_out})
        return
    for path in drawn:
        typer.echo(str(path))
    for stem, why in left_out.items():
        say(f"left out {stem}: {why}")


def _figures(
    table: pd.DataFrame,
    hardware: str | None,
    link: str | None,
    gating: str | None,
    slots: float | None,
) -> Iterator[tuple[str, Figure | KairoxError]]:
    """(file name, figure or why there is none), machine by machine."""
    from kairox_sim.plot_sweep import (
        drawable,
        middle_link,
        plot_budget,
        plot_throughput,
        plot_time_split,
    )

    ok = table[table["status"] == "ok"]
    if ok.empty:
        raise KairoxError("no row of the table has status ok: there is nothing to draw")
    machines = ok["hardware"].unique().tolist()
    if hardware is not None and hardware not in machines:
        raise KairoxError(f"the table has no hardware {hardware!r}; it has {', '.join(machines)}")
    for name in machines if hardware is None else [hardware]:
        ours = ok[ok["hardware"] == name]
        prefix = f"{Path(name).stem}-" if len(machines) > 1 else ""
        yield f"{prefix}throughput", _or_why(partial(plot_throughput, ours, slots=slots))
        bus = link
        if bus is None:
            try:
                bus = middle_link(drawable(ours))
            except KairoxError as error:
                yield f"{prefix}budget", error
                continue
        gatings = sorted(ours["gating"].unique())
        for mode in gatings if gating is None else [gating]:
            suffix = f"-{mode}" if len(gatings) > 1 else ""
            held = {"link": bus, "gating": mode}
            yield f"{prefix}budget{suffix}", _or_why(partial(plot_budget, ours, **held))
            draw_split = partial(plot_time_split, ours, slots=slots, **held)
            yield f"{prefix}time-split{suffix}", _or_why(draw_split)


def _or_why(draw: Callable[[], Figure]) -> Figure | KairoxError:
    try:
        return draw()
    except KairoxError as error:
        return error

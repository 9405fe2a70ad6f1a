"""kairox plot: every figure that a table allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kairox_sim.commands.options import Json, print_json, say
from kairox_sim.errors import KairoxError


def plot(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="What a sweep or validation wrote.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to put the figures in.")],
    hardware: Annotated[
        str | None, typer.Option(help="One of the table's machines. \\[default: each]")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="For figures of one bus. \\[default: the middle one]")
    ] = None,
    gating: Annotated[
        str | None, typer.Option(help="For figures of one gating. \\[default: each]")
    ] = None,
    slots: Annotated[
        float | None, typer.Option(help="For figures of one budget. \\[default: the middle one]")
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="png, pdf or svg. \\[default: png and pdf]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw what the table allows: of a sweep tokens/s by policy and bus, hit rates against budget,
    where the time goes; of a validation live against simulated.

    A figure that the table does not hold enough for is left out, saying why.

    Example: kairox plot demo.parquet -o figures --hardware pc1 --link pcie4
    """
    from kairox_sim.plots import NO_COLUMNS, plot_all

    kinds = tuple(formats or ("png", "pdf"))
    if unknown := sorted(set(kinds) - {"png", "pdf", "svg"}):
        raise KairoxError(f"--format {', '.join(unknown)}; allowed: png, pdf, svg")
    left_out: dict[str, str] = {}
    drawn = plot_all(
        table,
        out,
        hardware=hardware,
        link=link,
        gating=gating,
        slots=slots,
        formats=kinds,
        on_skip=left_out.__setitem__,
    )
    if as_json:
        print_json({"figures": [str(path) for path in drawn], "left_out": left_out})
        return
    for path in drawn:
        typer.echo(str(path))
    of_other_tables = [stem for stem, why in left_out.items() if why.startswith(NO_COLUMNS)]
    for stem, why in left_out.items():
        if stem not in of_other_tables:
            say(f"left out {stem}: {why}")
    if of_other_tables:
        say(f"left out, drawn from other tables: {', '.join(of_other_tables)}")

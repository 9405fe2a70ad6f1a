"""kairox systems: what can be compared, each with a line and its source."""

from __future__ import annotations

from typing import Annotated

import typer

from kairox_sim.commands.options import Json, print_json, wide_console


def systems(
    name: Annotated[str | None, typer.Argument(help="One system, with all that it sets.")] = None,
    as_json: Json = False,
) -> None:
    """List the systems that --system takes: presets of settings, every one of which can be
    overridden.

    Example: kairox systems kairox-paper
    """
    from rich.table import Table

    from kairox_sim.systems import SYSTEMS, find_system

    chosen = list(SYSTEMS.values()) if name is None else [find_system(name)]
    if as_json:
        print_json(
            [
                {
                    "name": system.name,
                    "line": system.line,
                    "source": system.source,
                    "decided": system.decided or None,
                    "settings": dict(system.settings),
                }
                for system in chosen
            ]
        )
        return
    if name is None:
        table = Table("system", "what it does", "source")
        for system in chosen:
            table.add_row(system.name, system.line, system.source)
        wide_console().print(table)
        return
    (system,) = chosen
    table = Table(title=f"{system.name}: {system.line}", caption=system.source)
    table.add_column("setting")
    table.add_column("value")
    for key, value in system.settings.items():
        table.add_row(key, str(value))
    wide_console().print(table)
    if system.decided:
        wide_console().print(f"Decided here: {system.decided}", markup=False, highlight=False)

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


def policies(as_json: Json = False) -> None:
    """List policies and controllers: what each one is, what it reads or sets, its parameters.

    Example: kairox policies --json
    """
    from rich.table import Table

    from kairox_sim.controllers import CONTROLLERS
    from kairox_sim.policies import POLICIES
    from kairox_sim.settings_file import controller_parameters, policy_parameters

    rows = [
        ("policy", name, _line(made), sorted(made.knobs), policy_parameters(name))
        for name, made in POLICIES.items()
    ]
    rows += [
        ("controller", name, _line(made), sorted(made.sets), controller_parameters(name))
        for name, made in CONTROLLERS.items()
    ]
    if as_json:
        keys = ("kind", "name", "line", "knobs", "parameters")
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    table = Table("kind", "name", "what it does", "knobs", "parameters")
    for kind, name, line, knobs, parameters in rows:
        table.add_row(kind, name, line, ", ".join(knobs), ", ".join(parameters))
    wide_console().print(table)


def _line(made: type) -> str:
    """The first sentence of a class's docstring."""
    paragraph = (made.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split())

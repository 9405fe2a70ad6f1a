"""kairox workload: a synthetic trace with chosen density, skew and locality."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.options import (
    Json,
    parsed_keys,
    print_json,
    progress,
    say,
    wide_console,
)
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.workload import Workload
    from kairox_sim.workload_stats import Statistic


def workload(
    preset: Annotated[str | None, typer.Argument(help="A preset; --list shows them.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The trace to write.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Decode steps.")] = 256,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens of a prefill chunk before them.")] = 0,
    persistence: Annotated[
        float | None, typer.Option(help="Correlation of a neuron with itself one token before.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="The first N layers only.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="What fires when: another text.")] = 0,
    model_seed: Annotated[
        int,
        typer.Option(
            min=0, help="Which neurons are hot; a prior has the same one, another --seed."
        ),
    ] = 0,
    gating: Annotated[
        str | None, typer.Option(help="exact or predicted. \\[default: predicted where it can be]")
    ] = None,
    trigger: Annotated[
        str, typer.Option(help="When predictions are made: attn_in, attn_out or serial.")
    ] = "attn_out",
    set_keys: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field, as key=value: --set active.mean=0.05. Repeatable."),
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="Show the presets.")] = False,
    as_json: Json = False,
) -> None:
    """Make a trace up, and show what came out beside what was asked for.

    The trace is labelled synthetic, and so is everything made from it. Recorded traces show what
    a model really does; this one varies a single property with the others held.

    Example: kairox workload prosparse-7b -o made_up.arrow --tokens 256 --persistence 0.3
    """
    from kairox_sim.outputs import require_place
    from kairox_sim.trace import write_trace
    from kairox_sim.workload import generate
    from kairox_sim.workload_presets import PRESETS, find_workload
    from kairox_sim.workload_stats import measure

    if list_presets:
        _print_presets(PRESETS, as_json)
        return
    if preset is None or out is None:
        raise KairoxError(
            "give a preset and where to write the trace: kairox workload prosparse-7b -o "
            "made_up.arrow; --list shows the presets"
        )
    given = {} if persistence is None else {"persistence": persistence}
    chosen = with_fields(find_workload(preset), given | parsed_keys(set_keys or ()))
    place = require_place(out, "trace")
    with progress() as bar:
        task = bar.add_task("making up", total=layers or chosen.n_layers)
        made = generate(
            chosen, tokens, n_prefill=prefill, seed=seed, model_seed=model_seed, n_layers=layers,
            gating=gating, predicted_trigger=trigger, on_layer=lambda _: bar.advance(task),
        )  # fmt: skip
    write_trace(made, place)
    found = measure(made, chosen)
    if as_json:
        statistics = {s.name: {"target": s.target, "measured": s.measured} for s in found}
        print_json({"trace": str(place), "synthetic": True, "sha256": made.sha256,
                    "workload": dataclasses.asdict(chosen), "statistics": statistics})  # fmt: skip
        return
    _print_statistics(chosen, found)
    if made.header.n_layers != chosen.n_layers:
        say(f"fewer layers than {chosen.model} has: to simulate it, add --as {chosen.model}")


def with_fields(workload: Workload, values: dict[str, Any]) -> Workload:
    """The workload with fields replaced by name; `active.mean` is a field of its rates.

    `predicted.mean=0.25` gives predicted sets to a workload without: skewed as its active ones.
    """
    from pydantic import TypeAdapter, ValidationError

    from kairox_sim.firing_rates import Rates
    from kairox_sim.workload import Workload

    fields = dataclasses.asdict(workload)
    parts = [f"{of}.{f.name}" for of in ("active", "predicted") for f in dataclasses.fields(Rates)]
    allowed = [*(k for k in fields if k not in ("active", "predicted")), *parts]
    for key, value in values.items():
        if key == "predicted" and value is None:
            fields["predicted"] = None
        elif key not in allowed:
            raise KairoxError(
                f"a workload has no {key!r} to set; there are {', '.join(allowed)}, and "
                "predicted=null"
            )
        elif key in parts:
            of, _, name = key.partition(".")
            fields[of] = {**(fields[of] or fields["active"]), name: value}
        else:
            fields[key] = value
    try:
        return TypeAdapter(Workload).validate_python(fields)
    except ValidationError as error:
        found = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        said = [
            ": ".join(p for p in (at, text.removeprefix("Value error, ")) if p)
            for at, text in found
        ]
        raise KairoxError("; ".join(said)) from error


def _print_statistics(workload: Workload, found: Sequence[Statistic]) -> None:
    from rich.table import Table

    table = Table(title=f"synthetic: {workload.name}", caption=workload.source)
    table.add_column("statistic")
    for column in ("asked for", "came out"):
        table.add_column(column, justify="right")
    table.add_column("meaning")
    for s in found:
        asked = "nothing" if s.target is None else f"{s.target:.4f}"
        came = "unknown" if s.measured != s.measured else f"{s.measured:.4f}"
        table.add_row(s.name, asked, came, s.means)
    wide_console().print(table)


def _print_presets(presets: Mapping[str, Workload], as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        print_json({name: dataclasses.asdict(w) for name, w in presets.items()})
        return
    table = Table(title="presets of `kairox workload`; what they make is synthetic")
    table.add_column("name")
    for column in ("layers", "neurons", "active", "predicted"):
        table.add_column(column, justify="right")
    table.add_column("source")
    for name, w in presets.items():
        said = "" if w.predicted is None else f"{w.predicted.mean:.1%}"
        shape = (str(w.n_layers), str(w.n_neurons))
        table.add_row(name, *shape, f"{w.active.mean:.1%}", said, w.source)
    wide_console().print(table)

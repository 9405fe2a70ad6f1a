"""kairox simulate: one trace under one setting on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.live_options import Numerics, Vram, Weights
from kairox_sim.commands.options import (
    Controller,
    Gating,
    Hardware,
    Json,
    Link,
    ModelAs,
    Policy,
    Prior,
    SetKeys,
    SettingsFile,
    Slots,
    SystemName,
    print_json,
    print_warnings,
    progress,
    settings_from,
    wide_console,
)

if TYPE_CHECKING:
    from kairox_sim.metrics import RunResult


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace that `kairox record` wrote.")],
    settings: SettingsFile = None,
    system: SystemName = None,
    policy: Policy = None,
    controller: Controller = None,
    slots: Slots = None,
    gating: Gating = None,
    hardware: Hardware = "pc1",
    link: Link = None,
    model_as: ModelAs = None,
    prior: Prior = None,
    numerics: Numerics = None,
    weights: Weights = None,
    vram: Vram = None,
    set_keys: SetKeys = None,
    steps: Annotated[
        Path | None, typer.Option(help="Write the record of every step to this Parquet file.")
    ] = None,
    slices: Annotated[
        Path | None, typer.Option(help="Write the busy intervals to this Parquet file.")
    ] = None,
    oracle: Annotated[
        bool, typer.Option(help="Simulate the bypass oracle too, for the regret against it.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Replay a trace through a cache on a modelled machine, and sum up what it took.

    Ratios and times are of decode steps. A trace without any gives an empty report, a warning and
    exit code 0; bad input gives one message and exit code 2.

    Example: kairox simulate eval.arrow --system powerinfer --prior prior.arrow --as prosparse-7b

    Example: kairox simulate eval.arrow --policy tam --controller anb --slots 224
    --hardware pc1 --link pcie3 --as prosparse-7b --set prediction=perfect
    """
    from kairox_sim.simulation import simulate as run
    from kairox_sim.trace import read_trace

    chosen = settings_from(
        settings,
        system=system,
        policy=policy,
        controller=controller,
        slots=slots,
        gating=gating,
        model_as=model_as,
        prior=prior,
        numerics=numerics,
        weights=weights,
        vram=vram,
        set_keys=set_keys,
    )
    loaded = read_trace(trace)
    with progress() as bar:
        task = bar.add_task("simulating", total=loaded.n_steps)
        result = run(
            loaded,
            chosen,
            hardware=hardware,
            link=link,
            on_step=lambda _: bar.advance(task),
            keep_slices=slices is not None,
            oracle=oracle,
        )
    if steps is not None:
        result.steps.to_parquet(steps, index=False)
    if slices is not None:
        _write_slices(result, slices)
    if as_json:
        print_json(result.to_dict())
        return
    print_result(result)
    print_warnings(result.warnings)


def _write_slices(result: RunResult, path: Path) -> None:
    import dataclasses

    import pandas as pd

    names = ["lane", "name", "layer", "began_ns", "end_ns"]
    rows = [dataclasses.astuple(s) for s in result.slices]
    pd.DataFrame(rows, columns=names).to_parquet(path, index=False)


def print_result(result: RunResult) -> None:
    """The summary as a table, what it is of above it."""
    from rich.table import Table

    from kairox_sim.metrics import AGAINST, METRICS
    from kairox_sim.record import EXACT

    labels, summary = result.labels, result.summary
    of_model = summary["tok_s_scaled"]
    said = []
    if of_model == of_model and of_model != summary["tok_s"]:  # a stand-in: the trace's is no speed
        summary = {"tok_s_scaled": of_model, **summary}
        said.append(
            "tok_s_scaled is of the whole model; times and amounts are of the trace's layers"
        )
    exactness = labels.get("exactness", EXACT)
    lossy = "" if exactness == EXACT else f"; {exactness}"
    said = [
        f"{labels['costs']}; gating {labels['gating']}; {labels['prediction']}{lossy}",
        labels["budget"],
        *said,
    ]
    table = Table(
        title=f"{labels['setting']} on {labels['hardware']} ({labels['time']})",
        caption="\n".join(said),
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("meaning")
    for name, value in summary.items():
        meaning, unit = (METRICS | AGAINST)[name]
        scale, shown = (1e3, "ms") if unit == "s" else (1.0, unit)
        table.add_row(name, "unknown" if value != value else f"{value * scale:.4g}", shown, meaning)
    wide_console().print(table)

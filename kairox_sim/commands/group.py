"""kairox group: neurons into groups that fire together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, print_json, print_warnings, progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kairox_sim.groups import Groups


def group(
    prior: Annotated[Path, typer.Argument(help="A trace of other text to learn from.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The groups to write, Parquet.")],
    size: Annotated[int, typer.Option(min=1, help="Neurons in a group.")] = 16,
    method: Annotated[
        str,
        typer.Option(help="metis; or to compare it with: random, frequency, chunks (neighbours)."),
    ] = "metis",
    seed: Annotated[int, typer.Option(min=0, help="Of random and metis.")] = 0,
    as_json: Json = False,
) -> None:
    """Put neurons that fire together into groups that move together.

    Shows co-activation within groups on the prior itself, which flatters groups that learn from
    it: judge them on other tokens.

    Example: kairox group prior.arrow -o groups.parquet --size 16
    """
    from kairox_sim.groups import co_activation_within, group_neurons, write_groups
    from kairox_sim.outputs import require_place
    from kairox_sim.trace import read_trace

    require_place(out, "groups")
    trace = read_trace(prior)
    n_layers, n_neurons = trace.header.n_layers, trace.header.n_neurons
    with progress() as bar:
        task = bar.add_task("grouping layers", total=n_layers)
        made = group_neurons(
            trace, n_layers, n_neurons, size, method, seed, lambda layer: bar.advance(task)
        )
    chance = group_neurons(None, n_layers, n_neurons, size, "random", seed)
    within, by_chance = co_activation_within(made, trace), co_activation_within(chance, trace)
    write_groups(made, out)
    print_warnings(trace.warnings)
    if as_json:
        print_json({
            "groups": str(out), "method": made.method, "size": made.size, "seed": made.seed,
            "n_layers": n_layers, "n_groups": n_neurons // size,
            "prior_sha256": made.prior_sha256, "prior_tokens": made.prior_tokens,
            "co_activation_within": within.tolist(), "of_random_groups": by_chance.tolist(),
        })  # fmt: skip
        return
    _print_table(made, within, by_chance)
    typer.echo(f"{out}: {n_neurons // size} groups of {size} in each of {n_layers} layers")


def _print_table(made: Groups, within: NDArray[np.float64], by_chance: NDArray[np.float64]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="co-activation within groups, on the prior")
    for column in ("layer", made.method, "random groups"):
        table.add_column(column, justify="right")
    for layer, (ours, chance) in enumerate(zip(within, by_chance, strict=True)):
        table.add_row(str(layer), f"{ours:.3f}", f"{chance:.3f}")
    Console().print(table)

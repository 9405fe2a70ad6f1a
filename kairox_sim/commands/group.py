"""kairox group: neurons into groups that fire together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, print_json, print_warnings, progress
from kairox_sim.errors import KairoxError

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
    check: Annotated[
        Path | None,
        typer.Option(help="Show co-activation on this trace, of tokens that the prior has not."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put neurons that fire together into groups that move together.

    Shows co-activation within groups: the chance that a mate of an active neuron is active, too.
    Without --check it is on the prior itself, which flatters groups that learn from it.

    Example: kairox group prior.arrow -o groups.parquet --size 16 --check eval.arrow
    """
    from kairox_sim.groups import (
        co_activation_within,
        group_neurons,
        require_unseen,
        write_groups,
    )
    from kairox_sim.outputs import require_place
    from kairox_sim.trace import read_trace

    require_place(out, "groups")
    if out.suffix != ".parquet":
        raise KairoxError(f"groups are read from a .parquet file, got {str(out)!r}; name it so")
    trace = read_trace(prior)
    measured = trace if check is None else read_trace(check)
    n_layers, n_neurons = trace.header.n_layers, trace.header.n_neurons
    with progress() as bar:
        task = bar.add_task("grouping layers", total=n_layers)
        made = group_neurons(
            trace, n_layers, n_neurons, size, method, seed, lambda layer: bar.advance(task)
        )
    chance = group_neurons(None, n_layers, n_neurons, size, "random", seed)
    if check is not None:
        require_unseen(made, measured)
    within, by_chance = (co_activation_within(groups, measured) for groups in (made, chance))
    write_groups(made, out)
    print_warnings(dict.fromkeys([*trace.warnings, *measured.warnings]))
    if as_json:
        print_json({
            "groups": str(out), "method": made.method, "size": made.size, "seed": made.seed,
            "n_layers": n_layers, "n_groups": n_neurons // size,
            "prior_sha256": made.prior_sha256, "prior_tokens": made.prior_tokens,
            "co_activation_on": "the prior itself" if check is None else str(check),
            "co_activation_within": within.tolist(), "of_random_groups": by_chance.tolist(),
        })  # fmt: skip
        return
    on = "the prior itself" if check is None else check.name
    _print_table(made, on, within, by_chance)
    typer.echo(f"{out}: {n_neurons // size} groups of {size} in each of {n_layers} layers")
    typer.echo(f"next: kairox simulate TRACE --set groups={out}")


def _print_table(
    made: Groups, on: str, within: NDArray[np.float64], by_chance: NDArray[np.float64]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"co-activation within groups, on {on}")
    for column in ("layer", made.method, "random groups"):
        table.add_column(column, justify="right")
    for layer, (ours, chance) in enumerate(zip(within, by_chance, strict=True)):
        table.add_row(str(layer), f"{ours:.3f}", f"{chance:.3f}")
    Console().print(table)

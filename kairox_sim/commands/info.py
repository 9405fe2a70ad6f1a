"""kairox info: what a trace holds, before any cache sees it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, print_json, print_warnings

if TYPE_CHECKING:
    from kairox_sim.trace_format import TraceHeader
    from kairox_sim.trace_stats import TraceStats

LOOP_WARN_SHARE = 0.1  # of the tokens; below it a repeated line of a table is no loop


def info(
    trace: Annotated[Path, typer.Argument(help="A trace that `kairox record` wrote.")],
    as_json: Json = False,
) -> None:
    """Show a trace: model, sequences, density, overlap, reuse, skew; warn when it is a loop.

    Example: kairox info eval.arrow
    """
    from kairox_sim.trace import read_trace
    from kairox_sim.trace_stats import trace_stats

    loaded = read_trace(trace)
    stats = trace_stats(loaded)
    warnings = [*loaded.warnings, *stat_warnings(stats)]
    if as_json:
        header = dataclasses.asdict(loaded.header)
        print_json({"header": header, "stats": stats.to_dict(), "sha256": loaded.sha256,
                    "warnings": warnings})  # fmt: skip
        return
    _print_tables(loaded.header, stats)
    print_warnings(warnings)


def stat_warnings(stats: TraceStats) -> list[str]:
    """What makes a trace a poor measure of a cache."""
    said = []
    if stats.n_tokens == 0:
        said.append("the trace is empty: no tokens")
    if stats.loop_share >= LOOP_WARN_SHARE:
        worst = max(stats.loops, key=lambda loop: loop.n_tokens)
        said.append(
            f"the trace is a loop: {stats.loop_share:.0%} of its tokens repeat themselves "
            f"(sequence {worst.seq}: {worst.n_tokens} tokens with period {worst.period}), which "
            "flatters every cache; sample instead of decoding greedily, or record given text"
        )
    if stats.zero_layers:
        said.append(
            f"layers that never fired: {', '.join(map(str, stats.zero_layers))}; a dead hook, or "
            "an activation that the model does not use"
        )
    return said


def _print_tables(header: TraceHeader, stats: TraceStats) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    about = Table(title=f"{stats.model}: {stats.n_layers} layers x {stats.n_neurons} neurons")
    about.add_column("what")
    about.add_column("value", justify="right")
    for name, value in (
        ("what fired", "synthetic: made up" if header.synthetic else "recorded"),
        ("sequences", f"{stats.n_sequences}"),
        ("tokens", f"{stats.n_tokens}"),
        ("of them prefill", f"{stats.n_prefill_tokens}"),
        ("steps", f"{stats.n_steps}"),
        ("gating", header.gating),
        ("activations", f"{stats.activations}"),
        ("tokens until the same neuron fires again, median", f"{stats.reuse_median_tokens:g}"),
        ("tokens inside loops", f"{stats.loop_share:.1%}"),
    ):
        about.add_row(name, value)
    console.print(about)
    layers = Table(title="by layer")
    for column in ("layer", "density", "Jaccard of neighbours", "one-hit share", "skew"):
        layers.add_column(column, justify="right")
    for i in range(stats.n_layers):
        numbers = (stats.density[i], stats.jaccard[i], stats.one_hit_share[i], stats.skew[i])
        layers.add_row(str(i), *(f"{n:.3f}" for n in numbers))
    console.print(layers)

"""kairox info: what a trace holds, before any cache sees it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, print_json, print_warnings, wide_console
from kairox_sim.record import EXACT, exactness_of

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


def how_recorded(header: TraceHeader) -> dict[str, str]:
    """Of what run a trace is, and what of the model's neurons it leaves out, in words."""
    exactness = exactness_of(header.gating, approximate=header.approximate is not None)
    left_out = "" if exactness == EXACT else f"; {exactness}"
    said = {"gating": header.gating + left_out}
    if header.run:
        kind, rows, rest, numerics = (
            header.run.get(key, "unknown") for key in ("kind", "weights", "dtype", "numerics")
        )
        said["run"] = f"{kind}, FFN rows {rows}, all else {rest}, numerics {numerics}"
    return said


def _print_tables(header: TraceHeader, stats: TraceStats) -> None:
    from rich.table import Table

    console = wide_console()
    about = Table(title=f"{stats.model}: {stats.n_layers} layers x {stats.n_neurons} neurons")
    about.add_column("what")
    about.add_column("value", justify="right")
    for name, value in (
        ("what fired", "synthetic: made up" if header.synthetic else "recorded"),
        *how_recorded(header).items(),
        ("sequences", f"{stats.n_sequences}"),
        ("tokens", f"{stats.n_tokens:,}"),
        ("of them prefill", f"{stats.n_prefill_tokens:,}"),
        ("steps", f"{stats.n_steps:,}"),
        ("activations", f"{stats.activations:,}"),
        ("tokens until the same neuron fires again, median", f"{stats.reuse_median_tokens:g}"),
        ("tokens inside loops", f"{stats.loop_share:.1%}"),
    ):
        about.add_row(name, value)
    console.print(about)
    layers = Table(
        title="by layer",
        caption="density: active share of a token's neurons; Jaccard: overlap of tokens in a row; "
        "once only: of the neurons that fired; 80 %: the smallest share of neurons with 80 % of "
        "the activations",
    )
    for column in ("layer", "density", "Jaccard of neighbours", "once only", "80 %"):
        layers.add_column(column, justify="right")
    for i in range(stats.n_layers):
        shares = (stats.density[i], stats.one_hit_share[i], stats.skew[i])
        density, once, most = ("unknown" if x != x else f"{x:.1%}" for x in shares)
        layers.add_row(str(i), density, f"{stats.jaccard[i]:.3f}", once, most)
    console.print(layers)

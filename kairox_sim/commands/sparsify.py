"""kairox sparsify: activation thresholds for a dense SwiGLU model, and the loss they cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import Json, exec_extra, print_json, progress
from kairox_sim.commands.record import Model, Threads
from kairox_sim.outputs import require_apart, require_place

if TYPE_CHECKING:
    from kairox_exec.thresholds import Thresholds


def sparsify(
    model: Model,
    text: Annotated[Path, typer.Option(help="Text to calibrate on.")],
    density: Annotated[float, typer.Option(help="Share of each layer's neurons to keep.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the thresholds here (JSON).")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of the text, to calibrate on.")] = 4096,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out first.")] = 0,
    eval_text: Annotated[
        Path | None,
        typer.Option(help="Text to measure on. \\[default: what follows in the first]"),
    ] = None,
    eval_tokens: Annotated[int, typer.Option(help="Tokens to measure on.")] = 1024,
    window: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Find thresholds on |silu(gate)| that keep a share of a dense SwiGLU model's neurons.

    The result approximates the model, and the file says by how much. Models that are ReLU-sparse
    already need none and are refused.

    Example: kairox sparsify --model smollm2 --text prose.txt --density 0.5 -o thresholds.json
    """
    with exec_extra():
        from kairox_exec.live import set_threads
        from kairox_exec.sparsify import sparsify as run

    if out is not None:
        require_place(out, "thresholds")
        require_apart({"thresholds": out}, [text, *([] if eval_text is None else [eval_text])])
    set_threads(threads)
    with progress() as bar:
        task = bar.add_task("loading", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        found = run(
            model,
            text,
            density=density,
            tokens=tokens,
            skip=skip,
            eval_text=eval_text,
            eval_tokens=eval_tokens,
            window=window,
            dtype=dtype,
            progress=show,
        )
    if out is not None:
        found.save(out)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        print_thresholds(found)
        kept = "not written: give -o" if out is None else f"{out}: run with --thresholds {out}"
        typer.echo(kept)


def print_thresholds(found: Thresholds) -> None:
    """A line a layer, then the cost."""
    typer.echo("layer  threshold  kept (calibrated)  kept (measured)")
    for layer, row in enumerate(
        zip(found.per_layer, found.calibrated_densities, found.densities, strict=True)
    ):
        threshold, calibrated, measured = row
        typer.echo(f"{layer:5d}  {threshold:9.4g}  {calibrated:17.3f}  {measured:15.3f}")
    cost = found.cost
    typer.echo(f"approximate: {found.approximate}")
    parted = (
        f"after {cost.first_greedy_divergence}"
        if cost.first_greedy_divergence is not None
        else "not"
    )
    typer.echo(
        f"largest logit error {cost.max_logit_error:.3g}, rms {cost.rms_logit_error:.3g} (logits' "
        f"own std {cost.logit_std:.3g}), KL {cost.kl_nats:.3g} nats, same most likely token "
        f"{cost.top1_agreement:.2%}, greedy text parts {parted} of {cost.greedy_tokens} tokens"
    )

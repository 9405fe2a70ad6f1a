"""kairox train-predictor: hidden states in, a look-ahead predictor out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.options import Json, exec_extra, print_json, progress, wide_console
from kairox_sim.commands.record import Model, Threads
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_place

if TYPE_CHECKING:
    from kairox_exec.hidden_states import HiddenStates
    from kairox_exec.predictor_training import LayerQuality
    from kairox_sim.trace import Trace

Recorded = tuple["Trace", "HiddenStates"]


def train_predictor(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The predictor to write.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More text files after the first."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Texts to record and to learn from.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each text, to learn from.")] = 2048,
    skip: Annotated[int, typer.Option(help="Tokens of each text to leave out first.")] = 4096,
    eval_tokens: Annotated[
        int, typer.Option(help="Of each text, from its start, to judge it on; 0: not judged.")
    ] = 512,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of texts: a trace recorded with --hidden.")
    ] = None,
    hidden: Annotated[Path | None, typer.Option(help="Its hidden states.")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Width in the middle. [default: a quarter of d_model]")
    ] = None,
    recall: Annotated[
        float, typer.Option(help="Of each layer's active neurons, by choice of its threshold.")
    ] = 0.95,
    trigger: Annotated[
        str, typer.Option(help="What it is fed: attn_out (the paper) or attn_in (the guide).")
    ] = "attn_out",
    epochs: Annotated[int, typer.Option(help="Passes over the tokens.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of tokens.")] = 0,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the predictor.")] = False,
    as_json: Json = False,
) -> None:
    """Train the two-layer predictor of each layer's neurons, and say how good it is elsewhere.

    Use it with --set predictor=rank --set predictor_file=FILE.

    Example: kairox train-predictor --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt experiments/prompts/code.txt -o predictor.safetensors
    """
    with exec_extra():
        from kairox_exec.hidden_states import read_hidden_states
        from kairox_exec.live import set_threads
        from kairox_exec.predictor_training import as_rows, evaluate, train
    from kairox_sim.trace import read_trace

    texts = [*(text or ()), *(more or ())]
    if bool(texts) == bool(trace) or (trace is None) != (hidden is None):
        raise KairoxError(
            "learn from texts (--text), or from one recording (--trace and --hidden, which "
            "`kairox record --hidden` writes)"
        )
    if require_place(out, "predictor").exists() and not force:
        raise KairoxError(f"{out} exists; name another file, or overwrite it with --force")
    set_threads(threads)
    judged: list[LayerQuality] = []
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        task = bar.add_task("recording", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        def recorded(name: str, n: int, start: int) -> Recorded:
            return _recorded(model, texts, Path(folder) / name, n, start, trigger, show)

        if trace is not None and hidden is not None:
            learnt_from = read_trace(trace, strict=True), read_hidden_states(hidden)
        else:
            learnt_from = recorded("train", tokens, skip)
        predictor = train(
            *learnt_from, rank=rank, recall=recall, epochs=epochs, seed=seed, progress=show
        )
        predictor.save(out)
        if texts and eval_tokens:
            judged = evaluate(predictor, *recorded("eval", eval_tokens, 0))
    if as_json:
        print_json(
            {
                "predictor": str(out),
                "bytes": out.stat().st_size,
                "rank": predictor.rank,
                "trigger": predictor.trigger,
                "recall_target": recall,
                "thresholds": list(predictor.info.thresholds),
                "layers": as_rows(judged),
            }
        )
        return
    _print(judged, out, predictor.rank, recall)


def _recorded(
    model: Path, texts: list[Path], stem: Path, tokens: int, skip: int, trigger: str, show: Any
) -> Recorded:
    from kairox_exec.hidden_states import read_hidden_states
    from kairox_exec.recording import record
    from kairox_sim.trace import read_trace

    states = stem.with_suffix(".hidden")
    path = record(
        model,
        texts,
        stem.with_suffix(".arrow"),
        tokens=tokens,
        skip=skip,
        window=256,
        prefill=min(192, tokens - 1),
        trigger=trigger,  # type: ignore[arg-type]
        hidden=states,
        progress=lambda done, of: show(f"recording for {stem.name}", done, of),
    )
    return read_trace(path, strict=True), read_hidden_states(states)


def _print(judged: list[LayerQuality], out: Path, rank: int, recall: float) -> None:
    from rich.table import Table

    size = f"{out}: rank {rank}, {out.stat().st_size / 1e6:.2f} MB, recall target {recall:.0%}"
    if judged:
        table = Table(title="on tokens that were not trained on", caption=size)
        for name in ("layer", "recall", "precision", "active", "predicted", "kB", "us"):
            table.add_column(name, justify="right")
        for row in judged:
            ratios = (row.recall, row.precision, row.density, row.predicted_share)
            table.add_row(
                str(row.layer),
                *("-" if r != r else f"{r:.1%}" for r in ratios),
                f"{row.n_bytes / 1e3:.0f}",
                f"{row.seconds * 1e6:.0f}",
            )
        wide_console().print(table)
        return
    typer.echo(size + "; not judged on other tokens")

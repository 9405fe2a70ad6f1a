"""kairox train-predictor: hidden states in, a look-ahead predictor out, and how good one is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.live_options import Thresholds
from kairox_sim.commands.options import (
    Json,
    exec_extra,
    print_json,
    print_warnings,
    progress,
    say,
    wide_console,
)
from kairox_sim.commands.record import INTERRUPTED, Threads
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_place

if TYPE_CHECKING:
    from kairox_exec.mlp_predictor import MlpPredictor
    from kairox_exec.predictor_data import Recording, Texts
    from kairox_exec.predictor_judging import Judged


def train_predictor(
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More text files after the first."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face folder: config.json, *.safetensors, tokenizer.json. Needed with "
            "texts; a recording is checked against it."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The predictor to write.")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Texts to record and to learn from.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of each text, to learn from. \\[default: 2048]")
    ] = None,
    skip: Annotated[
        int | None, typer.Option(help="Tokens of each text to leave out first. \\[default: 4096]")
    ] = None,
    eval_text: Annotated[
        list[Path] | None,
        typer.Option(help="Texts to judge it on. \\[default: other tokens of those learnt from]"),
    ] = None,
    eval_tokens: Annotated[
        int | None,
        typer.Option(help="Of each text, to judge it on; 0: not judged. \\[default: 512]"),
    ] = None,
    eval_skip: Annotated[
        int | None,
        typer.Option(help="Tokens of each text to leave out before those. \\[default: 0]"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of texts: a trace recorded with --hidden.")
    ] = None,
    hidden: Annotated[Path | None, typer.Option(help="Its hidden states.")] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(
            help="Train nothing: judge this one, on --eval-text or on --trace and --hidden."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Width in the middle. \\[default: a quarter of d_model]")
    ] = None,
    recall: Annotated[
        str | None,
        typer.Option(
            help="Of each layer's active neurons, by choice of its threshold: R, or a,b,.. for "
            "each layer. \\[default: 0.95]"
        ),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            help="What layer l+1's is fed: attn_out, the state after layer l's attention (the "
            "paper), or attn_in, the state entering layer l (the guide). \\[default: attn_out]"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the tokens. \\[default: 12]")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the first weights and the order of tokens. \\[default: 0]"),
    ] = None,
    thresholds: Thresholds = None,
    threads: Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the predictor.")] = False,
    as_json: Json = False,
) -> None:
    """Train the two-layer predictor of each layer's neurons, and say how good it is elsewhere.

    Judged are recall, precision and cost of each layer, on tokens that were not trained on: others
    are refused. Run it with --predictor-file FILE, one for attn_in also with --set trigger=attn_in.
    Ctrl-C leaves no half of a file (exit code 130).

    Example: kairox train-predictor --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt --eval-text experiments/prompts/code.txt
    -o predictor.safetensors

    Judge it again: kairox train-predictor --model experiments/models/tiny-reglu
    --predictor predictor.safetensors --eval-text experiments/prompts/math.txt
    """
    with exec_extra():
        from kairox_exec import predictor_data as data
        from kairox_exec.live import set_threads
        from kairox_exec.mlp_predictor import load_predictor
        from kairox_exec.predictor_runs import judge_on, train_on

    texts, held_out = _split(text or [], eval_text or [], more or [])
    if (trace is None) != (hidden is None):
        raise KairoxError("--trace and --hidden go together; `kairox record --hidden` writes both")
    recording = None if trace is None or hidden is None else data.Recording(trace, hidden, model)
    of_text = {"tokens": tokens, "skip": skip}
    of_eval = {"eval_tokens": eval_tokens, "eval_skip": eval_skip}
    training: dict[str, Any] = {"rank": rank, "epochs": epochs, "seed": seed}
    training["recall"] = _targets(recall)
    if recording is not None:
        whole = "with --trace and --hidden, which are read whole"
        _refuse(of_text if held_out else of_text | of_eval, whole)

    def read_by_model(files: list[Path], n_tokens: int, first: int) -> Texts:
        if model is None:
            raise KairoxError("name the model that reads the texts with --model")
        return data.Texts(model, tuple(files), n_tokens, first, thresholds)

    def judged_texts(files: list[Path]) -> Texts | None:
        if not files or (eval_tokens == 0 and predictor is None):
            return None
        return read_by_model(files, _or(eval_tokens, 512), _or(eval_skip, 0))

    set_threads(threads)
    made: MlpPredictor
    judged: Judged | None
    try:
        with progress() as bar:
            task = bar.add_task("reading", total=None)

            def show(what: str, done: int, of: int) -> None:
                bar.update(task, description=what, completed=done, total=of)

            if predictor is not None:
                given = {"out": out, "text": texts, "trigger": trigger, "force": force}
                _refuse(given | of_text | training, "with --predictor, which trains nothing")
                file, made = predictor, load_predictor(predictor)
                on = _one_of(judged_texts(held_out), recording, "judge it on", "--eval-text")
                judged = judge_on(made, on, show)
            else:
                learnt = None
                if texts:
                    learnt = read_by_model(texts, _or(tokens, 2048), _or(skip, 4096))
                file = _free(out, force)
                made, judged = train_on(
                    _one_of(learnt, recording, "learn from", "--text"),
                    file,
                    trigger=trigger,
                    judged_on=judged_texts(held_out or texts),
                    **{name: value for name, value in training.items() if value is not None},
                    progress=show,
                )
    except KeyboardInterrupt as stop:
        say(f"kairox: {stop or 'stopped'}")
        raise typer.Exit(INTERRUPTED) from stop
    if as_json:
        print_json(_content(file, made, judged))
    else:
        _print(file, made, judged)
    if judged is not None:
        print_warnings(judged.warnings())


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _split(
    texts: list[Path], held_out: list[Path], more: list[Path]
) -> tuple[list[Path], list[Path]]:
    """Where the files go that no option names."""
    if more and texts and held_out:
        raise KairoxError(
            f"learn from {more[0]}, or judge on it? With --text and --eval-text give each file its "
            "own option: --text A --text B --eval-text C"
        )
    return (texts, held_out + more) if held_out else (texts + more, held_out)


def _targets(recall: str | None) -> float | list[float] | None:
    if recall is None:
        return None
    try:
        targets = [float(part) for part in recall.split(",")]
    except ValueError as error:
        raise KairoxError(
            f"recall {recall!r}; give a number such as 0.95, or one for each layer: a,b,.."
        ) from error
    return targets[0] if len(targets) == 1 else targets


def _refuse(given: dict[str, Any], why: str) -> None:
    needless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if needless:
        raise KairoxError(f"{', '.join(needless)} {why}: leave them out")


def _one_of(
    texts: Texts | None, recording: Recording | None, what: str, option: str
) -> Texts | Recording:
    if texts is not None and recording is None:
        return texts
    if recording is not None and texts is None:
        return recording
    raise KairoxError(
        f"{what} texts ({option}), or one recording (--trace and --hidden, which `kairox record "
        "--hidden` writes)"
    )


def _free(out: Path | None, force: bool) -> Path:
    if out is None:
        raise KairoxError("name the predictor to write with -o, or one to judge with --predictor")
    if require_place(out, "predictor").exists() and not force:
        raise KairoxError(f"{out} exists; name another file, or overwrite it with --force")
    return out


def _content(file: Path, made: MlpPredictor, judged: Judged | None) -> dict[str, Any]:
    info = made.info
    content = {
        "predictor": str(file),
        "bytes": file.stat().st_size,
        "model": info.model,
        "rank": info.rank,
        "trigger": info.trigger,
        "recall_target": info.recall_target,
        "thresholds": info.thresholds,
        "judged_on": None,
        "layers": [],
    }
    if judged is not None:
        content["judged_on"] = {
            "tokens": judged.tokens,
            "texts": judged.texts,
            "known_texts": judged.known_texts,
            "recall": judged.recall,
            "precision": judged.precision,
            "seconds_are": "measured on this CPU",
            "threads": judged.threads,
            "warnings": judged.warnings(),
        }
        content["layers"] = [dataclasses.asdict(row) for row in judged.layers]
    return content


def _print(file: Path, made: MlpPredictor, judged: Judged | None) -> None:
    from rich.table import Table

    target = made.info.recall_target
    aim = f"{target:.0%}" if isinstance(target, float) else "of each layer its own"
    size = (
        f"{file}: rank {made.rank}, trigger {made.trigger}, {file.stat().st_size / 1e6:.2f} MB, "
        f"recall target {aim}"
    )
    if judged is None:
        typer.echo(f"{size}; not judged: give it as --predictor, with --model and --eval-text")
        return
    table = Table(title=f"{judged.tokens} tokens that were not trained on: {_whose(judged)}")
    names = "layer", "target", "recall", "precision", "active", "predicted"
    for name in (*names, "mul-adds", "kB (f16)", "us/token (measured)"):
        table.add_column(name, justify="right")
    for row in judged.layers:
        ratios = row.recall_target, row.recall, row.precision, row.density, row.predicted_share
        table.add_row(
            str(row.layer),
            *(_share(ratio) for ratio in ratios),
            f"{row.multiply_adds:,}",
            f"{row.n_bytes / 1e3:.0f}",
            f"{row.seconds_per_token * 1e6:.0f}",
        )
    wide_console().print(table)
    typer.echo(
        f"all layers: recall {_share(judged.recall)}, precision {_share(judged.precision)}; times "
        f"are measured on this CPU, torch on {judged.threads} thread"
        f"{'s' * (judged.threads != 1)}\n{size}"
    )


def _whose(judged: Judged) -> str:
    """Whether the texts are new to it, or other tokens of what it learnt from."""
    new = [name for name in judged.texts if name not in judged.known_texts]
    told = []
    if judged.known_texts:
        told.append(f"other tokens of {', '.join(judged.known_texts)}")
    if new:
        told.append(f"{', '.join(new)}, of which it saw none")
    return "; ".join(told)


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"

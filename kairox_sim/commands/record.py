"""kairox record: a model and text in, a trace out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.info import how_recorded, stat_warnings
from kairox_sim.commands.live_options import (
    CacheDir,
    Dtype,
    HostNice,
    HostThreads,
    Numerics,
    PredictorFile,
    Promotion,
    Thresholds,
    Vram,
    Weights,
    host_side,
    loading_bar,
)
from kairox_sim.commands.options import (
    Controller,
    Gating,
    Json,
    Link,
    ModelAs,
    Prior,
    SetKeys,
    SettingsFile,
    Slots,
    exec_extra,
    print_json,
    print_warnings,
    progress,
    say,
    settings_from,
)
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_sim.settings import Settings
    from kairox_sim.trace import Trace
    from kairox_sim.trace_report import DomainRow, PredictionRow
    from kairox_sim.trace_stats import TraceStats

INTERRUPTED = 130  # exit code, as shells have it: 128 + SIGINT

Model = Annotated[
    Path, typer.Option(help="A Hugging Face folder: config.json, *.safetensors, tokenizer.json.")
]
Device = Annotated[str, typer.Option(help="auto, cuda, cpu (unpaced), emulated.")]
Emulate = Annotated[
    str | None, typer.Option(help="The profile an emulated device is paced by: emu-pc1, pc1, ...")
]
TimeScale = Annotated[
    float | None,
    typer.Option(
        help="How much slower than its profile an emulated device runs. \\[default: so that the "
        "shortest decode layer lasts 3 ms]"
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of torch; the host's and the link's lane are beside.")
]
Temperature = Annotated[
    float, typer.Option(help="Of sampling; 0 is greedy, and small models then write loops.")
]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from this share of the probability.")]
Seed = Annotated[int, typer.Option(help="Of sampling.")]


def record(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The trace to write.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More files after the first of either option."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text files whose own tokens are fed: domains, in sequence."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Instead: prompts that the model writes on from. One per file, or JSON lines "
            "(.jsonl) with prompt and domain."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Of each text; with --prompts, written after each prompt.")
    ] = 256,
    skip: Annotated[int, typer.Option(help="Tokens of each text to leave out first.")] = 0,
    prefill: Annotated[int, typer.Option(help="First tokens of a window that are prefilled.")] = 32,
    window: Annotated[
        int, typer.Option(help="Tokens of a sequence; each starts with an empty KV cache.")
    ] = 256,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    settings: SettingsFile = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Record a run under this policy. \\[default: all neurons resident]"),
    ] = None,
    controller: Controller = None,
    slots: Slots = None,
    gating: Gating = None,
    model_as: ModelAs = None,
    prior: Prior = None,
    numerics: Numerics = None,
    weights: Weights = None,
    dtype: Dtype = None,
    vram: Vram = None,
    predictor_file: PredictorFile = None,
    thresholds: Thresholds = None,
    set_keys: SetKeys = None,
    trigger: Annotated[
        str | None,
        typer.Option(help="When predictions are made: attn_out, attn_in. \\[default: attn_out]"),
    ] = None,
    call_log: Annotated[
        Path | None, typer.Option(help="Also write every call of the neuron cache to this file.")
    ] = None,
    hidden: Annotated[
        Path | None,
        typer.Option(help="Also write the hidden states that `train-predictor` learns from."),
    ] = None,
    run: Annotated[
        str,
        typer.Option(
            help="hybrid: this package's executor; plain: the model as transformers runs it, only "
            "hooked."
        ),
    ] = "hybrid",
    batch: Annotated[
        int, typer.Option(help="With --run plain: windows of a text that are fed side by side.")
    ] = 1,
    device: Device = "cpu",
    emulate: Emulate = None,
    link: Link = None,
    time_scale: TimeScale = None,
    threads: Threads = None,
    host_threads: HostThreads = 1,
    host_nice: HostNice = 0,
    promotion: Promotion = "auto",
    cache_dir: CacheDir = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite, once the new recording is whole.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Record which neurons fire, token by token, and what a look-ahead predictor says of them.

    Ctrl-C keeps what there is, marked as cut (exit code 130); a killed recording is readable up to
    the kill.

    Example: kairox record --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt experiments/prompts/code.txt -o eval.arrow
    """
    with exec_extra():
        from kairox_exec.live import set_threads
        from kairox_exec.plain_run import record_plain_run
        from kairox_exec.recording import record as record_hybrid_run

    how: dict[str, Any]
    record_run: Callable[..., Path]
    decided = {"controller": controller, "slots": slots, "prior": prior}
    given = {
        "gating": gating, "model_as": model_as, "numerics": numerics, "weights": weights,
        "vram": vram, "predictor_file": predictor_file, "set_keys": set_keys,
    }  # fmt: skip
    machine = {"emulate": emulate, "time_scale": time_scale, "link": link}
    if run == "plain":
        beside = {
            "host_threads": host_threads != 1, "host_nice": host_nice, "cache_dir": cache_dir,
            "promotion": promotion != "auto",
        }  # fmt: skip
        hybrid = decided | given | machine | beside
        _refuse(hybrid | {"settings": settings, "policy": policy, "call_log": call_log})
        if trigger is not None and hidden is None:
            raise KairoxError(
                "--trigger with --run plain is of the hidden states, since nothing is predicted; "
                "give --hidden too, or leave it out"
            )
        how = {"dtype": dtype or "float32", "thresholds": thresholds, "batch": batch}
        how |= {"trigger": trigger or "attn_out"}
        record_run = record_plain_run
    elif run == "hybrid":
        if batch != 1:
            raise KairoxError("--batch needs --run plain: the executor runs one sequence at a time")
        chosen = _settings(settings, policy, decided, dtype=dtype, thresholds=thresholds, **given)
        if trigger is not None:
            chosen = chosen.with_overrides({"trigger": trigger})
        how = {"settings": chosen, "call_log": call_log, **machine}
        how["host"] = host_side(host_threads, host_nice, promotion, cache_dir)
        record_run = record_hybrid_run
    else:
        raise KairoxError(f"unknown run {run!r}; allowed: hybrid, plain")
    set_threads(threads)
    texts, written = list(text or ()), list(prompts or ())
    (written if written else texts).extend(more or ())
    try:
        with progress() as bar:
            task = bar.add_task("recording", total=None)
            if "host" in how:
                how["host"] = dataclasses.replace(how["host"], on_load=loading_bar(bar, task))

            def show(done: int, of: int) -> None:
                bar.update(task, description="recording", completed=done, total=of)

            path = record_run(
                model,
                texts,
                out,
                prompts=written,
                tokens=tokens,
                skip=skip,
                prefill=prefill,
                window=window,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                hidden=hidden,
                device=device,
                force=force,
                **how,
                progress=show,
            )
    except KeyboardInterrupt as stop:
        begun = "stopped; a recording that had begun is kept, and readable as far as it goes"
        say(f"kairox: {str(stop) or begun}")
        raise typer.Exit(INTERRUPTED) from stop
    _report(path, as_json)
    if texts and batch > (n_windows := -(-tokens // window)):
        print_warnings(
            [
                f"--batch {batch}: {tokens} tokens of a text in windows of {window} are "
                f"{n_windows} to feed side by side; give more --tokens, or a smaller --window"
            ]
        )


def _refuse(given: dict[str, Any]) -> None:
    needless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if needless:
        raise KairoxError(
            f"{', '.join(needless)} with --run plain: all is computed on one device, as the model "
            "is; leave them out, or use --run hybrid"
        )


def _settings(
    file: Path | None, policy: str | None, of_a_policy: dict[str, Any], **given: Any
) -> Settings:
    """The policy whose run is recorded: by default all neurons are resident."""
    needless = [f"--{name}" for name, value in of_a_policy.items() if value is not None]
    if file is None and policy is None and needless:
        raise KairoxError(
            f"{', '.join(needless)} without a policy: by default all neurons are resident, so that "
            "there is nothing to decide; name one with --policy, or give --settings"
        )
    if file is None and policy is None:
        policy = "all"
    return settings_from(file, policy=policy, **of_a_policy, **given)


def _report(path: Path, as_json: bool) -> None:
    from kairox_sim.trace import read_trace
    from kairox_sim.trace_report import by_domain, predictions
    from kairox_sim.trace_stats import trace_stats

    trace = read_trace(path)
    domains, predicted, stats = by_domain(trace), predictions(trace), trace_stats(trace)
    warnings = [*trace.warnings, *stat_warnings(stats)]
    if as_json:
        print_json(
            {
                "trace": str(path),
                "bytes": path.stat().st_size,
                "sha256": trace.sha256,
                "tokens": trace.n_tokens,
                "steps": trace.n_steps,
                "recorder_overhead": trace.header.recorder_overhead,
                "domains": [dataclasses.asdict(row) for row in domains],
                "density_by_layer": stats.density.tolist(),
                "predicted_trigger": trace.header.predicted_trigger,
                "prediction_by_layer": [dataclasses.asdict(row) for row in predicted],
                "warnings": warnings,
            }
        )
        return
    _print_tables(path, trace, domains, predicted, stats)
    print_warnings(warnings)


def _print_tables(
    path: Path,
    trace: Trace,
    domains: list[DomainRow],
    predicted: list[PredictionRow],
    stats: TraceStats,
) -> None:
    from rich.console import Console
    from rich.table import Table

    header = trace.header
    console = Console()
    said = how_recorded(header)
    of = Table(
        title=f"{header.model}, gating {said['gating']}: {trace.n_tokens:,} tokens",
        caption=said.get("run"),
    )
    of.add_column("domain")
    for column in ("sequences", "tokens", "density"):
        of.add_column(column, justify="right")
    for row in domains:
        domain = row.domain + (" (generated)" if row.generated else "")
        of.add_row(domain, str(row.sequences), f"{row.tokens:,}", _share(row.density))
    console.print(of)
    ahead = header.predicted_trigger
    layers = Table(title=f"by layer; look-ahead at {ahead}" if ahead else "by layer; no look-ahead")
    for column in ("layer", "density", "recall", "precision"):
        layers.add_column(column, justify="right")
    for layer in range(header.n_layers):
        ratios = [(p.recall, p.precision) for p in predicted if p.layer == layer]
        recall, precision = ratios[0] if ratios else (float("nan"), float("nan"))
        layers.add_row(str(layer), _share(stats.density[layer]), _share(recall), _share(precision))
    console.print(layers)
    typer.echo(
        f"{path}: {path.stat().st_size / 1e6:.2f} MB; recording took "
        f"{_share(header.recorder_overhead)} of the steps' time"
    )


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"

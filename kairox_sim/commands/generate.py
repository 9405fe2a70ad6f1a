"""kairox generate: write on from a prompt, live, under settings; then what it took."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    Policy,
    Prior,
    SetKeys,
    SettingsFile,
    Slots,
    exec_extra,
    print_json,
    print_warnings,
    progress,
    settings_from,
)
from kairox_sim.commands.record import (
    INTERRUPTED,
    Device,
    Emulate,
    Model,
    Seed,
    Temperature,
    Threads,
    TimeScale,
    TopP,
)
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_exec.generation import Generated

SHOWN = (
    "tok_s", "tok_s_scaled", "tpot_s", "ttft_s", "hit_resident", "hit_on_time",
    "residual_per_token", "h2d_bytes_per_token", "recall", "precision",
)  # fmt: skip


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The text to write on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Instead: a file of it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 64,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    settings: SettingsFile = None,
    policy: Policy = None,
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
    device: Device = "auto",
    emulate: Emulate = None,
    link: Link = None,
    time_scale: TimeScale = None,
    threads: Threads = None,
    host_threads: HostThreads = 1,
    host_nice: HostNice = 0,
    promotion: Promotion = "auto",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Write on from a prompt, streaming, with neurons swapped as the settings say; then a table.

    Times are of decode steps: measured on cpu, paced by the profile on an emulated device.

    Example: kairox generate --model experiments/models/tiny-reglu --settings best.toml
    --prompt "The old house" --device emulated --emulate emu-pc1 --as prosparse-7b
    """
    with exec_extra():
        from kairox_exec.generation import generate as run
        from kairox_exec.live import set_threads

    chosen = settings_from(
        settings,
        policy=policy,
        controller=controller,
        slots=slots,
        gating=gating,
        model_as=model_as,
        prior=prior,
        numerics=numerics,
        weights=weights,
        dtype=dtype,
        vram=vram,
        predictor_file=predictor_file,
        thresholds=thresholds,
        set_keys=set_keys,
    )
    set_threads(threads)
    with ExitStack() as stack:
        bar = stack.enter_context(progress())
        on_load = loading_bar(bar, bar.add_task("loading", total=None))

        def show(piece: str) -> None:
            stack.close()  # text and a bar cannot be on one terminal
            if not as_json:
                _show(piece)

        done = run(
            model,
            _prompt(prompt, prompt_file),
            chosen,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            device=device,
            emulate=emulate,
            time_scale=time_scale,
            link=link,
            host=host_side(host_threads, host_nice, promotion, cache_dir, on_load),
            on_text=show,
        )
    if as_json:
        print_json(
            {
                "text": done.text,
                "prompt_tokens": done.n_prompt,
                "new_tokens": len(done.tokens),
                "stopped": done.stopped,
                "seed": seed,
                "threshold_scale": done.threshold_scale,
                **done.run.to_dict(),
            }
        )
    else:
        sys.stdout.write("\n")
        _print_table(done)
    print_warnings(done.run.warnings)
    if done.stopped:
        raise typer.Exit(INTERRUPTED)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise KairoxError("give a text to write on from: either --prompt or --prompt-file")
    if prompt is not None:
        text = prompt
    else:
        from kairox_exec.text import read_text

        assert prompt_file is not None
        text, _ = read_text(prompt_file)
    if not text:
        raise KairoxError("the prompt is empty; give a text to write on from")
    return text


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _print_table(done: Generated) -> None:
    from rich.console import Console
    from rich.table import Table

    from kairox_sim.metrics import METRICS

    labels = done.run.labels
    table = Table(
        title=f"{labels['setting']} on {labels['hardware']} ({labels['time']})",
        caption=f"{labels['costs']}; gating {labels['gating']}; {labels['prediction']}\n"
        f"{labels['budget']}",
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_row("new tokens", str(len(done.tokens)), "tokens")
    summary = done.run.summary
    for name in SHOWN:
        if name == "tok_s_scaled" and summary[name] == summary["tok_s"]:
            continue  # it is no stand-in
        value, unit = summary[name], METRICS[name][1]
        scale, shown = (1e3, "ms") if unit == "s" else (1.0, unit)
        table.add_row(name, _number(value * scale), shown)
    if done.threshold_scale == done.threshold_scale:  # else the policy has none
        table.add_row("threshold_scale, last", _number(done.threshold_scale), "")
    Console().print(table)


def _number(value: float) -> str:
    return "unknown" if value != value else f"{value:.4g}"

"""kairox validate: live runs against their own simulation."""

from __future__ import annotations

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
)
from kairox_sim.commands.options import (
    Controller,
    Gating,
    Json,
    Link,
    Policy,
    Prior,
    SetKeys,
    Slots,
    exec_extra,
    print_json,
    progress,
    settings_from,
    wide_console,
)
from kairox_sim.commands.record import Device, Emulate, Model, Threads, TimeScale
from kairox_sim.outputs import require_folder

if TYPE_CHECKING:
    from kairox_exec.validation import Validation


def validate(
    model: Model,
    text: Annotated[Path, typer.Option(help="The text whose tokens are fed.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder of the report.")],
    more: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="More settings files after the first."),
    ] = None,
    settings: Annotated[
        list[Path] | None, typer.Option(help="Settings files, such as `best` writes.")
    ] = None,
    policy: Policy = None,
    controller: Controller = None,
    slots: Slots = None,
    gating: Gating = None,
    model_as: Annotated[
        str | None, typer.Option("--as", help="Run and simulate at the costs of this model.")
    ] = None,
    prior: Prior = None,
    numerics: Numerics = None,
    weights: Weights = None,
    dtype: Dtype = None,
    vram: Vram = None,
    predictor_file: PredictorFile = None,
    thresholds: Thresholds = None,
    set_keys: SetKeys = None,
    hardware: Annotated[
        Path | None,
        typer.Option(help="What `calibrate` wrote on this machine. \\[default: calibrate now]"),
    ] = None,
    device: Device = "auto",
    emulate: Emulate = None,
    link: Link = None,
    time_scale: TimeScale = None,
    tokens: Annotated[int, typer.Option(help="Tokens fed, prefill included.")] = 160,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out first.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each setting, interleaved.")
    ] = 5,
    threads: Threads = None,
    host_threads: HostThreads = 1,
    host_nice: HostNice = 0,
    promotion: Promotion = "auto",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Run every setting live, simulate it on its own trace, and say how far the simulation was off.

    Options such as --policy are put over every settings file. Without --hardware it calibrates
    first, on tokens after those it validates on; with it, the calibration has to be of the same
    model, weights, dtype, numerics, gating and predictor. The report says whether decisions agreed
    (gates G1 and G2) and times did (G3), next to two models that know nothing of caches; settings
    in which an emulated machine fell behind its pace are shown and not judged.

    Example: kairox validate --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt --device emulated --emulate emu-pc1 --as prosparse-7b
    --settings best.toml other.toml -o report
    """
    with exec_extra():
        from kairox_exec.as_run import all_as, kind_of, require_calibrated_as
        from kairox_exec.calibration import Calibration
        from kairox_exec.live import set_threads
        from kairox_exec.live_run import ForcedText, calibrate, machine_for
        from kairox_exec.machine import machine_facts
        from kairox_exec.validation import validate as run

    files = [*(settings or ()), *(more or ())]
    chosen = [
        settings_from(
            file,
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
        for file in files or [None]
    ]
    runs_as, kind = all_as(model, chosen), kind_of(chosen)
    require_folder(out, "report")
    set_threads(threads or 1)
    machine = machine_for(
        model, device, emulate=emulate, kind=kind, time_scale=time_scale, link=link,
        host=host_side(host_threads, host_nice, promotion, cache_dir),
    )  # fmt: skip
    fed = ForcedText([text], tokens=tokens, skip=skip)
    with progress() as bar:
        task = bar.add_task("calibrating", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        if hardware is not None:
            calibration = Calibration.load(hardware)
            require_calibrated_as(calibration.conditions, runs_as, machine.label, machine_facts())
        else:
            other = ForcedText([text], tokens=128, skip=skip + tokens)
            calibration = calibrate(model, other, machine, kind=kind, on_run=show)
        calibration.dump(out / "hw.toml")  # before what may be stopped
        result = run(
            model,
            chosen,
            fed,
            calibration,
            machine,
            out,
            repeats=repeats,
            on_progress=show,
        )
    result.dump(out)
    if as_json:
        print_json(result.to_dict())
        return
    print_validation(result, out)


def print_validation(result: Validation, out: Path) -> None:
    """A row per setting, the verdict below."""
    from rich.table import Table

    table = Table(title="live against simulated", caption=f"{result.conditions['time']}")
    columns = ("setting", "swept", "simulated", "live", "error", "overruns", "hits", "MB/token",
               "G1, G2")  # fmt: skip
    barred = set(result.barred.index)
    for name in columns:
        table.add_column(name, justify="left" if name == "setting" else "right")
    for at, row in zip(result.table.index, result.table.to_dict(orient="records"), strict=True):
        differ = row["g1_differences"] + row["g2_differences"]
        table.add_row(
            row["setting"],
            _number(row["swept_tok_s"]),
            _number(row["simulated_tok_s"]),
            f"{row['live_tok_s']:.2f} ({row['live_spread']:.1%})",
            f"{row['error']:+.1%}",
            _share(row["overrun_share"]) + (" barred" if at in barred else ""),
            f"{row['live_hit_on_time']:.3f}, {row['simulated_hit_on_time']:.3f}",
            f"{row['live_h2d_bytes_per_token'] / 1e6:.2f}, "
            f"{row['simulated_h2d_bytes_per_token'] / 1e6:.2f}",
            f"{differ} differ" if differ else "same",
        )
    console = wide_console()
    console.print(table)
    console.print(
        "tok/s, of live runs with their spread; error is of the simulated time per token; overruns "
        "are the worst repeat's, of ops that took longer than the emulated machine allows or of "
        "the GPU's time by which they did; "
        "hits on time and MB moved per token: live, simulated."
    )
    _print_queues(result)
    for line in result.said():
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"report: {out}", soft_wrap=True)


def _print_queues(result: Validation) -> None:
    from rich.table import Table

    from kairox_exec.queue_errors import queue_errors

    table = Table(title="where the error comes from", caption="shares of the live time per token")
    for name in ("queue", "live", "median error", "worst error", "of setting", "of itself"):
        table.add_column(name, justify="left" if name in ("queue", "of setting") else "right")
    for row in queue_errors(result.clean):
        shares = (row.live_share, row.median_error, row.worst_error)
        table.add_row(
            row.means,
            *(_share(value) for value in shares),
            row.worst_setting,
            _share(row.own_error),
        )
    wide_console().print(table)


def _share(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"

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
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_folder

if TYPE_CHECKING:
    from kairox_exec.validation import Validation
    from kairox_sim.settings import Settings


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
        typer.Option(help="What `calibrate` wrote on this machine. [default: calibrate now]"),
    ] = None,
    device: Device = "auto",
    emulate: Emulate = None,
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
    first, on tokens after those it validates on. The report says whether decisions agreed (gates G1
    and G2) and times did (G3), next to two models that know nothing of caches.

    Example: kairox validate --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt --device emulated --emulate emu-pc1 --as prosparse-7b
    --settings best.toml other.toml -o report
    """
    with exec_extra():
        from kairox_exec.calibration import Calibration
        from kairox_exec.live import set_threads
        from kairox_exec.live_run import ForcedText, calibrate, machine_for
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
    target = _one_model(chosen)
    require_folder(out, "report")
    set_threads(threads or 1)
    host = host_side(host_threads, host_nice, promotion, cache_dir)
    machine = machine_for(
        model, device, emulate=emulate, model_as=target, time_scale=time_scale, host=host
    )
    fed = ForcedText([text], tokens=tokens, skip=skip)
    with progress() as bar:
        task = bar.add_task("calibrating", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        if hardware is not None:
            calibration = Calibration.load(hardware)
        else:
            other = ForcedText([text], tokens=128, skip=skip + tokens)
            calibration = calibrate(model, other, machine, model_as=target, on_run=show)
        if calibration.conditions["time"] != machine.label:
            raise KairoxError(
                f"{hardware} was calibrated on {calibration.conditions['time']} and these runs are "
                f"on {machine.label}; calibrate on the same machine, or leave out --hardware"
            )
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


def _one_model(chosen: list[Settings]) -> str | None:
    targets = {settings.model_as for settings in chosen}
    if len(targets) > 1:
        names = ", ".join(sorted(map(str, targets)))
        raise KairoxError(
            f"the settings are for different models ({names}); give one with --as, which is put "
            "over all of them"
        )
    return targets.pop()


def print_validation(result: Validation, out: Path) -> None:
    """A row per setting, the verdict below."""
    from rich.table import Table

    table = Table(title="live against simulated", caption=f"{result.conditions['time']}")
    for name in ("setting", "swept", "simulated", "live", "error", "hits", "MB/token", "G1, G2"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in result.table.to_dict(orient="records"):
        differ = row["g1_differences"] + row["g2_differences"]
        table.add_row(
            row["setting"],
            _number(row["swept_tok_s"]),
            _number(row["simulated_tok_s"]),
            f"{row['live_tok_s']:.2f} ({row['live_spread']:.1%})",
            f"{row['error']:+.1%}",
            f"{row['live_hit_on_time']:.3f}, {row['simulated_hit_on_time']:.3f}",
            f"{row['live_h2d_bytes_per_token'] / 1e6:.2f}, "
            f"{row['simulated_h2d_bytes_per_token'] / 1e6:.2f}",
            f"{differ} differ" if differ else "same",
        )
    console = wide_console()
    console.print(table)
    console.print(
        "tok/s, of live runs with their spread; error is of the simulated time per token; hits on "
        "time and MB moved per token: live, simulated."
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
    for row in queue_errors(result.table):
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

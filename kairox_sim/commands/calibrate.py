"""kairox calibrate: this machine's own runs in, a hardware profile out."""

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
    Weights,
    host_side,
)
from kairox_sim.commands.options import (
    Gating,
    Json,
    Link,
    ModelAs,
    exec_extra,
    print_json,
    progress,
    settings_from,
    wide_console,
)
from kairox_sim.commands.record import Device, Emulate, Model, Threads, TimeScale
from kairox_sim.outputs import require_place

if TYPE_CHECKING:
    from kairox_exec.calibration import Calibration


def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile (.toml) to write.")],
    text: Annotated[
        Path, typer.Option(help="A text file; other tokens than it will be judged on.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens per run, prefill included.")] = 128,
    skip: Annotated[int, typer.Option(help="Tokens of the text to leave out first.")] = 0,
    device: Device = "auto",
    emulate: Emulate = None,
    link: Link = None,
    model_as: ModelAs = None,
    gating: Gating = None,
    numerics: Numerics = None,
    weights: Weights = None,
    dtype: Dtype = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            help="lookahead, or rank with --predictor-file. \\[default: the file's, else lookahead]"
        ),
    ] = None,
    predictor_file: PredictorFile = None,
    thresholds: Thresholds = None,
    vram: Annotated[
        str | None,
        typer.Option(
            help="Device memory the profile says, such as 12GiB. \\[default: the machine's]"
        ),
    ] = None,
    time_scale: TimeScale = None,
    threads: Threads = None,
    host_threads: HostThreads = 1,
    host_nice: HostNice = 0,
    promotion: Promotion = "auto",
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Run a few settings, time every operation, and fit a profile to them.

    Writes the profile and, beside it, a .json with the fits and the runs, which `validate` reads.
    It holds for the model (or --as), the weights, dtype, numerics, gating, predictor and machine it
    was made with, and for any policy and budget. Close other programs first.

    Example: kairox calibrate --model experiments/models/tiny-reglu
    --text experiments/prompts/prose.txt --device emulated --emulate emu-pc1 --as prosparse-7b
    -o hw.toml
    """
    with exec_extra():
        from kairox_exec.live import set_threads
        from kairox_exec.live_run import ForcedText, machine_for
        from kairox_exec.live_run import calibrate as run
    require_place(out, "profile")
    require_place(out.with_suffix(".json"), "calibration runs")
    set_threads(threads or 1)
    kind = settings_from(
        model_as=model_as, gating=gating, numerics=numerics, weights=weights, dtype=dtype,
        vram=vram, predictor_file=predictor_file, thresholds=thresholds,
        set_keys=None if predictor is None else [f"predictor={predictor}"],
    )  # fmt: skip
    machine = machine_for(
        model, device, emulate=emulate, kind=kind, time_scale=time_scale, link=link,
        host=host_side(host_threads, host_nice, promotion, cache_dir),
    )  # fmt: skip
    with progress() as bar:
        task = bar.add_task("calibrating", total=None)
        result = run(
            model,
            ForcedText([text], tokens=tokens, skip=skip),
            machine,
            kind=kind,
            on_run=lambda what, done, of: bar.update(
                task, description=what, completed=done, total=of
            ),
        )
    path = result.dump(out)
    if as_json:
        print_json(
            {
                "profile": str(path),
                "fits": result.fits,
                "runs": result.runs,
                "conditions": result.conditions,
            }
        )
        return
    print_calibration(result, path)


def print_calibration(result: Calibration, path: Path) -> None:
    """The fits as a table, and where the profile is."""
    from rich.table import Table

    table = Table(title=f"{result.profile.name}: {result.conditions['time']}")
    table.add_column("operation")
    table.add_column("fixed", justify="right")
    table.add_column("rate", justify="right")
    table.add_column("how")
    for fit in result.fits:
        rate = f"{fit['per_s'] / 1e9:.4g} GB/s"
        table.add_row(fit["what"], f"{fit['fixed_s'] * 1e6:.1f} us", rate, fit["how"])
    for policy, cost in result.profile.decide.items():
        how = cost.fixed_s.source.rpartition(": ")[2]
        per_swap = f"{cost.per_swap_s.value * 1e6:.1f} us a swap"
        table.add_row(f"decide, {policy}", f"{cost.fixed_s.value * 1e6:.1f} us", per_swap, how)
    console = wide_console()
    console.print(table)
    console.print(f"profile: {path}", soft_wrap=True)

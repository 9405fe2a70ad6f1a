"""The whole loop on the shipped model, without a GPU: record, calibrate, sweep, draw, run, compare.

    python -m experiments.demo --out out/demo

Every command it runs is printed; each of them can be repeated by hand.
"""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

import pandas as pd

from experiments import fig04_pipeline, fig05_momentum, fig06_anb, fig07_validation
from experiments.demo_live import run_live
from experiments.figure import draw_to
from kairox_exec.calibration import PaceError
from kairox_sim.cli import app as program
from kairox_sim.errors import KairoxError
from kairox_sim.plot_sweep import contrast, drawable
from kairox_sim.sweeps import read_table
from kairox_sim.trace import read_trace

HERE = Path(__file__).parent
MODEL = HERE / "models" / "tiny-reglu"
DOMAINS = [HERE / "prompts" / f"{name}.txt" for name in ("prose", "code", "json", "html", "math")]
TARGET, EMULATED = "prosparse-7b", "emu-pc1"


def kairox(*arguments: object) -> None:
    """Run one command of the program in this process; KairoxError where it would exit with 2."""
    words = [str(argument) for argument in arguments]
    sys.stdout.write(f"\n$ kairox {shlex.join(words)}\n")
    sys.stdout.flush()
    program(args=words, standalone_mode=False)


def kairox_calibrate(hardware: Path) -> None:
    """Calibrate, more slowly if this machine is too busy or too slow for the default pace."""
    text = ("--model", MODEL, "--text", DOMAINS[0], "--skip", 12288, "-o", hardware)
    emulated = ("--device", "emulated", "--emulate", EMULATED, "--as", TARGET)
    for pace in ((), ("--time-scale", 10), ("--time-scale", 20)):
        try:
            kairox("calibrate", *text, *emulated, *pace)
            return
        except PaceError as error:
            sys.stdout.write(f"{error}\n")
    raise KairoxError("this machine is too busy to emulate another one; try again when it is idle")


def say_contrast(table: pd.DataFrame) -> None:
    """How far apart the settings of the main figure are; ceiling: all resident / none resident."""
    for gating, rows in drawable(table).groupby("gating"):
        said = contrast(rows).replace("\n", ", ")
        sys.stdout.write(f"main figure, gating {gating}: {said}\n")


def demo(out: Path) -> None:
    """Everything goes to folder `out`, which is emptied first."""
    if out.exists() and not (out / "hw.toml").exists() and any(out.iterdir()):
        raise KairoxError(f"{out} is not a folder of this demo; name an empty one with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    prior, trace, hardware = out / "profile.arrow", out / "eval.arrow", out / "hw.toml"
    figures = out / "figures"
    pair = ("--trace", trace, "--prior", prior)

    (out / "hw.toml").touch()  # marks the folder as ours
    texts = ("--model", MODEL, "--text", *DOMAINS, "--tokens", 192)
    kairox("record", *texts, "--skip", 8192, "-o", prior)
    kairox("record", *texts, "-o", trace)
    kairox("info", trace)
    kairox_calibrate(hardware)
    table = out / "sweep.parquet"
    kairox("sweep", HERE / "demo.toml", *pair, "--hardware", hardware, "-o", table)
    kairox("plot", table, "-o", figures)
    for stem in ("fig01_throughput", "fig02_budget", "fig03_time_split"):
        kairox("sweep", HERE / f"{stem}.toml", *pair, "-o", out / f"{stem}.parquet")
        kairox("plot", out / f"{stem}.parquet", "-o", figures / stem)
    say_contrast(read_table(out / "fig01_throughput.parquet"))
    eval_trace = read_trace(trace, strict=True)
    for made, path in (
        (fig04_pipeline, out / "fig04_pipeline.parquet"),
        (fig06_anb, out / "fig06_anb.parquet"),
    ):
        made.make(path, eval_trace)
        draw_to(path, figures, made.STEM, made.draw)
    fig05_momentum.make(out / "fig05_momentum.csv")
    draw_to(out / "fig05_momentum.csv", figures, fig05_momentum.STEM, fig05_momentum.draw)

    kairox("best", table, "--hardware", hardware, "--link", "own", "-o", out / "best.toml")
    validation = run_live(out, read_table(table), prior=prior, hardware=hardware)
    draw_to(validation, figures, fig07_validation.STEM, fig07_validation.draw)
    sys.stdout.write(f"figures: {figures}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    began = time.monotonic()
    try:
        demo(parser.parse_args().out)
    except KairoxError as error:
        sys.exit(f"demo: {error}")
    sys.stdout.write(f"done in {time.monotonic() - began:.0f} s\n")

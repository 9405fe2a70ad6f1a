"""A figure per published comparison: the published bar beside the simulated one.

    python -m experiments.published.figures experiments/results/published

Reads the runs that the tables were made from. A simulated bar is the median over the persistences,
its whisker their range; both are labelled synthetic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from experiments.published import bars, fork_runs, guide_workloads, ratios
from experiments.published.data import number, table
from experiments.published.machines import bars as published_bars
from experiments.published.pairs import FITTED, SMALL_PRINT, Pair, draw_pairs, key, panels
from experiments.published.runs import PERSISTENCES, Run, read_runs
from experiments.published.table_figures import draw_copies, draw_sweep
from kairox_sim.errors import KairoxError
from kairox_sim.plot_style import (
    BLACK,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILLION,
    footer,
    house_style,
    save,
)

COLORS = {
    "llama.cpp": GREY, "PowerInfer": GREEN, "Neuralink": SKY, "Q-Infer": PURPLE,
    "Kairox": VERMILLION,
}  # fmt: skip


MACHINE_NAME = {"pc-low": "PC-Low", "pc-high": "PC-High"}


def draw_bars(runs: Sequence[Run], machine: str) -> Figure:
    """A panel per model, four systems each."""
    mine = [bar for bar in published_bars() if bar.machine == machine]
    figure, grid = panels(len(mine), 3 if len(mine) > 4 else 2, 1.55)

    def at(model: str, system: str) -> list[float]:
        return [r.tok_s for r in runs if (r.machine, r.model, r.system) == (machine, model, system)]

    for axes, bar in zip(grid, mine, strict=True):
        marks = {
            "PowerInfer": {"^": at(bar.name, "powerinfer-serial"),
                           "v": at(bar.name, "powerinfer-shipped")},
            "Kairox": {"o": at(bar.name, "kairox-released"),
                       "s": at(bar.name, "kairox-sparkinfer")},
        }  # fmt: skip
        shown = {"PowerInfer": "powerinfer", "Neuralink": "neuralink-eager",
                 "Kairox": "kairox-paper", "llama.cpp": "llama.cpp"}  # fmt: skip
        pairs = [
            Pair(name, value, at(bar.name, shown[name]), COLORS[name],
                 {m: median(v) for m, v in marks.get(name, {}).items() if v})
            for name, value in bar.published.items()
        ]  # fmt: skip
        draw_pairs(axes, pairs, "tokens/s")
        axes.set_title(f"{bar.name}, {MACHINE_NAME[machine]}")
        axes.set_xticks(range(4), ["llama\n.cpp", "Power\nInfer", "Neura-\nlink", "Kairox"])
    key(figure, {"^": "PowerInfer serial", "v": "as shipped", "o": "Kairox released",
                 "s": "SparkInfer"})  # fmt: skip
    footer(figure, f"{machine}, early bars of SparkInfer, figures/tput.png. {SMALL_PRINT} {FITTED} "
           "Bars: PowerInfer concurrent, Kairox of the paper; markers: medians.")  # fmt: skip
    return figure


def draw_ratios(runs: Sequence[Run], machine: str, index: int) -> Figure:
    """Best over each system, and the ablation."""
    figure, (left, right) = panels(2, 2, 2.0)
    part = "pc_low" if machine == "pc-low" else "pc_high"
    pairs = []
    names = {"powerinfer": "PowerInfer", "neuralink": "Neuralink", "qinfer": "Q-Infer"}
    for name, base in ratios.BASE_OF.items():
        best = {ours: [max(ratios.over(runs, machine, ours, base, p).values())
                       for p in PERSISTENCES] for ours in ratios.KAIROX}  # fmt: skip
        pairs.append(Pair(names[name], number("paper", "best_over", f"{name}_{part}"),
                          best["kairox-paper"], COLORS[names[name]],
                          {"o": median(best["kairox-released"])}))  # fmt: skip
    draw_pairs(left, pairs, "best ratio of Kairox (x)")
    bar = ratios.ablated(runs, machine)
    steps = {"live_pipeline": ("live-pipeline", None),
             "neuron_balancing": ("paper-balancing", "released-balancing"),
             "adaptive": ("kairox-paper", "kairox-released")}  # fmt: skip

    def over(system: str | None) -> list[float]:
        if system is None:
            return []
        return [bars.at(runs, bar, system, p).tok_s / bars.at(runs, bar, "powerinfer-serial",
                p).tok_s for p in PERSISTENCES]  # fmt: skip

    pairs = [
        Pair(step.replace("_", "\n"), table("paper", "ablation")[step][index], over(paper),
             VERMILLION, {"o": median(over(code))} if code else {})
        for step, (paper, code) in steps.items()
    ]  # fmt: skip
    draw_pairs(right, pairs, "over PowerInfer (x)")
    right.set_title(f"ablation, {bar.name}, {MACHINE_NAME[machine]}")
    left.set_title(f"the best over each system, {MACHINE_NAME[machine]}")
    for axes in (left, right):
        axes.axhline(1, color=BLACK, linewidth=0.6, linestyle=":")
    key(figure, {"o": "released code"})
    footer(
        figure,
        f"{machine}, Kairox, OSDI '26, section 9. {SMALL_PRINT} {FITTED} PowerInfer is serial.",
    )
    return figure


def draw_guide(runs: Sequence[Run]) -> Figure:
    """Tokens/s and the time breakdown on pc1, for both kinds of sets."""
    figure, grid = panels(4, 2, 1.7)
    main_system = {"llama.cpp": "llama.cpp", "PowerInfer": "powerinfer",
                   "Neuralink": "neuralink-eager", "Q-Infer": "qinfer",
                   "Kairox": "kairox-guide"}  # fmt: skip
    for column, sets in enumerate(guide_workloads.SETS):
        mine = [run for run in runs if run.machine == f"pc1, {sets} sets"]

        def at(system: str, of: Sequence[Run] = mine) -> list[Run]:
            return [run for run in of if run.system == system]

        pairs = [
            Pair(name, number("guide", "throughput", name), [r.tok_s for r in at(system)],
                 COLORS[name], {} if name != "Kairox" else
                 {"o": median(r.tok_s for r in at("kairox-released")),
                  "s": median(r.tok_s for r in at("kairox-paper"))})
            for name, system in main_system.items()
        ]  # fmt: skip
        draw_pairs(grid[column], pairs, "tokens/s")
        grid[column].set_title(f"{sets} sets")
        parts: dict[str, Callable[[Run], float]] = {
            "gpu": lambda r: r.gpu_s, "cpu": lambda r: r.cpu_busy_s,
                 "total": lambda r: 1 / r.tok_s, "prefetch": lambda r: r.swap_busy_s}  # fmt: skip
        times = [
            Pair(f"{name[0]}.\n{part}", number("guide", "time_breakdown", f"{name.lower()}_{part}"),
                 [1e3 * seconds(run) for run in at(main_system[name])], COLORS[name], {})
            for name in ("PowerInfer", "Kairox") for part, seconds in parts.items()
            if (name, part) != ("PowerInfer", "prefetch")
        ]  # fmt: skip
        draw_pairs(grid[2 + column], times, "ms per token")
    key(figure, {"o": "kairox-released", "s": "kairox-paper"})
    footer(figure, "The guide's table and breakdown (LLaMA-2-13B FP16; here ProSparse-13B) on pc1; "
           f"bars of Kairox: kairox-guide. P.: PowerInfer, K.: Kairox. {SMALL_PRINT} VRAM margin "
           f"as "
           "fitted on the llama.cpp bars of other machines; pc1's CPU by its profile, not fitted."
    )  # fmt: skip
    return figure


def draw_fork(runs: Sequence[Run]) -> Figure:
    """Four quantities, five models."""
    figure, grid = panels(4, 2, 1.7)
    published = table("fork", "rtx_3080")
    short = {"opt-6.7b": "OPT-6.7B", "bamboo-7b": "Bamboo", "prosparse-7b": "ProSparse",
             "sparseqwen2-7b": "Qwen2", "opt-30b-q4": "OPT-30B-Q4"}  # fmt: skip
    shown: tuple[tuple[str, str, Callable[[Run], float]], ...] = (
        ("tokens_per_s", "tokens/s", lambda r: r.tok_s),
        ("loads_per_layer_step", "loads per layer-step", lambda r: r.loads_per_layer_step),
        ("megabytes_per_token", "MB per token", lambda r: r.h2d_bytes / 1e6),
        ("copy_ms_per_token", "copies, ms per token", lambda r: r.swap_busy_s * 1e3),
    )
    for axes, (name, unit, value) in zip(grid, shown, strict=True):
        pairs = [
            Pair(short[model], published[name][at], [value(r) for r in runs if r.model == model],
                 VERMILLION, {})
            for at, model in enumerate(published["model"])
        ]  # fmt: skip
        draw_pairs(axes, pairs, unit)
        axes.tick_params(axis="x", labelsize=6)
    key(figure, {})
    footer(figure, "github.com/brothergiven/kairox.cpp on an RTX 3080, against kairox-released. "
           f"{SMALL_PRINT} VRAM margin fitted on the llama.cpp bars; the host's sparse rate is "
           f"from "
           "the times of these very runs, so tokens/s are no independent prediction.")  # fmt: skip
    return figure


def _drawn(folder: Path, stem: str) -> Figure:
    match stem:
        case "bars_pc_low" | "bars_pc_high":
            return draw_bars(read_runs(folder / bars.RUNS), stem[5:].replace("_", "-"))
        case "ratios_pc_low" | "ratios_pc_high":
            known = [*read_runs(folder / bars.RUNS), *read_runs(folder / ratios.MORE_RUNS)]
            return draw_ratios(known, stem[7:].replace("_", "-"), int(stem.endswith("high")))
        case "guide_workloads":
            return draw_guide(read_runs(folder / guide_workloads.TABLE_RUNS))
        case "fork_sweep":
            return draw_sweep(folder)
        case "copies":
            return draw_copies(folder)
        case _:
            return draw_fork(read_runs(folder / fork_runs.RUNS))


STEMS = ("bars_pc_low", "bars_pc_high", "ratios_pc_low", "ratios_pc_high", "guide_workloads",
         "fork_runs", "fork_sweep", "copies")  # fmt: skip


def make(folder: Path, stems: Sequence[str] = STEMS) -> list[str]:
    """Draw these; the stems."""
    with house_style():
        for stem in stems:
            save(_drawn(folder, stem), folder, stem, formats=("png",))
    return list(stems)


def main(arguments: list[str] | None = None) -> None:
    """Draw what was simulated before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    for stem in make(given.folder):
        sys.stdout.write(f"wrote {given.folder / stem}.png\n")


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"figures: {error}")

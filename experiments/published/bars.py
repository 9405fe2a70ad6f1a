"""The early absolute bars of PC-Low and PC-High against the systems, with one set of constants.

    python -m experiments.published.bars -o experiments/results/published

llama.cpp's rows are those that fitted.toml was fitted on; every other row is predicted. Persistence
of the sets is published by nobody: systems that move something are run at 0, 0.3, 0.6 and 0.9, and
none is chosen. A predicted row passes within 30 %, as a fitted one does. Which order the systems
stand in is reported and gates nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import nan
from pathlib import Path

from experiments.published.data import source_hashes
from experiments.published.fit import EACH_WITHIN, refitted
from experiments.published.machines import (
    SPARSE_SHARES,
    Bar,
    artifact_margin,
    bars,
    constants,
    fitted_hash,
    leans_on,
    paper_machine,
    refusal,
    with_sparse_share,
)
from experiments.published.runs import (
    PERSISTENCES,
    Run,
    Scale,
    Task,
    ceiling_tok_s,
    command_line,
    read_runs,
    run_all,
    write_runs,
)
from experiments.published.tables import Row, order, row, write_tables
from kairox_sim.errors import KairoxError
from kairox_sim.model import find_shape

STEM = "bars"
RUNS = "bar_runs.csv"
LESS = ", margin 512 MiB"  # of the name of a machine
SOURCE = "SparkInfer figures/tput.png"
READINGS = (
    "powerinfer",
    "powerinfer-serial",
    "powerinfer-shipped",
)  # three readings of the PowerInfer bar
KAIROX = ("kairox-paper", "kairox-released", "kairox-sparkinfer")
STILL = ("llama.cpp", *READINGS)  # the same at any persistence
MOVING = ("neuralink-eager", *KAIROX)
CONTEXT = ("qinfer", "lru")  # no bar is printed for them
BAR_OF = {
    **dict.fromkeys(READINGS, "PowerInfer"),
    "neuralink-eager": "Neuralink",
    **dict.fromkeys(KAIROX, "Kairox"),
}


def tasks(scale: Scale = Scale(), chosen: Sequence[Bar] | None = None) -> list[Task]:  # noqa: B008
    """Bar by bar, at each persistence; what never moves at the first alone.

    Where no sparse system fits beside the fitted margin, they run under another machine's name.
    """
    found = []
    for bar in bars() if chosen is None else chosen:
        profile = paper_machine(bar.machine)
        base = Task(
            machine=bar.machine, profile=profile, model=bar.name, shape=bar.shape,
            workload=bar.workload, group_size=bar.group_size, persistence=PERSISTENCES[0],
            systems=("llama.cpp",), scale=scale,
        )  # fmt: skip
        found.append(base)
        if refusal(bar):
            name = bar.machine + LESS
            base = replace(base, machine=name, profile=artifact_margin(profile))
        found += [
            replace(
                base,
                persistence=p,
                systems=(*(READINGS if p == PERSISTENCES[0] else ()), *MOVING, *CONTEXT),
            )
            for p in PERSISTENCES
        ]
    return found


def bar_row(bar: Bar, run: Run) -> Row:
    """One run against its bar; without a bar it is shown."""
    published = bar.published[BAR_OF[run.system]] if run.system in BAR_OF else nan
    at = "" if run.system in STILL else f", persistence {run.persistence:g}"
    beyond_ms = 1e3 * (1 / published - 1 / run.tok_s) / find_shape(bar.shape).n_layers
    measured = (
        f"{run.resource()}; {run.hit_on_time:.0%} hits ({run.hit_resident:.0%} before), "
        f"{run.loads_per_layer_step:.0f} loads a layer-step, {run.slots} slots for "
        f"{run.evaluated:.0f} evaluated; the bar takes {beyond_ms:+.2f} ms a layer beside it."
    )
    what = f"{run.machine}, {run.model}: {run.system}{at}"
    if run.system not in BAR_OF or run.machine != bar.machine:
        why = "no bar is printed" if run.system not in BAR_OF else measured
        return row(SOURCE, what, published, run.tok_s, "tokens/s", kind="audit",
                   why=f"{why}; {run.assumed}")  # fmt: skip
    return row(SOURCE, what, published, run.tok_s, "tokens/s", kind="predicted",
               within=EACH_WITHIN, why=f"{run.assumed} {leans_on('sparse_share')}",
               if_missed=measured)  # fmt: skip


def refused_rows() -> list[Row]:
    """Bars of sparse systems on machines that they do not fit on with the fitted margin."""
    return [
        row(SOURCE, f"{bar.machine}, {bar.name}: {bar_name}", bar.published[bar_name], nan,
            "tokens/s", kind="predicted", within=EACH_WITHIN,
            if_missed=f"refused: {refusal(bar)}. The bar was reached, so the fitted margin, the "
            "derived rank of the predictor or the context is too large for it")
        for bar in bars() if refusal(bar)
        for bar_name in ("PowerInfer", "Neuralink", "Kairox")
    ]  # fmt: skip


def fitted_rows() -> list[Row]:
    """llama.cpp, which the constants were fitted on, and the median of its errors."""
    rows = [
        row(SOURCE, f"{bar.machine}, {bar.name}: llama.cpp", bar.published["llama.cpp"],
            refitted(bar), "tokens/s", kind="fitted", within=EACH_WITHIN,
            why=f"{constants()['llama_cpp']['layers_on_gpu'][bar.key]} layers on the GPU")
        for bar in bars()
    ]  # fmt: skip
    return rows


def at(runs: Sequence[Run], bar: Bar, system: str, persistence: float) -> Run:
    """The run of a system; of those that never move there is one, for every persistence."""
    wanted = PERSISTENCES[0] if system in STILL else persistence
    for run in runs:
        if (run.machine, run.model, run.system, run.persistence) == (
            bar.machine, bar.name, system, wanted,
        ):  # fmt: skip
            return run
    raise KairoxError(f"no run of {system} for {bar.key} at persistence {wanted:g}")


def pairs_of(published: Mapping[str, float], simulated: Mapping[str, float]) -> Counter[str]:
    """How many pairs that the bars tell apart stand the same way round, the other, or tie."""
    found: Counter[str] = Counter()
    for a, b in combinations(published, 2):
        said = order(published[a], published[b])
        if said != "tie":
            low, high = (a, b) if said == "pass" else (b, a)
            found[order(simulated[low], simulated[high])] += 1
    return found


def order_rows(runs: Sequence[Run], llama: Mapping[str, float]) -> list[Row]:
    """Pairs of systems in the published order, for each reading of PowerInfer and of Kairox."""
    return [
        _order_row(runs, llama, machine, reading, kairox, persistence)
        for machine in dict.fromkeys(bar.machine for bar in bars())
        for reading in READINGS
        for kairox in KAIROX
        for persistence in PERSISTENCES
    ]


def _order_row(
    runs: Sequence[Run],
    llama: Mapping[str, float],
    machine: str,
    reading: str,
    kairox: str,
    persistence: float,
) -> Row:
    told_apart, right, ties, whole = 0, 0, 0, []
    for bar in bars():
        if bar.machine != machine or refusal(bar):
            continue
        simulated = {
            "llama.cpp": llama[bar.key],
            "PowerInfer": at(runs, bar, reading, persistence).tok_s,
            "Neuralink": at(runs, bar, "neuralink-eager", persistence).tok_s,
            "Kairox": at(runs, bar, kairox, persistence).tok_s,
        }
        pairs = pairs_of(bar.published, simulated)
        told_apart, right = told_apart + pairs.total(), right + pairs["pass"]
        ties += pairs["tie"]
        if pairs["pass"] == pairs.total():
            whole.append(bar.name)
    return row(
        SOURCE, f"{machine}: pairs of systems in the published order, {reading}, {kairox}, "
        f"persistence {persistence:g}", float(told_apart), float(right), "pairs", kind="audit",
        why=f"{ties} tie (closer than 5 %), {told_apart - right - ties} stand the other way; "
        f"models with all pairs right: {', '.join(whole) or 'none'}",
    )  # fmt: skip


def absolute_rows(runs: Sequence[Run]) -> list[Row]:
    """Each sparse bar against the speed of its own machine with free copies: no baseline in it.

    Not reachable is what is above it even with the highest share that sparse kernels are said to
    reach; above our ceiling, what is above it with the chosen one alone. An eager load computes
    nothing on the host, so it is held to the bytes it reads.
    """
    rows = []
    for bar in bars():
        for name, published in bar.published.items():
            mine = [r for r in runs if (r.machine, r.model, BAR_OF.get(r.system)) == (
                    bar.machine, bar.name, name)]  # fmt: skip
            if not mine or refusal(bar):
                continue
            what = f"{bar.key}: {name}"
            if name == "Neuralink":
                bound = max(r.bound_tok_s for r in mine)
                rows.append(row(SOURCE, f"{what} against its bytes", published, bound, "tokens/s",
                                kind="audit", ceiling=bound, number=what,
                                why="the time that no run reading the same bytes can "
                                    "beat"))  # fmt: skip
                continue
            top = max(mine, key=lambda r: r.ceiling_tok_s)
            best = ceiling_tok_s(with_sparse_share(paper_machine(bar.machine), SPARSE_SHARES[1]),
                                 bar.shape, top.slots, top.evaluated)  # fmt: skip
            # Where nothing is left to the host the share changes nothing.
            best = max(best, top.ceiling_tok_s)
            beyond = published > best
            rows.append(
                row(SOURCE, f"{what} against free copies", published, top.ceiling_tok_s, "tokens/s",
                    kind="audit", number=what, ceiling=best if beyond else top.ceiling_tok_s,
                    ceiling_leans_on="" if beyond else "leans on the chosen sparse share 0.5; with "
                    f"{SPARSE_SHARES[1]:g}, the top of its range, it is {best:.2f}",
                    why=f"hits <= min(1, {top.slots} slots / {top.evaluated:.0f} evaluated) = "
                    f"{top.hit_ceiling:.0%}, copies free, what is left on the host; {top.assumed}")
            )  # fmt: skip
    return rows


def reachable_rows(runs: Sequence[Run]) -> list[Row]:
    """The largest Kairox / PowerInfer that hits <= slots / evaluated leave room for.

    The speed of the simulated PowerInfer divides it, so it forbids no published ratio.
    """
    rows = []
    for bar in bars():
        if refusal(bar):
            continue
        theirs = bar.published["PowerInfer"]
        published = bar.published["Kairox"] / theirs
        for reading in READINGS:
            base = at(runs, bar, reading, PERSISTENCES[0])
            best, which = max(
                (at(runs, bar, name, p).tok_s, f"{name} at persistence {p:g}")
                for name in KAIROX for p in PERSISTENCES
            )  # fmt: skip
            ceiling = base.ceiling_tok_s / base.tok_s
            rows.append(
                row(SOURCE, f"{bar.machine}, {bar.name}: largest Kairox / {reading}", published,
                    ceiling, "x", kind="audit", ceiling=ceiling,
                    ceiling_leans_on=f"divides by the simulated {reading}, "
                                     f"{base.tok_s / theirs:.1f} "
                    "times as fast as its bar", number=f"{bar.key}: Kairox / PowerInfer",
                    why=f"hits <= min(1, {base.slots} slots / {base.evaluated:.0f} evaluated) = "
                    f"{base.hit_ceiling:.0%}, {reading} has {base.hit_on_time:.0%}; with those "
                    f"hits and free copies {base.ceiling_tok_s:.1f} tokens/s, {reading} "
                    f"{base.tok_s:.1f}; best simulated {best / base.tok_s:.2f}x ({which}); the "
                    f"bars' own PowerInfer is at {bar.published['PowerInfer']:g} tokens/s")
            )  # fmt: skip
    return rows


def reach(absolute: Sequence[Row], ratios: Sequence[Row]) -> str:
    """Both counts, of published numbers and not of rows."""
    beyond = [r for r in absolute if r.verdict == "not reachable"]
    over = [r for r in absolute if r.verdict == "above our ceiling"]
    named = "; ".join(f"{r.number}, {r.published:g} > {r.simulated:.2f}" for r in over)
    above = {r.number for r in ratios if r.verdict == "above our ceiling"}
    every = {r.number for r in ratios if r.verdict == "above our ceiling"} - {
        r.number for r in ratios if r.verdict != "above our ceiling"
    }
    return (
        f"{len(beyond)} of {len(absolute)} absolute bars are not reachable, {len(over)} are above "
        f"our "
        f"ceiling ({named or 'none'}); of "
        f"{len({r.number for r in ratios})} published ratios {len(above)} are above our ceiling "
        f"under some reading of PowerInfer, {len(every)} under all three."
    )


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Fitted, predicted, then the orders."""
    fitted = fitted_rows()
    llama = {bar.key: item.simulated for bar, item in zip(bars(), fitted, strict=True)}
    by_key = {(bar.machine, bar.name): bar for bar in bars()}
    sparse = [run for run in runs if run.system != "llama.cpp"]
    return [
        *fitted,
        *refused_rows(),
        *(bar_row(by_key[run.machine.removesuffix(LESS), run.model], run) for run in sparse),
        *order_rows(runs, llama),
        *absolute_rows(runs),
        *reachable_rows(runs),
    ]


def notes(runs: Sequence[Run]) -> list[str]:
    """What holds for every row, and what the runs have in common."""
    known = constants()
    efficiency = ", ".join(f"{cpu} {value:g}" for cpu, value in known["dram_efficiency"].items())
    paper = [run for run in runs if run.system == "kairox-paper"]
    never = not any(run.loads_per_layer_step for run in paper)
    return [
        "Simulated on **synthetic** sets; published bars were read off a picture, +-5 %. One set "
        f"of constants: DRAM efficiency {efficiency} of the peak, VRAM margin "
        f"{known['vram_margin']['bytes'] / 1e9:g} GB, members of a group that follow one value "
        f"{known['co_activation']['prosparse-7b']:.3f} (all in fitted.toml, committed before any "
        "row but llama.cpp's was run).",
        "Keys and values for 1,024 tokens are reserved; tokens are timed at a context of 512. "
        "Groups are contiguous (`chunks`) of the artifact's size. Only ProSparse's predicted sets "
        "are published: the others' are assumed, and their rows say so. A few layers stand for "
        "all but for powerinfer-shipped, whose fault is which layer is which; systems that move "
        "neurons are timed over the second half of their tokens.",
        "A ratio above our ceiling is not impossible: the ceiling divides by the simulated "
        "PowerInfer, which is faster than its bar, once for each of three readings of it. Only an "
        "absolute bar above the free-copies speed of its own machine, with the highest sparse "
        "share "
        "that is said to be reached, is `not reachable`: "
        + reach(absolute_rows(runs), reachable_rows(runs)),
        "kairox-sparkinfer is kairox-released with a decay that adapts per layer from 0.67 instead "
        "of a swap cap: the code of the repository that the bars are from.",
        f"kairox-paper loads nothing in any of its {len(paper)} runs: with the CPU the slower side "
        "its law lowers the decay to 0.05, which raises the threshold 1 - decay to 0.95, and no "
        "group has so many active members when C(16) is 27.5 %. It stays the set it starts with, "
        "the groups of lowest index."
        if never
        else "",
    ]


def write(runs: Sequence[Run], folder: Path) -> Path:
    """The table."""
    _, page = write_tables(
        rows_of(runs), folder, STEM, "The early absolute bars of PC-Low and PC-High",
        {**source_hashes("bars", "paper"), **fitted_hash()}, [note for note in notes(runs) if note],
    )  # fmt: skip
    return page


def make(folder: Path, scale: Scale, say: Callable[[str], object]) -> Path:
    """Simulate, keep the runs, write the table."""
    todo = tasks(scale)
    runs = run_all(todo, lambda n: say(f"{STEM}: {n} of {len(todo)}"))
    write_runs(runs, folder / RUNS)
    return write(runs, folder)


def again(folder: Path) -> Path:
    """The table from the runs on disk."""
    return write(read_runs(folder / RUNS), folder)


if __name__ == "__main__":
    command_line(__doc__, STEM, again, make)

"""The guide's throughput, times and hit rates: which machine and which workload would give them.

    python -m experiments.published.guide_workloads -o experiments/results/published

Its model, LLaMA-2-13B in FP16, cannot be run sparse: ProSparse-13B has the same shape and is.
`guide_table` holds its numbers to one kind of sets on one machine; here they are held to pc1 and
pc2, with the margin and the groups of the paper's bars. Every system computes the sets that a
predictor says (22 % of the neurons, assumed as of ProSparse-7B) or just those that fire (11.2 %).

A hit rate needs a definition: resident before the layer-step planned, on the GPU when it computed,
or after a plan whose copies land at once, as the guide counts; of what fires, or of what is
resident. The grid says which density and persistence would give what the guide prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.published.data import number, source_hashes
from experiments.published.fit import EACH_WITHIN
from experiments.published.machines import fitted_hash, leans_on, margined
from experiments.published.runs import (
    PERSISTENCES,
    Run,
    Scale,
    Task,
    command_line,
    read_runs,
    run_all,
    write_runs,
)
from experiments.published.tables import Row, row, write_tables
from kairox_sim.hardware import Quantity

STEM = "guide_workloads"
TABLE_RUNS, GRID_RUNS = "guide_runs.csv", "guide_grid.csv"
SOURCE = "the Kairox Guide"
MODEL, GROUP = "prosparse-13b", 16
SETS = {"predicted": False, "true": True}
SYSTEMS = {
    "llama.cpp": ("llama.cpp",),
    "PowerInfer": ("powerinfer", "powerinfer-serial"),
    "Neuralink": ("neuralink-eager",),
    "Q-Infer": ("qinfer",),
    "Kairox": ("kairox-guide", "kairox-paper", "kairox-released"),
}
NO_MOVES = ("llama.cpp", "powerinfer", "powerinfer-serial")
DENSITIES = (0.05, 0.10, 0.112, 0.15, 0.20)
GRID_SLOTS = (None, 3000)  # what fits; the guide's runbook
GRID = {"kairox-guide": ("kairox_low", "kairox_high"), "lru": ("lru", "lru")}
POINTS = 3.0  # a single printed rate is met within


def tasks(scale: Scale = Scale()) -> list[Task]:  # noqa: B008
    """Both machines, both kinds of sets, each persistence."""
    moving = tuple(s for group in SYSTEMS.values() for s in group if s not in NO_MOVES)
    return [
        Task(
            machine=f"{machine}, {sets} sets", profile=margined(machine), model=MODEL, shape=MODEL,
            workload=MODEL, group_size=GROUP, persistence=persistence, true_sets=true,
            systems=(*(NO_MOVES if persistence == PERSISTENCES[0] else ()), *moving), scale=scale,
        )
        for machine in ("pc1", "pc2")
        for sets, true in SETS.items()
        for persistence in PERSISTENCES
    ]  # fmt: skip


def grid_tasks(scale: Scale = Scale()) -> list[Task]:  # noqa: B008
    """Policies alone: sets that fire, as many slots as fit or 3,000 on a device that holds them.

    The system's name carries the definition: `kairox-guide` in time, `kairox-guide instant`.
    """
    profile = margined("pc1")
    enough = Quantity(value=80e9, source="as much as 3,000 slots a layer need, which 12 GB are not")
    large = profile.model_copy(update={"vram_bytes": enough})
    base = Task(
        machine="pc1", profile=profile, model="", shape=MODEL, workload=MODEL, group_size=GROUP,
        persistence=0.0, true_sets=True, systems=tuple(GRID), scale=replace(scale, n_layers=2),
    )  # fmt: skip
    found = []
    for slots in GRID_SLOTS:
        for density in DENSITIES:
            for persistence in PERSISTENCES:
                for instant in (False, True):
                    found.append(
                        replace(
                            base,
                            profile=profile if slots is None else large,
                            slots=slots,
                            density=density,
                            persistence=persistence,
                            machine="after plan" if instant else "in time",
                            model=f"{density:g}",
                            overrides={"trigger": "instant"} if instant else {},
                        )
                    )
    return found


def table_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Tokens/s of each system; on pc2, for which the guide prints none, shown."""
    assumed = (
        "assumes the share that a predictor fires (measured on 7B, assumed for 13B); the share "
        "that "
        "fires does not exclude it unless a row of true sets says so (guide_audit, T5)"
    )
    for run in runs:
        name = next(k for k, group in SYSTEMS.items() if run.system in group)
        first = run.machine.startswith("pc1")
        at = "" if run.system in NO_MOVES else f", persistence {run.persistence:g}"
        yield row(
            SOURCE, f"throughput, {run.machine}: {run.system}{at}",
            number("guide", "throughput", name), run.tok_s, "tokens/s",
            kind="predicted" if first else "audit", within=EACH_WITHIN if first else None,
            ceiling=run.bound_tok_s if first else None,
            ceiling_leans_on="" if "true sets" in run.machine else assumed,
            number=f"throughput, {name}",
            why=f"{run.resource()}; {run.slots} slots for {run.evaluated:.0f} evaluated "
            + leans_on("sparse_share_pc1")
            + ("" if first else "; the guide's table is of pc1"),
        )  # fmt: skip


def breakdown_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Busy times per token; the guide adds what it says overlaps."""
    for run in runs:
        who = {"powerinfer": "powerinfer", "powerinfer-serial": "powerinfer"}.get(run.system)
        who = "kairox" if run.system in SYSTEMS["Kairox"] else who
        if who is None or not run.machine.startswith("pc1"):
            continue
        at = "" if run.system in NO_MOVES else f", persistence {run.persistence:g}"
        parts = [("gpu", run.gpu_s), ("cpu", run.cpu_busy_s), ("total", 1 / run.tok_s)]
        if who == "kairox":
            parts.append(("prefetch", run.swap_busy_s))
        for part, seconds in parts:
            yield row(SOURCE, f"time, {run.machine}: {run.system} {part}{at}",
                      number("guide", "time_breakdown", f"{who}_{part}"), seconds * 1e3, "ms",
                      kind="predicted", within=EACH_WITHIN, if_missed=run.resource())  # fmt: skip


def definitions(runs: Sequence[Run], system: str, slots: int, evaluated_of: str) -> dict[str, Run]:
    """The two runs of one cell: in time, and with copies that land at once."""
    return {
        run.machine: run for run in runs
        if (run.system, run.slots, run.model) == (system, slots, evaluated_of)
    }  # fmt: skip


def rates(in_time: Run, instant: Run) -> dict[str, float]:
    """Percent, by definition."""
    return {
        "resident before, of what fires": 100 * in_time.hit_resident,
        "on the GPU in time, of what fires": 100 * in_time.hit_on_time,
        "after a plan that lands at once, of what fires": 100 * instant.hit_on_time,
        "resident before, of what is resident": 100
        * in_time.hit_resident * in_time.evaluated / in_time.slots,
    }  # fmt: skip


def hit_rows(grid: Sequence[Run]) -> Iterator[Row]:
    """Under each definition: the most in the grid, and the cells that give what is printed."""
    for system, keys in GRID.items():
        low, high = (number("guide", "hit_rate", key) for key in keys)
        if low == high:
            low, high = low - POINTS, high + POINTS
        for slots in sorted({run.slots for run in grid}):
            cells: dict[str, list[tuple[float, str, float]]] = {}
            for density in DENSITIES:
                for persistence in PERSISTENCES:
                    mine = [r for r in grid if r.persistence == persistence]
                    pair = definitions(mine, system, slots, f"{density:g}")
                    known = rates(pair["in time"], pair["after plan"])
                    cell = f"{density:.1%} active, persistence {persistence:g}"
                    for name, rate in known.items():
                        most = 100 * pair["in time"].hit_ceiling
                        cells.setdefault(name, []).append((rate, cell, most))
            for name, found in cells.items():
                rate, cell, _ = max(found)
                inside = [c for r, c, _ in found if low <= r <= high]
                of_fires = name.endswith("fires")
                yield row(
                    SOURCE, f"hit rate, {system}, {slots} slots: {name}, the most of the grid",
                    number("guide", "hit_rate", keys[0]), rate, "%", kind="audit",
                    ceiling=max(m for _, _, m in found) if of_fires else None,
                    number=f"hit rate, {system}",
                    why=f"most at {cell}; {low:g} to {high:g} % at: "
                    f"{'; '.join(inside) or 'no cell'}. Lowest {min(found)[0]:.1f} %"
                    + ("" if slots < 3000 else "; so many slots do not fit into 12 GB"),
                )  # fmt: skip


def rows_of(runs: Sequence[Run], grid: Sequence[Run]) -> list[Row]:
    """Throughput, times, hits."""
    return [*table_rows(runs), *breakdown_rows(runs), *hit_rows(grid)]


def write(runs: Sequence[Run], grid: Sequence[Run], folder: Path) -> Path:
    """The table."""
    notes = [
        "Simulated on **synthetic** sets of ProSparse-13B, whose shape is that of the guide's "
        "LLaMA-2-13B. The ceiling of a throughput is the time that no run reading the same bytes "
        "can beat; of a hit rate, slots / active. "
        "The VRAM margin is that of fitted.toml, fitted on the paper's machines: one set of "
        "constants for all rows, here and in guide_audit and guide_table.",
    ]
    title = "The guide's tables under other workloads"
    _, page = write_tables(rows_of(runs, grid), folder, STEM, title,
                           {**source_hashes("guide"), **fitted_hash()}, notes)  # fmt: skip
    return page


def make(folder: Path, scale: Scale, say: Callable[[str], object]) -> Path:
    """Simulate, keep the runs, write the table."""
    todo, cells = tasks(scale), grid_tasks(scale)
    runs = run_all(todo, lambda n: say(f"{STEM}: {n} of {len(todo)}"))
    grid = run_all(cells, lambda n: say(f"{STEM}, hit rates: {n} of {len(cells)}"))
    write_runs(runs, folder / TABLE_RUNS)
    write_runs(grid, folder / GRID_RUNS)
    return write(runs, grid, folder)


def again(folder: Path) -> Path:
    """The table from the runs on disk."""
    return write(read_runs(folder / TABLE_RUNS), read_runs(folder / GRID_RUNS), folder)


if __name__ == "__main__":
    command_line(__doc__, STEM, again, make)

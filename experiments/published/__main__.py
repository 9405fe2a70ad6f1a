"""Every published number against the simulator, again: tables, figures, and a page that links them.

    python -m experiments.published [--only NAME] [-o experiments/results/published]

Constants come from fitted.toml, which this never writes (python -m experiments.published.fit does).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.published import (
    bars,
    copies,
    figures,
    fork_runs,
    fork_sweep,
    guide_audit,
    guide_listing,
    guide_table,
    guide_workloads,
    ratios,
)
from experiments.published.machines import constants
from experiments.published.runs import Scale, read_runs
from experiments.published.tables import ABOVE, markdown, numbers_above
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_folder

OUT = Path("experiments/results/published")
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Part:
    """One table: what it is of, and how it is made into a folder."""

    name: str
    about: str
    source: str  # file of the published values
    make: Callable[[Path, Scale, Say], object]
    figures: tuple[str, ...] = ()


def _main_of(module_main: Callable[[list[str]], None]) -> Callable[[Path, Scale, Say], object]:
    return lambda folder, scale, say: module_main(["-o", str(folder)])


PARTS = (
    Part("bars", "early absolute bars of PC-Low and PC-High, orders and what is reachable", "bars",
         bars.make, ("bars_pc_low", "bars_pc_high")),
    Part("ratios", "the paper's ratios and ablation", "paper", ratios.make,
         ("ratios_pc_low", "ratios_pc_high")),
    Part("copies", "what a copy costs: the paper's table 2, the fork's law and micro-benchmark",
         "paper", _main_of(copies.main), ("copies",)),
    Part("guide_table", "the guide's tables as its machine would run them: all systems incl. "
                        "PowerInfer as "
         "shipped, groups by frequency, predicted sets, policy-only hit rates by budget; audits "
         "only",
         "guide",
         _main_of(guide_table.main)),
    Part("guide_workloads", "the guide's tables under other assumptions: both machines, predicted "
                            "and true sets, "
         "groups of the paper's bars, hit rates by density and persistence; judged within 30 %",
         "guide",
         guide_workloads.make, ("guide_workloads",)),
    Part("guide_audit", "the guide, row by row", "guide", _main_of(guide_audit.main)),
    Part("guide_listing", "the ten lines of the guide's listing", "guide",
         _main_of(guide_listing.main)),
    Part("fork_sweep", "the fork's group sizes, cap, filter, budgets, static oracle", "fork",
         _main_of(fork_sweep.main), ("fork_sweep",)),
    Part("fork_runs", "the fork's RTX 3080 runs", "fork", fork_runs.make, ("fork_runs",)),
)  # fmt: skip


def counts(folder: Path, name: str) -> tuple[str, Counter[str]]:
    """(verdicts by kind as text, what rules where a predicted row misses) of a table on disk."""
    path = folder / f"{name}.csv"
    if not path.is_file():
        return "not made", Counter()
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    verdicts: Counter[tuple[str, str]] = Counter(
        (row.get("kind", ""), row["verdict"]) for row in rows if "verdict" in row
    )
    above = numbers_above((row["number"], row["verdict"]) for row in rows if "number" in row)
    said = ", ".join(
        f"{n} {f'{kind}: ' if kind else ''}{verdict}" for (kind, verdict), n in verdicts.items()
    )
    missed = [r for r in rows if r.get("kind") == "predicted" and r["verdict"] == "miss"]
    rules = (re.search(r"(\w[\w ]*) rules", row["why"]) for row in missed)
    causes = Counter("other" if found is None else found[1] for found in rules)
    return (said or f"{len(rows)} rows") + (f"; {above}" if above else ""), causes


def _said(folder: Path, name: str) -> list[dict[str, str]]:
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def swept(folder: Path) -> list[str]:
    """The fork's sweep in one sentence, where it was made."""
    rows = [(row["what"], row["why"]) for row in _said(folder, "fork_sweep")]
    return [f"fork_sweep: {fork_sweep.caveat(rows)}"] if rows else []


def reached(folder: Path) -> str:
    """How many of the early bars are above the free-copies speed of their machine."""
    ends = (" against free copies", " against its bytes")
    absolute = [r for r in _said(folder, "bars") if r["what"].endswith(ends)]
    said = []
    for verdict in ABOVE:
        found = [r for r in absolute if r["verdict"] == verdict]
        names = "; ".join(f"{r['number']}, {float(r['published']):g} tokens/s" for r in found)
        said.append(f"{len(found)} {verdict}" + (f" ({names})" if found else ""))
    return f" Of {len(absolute)} absolute bars: {', '.join(said)}." if absolute else ""


def regrets(folder: Path) -> list[str]:
    """What each system of the bars gives away: medians over models and persistences."""
    if not (folder / bars.RUNS).is_file():
        return []
    runs = pd.DataFrame([dataclasses.asdict(run) for run in read_runs(folder / bars.RUNS)])
    of = ["over_common_bound", "over_bound", "over_oracle"]
    medians = runs.groupby(["machine", "system"], sort=False)[of].median()
    rows = [
        [machine, system, *("-" if v != v else f"{v:.0%}" for v in row)]
        for (machine, system), row in zip(medians.index, medians.to_numpy(), strict=True)
    ]
    return [
        "Time of each system above three marks, medians over the runs of the bars (every run: "
        "bar_runs.csv, ratio_runs.csv, fork_3080_runs.csv): the bound of what every system must "
        "read, which holds for those that compute every active neuron; the bound of its own bytes; "
        "and the bypass oracle in its slots, which has the fewest misses and is not the fastest.",
        markdown(["machine", "system", "over the common bound", "over its own bound",
                  "over the oracle"], rows),
    ]  # fmt: skip


def index(folder: Path) -> Path:
    """README.md: the constants, every table with its verdicts, every figure."""
    known = constants()
    lines, pictures = [], []
    for part in PARTS:
        said, causes = counts(folder, part.name)
        misses = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
        link = f"[{part.name}]({part.name}.md), [CSV]({part.name}.csv)"
        lines.append([link, part.about, f"{part.source}.toml", said, misses or "-"])
        pictures += [f"![{stem}]({stem}.png)" for stem in part.figures
                     if (folder / f"{stem}.png").is_file()]  # fmt: skip
    efficiency = ", ".join(f"{cpu} {value:g}" for cpu, value in known["dram_efficiency"].items())
    llama = known["llama_cpp"]
    changes = known["changes"]
    text = [
        "# Published numbers against the simulator",
        "Made by `python -m experiments.published`; nothing here is written by hand. Activations "
        "are **synthetic** wherever no others are named. `fitted`: a constant was chosen on the "
        "row. `predicted`: none was. `audit`: shown, gates nothing. A miss says in its row which "
        "resource the simulated time goes to; the last column counts them.",
        f"Fitted (`experiments/published/fitted.toml`): DRAM efficiency {efficiency}; VRAM margin "
        f"{known['vram_margin']['bytes'] / 1e9:g} GB; on the ten llama.cpp bars alone (median "
        f"{llama['median_error']:.1%}, worst {llama['worst_error']:+.1%}); co-activation "
        f"{known['co_activation']['prosparse-7b']:.3f} on C(16) = "
        f"{known['co_activation']['published_percent']:g} % alone. "
        + (f"Changed since: {'; '.join(map(str, changes))}." if changes else "Not changed since."),
        "`not reachable`: an absolute number above the speed that free copies would allow with any "
        "sparse share that is said to be reached, or a hit "
        "rate above slots / active. `above our ceiling`: the ceiling itself divides by something "
        "simulated, or leans on a share that was chosen or assumed, and forbids nothing. Both are "
        "counted in "
        "published numbers, as several rows hold to one."
        + reached(folder),
        "Chosen, not fitted, and not independent of what they predict (`chosen` in fitted.toml):",
        markdown(["constant", "value", "public data it leans on", "rows"],
                 [[f"{name}: {c['where']}", c["value"], c["data"], c["rows"]]
                  for name, c in known["chosen"].items()]),
        *swept(folder),
        markdown(["table", "of", "published values", "rows by verdict", "why predicted rows miss"],
                 lines),
        *regrets(folder),
        "## Figures",
        *pictures,
    ]  # fmt: skip
    path = folder / "README.md"
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return path


def make_all(folder: Path, only: list[str], scale: Scale, say: Say) -> Path:
    """The parts asked for, figures of those that have any, and the page."""
    chosen = [part for part in PARTS if not only or part.name in only]
    for at, part in enumerate(chosen, 1):
        say(f"[{at}/{len(chosen)}] {part.name}: {part.about}")
        began = time.monotonic()
        part.make(folder, scale, say)
        for stem in figures.make(folder, part.figures):
            say(f"    {stem}.png")
        say(f"    {time.monotonic() - began:.0f} s")
    return index(folder)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="NAME",
                        help=", ".join(names))  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    folder = require_folder(given.out, "published tables")
    page = make_all(folder, given.only, Scale(), lambda said: sys.stderr.write(f"{said}\n"))
    sys.stdout.write(f"wrote {page}\n")


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"published: {error}")

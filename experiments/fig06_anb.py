"""Figure 6: ANB's threshold_scale and the busy times over steps, across domain shifts.

    python -m experiments.fig06_anb --make out/fig06_anb.parquet -o out/figures

--make runs the small sweep of fig06_anb.toml, chooses a setting, and writes its steps; what every
setting did goes beside it, as fig06_anb.settings.csv. Without it a table made before is drawn.
"""

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from experiments.figure import command_line
from kairox_sim.figure_data import Moves, controller_moves, controller_table
from kairox_sim.plots import plot_controller
from kairox_sim.simulation import simulate
from kairox_sim.sweeps import Sweep, expand
from kairox_sim.trace import Trace, read_trace

STEM = "fig06_anb"
SPEC = Path(__file__).with_suffix(".toml")
BOTH_WAYS = 0.05  # of the decode steps, each
draw = plot_controller


def chosen(moves: list[Moves]) -> int:
    """The first setting that moves both ways often enough, else the one that comes closest."""
    passing = [i for i, one in enumerate(moves) if one.both >= BOTH_WAYS]
    return passing[0] if passing else max(range(len(moves)), key=lambda i: (moves[i].both, -i))


def note(moves: list[Moves], at: int) -> str:
    """Why this setting."""
    n_passing = sum(one.both >= BOTH_WAYS for one in moves)
    if n_passing:
        return (
            f"Of {len(moves)} settings swept, {n_passing} move both ways after {BOTH_WAYS:.0%} of "
            "the decode steps each; this is the first of them."
        )
    seldom = "raised" if moves[at].raised < moves[at].lowered else "lowered"
    return (
        f"None of {len(moves)} settings swept moves both ways after {BOTH_WAYS:.0%} of the decode "
        f"steps each; this one comes closest, and is seldom {seldom} for the reason above."
    )


def make(table: Path, trace: Trace | None = None) -> None:
    """Simulate every setting, choose one, write its steps and what all of them did."""
    sweep = Sweep.load(SPEC)
    eval_trace = read_trace(sweep.trace, strict=True) if trace is None else trace
    runs = [
        simulate(eval_trace, cell.settings, hardware=cell.hardware, link=cell.link)
        for cell in expand(sweep)
    ]
    moves = [controller_moves(run.steps) for run in runs]
    at = chosen(moves)
    rows = [run.labels | asdict(one) for run, one in zip(runs, moves, strict=True)]
    pd.DataFrame(rows).to_csv(table.with_suffix(".settings.csv"), index=False)
    steps = controller_table(runs[at], eval_trace)
    steps.assign(note=note(moves, at)).to_parquet(table)


if __name__ == "__main__":
    command_line(__doc__, STEM, draw, make)

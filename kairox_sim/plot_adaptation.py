"""Figures of what adapts and what grows: a controller that never relaxes, a longer context.

Each reads a table that a script of experiments/ makes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kairox_sim.plot_failures import grid, handles_of, system_pens
from kairox_sim.plot_runs import BUSY, labels_of
from kairox_sim.plot_style import (
    BLACK,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILLION,
    footer,
    house_style,
    legend,
    new_figure,
)

MS = 1e3  # per second


# -- a controller that never relaxes ---------------------------------------------------------------

_SCALES = (("guide", "guide's listing", BLACK, "-"), ("prose", "guide's prose", PURPLE, "--"))
_LAYER_PENS = ((VERMILLION, "--"), (SKY, "-."), (GREEN, ":"))


def plot_ratchet(table: pd.DataFrame) -> Figure:
    """Busy times, the guide's threshold_scale and the paper's decay over phases of density."""
    runs = {str(name): part.reset_index(drop=True) for name, part in table.groupby("controlled")}
    guide, paper = runs["guide"], runs["paper"]
    x = guide["decode_step"]
    with house_style():
        figure, (times, scale, decay) = new_figure(3, height_in=5.2)
        for column, name, color, style in BUSY:
            times.plot(x, guide[column] * MS, color=color, ls=style, label=name)
        times.set_ylim(0, None)
        times.set_ylabel("busy time (ms)")
        for run, name, color, style in _SCALES:
            line = runs[run]["threshold_scale"]
            scale.step(x, line, where="mid", color=color, ls=style, label=name)
        scale.set_ylim(0, None)
        scale.set_ylabel("threshold_scale")
        decays = paper[[c for c in paper if str(c).startswith("decay_")]]
        decay.plot(x, decays.mean(axis=1), color=BLACK, label="mean of layers")
        layers = str(paper["shown_layers"].iloc[0]).split(",")
        for layer, (color, style) in zip(layers, _LAYER_PENS, strict=False):
            line = paper[f"decay_{layer}"]
            decay.step(x, line, where="mid", color=color, ls=style, label=f"layer {layer}")
        decay.set_ylim(0, 1)
        decay.set_ylabel("decay (paper)")
        decay.set_xlabel("decode step")
        _mark_phases([times, scale, decay], guide)
        for axes in (times, scale, decay):
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.8)
        footer(figure, labels_of(table), *_ratchet_notes(runs))
    return figure


def _mark_phases(panels: list[Axes], steps: pd.DataFrame) -> None:
    starts = np.flatnonzero(steps["density"].diff().to_numpy() != 0)
    for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
        part = steps.iloc[start:stop]
        slow = part["cpu_busy_s"].median() > part["gpu_busy_s"].median()
        for axes in panels:
            if start:
                axes.axvline(start - 0.5, color=GREY, lw=0.7, ls=(0, (4, 2)))
            axes.set_xlim(-0.5, len(steps) - 0.5)
        panels[0].annotate(
            f"{part['density'].iloc[0]:.0%} active:\nCPU {'slower' if slow else 'faster'}",
            ((start + stop) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=7,
            annotation_clip=False,
        )  # fmt: skip


def idle_steps(steps: pd.DataFrame) -> pd.Series:
    """Whether the guide's controller has no case for a step: T_cpu not largest, T_io <= T_gpu."""
    t_gpu, t_cpu, t_io = (steps[column] for column, *_ in BUSY)
    return (t_cpu <= np.maximum(t_gpu, t_io)) & (t_io <= t_gpu)


def _ratchet_notes(runs: dict[str, pd.DataFrame]) -> list[str]:
    guide = runs["guide"]
    idle = idle_steps(guide)
    moved = guide["threshold_scale"].diff().shift(-1)[idle]
    fast = guide["density"] == guide["density"].min()
    took_ms = {name: float(part.loc[fast.to_numpy(), "token_s"].mean()) * MS
               for name, part in runs.items()}  # fmt: skip
    waits = float(guide.loc[fast, "wait_cpu_s"].sum() / guide.loc[fast, "wall_s"].sum())
    return [
        f"In {int(idle.sum())} steps T_cpu is not the largest and T_io not above T_gpu: the "
        f"guide's controller has no case for them, and moved after {int((moved.abs() > 0).sum())}.",
        "Busy times are of the trace's layers, times a token of the model's. While the CPU is "
        f"faster: {took_ms['guide']:.1f} ms a token with the listing, "
        f"{took_ms['fixed']:.1f} with threshold_scale held at 1; the GPU waits for the CPU "
        f"{waits:.0%} of the time all the same, and that is what the paper's decay goes by.",
    ]


# -- a growing context -----------------------------------------------------------------------------


def plot_context(table: pd.DataFrame) -> Figure:
    """Tokens per second and the share of FFN neurons on the GPU, over the context."""
    ok = table[table["status"] == "ok"]
    models, drawn = list(dict.fromkeys(table["model"])), system_pens(table["system"])
    with house_style():
        figure, axes = grid(3, len(models), 5.4, sharex=True, sharey="row")
        for column, model in enumerate(models):
            ours = ok[ok["model"] == model]
            for system, line in ours.groupby("system", sort=False):
                pen = drawn[str(system)]
                axes[0, column].plot(line["context"], line["tok_s_scaled"], **pen)
                axes[1, column].plot(line["context"], 100 * line["resident_share"], **pen)
            axes[0, column].set_title(model, loc="left", pad=3)
            # The same of every system that runs attention on the GPU.
            attention = table[table["model"] == model].drop_duplicates("context")
            axes[2, column].plot(attention["context"], attention["attention_s"] * MS, color=BLACK)
            bottom, ticks = axes[-1, column], sorted(table["context"].unique())
            bottom.set_xlabel("context (tokens)")
            bottom.set_xscale("log", base=2)
            bottom.set_xticks(ticks, [f"{c:,}" for c in ticks], rotation=45)
            bottom.minorticks_off()
        names_of = ("tokens/s", "FFN neurons\non the GPU (%)", "attention on\nthe GPU (ms)")
        for axis, name in zip(axes[:, 0], names_of, strict=True):
            axis.set_ylim(0, None)
            axis.set_ylabel(name)
        legend(figure, handles_of(drawn), n_columns=4)
        footer(figure, labels_of(ok), *_context_notes(table))
    return figure


def _context_notes(table: pd.DataFrame) -> list[str]:
    notes = [
        "llama.cpp: dense, whole layers, of as many as the model has. The sparse systems have the "
        "same slots."
    ]
    for model, ours in table[table["status"] != "ok"].groupby("model", sort=False):
        which = f"{ours['system'].nunique()} sparse systems"
        notes.append(
            f"{model}: from {ours['context'].min():,} tokens on, {which} are refused: attention, "
            "head, predictor, KV cache and margin alone do not fit."
        )
    return notes

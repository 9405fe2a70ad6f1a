"""Figures: what is drawn is what the table says, nothing is cut off, the small print is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import same_color, to_rgb
from matplotlib.figure import Figure
from toys import random_trace

from kairox_sim import KairoxError, Settings, simulate, sweep
from kairox_sim.figure_data import (
    controller_moves,
    controller_table,
    momentum_table,
    pipeline_table,
)
from kairox_sim.plot_series import drawable, series_of
from kairox_sim.plot_style import (
    COLUMN_IN,
    POLICY_LOOKS,
    SYSTEM_LOOKS,
    look_of,
    look_of_system,
    new_figure,
)
from kairox_sim.plot_sweep import PARTS, time_parts
from kairox_sim.plot_validation import time_errors
from kairox_sim.plots import (
    plot_all,
    plot_budget,
    plot_controller,
    plot_hits_and_throughput,
    plot_momentum,
    plot_pipeline,
    plot_throughput,
    plot_time_split,
    plot_validation,
    read_figure_table,
    save,
)
from kairox_sim.policies import POLICIES
from kairox_sim.sweeps import Sweep
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import SequenceInfo, Trace, write_trace

BASE = {"model_as": "prosparse-7b", "prediction": "perfect", "hardware": "pc1", "slots": 24}
RULES = [
    {"policy": "tam"},
    {"policy": "tam", "controller": "anb"},
    {"policy": "lru"},
    {"policy": "lru", "trigger": "attn_out"},
    {"policy": "lru", "trigger": "serial"},
    {"policy": "static"},
    {"policy": "all"},
    {"policy": "none"},
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A real sweep of a small trace: two gatings, two links, two budgets."""
    folder = tmp_path_factory.mktemp("sweep")
    plan = Sweep(
        trace=str(write_trace(random_trace(n_decode=10), folder / "eval.arrow")),
        prior=str(write_trace(random_trace(seed=1, source="b"), folder / "prior.arrow")),
        base=BASE,
        grid={
            "gating": ["predicted", "exact"],
            "link": ["pcie3", "pcie5"],
            "slots": [16, 32],
            "rule": RULES,
        },
    )
    return sweep(plan)


def one(table: pd.DataFrame, gating: str = "predicted", link: str = "pcie3") -> pd.DataFrame:
    return table[(table["gating"] == gating) & (table["link"] == link)]


def texts(figure: Figure) -> str:
    from matplotlib.text import Text

    said = [t.get_text() for t in figure.findobj(Text)]
    return " ".join(" ".join(said).split())


def require_whole(figure: Figure) -> None:
    """Nothing drawn reaches past the edge of the page, a pixel's rounding apart."""
    FigureCanvasAgg(figure).draw()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    slack = 1.5 / figure.dpi
    assert min(box.x0, box.y0) >= -slack, box
    assert max(box.x1 - width, box.y1 - height) <= slack, (box, width, height)


def bar_heights(axes: Axes) -> list[float]:
    return sorted(bar.get_height() for bars in axes.containers for bar in bars)


# -- a sweep's table ----------------------------------------------------------------------------


def test_throughput_has_a_bar_per_setting_and_link_as_high_as_the_table_says(
    table: pd.DataFrame,
) -> None:
    figure = plot_throughput(table, slots=16)
    require_whole(figure)
    assert len(figure.axes) == 2
    for axes, gating in zip(figure.axes, ["predicted", "exact"], strict=True):
        rows = table[(table["gating"] == gating) & (table["slots"] == 16)]
        rows = rows[~rows["policy"].isin(["all", "none"])]
        assert len(rows) == 12
        assert bar_heights(axes) == pytest.approx(sorted(rows["tok_s_scaled"]))
        assert axes.get_ylim()[0] == 0
        bounds = table[(table["gating"] == gating) & table["policy"].isin(["all", "none"])]
        lines = sorted(line.get_ydata()[0] for line in axes.get_lines())
        assert lines[-1] == pytest.approx(bounds["tok_s_scaled"].max(), rel=0.01)
        assert lines[0] == pytest.approx(bounds["tok_s_scaled"].min(), rel=0.01)
    said = texts(figure)
    assert "Simulated, decode only, on pc1" in said
    assert "stand-in: toy activations, prosparse-7b costs" in said
    assert "perfect prediction" in said
    assert "16 slots per layer of 64" in said
    assert "all resident (does not fit)" in said
    assert "PCIe Gen3" in said


def test_throughput_says_how_far_apart_the_settings_are(table: pd.DataFrame) -> None:
    rows = one(table).copy()
    rows = rows[rows["policy"].isin(["all", "none"]) | (rows["label"] == "lru 16")]
    rows["tok_s_scaled"] = rows["policy"].map({"all": 30.0, "none": 10.0, "lru": 8.0})
    faster = rows.assign(link="pcie5", tok_s_scaled=rows["tok_s_scaled"] * 1.25)
    said = texts(plot_throughput(pd.concat([rows, faster])))
    # 10 / 8; 37.5 / 8; 37.5 / 10
    assert "best / worst 1.25x, with the bounds 4.69x, ceiling 3.75x" in said
    assert "Gen5 over Gen3 up to +25%" in said
    own = rows.assign(link="own", tok_s_scaled=1.0)  # a machine's own bus is of no generation
    assert "Gen5 over Gen3 up to +25%" in texts(plot_throughput(pd.concat([own, rows, faster])))
    alone = texts(plot_throughput(rows))  # one bus has no shades to tell apart
    assert "PCIe Gen3. Budget 16 slots" in alone
    assert "\nPCIe Gen3\n" not in f"\n{alone}\n"


def test_budget_never_shows_a_hit_rate_without_tokens_per_second(table: pd.DataFrame) -> None:
    rows = one(table)
    figure = plot_budget(rows)
    require_whole(figure)
    hits, speed = figure.axes
    assert hits.get_ylim() == (0, 1)
    assert speed.get_ylim()[0] == 0
    assert "slots per layer of 64" in speed.get_xlabel()
    swept = rows[~rows["policy"].isin(["all", "none"])]
    drawn = np.concatenate([line.get_ydata() for line in hits.get_lines()])
    wanted = np.concatenate([swept["hit_on_time"], swept["hit_resident"]])
    assert sorted(drawn) == pytest.approx(sorted(wanted))
    drawn = np.concatenate([line.get_ydata() for line in speed.get_lines() if line.get_marker()])
    assert set(np.round(swept["tok_s_scaled"], 9)) <= set(np.round(drawn, 9))
    assert {"hit_on_time", "hit_resident"} <= set(texts(figure).split())


def test_parts_of_the_time_add_up_to_the_time_per_token(table: pd.DataFrame) -> None:
    rows = drawable(table)
    parts = time_parts(rows)
    assert list(parts) == [column for column, *_ in PARTS]
    assert parts.sum(axis=1).to_numpy() == pytest.approx(1 / rows["tok_s_scaled"].to_numpy())
    assert (parts["predict_s"] > 0).any()
    serial = rows["trigger"] == "serial"
    assert (parts.loc[serial, "wait_io_s"] > 0).any()
    assert (parts.loc[~serial, "wait_io_s"] == 0).all()  # late neurons are the CPU's


def test_time_split_draws_the_parts_end_to_end(table: pd.DataFrame) -> None:
    rows = one(table)
    figure = plot_time_split(rows, slots=16)
    require_whole(figure)
    (axes,) = figure.axes
    ends: dict[float, float] = {}
    for bars in axes.containers:
        for bar in bars:
            y, end = bar.get_y(), bar.get_x() + bar.get_width()
            assert bar.get_x() == pytest.approx(ends.get(y, 0.0))
            ends[y] = end
    shown = rows[(rows["slots"] == 16) | rows["policy"].isin(["all", "none"])]
    assert sorted(ends.values()) == pytest.approx(sorted(1e3 / shown["tok_s_scaled"]))
    for name in ("GPU: prediction", "waiting for the CPU", "waiting for I/O"):
        assert name in texts(figure)


def test_time_split_says_what_a_table_cannot_tell_apart(table: pd.DataFrame) -> None:
    figure = plot_time_split(one(table).drop(columns="predict_s"))
    assert "Not told apart in this table: GPU: prediction" in texts(figure)


def test_rows_that_would_be_drawn_over_each_other_are_refused(table: pd.DataFrame) -> None:
    rows = one(table)
    other = rows.assign(swap_neurons=32)
    with pytest.raises(KairoxError, match=r"several rows for .* differ in swap_neurons"):
        plot_throughput(pd.concat([rows, other]))
    with pytest.raises(KairoxError, match="several gating"):
        plot_budget(table, link="pcie3")
    with pytest.raises(KairoxError, match="no link_name 'pcie9'; it has pcie3"):
        plot_budget(one(table), link="pcie9")
    with pytest.raises(KairoxError, match="no row has 99 slots; the table has 16, 32"):
        plot_throughput(rows, slots=99)


def test_seeds_are_one_bar_their_mean(table: pd.DataFrame) -> None:
    rows = one(table)
    other = rows.assign(seed=1, tok_s_scaled=rows["tok_s_scaled"] * 3)
    both = drawable(pd.concat([rows, other], ignore_index=True))
    assert len(both) == len(drawable(rows))
    assert sorted(both["tok_s_scaled"]) == pytest.approx(sorted(2 * rows["tok_s_scaled"]))


def test_refused_cells_are_counted_below_the_figure(table: pd.DataFrame) -> None:
    rows = one(table)
    refused = rows.head(2).assign(status="refused", why="no")
    assert "2 refused or failed cells" in texts(plot_throughput(pd.concat([rows, refused])))
    with pytest.raises(KairoxError, match="no row of the table has status ok"):
        plot_throughput(refused)


@pytest.mark.parametrize(
    ("row", "name", "variant"),
    [
        ({"policy": "tam"}, "TAM", 0),
        ({"policy": "tam", "trigger": "attn_out", "late": "cpu"}, "TAM", 0),  # its defaults
        ({"policy": "tam", "controller": "anb"}, "TAM + ANB", 1),
        ({"policy": "lru", "trigger": "attn_out"}, "LRU look-ahead", 2),
        ({"policy": "lru", "trigger": "serial", "late": "stall"}, "LRU serial", 2),
        ({"policy": "lfu", "late": "stall"}, "LFU (stall)", 3),
        ({"policy": "tam", "policy_params": json.dumps({"beta": 0.8})}, "TAM(beta 0.8)", 3),
        ({"policy": "static", "slots_asked": "density:64"}, "static (by density)", 3),
        ({"policy": "mine"}, "mine", 0),
    ],
)
def test_series_are_named_by_what_is_not_default(
    row: dict[str, Any], name: str, variant: int
) -> None:
    series = series_of(row)
    assert (series.name, series.variant) == (name, variant)


# -- one look -----------------------------------------------------------------------------------


def test_every_policy_has_its_own_colour_and_marker() -> None:
    looks = [*POLICY_LOOKS.values(), *SYSTEM_LOOKS.values()]
    assert set(POLICY_LOOKS) <= set(POLICIES)
    assert len({(look.color, look.marker) for look in looks}) == len(looks)
    assert look_of("mine") == look_of("mine")
    assert look_of("mine").color not in {look.color for look in looks}


def test_a_system_looks_like_its_policy_or_has_a_look_of_its_own() -> None:
    looks = {name: look_of_system(name, str(s.settings["policy"])) for name, s in SYSTEMS.items()}
    assert all(look.name == name for name, look in looks.items())
    assert set(SYSTEM_LOOKS) <= set(SYSTEMS)
    assert (looks["lru"].color, looks["lru"].marker) == (
        look_of("lru").color,
        look_of("lru").marker,
    )
    row = {"policy": "static", "system": "powerinfer", "slots_asked": "vram", "label": "powerinfer"}
    plain = series_of(row)
    assert (plain.name, plain.variant, plain.look) == ("powerinfer", 0, looks["powerinfer"])
    changed = series_of(row | {"label": "powerinfer late 64", "slots_asked": "64"})
    assert (changed.name, changed.variant) == ("powerinfer late", 3)


def luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_policies_can_be_seen_on_white() -> None:
    for look in [*POLICY_LOOKS.values(), *SYSTEM_LOOKS.values()]:
        assert 1.05 / (luminance(look.color) + 0.05) > 2.5, look.name


def test_a_policy_looks_the_same_in_bars_and_lines(table: pd.DataFrame) -> None:
    bars = plot_throughput(one(table), slots=16).axes[0].containers
    names = sorted(
        {s.name for s in drawable(one(table))["series"] if s.policy not in ("all", "none")}
    )
    assert len(bars) == len(names)
    faces = [bar.get_facecolor() for group in bars for bar in group]
    lines = [line.get_color() for line in plot_budget(one(table)).axes[0].get_lines()]
    for policy in ("tam", "lru", "static"):
        color = POLICY_LOOKS[policy].color
        assert any(same_color(face, color) for face in faces)
        assert any(same_color(line, color) for line in lines)


def test_a_png_has_300_dots_an_inch_and_the_same_bytes_each_time(
    tmp_path: Path, table: pd.DataFrame
) -> None:
    figure = plot_throughput(table)
    first = save(figure, tmp_path / "a", "f", ("png", "pdf", "svg"))
    again = save(plot_throughput(table), tmp_path / "b", "f", ("png", "pdf", "svg"))
    assert [p.name for p in first] == ["f.png", "f.pdf", "f.svg"]
    assert matplotlib.image.imread(first[0]).shape[1] == COLUMN_IN * 300
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]


def test_a_users_own_style_changes_nothing(tmp_path: Path, table: pd.DataFrame) -> None:
    plain = save(plot_throughput(table), tmp_path, "plain", ("png",))[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "hatch.linewidth": 9}):
        styled = save(plot_throughput(table), tmp_path, "styled", ("png",))[0].read_bytes()
    assert styled == plain
    assert new_figure(2, height_in=2)[0].get_figwidth() == COLUMN_IN


# -- single runs --------------------------------------------------------------------------------


def settings(**other: Any) -> Settings:
    base = {"model_as": "prosparse-7b", "prediction": "perfect", "gating": "predicted"}
    return Settings(**(base | {"slots": 24} | other))


@pytest.fixture(scope="module")
def pipeline() -> pd.DataFrame:
    trace = random_trace(n_layers=4, n_decode=8)
    runs = {
        trigger: simulate(trace, settings(policy="lru", slots=8, trigger=trigger), keep_slices=True)
        for trigger in ("serial", "attn_out")
    }
    return pipeline_table(runs, step=1, first_layer=1)


def test_pipeline_table_is_a_window_of_the_run(pipeline: pd.DataFrame) -> None:
    for panel, rows in pipeline.groupby("panel"):
        gpu = rows[rows["lane"] == "gpu"]
        attention = gpu[gpu["op"] == "attention"].set_index("layer")["began_s"]
        assert list(attention.index) == [1, 2]
        assert attention[1] == 0
        window_s = rows["window_s"].iloc[0]
        assert gpu.loc[(gpu["op"] == "ffn") & (gpu["layer"] == 2), "end_s"].iloc[0] <= window_s
        ahead = gpu[gpu["op"] == "predict"]["layer"].tolist()
        assert ahead == ([1, 2] if panel == "serial" else [2, 3])
        if panel == "serial":  # the FFN begins only when the layer's swaps have landed
            swaps = rows[(rows["op"] == "swap") & (rows["layer"] == 1)]
            ffn = gpu[(gpu["op"] == "ffn") & (gpu["layer"] == 1)]["began_s"].iloc[0]
            assert not swaps.empty
            assert swaps["end_s"].max() <= ffn
    windows = pipeline.groupby("panel")["window_s"].first()
    assert windows["attn_out"] < windows["serial"]


def test_pipeline_panels_share_one_time_axis(pipeline: pd.DataFrame) -> None:
    figure = plot_pipeline(pipeline)
    require_whole(figure)
    serial, live = figure.axes
    assert serial.get_xlim() == live.get_xlim()
    assert serial.get_xlim()[0] == 0
    assert serial.get_xlim()[1] >= 1e6 * pipeline["window_s"].max()
    for axes, (_, rows) in zip(figure.axes, pipeline.groupby("panel", sort=False), strict=True):
        window_us = 1e6 * rows["window_s"].iloc[0]
        assert axes.get_lines()[0].get_xdata()[0] == pytest.approx(window_us)
        assert f"{window_us:.0f} µs" in axes.get_title(loc="left")
        for bars in axes.containers:
            for bar in bars:
                assert bar.get_x() >= 0
                assert bar.get_x() + bar.get_width() <= window_us * (1 + 1e-9)
    said = texts(figure)
    assert "Simulated; stand-in: toy activations, prosparse-7b costs" in said
    assert "time from the first layer's attention (µs)" in said


def test_a_window_that_is_not_there_is_refused(pipeline: pd.DataFrame) -> None:
    trace = random_trace(n_decode=3)
    run = simulate(trace, settings(policy="lru"), keep_slices=True)
    with pytest.raises(KairoxError, match="no step 99; the run has steps 0 to 3"):
        pipeline_table({"p": run}, step=99, first_layer=0)
    with pytest.raises(KairoxError, match="layers 0 to 1"):
        pipeline_table({"p": run}, step=1, first_layer=1)
    with pytest.raises(KairoxError, match="kept no slices"):
        pipeline_table({"p": simulate(trace, settings())}, step=1, first_layer=0)


def test_momentum_is_the_policys_own() -> None:
    table = momentum_table({"one hit": [2], "sustained": range(2, 20)}, n_steps=50)
    hit, sustained = (table[table["neuron"] == name] for name in ("one hit", "sustained"))
    # One firing gives 1 - beta, then a tenth is lost a step.
    assert hit["momentum"].iloc[2:5].tolist() == pytest.approx([0.1, 0.09, 0.081], rel=1e-6)
    assert not hit["resident"].any()
    # n firings give 1 - 0.9^n: 0.344 after 4, 0.410 after 5, so promoted at the fifth.
    assert sustained["momentum"].iloc[6] == pytest.approx(1 - 0.9**5, rel=1e-6)
    assert sustained["resident"].tolist().index(True) == 6
    below = (sustained["momentum"] < 0.08) & (sustained["step"] >= 20)
    assert (sustained["resident"] == ((sustained["step"] >= 6) & ~below)).all()
    assert below.any()


def test_momentum_figure_shows_thresholds_and_residency() -> None:
    table = momentum_table({"one hit": [2], "sustained": range(2, 20)}, n_steps=50)
    figure = plot_momentum(table)
    require_whole(figure)
    axes, resident = figure.axes
    levels = {round(float(line.get_ydata()[0]), 6) for line in axes.get_lines()[-2:]}
    assert levels == {0.35, 0.08}
    (bar,) = [bar for bars in resident.containers for bar in bars]
    steps = table.loc[table["resident"], "step"]
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == (steps.min(), steps.max() + 1)
    many = momentum_table({str(i): [i] for i in range(5)}, n_steps=9)
    with pytest.raises(KairoxError, match="5 neurons"):
        plot_momentum(many)


def two_domains(n: int = 10) -> Trace:
    trace = random_trace(n_decode=2 * n, prefill=0)
    first, second = (
        SequenceInfo(seq, domain, f"{domain}.txt", domain[0] * 64, 0, n)
        for seq, domain in enumerate(["prose", "code"])
    )
    return Trace.from_arrays(
        _with_sequences(trace, (first, second)),
        seq=trace.step // n,
        step=trace.step,
        token=trace.token,
        layer=trace.layer,
        phase=trace.phase,
        bits=trace.bits,
    )


def _with_sequences(trace: Trace, sequences: tuple[SequenceInfo, ...]) -> Any:
    from dataclasses import replace

    return replace(trace.header, sequences=sequences)


def test_controller_figure_marks_where_the_text_changes() -> None:
    trace = two_domains()
    run = simulate(trace, settings(controller="anb"), hardware="pc1-rowcopies")
    table = controller_table(run, trace).assign(note="why this one")
    figure = plot_controller(table)
    require_whole(figure)
    scale, times = figure.axes
    assert scale.get_lines()[0].get_ydata() == pytest.approx(table["threshold_scale"].to_numpy())
    for axes in (scale, times):
        assert [line.get_xdata()[0] for line in axes.get_lines()].count(9.5) == 1
    said = texts(figure)
    for part in ("prose", "code", "T_gpu", "T_cpu", "T_io", "why this one", "pc1-rowcopies"):
        assert part in said


def test_moves_by_hand() -> None:
    steps = pd.DataFrame(
        {
            "phase": ["prefill", "decode", "decode", "decode", "decode", "decode"],
            "threshold_scale": [1.0, 0.9, 0.8, 0.85, 0.85, 0.85],
            "gpu_busy_s": [1.0, 1, 1, 1, 1, 1],
            "cpu_busy_s": [3.0, 3, 0, 0, 3, 0],
            "swap_busy_s": [0.0, 0, 2, 0, 0, 9],
        }
    )
    moves = controller_moves(steps)
    # Of the four decode steps with a next one: down, up, nothing, asked down at the lowest.
    assert (moves.lowered, moves.raised, moves.both) == (0.25, 0.25, 0.25)
    assert (moves.cpu_slowest, moves.io_over_gpu, moves.clamped_low) == (0.5, 0.25, 0.25)
    assert "lowered after 25.0%" in moves.in_words()
    with pytest.raises(KairoxError, match="no decode steps"):
        controller_moves(steps.head(1))


# -- live against simulated ---------------------------------------------------------------------


LONG = "tam(theta_evict=0.04, theta_promote=0.12) warm attn_out stall 320"


def validation() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "setting": ["none", "lru 24", LONG, "lru attn_out stall 24"],
            "live_tok_s": [8.0, 10.0, 12.5, 20.0],
            "live_spread": [0.02, 0.05, np.nan, 0.1],
            "simulated_tok_s": [8.0, 12.5, 10.0, 20.0],
            "null_constant_tok_s": [10.0] * 4,
            "null_linear_tok_s": [9.0, 10.0, 12.0, 15.0],
            "uses_lookahead_or_stall": [False, False, True, True],
            "time": ["emulated"] * 4,
        }
    )


def test_validation_figure_draws_every_model_and_says_its_error() -> None:
    rows = validation()
    assert time_errors(rows, "simulated_tok_s") == pytest.approx([0.0, -0.2, 0.25, 0.0])
    figure = plot_validation(rows, conditions="5 repeats")
    require_whole(figure)
    scatter, errors = figure.axes
    assert scatter.get_xlim() == scatter.get_ylim()
    points = {
        (float(x), float(y))
        for group in scatter.containers
        for x, y in zip(*group.lines[0].get_data(), strict=True)
    }
    for column in ("simulated_tok_s", "null_constant_tok_s", "null_linear_tok_s"):
        assert set(zip(rows["live_tok_s"], rows[column], strict=True)) <= points
    assert [t.get_text() for t in errors.texts] == list(rows["setting"])
    figure.draw_without_rendering()  # lays it out: a long name takes no room from the panels
    assert min(axes.get_position().width for axes in (scatter, errors)) > 0.7
    said = texts(figure)
    assert "simulated (10.0%)" in said  # the median of 0, 20, 25 and 0 %
    assert "constant (22.5%)" in said  # of 20, 0, 25 and 100 %
    assert "Live: emulated" in said
    assert "5 repeats" in said
    with pytest.raises(KairoxError, match="nothing to compare"):
        plot_validation(rows.assign(live_tok_s=np.nan))


# -- everything a table allows ------------------------------------------------------------------


def test_plot_all_draws_what_it_can_and_says_what_it_cannot(
    tmp_path: Path, table: pd.DataFrame
) -> None:
    rows = table[table["link"] == "pcie3"]
    path = tmp_path / "r.parquet"
    rows.to_parquet(path)
    skipped: dict[str, str] = {}
    drawn = plot_all(path, tmp_path / "out", formats=["png"], on_skip=skipped.__setitem__)
    assert sorted(p.name for p in drawn) == [
        "budget_pc1_exact_pcie3.png",
        "budget_pc1_predicted_pcie3.png",
        "throughput_pc1.png",
        "time_split_pc1_exact_pcie3.png",
        "time_split_pc1_predicted_pcie3.png",
    ]
    assert "needs two systems or more" in skipped.pop("systems")
    assert all(p.is_file() for p in drawn)
    assert set(skipped) == {"pipeline", "momentum", "controller", "validation"}
    assert skipped["validation"] == "the table lacks setting, live_tok_s, live_spread and 4 more"


def test_plot_all_of_one_budget_has_no_figure_against_budget(
    tmp_path: Path, table: pd.DataFrame
) -> None:
    rows = one(table)
    rows = rows[(rows["slots"] == 16) | rows["policy"].isin(["all", "none"])]
    skipped: dict[str, str] = {}
    drawn = plot_all(rows, tmp_path, formats=["svg"], slots=16, on_skip=skipped.__setitem__)
    assert [p.name for p in drawn] == ["throughput_pc1.svg", "time_split_pc1_predicted_pcie3.svg"]
    assert "two budgets or more" in skipped["budget_pc1_predicted"]


def test_a_link_that_the_table_does_not_have(tmp_path: Path, table: pd.DataFrame) -> None:
    with pytest.raises(KairoxError, match="no link 'pcie9'; it has "):
        plot_all(table, tmp_path, link="pcie9")
    assert list(tmp_path.iterdir()) == []


def test_plot_all_draws_what_was_chosen(tmp_path: Path, table: pd.DataFrame) -> None:
    skipped: dict[str, str] = {}
    chosen = {"hardware": "pc1", "link": "pcie5", "gating": "exact", "slots": 32}
    drawn = plot_all(table, tmp_path, formats=["svg"], on_skip=skipped.__setitem__, **chosen)
    assert [p.name for p in drawn] == [
        "throughput_pc1.svg",
        "budget_pc1_exact_pcie5.svg",
        "time_split_pc1_exact_pcie5.svg",
    ]
    said = " ".join(re.sub("<[^>]+>", " ", drawn[0].read_text(encoding="utf-8")).split())
    assert "32 slots per layer" in said
    with pytest.raises(KairoxError, match="no hardware 'pc9'; it has pc1"):
        plot_all(table, tmp_path, hardware="pc9")


def test_plot_all_reads_csv_and_refuses_what_is_no_table(tmp_path: Path) -> None:
    momentum_table({"a": [1]}, n_steps=5).to_csv(tmp_path / "m.csv", index=False)
    assert [p.name for p in plot_all(tmp_path / "m.csv", tmp_path)] == [
        "momentum.png",
        "momentum.pdf",
    ]
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(KairoxError, match=r"cannot read .*x\.parquet"):
        read_figure_table(tmp_path / "x.parquet")
    with pytest.raises(KairoxError, match=r"cannot read .*y\.parquet.*: no such file; "):
        read_figure_table(tmp_path / "y.parquet")
    with pytest.raises(KairoxError, match="no figure can be drawn"):
        plot_all(pd.DataFrame({"a": [1]}), tmp_path)


# -- what takes its own budget ------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """llama.cpp (dense, whole layers) beside a system that takes what fits and given budgets."""
    folder = tmp_path_factory.mktemp("mixed")
    plan = Sweep(
        trace=str(write_trace(random_trace(n_decode=4), folder / "eval.arrow")),
        prior=str(write_trace(random_trace(seed=1, source="b"), folder / "prior.arrow")),
        base=BASE,
        cells=[
            {"system": "llama.cpp", "slots": "ngl:1"},
            {"system": "powerinfer", "slots": "vram"},
            {"policy": "lru"},
            {"policy": "lfu", "slots": 16, "gating": "predicted"},
            {"policy": "tam", "slots": 32},
        ],
    )
    return sweep(plan)


def test_dense_rows_stand_in_every_panel_and_what_is_left_out_is_said(mixed: pd.DataFrame) -> None:
    figure = plot_throughput(mixed)
    require_whole(figure)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "tokens/s\ngating: predicted",
        "tokens/s\ngating: exact",
    ]
    speed = dict(zip(mixed["label"].str.split().str[0], mixed["tok_s_scaled"], strict=True))
    for axes, also in zip(figure.axes, ("powerinfer", "lru"), strict=True):
        wanted = sorted([speed["llama.cpp"], speed[also]])
        assert bar_heights(axes) == pytest.approx(wanted)
    said = texts(figure)
    assert "Budget 24 slots per layer; of its own: " in said
    (whole,) = mixed.loc[mixed["system"] == "llama.cpp", "slots"]
    assert f"llama.cpp ({whole:.4g})" in said
    assert "Not at this budget: LFU" in said
    assert said.count("TAM") == 1


def test_a_table_of_dense_rows_has_their_panel(mixed: pd.DataFrame) -> None:
    dense = mixed[mixed["gating"] == "dense"]
    (axes,) = plot_throughput(dense).axes
    assert axes.get_ylabel().endswith("gating: dense")
    assert len(bar_heights(axes)) == 1


def test_a_table_with_systems_has_their_figure(mixed: pd.DataFrame, tmp_path: Path) -> None:
    skipped: dict[str, str] = {}
    drawn = plot_all(mixed, tmp_path, formats=["svg"], slots=24, on_skip=skipped.__setitem__)
    names = {path.name for path in drawn}
    assert "systems_pc1_own.svg" in names
    assert "budget_pc1_exact_own.svg" in names  # although llama.cpp has one budget only
    assert "two budgets or more" in skipped["budget_pc1_dense"]
    several = pd.concat([mixed, mixed.assign(hardware="pc2", machine="pc2")])
    with pytest.raises(KairoxError, match="several machine_name: pc1, pc2; choose one"):
        plot_hits_and_throughput(several)
    figure = plot_hits_and_throughput(several, hardware="pc2")
    require_whole(figure)
    said = {text.get_text() for text in figure.axes[0].texts}
    assert {"powerinfer", "LRU", "LFU", "TAM"} <= said
    assert "slots per layer fit" in texts(figure)
    given = mixed[mixed["system"].isna()]
    assert "prosparse-7b costs: 32 slots per layer at most" in texts(
        plot_hits_and_throughput(given)
    )

"""Published bars: the fitted constants, rows and their verdicts, ceilings, the page of all."""

from __future__ import annotations

import dataclasses
from math import nan
from pathlib import Path

import pytest

from experiments.published import __main__ as everything
from experiments.published import bars, figures, fork_runs, guide_workloads, ratios
from experiments.published.data import SOURCES
from experiments.published.fit import CHOSEN, EACH_WITHIN, MEDIAN_WITHIN, refitted
from experiments.published.machines import bars as published_bars
from experiments.published.machines import constants, paper_machine, refusal
from experiments.published.runs import (
    Run,
    Scale,
    Task,
    ceiling_tok_s,
    read_runs,
    run_task,
    workload_of,
    write_runs,
)
from experiments.published.tables import numbers_above, row, write_tables
from kairox_sim.errors import KairoxError
from kairox_sim.workload_presets import find_workload

TOY = Run(
    machine="pc-low", model="bamboo-7b", system="kairox-paper", persistence=0.3, tok_s=29.0,
    hit_resident=0.5, hit_on_time=0.6, loads_per_layer_step=16.0, wasted_share=0.1,
    h2d_bytes=1e6, gpu_s=0.01, predict_s=0.001, wait_cpu_s=0.02, wait_io_s=0.004,
    wait_decide_s=0.0, cpu_busy_s=0.02, swap_busy_s=0.005, bound_tok_s=90.0, ceiling_tok_s=60.0,
    slots=5000, n_neurons=14336, evaluated=3860.0, assumed="groups chunks:16", over_bound=2.1,
    over_common_bound=3.0, over_oracle=0.4, oracle_tok_s=40.0,
)  # fmt: skip
BAR = {bar.key: bar for bar in published_bars()}
BAMBOO = BAR["bamboo-7b on pc-low"]


def task(persistence: float = 0.3, systems: tuple[str, ...] = ("powerinfer",)) -> Task:
    return Task(
        machine="pc-low", profile=paper_machine("pc-low"), model="prosparse-7b",
        shape="prosparse-7b", workload="prosparse-7b", group_size=16, persistence=persistence,
        systems=systems, scale=Scale(n_layers=2, n_tokens=12, n_static=8, n_prior=16),
    )  # fmt: skip


@pytest.mark.parametrize("key", ["bamboo-7b on pc-low", "prosparse-13b on pc-high"])
def test_the_fitted_constants_give_their_bars_again(key: str) -> None:
    said = constants()["llama_cpp"]["tokens_per_s"][key]
    assert refitted(BAR[key]) == pytest.approx(said, rel=1e-3)


def test_the_fit_is_as_good_as_it_must_be() -> None:
    known = constants()["llama_cpp"]["tokens_per_s"]
    errors = sorted(abs(known[k] / bar.published["llama.cpp"] - 1) for k, bar in BAR.items())
    assert len(errors) == 10
    assert (errors[4] + errors[5]) / 2 <= MEDIAN_WITHIN
    assert errors[-1] <= EACH_WITHIN


def test_co_activation_is_the_fit_to_c16() -> None:
    known = constants()["co_activation"]
    assert known["prosparse-7b"] == pytest.approx(find_workload("prosparse-7b").co_activation)
    assert known["c16_percent"] == pytest.approx(known["published_percent"])


def test_group_sizes_are_the_artifacts() -> None:
    sizes = {bar.name: bar.group_size for bar in published_bars()}
    assert sizes["prosparse-7b"] == 16
    assert (sizes["sparseqwen2-7b"], sizes["opt-13b"], sizes["opt-30b-q8"]) == (32, 20, 28)
    assert sizes["falcon-40b-q8"] == 32


def test_a_row_passes_within_thirty_percent_and_a_miss_names_what_rules() -> None:
    close = bars.bar_row(BAMBOO, TOY)  # 29.0 against 29.7
    assert (close.kind, close.verdict) == ("predicted", "pass")
    assert close.why.startswith("groups chunks:16 (leans on: sparse kernel share 0.5")
    far = bars.bar_row(BAMBOO, dataclasses.replace(TOY, tok_s=18.0))
    assert far.verdict == "miss"
    assert "waiting for the CPU rules" in far.why
    assert "-0.68 ms a layer" in far.why  # (1000 / 29.7 - 1000 / 18) / 32
    assert "groups chunks:16 (leans on: " in far.why


def test_what_has_no_bar_is_shown() -> None:
    shown = bars.bar_row(BAMBOO, dataclasses.replace(TOY, system="lru"))
    assert (shown.kind, shown.verdict) == ("audit", "shown")
    other = bars.bar_row(BAMBOO, dataclasses.replace(TOY, machine="pc-low" + bars.LESS))
    assert other.kind == "audit"


def test_pairs_are_told_apart_from_five_percent_on() -> None:
    published = {"a": 10.0, "b": 10.2, "c": 20.0, "d": 30.0}  # a and b tie: five pairs are left
    assert bars.pairs_of(published, published) == {"pass": 5}
    turned = {"a": 10.0, "b": 10.0, "c": 20.0, "d": 20.5}  # c and d tie
    assert bars.pairs_of(published, turned) == {"pass": 4, "tie": 1}
    assert bars.pairs_of({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}) == {"miss": 1}


def test_opt_13b_is_refused_with_the_arithmetic() -> None:
    refused = [bar.key for bar in published_bars() if refusal(bar)]
    assert refused == ["opt-13b on pc-low"]
    rows = bars.refused_rows()
    assert {row.verdict for row in rows} == {"miss"}
    assert len(rows) == 3
    assert all("does not fit on pc-low: attention 8.389 + " in row.why for row in rows)
    names = {t.machine for t in bars.tasks() if t.model == "opt-13b" and t.systems[1:]}
    assert names == {"pc-low" + bars.LESS, "pc-high"}


def test_no_static_run_is_above_its_ceiling_and_hits_are_bounded() -> None:
    (run,) = run_task(task())
    assert 0 < run.tok_s <= run.ceiling_tok_s <= run.bound_tok_s
    assert run.hit_on_time <= run.hit_ceiling
    few = dataclasses.replace(run, slots=100, evaluated=400.0)
    assert few.hit_ceiling == 0.25


def test_a_ceiling_rises_with_slots_until_all_that_is_evaluated_has_one() -> None:
    profile = paper_machine("pc-low")
    at = [ceiling_tok_s(profile, "prosparse-7b", slots, 2500) for slots in (0, 1000, 2500, 9000)]
    assert at[0] < at[1] < at[2] == at[3]


def test_predicted_sets_that_nobody_published_are_said_to_be_assumed() -> None:
    own, said = workload_of(task())
    assert said == "groups chunks:16"
    assert own.co_activation == constants()["co_activation"]["prosparse-7b"]
    bamboo = dataclasses.replace(task(), workload="bamboo-7b", shape="bamboo-7b")
    assumed, said = workload_of(bamboo)
    assert said.startswith("predicted sets assumed: 2.15 x active, recall 0.95")
    assert assumed.predicted is not None
    assert assumed.predicted.mean == pytest.approx(0.125 * 0.23 / 0.1068)
    true, said = workload_of(dataclasses.replace(task(), true_sets=True, density=0.05))
    assert true.predicted == true.active
    assert true.active.mean == 0.05
    assert "predicted = active" in said


def test_runs_come_back_from_disk(tmp_path: Path) -> None:
    runs = [TOY, dataclasses.replace(TOY, assumed="", model="0.1", wasted_share=nan)]
    back = read_runs(write_runs(runs, tmp_path / "new" / "runs.csv"))
    assert back[0] == TOY
    assert (back[1].assumed, back[1].model) == ("", "0.1")
    assert back[1].wasted_share != back[1].wasted_share
    with pytest.raises(KairoxError, match=r"there is no other\.csv"):
        read_runs(tmp_path / "other.csv")


def test_the_ablation_is_of_the_model_with_most_room() -> None:
    base = dataclasses.replace(TOY, system="powerinfer-serial", persistence=0.0)
    runs = [
        dataclasses.replace(
            base, machine=bar.machine, model=bar.name,
            tok_s=10.0 if bar.name in ("prosparse-7b", "falcon-40b-q8") else 50.0,
        )
        for bar in published_bars()
    ]  # fmt: skip
    assert ratios.ablated(runs, "pc-low").name == "prosparse-7b"
    assert ratios.ablated(runs, "pc-high").name == "falcon-40b-q8"


def test_a_ratio_above_our_ceiling_says_which_baseline_divides_it() -> None:
    """The toy's ceiling is 60; a PowerInfer of 50 leaves 1.2x, one of 20 leaves 3x; bars: 1.42x."""
    systems = {"powerinfer": 50.0, "powerinfer-serial": 50.0, "powerinfer-shipped": 20.0}
    systems |= dict.fromkeys(bars.KAIROX, 30.0)
    runs = [
        dataclasses.replace(TOY, machine=bar.machine, model=bar.name, system=system,
                            tok_s=tok_s, persistence=p)
        for bar in published_bars() for system, tok_s in systems.items()
        for p in bars.PERSISTENCES
    ]  # fmt: skip
    mine = [r for r in bars.reachable_rows(runs) if r.number.startswith("bamboo-7b on pc-low")]
    verdicts = [r.verdict for r in mine]
    assert verdicts == ["above our ceiling", "above our ceiling", "shown"]
    assert "divides by the simulated powerinfer, 2.4 times as fast as its bar" in mine[0].why
    assert {r.number for r in mine} == {"bamboo-7b on pc-low: Kairox / PowerInfer"}


@pytest.mark.parametrize(("ceiling", "verdict"), [(60.0, "shown"), (20.0, "above our ceiling")])
def test_an_absolute_bar_stands_against_free_copies(ceiling: float, verdict: str) -> None:
    (row,) = bars.absolute_rows([dataclasses.replace(TOY, ceiling_tok_s=ceiling)])
    assert row.published == 29.7
    assert row.verdict == verdict  # 5,000 slots hold all that is evaluated: no more than this


def test_what_no_sparse_share_reaches_is_not_reachable() -> None:
    """With one slot the host reads 3,860 x 24,576 B x 32 layers a token, whatever the share."""
    none = dataclasses.replace(TOY, slots=1, evaluated=14336.0, ceiling_tok_s=2.0)
    (row,) = bars.absolute_rows([none])
    assert row.verdict == "not reachable"
    assert "bars are not reachable" in bars.reach([row], [])


def test_published_numbers_are_counted_once() -> None:
    rows = [("a", "above our ceiling")] * 3 + [("b", "not reachable"), ("c", "miss")]
    assert numbers_above(rows) == (
        "published numbers not reachable: 1 (rows: 1), above our ceiling: 1 (rows: 3)"
    )


def test_what_was_chosen_is_in_the_file_and_named_on_the_page(tmp_path: Path) -> None:
    assert constants()["chosen"] == CHOSEN
    text = everything.index(tmp_path).read_text()
    assert all(f"{name}: " in text for name in CHOSEN)


def test_a_missing_run_is_named() -> None:
    with pytest.raises(KairoxError, match="no run of lru for bamboo-7b on pc-low at persistence"):
        bars.at([TOY], BAMBOO, "lru", 0.3)


def test_hit_definitions_by_hand() -> None:
    """Half of 3,860 evaluated were resident in 5,000 slots: 38.6 % of what is resident fired."""
    known = guide_workloads.rates(TOY, dataclasses.replace(TOY, hit_on_time=0.9))
    assert [round(v, 1) for v in known.values()] == [50.0, 60.0, 90.0, 38.6]


def test_the_forks_loads_are_not_its_bytes() -> None:
    rows = list(fork_runs.byte_rows())
    assert len(rows) == 5
    prosparse = next(row for row in rows if "prosparse-7b" in row.what)
    assert prosparse.simulated == pytest.approx(205 * 32 * 24576 / 1e6)  # F16, three rows of 4,096
    assert prosparse.published == 82.1


def test_the_page_lists_every_part_and_what_came_out(tmp_path: Path) -> None:
    rows = [bars.bar_row(BAMBOO, TOY), bars.bar_row(BAMBOO, dataclasses.replace(TOY, tok_s=9.0))]
    write_tables(rows, tmp_path, "bars", "toy", {})
    text = everything.index(tmp_path).read_text()
    for part in everything.PARTS:
        assert f"[{part.name}]({part.name}.md)" in text
        assert part.source in SOURCES
    assert {"guide", "paper", "bars", "fork"} == {part.source for part in everything.PARTS}
    assert "1 predicted: pass, 1 predicted: miss" in text
    assert "1 waiting for the CPU" in text
    assert text.count("not made") == len(everything.PARTS) - 1


def test_only_some_parts_can_be_made(tmp_path: Path) -> None:
    said: list[str] = []
    page = everything.make_all(tmp_path, ["guide_listing"], Scale(), said.append)
    assert (tmp_path / "guide_listing.md").is_file()
    assert page.is_file()
    assert [line for line in said if line.startswith("[1/1] guide_listing")]
    with pytest.raises(SystemExit):
        everything.main(["--only", "nothing"])


def test_figures_are_drawn_from_tables_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(KairoxError, match=r"there is no copies\.csv to draw"):
        figures.make(tmp_path, ["copies"])
    rows = [
        row("x", "queued copies of 4,352 B", 0.91, 0.7, "GB/s", kind="predicted"),
        row("x", "68 KB, synchronised every 4", 14.6, 17.4, "us", kind="predicted"),
        row("x", "1,024 scattered rows, one by one", 12.3, 6.3, "ms", kind="predicted"),
    ]
    write_tables(rows, tmp_path, "copies", "toy", {})
    assert figures.make(tmp_path, ["copies"]) == ["copies"]
    assert (tmp_path / "copies.png").is_file()


def test_every_part_with_runs_has_its_figures() -> None:
    assert {stem for part in everything.PARTS for stem in part.figures} == set(figures.STEMS)


def test_the_index_says_how_far_each_system_is_from_what_cannot_be_beaten(tmp_path: Path) -> None:
    assert everything.regrets(tmp_path) == []
    runs = [TOY, dataclasses.replace(TOY, over_bound=4.1, over_oracle=nan)]
    write_runs(runs, tmp_path / "bar_runs.csv")
    said, table = everything.regrets(tmp_path)
    assert "fewest misses" in said
    assert "| pc-low | kairox-paper | 300% | 310% | 40% |" in table

"""Published numbers: well-formed data, verdicts by their rule, tables that are made."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from experiments.published import copies, guide_listing
from experiments.published.data import SOURCES, everything, number, read, table
from experiments.published.tables import (
    Row,
    claim,
    markdown,
    order,
    relative,
    row,
    shown,
    tally,
    write_tables,
)
from kairox_sim.errors import KairoxError

EVIDENCE = {
    "text", "code", "figure", "read off a figure, +-5 %", "third-party measurement", "fit",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_number_says_where_it_is_from(source: str) -> None:
    tables = {name: part for name, part in read(source).items() if isinstance(part, dict)}
    assert tables
    for name, part in tables.items():
        assert set(part) == {"unit", "where", "evidence", "values"}, name
        assert part["unit"], name
        assert len(part["where"]) > 8, name
        assert part["evidence"] in EVIDENCE, name
        assert part["values"], name


def test_series_of_one_table_have_one_length() -> None:
    for source, name in (("fork", "sweep"), ("fork", "tau"), ("fork", "granularity"),
                         ("fork", "cap"), ("guide", "printed_demo"), ("bars", "pc_low"),
                         ("bars", "pc_high"), ("paper", "ablation")):  # fmt: skip
        assert len({len(series) for series in table(source, name).values()}) == 1, name


def test_the_forks_rows_agree_with_each_other() -> None:
    """Three copies a group, 13,056 bytes a neuron in Q8_0: what the fork derived from its loads."""
    sweep = table("fork", "sweep")
    for size, loads, n_copies, gigabytes in zip(
        sweep["group_size"], sweep["loads"], sweep["copies"], sweep["gigabytes"], strict=True
    ):
        assert n_copies == 3 * loads / size
        assert gigabytes == pytest.approx(loads * 3 * 4352 / 1e9, abs=0.006)


def test_everything_lists_every_value() -> None:
    rows = everything()
    assert len(rows) > 200
    assert any(r.name == "throughput.Kairox" and r.value == 31.97 for r in rows)
    assert {r.source for r in rows} == {read(source)["source"] for source in SOURCES}


def test_a_wrong_name_is_one_message() -> None:
    with pytest.raises(KairoxError, match="no table 'nope'"):
        table("guide", "nope")
    with pytest.raises(KairoxError, match="no 'nope'; it has: llama"):
        number("guide", "throughput", "nope")
    with pytest.raises(KairoxError, match="not a single number"):
        number("fork", "sweep", "copies")
    with pytest.raises(KairoxError, match="no published source"):
        read("seed")


def test_verdicts_follow_the_rule() -> None:
    def judged(published: float, simulated: float, unit: str = "x", **more: float) -> Row:
        return row("s", "w", published, simulated, unit, kind="predicted", **more)

    assert judged(10, 11, within=0.1).verdict == "pass"
    assert judged(10, 11.2, within=0.1).verdict == "miss"
    assert judged(10, 11.2, within=0.1).why  # a miss always says why
    assert judged(60, 69, "%", within=10).verdict == "pass"  # points, not a share of 60
    assert judged(60, 71, "%", within=10).error == pytest.approx(11)
    assert judged(10, 9, within=0.5, ceiling=9.5).verdict == "not reachable"
    leaning = judged(10, 9, within=0.5, ceiling=9.5, ceiling_leans_on="divides by x")
    assert leaning.verdict == "above our ceiling"
    assert "our ceiling 9.5" in leaning.why
    assert "divides by x" in leaning.why
    assert "9.5" in judged(10, 9, within=0.5, ceiling=9.5).why
    assert judged(10, 99).verdict == "shown"
    assert judged(10, nan, within=0.1).verdict == "miss"  # unknown never passes
    assert row("s", "w", 1, 2, "x", kind="audit", within=9).verdict == "shown"
    assert claim("s", "w", False, kind="predicted", why="it is not").verdict == "miss"
    assert claim("s", "w", False, kind="audit", why="").verdict == "shown"
    with pytest.raises(KairoxError, match="gates nothing"):
        Row(source="s", what="w", published=1, simulated=1, unit="x", error=0, kind="audit",
            verdict="pass")  # fmt: skip
    with pytest.raises(KairoxError, match="says why"):
        Row(source="s", what="w", published=1, simulated=2, unit="x", error=1, kind="predicted",
            verdict="miss")  # fmt: skip


def test_closer_than_five_percent_is_a_tie() -> None:
    assert order(10, 10.4) == "tie"
    assert order(10, 11) == "pass"
    assert order(11, 10) == "miss"


def test_relative_of_nothing_is_unknown() -> None:
    assert math.isnan(relative(0, 3))
    assert shown(nan) == "-"
    assert [shown(x) for x in (1000.0, 0.1234567, 1234.5)] == ["1,000", "0.1235", "1,234"]


def test_tables_carry_where_they_came_from(tmp_path: Path) -> None:
    rows = [
        row("fork", "a|b", 2.0, 2.1, "x", kind="fitted", within=0.1),
        row("fork", "c", 2.0, 3.0, "x", kind="predicted", within=0.1, if_missed="measured"),
    ]
    made, page = write_tables(rows, tmp_path / "new", "t", "Title", {"fork.toml": "ab" * 32})
    text = page.read_text(encoding="utf-8")
    assert "a\\|b" in text
    assert "git_commit" in text
    assert "fork.toml abababababab" in text
    assert "fitted: 1 pass; predicted: 1 miss." in text
    with made.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["verdict"] for line in lines] == ["pass", "miss"]
    assert lines[1]["why"] == "measured"
    assert lines[0]["git_commit"]
    assert "ab" * 32 in lines[0]["inputs_sha256"]
    assert tally(rows).endswith(".")
    assert markdown(["h"], [["x"]]).splitlines()[1] == "| --- |"


def test_the_copy_law_of_the_fork_from_its_own_rows() -> None:
    law = copies.published_law()
    assert law.base_s == pytest.approx(16.330, rel=0.10)
    assert law.per_copy_s == pytest.approx(16.86e-6, rel=0.10)
    assert law.r_squared == pytest.approx(0.998, abs=0.002)
    # Group size 1 by hand: 4,807,623 copies x 16.86 us = 81.06 s of 97.7.
    assert law.per_copy_s * 4_807_623 == pytest.approx(81.06, rel=0.10)
    shuffled = table("fork", "sweep")["copies"][::-1]
    assert (
        copies.copy_law(shuffled, [1, 2, 4, 3, 5, 7, 6], [9, 8, 7, 6, 5, 4, 3]).base_s != law.base_s
    )


def test_a_copy_of_our_link_by_hand() -> None:
    link = copies.load_link("pcie4").h2d
    # 6 us + 34.2 us / 4 + 69,632 B / 24.5 GB/s = 6 + 8.55 + 2.842 us
    assert copies.copy_s(link, 69_632, 4) == pytest.approx(17.392e-6, rel=1e-3)
    assert copies.copy_s(link, 69_632) == pytest.approx(8.842e-6, rel=1e-3)
    # two points on 2 us + b / 10 GB/s give the line back
    points = [(n, n / (2e-6 + n / 1e10)) for n in (1e4, 1e6)]
    assert copies.implied_link(points[0], points[1]) == pytest.approx((2e-6, 1e10))


def test_the_copies_table_has_hits_and_misses() -> None:
    rows = copies.rows()
    verdicts = [(r.kind, r.verdict) for r in rows]
    assert ("predicted", "pass") in verdicts
    assert ("predicted", "miss") in verdicts  # table 2's single neurons: 1.1 to 1.8 us a copy
    law = next(r for r in rows if "synchronised every 4" in r.what and r.source == "fork, copy law")
    assert law.verdict == "pass"


def test_the_guides_ten_lines() -> None:
    lines = guide_listing.replay(guide_listing.demo_case())
    assert [round(x.hit_percent, 1) for x in lines] == [0.0] * 3 + [83.3] * 7
    assert [round(x.before_percent, 1) for x in lines] == [0.0] * 4 + [83.3] * 6
    assert [x.promoted for x in lines] == [0, 0, 0, 600, 0, 0, 0, 0, 0, 0]
    assert [f"{x.t_cpu_ms:.2f}" for x in lines] == ["10.80"] * 3 + ["1.80"] * 7
    assert [f"{x.t_io_ms:.2f}" for x in lines] == ["0.00"] * 3 + ["1.08"] + ["0.00"] * 6
    assert [f"{x.modifier:.3f}" for x in lines] == ["0.989", "0.979"] + ["0.968"] * 8
    assert {r.verdict for r in guide_listing.rows(lines)} == {"pass"}
    assert lines[3].text().endswith("resident before:  0.0 %")


def test_the_guides_constants_are_exact_per_neuron() -> None:
    costs = guide_listing.demo_costs(4, 4096)
    assert costs.bundle_bytes == 30_720
    for n in (1, 120, 600):
        assert costs.ffn_cpu_s(n, 1) == pytest.approx(15e-6 * n, rel=1e-12)
        assert costs.swap_s(n) == pytest.approx(1.8e-6 * n, rel=1e-12)
        assert costs.ffn_gpu_s(n, 1) == pytest.approx(0.8e-6 * n, rel=1e-12)
    assert costs.head_s(1) == pytest.approx(8.5e-3, rel=1e-7)


def test_one_changed_line_is_a_miss() -> None:
    lines = guide_listing.replay(guide_listing.demo_case())
    wrong = [*lines[:3], replace(lines[4], step=4), *lines[4:]]  # as if promoted before
    assert any(r.verdict == "miss" for r in guide_listing.rows(wrong))


@pytest.mark.parametrize("script", [copies, guide_listing])
def test_a_script_writes_its_table(script: object, tmp_path: Path) -> None:
    script.main(["-o", str(tmp_path)])  # type: ignore[attr-defined]
    stem = script.STEM  # type: ignore[attr-defined]
    assert (tmp_path / f"{stem}.csv").is_file()
    assert "verdict" in (tmp_path / f"{stem}.md").read_text(encoding="utf-8")

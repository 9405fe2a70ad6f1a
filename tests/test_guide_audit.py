"""The audit of the guide: every row there, its numbers recomputed by hand, its verdict by rule."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import get_args

import pytest

from experiments.published import audit_rules, guide_audit, guide_runs, guide_table
from experiments.published.audit_basis import AuditRow, Basis, Verdict
from experiments.published.audit_simulated import (
    SYSTEM_ROWS,
    filled_by_noise,
    simulated,
)


@pytest.fixture(scope="module")
def rows() -> dict[str, AuditRow]:
    made = guide_audit.all_rows(Basis())
    assert len({row.item for row in made}) == len(made)
    return {row.item: row for row in made}


def test_all_thirty_items_and_the_table(rows: dict[str, AuditRow]) -> None:
    assert set(rows) == {str(n) for n in range(1, 31)} | {f"T{n}" for n in range(1, 9)}
    for row in rows.values():
        assert row.verdict in get_args(Verdict)
        assert row.numbers, row.item  # arithmetic, not opinion
        assert min(len(row.subject), len(row.says), len(row.own), len(row.roofline)) > 3, row.item


# item, number, the value worked out by hand, relative tolerance
BY_HAND = [
    ("1", "ratio", 13.27, 1e-3),  # 31.97 / 2.41
    ("1", "forth", 18.24, 1e-3),  # 7.57 x 2.41
    ("2", "neuralink", 6.42, 1e-3),  # 31.97 / 4.98
    ("3", "overlapped_tokens_per_s", 36.36, 1e-3),  # 1000 / 27.5
    ("4", "residual", 253.3, 1e-3),  # 3.8 ms / 15 us
    ("4", "hit", 1 - 253.3 / 61_932, 1e-4),  # 40 x 13,824 x 0.112 = 61,932 active
    ("4", "powerinfer_per_layer", 163.3, 1e-3),  # 98 ms / 15 us / 40
    ("5", "us_said", 53.33, 1e-3),  # 80 ms / 1,500
    ("5", "us_roofline", 0.4518, 1e-3),  # 30,720 B / 68 GB/s
    ("5", "slower", 33.2, 1e-3),
    ("6", "t_gpu_ms", 53.09, 1e-3),  # 8.5 + 0.0008 x 0.9 x 61,932
    ("6", "t_cpu_ms", 92.9, 1e-3),  # 0.015 x 0.1 x 61,932
    ("7", "mb_prosparse-13b", 30.72, 1e-6),  # 3 x 5,120 x 2 B x 1,000
    ("7", "mb_opt-6.7b", 16.384, 1e-6),  # 2 x 4,096 x 2 B x 1,000
    ("7", "ms_13b", 1.28, 1e-3),  # 30.72 MB / 24 GB/s
    ("8", "gb_low", 2.4576, 1e-6),  # 40 x 2,000 x 30,720 B
    ("8", "q4_high", 1.3824, 1e-6),  # 40 x 4,000 x 3 x 5,120 x 18 / 32 B
    ("9", "per_layer", 273.4, 1e-3),  # 14 ms x 24 GB/s / 30,720 B / 40
    ("10", "model_gb", 26.03, 1e-3),  # 8.389 + 16.987 + 2 x 0.3277 GB
    ("17", "bits", 3.556, 1e-3),
    ("21", "prose", 0.115, 1e-9),  # 0.05 x 2.3 ms
    ("21", "code", 0.05 * 2.3 / 10.8, 1e-6),
    ("21", "steps", 13, 1e-9),  # 0.6 / 0.05, the last one by the epsilon of its denominator
    ("24", "plain", 5, 0),  # 1 - 0.9^4 = 0.3439, 1 - 0.9^5 = 0.4095
    ("24", "demo", 4, 0),
    ("24", "paper", 2, 0),  # 0.33, then 0.33 x 0.67 + 0.33 = 0.551
    ("25", "silent_tokens", 14.0, 1e-2),  # log(0.08 / 0.35) / log(0.9)
    ("28", "baked", 150 / 180, 1e-9),
    ("28", "changes", 0, 0),
    ("27", "added", 0.1, 1e-6),
    ("T7", "attention_of_peak", 0.9242, 1e-3),  # 40 x 4 x 5,120^2 x 2 B / 18 ms / 504.2 GB/s
]


@pytest.mark.parametrize(("item", "name", "value", "rel"), BY_HAND)
def test_a_number_by_hand(
    rows: dict[str, AuditRow], item: str, name: str, value: float, rel: float
) -> None:
    assert rows[item].numbers[name] == pytest.approx(value, rel=rel or 1e-12)


def test_slots_in_twelve_gib_by_hand() -> None:
    """12 GiB - 1.45 GB margin - attention - head - predictor - keys and values, over a neuron."""
    machine = Basis().pc1
    left = 12 * 2**30 - 1.45e9 - 40 * 4 * 5120**2 * 2 - 32000 * 5120 * 2
    left -= 40 * machine.shape.predictor_rank * (5120 + 13824) * 2  # type: ignore[operator]
    left -= 40 * 2 * 5120 * 2 * 1024
    assert machine.slots == int(left / (40 * 30_720))
    assert 200 < machine.slots < 300
    assert Basis().pc1_unfitted.slots > machine.slots


def test_rooflines_of_the_first_machine_by_hand() -> None:
    machine, basis = Basis().pc1, Basis()
    assert machine.shape.neuron_bytes == 30_720
    assert machine.ffn_bytes(basis.true_share) == pytest.approx(40 * 13824 * 0.112 * 30_720)
    dense = 8.389e9 + 0.328e9 + 40 * machine.shape.predictor_bytes + 0.419e9
    assert machine.floor_s == pytest.approx(dense / 443.7e9, rel=2e-3)
    missing = machine.ffn_bytes(basis.predicted_share) - machine.cached_bytes
    assert machine.any_policy_s(basis.predicted_share) == pytest.approx(missing / 68e9)
    for share in (basis.true_share, basis.guide_share, basis.predicted_share):
        assert machine.any_policy_s(share) <= machine.static_s(share) <= machine.eager_s(share)


def test_the_flagship_row_is_short_of_bytes(rows: dict[str, AuditRow]) -> None:
    row = rows["T6"]
    # slots x 40 x 30,720 B + 14 ms x 24 GB/s + 3.8 ms x 68 GB/s against 1.90 GB
    have = Basis().pc1.slots * 40 * 30_720 + 0.336e9 + 0.2584e9
    assert row.numbers["have"] == pytest.approx(have)
    assert row.numbers["need_least"] == pytest.approx(1.9026e9, rel=1e-3)
    assert row.verdict == "impossible by byte conservation"
    assert rows["T5"].verdict == "depends on the share evaluated"
    assert (
        rows["T5"].numbers["true_tokens_per_s"]
        > 31.97
        > rows["T5"].numbers["predicted_tokens_per_s"]
    )


def test_verdicts_are_not_one_and_the_same(rows: dict[str, AuditRow]) -> None:
    found = {row.verdict for row in rows.values()}
    assert found == set(get_args(Verdict))
    assert rows["T2"].verdict == "plausible"
    assert rows["9"].verdict == "plausible"
    assert rows["27"].verdict == "follows"


def test_a_roomier_machine_turns_the_verdict() -> None:
    """The verdicts are computed: with 64 GiB of device memory 3,000 slots fit."""
    basis = Basis()
    vram = basis.pc1.profile.vram_bytes.model_copy(update={"value": 64 * 2**30})
    larger = basis.pc1.profile.model_copy(update={"vram_bytes": vram})
    roomy = Basis()
    roomy.__dict__["pc1"] = type(basis.pc1)(larger, basis.pc1.shape)
    rows = {row.item: row for row in guide_audit.all_rows(roomy)}
    assert rows["10"].verdict == "follows"
    assert rows["T6"].verdict == "plausible"


def test_the_ratchet(rows: dict[str, AuditRow]) -> None:
    row = rows["22"]
    assert row.numbers["saturated"] < 1  # pushed more into a link that is already slower
    assert row.numbers["after"] == row.numbers["before"] < 1
    # T_io above T_gpu and the CPU fastest: the only way up
    assert audit_rules.scale_after(1, gpu_ms=5, cpu_ms=1, io_ms=10) == pytest.approx(1.04, abs=1e-6)


def test_our_simulator_answers_what_it_can(rows: dict[str, AuditRow]) -> None:
    basis = Basis()
    said = {item: simulated(item, basis) for item in rows}
    assert sum(text != "-" for text in said.values()) >= 18
    assert "1,500: 1.4 ms" in said["5"]  # 30 us + 1,500 x 30,720 B / 34 GB/s
    assert simulated("T5", basis, {"Kairox": "so much"}) == "so much"
    assert said["T5"] == "not run"
    assert set(SYSTEM_ROWS) == {"T1", "T2", "T3", "T4", "T5"}
    assert set(SYSTEM_ROWS.values()) == set(guide_runs.SYSTEMS)


def test_noise_fills_the_guides_slots() -> None:
    filled, loads, hit = filled_by_noise(n_steps=120)
    assert 0.5 < filled <= 1
    assert loads > 0
    assert 0.2 < hit < 0.8  # far from the guide's 88 to 94 %


def test_the_page_and_its_table(tmp_path: Path, rows: dict[str, AuditRow]) -> None:
    guide_audit.main(["-o", str(tmp_path), "--no-runs"])
    text = (tmp_path / "guide_audit.md").read_text(encoding="utf-8")
    assert "31.97 / 2.41 = 13.27x" in text
    assert "git_commit" in text
    with (tmp_path / "guide_audit.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["row"] for line in lines] == list(rows)
    assert all(line["verdict"] and line["git_commit"] for line in lines)


def test_a_run_of_each_kind_of_system() -> None:
    """llama.cpp is as slow as its roofline says; the guide's Kairox is far below its 31.97."""
    llama = guide_runs.run("llama.cpp", 0.0)
    assert llama.tokens_per_s == pytest.approx(1 / Basis().pc1.llama_s, rel=0.05)
    assert llama.tokens_per_s <= 1 / Basis().pc1.llama_s
    kairox = guide_runs.run("kairox-guide", 0.0, n_layers=1, n_tokens=20)
    assert 2 < kairox.tokens_per_s < 20
    assert kairox.cpu_ms > 10 * 3.8
    assert kairox.hit_resident <= kairox.hit_on_time < 25  # 266 slots of 1,548 active
    assert "kairox-guide" in guide_runs.SYSTEMS["Kairox"]


def test_hit_rates_differ_by_definition() -> None:
    lru = guide_runs.hits("lru", 0.47, 0.3, 40)
    assert lru.before < lru.after == pytest.approx(100)  # all that fires fits and is loaded
    tam = guide_runs.hits("tam", 0.47, 0.3, 40)
    assert tam.before <= tam.after < 94.2
    assert guide_runs.hits("tam", 0.0, 0.3, 40).after == 0


def test_the_guides_table_is_an_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = guide_runs.Ran(9.0, 20.0, 80.0, 5.0, 7.0, 8.0, 3.0)
    monkeypatch.setattr(guide_table, "run", lambda system, persistence: ran)
    monkeypatch.setattr(guide_table, "hits", lambda *a: guide_runs.Hits(61.0, 90.0, 40.0))
    guide_table.main(["-o", str(tmp_path)])
    rows = guide_table.rows((0.0,))
    assert {row.kind for row in rows} == {"audit"}
    kairox = [row for row in rows if row.what.startswith("Kairox:")]
    assert {row.verdict for row in kairox} == {"above our ceiling"}
    assert {row.verdict for row in rows if row.what.startswith("PowerInfer:")} == {"shown"}
    lru = next(row for row in rows if row.what.startswith("lru: resident before"))
    assert "3% resident, persistence 0" in lru.why
    assert all("guide_audit, T5" in row.why for row in kairox)
    assert (tmp_path / "guide_table.csv").is_file()

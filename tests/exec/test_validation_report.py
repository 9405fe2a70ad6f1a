"""Which settings of a validation are judged, what is claimed of how many, and judging a report."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import validate as acceptance
from kairox_exec.calibration import OVERRUN_LIMIT
from kairox_exec.queue_errors import QUEUES
from kairox_exec.validation_report import Validation, combined, scored
from kairox_sim.errors import KairoxError

SAID = {"time": "emulated a", "repeats": 5, "decode_tokens": 128}
RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def rows(n: int, overruns: dict[int, float] | None = None, machine: str = "a") -> pd.DataFrame:
    """n settings, 1 % off each, three times as slow at the end; some with overruns."""
    times = np.linspace(1.0, 3.0, n)
    table = pd.DataFrame(
        {
            "setting": [f"s{at}" for at in range(n)],
            "machine": machine,
            "time": machine,
            "live_tok_s": 1 / times,
            "live_spread": 0.001,
            "simulated_tok_s": 1 / (1.01 * times),
            "error": 0.01,
            "null_constant_tok_s": 0.5,
            "null_linear_tok_s": 1 / (1.2 * times),
            "uses_lookahead_or_stall": True,
            "overrun_share": [(overruns or {}).get(at, 0.001) for at in range(n)],
            "hit_resident_points": 0.0,
            "hit_on_time_points": [float(at) for at in range(n)],
            "loads_error": 0.0,
            "swept_tok_s": np.nan,
            "g1_differences": 0,
            "g2_differences": 0,
        }
    )
    for name in ("hit_on_time", "h2d_bytes_per_token", *QUEUES):
        table[f"live_{name}"] = table[f"simulated_{name}"] = 0.1
    return table


def test_a_setting_that_fell_behind_is_named_and_not_judged() -> None:
    """Its error would be the worst, its hits the furthest off: neither is in any figure."""
    table = rows(14, {13: 0.031})
    table.loc[13, "simulated_tok_s"] *= 2
    found = Validation(table, SAID, 12)
    assert found.verdict.passed is True
    assert found.verdict.worst_error == pytest.approx(0.01)
    content = found.to_dict()
    assert (content["settings"], content["settings_clean"]) == (14, 13)
    assert content["settings_barred"] == [
        {"setting": "s13", "machine": "a", "overrun_share": 0.031}
    ]
    assert content["error_of_all"]["worst"] == pytest.approx(1 - 1.01 / 2)
    assert len(content["rows"]) == 14
    assert {row["settings"] for row in content["queues"]} == {13}
    said = " / ".join(found.said())
    assert "judged: 13 of 14 settings; barred" in said
    assert "s13 (3.1%)" in said
    assert "with the barred ones: median error 1.0%, worst 49.5%" in said
    assert "up to 12.0 points of hits on time" in said


@given(
    shares=st.lists(st.sampled_from([0.0, 0.01, OVERRUN_LIMIT, 0.021, 0.5, np.nan]), min_size=1,
                    max_size=9),
    off=st.floats(0.2, 5.0),
)  # fmt: skip
def test_what_is_barred_moves_no_figure(shares: list[float], off: float) -> None:
    """Every row is on one side, and the verdict is that of the others alone."""
    table = rows(len(shares)).assign(overrun_share=shares)
    found = Validation(table, SAID)
    assert sorted([*found.clean.index, *found.barred.index]) == list(range(len(shares)))
    worse = table.copy()
    worse.loc[found.barred.index, ["simulated_tok_s", "live_tok_s"]] *= [off, 1 / off]
    moved = Validation(worse, SAID)
    # As text, since nan is not itself: what nothing is judged of has no figures.
    assert str(moved.verdict) == str(found.verdict)
    if len(found.clean):
        assert str(Validation(found.clean, SAID).verdict) == str(found.verdict)
    else:
        assert found.verdict.passed is None


def test_without_it_the_same_settings_fail() -> None:
    table = rows(14)
    table.loc[13, "simulated_tok_s"] *= 2
    verdict = Validation(table, SAID, 12).verdict
    assert verdict.passed is False
    assert "worst error 49.5%" in verdict.reasons[0]


def test_the_limit_is_still_clean_and_what_is_not_paced_cannot_fall_behind() -> None:
    assert Validation(rows(3, {0: OVERRUN_LIMIT}), SAID).barred.empty
    assert len(Validation(rows(3, {0: OVERRUN_LIMIT * 1.001}), SAID).barred) == 1
    unpaced = Validation(rows(3).assign(overrun_share=np.nan), SAID)
    assert len(unpaced.clean) == 3
    assert unpaced.said()[1] == "judged: 3 of 3 settings"


@pytest.mark.parametrize(("n_barred", "passed"), [(0, True), (2, True), (3, None), (14, None)])
def test_of_too_few_clean_settings_nothing_is_claimed(n_barred: int, passed: bool | None) -> None:
    found = Validation(rows(14, dict.fromkeys(range(n_barred), 0.5)), SAID, 12)
    assert found.verdict.passed is passed
    if passed is None:
        why = f"not judged: {14 - n_barred} of 14 settings kept their pace and 12 are needed"
        assert found.verdict.reasons[0].startswith(why)
        assert found.said()[0].startswith(f"G3 claims nothing: {why}")
    json.dumps(found.to_dict()["settings_barred"])


def test_a_failure_of_too_few_is_not_judged_either() -> None:
    table = rows(14, dict.fromkeys(range(5), 0.5)).assign(simulated_tok_s=0.1)
    assert Validation(table, SAID, 5).verdict.passed is False
    assert Validation(table, SAID, 12).verdict.passed is None


def test_fewer_repeats_on_one_machine_are_too_few_for_all() -> None:
    parts = [
        Validation(rows(7, machine=name), SAID | {"time": name, "repeats": repeats})
        for name, repeats in (("a", 5), ("b", 4))
    ]
    found = combined(parts, settings_needed=12)
    assert found.verdict.reasons == ("4 repeats of 128 tokens; gate G3 asks for 5 of 128 or more",)
    assert len(found.table) == 14
    with pytest.raises(ValueError, match="2 validations on 1 machines"):
        combined([parts[0], parts[0]])


def test_rows_are_scored_as_they_stand() -> None:
    table = rows(2)
    (first, _) = scored(table)
    assert (first.live_s, first.simulated_s) == (1.0, pytest.approx(1.01))
    assert (first.constant_s, first.linear_s) == (2.0, pytest.approx(1.2))
    assert (first.setting, first.machine, first.ahead_or_stall) == ("s0", "a", True)


def test_a_report_is_judged_again_as_it_was(tmp_path: Path) -> None:
    found = Validation(rows(14, {1: 0.03}), SAID, 12)
    as_json, _ = found.dump(tmp_path)
    again = Validation.load(as_json, settings_needed=12)
    assert again.verdict == found.verdict
    assert again.to_dict() == found.to_dict()
    assert again.said() == found.said()


@pytest.mark.parametrize("content", ["{}", "[]", '{"rows": [], "conditions": {}}', "no"])
def test_a_foreign_file_is_no_report(tmp_path: Path, content: str) -> None:
    path = tmp_path / "validation.json"
    path.write_text(content)
    with pytest.raises(KairoxError, match="no report of a validation"):
        Validation.load(path)
    with pytest.raises(KairoxError, match="no report of a validation"):
        Validation.load(tmp_path / "none.json")


def test_the_published_report_is_judged_by_the_tool() -> None:
    content = json.loads((RESULTS / "validation.json").read_text())
    found = Validation.load(RESULTS / "validation.json", settings_needed=acceptance.SETTINGS)
    assert found.verdict.passed is True
    shares = [row["overrun_share"] for row in content["rows"]]
    assert len(found.clean) == sum(share <= OVERRUN_LIMIT for share in shares) >= 12


@pytest.mark.parametrize(("n_barred", "code"), [(2, 0), (3, 1)])
def test_the_acceptance_command_passes_or_says_why_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    n_barred: int,
    code: int,
) -> None:
    as_json, _ = Validation(rows(14, dict.fromkeys(range(n_barred), 0.5)), SAID).dump(tmp_path)
    monkeypatch.setattr(sys, "argv", ["validate", "--judge", str(as_json)])
    assert acceptance.main() == code
    out = capsys.readouterr().out
    assert out.count("50.0% barred") == n_barred
    assert ("G3 passes" in out) is (code == 0)
    assert ("not judged: 11 of 14 settings" in out) is (code == 1)


def test_every_machine_of_the_acceptance_command_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machines are judged together: 3 or 4 settings each, 12 clean ones in all."""
    asked = []

    def one(wanted: dict[str, object], *rest: object) -> Validation:
        asked.append((wanted["link"], wanted["numerics"]))
        name = f"{wanted['link']} {wanted['numerics']}"
        return Validation(rows(len(wanted["settings"]), machine=name), SAID | {"time": name})  # type: ignore[arg-type]

    monkeypatch.setattr(acceptance, "_on", one)
    monkeypatch.setattr(sys, "argv", ["validate", "--out", str(tmp_path)])
    assert acceptance.main() == 0
    assert len(set(asked)) == len(asked) >= 4
    content = json.loads((tmp_path / "validation.json").read_text())
    assert content["settings_needed"] == 12
    assert content["settings_clean"] == len(content["rows"]) >= 12
    assert "G3 passes" in capsys.readouterr().out

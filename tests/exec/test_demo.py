"""The demo's own decisions: at which pace it calibrates, and what it runs live."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments import demo
from experiments.demo_live import chosen
from kairox_exec.calibration import PaceError
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings, label


def calls_of(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[list[str]]:
    calls: list[list[str]] = []
    outcomes = iter(errors)

    def kairox(*arguments: object) -> None:
        calls.append([str(argument) for argument in arguments])
        if (error := next(outcomes)) is not None:
            raise error

    monkeypatch.setattr(demo, "kairox", kairox)
    return calls


def test_calibration_slows_down_until_the_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, PaceError("busy"), None)
    demo.kairox_calibrate(Path("hw.toml"))
    assert "--time-scale" not in calls[0]
    assert calls[1][-2:] == ["--time-scale", "10"]
    assert len(calls) == 2


def test_calibration_gives_up_saying_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, *[PaceError("busy")] * 3)
    with pytest.raises(KairoxError, match="too busy to emulate"):
        demo.kairox_calibrate(Path("hw.toml"))


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, KairoxError("no such text"), None)
    with pytest.raises(KairoxError, match="no such text"):
        demo.kairox_calibrate(Path("hw.toml"))
    assert len(calls) == 1


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(KairoxError, match="not a folder of this demo"):
        demo.demo(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_the_best_runs_first_and_every_rule_once_at_its_fastest() -> None:
    def row(tok_s: float, link: str | None = None, **settings: object) -> dict[str, object]:
        one = Settings.of(settings)
        return {
            "tok_s": tok_s, "link": link, "status": "ok", "label": label(one),
            "settings": json.dumps(one.model_dump(mode="json")),
        }  # fmt: skip

    table = pd.DataFrame(
        [
            row(5.0, policy="lru", slots=64),
            row(9.0, policy="lru", slots=128),
            row(99.0, "pcie5", policy="lru", slots=256),  # another bus than the machine's own
            row(9.05, policy="lfu", slots=256),
            row(8.0, policy="tam", controller="anb", slots=64),
            row(7.0, policy="tam", slots=64),
        ]
    )
    settings, swept = chosen(table, Settings(policy="lru", slots=128))
    assert [label(one) for one in settings] == ["lru 128", "lfu 256", "tam+anb 64", "tam 64"]
    assert swept["lru 128"] == 9.0

"""Every metric from numbers that can be added up in the head."""

from __future__ import annotations

import dataclasses
import json
import math

import pandas as pd
import pytest

from kairox_sim.metrics import (
    METRICS,
    STEP_COLUMNS,
    TOTALS,
    RunResult,
    plain,
    steps_frame,
    summarise,
)
from kairox_sim.record import StepRecord

N_LAYERS = 2


def record(step: int, phase: str = "decode", seq: int = 0, **other: float) -> StepRecord:
    known: dict[str, float | str] = {
        "wall_s": 0.010, "gpu_busy_s": 0.004, "cpu_busy_s": 0.003, "swap_busy_s": 0.002,
        "act_busy_s": 0.001, "predict_s": 0.0005, "decide_s": 0.0001, "wait_cpu_s": 0.003,
        "wait_io_s": 0.001, "wait_decide_s": 0.0005, "evaluated": 10, "active": 8, "predicted": 5,
        "predicted_active": 4, "hit_resident": 5, "hit_on_time": 6, "late": 1,
        "fetched": 1, "residual": 3,
        "loads": 3, "loads_used_first": 1, "wasted": 1, "cancelled": 0, "evictions": 2,
        "h2d_bytes": 300, "threshold_scale": 1.0,
    }  # fmt: skip
    return StepRecord.with_unknown(seq=seq, step=step, phase=phase, **(known | other))


RECORDS = [
    record(0, "prefill", wall_s=0.100, evaluated=1000),
    record(1, "prefill", wall_s=0.060, evaluated=1000),
    record(2),
    record(
        3, wall_s=0.030, evaluated=30, hit_on_time=12, fetched=3, residual=15, loads=5, active=24
    ),
    record(4, "prefill", seq=1, wall_s=0.040, evaluated=1000),
    record(
        5,
        seq=1,
        wall_s=0.020,
        evaluated=20,
        hit_on_time=12,
        fetched=0,
        residual=8,
        loads=0,
        wasted=1,
    ),
]
BY_HAND = {
    "n_decode": 3,
    "tok_s": 3 / 0.060,
    "tok_s_scaled": 3 / 0.060 / 4,
    "tpot_s": 0.020,
    "tpot_p50_s": 0.020,
    "tpot_p99_s": 0.020 + 0.98 * 0.010,  # 99 % of the way from the first of three to the last
    "ttft_s": (0.160 + 0.040) / 2,  # chunks of a sequence add up
    "hit_resident": 15 / 60,
    "hit_on_time": 30 / 60,
    "late_share": 3 / 60,
    "fetched_share": 4 / 60,
    "residual_share": 26 / 60,
    "evaluated_per_token": 20,
    "residual_per_token": 26 / 3,
    "loads_per_layer_step": 8 / (3 * N_LAYERS),
    "wasted_per_layer_step": 3 / (3 * N_LAYERS),
    "wasted_share": 3 / 6,
    "h2d_bytes_per_token": 300,
    "gpu_s": 0.004,
    "predict_s": 0.0005,
    "wait_cpu_s": 0.003,
    "wait_io_s": 0.001,
    "wait_decide_s": 0.0005,
    "unexplained_s": 0.020 - 0.004 - 0.0045,
    "decide_s": 0.0001,
    "cpu_busy_s": 0.003,
    "swap_busy_s": 0.002,
    "recall": 12 / 40,
    "precision": 12 / 15,
}


def test_every_metric_by_hand() -> None:
    summary = summarise(RECORDS, N_LAYERS, 1 / 4)
    assert summary == pytest.approx(BY_HAND, rel=1e-12)
    assert list(summary) == list(METRICS)
    assert summarise(steps_frame(RECORDS), N_LAYERS, 1 / 4) == summary


def test_prefill_is_in_no_ratio() -> None:
    more = [*RECORDS, record(6, "prefill", seq=2, wall_s=0.1, evaluated=5000, hit_on_time=0)]
    changed = summarise(more, N_LAYERS, 1 / 4)
    assert changed.pop("ttft_s") == pytest.approx(0.1)
    expected = {name: value for name, value in BY_HAND.items() if name != "ttft_s"}
    assert changed == pytest.approx(expected)


def test_warmup_leaves_out_the_first_decode_steps() -> None:
    assert summarise(RECORDS, N_LAYERS, warmup=1)["hit_on_time"] == pytest.approx(24 / 50)
    assert summarise(RECORDS, N_LAYERS, warmup=3)["n_decode"] == 0


@pytest.mark.parametrize("of", ["wall_s", "hit_on_time", "cpu_busy_s", "loads", "active"])
def test_one_unknown_step_makes_the_metric_unknown(of: str) -> None:
    depends = {
        "wall_s": {"tok_s", "tok_s_scaled", "tpot_s", "tpot_p50_s", "tpot_p99_s", "unexplained_s"},
        "hit_on_time": {"hit_on_time"},
        "cpu_busy_s": {"cpu_busy_s"},
        "loads": {"loads_per_layer_step"},
        "active": {"recall"},
    }[of]
    broken = dataclasses.replace(RECORDS[2], **{of: math.nan})
    summary = summarise([*RECORDS, broken], N_LAYERS)
    assert {name for name, value in summary.items() if math.isnan(value)} == depends


def test_steps_without_a_prediction_are_no_part_of_recall() -> None:
    silent = record(9, predicted=math.nan, predicted_active=math.nan, active=1000)
    summary = summarise([*RECORDS, silent], N_LAYERS)
    assert summary["recall"] == pytest.approx(12 / 40)
    nothing = summarise([silent], N_LAYERS)
    assert math.isnan(nothing["recall"])
    assert math.isnan(nothing["precision"])


def test_no_steps_is_an_empty_report() -> None:
    summary = summarise([], N_LAYERS)
    assert summary.pop("n_decode") == 0
    assert all(math.isnan(value) for value in summary.values())
    assert list(steps_frame([]).columns) == list(STEP_COLUMNS)
    prefill_only = summarise([RECORDS[0]], N_LAYERS)
    assert prefill_only["ttft_s"] == pytest.approx(0.1)
    assert math.isnan(prefill_only["tok_s"])


def test_unexplained_is_exactly_zero_where_all_is_explained() -> None:
    parts = {"gpu_busy_s": 0.1, "wait_cpu_s": 0.2, "wait_io_s": 0.0, "wait_decide_s": 0.0}
    steps = [record(i, wall_s=0.3, **parts) for i in range(7)]  # 0.1 + 0.2 is not 0.3 in binary
    assert summarise(steps, 1)["unexplained_s"] == 0


def test_totals_are_of_the_whole_run() -> None:
    steps = steps_frame(RECORDS)
    result = RunResult(steps, {}, {}, unused_yet=7, cancelled_at_end=2)
    totals = result.totals
    assert list(totals) == list(TOTALS)
    assert totals["evaluated"] == 3060
    assert totals["loads"] == 17
    assert (totals["used"], totals["cancelled"], totals["unused_yet"]) == (6, 2, 7)


def test_unknown_is_null_in_json() -> None:
    result = RunResult(steps_frame([]), summarise([], 1), {"setting": "tam"})
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content["summary"]["tok_s"] is None
    assert content["totals"]["loads"] == 0
    assert plain({"a": (math.nan, math.inf), 1: pd.Series([2]).iloc[0]}) == {
        "a": [None, None],
        "1": 2,
    }

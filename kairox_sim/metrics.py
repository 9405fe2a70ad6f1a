"""What a run comes to: every metric, its one formula and its unit; the same simulated and live.

Ratios and times per token are over decode steps only; `ttft_s` is of prefill. 0/0 is nan, unknown
is nan. A neuron counts once per layer-step, however often it was named (unique, not raw, accesses);
all neurons of a model are as many bytes, so a ratio of neurons is the ratio of their bytes.

Sums run over decode steps; n is their number, L the layers. `METRICS` is the full list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kairox_sim.record import StepRecord
from kairox_sim.timeline import Slice

STEP_COLUMNS = tuple(f.name for f in fields(StepRecord))

METRICS: dict[str, tuple[str, str]] = {  # name: (formula, unit)
    "n_decode": ("number of decode steps", "steps"),
    "tok_s": ("n / sum wall_s", "tokens/s"),
    "tok_s_scaled": ("tok_s x L of the trace / L of the model", "tokens/s"),
    "tpot_s": ("mean wall_s", "s"),
    "tpot_p50_s": ("median wall_s", "s"),
    "tpot_p99_s": ("99th percentile of wall_s, linear between steps", "s"),
    "ttft_s": ("per sequence, sum wall_s of its prefill steps; mean over sequences", "s"),
    "hit_resident": ("sum hit_resident / sum evaluated", "ratio"),
    "hit_on_time": ("sum hit_on_time / sum evaluated", "ratio"),
    "late_share": ("sum late / sum evaluated", "ratio"),
    "fetched_share": ("sum fetched / sum evaluated: copied on demand, no slot", "ratio"),
    "residual_share": ("sum residual / sum evaluated = 1 - hit_on_time - fetched", "ratio"),
    "evaluated_per_token": ("sum evaluated / n", "neurons"),
    "residual_per_token": ("sum residual / n", "neurons"),
    "loads_per_layer_step": ("sum loads / (n L)", "neurons"),
    "wasted_per_layer_step": ("sum wasted / (n L)", "neurons"),
    "wasted_share": (
        "sum wasted / sum (wasted + loads_used_first), of loads whose fate was decided",
        "ratio",
    ),
    "h2d_bytes_per_token": ("sum h2d_bytes / n", "bytes"),
    "gpu_s": ("sum gpu_busy_s / n", "s"),
    "predict_s": ("sum predict_s / n, a part of gpu_s", "s"),
    "wait_cpu_s": ("sum wait_cpu_s / n", "s"),
    "wait_io_s": ("sum wait_io_s / n", "s"),
    "wait_decide_s": ("sum wait_decide_s / n", "s"),
    "unexplained_s": ("sum (wall_s - gpu_busy_s - the three waits) / n", "s"),
    "decide_s": ("sum decide_s / n", "s"),
    "cpu_busy_s": ("sum cpu_busy_s / n", "s"),
    "swap_busy_s": ("sum swap_busy_s / n", "s"),
    "recall": ("sum predicted_active / sum active, over steps with a prediction", "ratio"),
    "precision": ("sum predicted_active / sum predicted, over steps with a prediction", "ratio"),
}

AGAINST: dict[str, tuple[str, str]] = {  # beside the METRICS of a simulated run
    "bound_s": ("time per token that no run reading the same bytes can beat", "s"),
    "common_bound_s": ("the same for the bytes that every system must read, no predictor", "s"),
    "over_bound": ("tpot_s / bound_s - 1", "ratio"),
    "over_common_bound": ("tpot_s / common_bound_s - 1", "ratio"),
    "oracle_s": (
        "tpot_s of the bypass oracle (fewest misses, not fastest) in the same slots and costs",
        "s",
    ),
    "over_oracle": ("tpot_s / oracle_s - 1; below 0 where moving less beats missing less", "ratio"),
}


def against(
    summary: Mapping[str, float],
    *,
    bound_s: float,
    common_bound_s: float,
    oracle_s: float = math.nan,
) -> dict[str, float]:
    """The regrets of a run: how far above what cannot be beaten; nan where that is not known."""
    tpot_s = summary["tpot_s"]
    return {
        "bound_s": bound_s,
        "common_bound_s": common_bound_s,
        "over_bound": _ratio(tpot_s, bound_s) - 1,
        "over_common_bound": _ratio(tpot_s, common_bound_s) - 1,
        "oracle_s": oracle_s,
        "over_oracle": _ratio(tpot_s, oracle_s) - 1,
    }


TOTALS = (
    "evaluated", "active", "hit_resident", "hit_on_time", "late", "fetched", "residual", "loads",
    "used", "wasted", "cancelled", "unused_yet", "evictions", "h2d_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run, simulated or live. `labels` say what the numbers are of and stand beside them."""

    steps: pd.DataFrame  # a StepRecord per row
    summary: dict[str, float]  # the METRICS
    labels: dict[str, str]
    unused_yet: int = 0  # loads that at the end still wait for a first use
    cancelled_at_end: int = 0  # loads that were still in flight at the end
    slices: tuple[Slice, ...] = ()
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def totals(self) -> dict[str, float]:
        """Counts over the whole run, prefill included.

        evaluated = hit_on_time + fetched + residual;
        loads = used + wasted + cancelled + unused_yet.
        """
        of = {name: float(self.steps[name].sum(skipna=False)) for name in STEP_COLUMNS[16:-1]}
        of["used"] = of["loads_used_first"]
        of["cancelled"] += self.cancelled_at_end
        of["unused_yet"] = float(self.unused_yet)
        return {name: of[name] for name in TOTALS}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the steps; nan becomes None."""
        content = {
            "labels": self.labels,
            "summary": self.summary,
            "totals": self.totals,
            "warnings": list(self.warnings),
            "settings": self.settings,
            "provenance": self.provenance,
        }
        return plain(content)  # type: ignore[no-any-return]


def steps_frame(records: Sequence[StepRecord]) -> pd.DataFrame:
    """StepRecords as a table, one row each; the columns are there even without rows."""
    frame = pd.DataFrame([astuple(r) for r in records], columns=list(STEP_COLUMNS))
    whole = ["seq", "step", "n_tokens", "context_len"]
    numbers = [c for c in STEP_COLUMNS if c not in (*whole, "phase", "exact")]
    return frame.astype(
        {
            **dict.fromkeys(whole, "int64"),
            **dict.fromkeys(numbers, "float64"),
            "phase": "str",
            "exact": "bool",
        }
    )


def summarise(
    records: Sequence[StepRecord] | pd.DataFrame,
    n_layers: int,
    layers_ratio: float = 1.0,
    *,
    warmup: int = 0,
) -> dict[str, float]:
    """The METRICS of a run.

    layers_ratio: layers of the trace / of the model, for `tok_s_scaled`. `warmup`: decode steps at
    the beginning to leave out of everything but `ttft_s`.
    """
    steps = records if isinstance(records, pd.DataFrame) else steps_frame(records)
    decode = steps[steps["phase"] == "decode"].iloc[warmup:]
    n = len(decode)
    column = {name: decode[name].to_numpy(np.float64) for name in STEP_COLUMNS[6:]}
    total = {name: float(values.sum()) for name, values in column.items()}  # nan where unknown
    wall_s = column["wall_s"]
    tok_s = _ratio(n, total["wall_s"])
    waits_s = total["wait_cpu_s"] + total["wait_io_s"] + total["wait_decide_s"]
    # The parts are whole nanoseconds: what is below 1e-12 s is rounding of their sums.
    unexplained_s = round(total["wall_s"] - total["gpu_busy_s"] - waits_s, 12) + 0.0
    told = ~np.isnan(column["predicted"])  # steps in which something was predicted
    predicted_active = float(column["predicted_active"][told].sum())
    evaluated, loads = total["evaluated"], total["loads"]
    summary = {
        "n_decode": float(n),
        "tok_s": tok_s,
        "tok_s_scaled": tok_s * layers_ratio,
        "tpot_s": _ratio(total["wall_s"], n),
        "tpot_p50_s": _percentile(wall_s, 50),
        "tpot_p99_s": _percentile(wall_s, 99),
        "ttft_s": _ttft_s(steps),
        "hit_resident": _ratio(total["hit_resident"], evaluated),
        "hit_on_time": _ratio(total["hit_on_time"], evaluated),
        "late_share": _ratio(total["late"], evaluated),
        "fetched_share": _ratio(total["fetched"], evaluated),
        "residual_share": _ratio(total["residual"], evaluated),
        "evaluated_per_token": _ratio(evaluated, n),
        "residual_per_token": _ratio(total["residual"], n),
        "loads_per_layer_step": _ratio(loads, n * n_layers),
        "wasted_per_layer_step": _ratio(total["wasted"], n * n_layers),
        "wasted_share": _ratio(total["wasted"], total["wasted"] + total["loads_used_first"]),
        "h2d_bytes_per_token": _ratio(total["h2d_bytes"], n),
        "gpu_s": _ratio(total["gpu_busy_s"], n),
        "predict_s": _ratio(total["predict_s"], n),
        "wait_cpu_s": _ratio(total["wait_cpu_s"], n),
        "wait_io_s": _ratio(total["wait_io_s"], n),
        "wait_decide_s": _ratio(total["wait_decide_s"], n),
        "unexplained_s": _ratio(unexplained_s, n),
        "decide_s": _ratio(total["decide_s"], n),
        "cpu_busy_s": _ratio(total["cpu_busy_s"], n),
        "swap_busy_s": _ratio(total["swap_busy_s"], n),
        "recall": _ratio(predicted_active, float(column["active"][told].sum())),
        "precision": _ratio(predicted_active, float(column["predicted"][told].sum())),
    }
    assert list(summary) == list(METRICS), "a metric without its formula, or the reverse"
    return summary


def _ttft_s(steps: pd.DataFrame) -> float:
    prefill = steps[steps["phase"] == "prefill"]
    if prefill.empty:
        return math.nan
    per_sequence = prefill.groupby("seq")["wall_s"].agg(lambda wall_s: wall_s.sum(skipna=False))
    return float(per_sequence.mean(skipna=False))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole != 0 else math.nan


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else math.nan


def plain(value: Any) -> Any:
    """The same in what JSON knows: nan becomes None, tuples lists, NumPy scalars numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value

"""What a validation says: its rows, which of them may be judged, and gate G3's verdict on those.

A setting with a repeat in which the emulated machine fell behind is barred: its live time is partly
that of this host. It stays in the table, and is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from typing import Any, Self

import pandas as pd

from kairox_exec.calibration import OVERRUN_LIMIT
from kairox_exec.queue_errors import queue_errors
from kairox_exec.scoring import Scored, Verdict, judge
from kairox_sim.errors import KairoxError
from kairox_sim.metrics import plain

GATE_REPEATS, GATE_TOKENS = 5, 128  # of fewer, figures are printed and nothing is claimed


@dataclass(frozen=True, slots=True)
class Validation:
    """A row per setting, and under which conditions. Judged are the clean ones.

    settings_needed: clean settings, of fewer of which nothing is claimed.
    """

    table: pd.DataFrame
    conditions: dict[str, Any]
    settings_needed: int = 0

    @property
    def clean(self) -> pd.DataFrame:
        """The rows that are judged. Where nothing is paced (`overrun_share` nan), all of them."""
        return self.table[~(self.table["overrun_share"] > OVERRUN_LIMIT)]

    @property
    def barred(self) -> pd.DataFrame:
        """The rows in which a repeat fell behind by more than OVERRUN_LIMIT."""
        return self.table[self.table["overrun_share"] > OVERRUN_LIMIT]

    @property
    def verdict(self) -> Verdict:
        """Gate G3 over the clean settings; `passed` is None where nothing may be claimed."""
        repeats, tokens = (_least(self.conditions, key) for key in ("repeats", "decode_tokens"))
        n_clean = len(self.clean)
        verdict = judge(scored(self.clean)) if n_clean else _NOTHING
        if repeats < GATE_REPEATS or tokens < GATE_TOKENS:
            why = (
                f"{repeats} repeats of {tokens} tokens; gate G3 asks for "
                f"{GATE_REPEATS} of {GATE_TOKENS} or more"
            )
            return replace(verdict, passed=None, reasons=(why,))
        if n_clean < max(1, self.settings_needed):
            why = (
                f"not judged: {n_clean} of {len(self.table)} settings kept their pace and "
                f"{max(1, self.settings_needed)} are needed; close other programs and run again"
            )
            return replace(verdict, passed=None, reasons=(why,))
        return verdict

    def to_dict(self) -> dict[str, Any]:
        """For JSON; unknown is None."""
        barred = self.barred[["setting", "machine", "overrun_share"]]
        everything = judge(scored(self.table))
        return {
            "verdict": asdict(self.verdict),
            "settings": len(self.table),
            "settings_clean": len(self.clean),
            "settings_needed": self.settings_needed,
            "settings_barred": barred.to_dict(orient="records"),
            "error_of_all": {
                "median": everything.median_error,
                "worst": everything.worst_error,
            },
            "rows": plain(self.table.to_dict(orient="records")),
            "queues": [asdict(row) for row in queue_errors(self.clean)],
            "conditions": self.conditions,
        }

    def said(self) -> list[str]:
        """The verdict in words: what was claimed, of which settings, and against what."""
        v = self.verdict
        outcome = {True: "passes", False: "fails", None: "claims nothing"}[v.passed]
        lines = [
            f"G3 {outcome}" + (": " + "; ".join(v.reasons) if v.reasons else ""),
            *self._said_of_settings(),
        ]
        if not len(self.clean):
            return lines
        return [
            *lines,
            f"error of time per token: median {_share(v.median_error)}, worst "
            f"{_share(v.worst_error)}; a constant {_share(v.constant_error)}; with look-ahead or "
            f"stall {_share(v.ahead_error)}, linear in residual neurons "
            f"{_share(v.linear_ahead_error)}",
            f"deciding landings by its own time, the simulation differs by up to "
            f"{self._worst('hit_on_time_points'):.1f} points of hits on time, "
            f"{self._worst('hit_resident_points'):.1f} of hits resident and "
            f"{_share(self._worst('loads_error'))} of loads",
            (
                f"order: tau {v.tau:.2f} over {v.pairs} pairs that are no ties"
                if v.pairs
                else "order: every pair is a tie"
            )
            + f"; choosing by simulation costs {_share(v.top1_regret)} live; live times span "
            f"{v.contrast:.2f} x",
        ]

    def _said_of_settings(self) -> list[str]:
        if self.barred.empty:
            return [f"judged: {len(self.table)} of {len(self.table)} settings"]
        named = ", ".join(
            f"{row['setting']} ({row['overrun_share']:.1%})"
            for row in self.barred.to_dict(orient="records")
        )
        everything = judge(scored(self.table))
        return [
            f"judged: {len(self.clean)} of {len(self.table)} settings; barred, because in a repeat "
            f"more than {OVERRUN_LIMIT:.0%} of the ops, or the GPU's time by more than that, took "
            f"longer than the emulated machine allows: {named}",
            f"with the barred ones: median error {_share(everything.median_error)}, worst "
            f"{_share(everything.worst_error)}",
        ]

    def _worst(self, column: str) -> float:
        return float(self.clean[column].abs().max())

    def dump(self, out: str | Path) -> list[Path]:
        """validation.json (verdict, rows, conditions) and validation.parquet, in folder `out`."""
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        as_json, as_table = folder / "validation.json", folder / "validation.parquet"
        as_json.write_text(json.dumps(plain(self.to_dict()), indent=1, allow_nan=False) + "\n")
        self.table.to_parquet(as_table)
        return [as_json, as_table]

    @classmethod
    def load(cls, path: str | Path, *, settings_needed: int = 0) -> Self:
        """Rows and conditions of a validation.json, to be judged again.

        Raises KairoxError where it is not one.
        """
        try:
            content = json.loads(Path(path).read_text())
            table = pd.DataFrame(content["rows"])
            unknown = {name: float for name in table if table[name].isna().all()}
            found = cls(table.astype(unknown), dict(content["conditions"]), settings_needed)
            found.to_dict()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KairoxError(
                f"no report of a validation in {str(path)!r} ({error}); name the validation.json "
                "that `kairox validate` or `make validate` wrote"
            ) from error
        return found


def combined(parts: Sequence[Validation], *, settings_needed: int = 0) -> Validation:
    """Several machines as one validation, judged together; see `judge` for what is compared."""
    conditions = {part.conditions["time"]: part.conditions for part in parts}
    if len(conditions) != len(parts):
        raise ValueError(f"{len(parts)} validations on {len(conditions)} machines")
    table = pd.concat([part.table for part in parts], ignore_index=True)
    return Validation(
        table, {"time": "; ".join(conditions), "machines": conditions}, settings_needed
    )


def scored(table: pd.DataFrame) -> list[Scored]:
    """Rows of a validation's table as `judge` takes them."""
    return [
        Scored(
            setting=row["setting"],
            live_s=1 / row["live_tok_s"],
            spread=row["live_spread"],
            simulated_s=1 / row["simulated_tok_s"],
            constant_s=1 / row["null_constant_tok_s"],
            linear_s=1 / row["null_linear_tok_s"],
            ahead_or_stall=bool(row["uses_lookahead_or_stall"]),
            machine=row["machine"],
        )
        for row in table.to_dict(orient="records")
    ]


_NOTHING = Verdict(
    passed=None, reasons=(), contrast=nan, median_error=nan, worst_error=nan, tau=nan, pairs=0,
    top1_regret=nan, constant_error=nan, ahead_error=nan, linear_ahead_error=nan, ahead_share=nan,
)  # fmt: skip


def _least(conditions: dict[str, Any], key: str) -> int:
    """Over the machines, where there are several."""
    machines = conditions.get("machines")
    if machines:
        return min(_least(part, key) for part in machines.values())
    return int(conditions[key])


def _share(value: float) -> str:
    return "unknown" if value != value else f"{value:.1%}"

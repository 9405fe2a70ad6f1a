"""Which rows of a sweep's table a figure draws, and what each is called.

A figure draws one row per bar or point. Rows that could not be told apart in it are an error that
names the settings they differ in, never an average in silence; seeds alone are averaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kairox_sim.errors import KairoxError
from kairox_sim.plot_style import POLICY_LOOKS, Look, look_of, look_of_system
from kairox_sim.policies import BOUNDS, POLICIES
from kairox_sim.systems import SYSTEMS

TRIGGER_NAMES = {
    "attn_in": "look-ahead (attn_in)",
    "attn_out": "look-ahead",
    "serial": "serial",
    "after": "reactive",
    "instant": "instant",
}


@dataclass(frozen=True, slots=True, order=True)
class Series:
    """What one bar or line is of: a policy as set, whatever its budget and link."""

    rank: int  # place of the policy in every figure
    variant: int  # index of HATCHES and FILLS
    name: str
    policy: str
    system: str = ""  # where it is one

    @property
    def look(self) -> Look:
        return look_of_system(self.system, self.policy) if self.system else look_of(self.policy)


def series_of(row: Mapping[str, Any]) -> Series:
    """The series of a row: its system, or policy, controller, parameters, and what is not the
    policy's default."""
    policy = str(row["policy"])
    if system := _given(row.get("system")):
        # Its label says what was set otherwise; slots are an axis of the figure.
        name = str(row.get("label") or system).removesuffix(f" {_given(row.get('slots_asked'))}")
        rank = len(POLICY_LOOKS) + list(SYSTEMS).index(str(system))
        return Series(rank, 0 if name == system else 3, name, policy, str(system))
    name = look_of(policy).name + _params(row.get("policy_params"))
    controlled = row.get("controller", "fixed") != "fixed"
    if controlled:
        name += f" + {str(row['controller']).upper()}{_params(row.get('controller_params'))}"
    defaults = POLICIES.get(policy)
    trigger, late = _given(row.get("trigger")), _given(row.get("late"))
    moved = trigger not in (None, defaults.default_trigger if defaults else None)
    if moved:
        name += f" {TRIGGER_NAMES.get(str(trigger), str(trigger))}"
    extras = []
    if late not in (None, defaults.default_late if defaults else None) and trigger != "serial":
        extras.append(str(late))
    if row.get("start") == "warm":
        extras.append("warm")
    if str(row.get("slots_asked") or "").startswith("density"):
        extras.append("by density")
    if extras:
        name += f" ({', '.join(extras)})"
    plain_params = _params(row.get("policy_params")) == ""
    variant = 0
    if not plain_params or extras:
        variant = 3
    elif moved:
        variant = 2
    elif controlled:
        variant = 1
    ranks = list(POLICY_LOOKS)
    rank = ranks.index(policy) if policy in ranks else len(ranks)
    return Series(rank, variant, name, policy)


def _given(value: Any) -> Any:
    return None if value is None or value != value else value


def _params(value: Any) -> str:
    params = json.loads(value) if isinstance(value, str) else _given(value) or {}
    return f"({', '.join(f'{key} {params[key]:g}' for key in sorted(params))})" if params else ""


def drawable(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that ran, with `series`, `link_name` and `machine_name`; seeds become their mean."""
    rows = table[table["status"] == "ok"].copy()
    if rows.empty:
        raise KairoxError("no row of the table has status ok: there is nothing to draw")
    found = [series_of({str(k): v for k, v in row.items()}) for row in rows.to_dict("records")]
    rows["series"] = pd.Series(found, index=rows.index, dtype=object)
    rows["link_name"] = [_given(link) or "own" for link in rows["link"]]
    rows["machine_name"] = [str(name).split("+")[0] for name in rows["machine"]]
    keys = ["series", "link_name", "machine_name", "gating", "costs", "slots"]
    if "seed" in rows and rows["seed"].nunique() > 1:
        same = [k for k in ("swap_neurons", "prediction", "predictor", "observes") if k in rows]
        numbers = rows.select_dtypes("number").columns.difference([*keys, "seed", *same])
        grouped = rows.groupby([*keys, *same], dropna=False, sort=False)
        rows[numbers] = grouped[list(numbers)].transform("mean")
        rows = rows[~rows.duplicated([*keys, *same])]
    twice = rows[rows.duplicated(keys, keep=False)]
    if not twice.empty:
        raise KairoxError(
            f"several rows for {twice['series'].iloc[0].name}, {twice['slots'].iloc[0]:g} slots; "
            f"they differ in {', '.join(_differing(twice, keys))}: draw them apart, by filtering "
            "the table first"
        )
    return rows


def _differing(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    group = next(iter(rows.groupby(list(keys), sort=False)))[1]
    ours = set(keys) | {"label", "settings", "series"}
    settings = [str(c) for c in group if c not in ours and group[c].astype(str).nunique() > 1]
    return settings or ["nothing: the table has a row twice"]


def only(rows: pd.DataFrame, column: str, wanted: str | None = None) -> pd.DataFrame:
    """The rows with `wanted` in `column`, or all of them where they agree."""
    known = sorted(map(str, rows[column].unique()))
    if wanted is None and len(known) > 1:
        raise KairoxError(f"the table has several {column}: {', '.join(known)}; choose one")
    chosen = rows if wanted is None else rows[rows[column] == wanted]
    if chosen.empty:
        raise KairoxError(f"the table has no {column} {wanted!r}; it has {', '.join(known)}")
    return chosen


def own_budget(rows: pd.DataFrame) -> Any:
    """Per row, whether its slots are what fits or whole layers, so that no other row need match."""
    if "slots_asked" not in rows:
        return rows["gating"] == "dense"
    asked = rows["slots_asked"].astype(str).str
    return (rows["gating"] == "dense") | asked.startswith("ngl") | (rows["slots_asked"] == "vram")


def middle_budget(rows: pd.DataFrame) -> float:
    """The budget in the middle of those that were swept."""
    ours = rows[~rows["policy"].isin(BOUNDS)]
    shared = ours[~own_budget(ours)]
    budgets = sorted((ours if shared.empty else shared)["slots"].unique())
    if not budgets:
        raise KairoxError("the table has bounds only: no setting with a budget to draw")
    return float(budgets[(len(budgets) - 1) // 2])


def at_budget(rows: pd.DataFrame, slots: float) -> pd.DataFrame:
    """The rows of one budget, the bounds, and what takes its own budget and has no row of this one.

    Of a series with several budgets of its own, the largest.
    """
    bound, own = rows["policy"].isin(BOUNDS), own_budget(rows)
    here = (rows["slots"] == slots) & ~bound
    own &= ~bound & ~rows["series"].isin(set(rows.loc[here, "series"]))
    if not (here | own).any():
        budgets = sorted(rows.loc[~bound, "slots"].unique())
        raise KairoxError(
            f"no row has {slots:g} slots; the table has {', '.join(f'{b:g}' for b in budgets)}"
        )
    same = [rows[key] for key in ("series", "link_name", "gating", "costs", "machine_name")]
    own &= rows["slots"] == rows["slots"].where(own).groupby(same).transform("max")
    drawn: pd.DataFrame = rows[here | bound | own]
    return drawn


def budget_words(drawn: pd.DataFrame, rows: pd.DataFrame, slots: float) -> str:
    """For the footer: the budget, who has one of its own, and which series of `rows` are missing.

    "8 slots per layer of 64; of its own: llama.cpp (16). Not at this budget: LRU"
    """
    everything = drawn.loc[drawn["policy"] == "all", "slots"]  # as many as there are neurons
    of = f" of {everything.max():g}" if len(everything) else ""
    swept = drawn[~drawn["policy"].isin(BOUNDS)]
    others = swept[swept["slots"] != slots].sort_values("series")
    pairs = zip(others["series"], others["slots"], strict=True)
    own = dict.fromkeys(f"{series.name} ({n:.4g})" for series, n in pairs)
    said = f"{slots:.4g} slots per layer{of}"
    if own:
        said += f"; of its own: {', '.join(own)}"
    if missing := sorted({s.name for s in set(rows["series"]) - set(drawn["series"])}):
        said += f". Not at this budget: {', '.join(missing)}"
    return said


def middle_link(rows: pd.DataFrame) -> str:
    """The link in the middle of those that were swept, by name."""
    links = sorted(rows["link_name"].unique())
    return str(links[(len(links) - 1) // 2])


def link_label(link: str) -> str:
    """pcie4 -> PCIe Gen4; other names as they are."""
    generation = link.removeprefix("pcie")
    if link.startswith("pcie") and generation.isdigit():
        return f"PCIe Gen{generation}"
    return "the machine's own link" if link == "own" else link


def provenance(rows: pd.DataFrame, table: pd.DataFrame, *more: str) -> str:
    """The footer: whose times, whose activations, which prediction, what is held and left out."""
    costs = "; ".join(sorted(map(str, rows["costs"].unique())))
    labels = sorted({str(p) for p in rows["prediction_label"].dropna()} - {"no prediction"})
    machines = ", ".join(sorted(rows["machine_name"].unique()))
    said = [f"Simulated, decode only, on {machines}; {costs}; {' / '.join(labels)}".rstrip("; ")]
    scaled = ~np.isclose(rows["tok_s"], rows["tok_s_scaled"], equal_nan=True)
    if scaled.any():
        said.append("Scaled by the ratio of layers, trace to model")
    said += more
    if left_out := int((table["status"] != "ok").sum()):
        said.append(f"{left_out} refused or failed cells of the table are not drawn")
    return ". ".join(said) + "."


def layers_ratio(rows: pd.DataFrame) -> Any:
    """Layers of the model / of the trace, per row: what a time per token is multiplied by."""
    return rows["tok_s"] / rows["tok_s_scaled"]

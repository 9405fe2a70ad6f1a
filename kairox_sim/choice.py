"""best: the settings to run, out of a sweep's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from kairox_sim.errors import KairoxError
from kairox_sim.metrics import METRICS, plain
from kairox_sim.policies import BOUNDS, ORACLES
from kairox_sim.settings import Settings
from kairox_sim.sweeps import OWN_LINK, read_table

TIE = 0.01  # of tok_s: closer than this is no difference, and the smaller budget wins


def best(
    table: pd.DataFrame | str | Path,
    hardware: str,
    *,
    link: str | None = None,
    vram_bytes: int | None = None,
    slots_max: float | None = None,
) -> tuple[Settings, dict[str, Any]]:
    """The fastest settings that fit, and their row of the table, with the labels of others within
    TIE of the fastest as `tied`.

    hardware: as asked in the sweep, or the profile's name, also with its link ("pc1+pcie3").
    link: None where the table has only one bus for it. vram_bytes: device memory to fit in, the
    margin included, instead of the profile's. Bounds and oracles are no choice. Several seeds of
    one setting count as their mean.
    """
    rows = read_table(table) if not isinstance(table, pd.DataFrame) else table
    rows = _on_machine(rows, hardware, link)
    no_choice = rows["policy"].isin((*BOUNDS, *ORACLES))
    ok = rows[(rows["status"] == "ok") & ~no_choice & rows["tok_s"].notna()]
    if ok.empty:
        reasons = sorted(set(rows.loc[rows["status"] != "ok", "why"].astype(str)))
        raise KairoxError(
            f"no setting ran on {hardware!r}; bounds and oracles "
            f"({', '.join((*BOUNDS, *ORACLES))}) are no choice"
            + (f"; first reason: {reasons[0].strip().splitlines()[-1]}" if reasons else "")
        )
    if len(models := sorted(set(ok["costs"]))) > 1:
        raise KairoxError(
            f"the table mixes costs that cannot be compared: {'; '.join(models)}; sweep them apart"
        )
    fits = ok["fits"].astype(bool) if vram_bytes is None else ok["device_bytes"] <= vram_bytes
    if slots_max is not None:
        fits &= ok["slots"] <= slots_max
    if not fits.any():
        raise KairoxError(
            f"nothing in the table fits: the smallest setting has {ok['slots'].min():g} slots per "
            f"layer and takes {ok['device_bytes'].min() / 1e9:.3f} GB with the margin; allow more, "
            "or sweep smaller budgets"
        )
    candidates = _over_seeds(ok[fits])
    close = candidates[candidates["tok_s"] >= (1 - TIE) * candidates["tok_s"].max()]
    order = close.sort_values(
        ["slots", "device_bytes", "tok_s"], ascending=[True, True, False], kind="stable"
    )
    row = {str(key): value for key, value in order.iloc[0].items()}
    row["tied"] = order["label"].iloc[1:].tolist()
    return Settings.of(json.loads(row["settings"])), plain(row)


def _on_machine(rows: pd.DataFrame, hardware: str, link: str | None) -> pd.DataFrame:
    machine = rows["machine"]
    named = (rows["hardware"] == hardware) | (machine == hardware)
    ours = rows[named | machine.str.startswith(f"{hardware}+")]
    if ours.empty:
        known = ", ".join(sorted(set(rows["hardware"])))
        raise KairoxError(f"the table has no hardware {hardware!r}; it has {known}")
    names = ours["link"].where(ours["link"].notna(), OWN_LINK)
    known_links = sorted(set(names))
    if link is None and len(known_links) > 1:
        raise KairoxError(
            f"the table has {hardware!r} with several links; choose one with --link: "
            f"{', '.join(known_links)}"
        )
    if link is not None and link not in known_links:
        raise KairoxError(
            f"the table has no link {link!r} for {hardware!r}; it has {', '.join(known_links)}"
        )
    return ours if link is None else ours[names == link]


def _over_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per setting, the first one, with the metrics averaged over its seeds."""
    without_seed = rows["settings"].map(
        lambda text: json.dumps({**json.loads(text), "seed": 0}, sort_keys=True)
    )
    metrics = list(METRICS)
    means = rows.groupby(without_seed, sort=False)[metrics].transform("mean")
    return rows.assign(**{m: means[m] for m in metrics})[~without_seed.duplicated()]

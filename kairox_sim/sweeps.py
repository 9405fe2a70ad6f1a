"""A sweep: settings and machines over one trace -> one table, a row and a status per cell.

The file is TOML; paths in it are relative to the folder the command runs in:

    trace = "eval.arrow"
    prior = "prior.arrow"              # where something learns from it
    seeds = [0, 1]                       # an axis; where predictions are drawn
    [base]                               # any field or parameter of Settings, hardware, link
    gating = "exact"
    [grid]                               # every combination of these axes
    slots = [128, 256]
    "tam.beta" = [0.8, 0.9]              # only where the policy is tam
    link = ["pcie3", "own"]              # own: the machine's own bus
    rule = [{ policy = "tam" }, { policy = "tam", controller = "anb" }, { policy = "lru" }]
    [[cells]]                            # more cells, one at a time
    policy = "none"

An axis of tables varies its keys together, under any name. Cells that come out equal run once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kairox_sim.errors import KairoxError
from kairox_sim.metrics import AGAINST, METRICS, RunResult
from kairox_sim.outputs import require_place
from kairox_sim.policies import POLICIES
from kairox_sim.provenance import code_version, profile_sha256
from kairox_sim.settings import Settings, label
from kairox_sim.settings_file import owner_of, setting_keys, whole_keys
from kairox_sim.settings_toml import explain, read_toml
from kairox_sim.simulation import machine, simulate
from kairox_sim.systems import find_system
from kairox_sim.trace import Trace, read_trace

OWN_LINK = "own"
TEXT = pa.string()
COLUMNS: dict[str, pa.DataType] = {
    "label": TEXT,
    "hardware": TEXT,  # as asked
    "link": TEXT,  # as asked; null: the machine's own
    "status": TEXT,  # ok | refused | failed
    "why": TEXT,  # the reason, or the traceback
    "warnings": TEXT,  # a line each
    **dict.fromkeys(setting_keys(), TEXT),
    **dict.fromkeys(whole_keys(), pa.int64()),
    "slots": pa.float64(),  # per layer on average, as resolved
    "slots_asked": TEXT,
    **dict.fromkeys(METRICS, pa.float64()),
    **dict.fromkeys(AGAINST, pa.float64()),
    "fits": pa.bool_(),
    "device_bytes": pa.float64(),
    "machine": TEXT,  # with the link on it
    "costs": TEXT,  # whose activations at whose costs
    "activations": TEXT,  # recorded | synthetic
    "exactness": TEXT,  # exact, or what is left out
    "prediction_label": TEXT,
    "trace": TEXT,
    "trace_sha256": TEXT,
    "profile_sha256": TEXT,
    "version": TEXT,
    "git_commit": TEXT,
    "settings": TEXT,  # JSON: enough to run the cell again
}


class Sweep(BaseModel):
    """What to vary; see the module."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: str
    prior: str | None = None
    seeds: list[int] = Field(default_factory=list)
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    cells: list[dict[str, Any]] = Field(default_factory=list)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        content = read_toml(path, "sweep")
        misplaced = [
            key for key in content
            if key not in cls.model_fields and key in ("hardware", "link", *setting_keys())
        ]  # fmt: skip
        if misplaced:
            raise KairoxError(
                f"sweep {os.fspath(path)!r}: {', '.join(misplaced)}: of every cell, so put it into "
                "[base]; or into [grid], as a list of what to vary; see `kairox sweep --help`"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise KairoxError(f"sweep {os.fspath(path)!r}: {explain(error, cls)}") from error

    def on(self, hardware: str | None = None, *, vram: str | None = None) -> Self:
        """The same sweep on one machine, or with one size of memory, instead of what it names."""
        asked = {"hardware": hardware, "vram": vram}
        given = {key: value for key, value in asked.items() if value is not None}
        return self.model_copy(
            update={
                "base": self.base | given,
                "grid": {axis: v for axis, v in self.grid.items() if axis not in given},
                "cells": [{k: v for k, v in c.items() if k not in given} for c in self.cells],
            }
        )


@dataclass(frozen=True, slots=True)
class Cell:
    settings: Settings
    hardware: str
    link: str | None


def expand(sweep: Sweep) -> list[Cell]:
    """Every cell, in order: the grid's last axis fastest, then the explicit ones. No two equal.

    A key or value that no cell could have is an error here; what only does not go together is left
    to the run, which says so in its row.
    """
    first = {} if sweep.prior is None else {"prior": sweep.prior}
    base = {**first, **sweep.base}
    grid = dict(sweep.grid)
    if sweep.seeds:
        grid["seed"] = list(sweep.seeds)
    for name, values in grid.items():
        if not values:
            raise KairoxError(f"grid axis {name!r} is empty; give it a value, or remove it")
    combinations: Iterator[tuple[Any, ...]] = itertools.product(*grid.values())
    wanted = [_merged(base, dict(zip(grid, values, strict=True))) for values in combinations]
    if not sweep.grid and sweep.cells:
        wanted = []
    seeds: list[dict[str, Any]] = [{"seed": seed} for seed in sweep.seeds] or [{}]
    wanted += [{**base, **s, **extra} for extra, s in itertools.product(sweep.cells, seeds)]
    cells: dict[str, Cell] = {}
    for overrides in wanted:
        cell = _cell(overrides)
        key = json.dumps([cell.hardware, cell.link, cell.settings.model_dump(mode="json")])
        cells.setdefault(key, cell)
    return list(cells.values())


def _merged(base: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in axes.items():
        if isinstance(value, dict) and name not in setting_keys():
            merged |= value
        else:
            merged[name] = value
    return merged


def _cell(overrides: Mapping[str, Any]) -> Cell:
    values = dict(overrides)
    hardware, link = str(values.pop("hardware", "pc1")), values.pop("link", OWN_LINK)
    named = values.get("system")
    preset = {} if named is None else find_system(str(named)).settings
    chosen = {"policy": "tam", "controller": "fixed", **preset, **values}
    in_force = (chosen["policy"], chosen["controller"])
    for key in list(values):
        if owner_of(key) is not None and owner_of(key) not in in_force:
            del values[key]
    try:
        settings = Settings().with_overrides(values)
    except KairoxError as error:
        raise KairoxError(f"a cell of the sweep, {dict(overrides)}: {error}") from error
    if POLICIES[settings.policy].fills in ("all", "none"):  # a bound has no budget to vary
        settings = settings.model_copy(update={"slots": None})
    return Cell(settings, hardware, None if link == OWN_LINK else str(link))


def sweep(
    spec: Sweep | str | Path,
    out: str | Path | None = None,
    *,
    workers: int = 1,
    on_cell: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Simulate every cell; the table, also written to `out` as Parquet.

    workers: processes, each reading the trace for itself; the table is the same for any number.
    on_cell(done, of) is called as cells end, for progress.
    """
    plan = spec if isinstance(spec, Sweep) else Sweep.load(spec)
    place = None if out is None else require_place(out, "table")
    if workers < 1:
        raise KairoxError(f"workers is {workers}, must be 1 or more")
    cells = expand(plan)
    trace = read_trace(plan.trace)  # damage and foreign files are said before any worker starts
    for cell in cells:
        machine(cell.hardware, cell.link)
    origin = {**code_version(), "trace": plan.trace, "trace_sha256": trace.sha256}
    rows: list[dict[str, Any]] = []
    try:
        for some in _results(plan.trace, trace, cells, origin, workers):
            rows += some
            if on_cell is not None:
                on_cell(len(rows), len(cells))
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped; {_keep(rows, len(cells), place)}") from stop
    except BrokenExecutor as died:
        raise KairoxError(
            f"a worker process died, for want of memory perhaps; give fewer workers than {workers}"
            f". {_keep(rows, len(cells), place)}"
        ) from died
    table = _table(rows)
    if place is not None:
        write_table(table, place)
    return table.to_pandas()  # type: ignore[no-any-return]


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema(list(COLUMNS.items())))


def _keep(rows: list[dict[str, Any]], of: int, place: Path | None) -> str:
    """Save the rows of a sweep that did not end, beside what is at `place`; says where."""
    if place is None or not rows:
        return f"{len(rows)} of {of} cells had ended, and none is kept"
    beside = place.with_name(place.name + ".stopped")
    write_table(_table(rows), beside)
    return f"the first {len(rows)} of {of} cells are in {beside}"


def write_table(table: pa.Table, path: Path) -> None:
    """Parquet, to a temporary name, then renamed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two writers do not mix
    try:
        pq.write_table(table, partial)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise KairoxError(f"cannot write the table {str(path)!r}: {error}") from error


def read_table(path: str | Path) -> pd.DataFrame:
    """A table that `sweep` wrote."""
    try:
        table = pq.read_table(os.fspath(path))
    except (OSError, pa.ArrowInvalid) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error
        raise KairoxError(
            f"cannot read {os.fspath(path)!r} as a sweep's table: {why}; `kairox sweep` makes one"
        ) from error
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise KairoxError(
            f"{os.fspath(path)!r} is not a sweep's table: it has no {', '.join(missing[:3])}; "
            "`kairox sweep` makes one"
        )
    return table.to_pandas()  # type: ignore[no-any-return]


def _results(
    path: str, trace: Trace, cells: Sequence[Cell], origin: Mapping[str, str], workers: int
) -> Iterator[list[dict[str, Any]]]:
    """Rows in the order of `cells`, some at a time."""
    if workers == 1:
        for cell in cells:
            yield _run_cells(trace, [cell], origin)
        return
    import joblib

    size = math.ceil(len(cells) / (4 * workers))  # a few per worker, so that none waits long
    batches = [cells[i : i + size] for i in range(0, len(cells), size)]
    parallel = joblib.Parallel(n_jobs=workers, backend="loky", return_as="generator")
    yield from parallel(joblib.delayed(_run_cells)(path, batch, origin) for batch in batches)


def _run_cells(
    trace: Trace | str, cells: Sequence[Cell], origin: Mapping[str, str]
) -> list[dict[str, Any]]:
    shared = trace if isinstance(trace, Trace) else read_trace(trace)
    priors: dict[str, Trace] = {}
    return [_run_cell(shared, cell, origin, priors) for cell in cells]


def _run_cell(
    trace: Trace, cell: Cell, origin: Mapping[str, str], priors: dict[str, Trace]
) -> dict[str, Any]:
    settings, path = cell.settings, cell.settings.prior
    try:
        if path is not None and path not in priors:
            priors[path] = read_trace(path)
        result = simulate(
            trace,
            settings,
            hardware=cell.hardware,
            link=cell.link,
            prior=None if path is None else priors[path],
            oracle=True,
        )
    except KairoxError as error:
        return {**_asked(settings, cell), **origin, "status": "refused", "why": str(error)}
    except Exception:  # one broken cell must not lose the others; its row says why
        return {
            **_asked(settings, cell), **origin,
            "status": "failed", "why": traceback.format_exc(),
        }  # fmt: skip
    return {**_asked(Settings(**result.settings), cell), **origin, **_measured(result)}


def _asked(settings: Settings, cell: Cell) -> dict[str, Any]:
    """Columns known before the run."""
    values = settings.model_dump(mode="json")
    asked = values.pop("slots")
    as_json = ("policy_params", "controller_params")
    profile = machine(cell.hardware, cell.link)
    return {
        **{k: json.dumps(v, sort_keys=True) if k in as_json else v for k, v in values.items()},
        "slots_asked": None if asked is None else str(asked),
        "label": label(settings),
        "hardware": cell.hardware,
        "link": cell.link,
        "machine": profile.name,
        "profile_sha256": profile_sha256(profile),
        "settings": json.dumps(settings.model_dump(mode="json"), sort_keys=True),
    }


def _measured(result: RunResult) -> dict[str, Any]:
    slots = result.provenance["slots"]
    return {
        "status": "ok",
        "warnings": "\n".join(result.warnings) or None,
        **result.summary,
        "slots": sum(slots) / len(slots),
        "fits": result.provenance["fits"],
        "device_bytes": float(result.provenance["device_bytes"]),
        "costs": result.labels["costs"],
        "activations": result.labels["activations"],
        "exactness": result.labels["exactness"],
        "prediction_label": result.labels["prediction"],
    }

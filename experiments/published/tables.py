"""Published against simulated: one row per number, the rule for its verdict, CSV and Markdown.

`fitted` rows are those that a constant was chosen on; `predicted` rows saw nothing of their number;
`audit` rows are shown with their arithmetic and gate nothing.
"""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from math import nan
from pathlib import Path
from typing import Literal, get_args

from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_folder
from kairox_sim.provenance import code_version

Kind = Literal["fitted", "predicted", "audit"]
Verdict = Literal["pass", "miss", "tie", "not reachable", "above our ceiling", "shown"]
ABOVE = ("not reachable", "above our ceiling")
TIE = 0.05  # two systems closer than this are not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published number and what was simulated for it; nan where there is none."""

    source: str
    what: str
    published: float
    simulated: float
    unit: str
    error: float  # simulated / published - 1, or the difference where the unit is "%"
    kind: Kind
    verdict: Verdict
    why: str = ""
    number: str = ""  # names the published number, which several rows may hold to one

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("verdict", get_args(Verdict))):
            if getattr(self, name) not in allowed:
                raise KairoxError(
                    f"{name} of a row is {getattr(self, name)!r}; allowed: {', '.join(allowed)}"
                )
        if self.kind == "audit" and self.verdict in ("pass", "miss"):
            raise KairoxError(f"an audit row gates nothing, got verdict {self.verdict!r}")
        if self.verdict in ("miss", *ABOVE) and not self.why:
            raise KairoxError(f"{self.what}: a {self.verdict!r} says why, by measurement")


def relative(published: float, simulated: float) -> float:
    """Simulated over published, less one; nan when either is unknown."""
    return simulated / published - 1 if published else nan


def row(
    source: str,
    what: str,
    published: float,
    simulated: float,
    unit: str,
    *,
    kind: Kind,
    within: float | None = None,
    ceiling: float | None = None,
    ceiling_leans_on: str = "",
    why: str = "",
    if_missed: str = "",
    number: str = "",
) -> Row:
    """A row judged by the rule: |error| <= `within` passes, else it misses.

    The error is relative, and in points (of 100) where the unit is "%". `ceiling`: what nothing can
    exceed here; a published number above it is not reachable, whatever was simulated. A ceiling
    that leans on something simulated or assumed (`ceiling_leans_on`) forbids nothing: a number
    above it is above our ceiling, and the row says what the ceiling leans on. Without `within` the
    row is shown and not judged. `if_missed` is said of a miss only, `why` always.
    """
    error = simulated - published if unit == "%" else relative(published, simulated)
    verdict: Verdict = "shown"
    if ceiling is not None and published > ceiling:
        verdict = "above our ceiling" if ceiling_leans_on else "not reachable"
        which = f"our ceiling {ceiling:g} {unit}, which {ceiling_leans_on}"
        which = which if ceiling_leans_on else f"bound {ceiling:g} {unit}"
        why = f"published {published:g} {unit} > {which}. {why}".strip()
    elif within is not None and kind != "audit":
        verdict = "pass" if abs(error) <= within * (1 + 1e-12) else "miss"
    if verdict == "miss":
        why = f"{if_missed} {why}".strip() or f"off by {shown(error)}, allowed {within:g}"
    return Row(
        source=source, what=what, published=published, simulated=simulated, unit=unit,
        error=error, kind=kind, verdict=verdict, why=why, number=number or what,
    )  # fmt: skip


def claim(source: str, what: str, holds: bool, *, kind: Kind, why: str) -> Row:
    """A row about a sign or an order: published 1 (it is so), simulated 1 or 0."""
    verdict: Verdict = "pass" if holds else "miss"
    return Row(
        source=source, what=what, published=1.0, simulated=float(holds), unit="holds",
        error=float(holds) - 1.0, kind=kind, verdict="shown" if kind == "audit" else verdict,
        why=why, number=what,
    )  # fmt: skip


def numbers_above(rows: Iterable[tuple[str, str]]) -> str:
    """How many published numbers are above a ceiling in some row, from (number, verdict)."""
    found: dict[str, set[str]] = {verdict: set() for verdict in ABOVE}
    counted: dict[str, int] = dict.fromkeys(ABOVE, 0)
    for number, verdict in rows:
        if verdict in found:
            found[verdict].add(number)
            counted[verdict] += 1
    said = ", ".join(
        f"{verdict}: {len(names)} (rows: {counted[verdict]})"
        for verdict, names in found.items() if names
    )  # fmt: skip
    return f"published numbers {said}" if said else ""


def order(slow: float, fast: float) -> Verdict:
    """Whether `fast` is above `slow`: a tie when they are closer than TIE of the larger."""
    if abs(fast - slow) < TIE * max(abs(fast), abs(slow)):
        return "tie"
    return "pass" if fast > slow else "miss"


def shown(number: float) -> str:
    """Four digits; a dash for what is not known."""
    if math.isnan(number):
        return "-"
    if number == round(number) and abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"


def provenance(inputs: Mapping[str, str]) -> dict[str, object]:
    """Commit, versions, and the hashes of what went in."""
    return {
        **code_version(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", "pandas", "simpy")},
        "inputs_sha256": dict(inputs),
    }


def write_tables(
    rows: Sequence[Row],
    folder: str | Path,
    stem: str,
    title: str,
    inputs: Mapping[str, str],
    notes: Sequence[str] = (),
) -> tuple[Path, Path]:
    """`stem`.csv and `stem`.md, both with where they came from. Returns the two paths."""
    place = require_folder(folder, "published tables")
    origin = provenance(inputs)
    csv_path, page_path = place / f"{stem}.csv", place / f"{stem}.md"
    write_csv(csv_path, [asdict(item) for item in rows], origin)
    heads = [f.name for f in fields(Row) if f.name != "number"]
    cells = [[_cell(getattr(item, name)) for name in heads] for item in rows]
    page_path.write_text(
        "\n\n".join([f"# {title}", *notes, markdown(heads, cells), tally(rows), footer(origin)])
        + "\n",
        encoding="utf-8",
    )
    return csv_path, page_path


def write_csv(
    path: Path, rows: Sequence[Mapping[str, object]], origin: Mapping[str, object]
) -> None:
    """Rows as CSV; what they were made with in two more columns."""
    more = {
        "git_commit": origin["git_commit"],
        "inputs_sha256": json.dumps(origin["inputs_sha256"], sort_keys=True),
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *more])
        writer.writeheader()
        writer.writerows({**item, **more} for item in rows)


def tally(rows: Sequence[Row]) -> str:
    """How many rows of each kind came out how."""
    said = []
    for kind in get_args(Kind):
        counts = {
            v: sum(r.kind == kind and r.verdict == v for r in rows) for v in get_args(Verdict)
        }
        if any(counts.values()):
            said.append(f"{kind}: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n))
    above = numbers_above((r.number, r.verdict) for r in rows)
    return "; ".join(said) + "." + (f" Counted once, {above}." if above else "")


def footer(origin: Mapping[str, object]) -> str:
    """One paragraph of provenance."""
    hashes = origin["inputs_sha256"]
    assert isinstance(hashes, dict)
    versions = ", ".join(f"{k} {v}" for k, v in origin.items() if k != "inputs_sha256")
    inputs = ", ".join(f"{name} {digest[:12]}" for name, digest in hashes.items())
    return f"Simulated and published are named as such. Made with {versions}. Inputs: {inputs}."


def markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; pipes inside cells are escaped."""
    lines = [list(heads), ["---"] * len(heads), *cells]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def _cell(value: object) -> str:
    return shown(value) if isinstance(value, float) else str(value)

"""The published numbers: one TOML file per source, each value with unit, place and evidence."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kairox_sim.errors import KairoxError

FOLDER = Path(__file__).parent
SOURCES = ("guide", "paper", "bars", "fork", "powerinfer", "prosparse", "datasheets")


@dataclass(frozen=True, slots=True)
class Published:
    """One value of one source. `value` is a number or, where a series was printed, a list."""

    source: str
    name: str  # table.key
    value: Any
    unit: str
    where: str
    evidence: str


@cache
def read(source: str) -> dict[str, Any]:
    """The file of one source, as it stands."""
    if source not in SOURCES:
        raise KairoxError(f"no published source {source!r}; allowed: {', '.join(SOURCES)}")
    return tomllib.loads((FOLDER / f"{source}.toml").read_text(encoding="utf-8"))


def table(source: str, name: str) -> dict[str, Any]:
    """The values of one table of one source."""
    found = read(source).get(name)
    if not isinstance(found, dict):
        names = [key for key, part in read(source).items() if isinstance(part, dict)]
        raise KairoxError(f"{source}.toml has no table {name!r}; it has: {', '.join(names)}")
    values: dict[str, Any] = found["values"]
    return values


def number(source: str, name: str, key: str) -> float:
    """One value that is a single number."""
    values = table(source, name)
    if key not in values:
        raise KairoxError(f"{source}.toml, {name}: no {key!r}; it has: {', '.join(values)}")
    value = values[key]
    if not isinstance(value, (int, float)):
        raise KairoxError(f"{source}.toml, {name}.{key} is {value!r}, not a single number")
    return float(value)


def everything() -> list[Published]:
    """Every published value."""
    rows = []
    for source in SOURCES:
        for name, part in read(source).items():
            if not isinstance(part, dict):
                continue
            rows += [
                Published(
                    read(source)["source"], f"{name}.{key}", value,
                    part["unit"], part["where"], part["evidence"],
                )
                for key, value in part["values"].items()
            ]  # fmt: skip
    return rows


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_hashes(*sources: str) -> dict[str, str]:
    """File name -> hash, for provenance."""
    return {f"{name}.toml": sha256(FOLDER / f"{name}.toml") for name in sources}

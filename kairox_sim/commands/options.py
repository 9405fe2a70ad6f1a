"""Options that several commands share, and how they become Settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kairox_sim.settings import Settings

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="A settings file, such as the one `best` writes.")
]
SystemName = Annotated[
    str | None, typer.Option("--system", help="A preset of all of these; see `kairox systems`.")
]
Policy = Annotated[
    str | None, typer.Option(help="What moves, see `kairox policies`. \\[default: tam]")
]
Controller = Annotated[
    str | None, typer.Option(help="What adapts, see `kairox policies`. \\[default: fixed]")
]
Slots = Annotated[
    str | None,
    typer.Option(
        help="Neurons resident per layer: N of the trace's (live: the model's); a,b,.. for each "
        "layer; density or density:N; the size of all of them, such as 4GiB; vram: what fits; all; "
        "ngl or ngl:N: the last N layers of the model whole. \\[default: a quarter]"
    ),
]
Gating = Annotated[
    str | None,
    typer.Option(
        help="exact, screened, oracle; predicted (lossy); dense (simulated only). "
        "\\[default: exact]"
    ),
]
ModelAs = Annotated[
    str | None, typer.Option("--as", help="Charge the costs of this model: a stand-in.")
]
Prior = Annotated[
    Path | None,
    typer.Option(help="A trace of other text to learn from: static, warm starts, density budgets."),
]
SetKeys = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting, as key=value: --set beta=0.8. Repeatable."),
]
Hardware = Annotated[
    str,
    typer.Option(
        help="A bundled profile (pc1, pc2, ...; see `kairox hardware`), parts as gpu+cpu+link, or "
        "the path of a .toml file."
    ),
]
Link = Annotated[
    str | None, typer.Option(help="Put this bus on the machine: pcie3, pcie4, pcie5, or a .toml.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables; unknown: null.")]


def settings_from(
    base: Path | None = None,
    *,
    system: str | None = None,
    policy: str | None = None,
    controller: str | None = None,
    slots: str | None = None,
    gating: str | None = None,
    model_as: str | None = None,
    prior: Path | None = None,
    numerics: str | None = None,
    weights: str | None = None,
    dtype: str | None = None,
    vram: str | None = None,
    predictor_file: Path | None = None,
    thresholds: Path | None = None,
    set_keys: Sequence[str] | None = None,
) -> Settings:
    """The settings of a file, or the defaults, with what was given on the command line put over."""
    from kairox_sim.settings import Settings

    given = {
        "system": system,
        "policy": policy,
        "controller": controller,
        "slots": slots,
        "gating": gating,
        "model_as": model_as,
        "prior": prior,
        "numerics": numerics,
        "weights": weights,
        "dtype": dtype,
        "vram": vram,
        "predictor_file": predictor_file,
        "thresholds": thresholds,
    }
    overrides: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if prior is not None:
        overrides["prior_sha256"] = None  # it was of the other one
    if predictor_file is not None:
        overrides["predictor"] = "rank"
    overrides |= parsed_keys(set_keys or ())
    return (Settings() if base is None else Settings.load(base)).with_overrides(overrides)


def parsed_keys(set_keys: Sequence[str]) -> dict[str, Any]:
    """key=value pairs; a value is JSON where it reads as such, and text otherwise."""
    values: dict[str, Any] = {}
    for text in set_keys:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise KairoxError(f"--set takes key=value, got {text!r}")
        try:
            values[key.strip()] = json.loads(value)
        except (ValueError, RecursionError):  # or too long or deep for JSON: no value of a setting
            values[key.strip()] = value.strip()
    return values


def print_json(content: Any) -> None:
    """To standard output; the same bytes for the same content."""
    from kairox_sim.metrics import plain

    sys.stdout.write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def print_warnings(warnings: Iterable[str]) -> None:
    """To standard error, so that JSON stays clean."""
    for text in warnings:
        say(f"warning: {text}")


def wide_console() -> Console:
    """Standard output for a wide table: a file or a pipe has no width to keep to."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


def say(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(text + "\n")


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error, gone when done; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield bar


EXEC_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "numba", "llvmlite")


@contextmanager
def exec_extra() -> Iterator[None]:
    """Around the imports of a command that runs a model: says which extra is missing.

    with exec_extra():
        from kairox_exec.recorder import record
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXEC_EXTRA:
            raise
        raise KairoxError(
            f"this command runs a model and needs {package}, of the extra `exec`: in the checkout, "
            'pip install -e ".[exec]"'
        ) from error

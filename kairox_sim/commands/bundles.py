"""kairox bundles: the FFN rows that are kept on disk for a model's next start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.options import Json, exec_extra, print_json, wide_console
from kairox_sim.errors import KairoxError

if TYPE_CHECKING:
    from kairox_exec.bundle_cache import Entry


def bundles(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove them, and say how many bytes that frees.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Only those of this model, by the name of its folder.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Another folder than this platform's cache.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the FFN rows that are kept ready for a model's next start, or remove them.

    Nothing is lost: a start without them makes them again. Their bytes are checked by the run that
    reads them, not here.

    Example: kairox bundles --clear
    """
    with exec_extra():
        from kairox_exec import bundle_cache

    if cache_dir is not None and not cache_dir.is_dir():
        raise KairoxError(
            f"--cache-dir {str(cache_dir)!r} is no folder; name one that a run was given, or leave "
            f"it out for {bundle_cache.default_folder()}"
        )
    folder = bundle_cache.default_folder() if cache_dir is None else cache_dir
    found = bundle_cache.entries(folder)
    if model is not None:
        names = sorted({entry.model for entry in found if entry.model})
        found = [entry for entry in found if entry.model == model]
        if not found:
            others = f"; there is of: {', '.join(names)}" if names else ", nor of any other"
            raise KairoxError(f"nothing of model {model!r} is kept in {folder}{others}")
    if clear:
        n_bytes = bundle_cache.clear(folder, model)
        if as_json:
            print_json({"folder": str(folder), "removed_bytes": n_bytes})
        else:
            typer.echo(f"removed {n_bytes:,} bytes from {folder}")
    elif as_json:
        rows = [_plain(entry) for entry in found]
        total = sum(entry.n_bytes for entry in found)
        print_json({"folder": str(folder), "entries": rows, "total_bytes": total})
    elif not found:
        typer.echo(f"nothing is kept in {folder}{'' if cache_dir else _least_kept()}")
    else:
        _print_table(folder, found)


def _least_kept() -> str:
    from kairox_exec.loading import WORTH_KEEPING_BYTES

    return f" (rows of less than {WORTH_KEEPING_BYTES / 1e6:.0f} MB are kept in a --cache-dir only)"


def _plain(entry: Entry) -> dict[str, Any]:
    key = entry.key
    return {
        "model": entry.model or None,
        "model_sha256": None if key is None else key.model_sha256,
        "gating": None if key is None else key.gating,
        "format": None if key is None else key.fmt,
        "n_layers": None if key is None else key.n_layers,
        "n_neurons": None if key is None else key.n_neurons,
        "bytes": entry.n_bytes,
        "modified_s": entry.modified_s,
        "path": str(entry.path),
        "problem": entry.problem or None,
    }


def _print_table(folder: Path, found: list[Entry]) -> None:
    from rich.markup import escape
    from rich.table import Table

    total = sum(entry.n_bytes for entry in found)
    table = Table(title=f"{escape(str(folder))}: {total / 1e6:,.1f} MB")
    for name in ("model", "gating", "format", "layers x neurons", "MB", "age", "file", "state"):
        right = name in ("layers x neurons", "MB", "age")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    now_s = time.time()
    for entry in found:
        key = entry.key
        table.add_row(
            escape(entry.model) or "-",
            "-" if key is None else key.gating,
            "-" if key is None else key.fmt,
            "-" if key is None else f"{key.n_layers} x {key.n_neurons:,}",
            f"{entry.n_bytes / 1e6:,.1f}",
            _age(now_s - entry.modified_s),
            entry.path.name,
            escape(entry.problem) or "whole",
        )
    wide_console().print(table)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

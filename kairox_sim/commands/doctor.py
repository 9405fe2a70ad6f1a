"""kairox doctor: what this machine has, what limits it, which budget fits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.options import Json, print_json, progress, wide_console

if TYPE_CHECKING:
    from kairox_sim.doctor import Doctor


def doctor(
    model: Annotated[
        str, typer.Option(help="The model that the arithmetic of a token is of.")
    ] = "prosparse-7b",
    vram: Annotated[
        str | None, typer.Option(help="Device memory, such as 12GiB, in place of the first GPU's.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Also measure host memory, about a second.")] = True,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what will limit it, and which budget fits which model.

    Works without a GPU and without torch; what is not known is '-', and why is said.

    Example: kairox doctor --vram 12GiB
    """
    from kairox_sim.doctor import diagnose
    from kairox_sim.units import parse_bytes

    with progress() as bar:
        task = bar.add_task("looking", total=None)
        found = diagnose(
            model,
            None if vram is None else parse_bytes(vram),
            measure=measure,
            progress=lambda what: bar.update(task, description=what),
        )
    if as_json:
        print_json(_plain(found))
        return
    _print(found, model)


def _plain(found: Doctor) -> dict[str, Any]:
    content = dataclasses.asdict(found)
    for limit, row in zip(found.limits, content["limits"], strict=True):
        row["seconds"] = limit.seconds
    for budget, row in zip(found.budgets, content["budgets"], strict=True):
        row["resident_share"] = budget.resident_share
    return content


def _print(found: Doctor, model: str) -> None:
    from rich.table import Table

    from kairox_sim.doctor import verdict_of

    console = wide_console()
    table = Table(title="this machine", show_header=False)
    for name, value in _facts(found):
        table.add_row(name, value)
    console.print(table)
    limits = Table(title=f"a token of {model}, exact gating, half of what fires on the device")
    for name in ("part", "MB", "GB/s", "ms", "how"):
        limits.add_column(name, justify="right" if name in ("MB", "GB/s", "ms") else "left")
    for limit in found.limits:
        seconds = limit.seconds
        limits.add_row(
            limit.part,
            f"{limit.n_bytes / 1e6:.1f}",
            _giga(limit.bytes_per_s),
            "-" if seconds is None else f"{seconds * 1e3:.2f}",
            limit.how,
        )
    console.print(limits)
    console.print(verdict_of(found.limits), soft_wrap=True, highlight=False)
    if found.budgets:
        _print_budgets(found)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _print_budgets(found: Doctor) -> None:
    from rich.table import Table

    from kairox_sim.doctor import KINDS

    vram = found.budgets[0].vram_bytes
    table = Table(
        title=f"neurons that fit in {vram / 2**30:.4g} GiB",
        caption="slots of each layer and their share of its neurons, or what is needed before the "
        "first slot: the gate of every neuron, attention, head, keys and values of 2,048 tokens "
        "and 1.3 GB of workspaces; `kairox simulate --vram` plans for its trace's context",
    )
    table.add_column("model")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for name in dict.fromkeys(row.model for row in found.budgets):
        cells = []
        for row in (b for b in found.budgets if b.model == name):
            if row.slots is None:
                cells.append(f"needs {row.needs_bytes / 2**30:.1f} GiB")
            elif row.slots == row.n_neurons:
                cells.append("all")
            else:
                cells.append(f"{row.slots:,} ({row.resident_share:.0%})")
        table.add_row(name, *cells)
    wide_console().print(table)


def _facts(found: Doctor) -> list[tuple[str, str]]:
    host, cpu = found.host, found.host["cpu"]
    rows = [
        ("system", f"{host['system']}, Python {host['python']}"),
        ("CPU", f"{_or_dash(cpu['name'])}, {_or_dash(cpu['cores'])} cores, "
                f"{_or_dash(cpu['threads'])} threads"),
        ("CPU features", _features(found.features)),
        ("memory", f"{host['memory_bytes'] / 2**30:.1f} GiB, "
                   f"{host['memory_available_bytes'] / 2**30:.1f} GiB available"),
        ("memory limit", _memory_limit(host)),
    ]  # fmt: skip
    if found.bandwidth is not None:
        b = found.bandwidth
        rows.append(
            ("memory read, measured",
             f"{_giga(b.one_thread_bytes_per_s)} GB/s by one thread, "
             f"{_giga(b.all_threads_bytes_per_s)} by {b.threads} (NumPy: a lower bound)")
        )  # fmt: skip
    limit = found.pinned_limit_bytes
    rows.append(("locked memory", "no limit" if limit is None else f"{limit / 2**20:.0f} MiB"))
    for at, gpu in enumerate(found.gpus or []):
        memory, used = gpu["memory_bytes"], gpu["memory_used_bytes"]
        size = "-" if memory is None else f"{memory / 2**30:.1f} GiB"
        free = "" if None in (memory, used) else f", {(memory - used) / 2**30:.1f} GiB free"
        rows.append((f"GPU {at}", f"{_or_dash(gpu['name'])}, driver {_or_dash(gpu['driver'])}"))
        rows.append((f"GPU {at} memory", size + free))
    for at, link in enumerate(found.links):
        rows.append(
            (f"GPU {at} PCIe",
             f"generation {_or_dash(link.generation)} x{_or_dash(link.lanes)} now, "
             f"{_or_dash(link.generation_max)} x{_or_dash(link.lanes_max)} at best ({link.source})")
        )  # fmt: skip
    if found.gpus is None:
        rows.append(("GPU", "-"))
    return rows


def _memory_limit(host: dict[str, Any]) -> str:
    """Of a container or service; '-': none, or not known."""
    limit, left = host["memory_limit_bytes"], host["memory_limit_available_bytes"]
    if limit is None:
        return "-"
    free = "-" if left is None else f"{left / 2**30:.1f} GiB"
    return f"{limit / 2**30:.1f} GiB, {free} of it left"


def _features(features: dict[str, bool] | None) -> str:
    if features is None:
        return "-"
    return ", ".join(name for name, has in features.items() if has) or "none of those that matter"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _giga(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.1f}"

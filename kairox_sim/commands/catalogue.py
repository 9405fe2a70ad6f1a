"""kairox hardware and kairox models: what --hardware and --as take, with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairox_sim.commands.options import Json, print_json, wide_console

if TYPE_CHECKING:
    from kairox_sim.hardware import HardwareProfile
    from kairox_sim.model import ModelShape

GPU_CPU_LINK = "A machine of parts is GPU+CPU+LINK, such as rtx4090+epyc-7542+pcie4."
MODEL_AT_KIND = (
    "Another type of weights is MODEL@KIND with q8_0, q4_0 or float16, such as prosparse-7b@q8_0."
)


def hardware(
    name: Annotated[
        str | None, typer.Argument(help="One machine, with every number and its source.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the machines that --hardware takes and the parts to make others from: GPU+CPU+LINK.

    Rates are what a pass over weights reaches, not the peak of the datasheet.

    Example: kairox hardware rtx4090+epyc-7542+pcie4
    """
    from rich.table import Table

    from kairox_sim.hardware import (
        bundled_cpus,
        bundled_gpus,
        bundled_links,
        bundled_profiles,
        load_cpu,
        load_gpu,
        load_link,
        load_profile,
    )

    if name is not None:
        _print_machine(load_profile(name), as_json)
        return
    machines = [_machine(each, load_profile(each)) for each in bundled_profiles()]
    parts: dict[str, list[dict[str, Any]]] = {
        "gpu": [{"name": each, **_values(load_gpu(each))} for each in bundled_gpus()],
        "cpu": [{"name": each, **_values(load_cpu(each))} for each in bundled_cpus()],
        "link": [
            {"name": each, "h2d_bytes_per_s": load_link(each).h2d.bytes_per_s.value}
            for each in bundled_links()
        ],
    }
    if as_json:
        print_json({"machines": machines, "parts": parts, "form": "gpu+cpu+link"})
        return
    console = wide_console()
    table = Table(title="machines, for --hardware (GB and GB/s are 1e9)")
    shown = {
        "machine": "name", "GPU": "gpu", "CPU": "cpu", "link": "link", "VRAM GB": "vram_bytes",
        "GPU GB/s": "ffn_gpu_bytes_per_s", "CPU sparse GB/s": "ffn_cpu_bytes_per_s",
        "DRAM GB/s": "dram_bytes_per_s", "to device GB/s": "h2d_bytes_per_s", "kind": "kind",
    }  # fmt: skip
    for column in shown:
        table.add_column(column, justify="right" if "GB" in column else "left")
    for row in machines:
        table.add_row(*(_shown(row[key]) for key in shown.values()))
    console.print(table)
    for kind, rows in parts.items():
        columns = [key for key in rows[0] if key.endswith("bytes_per_s") or key == "vram_bytes"]
        table = Table(title=f"parts: {kind}")
        table.add_column("name")
        for column in columns:
            unit = "GB/s" if column.endswith("_per_s") else "GB"
            table.add_column(f"{column.removesuffix('_per_s').removesuffix('_bytes')} {unit}",
                             justify="right")  # fmt: skip
        for row in rows:
            table.add_row(row["name"], *(_shown(row[column]) for column in columns))
        console.print(table)
    console.print(GPU_CPU_LINK, highlight=False)


def _machine(name: str, profile: HardwareProfile) -> dict[str, Any]:
    """Parts are those its file names; None where its numbers are its own."""
    from kairox_sim.hardware import parts_of

    return {
        "name": name, "kind": profile.kind,
        **{kind: parts_of(name).get(kind) for kind in ("gpu", "cpu", "link")},
        "vram_bytes": profile.vram_bytes.value,
        "ffn_gpu_bytes_per_s": profile.ffn_gpu.bytes_per_s.value,
        "ffn_cpu_bytes_per_s": profile.ffn_cpu.bytes_per_s.value,
        "dram_bytes_per_s": profile.dram_bytes_per_s.value,
        "h2d_bytes_per_s": profile.h2d.bytes_per_s.value,
    }  # fmt: skip


def _values(part: Any) -> dict[str, float]:
    """The numbers of a part by key, without their sources."""
    fields = type(part).model_fields
    return {key: getattr(part, key).value for key in fields if key != "name"}


def _shown(value: Any) -> str:
    """Numbers are bytes or bytes per second; above 1e15 nothing is limited."""
    if isinstance(value, float):
        return "no limit" if value >= 1e15 else f"{value / 1e9:.4g}"
    return "its own" if value is None else str(value)


def _print_machine(profile: HardwareProfile, as_json: bool) -> None:
    from rich.table import Table

    content = profile.model_dump(mode="json", exclude_none=True)
    if as_json:
        print_json(content)
        return
    table = Table("key", "value", "source", title=profile.name)
    for key, value, source in _flat(content):
        table.add_row(key, value, source)
    wide_console().print(table)


def _flat(content: dict[str, Any], under: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, value, source) of every entry."""
    rows = []
    for key, entry in content.items():
        if not isinstance(entry, dict):
            rows.append((under + key, str(entry), ""))
        elif entry.keys() == {"value", "source"}:
            rows.append((under + key, f"{entry['value']:.6g}", entry["source"]))
        else:
            rows += _flat(entry, f"{under}{key}.")
    return rows


def models(
    name: Annotated[str | None, typer.Argument(help="One model, with its sources.")] = None,
    as_json: Json = False,
) -> None:
    """List the models that --as takes, with their sizes and the published share of active neurons.

    Neurons are of one layer, all experts together; unknown is what nothing published says.

    Example: kairox models prosparse-7b@q8_0
    """
    from rich.table import Table

    from kairox_sim.model import CATALOGUE, find_shape

    rows = [_model(shape) for shape in (CATALOGUE.values() if name is None else [find_shape(name)])]
    if as_json:
        print_json(rows)
        return
    console = wide_console()
    if name is not None:
        table = Table("what", "value", title=rows[0]["name"])
        for key, value in rows[0].items():
            table.add_row(key, "unknown" if value is None else str(value))
        console.print(table)
        return
    shown = ("name", "layers", "d_model", "neurons", "bytes_per_neuron", "activation", "sparse",
             "active_share", "predictor_rank")  # fmt: skip
    table = Table(title="models, for --as")
    for key in shown:
        words = key if key == "d_model" else key.replace("_", " ")
        table.add_column(words, justify="left" if key in ("name", "activation") else "right")
    for row in rows:
        share = row["active_share"]
        cells = row | {
            "sparse": "yes" if row["sparse"] else "no",
            "active_share": None if share is None else f"{share:.1%}",
        }
        table.add_row(*("unknown" if cells[key] is None else str(cells[key]) for key in shown))
    console.print(table)
    console.print(MODEL_AT_KIND, highlight=False)


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name, "layers": shape.n_layers, "d_model": shape.d_model,
        "neurons": shape.n_neurons, "bytes_per_neuron": shape.neuron_bytes,
        "bytes_per_weight": shape.bytes_per_weight, "activation": shape.activation,
        "sparse": shape.relu_sparse, "active_share": shape.active_share,
        "predicted_share": shape.predicted_share, "predictor_rank": shape.predictor_rank,
        "experts": shape.n_experts, "experts_per_token": shape.experts_per_token,
        "share_source": shape.share_source, "source": shape.source,
    }  # fmt: skip

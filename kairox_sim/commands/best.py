"""kairox best: the settings to run, out of a sweep's table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kairox_sim.commands.options import Json, Link, print_json, print_warnings
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_place
from kairox_sim.record import EXACT


def best(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="What `kairox sweep` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The settings file to write, TOML.")],
    hardware: Annotated[str, typer.Option(help="One of the table's machines.")],
    link: Link = None,
    vram: Annotated[
        str | None, typer.Option(help="Device memory to fit in: 12GB is 12e9, 12GiB 12 x 2**30.")
    ] = None,
    slots_max: Annotated[
        float | None, typer.Option(min=0, help="Most slots per layer, on average.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose the fastest settings that fit. Within 1 % of the fastest, the smallest budget wins.

    The bounds (all, none) are no choice.

    Example: kairox best demo.parquet --hardware pc1 --link pcie4 --vram 12GiB -o best.toml
    """
    from kairox_sim.choice import TIE
    from kairox_sim.choice import best as choose
    from kairox_sim.units import parse_bytes

    if vram is not None and slots_max is not None:
        raise KairoxError("--vram and --slots-max both bound the budget; give one of them")
    require_place(out, "settings")
    vram_bytes = None if vram is None else parse_bytes(vram)
    settings, row = choose(table, hardware, link=link, vram_bytes=vram_bytes, slots_max=slots_max)
    settings.dump(out)
    print_warnings(row["warnings"].splitlines() if row["warnings"] else [])
    if as_json:
        print_json({"settings_file": str(out), "row": row})
        return
    speed = f"{row['tok_s_scaled']:.4g} tokens/s"
    if row["tok_s_scaled"] != row["tok_s"]:
        speed += f" scaled to the model's layers ({row['tok_s']:.4g} of the trace's)"
    typer.echo(
        f"{out}: {row['label']} on {row['machine']}: {speed} simulated, {row['hit_on_time']:.1%} "
        f"on time, {row['device_bytes'] / 1e9:.2f} GB of device memory ({row['costs']}; "
        f"{row['prediction_label']})"
    )
    if row["exactness"] != EXACT:
        typer.echo(row["exactness"])
    if row["tied"]:
        typer.echo(
            f"within {TIE:.0%} of the fastest, so no slower as far as this can tell, and with no "
            f"smaller budget: {', '.join(row['tied'])}"
        )
    if str(row["costs"]).startswith("stand-in"):
        typer.echo("a stand-in: another model's activations, so no evidence of this model's hits")

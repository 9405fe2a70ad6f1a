"""Options of how a model is kept, computed and predicted, and of what the host does beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairox_sim.commands.options import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from kairox_exec.live_device import HostSide

Numerics = Annotated[
    str | None,
    typer.Option(
        help="fast, or deterministic: sums in fixed point, the same bits wherever a neuron is "
        "computed. \\[default: fast]"
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="How the FFN's rows are kept: float32, float16, bfloat16, int8, q8_0, q4_0. "
        "\\[default: as the rest of the model]"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of everything else: float32, bfloat16, float16. \\[default: float32]"),
]
Vram = Annotated[
    str | None,
    typer.Option(
        help="Device memory to plan for, such as 12GiB; without --slots the budget is what fits."
    ),
]
PredictorFile = Annotated[
    Path | None,
    typer.Option(help="What `train-predictor` wrote, to predict with it (predictor = rank)."),
]
Thresholds = Annotated[
    Path | None,
    typer.Option(help="What `sparsify` wrote, for a dense SwiGLU model: approximate."),
]
HostThreads = Annotated[
    int, typer.Option(help="Threads that compute what is not resident, beside the device.")
]
HostNice = Annotated[
    int, typer.Option(help="Lowers their priority (Linux): 1 to 19. 0 leaves it as it is.")
]
Promotion = Annotated[
    str,
    typer.Option(
        help="How a CUDA device gets its swaps: uva_gather, staged, per_row; auto measures."
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        help="Where FFN rows are kept ready for the next start; off: nowhere. See `kairox "
        "bundles`. \\[default: the platform's cache, for rows of 256 MB and more]"
    ),
]


OnLoad = Callable[[str, int, int], None]


def host_side(
    threads: int,
    nice: int,
    promotion: str,
    cache_dir: Path | None,
    on_load: OnLoad | None = None,
) -> HostSide:
    """What these options say, for the executor. on_load: see `loading_bar`."""
    from kairox_exec.host_pool import HostPool
    from kairox_exec.live_device import HostSide

    where = "off" if cache_dir == Path("off") else cache_dir
    return HostSide(HostPool(threads, nice), promotion, where, on_load, say)


def loading_bar(bar: Progress, task: TaskID) -> OnLoad:
    """Shows on a bar's task how far the loading of a model is, one thing after another."""

    def show(what: str, done: int, of: int) -> None:
        if done == 0:  # another thing, whose time is not that of the one before it
            bar.reset(task, total=of, description=what)
        else:
            bar.update(task, completed=done)

    return show

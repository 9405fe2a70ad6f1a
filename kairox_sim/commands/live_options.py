"""Options of how a model is kept, computed and predicted, and of what the host does beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kairox_exec.live_device import HostSide

Numerics = Annotated[
    str | None,
    typer.Option(
        help="fast, or deterministic: sums in fixed point, the same bits wherever a neuron is "
        "computed. [default: fast]"
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="How the FFN's rows are kept: float32, float16, bfloat16, int8, q8_0, q4_0. "
        "[default: as the rest of the model]"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of everything else: float32, bfloat16, float16. [default: float32]"),
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
        help="Where FFN rows are kept ready for the next start; off: nowhere. See `kairox bundles`."
    ),
]


def host_side(threads: int, nice: int, promotion: str, cache_dir: Path | None) -> HostSide:
    """What these options say, for the executor."""
    from kairox_exec.host_pool import HostPool
    from kairox_exec.live_device import HostSide

    where = "off" if cache_dir == Path("off") else cache_dir
    return HostSide(HostPool(threads, nice), promotion, where)

"""Options of how a model is kept, computed and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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

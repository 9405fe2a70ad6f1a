"""How far simulation was from live runs, queue by queue: where the error of a total comes from."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

QUEUES = {  # column of a validation's table, without live_ and simulated_: what it is
    "gpu_s": "GPU busy",
    "cpu_busy_s": "CPU pool busy",
    "swap_busy_s": "h2d carrying swaps",
    "act_busy_s": "x and partial sums, both ways",
    "decide_s": "policy deciding",
    "wait_cpu_s": "GPU waits for the CPU",
    "wait_io_s": "GPU waits for swaps",
    "wait_decide_s": "GPU waits for the policy",
}


@dataclass(frozen=True, slots=True)
class QueueError:
    """Over the settings of a validation. Shares are of the live time per token."""

    queue: str
    means: str
    settings: int  # in which it was known on both sides
    live_share: float  # median: how much of a token it takes
    median_error: float  # of |simulated - live|, as a share of the token
    worst_error: float
    worst_setting: str
    own_error: float  # median of |simulated / live - 1|, where it is over 1 % of a token


def queue_errors(table: pd.DataFrame) -> list[QueueError]:
    """A row per queue; nan where no setting knows it."""
    return [_row(table, queue) for queue in QUEUES]


def _row(table: pd.DataFrame, queue: str) -> QueueError:
    live = table[f"live_{queue}"].to_numpy(float)
    simulated = table[f"simulated_{queue}"].to_numpy(float)
    token_s = 1 / table["live_tok_s"].to_numpy(float)
    known = ~(np.isnan(live) | np.isnan(simulated))
    names = table["setting"].to_numpy()[known]
    live, simulated, token_s = live[known], simulated[known], token_s[known]
    if not live.size:
        nan = float("nan")
        return QueueError(queue, QUEUES[queue], 0, nan, nan, nan, "", nan)
    error = np.abs(simulated - live) / token_s
    counts = live > 0.01 * token_s
    own = np.abs(simulated[counts] / live[counts] - 1)
    return QueueError(
        queue=queue,
        means=QUEUES[queue],
        settings=int(live.size),
        live_share=median((live / token_s).tolist()),
        median_error=median(error.tolist()),
        worst_error=float(error.max()),
        worst_setting=str(names[error.argmax()]),
        own_error=median(own.tolist()) if own.size else float("nan"),
    )

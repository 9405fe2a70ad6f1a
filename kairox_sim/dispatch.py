"""Who computes what is not on the device, as far as it is a choice: names, and the choice by cost.

* concurrent: the host, beside the device;
* serial: the host, after the device, and nothing overlaps (a baseline of PowerInfer's kind
  without its concurrency);
* gpu: the device, once copies made on demand have landed in staging (Deja Vu's kind of system
  where not everything fits);
* cost: some are copied and the rest is the host's, split where the two take the same time
  (Fiddler, arXiv 2402.07033);
* layers: whole layers, on one side each (llama.cpp's -ngl); see `whole_layers`.
"""

from __future__ import annotations

from typing import Literal, get_args

from kairox_sim.cost_model import CostModel
from kairox_sim.policies.base import Ids

Dispatch = Literal["concurrent", "serial", "gpu", "cost", "layers"]
DISPATCHES: tuple[str, ...] = get_args(Dispatch)


def n_fetched(
    dispatch: str, costs: CostModel, layer: int, residual: Ids, n_tokens: int, part: int
) -> int:
    """How many of the residual neurons, the lowest ids, are copied on demand, `part` at a time."""
    if dispatch == "gpu":
        return residual.size
    if dispatch == "cost" and residual.size:
        return cheapest_split(costs, layer, residual, n_tokens, part)
    return 0


def cheapest_split(costs: CostModel, layer: int, residual: Ids, n_tokens: int, part: int) -> int:
    """The k that minimises max(host path of n - k, copies of k and then the device), idle machine.

    Fiddler enumerates k for experts; here the first falls and the second rises with k, so the
    minimum is where they cross. Of equals the one with fewer copies.
    """

    def host_s(k: int) -> float:
        return costs.host_path_s(residual.size - k, n_tokens)

    def device_s(k: int) -> float:
        if k == 0:
            return 0.0
        return costs.fetch_s(layer, residual[:k], part) + costs.ffn_gpu_s(k, n_tokens)

    low, high = 0, residual.size  # device_s(high) >= host_s(high) = 0
    while low < high:
        middle = (low + high) // 2
        if device_s(middle) >= host_s(middle):
            high = middle
        else:
            low = middle + 1
    return low - 1 if low and host_s(low - 1) <= device_s(low) else low

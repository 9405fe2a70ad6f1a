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

from bisect import bisect_left
from itertools import accumulate
from typing import Literal, get_args

from kairox_sim.cost_model import CostModel
from kairox_sim.flows import to_ns
from kairox_sim.policies.base import Ids

Dispatch = Literal["concurrent", "serial", "gpu", "cost", "layers"]
DISPATCHES: tuple[str, ...] = get_args(Dispatch)


def n_fetched(
    dispatch: str, costs: CostModel, layer: int, residual: Ids, n_tokens: int, part: int
) -> int:
    """How many of the residual neurons, the lowest ids, are copied on demand, `part` at a time."""
    if dispatch == "gpu":
        return residual.size
    if dispatch == "cost":
        return cheapest_split(costs, layer, residual, n_tokens, part)
    return 0


def cheapest_split(costs: CostModel, layer: int, residual: Ids, n_tokens: int, part: int) -> int:
    """The k that minimises max(host path of n - k, copies of k and then the device), idle machine.

    In whole nanoseconds; of equals the one with the fewest copies. Fiddler enumerates k for the
    experts of a layer; here the first falls with k and the second rises, so that both what is best
    and the first k that reaches it are found by bisection.
    """
    n = residual.size
    whole = (residual[at : at + part] for at in range(0, n - n % part, part))
    landed_s = [0.0, *accumulate(costs.swap_of_s(layer, ids) for ids in whole)]  # after so many

    def host_ns(k: int) -> int:
        return to_ns(costs.host_path_s(n - k, n_tokens))

    def device_ns(k: int) -> int:
        if k == 0:
            return 0
        copies_s = landed_s[k // part]
        if k % part:
            copies_s += costs.swap_of_s(layer, residual[k - k % part : k])
        return to_ns(copies_s + costs.ffn_gpu_s(k, n_tokens))

    ks = range(n + 1)
    crossing = bisect_left(ks, True, key=lambda k: device_ns(k) >= host_ns(k))  # at n, host_ns is 0
    best_ns = device_ns(crossing)
    if crossing:
        best_ns = min(best_ns, host_ns(crossing - 1))
    return bisect_left(ks, True, hi=crossing, key=lambda k: host_ns(k) <= best_ns)

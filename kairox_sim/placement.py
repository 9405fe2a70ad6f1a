"""Where neurons are when a run begins: slots per layer, and who sits in them.

`counts` gives every layer the slots its rule says and fills them with the layer's most frequent
neurons. The others decide both at once, as the systems do that they are taken from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError

Placement = Literal["counts", "layers", "solver", "solver-shipped", "balanced"]
Counts = NDArray[np.int64]  # [n_layers, n_neurons] activations in the prior
Ids = NDArray[np.int32]

SOLVER_BATCH = 64  # PowerInfer's paper; its shipped loader uses 256
SHIPPED_BATCH = 256


@dataclass(frozen=True, slots=True)
class Placed:
    """slots[layer] places, of which resident[layer] are taken at the start."""

    slots: tuple[int, ...]
    resident: tuple[Ids, ...]  # sorted ids


def by_counts(fired: Counts, slots: Sequence[int]) -> Placed:
    """Per layer the neurons that fired most, as many as it has slots; ties to the lowest index."""
    return Placed(tuple(slots), tuple(_top(fired[layer], k) for layer, k in enumerate(slots)))


def first(n_neurons: int, slots: Sequence[int]) -> Placed:
    """The neurons of lowest index, as the released Kairox code begins (of its reordered ones)."""
    taken = tuple(np.arange(min(k, n_neurons), dtype=np.int32) for k in slots)
    return Placed(tuple(slots), taken)


def by_first_use(first_use: NDArray[np.int64], slots: Sequence[int]) -> Placed:
    """Per layer the neurons used soonest, [n_layers, n_neurons] steps: what an oracle begins with.

    Ties to the lowest index.
    """
    return by_counts(-first_use, slots)


def whole_layers(
    n_layers: int, n_neurons: int, n_on_device: int, *, of: int | None = None
) -> Placed:
    """The last `n_on_device` layers whole, the others not at all: llama.cpp's -ngl.

    of: layers of the model, n_layers by default. Of a stand-in each layer is of / n_layers of them,
    so that the one at the boundary may be partly on the device, by its neurons of lowest index:
    never more of the model than `n_on_device` layers are.
    llama.cpp, src/llama-model.cpp: layers from n_layer - ngl on are offloaded.
    """
    n_of_model = n_layers if of is None else of
    if not 0 <= n_on_device <= n_of_model:
        raise KairoxError(f"{n_on_device} layers on the device; allowed: 0 to {n_of_model}")
    n_whole, left = divmod(n_on_device * n_layers * n_neurons // n_of_model, n_neurons)
    slots = [left] * (n_whole < n_layers) + [n_neurons] * n_whole
    return first(n_neurons, [0] * (n_layers - len(slots)) + slots)


def solved(fired: Counts, total: int, *, least: int, batch: int = SOLVER_BATCH) -> Placed:
    """PowerInfer's placement (SOSP '24, section 6): the most activations in `total` slots.

    Neurons of a layer are sorted by count and taken `batch` at a time, over all layers by count
    per neuron: what its integer program finds, but for the last batches. A layer gets none or at
    least `least` neurons, below which the hand-over costs more than the device saves; what a layer
    that stays below it would have had goes to the others. Ties to the lowest layer.
    """
    n_neurons = fired.shape[1]
    order = np.argsort(-fired, axis=1, kind="stable")
    left_out: set[int] = set()
    while True:
        slots = _greedy(fired, order, total, batch, left_out)
        short = [layer for layer, k in enumerate(slots) if 0 < k < min(least, n_neurons)]
        if not short:
            break
        # The one that gains least by being there goes first.
        gains = [int(fired[layer][order[layer][: slots[layer]]].sum()) for layer in short]
        left_out.add(short[int(np.argmin(gains))])
    taken = tuple(np.sort(order[layer][:k]).astype(np.int32) for layer, k in enumerate(slots))
    return Placed(tuple(slots), taken)


def solved_as_shipped(fired: Counts, total: int, *, batch: int = SHIPPED_BATCH) -> Placed:
    """PowerInfer's tool as released: right numbers, ids from another layer's statistics.

    `powerinfer-py/powerinfer/export_split.py` reads `activation_*.pt` in lexicographic order (0, 1,
    10, 11, ..., 2, 20, ...) and `solver.py` in numeric order, so that the neurons chosen for most
    layers are those hot in another one; up to 10 layers the two orders are the same. The minimum
    per layer is off and the batch is 256, as its loader calls it (github.com/SJTU-IPADS/PowerInfer
    at d3ebd7c5).
    """
    n_layers = fired.shape[0]
    right = solved(fired, total, least=0, batch=batch)
    read_as = sorted(range(n_layers), key=str)  # the layer whose file is read for each layer
    taken = tuple(_top(fired[read_as[layer]], k) for layer, k in enumerate(right.slots))
    return Placed(right.slots, taken)


def balanced(fired: Counts, slots: Sequence[int], gpu_over_cpu: float) -> Placed:
    """Q-Infer's placement: hot neurons until device and host would finish together.

    Per layer, the most frequent first, while the device's share of activations over the host's is
    below the ratio of their rates, and there are slots (ACM TACO 2025, DOI 10.1145/3764589, and
    github.com/PDS-Lab/Q-Infer, which measures the ratio when it loads; here it is the machine
    profile's). Slots it leaves are for its swaps.
    """
    taken = []
    for layer, room in enumerate(slots):
        total = int(fired[layer].sum())
        order = np.argsort(-fired[layer], kind="stable")
        on_gpu = np.cumsum(fired[layer][order])  # [n_neurons] with the first i + 1 of them
        enough = on_gpu >= gpu_over_cpu * (total - on_gpu)
        k = int(np.argmax(enough)) + 1 if enough.any() and total else room
        taken.append(np.sort(order[: min(k, room)]).astype(np.int32))
    return Placed(tuple(slots), tuple(taken))


def least_per_layer(
    *, bundle_bytes: float, gpu_bytes_per_s: float, cpu_bytes_per_s: float, sync_s: float
) -> int:
    """PowerInfer's C_l: the fewest neurons with C T_gpu + T_sync <= C T_cpu, T = bytes / rate.

    More than any layer has where the device is not the faster side.
    """
    saved_s = bundle_bytes / cpu_bytes_per_s - bundle_bytes / gpu_bytes_per_s
    return math.ceil(sync_s / saved_s) if saved_s > 0 else 2**31


def _top(fired: NDArray[np.int64], k: int) -> Ids:
    return np.sort(np.argsort(-fired, kind="stable")[:k]).astype(np.int32)


def _greedy(
    fired: Counts, order: NDArray[np.intp], total: int, batch: int, left_out: set[int]
) -> list[int]:
    """Neurons per layer: batches of falling mean count until `total` are taken."""
    n_layers, n_neurons = fired.shape
    starts = np.arange(0, n_neurons, batch)
    sizes = np.minimum(batch, n_neurons - starts)  # [n_batches]
    sorted_counts = np.take_along_axis(fired, order, axis=1)
    sums = np.add.reduceat(sorted_counts, starts, axis=1)  # [n_layers, n_batches]
    value = sums / sizes
    for layer in left_out:
        value[layer] = -1.0
    best = np.argsort(-value, axis=None, kind="stable")
    slots = [0] * n_layers
    left = total
    for flat in best:
        layer, at = divmod(int(flat), starts.size)
        if left == 0 or value[layer, at] < 0:
            break
        n = min(int(sizes[at]), left)
        slots[layer] += n
        left -= n
    return slots

"""Whole layers on one side each: what one step is, as a plain sequence of operations.

llama.cpp's `-ngl N`: the last N layers live on the GPU with their keys and values and run there
whole; the others, attention included, run on the CPU from host memory. Strictly one after the
other, so a step is a list and needs no queues. x crosses the bus where the side changes. The head
is on the GPU only if every layer is: llama.cpp offloads the output layer when ngl > n_layers
(github.com/ggml-org/llama.cpp, src/llama-model.cpp), and the embedding, whose rows are charged with
the head, is read where layer 0 runs. Dense kernels stream whole matrices: the pool reads at the
full DRAM rate, not at the sparse kernel's.

A layer of a stand-in is several of the model's, so that the boundary may lie within it: it is then
on the GPU by a share, the host's part first, as the model's layers would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kairox_sim.cache import NeuronCache
from kairox_sim.cost_model import CostModel
from kairox_sim.errors import KairoxError
from kairox_sim.flows import to_ns
from kairox_sim.policies.base import RESIDENT
from kairox_sim.stream import Stream


class Op(NamedTuple):
    """While it is not the GPU's, the GPU waits."""

    lane: str  # "gpu" | "cpu" | "h2d" | "d2h" | "" for a hand-over, which is on none
    name: str
    layer: int  # -1: the head
    ns: int


def layers_on_gpu(cache: NeuronCache, costs: CostModel) -> tuple[float, ...]:
    """The share of each layer that is on the GPU: 0 or 1, but for the boundary of a stand-in.

    Raises where whole layers of the model cannot be on one side each.
    """
    if costs.gating != "dense":
        raise KairoxError(
            f"dispatch 'layers' computes whole layers and gating is {costs.gating!r}; use gating "
            "dense, or another dispatch"
        )
    if cache.policy.admits != "never":
        raise KairoxError(
            f"dispatch 'layers' moves nothing and {type(cache.policy).__name__} plans copies; use "
            "the static policy, or another dispatch"
        )
    shares = tuple(int((state >= RESIDENT).sum()) / cache.n_neurons for state in cache.state)
    parts = [
        layer for layer, slots in enumerate(cache.capacity) if slots and not cache.is_whole(layer)
    ]
    if not parts:
        return shares
    layer, slots = parts[0], cache.capacity[parts[0]]
    if costs.layers_ratio == 1:
        raise KairoxError(
            f"dispatch 'layers' has whole layers on the GPU and layer {layer} has {slots} "
            f"slots for {cache.n_neurons} neurons; give each layer 0 or all of them, filled "
            "from the start"
        )
    filled = shares[layer] == slots / cache.n_neurons
    if len(parts) > 1 or not filled or list(shares) != sorted(shares):
        raise KairoxError(
            f"dispatch 'layers' has the last layers on the GPU and layer {layer} has {slots} slots "
            f"for {cache.n_neurons} neurons; of a stand-in's layers only the one between those "
            "without slots and whole ones may be in part, filled from the start: give slots ngl:N"
        )
    return shares


def ops_of_step(
    costs: CostModel, on_gpu: Sequence[float], n_neurons: int, n_tokens: int, context_len: int
) -> Iterator[Op]:
    """The operations of one step over layers of `n_neurons`, in order. on_gpu: shares of layers.

    A share of a stand-in's layer is whole layers of the model, and takes that share of its time.
    """
    attention_gpu_s = costs.attention_s(n_tokens, context_len)
    attention_cpu_s = costs.attention_cpu_s(n_tokens, context_len)
    ffn_gpu_s = costs.ffn_gpu_s(n_neurons, n_tokens)
    ffn_cpu_s = costs.dense_ffn_cpu_s(n_neurons, n_tokens)
    side = on_gpu[0] == 1
    for layer, share in enumerate(on_gpu):
        if share < 1:
            if side:
                yield from _crossing(costs, False, layer, n_tokens)
            side = False
            yield Op("cpu", "attention", layer, to_ns((1 - share) * attention_cpu_s))
            yield Op("cpu", "ffn", layer, to_ns((1 - share) * ffn_cpu_s))
        if share > 0:
            if not side:
                yield from _crossing(costs, True, layer, n_tokens)
            side = True
            yield Op("gpu", "attention", layer, to_ns(share * attention_gpu_s))
            yield Op("gpu", "ffn", layer, to_ns(share * ffn_gpu_s))
    if all(share == 1 for share in on_gpu):
        yield Op("gpu", "head", -1, to_ns(costs.head_s(1)))
    else:
        if side:
            yield from _crossing(costs, False, -1, 1)
        yield Op("cpu", "head", -1, to_ns(costs.head_cpu_s(1)))


def play(op: Op, stream: Stream) -> None:
    """One operation on the stream, which waits for what is not its own."""
    if op.lane == "gpu":
        stream.compute(op.name, op.layer, op.ns)
        return
    tally, began_ns = stream.tally, stream.free_ns
    waited_ns = stream.wait_for_cpu(began_ns + op.ns)
    if op.layer >= 0:
        tally.layer_wait_cpu[op.layer] = tally.layer_wait_cpu.get(op.layer, 0) + waited_ns
    if op.lane == "cpu":
        tally.cpu += op.ns
    elif op.lane:
        tally.activations += op.ns
    if op.lane and stream.keep_slices:
        stream.keep(op.lane, op.name, op.layer, began_ns, stream.free_ns)


def _crossing(costs: CostModel, to_gpu: bool, layer: int, n_tokens: int) -> Iterator[Op]:
    """Once in a step of the model, however many layers stand for it: a layer's share, as the
    head's."""
    ratio = costs.layers_ratio
    if to_gpu:
        yield Op("h2d", "x", layer, to_ns(ratio * costs.x_h2d_s(n_tokens)))
    else:
        yield Op("d2h", "x", layer, to_ns(ratio * costs.act_d2h_s(n_tokens)))
    yield Op("", "hand-over", layer, to_ns(ratio * costs.handover_s))

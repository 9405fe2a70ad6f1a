"""What each operation of a step costs on one machine, in seconds and bytes: plain numbers.

A `CostModel` joins a hardware profile and a model shape once; both drivers then only call it.
It knows the *trace's* layers and neurons, which differ from the model's when a small model's
activations stand in for a large one: then one trace neuron carries `bundles_per_neuron` bundles,
and what is paid once per step is multiplied by `layers_ratio`. Fixed costs stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kairox_sim.linking import reads
from kairox_sim.model import ModelShape, Numerics

PARTIAL_SUM_BYTES = {"fast": 4, "deterministic": 8}  # exchanged in float32; in int64

# How a swap becomes copies: gathered into one; one per bundle; one per matrix, whose rows of the
# swap lie side by side; one per row of every bundle.
Copies = Literal["gather", "bundle", "matrix", "row"]
COPIES: tuple[str, ...] = get_args(Copies)


@dataclass(frozen=True, slots=True)
class PassCost:
    """A pass over weights on one device: a fixed cost, then the larger of bytes and flops."""

    fixed_s: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, n_bytes: float, n_flops: float) -> float:
        """Duration of one pass. The fixed cost is charged even when there is nothing to read."""
        return self.fixed_s + max(n_bytes / self.bytes_per_s, n_flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class DecideCost:
    """One plan of one policy class: fixed + neurons / rate + swaps x per_swap."""

    fixed_s: float
    neurons_per_s: float
    per_swap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds and bytes of one layer-step. Every `n_neurons` counts neurons of the trace."""

    shape: ModelShape
    gating: str
    predictor: str
    bundles_per_neuron: float  # n_neurons of the model / of the trace
    layers_ratio: float  # layers of the trace / of the model
    swap_neurons: int  # trace neurons per swap; as many bytes as the asked number on the model

    attention: PassCost
    gate: PassCost
    look_ahead: PassCost  # the gate of the next layer, as a guess: always in float32
    low_rank: PassCost
    ffn_gpu: PassCost
    head: PassCost

    cpu_fixed_s: float
    cpu_cap_bytes_per_s: float  # of the sparse kernel alone, memory-bound
    cpu_flops_per_s: float
    dram_bytes_per_s: float  # shared by CPU work and host-to-device copies

    bundle_bytes: float  # of one trace neuron
    copies: Copies
    h2d_copy_fixed_s: float
    h2d_bytes_per_s: float
    act_h2d_fixed_s: float
    d2h_copy_fixed_s: float
    d2h_bytes_per_s: float
    handover_s: float  # each way: x down to the host, partial sums back up

    decide: Mapping[str, DecideCost]
    decide_neurons: int  # neurons a plan goes over
    decide_blocks_gpu: bool

    numerics: Numerics = "fast"
    copy_sync_s: float = 0.0  # a copy's share of the synchronisation that follows every so many
    handovers: int = 1  # of each layer-step with residual work: x down, partial sums back
    evaluated_share: float = 1.0  # of what is called evaluated: less than 1 where a router chooses
    position: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
    """[n_layers, n_neurons] of the trace: place in host memory, where neighbours are read in one
    copy; None where a copy is never longer than the swap's own bytes."""

    def attention_s(self, n_tokens: int, context_len: int) -> float:
        """One layer. Reads the keys and values of all `context_len` tokens, these ones included."""
        shape = self.shape
        n_bytes = shape.attention_bytes + shape.kv_bytes_per_token * context_len
        return self.attention.seconds(n_bytes, shape.attention_flops(n_tokens, context_len))

    def gate_s(self, n_tokens: int) -> float:
        """Deciding what is evaluated: the gate pass (exact), its int8 screen (screened), else 0.

        `oracle` knows, `predicted` has paid in `predict_s`, and `dense` has nothing to decide, so
        none of them runs a kernel here.
        """
        if self.gating not in ("exact", "screened"):
            return 0.0
        return self._gate_pass_s(self.gate, n_tokens)

    def predict_s(self, n_tokens: int) -> float:
        """One layer: the low-rank predictor, the gate pass that the look-ahead one is, or 0."""
        if self.predictor == "none":
            return 0.0
        if self.predictor == "lookahead":
            return self._gate_pass_s(self.look_ahead, n_tokens)
        shape = self.shape
        return self.low_rank.seconds(shape.predictor_bytes, shape.predictor_flops * n_tokens)

    def _gate_pass_s(self, cost: PassCost, n_tokens: int) -> float:
        shape = self.shape
        n_bytes = shape.screen_bytes if self.gating == "screened" else shape.gate_bytes
        return cost.seconds(n_bytes, shape.gate_flops * n_tokens)

    def head_s(self, n_tokens: int) -> float:
        """Once per step, for the tokens that get logits (1 in prefill): a layer's share of it each.

        Includes reading their embedding rows. All of it is multiplied by `layers_ratio`, so that a
        trace of fewer layers pays the same head per layer.
        """
        shape = self.shape
        n_bytes = shape.head_bytes + n_tokens * shape.row_bytes
        return self.layers_ratio * self.head.seconds(n_bytes, shape.head_flops * n_tokens)

    def ffn_gpu_s(self, n_neurons: int, n_tokens: int) -> float:
        """Resident neurons on the device. Launched, and charged its fixed cost, even for none."""
        return self.ffn_gpu.seconds(
            n_neurons * self.bundle_bytes * self._touched(n_tokens),
            self._ffn_flops(n_neurons, n_tokens),
        )

    def cpu_bytes(self, n_neurons: int, n_tokens: int = 1) -> float:
        """What the host reads from DRAM for residual neurons."""
        return n_neurons * self.bundle_bytes * self._touched(n_tokens)

    def cpu_rate_cap_bytes_per_s(self, n_tokens: int) -> float:
        """The fastest the host reads while also doing the arithmetic for `n_tokens`."""
        flops, n_bytes = self._ffn_flops(1, n_tokens), self.cpu_bytes(1, n_tokens)
        return min(self.cpu_cap_bytes_per_s, n_bytes * self.cpu_flops_per_s / flops)

    def ffn_cpu_s(self, n_neurons: int, n_tokens: int) -> float:
        """Residual neurons on an otherwise idle host; 0 for none. Copies under way slow it."""
        if n_neurons == 0:
            return 0.0
        rate = min(self.cpu_rate_cap_bytes_per_s(n_tokens), self.dram_bytes_per_s)
        return self.cpu_fixed_s + self.cpu_bytes(n_neurons, n_tokens) / rate

    def swap_bytes(self, n_neurons: int) -> float:
        """Bytes over the link for a swap of so many trace neurons, without gaps."""
        return n_neurons * self.bundle_bytes

    def swap_copies(self, n_neurons: int) -> float:
        """Copies a swap is where positions play no part."""
        if n_neurons == 0:
            return 0.0
        if self.copies == "gather":
            return 1.0
        rows = float(self.shape.bundle_rows(self.gating))
        if self.copies == "matrix":
            return rows
        bundles = n_neurons * self.bundles_per_neuron
        return bundles * rows if self.copies == "row" else bundles

    def swap_fixed_s(self, n_neurons: int) -> float:
        """Time of a swap that no bandwidth takes away, where positions play no part."""
        return self.swap_copies(n_neurons) * self._copy_s

    def swap_s(self, n_neurons: int) -> float:
        """A swap alone on the link and on DRAM, where positions play no part."""
        rate = min(self.h2d_bytes_per_s, self.dram_bytes_per_s)
        return self.swap_fixed_s(n_neurons) + self.swap_bytes(n_neurons) / rate

    def swap_of(self, layer: int, ids: NDArray[np.int32]) -> tuple[float, float]:
        """(bytes, fixed seconds) of the swap of these trace neurons.

        With positions: the reads that they are, the bytes of the gaps read through included. A
        stand-in's neuron is several bundles, which lie about as its neurons do.
        """
        if self.position is None:
            return self.swap_bytes(ids.size), self.swap_fixed_s(ids.size)
        reads_per_item = self.bundles_per_neuron
        if self.copies == "row":
            reads_per_item *= self.shape.bundle_rows(self.gating)
        n_reads, n_bytes = reads(
            np.sort(self.position[layer].take(ids)),
            self.bundle_bytes / reads_per_item,
            self.h2d_bytes_per_s,
            self._copy_s,
        )
        return n_bytes * reads_per_item, n_reads * reads_per_item * self._copy_s

    def swap_of_s(self, layer: int, ids: NDArray[np.int32]) -> float:
        """The swap of these alone on the link and on DRAM."""
        n_bytes, fixed_s = self.swap_of(layer, ids)
        return fixed_s + n_bytes / min(self.h2d_bytes_per_s, self.dram_bytes_per_s)

    def host_path_s(self, n_neurons: int, n_tokens: int) -> float:
        """Residual neurons through the host, hand-overs included, on an idle machine; 0 for none.

        From the moment the GPU gives x away to when it can add the partial sums.
        """
        if n_neurons == 0:
            return 0.0
        one_s = self.act_d2h_s(n_tokens) + self.act_h2d_s(n_tokens) + 2 * self.handover_s
        return self.handovers * one_s + self.ffn_cpu_s(n_neurons, n_tokens)

    def dense_cpu_s(self, n_bytes: float, n_flops: float) -> float:
        """A dense pass of the host over whole matrices: they stream at the full DRAM rate."""
        return self.cpu_fixed_s + max(
            n_bytes / self.dram_bytes_per_s, n_flops / self.cpu_flops_per_s
        )

    def attention_cpu_s(self, n_tokens: int, context_len: int) -> float:
        """Attention of one layer that lives, with its keys and values, in host memory."""
        shape = self.shape
        n_bytes = shape.attention_bytes + shape.kv_bytes_per_token * context_len
        return self.dense_cpu_s(n_bytes, shape.attention_flops(n_tokens, context_len))

    def dense_ffn_cpu_s(self, n_neurons: int, n_tokens: int) -> float:
        """The FFN of a layer that lives in host memory."""
        return self.dense_cpu_s(
            self.cpu_bytes(n_neurons, n_tokens), self._ffn_flops(n_neurons, n_tokens)
        )

    def head_cpu_s(self, n_tokens: int) -> float:
        """The head as in `head_s`, in host memory."""
        shape = self.shape
        n_bytes = shape.head_bytes + n_tokens * shape.row_bytes
        return self.layers_ratio * self.dense_cpu_s(n_bytes, shape.head_flops * n_tokens)

    def x_h2d_s(self, n_tokens: int) -> float:
        """x up to the device, as it is and not as partial sums."""
        return self.act_h2d_fixed_s + n_tokens * self.shape.hidden_bytes / self.h2d_bytes_per_s

    def act_d2h_bytes(self, n_tokens: int) -> float:
        """The FFN's input, and what says which neurons fired.

        Under `exact` and `screened` gating that is the gate's value for every neuron, under `dense`
        nothing, otherwise a bit for each.
        """
        shape = self.shape
        if self.gating in ("exact", "screened"):
            fired = shape.n_neurons * shape.value_bytes
        elif self.gating == "dense":
            fired = 0
        else:
            fired = -(-shape.n_neurons // 8)
        return float(n_tokens * (shape.hidden_bytes + fired))

    def act_d2h_s(self, n_tokens: int) -> float:
        """One copy from device to host, before the host can start."""
        return self.d2h_copy_fixed_s + self.act_d2h_bytes(n_tokens) / self.d2h_bytes_per_s

    def act_h2d_bytes(self, n_tokens: int) -> float:
        """The host's partial sums: n_tokens x d_model in float32, or in int64."""
        return float(n_tokens * self.shape.d_model * PARTIAL_SUM_BYTES[self.numerics])

    def act_h2d_s(self, n_tokens: int) -> float:
        """The partial sums alone on the link."""
        return self.act_h2d_fixed_s + self.act_h2d_bytes(n_tokens) / self.h2d_bytes_per_s

    def decide_s(self, policy_class: str, n_swaps: int) -> float:
        """One plan by a policy of this class; a class not in the table costs the default."""
        cost = self.decide.get(policy_class, self.decide["default"])
        return cost.fixed_s + self.decide_neurons / cost.neurons_per_s + n_swaps * cost.per_swap_s

    @property
    def _copy_s(self) -> float:
        return self.h2d_copy_fixed_s + self.copy_sync_s

    def _touched(self, n_tokens: int) -> float:
        """Share of the evaluated neurons' bytes that is read.

        1, but where each token is routed to a share of them, independently and evenly.
        """
        if self.evaluated_share == 1.0:
            return 1.0
        if n_tokens == 1:
            return self.evaluated_share
        return 1.0 - (1.0 - self.evaluated_share) ** n_tokens

    def _ffn_flops(self, n_neurons: int, n_tokens: int) -> float:
        per_neuron = self.shape.bundle_flops(self.gating) * self.bundles_per_neuron
        return n_neurons * per_neuron * n_tokens * self.evaluated_share

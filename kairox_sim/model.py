"""Shapes of language models as bytes and flops, per layer and per neuron, and a catalogue of them.

Knows nothing of machines (`hardware`) or of seconds (`costs`). Counted: the weight matrices, the
keys and values, and the predictor. Not counted: norms, rotary tables, learned positions, routers
of experts and biases, together under 0.1 % of a layer (positions: 1.3 % of OPT-125M). In particular
OPT's biases: `fc1` has one number per neuron, 2 bytes beside a neuron of 16 KiB; it is kept whole
on both sides and never moves. The bias of `fc2` is added once, where the partial sums are joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from kairox_sim.errors import KairoxError
from kairox_sim.model_catalogue import ROWS

Gating = Literal["oracle", "exact", "screened", "predicted", "dense"]  # dense: all
Predictor = Literal["rank", "lookahead", "none"]
Numerics = Literal["fast", "deterministic"]
Weights = Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"]
GATINGS: tuple[str, ...] = get_args(Gating)
PREDICTORS: tuple[str, ...] = get_args(Predictor)

# Activations that give exactly zero, so that leaving a silent neuron out changes nothing.
RELU_LIKE = ("relu", "fatrelu", "relu2", "drelu")

# Bytes per weight: ggml's blocks of 32 weights are 34 bytes (Q8_0) and 18 (Q4_0).
QUANT_BLOCK = 32
WEIGHT_BYTES = {"float16": 2.0, "q8_0": 34 / QUANT_BLOCK, "q4_0": 18 / QUANT_BLOCK}
INT8_SCALE_BYTES = 4  # a row of int8 has one float32 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model as run. Bytes are of one layer, except the embedding's and the head's."""

    name: str
    n_layers: int
    d_model: int
    n_neurons: int  # hidden units of one FFN, those of all experts together
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    gated: bool  # gate, up and down rows; otherwise fc1 and fc2
    activation: str  # drelu: ReLU of both gate and up; relu2: squared
    activation_threshold: float  # fires when the pre-activation exceeds this; silu: its magnitude
    bytes_per_weight: float  # as run; below 2 the weights are quantised, in blocks of 32
    tied_embedding: bool  # the head is the embedding table
    predictor_rank: int | None  # of a published one, d_model -> rank -> n_neurons; None: unknown
    relu_sparse: bool = True  # silent neurons give exactly zero
    approximate: bool = False  # they do not, and a threshold leaves them out all the same
    kv_bytes_per_value: float | None = None  # keys and values; None: `value_bytes`
    ffn_bytes_per_weight: float | None = None  # of the FFN's rows; None: `bytes_per_weight`
    n_experts: int = 1
    experts_per_token: int = 1
    active_share: float | None = None  # published share of n_neurons active per token
    predicted_share: float | None = None  # published share that the predictor fires
    share_source: str = ""
    source: str

    def __post_init__(self) -> None:
        for field in (
            "n_layers", "d_model", "n_neurons", "n_heads", "n_kv_heads", "head_dim", "vocab",
            "n_experts", "experts_per_token",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise KairoxError(
                    f"model {self.name!r}: {field} is {getattr(self, field)}, must be at least 1"
                )
        if not (math.isfinite(self.bytes_per_weight) and self.bytes_per_weight > 0):
            raise KairoxError(f"model {self.name!r}: {self.bytes_per_weight} bytes per weight")
        if self.experts_per_token > self.n_experts or self.n_neurons % self.n_experts:
            raise KairoxError(
                f"model {self.name!r}: {self.experts_per_token} of {self.n_experts} experts in "
                f"{self.n_neurons} neurons; experts are of one size, and no more run than there are"
            )
        for share in (self.active_share, self.predicted_share):
            if share is not None and not 0 < share <= 1:
                raise KairoxError(f"model {self.name!r}: a share of {share}, must be in (0, 1]")
        if self.predictor_rank is not None and self.predictor_rank < 1:
            raise KairoxError(
                f"model {self.name!r}: predictor_rank is {self.predictor_rank}, must be 1 or more, "
                "or None where no predictor is published"
            )
        if self.relu_sparse and self.activation not in RELU_LIKE:
            raise KairoxError(not_relu_like(self.name, self.activation))
        if self.activation in ("relu", "relu2", "drelu") and self.activation_threshold != 0:
            raise KairoxError(
                f"model {self.name!r}: {self.activation} fires above 0, got a threshold of "
                f"{self.activation_threshold}; a shifted one is 'fatrelu'"
            )
        if self.activation == "fatrelu" and not self.activation_threshold > 0:
            raise KairoxError(
                f"model {self.name!r}: fatrelu needs a threshold above 0, "
                f"got {self.activation_threshold}"
            )

    @property
    def rows_per_neuron(self) -> int:
        """Gate, up and down rows, or fc1 and fc2."""
        return 3 if self.gated else 2

    @property
    def dense_neurons(self) -> int:
        """Neurons of one layer that a token reads where all of its experts' are computed."""
        return self.n_neurons * self.experts_per_token // self.n_experts

    @property
    def value_bytes(self) -> float:
        """One activation, and one weight of the predictor: 2 where the weights are quantised.

        Predictors stay in float16 then, as github.com/brothergiven/kairox.cpp quantises them.
        """
        return max(2.0, self.bytes_per_weight)

    @property
    def hidden_bytes(self) -> int:
        """The hidden state of one token: d_model activations."""
        return math.ceil(self.d_model * self.value_bytes)

    @property
    def row_bytes(self) -> int:
        """One row of a matrix that is not of the FFN: d_model weights."""
        return math.ceil(self.d_model * self.bytes_per_weight)

    @property
    def ffn_row_bytes(self) -> int:
        """One row of one neuron: d_model weights of gate, up, down, fc1 or fc2."""
        if self.ffn_bytes_per_weight is None:
            return self.row_bytes
        return math.ceil(self.d_model * self.ffn_bytes_per_weight - 1e-9)

    @property
    def neuron_bytes(self) -> int:
        """All rows of one neuron."""
        return self.rows_per_neuron * self.ffn_row_bytes

    def bundle_rows(self, gating: str) -> int:
        """Rows that move together: under `exact` the deciding row stays on the device."""
        _check_gating(gating)
        return self.rows_per_neuron - (1 if gating == "exact" else 0)

    def bundle_bytes(self, gating: str) -> int:
        """Bytes of one neuron that move together."""
        return self.bundle_rows(gating) * self.ffn_row_bytes

    @property
    def attention_bytes(self) -> int:
        """q, k, v and output projections of one layer."""
        return math.ceil(self._attention_weights * self.bytes_per_weight)

    @property
    def _attention_weights(self) -> int:
        return 2 * self.d_model * (self.n_heads + self.n_kv_heads) * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token in one layer."""
        value = self.value_bytes if self.kv_bytes_per_value is None else self.kv_bytes_per_value
        return math.ceil(2 * self.n_kv_heads * self.head_dim * value)

    @property
    def gate_bytes(self) -> int:
        """The rows that decide (gate, or fc1 of a model without one), all neurons of one layer."""
        return self.n_neurons * self.ffn_row_bytes

    @property
    def screen_bytes(self) -> int:
        """The int8 copy of the deciding rows of one layer, with a float32 scale and bound a row."""
        return self.n_neurons * (self.d_model + 8)

    @property
    def embedding_bytes(self) -> int:
        """The embedding table: vocab x d_model."""
        return self.vocab * self.row_bytes

    @property
    def head_bytes(self) -> int:
        """The output head: vocab x d_model. The embedding table itself when tied."""
        return self.vocab * self.row_bytes

    @property
    def predictor_bytes(self) -> int:
        """The published low-rank predictor of one layer: d_model -> rank -> n_neurons."""
        return math.ceil(self._predictor_weights * self.value_bytes)

    @property
    def _predictor_weights(self) -> int:
        if self.predictor_rank is None:
            raise KairoxError(
                f"model {self.name!r} has no published predictor, so its cost is unknown: "
                "use predictor='lookahead' (or 'none', where the predictor does not decide what is "
                "computed), or the costs of a model that has one (--as)"
            )
        return self.predictor_rank * (self.d_model + self.n_neurons)

    def attention_flops(self, n_tokens: int, context_len: int) -> int:
        """One layer: projections, and scores and weighted sums over `context_len` tokens."""
        scores = 4 * self.n_heads * self.head_dim * context_len
        return n_tokens * (2 * self._attention_weights + scores)

    def bundle_flops(self, gating: str) -> int:
        """One neuron for one token, without the row that `exact` gating has already paid for."""
        return 2 * self.bundle_rows(gating) * self.d_model

    @property
    def gate_flops(self) -> int:
        """The deciding rows of one layer for one token."""
        return 2 * self.n_neurons * self.d_model

    @property
    def head_flops(self) -> int:
        """The head for one token."""
        return 2 * self.vocab * self.d_model

    @property
    def predictor_flops(self) -> int:
        """The predictor of one layer for one token: two flops a weight."""
        return 2 * self._predictor_weights

    def device_parts(
        self, gating: str, slots: float, context_len: int, *, predictor: str = "rank"
    ) -> dict[str, int]:
        """What lives in device memory: bytes over all layers. `slots`: neurons per layer, mean.

        The embedding table stays in host memory (one row is read per token); when tied, it is the
        head and is counted there. The gate is there for `exact` gating and for the look-ahead
        predictor, which is the gate of the next layer; an int8 copy of it for `screened`. `dense`
        gating decides nothing: neither gate nor predictor.
        """
        _check_gating(gating)
        _check_predictor(predictor)
        if not 0 <= slots <= self.n_neurons:
            raise KairoxError(
                f"model {self.name!r}: {slots} slots per layer; allowed are 0 to {self.n_neurons}"
            )
        if gating == "dense":
            predictor = "none"
        gate = 0
        if gating == "screened":
            gate = self.screen_bytes
        elif gating == "exact" or predictor == "lookahead":
            gate = self.gate_bytes
        low_rank = self.predictor_bytes if predictor == "rank" else 0
        return {
            "attention": self.n_layers * self.attention_bytes,
            "head": self.head_bytes,
            "predictor": self.n_layers * low_rank,
            "gate": self.n_layers * gate,
            "kv": self.n_layers * self.kv_bytes_per_token * context_len,
            "slots": round(self.n_layers * slots * self.bundle_bytes(gating)),
        }

    def device_bytes(
        self, gating: str, slots: float, context_len: int, *, predictor: str = "rank"
    ) -> int:
        """Sum of `device_parts`."""
        return sum(self.device_parts(gating, slots, context_len, predictor=predictor).values())


def _check_gating(gating: str) -> None:
    if gating not in GATINGS:
        raise KairoxError(f"unknown gating {gating!r}; allowed: {', '.join(GATINGS)}")


def _check_predictor(predictor: str) -> None:
    if predictor not in PREDICTORS:
        raise KairoxError(f"unknown predictor {predictor!r}; allowed: {', '.join(PREDICTORS)}")


def not_relu_like(name: str, activation: str) -> str:
    """What to say of a model whose silent neurons are not zero."""
    thresholds = ""
    if activation == "silu":
        thresholds = ", or run it as an approximation: `kairox sparsify` makes --thresholds for it"
    return (
        f"model {name!r}: activation {activation!r} is not ReLU-like: its silent neurons are not "
        f"exactly zero; allowed: {', '.join(RELU_LIKE)}. Use a ReLU version of the model"
        f"{thresholds}"
    )


def mean_slots(slots: int | Sequence[int]) -> float:
    """Slots per layer, averaged where every layer has its own number."""
    if isinstance(slots, (int, np.integer)):
        return float(slots)
    if len(slots) == 0:
        raise KairoxError("slots: got an empty list; give one number, or one per layer")
    return sum(slots) / len(slots)


CATALOGUE: dict[str, ModelShape] = {row["name"]: ModelShape(**row) for row in ROWS}


def find_shape(name: str) -> ModelShape:
    """A catalogue entry by name; `name@q8_0` (or another of WEIGHT_BYTES) is it `quantised`.

    `name@ffn-int8`: with the FFN's rows alone in that format, see `with_ffn_weights`.
    """
    base, at, kind = name.partition("@")
    if base not in CATALOGUE:
        raise KairoxError(f"unknown model {name!r}; allowed: {', '.join(CATALOGUE)}")
    if kind.startswith("ffn-"):
        return with_ffn_weights(CATALOGUE[base], kind.removeprefix("ffn-"))
    return quantised(CATALOGUE[base], kind) if at else CATALOGUE[base]


def quantised(shape: ModelShape, kind: str) -> ModelShape:
    """The same model with all its matrices in ggml's `kind`; keys, values, predictor in 2 bytes.

    Files in the wild keep some matrices (the head of a Q4_0 file) in a wider type: not counted.
    """
    if kind not in WEIGHT_BYTES:
        raise KairoxError(f"unknown weights {kind!r}; allowed: {', '.join(WEIGHT_BYTES)}")
    if kind != "float16" and shape.d_model % QUANT_BLOCK:
        raise KairoxError(
            f"model {shape.name!r}: rows of {shape.d_model} weights are not whole blocks of "
            f"{QUANT_BLOCK}, so it cannot be {kind}"
        )
    return replace(
        shape,
        name=f"{shape.name.partition('@')[0]}@{kind}",
        bytes_per_weight=WEIGHT_BYTES[kind],
        source=f"{shape.source}; weights as {kind}, {WEIGHT_BYTES[kind]:g} bytes each (ggml)",
    )


def with_ffn_weights(shape: ModelShape, kind: str) -> ModelShape:
    """The same model with the FFN's rows stored as `kind`, and everything else as it is.

    int8 is one scale a row, as kairox_exec stores it.
    """
    per_weight = {
        "float32": 4.0,
        "float16": 2.0,
        "bfloat16": 2.0,
        "int8": 1 + INT8_SCALE_BYTES / shape.d_model,
        "q8_0": WEIGHT_BYTES["q8_0"],
        "q4_0": WEIGHT_BYTES["q4_0"],
    }
    if kind not in per_weight:
        raise KairoxError(f"unknown weights {kind!r}; allowed: {', '.join(per_weight)}")
    if kind in ("q8_0", "q4_0") and shape.d_model % QUANT_BLOCK:
        raise KairoxError(
            f"model {shape.name!r}: rows of {shape.d_model} weights are not whole blocks of "
            f"{QUANT_BLOCK}, so they cannot be {kind}; use int8"
        )
    if shape.ffn_bytes_per_weight == per_weight[kind]:
        return shape
    return replace(
        shape,
        name=f"{shape.name}@ffn-{kind}",
        ffn_bytes_per_weight=per_weight[kind],
        source=f"{shape.source}; the FFN's rows as {kind}",
    )


def require_sparse(shape: ModelShape, gating: str) -> None:
    """Raises KairoxError unless silent neurons of `shape` are exactly zero, or all are computed.

    Or unless a threshold was set for them, which the shape then says.
    """
    _check_gating(gating)
    if not (shape.relu_sparse or shape.approximate) and gating != "dense":
        raise KairoxError(
            f"model {shape.name!r} is not ReLU-sparse: with {shape.activation!r} its silent "
            f"neurons are not zero, and gating {gating!r} would leave them out. Use gating "
            "'dense', or a ReLU version of the model"
        )

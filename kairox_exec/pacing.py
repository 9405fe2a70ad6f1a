"""How long a paced machine's ops last: the cost model's seconds, in the lanes' nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kairox_exec.oplog import NS, Size

if TYPE_CHECKING:
    from kairox_sim.costs import CostModel


def in_ns(seconds: float) -> int:
    return round(seconds * NS)


def gpu_op_ns(costs: CostModel, kind: str, size: Size) -> int:
    """Modelled duration of an op of the gpu lane."""
    if kind == "attention":
        return in_ns(costs.attention_s(size.n_tokens, size.context_len))
    if kind == "predict":
        return in_ns(costs.predict_s(size.n_tokens))
    if kind == "gate":
        return in_ns(costs.gate_s(size.n_tokens))
    if kind == "ffn":
        return in_ns(costs.ffn_gpu_s(size.neurons, size.n_tokens))
    if kind == "head":
        return in_ns(costs.head_s(1))
    raise ValueError(f"{kind!r} is no op of the gpu lane")

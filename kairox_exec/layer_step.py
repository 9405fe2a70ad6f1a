"""What one layer of one step decides, computes and reports, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.kernels import Kernels
from kairox_exec.weights import NeuronBundles
from kairox_sim.events import Split
from kairox_sim.policies.base import Ids, Share

Mask = NDArray[np.bool_]  # [n_tokens, n_neurons]
Fired = list[tuple[Ids, torch.Tensor]]
"""Parts of a layer-step: ids, and bool [n_tokens, n] whether each of them fired"""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a layer-step evaluates."""

    evaluated: Mask
    act: torch.Tensor | None  # as of `gate_all`, on the device; None: the kernels decide
    active_known: bool  # `evaluated` is what is active


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One forward pass: a decode token, or one prefill chunk."""

    seq: int
    step: int
    phase: str  # "prefill" | "decode"
    tokens: NDArray[np.int32]  # [n_tokens]
    context_len: int  # tokens in the KV cache after this step

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.size)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What happened in one layer of one step, for a recorder.

    active: what fired of the evaluated, which under lossless gating is all that would have.
    """

    step: StepInfo
    layer: int
    active: Mask
    evaluated: Mask  # the same object as `active` where they cannot differ
    predicted: Mask | None  # None where no predictor ran, as for layer 0
    split: Split
    true_active: Mask | None = None  # audited: what fires in the dense layer, for the same x


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A layer-step that is over, until its step is."""

    layer: int
    decision: Decision
    predicted: Mask | None
    split: Split
    fired: Fired  # empty where the decision says what is active
    x: torch.Tensor | None  # kept for an audit, in host memory


def for_every_token(mask: Mask) -> Mask:
    """What any token of a chunk asks for is computed for all of them: the same for each."""
    return mask if mask.shape[0] == 1 else np.broadcast_to(mask.any(axis=0), mask.shape)


def seen(mask: Mask) -> tuple[Ids, Share | None]:
    """The union over a chunk's tokens, and each neuron's share of them (None: all 1, one token)."""
    if mask.shape[0] == 1:
        return np.flatnonzero(mask[0]).astype(np.int32), None
    fired = np.count_nonzero(mask, axis=0)
    ids = np.flatnonzero(fired).astype(np.int32)
    return ids, fired[ids].astype(np.float32) / np.float32(mask.shape[0])


def true_mask(kernels: Kernels, bundle: NeuronBundles, x: torch.Tensor) -> Mask:
    """Which neurons really fire: all of them computed on the host, for an audit and no output.

    x float32 [n_tokens, d_model], host memory.
    """
    every = torch.arange(bundle.n_neurons, dtype=torch.int32)
    fired = torch.zeros((x.shape[0], bundle.n_neurons), dtype=torch.bool)
    act = None
    if bundle.gating == "exact":  # the deciding row is no part of what moves
        act = kernels.gate_all(x, bundle.gate_w, bundle.gate_b, bundle.spec)
    kernels.ffn_union(
        x, bundle.rows, every, bundle.spec,
        act=act, gate_b=bundle.gate_b, up_b=bundle.up_b, fired=fired,
    )  # fmt: skip
    return fired.numpy()


def fired_mask(done: Done) -> Mask:
    """Which of the evaluated fired, [n_tokens, n_neurons]."""
    if done.decision.active_known:
        return done.decision.evaluated
    mask = np.zeros(done.decision.evaluated.shape, bool)
    for ids, fires in done.fired:
        mask[:, ids] = fires.numpy(force=True)
    return mask


def residual_work(
    kernels: Kernels,
    bundle: NeuronBundles,
    index: torch.Tensor,
    here: slice,
    fires: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    """The work of one host thread: `here` of the residual neurons, which are `index`."""
    gate_b = None if bundle.gate_b is None else bundle.gate_b[index]
    up_b = None if bundle.up_b is None else bundle.up_b[index]

    def work(x: torch.Tensor, act: torch.Tensor | None = None) -> torch.Tensor:
        mine = None if act is None else act[:, here].contiguous()
        return kernels.ffn_union(
            x, bundle.rows, index, bundle.spec,
            act=mine, gate_b=gate_b if act is None else None, up_b=up_b, fired=fires,
        )  # fmt: skip

    return work

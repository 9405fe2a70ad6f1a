"""Synthetic traces: which neurons fire, made up with chosen density, skew and locality.

For what no recording at hand shows: models that do not run here, and one property varied with the
others held. A trace made here says so (`synthetic` in its header), and so does every table and
figure made from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.firing_rates import Rates
from kairox_sim.trace import SequenceInfo, Trace, TraceHeader, pack
from kairox_sim.workload_sets import densities, layer_rates, layer_sets

PREDICTED_AT = ("attn_in", "attn_out", "serial")
_N_TOKEN_IDS = 32_000
_PAIRED = 384  # quantiles of the rates whose pairs stand for all pairs


MOST_NEURONS = 2**20  # of a layer: more would not fit in memory while they are drawn


@dataclass(frozen=True, slots=True)
class Workload:
    """What a synthetic trace is made to look like. Shares are in [0, 1]."""

    name: str
    model: str  # whose shape it has, and under whose name its costs are looked up
    n_layers: int
    n_neurons: int  # per layer
    d_model: int
    active: Rates  # of the true set
    predicted: Rates | None = None  # of what the predictor says; None: there is no predictor
    recall: float = 1.0  # share of the active that is predicted
    persistence: float = 0.0  # correlation of a neuron with itself, one token before
    one_hit_share: float | None = None  # of the neurons that fire at all; None: as it comes out
    shift_every: int | None = None  # tokens from one topic to the next
    shift_share: float = 0.0  # of the neurons that swap their rates at a shift
    group_size: int = 1  # neurons with neighbouring ids that tend to fire together
    co_activation: float = 0.0  # probability to follow the group's latent value; 0: independent
    layer_profile: tuple[float, ...] = (1.0,)  # density over depth, relative, evenly spaced
    source: str = ""  # of each number; what is assumed says so

    def __post_init__(self) -> None:
        for name in ("recall", "persistence", "shift_share", "co_activation"):
            if not 0 <= getattr(self, name) <= 1:
                raise KairoxError(f"workload: {name} is {getattr(self, name)!r}, not in [0, 1]")
        if self.n_neurons > MOST_NEURONS:
            raise KairoxError(
                f"workload: n_neurons is {self.n_neurons}; the most of a layer is {MOST_NEURONS}"
            )
        for name in ("n_layers", "n_neurons", "d_model", "group_size"):
            if getattr(self, name) < 1:
                raise KairoxError(f"workload: {name} is {getattr(self, name)!r}; at least 1")
        if self.persistence == 1:
            raise KairoxError("workload: persistence 1 repeats one token for ever; give less")
        if self.one_hit_share is not None and not 0 <= self.one_hit_share < 1:
            raise KairoxError(f"workload: one_hit_share is {self.one_hit_share!r}, not in [0, 1)")
        if self.shift_every is not None and self.shift_every < 1:
            raise KairoxError(f"workload: shift_every is {self.shift_every!r} tokens; at least 1")
        if not self.layer_profile or not all(0 < part < inf for part in self.layer_profile):
            raise KairoxError(
                f"workload: layer_profile is {self.layer_profile!r}; give one positive number per "
                "depth, or (1.0,) for equal layers"
            )
        if self.group_size == 1 and self.co_activation:
            raise KairoxError("workload: co_activation needs a group_size of 2 or more")


def generate(
    workload: Workload,
    n_tokens: int,
    *,
    n_prefill: int = 0,
    seed: int = 0,
    model_seed: int = 0,
    n_layers: int | None = None,
    gating: str | None = None,
    predicted_trigger: str = "attn_out",
    on_layer: Callable[[int], None] | None = None,
) -> Trace:
    """A trace of one sequence: a prefill chunk of `n_prefill` tokens, `n_tokens` decode steps.

    seed: what fires when. model_seed: which neurons are hot; a prior has the same one and another
    seed. n_layers: fewer than the model has. gating: `predicted` where the workload has predicted
    sets, else `exact`; with `exact`, predictions are in the trace and decide nothing.
    """
    layers = workload.n_layers if n_layers is None else n_layers
    if n_tokens < 0 or n_prefill < 0 or n_tokens + n_prefill == 0:
        raise KairoxError(
            f"{n_prefill} prefill and {n_tokens} decode tokens: neither below 0, at least one"
        )
    if not 1 <= layers <= workload.n_layers:
        raise KairoxError(f"n_layers is {layers}; {workload.name} has 1 to {workload.n_layers}")
    for name, number in (("seed", seed), ("model_seed", model_seed)):
        if number < 0:
            raise KairoxError(f"{name} is {number}, must be 0 or more")
    if predicted_trigger not in PREDICTED_AT:
        raise KairoxError(
            f"nothing is predicted at trigger {predicted_trigger!r}; allowed: "
            f"{', '.join(PREDICTED_AT)}"
        )
    known = workload.predicted is not None
    gating = gating or ("predicted" if known else "exact")
    if gating not in ("exact", "predicted") or (gating == "predicted" and not known):
        allowed = "exact or predicted" if known else "exact (it has no predicted sets)"
        raise KairoxError(f"gating is {gating!r}; {workload.name} can be {allowed}")
    total = n_prefill + n_tokens
    rows = _rows(layers, n_prefill, n_tokens)
    n_bytes = len(pack(np.zeros(workload.n_neurons, bool)))
    bits = np.zeros((layers * total, n_bytes), np.uint8)
    predicted = np.zeros_like(bits) if known else None
    for layer in range(layers):
        mine = np.flatnonzero(rows["layer"] == layer)  # in the order of the tokens
        for start, fired, said in layer_sets(workload, layer, layers, total, seed, model_seed):
            at = mine[start : start + len(fired)]
            bits[at] = pack(fired)
            if predicted is not None:
                predicted[at] = pack(said)
        if on_layer is not None:
            on_layer(layer)
    header = _header(workload, layers, total, seed, model_seed, gating, predicted_trigger)
    return Trace.from_arrays(
        header,
        **rows,
        bits=bits,
        evaluated_bits=predicted if gating == "predicted" else None,
        predicted_bits=predicted,
    )


def fit_co_activation(workload: Workload, target: float) -> Workload:
    """The workload with the co_activation at which C(group_size) is `target` in expectation.

    C is of the evaluated sets: over the evaluated neurons of a token, the mean share of the
    other members of their group that are evaluated too.
    """
    apart, together = _co_activation_bounds(workload)
    if workload.group_size < 2 or not apart <= target <= together:
        raise KairoxError(
            f"co-activation {target:g} within groups of {workload.group_size}: these rates allow "
            f"{apart:.4f} (independent) to {together:.4f}, in groups of 2 or more"
        )
    follow = float(np.sqrt((target - apart) / (together - apart)))  # both of a pair must follow
    return dataclasses.replace(workload, co_activation=follow)


def expected_co_activation(workload: Workload) -> float:
    """C(group_size) in expectation; see `fit_co_activation`."""
    apart, together = _co_activation_bounds(workload)
    return apart + workload.co_activation**2 * (together - apart)


def _co_activation_bounds(workload: Workload) -> tuple[float, float]:
    """C when group mates are independent, and when they share their latent value at every token."""
    small = dataclasses.replace(workload, n_neurons=_PAIRED, one_hit_share=None)
    independent = shared = members = 0.0
    for density in densities(workload, workload.n_layers):
        rates = layer_rates(small, float(density))
        # The values at which each one is evaluated: below `found`, and from `fires` on.
        if workload.predicted is None:
            ranges = [(np.zeros(_PAIRED), rates.fires)]
        else:
            false = rates.fires + rates.said - rates.found
            ranges = [(np.zeros(_PAIRED), rates.found), (rates.fires, false)]
        both = np.zeros((_PAIRED, _PAIRED))
        for low, high in ranges:
            for other_low, other_high in ranges:
                first = np.maximum(low[:, np.newaxis], other_low)
                both += np.maximum(np.minimum(high[:, np.newaxis], other_high) - first, 0)
        independent += (rates.said.sum() ** 2 - (rates.said**2).sum()) / (_PAIRED - 1)
        shared += (both.sum() - np.trace(both)) / (_PAIRED - 1)
        members += rates.said.sum()
    return float(independent / members), float(shared / members)


# -- what surrounds the sets ----------------------------------------------------------------------


def _rows(n_layers: int, n_prefill: int, n_tokens: int) -> dict[str, NDArray[np.int64]]:
    """Columns of every row but the bits: a chunk layer by layer, then a step per token."""
    n_steps = n_tokens + (n_prefill > 0)
    length = np.ones(n_steps, np.int64)  # tokens of each step
    if n_prefill:
        length[0] = n_prefill
    step = np.repeat(np.arange(n_steps), length * n_layers)
    chunk = np.repeat(np.arange(n_layers), n_prefill)
    layer = np.concatenate([chunk, np.tile(np.arange(n_layers), n_tokens)])
    ids = np.random.default_rng(0).integers(0, _N_TOKEN_IDS, n_prefill + n_tokens)
    token = np.concatenate(
        [np.tile(ids[:n_prefill], n_layers), np.repeat(ids[n_prefill:], n_layers)]
    )
    phase = np.ones(len(step), np.int64)
    phase[: n_prefill * n_layers] = 0
    return {
        "seq": np.zeros(len(step), np.int64),
        "step": step,
        "token": token,
        "layer": layer,
        "phase": phase,
    }


def _header(
    workload: Workload,
    n_layers: int,
    n_tokens: int,
    seed: int,
    model_seed: int,
    gating: str,
    predicted_trigger: str,
) -> TraceHeader:
    about = dataclasses.asdict(workload)
    # What fires when may differ between a prior and what it is held against; who fires may not.
    who = ("model", "n_neurons", "active", "predicted", "recall", "layer_profile")
    model = {"n_layers": n_layers, "model_seed": model_seed, **{k: about[k] for k in who}}
    text = {**about, "seed": seed, "model_seed": model_seed}
    label = f"synthetic {workload.name}, seed {seed}"
    return TraceHeader(
        model=workload.model,
        model_sha256=_sha256(model),
        n_layers=n_layers,
        n_neurons=workload.n_neurons,
        d_model=workload.d_model,
        activation="synthetic",
        activation_threshold=0.0,
        gating=gating,
        complete=gating == "exact",
        tokenizer_sha256=_sha256("synthetic tokens"),
        sequences=(SequenceInfo(0, "synthetic", label, _sha256(text), 0, n_tokens),),
        predicted_trigger=None if workload.predicted is None else predicted_trigger,
        hardware={"workload": about, "seed": seed, "model_seed": model_seed},
        synthetic=True,
    )


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

"""How the sets of a synthetic trace are drawn, layer by layer: rates, then latent values.

Every neuron has a latent value in [0, 1), uniform at every token. It fires where the value is
below its rate, and is predicted where the value is below the part of its rate that the predictor
finds, or just above its rate (a false alarm). A token's value is that of the token before with
probability `persistence`, and a new one otherwise. So rates, recall and predicted rates hold
exactly at any persistence, and both sets follow P(1 -> 1) = p + persistence * (1 - p).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.firing_rates import Floats, scaled_to

if TYPE_CHECKING:
    from kairox_sim.workload import Workload

Mask = NDArray[np.bool_]
Values = NDArray[np.float32]
Drawn = TypeVar("Drawn", np.float32, np.int32)

_BLOCK_VALUES = 1 << 22  # latent values drawn at once
# Streams of random numbers: which neurons are hot; what the text does. NumPy takes (0, 0) and
# (0, 0, 0) for the same seed, so these are numbers that nothing else begins a seed with.
_WHO, _WHEN = 0x686F7473, 0x74657874


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Rates of one layer while a topic lasts, float64[n_neurons] each."""

    fires: Floats
    found: Floats  # fires and is predicted
    said: Floats  # is predicted: what was found, and false alarms


def densities(workload: Workload, n_layers: int) -> Floats:
    """float64[n_layers]: active share of each layer, `active.mean` on average."""
    profile = np.array(workload.layer_profile)
    at = np.linspace(0, len(profile) - 1, n_layers)
    relative = np.interp(at, np.arange(len(profile)), profile)
    return scaled_to(relative / relative.mean(), workload.active.mean)


def layer_rates(workload: Workload, density: float) -> LayerRates:
    """Rates of a layer, coldest neuron first; hot neurons are predicted most as well."""
    n = workload.n_neurons
    fires = workload.active.quantiles(n, density)
    if workload.predicted is None:
        return LayerRates(fires, fires, fires)
    found = fires * workload.recall
    # A neuron is predicted at least as often as it is found; alarms take what is left of silence.
    mean = density * workload.predicted.mean / workload.active.mean
    said = workload.predicted.quantiles(n)
    said = scaled_to(said, mean, found, 1 - fires + found)
    return LayerRates(fires, found, said)


def _one_hit_count(workload: Workload, rates: Floats, n_tokens: int) -> int:
    """How many of the coldest neurons must fire exactly once to reach `one_hit_share`.

    rates: of the evaluated set, ascending. The others fire once by chance as their chain says.
    """
    if workload.one_hit_share is None:
        return 0
    stay, leave = 1 - rates * (1 - workload.persistence), (1 - rates) * (1 - workload.persistence)
    enter = 1 - stay

    def silent(tokens: int) -> Floats:  # that many steps from silence to silence
        result: Floats = stay ** max(tokens, 0)
        return result

    never = (1 - rates) * silent(n_tokens - 1)
    once = rates if n_tokens == 1 else rates * leave * silent(n_tokens - 2)  # at the first token
    if n_tokens > 1:  # at the last one, or between
        once = once + (1 - rates) * silent(n_tokens - 2) * enter
        once = once + (n_tokens - 2) * (1 - rates) * enter * leave * silent(n_tokens - 3)

    def beyond(values: Floats) -> Floats:  # [n_neurons + 1]: sum over all but the x coldest
        return np.append(np.cumsum(values[::-1])[::-1], 0.0)

    x = np.arange(len(rates) + 1)
    share = (x + beyond(once)) / (x + beyond(1 - never))
    if share[0] > workload.one_hit_share + 0.01:
        raise KairoxError(
            f"one_hit_share {workload.one_hit_share:g}: of these rates, {share[0]:.3f} of the "
            f"neurons that fire do so once in {n_tokens} tokens anyway; ask for more, or for more "
            "tokens"
        )
    return int(np.searchsorted(share, workload.one_hit_share))


def _topics(
    workload: Workload, layer: int, n_layers: int, n_tokens: int, model_seed: int
) -> tuple[Iterator[LayerRates], NDArray[np.intp]]:
    """(rates by neuron id, one topic after the other; ids that fire once)."""
    density = float(densities(workload, n_layers)[layer])
    rates = layer_rates(workload, density)
    n = workload.n_neurons
    n_once = _one_hit_count(workload, rates.said, n_tokens)
    if n_once:
        rates = _with_once(rates, n_once, n_once / n_tokens)
    order = np.random.default_rng((_WHO, model_seed, layer)).permutation(n)  # id of each rank
    return _shifting(workload, rates, order, n_once, layer, model_seed), order[:n_once]


def _with_once(rates: LayerRates, n_once: int, per_token: float) -> LayerRates:
    """The coldest `n_once` neurons silent, the others making up for them.

    per_token: how many of the coldest fire per token all the same, being given one token each.
    """

    def mean_of_rest(values: Floats) -> float:
        return (float(values.sum()) - per_token) / max(len(values) - n_once, 1)

    fires = scaled_to(rates.fires[n_once:], mean_of_rest(rates.fires))
    found = rates.found[n_once:] * fires / rates.fires[n_once:]
    said = scaled_to(rates.said[n_once:], mean_of_rest(rates.said), found, 1 - fires + found)
    silent = np.zeros(n_once)
    return LayerRates(*(np.concatenate([silent, values]) for values in (fires, found, said)))


def _shifting(
    workload: Workload,
    rates: LayerRates,
    order: NDArray[np.intp],
    n_once: int,
    layer: int,
    model_seed: int,
) -> Iterator[LayerRates]:
    """At each shift a random `shift_share` of the neurons pass their rates on, in a ring."""
    rank = np.argsort(order)  # of each id
    movable = np.sort(order[n_once:])
    n_moved = round(workload.shift_share * len(movable))
    topic = 0
    while True:
        yield LayerRates(rates.fires[rank], rates.found[rank], rates.said[rank])
        topic += 1
        rng = np.random.default_rng((_WHO, model_seed, layer, topic))
        moved = rng.choice(movable, n_moved, replace=False)
        rank[moved] = rank[np.roll(moved, 1)]


# -- sets ------------------------------------------------------------------------------------------


def layer_sets(
    workload: Workload, layer: int, n_layers: int, n_tokens: int, seed: int, model_seed: int
) -> Iterator[tuple[int, Mask, Mask]]:
    """(first token, active, predicted), bool[tokens, n_neurons], block after block of tokens."""
    topics, once = _topics(workload, layer, n_layers, n_tokens, model_seed)
    rng = np.random.default_rng((_WHEN, seed, model_seed, layer))
    once_at = rng.integers(0, n_tokens, len(once))  # token of each
    topic_tokens = n_tokens if workload.shift_every is None else workload.shift_every
    most = max(1, _BLOCK_VALUES // workload.n_neurons)
    value: Values | None = None  # of the last token
    start = topic_ends = 0
    while start < n_tokens:
        if start == topic_ends:
            rates = next(topics)
            topic_ends = min(n_tokens, start + topic_tokens)
        values = _latent(workload, min(most, topic_ends - start), value, rng)
        value = values[-1]
        fired = values < rates.fires.astype(np.float32)
        said = values < rates.found.astype(np.float32)
        said |= ~fired & (values < (rates.fires + rates.said - rates.found).astype(np.float32))
        here = (start <= once_at) & (once_at < start + len(values))
        for sets in (fired, said):
            sets[once_at[here] - start, once[here]] = True
        yield start, fired, said
        start += len(values)


def _latent(
    workload: Workload, n_tokens: int, before: Values | None, rng: np.random.Generator
) -> Values:
    """float32[n_tokens, n_neurons]: latent values of the tokens after `before`.

    The members of a group redraw at the same tokens, so that co-activation is the same at any
    persistence.
    """
    n, size = workload.n_neurons, workload.group_size
    n_groups = -(-n // size)

    def of_members(by_group: NDArray[Drawn]) -> NDArray[Drawn]:
        return by_group if size == 1 else np.repeat(by_group, size, axis=1)[:, :n]

    values = rng.random((n_tokens, n), dtype=np.float32)
    if workload.co_activation:
        shared = of_members(rng.random((n_tokens, n_groups), dtype=np.float32))
        follows = rng.random((n_tokens, n), dtype=np.float32) < workload.co_activation
        values = np.where(follows, shared, values)
    if not workload.persistence:
        return values
    redraws = rng.random((n_tokens, n_groups), dtype=np.float32) >= workload.persistence
    if before is None:
        before = values[0]
    token = np.arange(1, n_tokens + 1, dtype=np.int32)[:, np.newaxis]
    drawn = np.maximum.accumulate(np.where(redraws, token, np.int32(0)), axis=0)  # 0: before
    every = np.concatenate([before[np.newaxis], values])
    result: Values = np.take_along_axis(every, of_members(drawn), axis=0)
    return result

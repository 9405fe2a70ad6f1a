"""A model under many placements, and a device whose copies race, come late or never arrive."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import Family, family_of, rule_of
from kairox_exec.kernels import numba_cpu
from kairox_exec.loading import load_dense
from kairox_exec.runner import run_bundles
from kairox_exec.weights import NeuronBundles, bundle_model
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.events import Swap
from kairox_sim.policies import Known
from kairox_sim.settings_file import Settings, make_policy


class Racing:
    """An unpaced device where each poll decides anew which copies have landed.

    A slot holds NaN from the moment a copy into it is queued until it lands; some never land.
    """

    def __init__(self, rng: np.random.Generator, *, p_land: float, p_drop: float) -> None:
        self._device, self._rng = EmulatedDevice(), rng
        self._p_land, self._p_drop = p_land, p_drop
        self._flying: list[tuple[Swap, torch.Tensor, torch.Tensor]] = []
        self._ready: list[int] = []
        self._reading, self._after_reading = False, list[Any]()
        self.dropped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def copy(
        self,
        swaps: Sequence[Swap],
        rows: torch.Tensor,
        slots: torch.Tensor,
        *,
        at_once: bool = False,
    ) -> None:
        if self._reading:
            self._after_reading.append((swaps, rows, slots))
            return
        for swap in swaps:
            _bytes(slots)[swap.slots] = 0xFF
            if at_once:
                self._device.fill(rows, swap.promote, slots, swap.slots)
            elif self._rng.random() < self._p_drop:
                self.dropped += 1
            else:
                self._flying.append((swap, rows, slots))

    def reading(self) -> None:
        self._reading = True

    def read(self) -> None:
        self._reading = False
        for given in self._after_reading:
            self.copy(*given)
        self._after_reading.clear()

    def landed(self) -> list[int]:
        flying, self._flying = self._flying, []
        for flight in flying:
            if self._rng.random() < self._p_land:
                self._land(*flight)
            else:
                self._flying.append(flight)
        ready, self._ready = self._ready, []
        return ready

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        wanted = [flight for flight in self._flying if flight[0].id in swap_ids]
        self._flying = [flight for flight in self._flying if flight[0].id not in swap_ids]
        for flight in wanted:
            self._land(*flight)

    def drop_copies(self) -> None:
        self._flying, self._ready = [], []

    def _land(self, swap: Swap, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self._device.fill(rows, swap.promote, slots, swap.slots)
        self._ready.append(swap.id)


def _bytes(slots: torch.Tensor) -> NDArray[np.uint8]:
    return slots.view(torch.uint8).numpy()


class Shuffled:
    """Kernels that are given the entries in another order than the pipeline has them in."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(numba_cpu, name)

    def ffn_union(self, x: Any, rows: Any, index: Any, spec: Any, **given: Any) -> torch.Tensor:
        order = torch.from_numpy(self._rng.permutation(index.numel()))
        fired = given.pop("fired", None)
        moved = {k: None if v is None else v[..., order] for k, v in given.items()}
        into = None if fired is None else torch.empty_like(fired)
        y = numba_cpu.ffn_union(x, rows, index[order], spec, fired=into, **moved)
        if fired is not None and into is not None:
            fired[:, order] = into
        return y


@dataclass(frozen=True)
class Model:
    """A dense model, to be copied for every run, and what its FFNs hold by gating."""

    dense: Any
    config: Any
    family: Family
    tokens: NDArray[np.int32]
    how: dict[str, Any]  # of bundle_model

    @staticmethod
    def of(
        directory: Any,
        tokens: NDArray[np.int32],
        *,
        dtype: str = "float32",
        fmt: str = "float32",
        numerics: str = "deterministic",
        thresholds: Sequence[float] | None = None,
    ) -> Model:
        dense, config = load_dense(directory, dtype=dtype, thresholds=thresholds)
        rule = rule_of(config)
        how = {
            "threshold": rule.thresholds, "activation": rule.activation, "fmt": fmt,
            "numerics": numerics,
        }  # fmt: skip
        return Model(dense, config, family_of(config), tokens, how)

    def bundles(self, gating: str) -> list[NeuronBundles]:
        return bundle_model(self.dense, self.family, gating=gating, **self.how)


def logits_of(
    model: Model,
    bundles: Sequence[NeuronBundles],
    *,
    policy: str = "lru",
    trigger: str = "attn_out",
    late: str = "cpu",
    slots: int | Sequence[int] = 0,
    rng: np.random.Generator | None = None,
    warm: bool = True,
    p_land: float = 1.0,
    p_drop: float = 0.0,
    predicted_share: float | None = 0.3,
    kernels: Any = numba_cpu,
    prefill: int = 5,
    happened: Counter[str] | None = None,
    on_layer: Callable[[Any], None] | None = None,
    audit: bool = False,
    whole: bool = False,
    generate: int = 0,
    on_token: Callable[[Any, int], None] = lambda runner, token: None,
) -> torch.Tensor:
    """[n_steps, vocab] float32 over the model's tokens, under one placement and its accidents.

    whole: fill every slot at the start. generate: instead of feeding the tokens, write on greedily.
    predicted_share: predictions are drawn, so many of all neurons; None: the look-ahead's own.
    """
    rng = rng or np.random.default_rng(0)
    n_layers, n_neurons = len(bundles), bundles[0].n_neurons
    budget = [slots] * n_layers if isinstance(slots, int) else list(slots)
    made = make_policy(
        Settings(policy=policy), n_layers, n_neurons,
        Known(rng, position=np.tile(np.arange(n_neurons, dtype=np.int32), (n_layers, 1))),
    )  # fmt: skip
    everyone = [np.arange(n_neurons)] * n_layers
    if made.fills == "all":
        budget, warm = [n_neurons] * n_layers, False
    elif made.fills == "none":
        budget = [0] * n_layers
    cache = NeuronCache(
        n_layers, n_neurons, budget, made, Fixed(0.3), trigger=trigger,
        pinned=everyone if made.fills == "all" else None,
        warm=[rng.permutation(n_neurons)[: s if whole else s // 2] for s in budget]
        if warm
        else None,
    )  # fmt: skip

    class Drawn:
        trigger = "attn_out"

        @staticmethod
        def predict(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            n_tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
            return torch.from_numpy(rng.random((n_tokens, n_neurons)) < predicted_share)

        def to(self, device: torch.device) -> Any:
            return self

    drawn: Any = Drawn()
    drawn.trigger = trigger if trigger in ("attn_in", "attn_out", "serial") else "attn_out"
    device = Racing(rng, p_land=p_land, p_drop=p_drop)
    try:
        runner = run_bundles(
            copy.deepcopy(model.dense), model.config, model.family, bundles,
            lambda *_: cache, device, trigger=trigger, late=late,
            learnt=None if predicted_share is None else drawn,
            host_kernels=kernels, device_kernels=kernels, on_layer=on_layer, audit=audit,
        )  # fmt: skip
        with runner:
            rows, records = [], []
            steps = (
                runner.generate(model.tokens, max_new_tokens=generate)
                if generate
                else runner.run([model.tokens], prefill=prefill, prefill_chunk=3)
            )
            for token, record in steps:
                if generate and token is not None:
                    on_token(runner, token)
                rows.append(runner.logits.float().clone())
                records.append(record)
    finally:
        device.close()
    if happened is not None:
        for name in ("loads", "hit_on_time", "residual", "late", "evictions"):
            happened[name] += int(sum(getattr(r, name) for r in records))
        happened["dropped"] += device.dropped
    return torch.stack(rows)

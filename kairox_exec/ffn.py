"""The hybrid FFN: what is resident is computed on the device, the rest on the host, then summed.

`LivePipeline` makes the calls of one layer-step, on one NeuronCache and one Device, in the order
that the simulator makes them (Kairox: the live pipeline of prediction, swaps and computation):

  attention(l) -> predict(l+1), plan(l+1), copies start -> gate(l) -> poll and commit -> lookup(l)
  -> host rows beside device rows -> join

with trigger attn_out; attn_in plans l+1 before attention(l), serial plans l after it and waits,
after plans l behind its lookup. The gate decides what is computed; a prediction only what is
fetched, so a wrong one costs time and never a neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import isnan, nan

import numpy as np
import torch
from torch import nn

from kairox_exec.device import Device, HandOver
from kairox_exec.families import Family, decoder_layers, hook_layer, replace_ffn
from kairox_exec.gating import LOSSLESS, decide_with, keep_on_device
from kairox_exec.kernels import Kernels
from kairox_exec.kernels.fixed_point import SumBounds
from kairox_exec.layer_step import (
    Decision,
    Done,
    Fired,
    LayerStep,
    Mask,
    StepInfo,
    fired_mask,
    for_every_token,
    residual_work,
    seen,
    true_mask,
)
from kairox_exec.oplog import Size
from kairox_exec.slots import SlotStore
from kairox_exec.weights import NeuronBundles
from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import Ids, Late, Share, Trigger

LOOK_AHEAD = ("attn_in", "attn_out")
PREDICTING = ("attn_in", "attn_out", "serial")
# Residual neurons a host thread is worth waking for: about 0.1 ms of work at 4096 weights a row.
LEAST_PART = 64

Predict = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer to predict, hidden state [..., d_model]) -> bool [n_tokens, n_neurons]"""


class HybridFFN(nn.Module):
    """Takes the place of one layer's FFN: x in, FFN output with all biases out."""

    def __init__(self, pipeline: LivePipeline, layer: int) -> None:
        super().__init__()
        self._pipeline, self._layer = pipeline, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._pipeline.ffn(self._layer, x.reshape(-1, x.shape[-1])).reshape(x.shape)


class LivePipeline:
    """The order of a layer-step around one cache and one device. Not a model: see `install`.

    trigger, late: the policy's own by default. predict: needed to plan at a look-ahead or serial
    trigger, and by predicted gating, which asks it at `look` where the trigger does not say when.
    always_predict: predict even if the policy never plans, for a recorder. on_layer is called for
    every layer when a step has ended, outside its time. audit: then also compute what fires in the
    dense layer, on the host.
    """

    def __init__(
        self,
        cache: NeuronCache,
        device: Device,
        bundles: Sequence[NeuronBundles],
        *,
        host_kernels: Kernels,
        device_kernels: Kernels,
        trigger: Trigger | None = None,
        late: Late | None = None,
        predict: Predict | None = None,
        look: str = "attn_out",
        always_predict: bool = False,
        audit: bool = False,
        on_layer: Callable[[LayerStep], None] | None = None,
    ) -> None:
        self.cache, self.device, self.bundles = cache, device, bundles
        self.trigger: Trigger = trigger or cache.policy.default_trigger
        self.late: Late = late or cache.policy.default_late
        self.plans = cache.policy.admits != "never"
        self.gating = bundles[0].gating
        self.lossy = self.gating not in LOSSLESS
        self._host_kernels, self._device_kernels = host_kernels, device_kernels
        self._predict = predict if self.plans or always_predict or self.lossy else None
        # When the predictor is asked: as the trigger says, or where it says nothing, a layer ahead.
        self.look = self.trigger if self.trigger in PREDICTING or not self.lossy else look
        self.on_layer = on_layer
        self._check(predict, always_predict)
        self.slots = SlotStore(device, bundles, cache)
        self.on_device = [keep_on_device(device, bundle) for bundle in bundles]
        self._decide = decide_with(
            self.gating, device, bundles, self.on_device,
            host_kernels=host_kernels, device_kernels=device_kernels,
        )  # fmt: skip
        self._bounds = [
            SumBounds.of(b.gate_w, b.rows, b.spec, b.gate_b, b.up_b)
            for b in bundles
            if b.spec.numerics == "deterministic"
        ]
        self._audit = audit
        self._host_threads: int = getattr(device, "host_threads", 1)
        self._step: StepInfo | None = None
        self._size = Size()
        self._attention_ns = 0  # when the attention op of the coming layer began
        self._done: list[Done] = []  # of this step
        self._predicted: dict[int, Mask] = {}  # by layer, until its FFN
        self.unfinished = np.zeros(cache.n_layers, bool)  # copies of the layer late for its FFN
        self._layer0: Done | None = None  # of the latest step
        self.n_active = nan  # of the step that ended, where the kernels decided it

    @property
    def predicts(self) -> bool:
        """Whether a predictor runs."""
        return self._predict is not None and self.look in PREDICTING

    def install(self, model: nn.Module, family: Family) -> None:
        """Replace the model's FFNs, which frees their weights, and hook what the triggers need."""
        ahead = self.look == "attn_in"
        for i, layer in enumerate(decoder_layers(model, family)):
            replace_ffn(layer, family, HybridFFN(self, i))
            hook_layer(
                layer,
                family,
                entering=partial(self.before_layer, i) if ahead else None,
                after_attention=partial(self.after_attention, i),
            )

    def start_step(self, step: StepInfo) -> int:
        """Returns when the step began, in ns."""
        self._step = step
        self._size = Size(n_tokens=step.n_tokens, context_len=step.context_len)
        began_ns = self.device.start_step()
        self._attention_ns = self.device.begin()
        return began_ns

    def end_step(self) -> int:
        """The head has been computed: returns when the step ended, after calling on_layer."""
        self.device.end(self._attention_ns, "head", -1, Size(n_tokens=1))
        ended_ns = self.device.end_step()
        done, self._done = self._done, []
        self.n_active = nan
        for layer_step in done:
            self._tell(layer_step)
        return ended_ns

    # -- between the layers ---------------------------------------------------------------------

    def before_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """attn_in: the state entering `layer` is at hand."""
        self._predict_and_plan(layer + 1, hidden)
        self._attention_ns = self.device.begin()

    def after_attention(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual after the attention of `layer` is at hand: the input of its FFN norm."""
        self.device.end(self._attention_ns, "attention", layer, self._size)
        if self.look == "serial":
            self._predict_and_plan(layer, hidden)
        elif self.lossy and layer not in self._predicted:
            self._ask(layer, hidden)  # the first one: no layer before it predicts it
        if self.look == "attn_out":
            self._predict_and_plan(layer + 1, hidden)

    def _predict_and_plan(self, layer: int, hidden: torch.Tensor) -> None:
        if layer == self.cache.n_layers or self._predict is None:
            return
        mask = self._ask(layer, hidden)
        if self.plans and self.trigger in PREDICTING:
            self._plan(layer, *seen(mask))

    def _ask(self, layer: int, hidden: torch.Tensor) -> Mask:
        assert self._predict is not None
        t0_ns = self.device.begin()
        mask: Mask = self._predict(layer, hidden).numpy(force=True)
        if self.lossy:
            mask = for_every_token(mask)
        self._predicted[layer] = mask
        self.device.end(t0_ns, "predict", layer, self._size)
        return mask

    def _plan(self, layer: int, ids: Ids, share: Share | None) -> None:
        self.device.think()
        swaps = self.cache.plan(layer, ids, share)
        self.slots.start(layer, swaps)
        self.device.thought(layer, Size(neurons=self.cache.n_neurons, n_swaps=len(swaps)))

    # -- the FFN --------------------------------------------------------------------------------

    def ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [n_tokens, d_model] -> FFN output, same shape and dtype."""
        given_dtype, x = x.dtype, x.float()
        decision = self._decide(layer, x, self._size, self._predicted.get(layer))
        if self._bounds:
            self._bounds[layer].check(x, decision.act, layer=layer)
        evaluated, share = seen(decision.evaluated)
        self._take_landed(layer, evaluated, share)
        active = evaluated if decision.active_known else None
        split = self.cache.lookup(layer, evaluated, active, share)
        places = self.slots.places(layer, split.on_time)  # before a plan can move anything
        fired: Fired = []

        handed = None
        if split.residual.size:
            handed = self._give_to_host(layer, x, decision, split.residual, fired)
        if self.plans and self.trigger == "after":
            self.device.reading()  # the plan may give up what this layer-step reads
            self._plan(layer, evaluated, share)
            y = self._device_rows(layer, x, decision, split.on_time, places, fired)
            self.device.read()
        else:
            y = self._device_rows(layer, x, decision, split.on_time, places, fired)
        if handed is not None:
            y += self.device.join(handed)
        y = self._device_kernels.total(y)
        down_b = self.on_device[layer].down_b
        if down_b is not None:
            y = y + down_b
        predicted = self._predicted.pop(layer, None)
        kept = x.cpu().clone() if self._audit else None
        self._end_layer(Done(layer, decision, predicted, split, fired, kept))
        return y.to(given_dtype)

    def _take_landed(self, layer: int, evaluated: Ids, share: Share | None) -> None:
        """Poll once and commit, after waiting for this layer's copies where the settings say so."""
        if self.plans and self.trigger == "instant":
            swaps = self.cache.plan(layer, evaluated, share)
            self.slots.start(layer, swaps, at_once=True)
            self.cache.commit(swap.id for swap in swaps)
            return
        if self.plans and (self.late == "stall" or self.trigger == "serial"):
            self.device.wait_decided(layer)
            flying = self.cache.in_flight.values()
            self.device.wait_landed([swap.id for swap in flying if swap.layer == layer])
        self.cache.commit(self.slots.landed())
        flying = self.cache.in_flight.values()
        self.unfinished[layer] = any(swap.layer == layer for swap in flying)

    def _give_to_host(
        self, layer: int, x: torch.Tensor, decision: Decision, ids: Ids, fired: Fired
    ) -> HandOver:
        """The residual neurons' work, a part of it for each of the host's threads."""
        bundle, kernels = self.bundles[layer], self._host_kernels
        size = Size(neurons=ids.size, n_tokens=x.shape[0])
        inputs, works = [x], []
        if decision.act is not None:
            inputs.append(decision.act[:, self.device.send(ids)])
        n_parts = max(1, min(self._host_threads, ids.size // LEAST_PART))
        ends = [ids.size * i // n_parts for i in range(n_parts + 1)]
        for begin, end in pairwise(ends):
            here = slice(begin, end)
            index = torch.from_numpy(ids[here])
            fires = None
            if not decision.active_known:
                fires = torch.empty((x.shape[0], index.numel()), dtype=torch.bool)
                fired.append((ids[here], fires))
            works.append(residual_work(kernels, bundle, index, here, fires))
        return self.device.hand_over(layer, inputs, works, size)

    def _device_rows(
        self,
        layer: int,
        x: torch.Tensor,
        decision: Decision,
        ids: Ids,
        places: torch.Tensor,
        fired: Fired,
    ) -> torch.Tensor:
        here, index = self.on_device[layer], self.device.send(ids)
        fires, act = None, decision.act
        t0_ns = self.device.begin()
        if not decision.active_known:
            fires = torch.empty((x.shape[0], ids.size), dtype=torch.bool, device=x.device)
            fired.append((ids, fires))
        y = self._device_kernels.ffn_union(
            x,
            self.slots.slots[layer],
            places,
            self.bundles[layer].spec,
            act=None if act is None else act[:, index],
            gate_b=None if act is not None or here.gate_b is None else here.gate_b[index],
            up_b=None if here.up_b is None else here.up_b[index],
            fired=fires,
        )
        self.device.end(t0_ns, "ffn", layer, Size(neurons=ids.size, n_tokens=x.shape[0]))
        return y

    def _end_layer(self, done: Done) -> None:
        mask, split = done.decision.evaluated, done.split
        computed = np.zeros(mask.shape[1], bool)
        computed[split.on_time] = computed[split.residual] = True
        missed = int(np.count_nonzero(mask & ~computed))
        assert not missed, f"layer {done.layer}: {missed} neurons to evaluate were not computed"
        if done.layer == 0:
            self._layer0 = done
        if done.layer == self.cache.n_layers - 1 and self.plans and self.trigger in LOOK_AHEAD:
            assert self._layer0 is not None
            last = fired_mask(self._layer0)[-1]
            self._plan(0, np.flatnonzero(last).astype(np.int32), None)  # for the next step
        self._attention_ns = self.device.begin()
        if self.on_layer is not None or not done.decision.active_known:
            self._done.append(done)

    def _tell(self, done: Done) -> None:
        """Count what fired, and give a recorder all of it."""
        active, decision = fired_mask(done), done.decision
        if not (decision.active_known or self.lossy):
            # The kernels found no neuron outside what the gate let through for its token.
            assert not (active & ~decision.evaluated).any(), f"layer {done.layer}: a neuron missed"
            self.n_active = (0 if isnan(self.n_active) else self.n_active) + int(
                np.count_nonzero(active.any(axis=0))
            )
        if self.on_layer is None:
            return
        assert self._step is not None, "a forward pass outside start_step"
        truth = None
        if done.x is not None:
            truth = true_mask(self._host_kernels, self.bundles[done.layer], done.x)
        self.on_layer(
            LayerStep(
                self._step,
                done.layer,
                active,
                decision.evaluated,
                done.predicted,
                done.split,
                truth,
            )
        )

    # -- inside ---------------------------------------------------------------------------------

    def _check(self, predict: Predict | None, always_predict: bool) -> None:
        cache, costs, gating = self.cache, self.device.costs, self.gating
        shape = (len(self.bundles), self.bundles[0].n_neurons)
        if self.plans and self.late == "cancel":
            raise KairoxError(
                f"late 'cancel' ({type(cache.policy).__name__.lower()}'s) is built in the "
                "simulator only: a live copy cannot be taken back; use late = 'cpu' or 'stall'"
            )
        if (cache.n_layers, cache.n_neurons) != shape:
            raise KairoxError(
                f"the cache has {cache.n_layers} layers of {cache.n_neurons} neurons, "
                f"the model {shape[0]} of {shape[1]}"
            )
        if (self.trigger == "after") != cache.plans_after:
            raise KairoxError(
                f"the cache was made for another trigger than {self.trigger!r}; give both the same"
            )
        asks = (self.plans or always_predict) and self.trigger in PREDICTING
        if predict is None and self.lossy:
            raise KairoxError(
                "gating 'predicted' computes what a predictor says and none was given; use "
                "predictor lookahead or rank, or another gating"
            )
        if predict is None and asks:
            raise KairoxError(
                f"trigger {self.trigger!r} needs a predictor and none was given; "
                "use one, or the trigger 'after'"
            )
        if costs is None:
            return
        if costs.gating != gating:
            raise KairoxError(
                f"the device's costs are for gating {costs.gating!r}, the model runs {gating!r}"
            )
        if costs.swap_neurons != cache.swap_neurons:
            raise KairoxError(
                f"a swap holds {costs.swap_neurons} neurons at the device's costs and "
                f"{cache.swap_neurons} in the cache; build the cache with swap_neurons = "
                f"{costs.swap_neurons}"
            )
        if self.predicts and costs.predictor == "none":
            raise KairoxError(
                "a predictor runs and the device's costs have none; make them with "
                "predictor = 'lookahead'"
            )

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
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kairox_exec.device import Device
from kairox_exec.families import Family, decoder_layers, replace_ffn
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.oplog import Size
from kairox_exec.slots import SlotStore
from kairox_exec.weights import NeuronBundles
from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.events import Split
from kairox_sim.policies.base import Ids, Late, Share, Trigger

LOOK_AHEAD = ("attn_in", "attn_out")
PREDICTING = ("attn_in", "attn_out", "serial")

Mask = NDArray[np.bool_]  # [n_tokens, n_neurons]
Predict = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer to predict, hidden state [..., d_model]) -> bool [n_tokens, n_neurons]"""


class Kernels(Protocol):
    """What a module of `kairox_exec.kernels` offers; see torch_ref."""

    def gate_all(
        self,
        x: torch.Tensor,
        gate_rows: torch.Tensor,
        gate_b: torch.Tensor | None,
        spec: FfnSpec,
    ) -> torch.Tensor: ...

    def ffn_union(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        spec: FfnSpec,
        *,
        act: torch.Tensor | None = None,
        gate_b: torch.Tensor | None = None,
        up_b: torch.Tensor | None = None,
        fired: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def total(self, y: torch.Tensor) -> torch.Tensor: ...


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
    """What happened in one layer of one step, for a recorder."""

    step: StepInfo
    layer: int
    active: Mask
    evaluated: Mask
    predicted: Mask | None  # None where no predictor ran, as for layer 0
    split: Split


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The part of a layer's FFN that stays on the device whatever is resident."""

    gate_w: torch.Tensor | None  # exact gating: all neurons' gate (OPT: fc1)
    gate_b: torch.Tensor | None
    up_b: torch.Tensor | None
    down_b: torch.Tensor | None


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
    trigger. always_predict: predict even if the policy never plans, for a recorder. on_layer is
    called for every layer when a step has ended, outside its time.
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
        always_predict: bool = False,
        on_layer: Callable[[LayerStep], None] | None = None,
    ) -> None:
        self.cache, self.device, self.bundles = cache, device, bundles
        self.trigger: Trigger = trigger or cache.policy.default_trigger
        self.late: Late = late or cache.policy.default_late
        self.plans = cache.policy.admits != "never"
        self._host_kernels, self._device_kernels = host_kernels, device_kernels
        self._predict = predict if self.plans or always_predict else None
        self.on_layer = on_layer
        self._check(predict, always_predict)
        self.slots = SlotStore(device, bundles, cache)
        self.on_device = [
            OnDevice(
                device.put(b.gate_w) if b.gating == "exact" else None,
                *(None if t is None else device.put(t) for t in (b.gate_b, b.up_b, b.down_b)),
            )
            for b in bundles
        ]
        self._step: StepInfo | None = None
        self._size = Size()
        self._attention_ns = 0  # when the attention op of the coming layer began
        self._done: list[LayerStep] = []  # of this step, kept for on_layer
        self._predicted: dict[int, Mask] = {}  # by layer, until its FFN
        self.unfinished = np.zeros(cache.n_layers, bool)  # copies of the layer late for its FFN
        self._last_of_layer0: Ids | None = None  # what the step's last token evaluated in layer 0

    @property
    def predicts(self) -> bool:
        """Whether a predictor runs."""
        return self._predict is not None and self.trigger in PREDICTING

    def install(self, model: nn.Module, family: Family) -> None:
        """Replace the model's FFNs, which frees their weights, and hook what the triggers need."""
        for i, layer in enumerate(decoder_layers(model, family)):
            replace_ffn(layer, family, HybridFFN(self, i))
            norm: Any = layer.get_submodule(family.ffn_norm)
            norm.register_forward_pre_hook(self._after_attention_hook(i))
            if self.trigger == "attn_in":
                layer.register_forward_pre_hook(self._before_layer_hook(i), with_kwargs=True)

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
        if self.on_layer is not None:
            for layer_step in done:
                self.on_layer(layer_step)
        return ended_ns

    # -- between the layers ---------------------------------------------------------------------

    def before_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """attn_in: the state entering `layer` is at hand."""
        self._predict_and_plan(layer + 1, hidden)
        self._attention_ns = self.device.begin()

    def after_attention(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual after the attention of `layer` is at hand: the input of its FFN norm."""
        self.device.end(self._attention_ns, "attention", layer, self._size)
        if self.trigger == "attn_out":
            self._predict_and_plan(layer + 1, hidden)
        elif self.trigger == "serial":
            self._predict_and_plan(layer, hidden)

    def _predict_and_plan(self, layer: int, hidden: torch.Tensor) -> None:
        if layer == self.cache.n_layers or self._predict is None:
            return
        t0_ns = self.device.begin()
        mask: Mask = self._predict(layer, hidden).numpy(force=True)
        ids, share = _seen(mask)
        self._predicted[layer] = mask
        self.device.end(t0_ns, "predict", layer, self._size)
        if self.plans:
            self._plan(layer, ids, share)

    def _plan(self, layer: int, ids: Ids, share: Share | None) -> None:
        self.device.think()
        swaps = self.cache.plan(layer, ids, share)
        self.slots.start(layer, swaps)
        self.device.thought(layer, Size(neurons=self.cache.n_neurons, n_swaps=len(swaps)))

    # -- the FFN --------------------------------------------------------------------------------

    def ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [n_tokens, d_model] -> FFN output, same shape and dtype."""
        given_dtype, x = x.dtype, x.float()
        act, mask = self._gate(layer, x)
        evaluated, share = _seen(mask)
        self._take_landed(layer, evaluated, share)
        split = self.cache.lookup(layer, evaluated, evaluated, share)
        places = self.slots.places(layer, split.on_time)  # before a plan can move anything
        if layer == 0:
            self._last_of_layer0 = np.flatnonzero(mask[-1]).astype(np.int32)

        handed = None
        if split.residual.size:
            work = self._host_work(layer, split.residual)
            inputs = [x, act[:, torch.from_numpy(split.residual)]]
            size = Size(neurons=split.residual.size, n_tokens=x.shape[0])
            handed = self.device.hand_over(layer, inputs, [work], size)
        if self.plans and self.trigger == "after":
            self._plan(layer, evaluated, share)
        y = self._device_rows(layer, x, act, split.on_time, places)
        if handed is not None:
            y += self.device.join(handed)
        y = self._device_kernels.total(y)
        down_b = self.on_device[layer].down_b
        if down_b is not None:
            y = y + down_b
        self._end_layer(layer, mask, split)
        return y.to(given_dtype)

    def _gate(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, Mask]:
        """Activations [n_tokens, n_neurons], 0 where not active, and which are active."""
        bundle, here = self.bundles[layer], self.on_device[layer]
        if here.gate_w is None:  # oracle: known without a cost, so no op
            act = self._host_kernels.gate_all(x, bundle.gate_w, bundle.gate_b, bundle.spec)
            return act, (act != 0).numpy(force=True)
        t0_ns = self.device.begin()
        act = self._device_kernels.gate_all(x, here.gate_w, here.gate_b, bundle.spec)
        mask: Mask = (act != 0).numpy(force=True)
        self.device.end(t0_ns, "gate", layer, self._size)
        return act, mask

    def _take_landed(self, layer: int, evaluated: Ids, share: Share | None) -> None:
        """Poll once and commit, after waiting for this layer's copies where the settings say so."""
        if self.plans and self.trigger == "instant":
            swaps = self.cache.plan(layer, evaluated, share)
            self.slots.start(layer, swaps, at_once=True)
            self.cache.commit(swap.id for swap in swaps)
            return
        if self.plans and (self.late == "stall" or self.trigger == "serial"):
            flying = self.cache.in_flight.values()
            self.device.wait_landed([swap.id for swap in flying if swap.layer == layer])
        self.cache.commit(self.slots.landed())
        flying = self.cache.in_flight.values()
        self.unfinished[layer] = any(swap.layer == layer for swap in flying)

    def _host_work(self, layer: int, ids: Ids) -> Callable[..., torch.Tensor]:
        bundle, kernels, index = self.bundles[layer], self._host_kernels, torch.from_numpy(ids)
        up_b = None if bundle.up_b is None else bundle.up_b[index]

        def residual(x: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
            return kernels.ffn_union(x, bundle.rows, index, bundle.spec, act=act, up_b=up_b)

        return residual

    def _device_rows(
        self, layer: int, x: torch.Tensor, act: torch.Tensor, ids: Ids, places: torch.Tensor
    ) -> torch.Tensor:
        bundle, here, index = self.bundles[layer], self.on_device[layer], torch.from_numpy(ids)
        t0_ns = self.device.begin()
        y = self._device_kernels.ffn_union(
            x,
            self.slots.slots[layer],
            places,
            bundle.spec,
            act=act[:, index],
            up_b=None if here.up_b is None else here.up_b[index],
        )
        self.device.end(t0_ns, "ffn", layer, Size(neurons=ids.size, n_tokens=x.shape[0]))
        return y

    def _end_layer(self, layer: int, mask: Mask, split: Split) -> None:
        computed = np.zeros(mask.shape[1], bool)
        computed[split.on_time] = computed[split.residual] = True
        missed = int(np.count_nonzero(mask & ~computed))
        assert not missed, f"layer {layer}: {missed} active neurons were not computed"
        predicted = self._predicted.pop(layer, None)
        if layer == self.cache.n_layers - 1 and self.plans and self.trigger in LOOK_AHEAD:
            assert self._last_of_layer0 is not None
            self._plan(0, self._last_of_layer0, None)  # for the next step
        self._attention_ns = self.device.begin()
        if self.on_layer is not None:
            assert self._step is not None, "a forward pass outside start_step"
            self._done.append(LayerStep(self._step, layer, mask, mask, predicted, split))

    # -- inside ---------------------------------------------------------------------------------

    def _check(self, predict: Predict | None, always_predict: bool) -> None:
        cache, costs, gating = self.cache, self.device.costs, self.bundles[0].gating
        shape = (len(self.bundles), self.bundles[0].n_neurons)
        if gating not in ("oracle", "exact"):
            raise KairoxError(f"gating {gating!r} is not built yet; allowed: oracle, exact")
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
        if predict is None and (self.plans or always_predict) and self.trigger in PREDICTING:
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

    def _after_attention_hook(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.after_attention(layer, args[0])

        return hook

    def _before_layer_hook(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.before_layer(layer, args[0] if args else kwargs["hidden_states"])

        return hook


def _seen(mask: Mask) -> tuple[Ids, Share | None]:
    """The union over a chunk's tokens, and each neuron's share of them (None: all 1, one token)."""
    if mask.shape[0] == 1:
        return np.flatnonzero(mask[0]).astype(np.int32), None
    fired = np.count_nonzero(mask, axis=0)
    ids = np.flatnonzero(fired).astype(np.int32)
    return ids, fired[ids].astype(np.float32) / np.float32(mask.shape[0])

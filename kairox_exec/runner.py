"""Runner: a transformers model with hybrid FFNs; prefill and decode, one StepRecord per step.

Torch's thread count is the caller's: on two cores, `torch.set_num_threads(1)` before loading leaves
one for the host's lane. Nothing is set at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kairox_exec.compiled import uncompiled
from kairox_exec.device import Device
from kairox_exec.families import Family, family_of, rule_of
from kairox_exec.ffn import LivePipeline
from kairox_exec.ffn_spec import Numerics
from kairox_exec.formats import Format
from kairox_exec.kernels import Kernels, torch_ref
from kairox_exec.layer_step import LayerStep, StepInfo
from kairox_exec.loading import load_dense
from kairox_exec.oplog import NS, Op, busy_s
from kairox_exec.predictor import LayerGate, Learnt, ffn_norms, gates_on, predict
from kairox_exec.sampling import Choose, greedy
from kairox_exec.text import checked_tokens
from kairox_exec.weights import NeuronBundles, bundle_model
from kairox_sim.cache import NeuronCache
from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import Late, Trigger
from kairox_sim.record import LayerWaits, StepRecord, exactness_of

BuildCache = Callable[[int, int], NeuronCache]
"""(n_layers, n_neurons) -> the cache of this run"""


@dataclass(frozen=True, slots=True)
class Ending:
    """What was still open when the run ended; in loads, like StepRecord's."""

    unused_yet: int  # resident, and never met a first use
    cancelled: int  # in flight


def load(
    model_dir: str | Path,
    build_cache: BuildCache,
    device: Device,
    *,
    fatrelu_threshold: float | None = None,
    thresholds: Sequence[float] | None = None,
    **how: Any,
) -> Runner:
    """Load a model directory (local files only) and put hybrid FFNs in. See `attach`."""
    model, config = load_dense(
        model_dir, fatrelu_threshold=fatrelu_threshold, thresholds=thresholds
    )
    return attach(model, config, build_cache, device, **how)


def attach(
    model: nn.Module,
    config: Any,
    build_cache: BuildCache,
    device: Device,
    *,
    gating: str = "exact",
    numerics: Numerics = "fast",
    weights: Format = "float32",
    **how: Any,
) -> Runner:
    """Replace the FFNs of a dense transformers model in place. A compiled one runs uncompiled.

    weights: the format its FFN rows are kept in. how: of `run_bundles`.
    """
    model = uncompiled(model)
    family = family_of(config)
    rule = rule_of(config)
    bundles = bundle_model(
        model,
        family,
        gating=gating,
        threshold=rule.thresholds,
        activation=rule.activation,
        fmt=weights,
        numerics=numerics,
    )
    return run_bundles(model, config, family, bundles, build_cache, device, **how)


def run_bundles(
    model: nn.Module,
    config: Any,
    family: Family,
    bundles: Sequence[NeuronBundles],
    build_cache: BuildCache,
    device: Device,
    *,
    trigger: Trigger | None = None,
    late: Late | None = None,
    look_ahead: bool = True,
    learnt: Learnt | None = None,
    always_predict: bool = False,
    audit: bool = False,
    host_kernels: Kernels = torch_ref,
    device_kernels: Kernels = torch_ref,
    on_layer: Callable[[LayerStep], None] | None = None,
) -> Runner:
    """A model whose FFNs are `bundles`; its own are replaced in place.

    trigger, late: the policy's own by default; the cache must have been built for the same trigger.
    look_ahead: use the training-free predictor where the trigger predicts, unless a `learnt` one is
    given. always_predict: run it even if the policy never plans, so that a recorder sees what it
    says. on_layer is called for every layer when a step has ended, outside its time; an assertion
    fails if a neuron was not computed that should have been. audit: on_layer is also told what
    fires in the dense layer.
    """
    cache = build_cache(len(bundles), bundles[0].n_neurons)
    on_device: list[LayerGate] = []

    # A card's kernels read a gate once, as it is stored; torch would decode it piece by piece.
    asked = torch_ref if device.where.type == "cpu" else device_kernels

    def predict_layer(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return predict(on_device[layer], hidden, asked)

    ask = predict_layer if look_ahead else None
    pipeline = LivePipeline(
        cache,
        device,
        bundles,
        host_kernels=host_kernels,
        device_kernels=device_kernels,
        trigger=trigger,
        late=late,
        predict=ask if learnt is None else learnt.to(device.where).predict,
        look="attn_out" if learnt is None else learnt.trigger,
        always_predict=always_predict,
        audit=audit,
        on_layer=on_layer,
    )
    if pipeline.predicts and learnt is None:
        # The norm's forward, not its call: a prediction must not set off the pipeline's hook.
        norms = [norm.forward for norm in ffn_norms(model, family)]
        on_device += gates_on(device, norms, bundles, pipeline.on_device)
    elif pipeline.predicts and learnt is not None and pipeline.look != learnt.trigger:
        raise KairoxError(
            f"the predictor was trained for trigger {learnt.trigger!r} and would be asked at "
            f"{pipeline.look!r}; set trigger to {learnt.trigger!r}, or train another"
        )
    pipeline.install(model, family)
    with _enough_memory("the rest of the model beside its resident neurons"):
        model.to(device.where)
    return Runner(model, config, pipeline)


class Runner:
    """A context manager. Each sequence has a KV cache of its own; residency stays.

    `logits` [vocab] are those after the latest step's last token. `ops` collects the device's log
    where `keep_ops` is set (for calibration and timelines).
    """

    def __init__(self, model: nn.Module, config: Any, pipeline: LivePipeline) -> None:
        self.model, self.config, self.pipeline = model, config, pipeline
        self.cache, self.device = pipeline.cache, pipeline.device
        self.logits = torch.empty(0)
        self.keep_ops = False
        self.ops: list[Op] = []
        self.ending: Ending | None = None
        self._open: list[Op] = []  # ops that reached beyond the step in which they were logged
        self._seq = self._step = 0
        self._kv_name = kv_argument(model)
        self._where = next(model.parameters()).device
        self.approximate = pipeline.bundles[0].spec.activation == "silu"  # by thresholds
        self.exact = not (pipeline.lossy or self.approximate)
        costs = self.device.costs
        self._load_bytes = pipeline.bundles[0].bundle_bytes if costs is None else costs.bundle_bytes

    def __enter__(self) -> Self:
        return self

    @property
    def exactness(self) -> str:
        """What is promised of the neurons that are computed, for labels."""
        gating = "predicted" if self.pipeline.lossy else "exact"
        return exactness_of(gating, approximate=self.approximate)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()

    def run(
        self,
        sequences: Iterable[Sequence[int] | NDArray[np.int32]],
        *,
        prefill: int = 32,
        prefill_chunk: int = 64,
    ) -> Iterator[tuple[int | None, StepRecord]]:
        """Feed given tokens: the first `prefill` of each sequence in chunks, then one per step.

        Yields after every step the token that comes next in the sequence, None at its end.
        """
        for given in sequences:
            tokens = checked_tokens(given, self.config)
            sequence = self._begin_sequence()
            chunks = _chunks(tokens[:prefill], prefill_chunk)
            fed = 0
            for chunk in [*chunks, *_chunks(tokens[prefill:], 1)]:
                phase = "prefill" if fed < prefill else "decode"
                _, record = sequence(chunk, phase, None)
                fed += chunk.size
                yield (int(tokens[fed]) if fed < tokens.size else None), record

    def generate(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        choose: Choose = greedy,
        *,
        max_new_tokens: int,
        stop_tokens: Sequence[int] = (),
        prefill_chunk: int = 64,
    ) -> Iterator[tuple[int | None, StepRecord]]:
        """Yields after every step the token it chose; None after a chunk that is not the last.

        Ends after `max_new_tokens` tokens, after a stop token (which is yielded), or where the
        model's context ends. The last token is not fed.
        """
        tokens = checked_tokens(prompt, self.config)
        sequence = self._begin_sequence()
        chunks = _chunks(tokens, prefill_chunk)
        for chunk in chunks[:-1]:
            yield None, sequence(chunk, "prefill", None)[1]
        chunk, phase, room = chunks[-1], "prefill", self._max_context() - tokens.size
        for _ in range(min(max_new_tokens, room + 1)):
            token, record = sequence(chunk, phase, choose)
            yield token, record
            if token in stop_tokens:
                return
            chunk, phase = np.asarray([token], np.int32), "decode"

    def finish(self) -> Ending:
        """End the run: cancel what is in flight and check the cache. The device stays open."""
        if self.ending is None:
            self.device.drop_copies()
            for swap_id in list(self.cache.in_flight):
                self.cache.cancel(swap_id)
            self.ending = Ending(self.cache.unused_yet, int(self.cache.take_counts().cancelled))
            self.cache.check()
        return self.ending

    # -- one step -------------------------------------------------------------------------------

    def _begin_sequence(
        self,
    ) -> Callable[[NDArray[np.int32], str, Choose | None], tuple[int | None, StepRecord]]:
        """A fresh KV cache; returns the function that feeds it one chunk."""
        from transformers import DynamicCache

        if self.ending is not None:
            raise RuntimeError("this run has been finished; load the model again for another")
        kv = DynamicCache(config=self.config)
        seq, self._seq = self._seq, self._seq + 1
        context_len = 0

        def feed(
            tokens: NDArray[np.int32], phase: str, choose: Choose | None
        ) -> tuple[int | None, StepRecord]:
            nonlocal context_len
            context_len += tokens.size
            step, self._step = self._step, self._step + 1
            return self._feed(StepInfo(seq, step, phase, tokens, context_len), kv, choose)

        return feed

    @torch.inference_mode()
    def _feed(
        self, step: StepInfo, kv: Any, choose: Choose | None
    ) -> tuple[int | None, StepRecord]:
        knobs = self.cache.controller.knobs
        read = "threshold_scale" in self.cache.policy.knobs
        began_ns = self.pipeline.start_step(step)
        ids = torch.from_numpy(step.tokens.astype(np.int64))[None].to(self._where)
        with _enough_memory(f"a step of {step.n_tokens} tokens at a context of {step.context_len}"):
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._kv_name: kv})
        self.logits = out.logits[0, -1]
        token = None if choose is None else choose(self.logits.cpu())
        ended_ns = self.pipeline.end_step()
        record, layers = self._record(
            step, began_ns, ended_ns, knobs.threshold_scale if read else nan
        )
        self.cache.end_step(record, layers)
        return token, record

    def _record(
        self, step: StepInfo, began_ns: int, ended_ns: int, threshold_scale: float
    ) -> tuple[StepRecord, LayerWaits]:
        logged, self.device.ops = self.device.ops, []
        if self.keep_ops:
            self.ops += logged
        ops = self._open + logged
        self._open = [op for op in ops if op.t1_ns > ended_ns]

        def busy(lane: str, *kinds: str) -> float:
            chosen = [op for op in ops if op.lane == lane and (not kinds or op.kind in kinds)]
            return busy_s(chosen, began_ns, ended_ns)

        counts = self.cache.take_counts()
        decide_s = busy("planner")
        record = StepRecord.of(
            counts,
            seq=step.seq,
            step=step.step,
            phase=step.phase,
            n_tokens=step.n_tokens,
            context_len=step.context_len,
            exact=self.exact,
            wall_s=(ended_ns - began_ns) / NS,
            gpu_busy_s=busy("gpu"),
            cpu_busy_s=busy("cpu"),
            swap_busy_s=busy("h2d", "swap"),
            act_busy_s=busy("h2d", "partial sums") + busy("d2h"),
            predict_s=busy("gpu", "predict"),
            decide_s=decide_s,
            wait_cpu_s=busy("idle", "cpu"),
            wait_io_s=busy("idle", "io"),
            wait_decide_s=decide_s if self.device.decide_blocks_gpu else busy("idle", "decide"),
            fetched=0.0,  # nothing is copied on demand here
            h2d_bytes=counts.loads * float(self._load_bytes),
            threshold_scale=threshold_scale,
        )
        if not isnan(self.pipeline.n_active):  # the cache was not told what the kernels decided
            record = replace(record, active=self.pipeline.n_active)
        return record, self._waits(ops)

    def _waits(self, ops: Sequence[Op]) -> LayerWaits:
        """What each layer of the step waited for, from its idle time."""
        cpu_s = np.zeros(self.cache.n_layers)
        unfinished = self.pipeline.unfinished.copy()
        for op in ops:
            if op.lane == "idle" and op.layer >= 0:
                if op.kind == "cpu":
                    cpu_s[op.layer] += (op.t1_ns - op.t0_ns) / NS
                elif op.kind == "io":
                    unfinished[op.layer] |= op.t1_ns > op.t0_ns
        return LayerWaits(unfinished, cpu_s)

    def _max_context(self) -> int:
        return int(self.config.max_position_embeddings)


@contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise KairoxError(
            f"the device has no memory left for {what}; give fewer --slots or a smaller --vram, "
            "smaller chunks of the prompt (--set prefill_chunk=16), or end what else uses the "
            "device"
        ) from error


def _chunks(tokens: NDArray[np.int32], size: int) -> list[NDArray[np.int32]]:
    if size < 1:
        raise KairoxError(f"prefill_chunk must be 1 or more, got {size}")
    return [tokens[at : at + size] for at in range(0, tokens.size, size)]


def kv_argument(model: nn.Module) -> str:
    """What forward calls the KV cache: `cache` in newer transformers, `past_key_values` before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"

"""Record a plain transformers model, wherever it runs: nothing of it is replaced, only hooked.

    with record_plain(model, load_tokenizer(DIR), "run.arrow", model_dir=DIR):
        model.generate(**inputs)

What fires is decided by the model's own gate (OPT: fc1; dReLU: gate and up), in its own precision.
Bits are packed on the device, copied beside its work and written by a thread. A batch's rows are
sequences of their own, and the rows of a forward pass steps of their own; padding is no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kairox_exec.compiled import uncompiled
from kairox_exec.families import decoder_layers, family_of, fires, rule_of
from kairox_exec.generation import stop_tokens
from kairox_exec.loading import model_sha256
from kairox_exec.machine import machine_facts
from kairox_exec.packing import HostCopies, masks_on_host, pack_bits
from kairox_exec.plain_rows import Forward, PassWriter
from kairox_exec.recording_file import (
    failure,
    free_path,
    keep_what_there_is,
    seal_recording,
    seal_what_there_is,
)
from kairox_exec.text import Tokenizer
from kairox_sim.errors import KairoxError
from kairox_sim.trace_format import SequenceInfo, TraceHeader

COUNTED_SILENT = "neurons whose |silu(gate)| does not exceed a threshold count as silent"
AT_ONCE = 32  # tokens that the writing thread is woken for; waking it costs more than one of them
HELD_S = 1.0  # it is woken for fewer once they are this old, because a kill would lose them
QUEUED = 3  # times it may be behind before the model waits
# Values of the masks of a forward pass: those of smaller ones are packed together, on a GPU when
# it has ended and on the CPU with other passes', because launching the operations takes longer
# than they do.
PACKED_LATER = 1 << 19


@dataclass(slots=True)
class _Known:
    """A KV cache that was seen: whose rows are in it, and how many columns."""

    seqs: tuple[int, ...]
    length: int


def record_plain(
    model: nn.Module,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    model_dir: str | Path | None = None,
    thresholds: Sequence[float] | None = None,
    sequences: Sequence[SequenceInfo] = (),
    max_sequences: int = 1024,
    domain: str = "generated",
    stop: Sequence[int] | None = None,
    force: bool = False,
) -> PlainRecorder:
    """A context manager: what `model` computes inside it is in the sealed trace `out` afterwards.

    model: of a family of `families`, from a directory of safetensors (model_dir, by default where
    it was loaded from). thresholds: of `kairox sparsify`, for a dense SwiGLU model, whose neurons
    are then marked by them; the model runs as it is. sequences: what will be fed, in order, where
    it is known; else up to `max_sequences` are named by their order and their prompts' hashes.
    stop: tokens behind which a row of a batch is filled up with padding; the model's own by
    default.
    """
    return PlainRecorder(
        model, tokenizer, Path(out), model_dir=model_dir, thresholds=thresholds,
        sequences=sequences, max_sequences=max_sequences, domain=domain, stop=stop, force=force,
    )  # fmt: skip


class PlainRecorder:
    """See `record_plain`. `phase` names the next passes "prefill" or "decode"; None: by length."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        out: Path,
        *,
        model_dir: str | Path | None,
        thresholds: Sequence[float] | None,
        sequences: Sequence[SequenceInfo],
        max_sequences: int,
        domain: str,
        stop: Sequence[int] | None,
        force: bool,
    ) -> None:
        self.model: Any = uncompiled(model)
        self.out, self._stream = out, free_path(out, force)
        config = self.model.config
        self._family = family_of(config, thresholds=thresholds)
        self._rule = rule_of(config, thresholds=thresholds)
        self._layers = decoder_layers(self.model, self._family)
        self.phase: str | None = None
        self._given = bool(sequences)
        infos = tuple(sequences) or tuple(
            SequenceInfo(i, domain, "generate()", "", 0, 0, generated=True)
            for i in range(max_sequences)
        )
        self.header = self._header(_directory(self.model, model_dir), tokenizer, infos)
        stop = stop_tokens(config) if stop is None else tuple(stop)
        self._rows = PassWriter(self._stream, self.header, tokenizer, stop)
        self._queue: Queue[list[Forward] | None] = Queue(QUEUED)
        self._pending: list[Forward] = []
        self._n_pending = 0  # tokens, padding too
        self._handed_ns = 0  # when the thread was last given something
        self._thread = Thread(target=self._write, name="kairox-record", daemon=True)
        self._failed: BaseException | None = None
        self._caches: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
        self._n_seqs = 0
        self._copies = HostCopies()
        self._fired: dict[int, torch.Tensor] = {}  # by layer, of the pass under way
        self._gates: dict[int, torch.Tensor] = {}  # dReLU: until the up projection has run
        self._inside_ns = self._writing_ns = self._wall_ns = self._began_ns = 0
        self._handles: list[Any] = []

    # -- counts, for the file ---------------------------------------------------------------------

    @property
    def n_steps(self) -> int:
        return self._rows.n_steps

    @property
    def n_tokens(self) -> int:
        return self._rows.n_tokens

    @property
    def overhead(self) -> float:
        """Time in hooks and CPU time of the thread that writes, as a share of the forward passes'.

        That thread runs beside the model where there is a core for it, but the two take turns at
        Python's lock, so that its time is not free. What torch takes to call hooks is left out,
        some microseconds each: with a very small model `benchmarks/bench_recorder.py` shows more.
        """
        added_ns = self._inside_ns + self._writing_ns
        return added_ns / self._wall_ns if self._wall_ns else nan

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        hook = self._handles.append
        hook(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hook(self.model.register_forward_hook(self._end, with_kwargs=True))
        for i, layer in enumerate(self._layers):
            gate = layer.get_submodule(self._family.gate)
            if self._rule.activation == "drelu":
                assert self._family.up is not None
                hook(gate.register_forward_hook(partial(self._hold, i)))
                gate = layer.get_submodule(self._family.up)
            hook(gate.register_forward_hook(self._hook(i)))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._queue.put(self._pending)
        self._queue.put(None)
        self._thread.join()
        error = error or self._failed
        updates = {} if self._given else {"sequences": self._rows.sequences()}
        try:
            if error is None and self.n_steps:
                self._rows.close()
            else:
                self._rows.abandon()
        except OSError as full:
            error = error or full
            with suppress(OSError):
                self._rows.abandon()
        if error is None and self.n_steps:
            seal_recording(self, self._stream, self.out, **updates)
            self._rows.warn_of_silent_layers()
            return
        if isinstance(error, KeyboardInterrupt):
            said = seal_what_there_is(self, self._stream, self.out, **updates)
            raise KeyboardInterrupt(said) from error
        said = keep_what_there_is(self, self._stream)
        if error is None:
            raise KairoxError(
                "no forward pass was recorded: the hooks never ran. Was the model run at all, or "
                "was it compiled before? Then run the recorder's `.model`, which is not. " + said
            )
        if isinstance(error, KairoxError | OSError):
            raise failure(error, said) from error
        if kind is None:
            raise error

    # -- hooks ------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._failed is not None:
            raise KairoxError(f"the recording failed: {self._failed}") from self._failed
        self._fired = {}
        self._gates.clear()
        self._began_ns = time.perf_counter_ns()

    def _hold(self, layer: int, module: nn.Module, args: Any, gate: torch.Tensor) -> None:
        self._gates[layer] = gate

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        """Behind the projection that decides, once a pass: what it looks up, it looks up here."""
        clock_ns = time.perf_counter_ns
        threshold, activation = self._rule.thresholds[layer], self._rule.activation
        largest = PACKED_LATER // self.header.n_layers

        def seen(module: nn.Module, args: Any, value: torch.Tensor) -> None:
            began_ns = clock_ns()
            if layer in self._fired:
                raise KairoxError(
                    f"layer {layer} ran twice in one forward pass; gradient checkpointing cannot "
                    "be recorded"
                )
            if activation == "drelu":
                mask = fires(self._gates.pop(layer), threshold, activation, value)
            else:
                mask = fires(value, threshold, activation)
            if mask.numel() > largest:
                mask = self._copies.take(pack_bits(mask))
            self._fired[layer] = mask
            self._inside_ns += clock_ns() - began_ns

        return seen

    def _end(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        ended_ns = time.perf_counter_ns()
        n_layers, fired = self.header.n_layers, self._fired
        if len(fired) != n_layers:
            raise KairoxError(
                "records missing: a forward pass brought no layers "
                f"{sorted(set(range(n_layers)) - set(fired))} of {n_layers}. Rows must equal "
                "layers x tokens: was the model, or one of its layers, compiled before? Record "
                "the plain one"
            )
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.ndim != 2:
            raise KairoxError("only passes over input_ids [batch, tokens] can be recorded")
        n_rows, n_columns = ids.shape
        before = _cache_of(kwargs)
        cache = _cache_of(output) if before is None else before
        seqs, past = self._place(n_rows, n_columns, before, cache)
        self._pending.append(
            Forward(
                seqs=seqs,
                past=past,
                cached=cache is not None,
                phase=self.phase or ("decode" if past > 0 and n_columns == 1 else "prefill"),
                ids=self._copies.take(ids.clone()),
                real=_real(kwargs.get("attention_mask"), n_columns, self._copies),
                fired=masks_on_host([fired[i] for i in range(n_layers)], self._copies),
                ready=self._copies.events(),
            )
        )
        self._n_pending += n_rows * n_columns
        if self._n_pending >= AT_ONCE or ended_ns - self._handed_ns > HELD_S * 1e9:
            self._queue.put(self._pending)
            self._pending, self._n_pending, self._handed_ns = [], 0, ended_ns
        now_ns = time.perf_counter_ns()
        self._inside_ns += now_ns - ended_ns
        self._wall_ns += now_ns - self._began_ns

    def _place(
        self, n_rows: int, n_columns: int, before: Any, cache: Any
    ) -> tuple[tuple[int, ...], int]:
        """The sequences of the rows, and how many columns their caches held before this pass.

        before: the cache that was given, if one was; cache: the one that there is now.
        """
        known = None if before is None else self._caches.get(before)
        now = 0 if cache is None else int(cache.get_seq_length())
        past = max(now - n_columns, 0)
        if known is not None and past == 0:
            known = None  # it was emptied
        if known is None:
            known = _Known(tuple(range(self._n_seqs, self._n_seqs + n_rows)), past)
            self._n_seqs += n_rows
            if self._n_seqs > len(self.header.sequences):
                raise KairoxError(
                    f"more than {len(self.header.sequences)} sequences were fed; give "
                    "max_sequences, or the sequences themselves"
                )
            if cache is not None:
                if hasattr(cache, "reorder_cache"):
                    cache.reorder_cache = _refuse_beams
                self._caches[cache] = known
        elif known.length != past or len(known.seqs) != n_rows:
            raise KairoxError(
                f"a KV cache of {len(known.seqs)} rows and {known.length} tokens came back with "
                f"{n_rows} and {past}: assisted generation and beam search cannot be recorded; "
                "sample or decode greedily"
            )
        known.length = past + n_columns
        return known.seqs, past

    # -- the thread -------------------------------------------------------------------------------

    def _write(self) -> None:
        while (forwards := self._queue.get()) is not None:
            began_ns = time.thread_time_ns()
            try:
                if self._failed is None:
                    self._rows.write(forwards)
            except BaseException as error:
                self._failed = error
            self._writing_ns += time.thread_time_ns() - began_ns

    def _header(
        self, model_dir: Path, tokenizer: Tokenizer, infos: tuple[SequenceInfo, ...]
    ) -> TraceHeader:
        gate: Any = self._layers[0].get_submodule(self._family.gate)
        weight = gate.weight
        dtype = str(weight.dtype).removeprefix("torch.")
        return TraceHeader(
            model=model_dir.resolve().name,
            model_sha256=model_sha256(model_dir),
            n_layers=len(self._layers),
            n_neurons=weight.shape[0],
            d_model=weight.shape[1],
            activation=self._rule.name,
            activation_threshold=max(self._rule.thresholds),
            gating="exact",  # every neuron's gate, in the model's own precision
            complete=True,
            tokenizer_sha256=tokenizer.sha256,
            sequences=infos,
            hardware=machine_facts() | {"device": weight.device.type},
            approximate=COUNTED_SILENT if self._rule.approximate else None,
            run={"kind": "plain", "dtype": dtype, "weights": dtype, "numerics": "fast"},
        )


def _cache_of(named: Any) -> Any:
    """The KV cache in the arguments of a forward pass or in its output, or None."""
    for name in ("cache", "past_key_values"):
        found = named.get(name) if hasattr(named, "get") else getattr(named, name, None)
        if found is not None:
            return found
    return None


def _real(mask: Any, n_columns: int, copies: HostCopies) -> torch.Tensor | None:
    """bool [batch, tokens]: what is no padding; None where there is none."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise KairoxError(
            "padding is recorded from an attention mask [batch, tokens]; this pass has another "
            "kind. Use the dynamic KV cache, without cache_implementation"
        )
    return copies.take(mask[:, -n_columns:] != 0)


def _refuse_beams(order: Any) -> None:
    raise KairoxError(
        "beam search moves rows of a batch between sequences and cannot be recorded; sample, or "
        "decode greedily"
    )


def _directory(model: Any, given: str | Path | None) -> Path:
    named = given or getattr(model, "name_or_path", None)
    if not named or not Path(named).is_dir():
        raise KairoxError(
            "a trace names the weights by their hash, and where this model's are is not known; "
            "give model_dir, its folder of safetensors"
        )
    return Path(named)

"""Record a run: a model and text in, a sealed trace out.

By default nothing is paced and every neuron is resident: what fires does not depend on either, and
recording is as quick as the model. A look-ahead predictor runs beside, so that a simulation can
replay what it would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kairox_exec.families import activation_of, family_of
from kairox_exec.feeds import Feed, Paths, feeds_of, paths_of, read_paths, require_context
from kairox_exec.generation import stop_tokens
from kairox_exec.hidden_states import HiddenStatesWriter
from kairox_exec.live import (
    ONE_THREAD,
    HostSide,
    KernelChoice,
    choose_device,
    device_for,
    model_shape,
    profile_for,
    start,
)
from kairox_exec.loading import model_sha256
from kairox_exec.machine import machine_facts
from kairox_exec.recorder import Recorder
from kairox_exec.recording_file import (
    drop_if_empty,
    failure,
    free_path,
    keep_what_there_is,
    seal_recording,
    seal_what_there_is,
    side_file,
)
from kairox_exec.runner import Runner
from kairox_exec.sampling import Choose, sampler
from kairox_exec.text import Tokenizer, check_vocabulary, load_tokenizer
from kairox_exec.thresholds import read_thresholds
from kairox_sim.calllog import CallLogWriter, call_log_header
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, LinkProfile
from kairox_sim.outputs import require_apart
from kairox_sim.policies import POLICIES
from kairox_sim.policies.base import Trigger
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, load_prior, require_usable
from kairox_sim.trace import Trace
from kairox_sim.trace_format import TraceHeader

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all)"""

# Sampled by default: greedy text of a small model runs into a loop, which flatters every cache.
TEMPERATURE, TOP_P = 0.8, 0.95


def record(
    model_dir: str | Path,
    texts: Paths,
    out: str | Path,
    *,
    prompts: Paths = (),
    tokens: int = 256,
    skip: int = 0,
    prefill: int = 32,
    window: int = 256,
    trigger: Trigger = "attn_out",
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    settings: Settings | None = None,
    prior: Trace | str | Path | None = None,
    call_log: str | Path | None = None,
    hidden: str | Path | None = None,
    device: str = "cpu",
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    kernels: KernelChoice = "numba",
    host: HostSide = ONE_THREAD,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Record what fires while a model reads files, or writes on from prompts; the sealed trace.

    texts: each file's tokens [skip, skip + tokens), in windows of `window` tokens, each a sequence
    with a fresh KV cache of which the first `prefill` tokens are a prefill and every other one is a
    decode step. Files in sequence are domains, named as the files are. prompts: instead of texts,
    each prompt is a prefill, and then `tokens` tokens that the model samples are decode steps.

    settings: the policy whose run is recorded, by default all neurons resident. trigger: which
    predictions to record, where the policy and the settings leave it open. call_log: also log every
    call of the cache there. hidden: also write the states that a predictor for this trigger is fed,
    see hidden_states. force: an `out` that exists is replaced once the new one is whole.

    Batches of whole steps reach the disk as they are made: a killed recording is a readable, cut
    trace at `out` (with force: `out`.recording). A KeyboardInterrupt seals what there is, and is
    raised again with a message that says where.
    """
    out = Path(out)
    stream = free_path(out, force)
    log_file = None if call_log is None else side_file(call_log, "call log", force)
    states_file = None if hidden is None else side_file(hidden, "file of hidden states", force)
    beside = [file for file in (log_file, states_file) if file is not None]
    require_apart(
        {"trace": out, "call log": call_log, "file of hidden states": hidden},
        read_paths(model_dir, texts, prompts, settings, prior),
    )
    shape = model_shape(model_dir, settings)
    tokenizer = load_tokenizer(model_dir)
    check_vocabulary(tokenizer, shape.vocab)
    choose = sampler(temperature=temperature, top_p=top_p, seed=seed)
    feeds = feeds_of(
        tokenizer, paths_of(texts), paths_of(prompts),
        tokens=tokens, skip=skip, prefill=prefill, window=window,
    )  # fmt: skip
    chosen = _with_trigger(settings or Settings(policy="all"), trigger)
    predicts = chosen.predictor != "none"
    hardware = machine_facts() | {"device": choose_device(device)}
    if emulate is not None:
        profile = profile_for(chosen, model_dir, emulate, time_scale=time_scale, link=link)
        emulate, time_scale, link = profile, 1.0, None
        hardware |= {"emulated": profile.name, "time_scale": profile.time_scale}
    with device_for(
        chosen,
        model_dir,
        device,
        emulate=emulate,
        time_scale=time_scale,
        link=link,
        always_predict=predicts,
        host=host,
    ) as machine:
        learnt_from = load_prior(chosen, prior)
        runner = start(
            model_dir, chosen, machine, prior=learnt_from, kernels=kernels, always_predict=predicts,
            context_len=max(len(feed.tokens) + feed.new_tokens for feed in feeds),
            cache_dir=host.cache_dir, on_load=host.on_load, on_loaded=host.on_loaded,
        )  # fmt: skip
        require_context(runner.config, feeds)
        header = _header(runner, model_dir, chosen, tokenizer, feeds, hardware)
        if learnt_from is not None:
            require_usable(learnt_from, _empty(header))
        recorder = Recorder(stream, header)
        try:
            with ExitStack() as stack:
                if log_file is not None:
                    about = call_log_header(runner.cache, chosen.model_dump(mode="json"))
                    log = stack.enter_context(CallLogWriter(log_file.stream, about))
                    runner.cache.journal = log.write
                stack.enter_context(recorder)
                runner.pipeline.on_layer = recorder
                after = [recorder.end_step]
                if states_file is not None:
                    family = family_of(runner.config)
                    look = runner.pipeline.look
                    states = stack.enter_context(
                        HiddenStatesWriter(states_file.stream, header, runner.model, family, look)
                    )
                    after.append(states.end_step)
                _run(runner, recorder, feeds, choose, chosen.prefill_chunk, after, progress)
                runner.finish()
        except KeyboardInterrupt as stop:
            said = seal_what_there_is(recorder, stream, out)
            drop_if_empty(recorder, beside)
            raise KeyboardInterrupt(said) from stop
        except (KairoxError, OSError) as error:
            said = keep_what_there_is(recorder, stream)
            drop_if_empty(recorder, beside)
            raise failure(error, said) from error
        except BaseException:
            keep_what_there_is(recorder, stream)
            raise
    sealed = seal_recording(recorder, stream, out)
    for file in beside:
        file.keep()
    return sealed


def _run(
    runner: Runner,
    recorder: Recorder,
    feeds: Sequence[Feed],
    choose: Choose,
    prefill_chunk: int,
    after_step: Sequence[Callable[[StepRecord], None]],
    progress: Progress | None,
) -> None:
    total = sum(len(feed.tokens) + feed.new_tokens for feed in feeds)
    for feed in feeds:
        n_before = recorder.n_tokens
        for step in _steps(runner, feed, choose, prefill_chunk):
            for tell in after_step:
                tell(step)
            if progress is not None:
                progress(recorder.n_tokens, total)
        fed = recorder.n_tokens - n_before
        if not feed.info.generated and fed != len(feed.tokens):
            raise KairoxError(
                f"records missing: {fed} of the {len(feed.tokens)} tokens of sequence "
                f"{feed.info.seq} were recorded"
            )


def _steps(runner: Runner, feed: Feed, choose: Choose, prefill_chunk: int) -> Iterator[StepRecord]:
    if not feed.info.generated:
        for _, step in runner.run([feed.tokens], prefill=feed.prefill, prefill_chunk=prefill_chunk):
            yield step
        return
    # The last token that is chosen is never fed, so one more is asked for than is recorded.
    for _, step in runner.generate(
        feed.tokens,
        choose,
        max_new_tokens=feed.new_tokens + 1,
        stop_tokens=stop_tokens(runner.config),
        prefill_chunk=prefill_chunk,
    ):
        yield step


def _header(
    runner: Runner,
    model_dir: str | Path,
    settings: Settings,
    tokenizer: Tokenizer,
    feeds: Sequence[Feed],
    hardware: dict[str, Any],
) -> TraceHeader:
    shape, pipeline = model_shape(model_dir, settings), runner.pipeline
    by = settings.thresholds
    spec = pipeline.bundles[0].spec
    fills = runner.cache.policy.fills
    return TraceHeader(
        model=shape.name,
        model_sha256=model_sha256(model_dir),
        n_layers=shape.n_layers,
        n_neurons=shape.n_neurons,
        d_model=shape.d_model,
        activation=activation_of(spec.threshold, spec.activation),
        activation_threshold=spec.threshold,
        gating=pipeline.bundles[0].gating,
        complete=not pipeline.lossy,
        approximate=None if by is None else read_thresholds(by, model_dir).approximate,
        tokenizer_sha256=tokenizer.sha256,
        sequences=tuple(feed.info for feed in feeds),
        predicted_trigger=pipeline.trigger if pipeline.predicts else None,
        hardware=hardware,
        capacities=() if fills == "all" else tuple(runner.cache.capacity),
        run={
            "kind": "hybrid",
            "dtype": settings.dtype,
            "weights": spec.fmt,
            "numerics": spec.numerics,
        },
    )


def _with_trigger(settings: Settings, trigger: Trigger) -> Settings:
    """A policy that never plans has no trigger of its own to record predictions for."""
    if settings.trigger is None and POLICIES[settings.policy].admits == "never":
        return settings.with_overrides({"trigger": trigger})
    return settings


def _empty(header: TraceHeader) -> Trace:
    none = np.zeros(0, np.int64)
    bits = np.zeros((0, header.n_neurons), bool)
    return Trace.from_arrays(
        header, seq=none, step=none, token=none, layer=none, phase=none, bits=bits
    )

"""Write on from a prompt under Settings: text as it comes, then what the run came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kairox_exec.calibration import OVERRUN_LIMIT
from kairox_exec.device import Device
from kairox_exec.live import (
    ONE_THREAD,
    HostSide,
    KernelChoice,
    device_for,
    model_shape,
    profile_for,
    start,
)
from kairox_exec.live_device import pace_lost
from kairox_exec.runner import Runner
from kairox_exec.sampling import sampler
from kairox_exec.text import Tokenizer, check_vocabulary, load_tokenizer
from kairox_sim.budgets import resident_label
from kairox_sim.hardware import HardwareProfile, LinkProfile
from kairox_sim.metrics import RunResult, steps_frame, summarise
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, label
from kairox_sim.trace import Trace

_INCOMPLETE = "�"  # what a tokenizer makes of bytes that are no whole character


class TextStream:
    """Tokens in, text out, piece by piece; bytes of a character are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self._said = 0  # characters given out

    def add(self, token: int) -> str:
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens)
        return "" if text.endswith(_INCOMPLETE) else self._new(text)

    def end(self) -> str:
        """What was held back: bytes that became no character."""
        return self._new(self._tokenizer.decode(self.tokens))

    def _new(self, text: str) -> str:
        piece, self._said = text[self._said :], len(text)
        return piece


@dataclass(frozen=True, slots=True)
class Generated:
    text: str
    tokens: tuple[int, ...]
    n_prompt: int  # tokens
    stopped: bool  # by a KeyboardInterrupt, before it was done
    threshold_scale: float  # of the last step; nan where the policy does not read it
    run: RunResult


def generate(
    model_dir: str | Path,
    prompt: str,
    settings: Settings | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    prior: Trace | str | Path | None = None,
    device: str = "auto",
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    kernels: KernelChoice = "numba",
    host: HostSide = ONE_THREAD,
    on_text: Callable[[str], None] = lambda piece: None,
) -> Generated:
    """Up to `max_new_tokens` tokens after `prompt`; `on_text` is given the text as it comes.

    A KeyboardInterrupt ends the text early: what there is by then is returned, marked stopped.
    """
    chosen = settings or Settings()
    choose = sampler(temperature=temperature, top_p=top_p, seed=seed)
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer.encode(prompt, special_tokens=True)
    profile = None
    if emulate is not None and device == "emulated":
        profile = profile_for(chosen, model_dir, emulate, time_scale=time_scale, link=link)
        emulate, time_scale, link = profile, 1.0, None
    stream = TextStream(tokenizer)
    records: list[StepRecord] = []
    stopped = False
    with device_for(
        chosen, model_dir, device, emulate=emulate, time_scale=time_scale, link=link, host=host
    ) as machine:
        runner = start(
            model_dir, chosen, machine, prior=prior, kernels=kernels,
            context_len=len(ids) + max_new_tokens,
            cache_dir=host.cache_dir, on_load=host.on_load, on_loaded=host.on_loaded,
        )  # fmt: skip
        check_vocabulary(tokenizer, int(runner.config.vocab_size))
        try:
            for token, record in runner.generate(
                ids,
                choose,
                max_new_tokens=max_new_tokens,
                stop_tokens=stop_tokens(runner.config),
                prefill_chunk=chosen.prefill_chunk,
            ):
                records.append(record)
                if token is not None:
                    on_text(stream.add(token))
            runner.finish()
        except KeyboardInterrupt:
            stopped = True
        on_text(stream.end())
        run = _result(runner, model_shape(model_dir, chosen).name, records, chosen, profile)
    return Generated(
        text=tokenizer.decode(stream.tokens),
        tokens=tuple(stream.tokens),
        n_prompt=len(ids),
        stopped=stopped,
        threshold_scale=records[-1].threshold_scale if records else np.nan,
        run=run,
    )


def stop_tokens(config: Any) -> tuple[int, ...]:
    """The end-of-text ids that a model's config names: none, one, or several."""
    given = getattr(config, "eos_token_id", None)
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _result(
    runner: Runner,
    model: str,
    records: Sequence[StepRecord],
    settings: Settings,
    profile: HardwareProfile | None,
) -> RunResult:
    device, steps = runner.device, steps_frame(records)
    costs, ending = device.costs, runner.ending
    return RunResult(
        steps=steps,
        summary=summarise(
            steps, runner.cache.n_layers, 1.0 if costs is None else costs.layers_ratio
        ),
        labels={
            "setting": label(settings),
            "time": "measured" if costs is None else "emulated",
            "costs": _costs_label(model, settings, None if costs is None else costs.shape.name),
            "hardware": hardware_label(device),
            "gating": gating_label(settings.gating, runner.exactness),
            "numerics": settings.numerics,
            "prediction": _prediction_label(settings, runner),
            "budget": resident_label(runner.cache.capacity, runner.cache.n_neurons),
        },
        unused_yet=0 if ending is None else ending.unused_yet,
        cancelled_at_end=0 if ending is None else ending.cancelled,
        warnings=overrun_warnings(device),
        settings=settings.model_dump(mode="json"),
        provenance={"slots": list(runner.cache.capacity), "overrun_share": max(pace_lost(device))},
    )


def overrun_warnings(device: Device) -> tuple[str, ...]:
    """One, where an emulated device was too slow for its profile: often, or by much at a time."""
    often, longer = pace_lost(device)
    if not max(often, longer) > OVERRUN_LIMIT:
        return ()
    return (
        f"{often:.1%} of the ops took longer than the emulated machine allows, and those of its "
        f"GPU {longer:.1%} longer in all: the times are not its own; close other programs, or "
        "raise --time-scale",
    )


def hardware_label(device: Device) -> str:
    """Whose times these are, and what of the machine changes them."""
    profile, threads = device.profile, device.host_threads
    said = f"{device.where.type}, unpaced"
    if device.costs is not None and profile is not None:
        said = f"{profile.name}, slowed {profile.time_scale:g} x"
    return said if threads == 1 else f"{said}, {threads} host threads"


def _prediction_label(settings: Settings, runner: Runner) -> str:
    if not runner.pipeline.predicts:
        return "no prediction"
    return "look-ahead, live" if settings.predictor_file is None else "trained predictor, live"


def gating_label(gating: str, exactness: str) -> str:
    """The gating, and what it does to the output where that is not nothing."""
    return gating if exactness == "exact" else f"{gating}; {exactness}"


def _costs_label(model: str, settings: Settings, charged: str | None) -> str:
    if charged is None or settings.model_as in (None, model):
        rows = "" if settings.weights is None else f", FFN rows {settings.weights}"
        return f"{model}, its own costs{rows}"
    return f"stand-in: {model} activations, {charged} costs"

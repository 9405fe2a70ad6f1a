"""Score a model on given text under Settings: nats per token, and a hash of every logit.

Two runs with the same hash gave the same logits bit for bit: the proof in one line that where
neurons were computed changed nothing. Under `fast` numerics the hash changes with the placement,
and the loss by rounding only; under `predicted` gating both do, and the result says that it is
lossy.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kairox_exec.generation import hardware_label, overrun_warnings
from kairox_exec.live import ONE_THREAD, HostSide, KernelChoice, device_for, start
from kairox_exec.loading import load_reference
from kairox_exec.runner import kv_argument
from kairox_exec.text import (
    Tokenizer,
    check_vocabulary,
    checked_tokens,
    encode_file,
    load_tokenizer,
    windows,
)
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, LinkProfile
from kairox_sim.settings import Settings, label
from kairox_sim.trace import Trace

Progress = Callable[[int, int], None]
"""(tokens scored, of how many)"""

Tokens = NDArray[np.int32]

_SAID_BESIDE = {"numerics": "fast", "weights": None, "dtype": "float32"}  # of a Score, on their own


@dataclass(frozen=True, slots=True)
class Difference:
    """From the dense model of transformers on the same tokens, position by position."""

    dense_nats_per_token: float
    max_logit_error: float
    rms_logit_error: float
    logit_std: float  # of the dense logits: what an error is to be held against
    kl_nats: float  # mean of KL(dense || this)
    top1_agreement: float  # share of positions with the same most likely token
    first_divergence: int | None  # the first position of another most likely token; None: none


@dataclass(frozen=True, slots=True)
class Score:
    """Of the positions whose next token is known: every decode step."""

    setting: str  # policy, controller, budget
    gating: str
    numerics: str
    weights: str  # of the FFN's rows
    dtype: str  # of everything else
    exactness: str  # what is promised of the neurons: exact, or how they may be missing
    tokens: int
    nats_per_token: float
    logits_sha256: str  # of the float32 logits, position after position
    tok_s: float  # wall time of the steps, as the device has it; of text that is given
    time: str  # measured, or emulated
    hardware: str
    prefill: int
    window: int
    difference: Difference | None = None
    warnings: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf


class Tally:
    """Running sums over positions."""

    def __init__(self) -> None:
        self.n = 0
        self._nats = 0.0
        self._digest = hashlib.sha256()

    def add(self, logits: torch.Tensor, following: int) -> None:
        """logits [vocab] at a position, and the token that follows it."""
        row = logits.detach().to("cpu", torch.float32).contiguous()
        if not bool(torch.isfinite(row).all()):
            raise KairoxError(f"position {self.n}: a logit is NaN or infinite; nothing is scored")
        self._digest.update(row.numpy().tobytes())
        self._nats -= float(functional.log_softmax(row.double(), dim=0)[following])
        self.n += 1

    @property
    def nats_per_token(self) -> float:
        return self._nats / self.n if self.n else math.nan

    @property
    def logits_sha256(self) -> str:
        return self._digest.hexdigest()


class Comparison:
    """Running differences between two models' logits at the same positions."""

    def __init__(self) -> None:
        self.dense = Tally()
        self._max = self._squares = self._dense_squares = self._dense_sum = self._kl = 0.0
        self._same = self._values = 0
        self._first: int | None = None

    def add(self, logits: torch.Tensor, dense: torch.Tensor, following: int) -> None:
        self.dense.add(dense, following)
        ours, theirs = logits.detach().cpu().double(), dense.detach().cpu().double()
        error = ours - theirs
        self._max = max(self._max, float(error.abs().max()))
        self._squares += float((error**2).sum())
        self._dense_sum += float(theirs.sum())
        self._dense_squares += float((theirs**2).sum())
        self._values += error.numel()
        log_p, log_q = functional.log_softmax(theirs, 0), functional.log_softmax(ours, 0)
        self._kl += float((log_p.exp() * (log_p - log_q)).sum())
        same = int(ours.argmax()) == int(theirs.argmax())
        if not same and self._first is None:
            self._first = self.dense.n - 1
        self._same += same

    def result(self) -> Difference:
        n, values = self.dense.n, self._values
        mean = self._dense_sum / values
        return Difference(
            dense_nats_per_token=self.dense.nats_per_token,
            max_logit_error=self._max,
            rms_logit_error=math.sqrt(self._squares / values),
            logit_std=math.sqrt(max(0.0, self._dense_squares / values - mean**2)),
            kl_nats=self._kl / n,
            top1_agreement=self._same / n,
            first_divergence=self._first,
        )


def score(
    model_dir: str | Path,
    texts: str | Path | Sequence[str | Path],
    settings: Settings | None = None,
    *,
    tokens: int = 256,
    skip: int = 0,
    prefill: int = 1,
    window: int = 256,
    against_dense: bool = False,
    prior: Trace | str | Path | None = None,
    device: str = "auto",
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    kernels: KernelChoice = "numba",
    host: HostSide = ONE_THREAD,
    progress: Progress | None = None,
) -> Score:
    """Feed tokens [skip, skip + tokens) of each text in windows, and score what follows each.

    The first `prefill` tokens of a window are fed at once and not scored, nor is a window's last
    token, which nothing follows. against_dense: also run transformers' own dense model, step by
    step on the same tokens, and say how far the logits are apart. Hashes are comparable between
    runs of the same software, device type, torch threads, prefill and window.
    """
    chosen = settings or Settings()
    tokenizer = load_tokenizer(model_dir)
    sequences = _sequences(
        tokenizer, texts, tokens=tokens, skip=skip, prefill=prefill, window=window
    )
    total = sum(given.size - prefill for given in sequences)
    dense = _dense_steps(model_dir, chosen) if against_dense else None
    tally, comparison, wall_s = Tally(), Comparison(), 0.0
    with device_for(
        chosen, model_dir, device, emulate=emulate, time_scale=time_scale, link=link, host=host
    ) as machine:
        runner = start(
            model_dir, chosen, machine, prior=prior, kernels=kernels, context_len=window,
            cache_dir=host.cache_dir, on_load=host.on_load, on_loaded=host.on_loaded,
        )  # fmt: skip
        check_vocabulary(tokenizer, int(runner.config.vocab_size))
        with runner:
            for given in sequences:
                theirs = dense(given, prefill) if dense is not None else None
                steps = runner.run([given], prefill=prefill, prefill_chunk=chosen.prefill_chunk)
                fed = 0
                for following, record in steps:
                    fed += record.n_tokens
                    reference = next(theirs) if theirs is not None and fed >= prefill else None
                    if record.phase == "decode":
                        wall_s += record.wall_s
                    if following is None or fed < prefill:
                        continue
                    tally.add(runner.logits, following)
                    if reference is not None:
                        comparison.add(runner.logits, reference, following)
                    if progress is not None:
                        progress(tally.n, total)
    return Score(
        setting=label(chosen.with_overrides(_SAID_BESIDE)),
        gating=chosen.gating,
        numerics=chosen.numerics,
        weights=chosen.weights or chosen.dtype,
        dtype=chosen.dtype,
        exactness=runner.exactness,
        tokens=tally.n,
        nats_per_token=tally.nats_per_token,
        logits_sha256=tally.logits_sha256,
        tok_s=total / wall_s,
        time="measured" if machine.costs is None else "emulated",
        hardware=hardware_label(machine),
        prefill=prefill,
        window=window,
        difference=comparison.result() if dense is not None else None,
        warnings=overrun_warnings(machine),
    )


def score_dense(
    model_dir: str | Path,
    texts: str | Path | Sequence[str | Path],
    *,
    tokens: int = 256,
    skip: int = 0,
    prefill: int = 1,
    window: int = 256,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Score:
    """The same of transformers' own dense model: no cache, no hybrid FFN."""
    tokenizer = load_tokenizer(model_dir)
    sequences = _sequences(
        tokenizer, texts, tokens=tokens, skip=skip, prefill=prefill, window=window
    )
    dtype = (settings or Settings()).dtype
    steps_of = _dense_steps(model_dir, settings or Settings())
    tally, wall_s = Tally(), 0.0
    total = sum(given.size - prefill for given in sequences)
    for given in sequences:
        steps = steps_of(given, prefill)
        for at in range(prefill, given.size):
            began_s = time.perf_counter()
            logits = next(steps)
            wall_s += time.perf_counter() - began_s
            tally.add(logits, int(given[at]))
            if progress is not None:
                progress(tally.n, total)
    return Score(
        setting="by transformers",
        gating="dense",
        numerics="its own",
        weights=dtype,
        dtype=dtype,
        exactness="exact",
        tokens=tally.n,
        nats_per_token=tally.nats_per_token,
        logits_sha256=tally.logits_sha256,
        tok_s=tally.n / wall_s,
        time="measured",
        hardware="cpu, unpaced",
        prefill=prefill,
        window=window,
    )


def _sequences(
    tokenizer: Tokenizer,
    texts: str | Path | Sequence[str | Path],
    *,
    tokens: int,
    skip: int,
    prefill: int,
    window: int,
) -> list[Tokens]:
    if prefill < 1:
        raise KairoxError(f"prefill must be 1 or more, got {prefill}: the first token has no past")
    files = [texts] if isinstance(texts, str | Path) else list(texts)
    found: list[Tokens] = []
    for file in files:
        ids = encode_file(file, tokenizer).token_ids
        try:
            cut = windows(ids, tokens=tokens, skip=skip, prefill=prefill, window=window)
        except KairoxError as error:
            raise KairoxError(f"{file}: {error}") from error
        found += [np.concatenate([part.prefill, part.decode]) for part in cut]
    if not any(given.size > prefill for given in found):
        raise KairoxError(
            f"nothing to score: {tokens} tokens in windows of {window}, of which {prefill} are "
            "prefilled; give more tokens"
        )
    return found


def _dense_steps(
    model_dir: str | Path, settings: Settings
) -> Callable[[Tokens, int], Iterator[torch.Tensor]]:
    """Returns what yields the dense model's logits after the prefill and after every token."""
    from transformers import DynamicCache

    model, config = load_reference(model_dir, dtype=settings.dtype)
    name = kv_argument(model)
    call: Any = model

    def feed(given: Tokens, kv: Any) -> torch.Tensor:
        ids = torch.from_numpy(given.astype(np.int64))[None]
        with torch.inference_mode():
            out = call(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: kv})
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def steps(given: Tokens, prefill: int) -> Iterator[torch.Tensor]:
        checked_tokens(given, config)
        kv = DynamicCache(config=config)
        for at in range(0, prefill, settings.prefill_chunk):
            logits = feed(given[at : min(prefill, at + settings.prefill_chunk)], kv)
        yield logits
        for at in range(prefill, given.size):
            yield feed(given[at : at + 1], kv)

    return steps

"""What is fed in a recording: windows of texts, or prompts that the model writes on from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_exec.text import Tokenizer, encode_file, read_prompts, windows
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings
from kairox_sim.trace import Trace
from kairox_sim.trace_format import SequenceInfo

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence to come: given tokens, and how many of the model's own follow."""

    info: SequenceInfo
    tokens: NDArray[np.int32]  # [n_tokens]
    prefill: int  # of `tokens`, the rest are decode steps
    new_tokens: int = 0


def feeds_of(
    tokenizer: Tokenizer,
    texts: Sequence[Path],
    prompts: Sequence[Path],
    *,
    tokens: int,
    skip: int,
    prefill: int,
    window: int,
) -> list[Feed]:
    """Sequences from texts, or from prompts: of `recording.record`, which says what they are."""
    if bool(texts) == bool(prompts):
        raise KairoxError(
            "a recording is of text files that the model reads, or of prompts that it writes on "
            f"from; got {len(texts)} texts and {len(prompts)} prompts files"
        )
    feeds: list[Feed] = []
    for path in texts:
        text = encode_file(path, tokenizer)
        try:
            cut = windows(text.token_ids, tokens=tokens, skip=skip, prefill=prefill, window=window)
        except KairoxError as error:
            raise KairoxError(f"{path}: {error}") from error
        for part in cut:
            info = SequenceInfo(
                seq=len(feeds),
                domain=text.domain,
                source=text.source.name,
                source_sha256=text.source.sha256,
                token_start=part.token_start,
                token_stop=part.token_stop,
            )
            given = np.concatenate([part.prefill, part.decode])
            feeds.append(Feed(info, given, prefill=len(part.prefill)))
    if prompts and tokens < 0:
        raise KairoxError(f"tokens must be 0 or more, got {tokens}")
    for path in prompts:
        for prompt in read_prompts(path):
            ids = tokenizer.encode(prompt.text, special_tokens=True)
            # The prompt's own hash: the prompts of one file are texts of their own.
            info = SequenceInfo(
                seq=len(feeds),
                domain=prompt.domain,
                source=prompt.source.name,
                source_sha256=hashlib.sha256(prompt.text.encode()).hexdigest(),
                token_start=0,
                token_stop=len(ids),
                generated=True,
            )
            feeds.append(Feed(info, ids, prefill=len(ids), new_tokens=tokens))
    return feeds


def require_context(config: Any, feeds: Sequence[Feed]) -> None:
    """KairoxError where a sequence is longer than the model's context."""
    longest = int(config.max_position_embeddings)
    for feed in feeds:
        if len(feed.tokens) > longest:
            what = "prompt" if feed.info.generated else "window"
            raise KairoxError(
                f"a {what} of {feed.info.source} has {len(feed.tokens)} tokens; the model's "
                f"context holds {longest}. Give a shorter {what}"
            )


def paths_of(given: Paths) -> list[Path]:
    """One path or several, as a list."""
    return [Path(given)] if isinstance(given, str | Path) else [Path(path) for path in given]


def read_paths(
    model_dir: str | Path,
    texts: Paths,
    prompts: Paths,
    settings: Settings | None = None,
    prior: Trace | str | Path | None = None,
) -> list[Path]:
    """Every file that a recording reads."""
    found = [*paths_of(texts), *paths_of(prompts), *Path(model_dir).glob("*")]
    named = (
        [] if settings is None else [settings.prior, settings.predictor_file, settings.thresholds]
    )
    given = prior.path if isinstance(prior, Trace) else prior
    return found + [Path(path) for path in (*named, given) if path is not None]

"""Texts through a plain transformers model, recorded: what `kairox record --run plain` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairox_exec.families import family_of
from kairox_exec.feeds import Feed, Paths, feeds_of, paths_of, read_paths, require_context
from kairox_exec.generation import stop_tokens
from kairox_exec.hidden_states import HiddenStatesWriter
from kairox_exec.loading import load_dense
from kairox_exec.plain_recording import PlainRecorder, record_plain
from kairox_exec.recording import TEMPERATURE, TOP_P, Progress
from kairox_exec.recording_file import SideFile, free_path, side_file
from kairox_exec.runner import kv_argument
from kairox_exec.sampling import Choose, sampler
from kairox_exec.text import check_vocabulary, load_tokenizer
from kairox_exec.thresholds import read_thresholds
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_apart
from kairox_sim.record import StepRecord

DEVICES = ("auto", "cpu", "cuda")


def record_plain_run(
    model_dir: str | Path,
    texts: Paths,
    out: str | Path,
    *,
    prompts: Paths = (),
    tokens: int = 256,
    skip: int = 0,
    prefill: int = 32,
    window: int = 256,
    batch: int = 1,
    trigger: str = "attn_out",
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    dtype: str = "float32",
    thresholds: str | Path | None = None,
    prefill_chunk: int = 64,
    hidden: str | Path | None = None,
    device: str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """As `recording.record` does, of the same tokens, but by the model as transformers runs it.

    batch: windows that are fed side by side; of texts only. thresholds: a file of `kairox
    sparsify`. Nothing is predicted, so the trace has no predictions. Raises KairoxError as `record`
    does.
    """
    feeds, tokenizer = _feeds(model_dir, texts, prompts, tokens, skip, prefill, window)
    if batch < 1 or (batch > 1 and (paths_of(prompts) or hidden is not None)):
        raise KairoxError(
            f"batch {batch}: it must be 1 or more, and 1 with prompts and hidden states; to record "
            "a batch of prompts use plain_recording.record_plain around generate()"
        )
    free_path(Path(out), force)  # before a model is loaded
    states_file = None if hidden is None else side_file(hidden, "file of hidden states", force)
    require_apart(
        {"trace": out, "file of hidden states": hidden},
        [*read_paths(model_dir, texts, prompts), *([] if thresholds is None else [thresholds])],
    )
    where = _device(device)
    per_layer = None if thresholds is None else read_thresholds(thresholds, model_dir).per_layer
    loaded, config = load_dense(model_dir, dtype=dtype, thresholds=per_layer)
    check_vocabulary(tokenizer, int(config.vocab_size))
    require_context(config, feeds)
    model: Any = loaded.to(where)
    choose = sampler(temperature=temperature, top_p=top_p, seed=seed)
    total = sum(len(feed.tokens) + feed.new_tokens for feed in feeds)
    done = 0
    with ExitStack() as stack:
        if states_file is not None:
            stack.push(lambda kind, *_: _end(states_file, kind, done))
        infos = [feed.info for feed in feeds]
        recorder = stack.enter_context(
            record_plain(
                model, tokenizer, out, model_dir=model_dir, sequences=infos, force=force, stop=()
            )
        )
        states = None
        if states_file is not None:
            family = family_of(config)
            writer = HiddenStatesWriter(states_file.stream, recorder.header, model, family, trigger)
            states = stack.enter_context(writer)
        forwards = _forwards(model, config, feeds, batch, choose, prefill_chunk, recorder)
        for step, n_tokens in enumerate(forwards):
            if states is not None:
                states.end_step(StepRecord.with_unknown(step=step, n_tokens=n_tokens))
            done += n_tokens
            if progress is not None:
                progress(done, total)
    return Path(out)


def _end(states: SideFile, kind: type[BaseException] | None, n_tokens: int) -> None:
    """The last to be closed: what is in the file decides what becomes of it."""
    if kind is None:
        states.keep()
    elif n_tokens == 0:
        states.drop()


def _forwards(
    model: Any,
    config: Any,
    feeds: Sequence[Feed],
    batch: int,
    choose: Choose,
    prefill_chunk: int,
    recorder: PlainRecorder,
) -> Iterator[int]:
    """Run everything; yields after every forward pass how many tokens it was of."""
    for rows in _side_by_side(feeds, batch):
        yield from _sequence(model, config, rows, choose, prefill_chunk, recorder)


@torch.inference_mode()
def _step(model: Any, ids: torch.Tensor, kv: Any) -> torch.Tensor:
    """[n_rows, vocab], after the last column."""
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{kv_argument(model): kv})
    logits: torch.Tensor = out.logits[:, -1]
    return logits


def _sequence(
    model: Any,
    config: Any,
    rows: Sequence[Feed],
    choose: Choose,
    prefill_chunk: int,
    recorder: PlainRecorder,
) -> Iterator[int]:
    from transformers import DynamicCache

    kv = DynamicCache(config=config)
    where = next(model.parameters()).device
    first = rows[0]
    ids = torch.from_numpy(np.stack([feed.tokens for feed in rows]).astype(np.int64)).to(where)
    middle, last = first.prefill, ids.shape[1]
    prefilled = [
        ids[:, i : min(i + prefill_chunk, middle)] for i in range(0, middle, prefill_chunk)
    ]
    given = [ids[:, i : i + 1] for i in range(middle, last)]
    logits = None
    for phase, parts in (("prefill", prefilled), ("decode", given)):
        recorder.phase = phase
        for part in parts:
            logits = _step(model, part, kv)
            yield part.numel()
    if not first.info.generated:
        return
    recorder.phase = "decode"
    stop = stop_tokens(config)
    longest = int(config.max_position_embeddings)
    assert logits is not None
    # The last token that is chosen is never fed: as many are fed as are to be recorded.
    for _ in range(min(first.new_tokens, longest - last)):
        token = choose(logits[0].float().cpu())
        if token in stop:
            return
        logits = _step(model, torch.tensor([[token]], device=where), kv)
        yield 1


def _side_by_side(feeds: Sequence[Feed], batch: int) -> Iterator[list[Feed]]:
    """Up to `batch` sequences of one shape that follow each other."""
    for _, alike in groupby(feeds, key=lambda feed: (len(feed.tokens), feed.prefill)):
        same = list(alike)
        for at in range(0, len(same), batch):
            yield same[at : at + batch]


def _device(name: str) -> str:
    if name not in DEVICES:
        raise KairoxError(f"a plain run is on {', '.join(DEVICES)}; got device {name!r}")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise KairoxError("device 'cuda' needs a CUDA GPU: torch sees none; use cpu")
    return name


def _feeds(
    model_dir: str | Path,
    texts: Paths,
    prompts: Paths,
    tokens: int,
    skip: int,
    prefill: int,
    window: int,
) -> tuple[list[Feed], Any]:
    tokenizer = load_tokenizer(model_dir)
    feeds = feeds_of(
        tokenizer, paths_of(texts), paths_of(prompts),
        tokens=tokens, skip=skip, prefill=prefill, window=window,
    )  # fmt: skip
    return feeds, tokenizer

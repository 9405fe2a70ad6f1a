"""From texts or recordings to a predictor, and to how good one is: `kairox train-predictor`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kairox_exec.mlp_predictor import MlpPredictor
from kairox_exec.predictor_data import Recording, Texts
from kairox_exec.predictor_judging import Judged, evaluate, require_unseen
from kairox_exec.predictor_training import Progress, train

Source = Texts | Recording


def train_on(
    source: Source,
    out: str | Path,
    *,
    trigger: str | None = None,
    judged_on: Source | None = None,
    rank: int | None = None,
    recall: float | Sequence[float] = 0.95,
    epochs: int = 12,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[MlpPredictor, Judged | None]:
    """Train, write `out`, and judge where `judged_on` says on what.

    trigger: attn_out by default, of a recording its own. Whatever can be refused is refused before
    anything is trained. A KeyboardInterrupt is raised again with a message that says what there is.
    """
    saved = False
    try:
        if judged_on is not None:
            require_unseen((span for _, span in source.spans()), judged_on.spans())
        learnt_from = source.read(trigger, _named("reading what it learns from", progress))
        other = None
        if judged_on is not None:
            at = learnt_from[1].header.trigger
            other = judged_on.read(at, _named("reading what it is judged on", progress))
        predictor = train(
            *learnt_from, rank=rank, recall=recall, epochs=epochs, seed=seed, progress=progress
        )
        predictor.save(out)
        saved = True
        return predictor, None if other is None else evaluate(predictor, *other)
    except KeyboardInterrupt as stop:
        there_is = f"{out} is whole, and was not judged" if saved else "nothing was written"
        raise KeyboardInterrupt(f"stopped; {there_is}") from stop


def judge_on(predictor: MlpPredictor, source: Source, progress: Progress | None = None) -> Judged:
    """Judge a predictor that is there. KairoxError where it was trained on these tokens."""
    require_unseen(predictor.info.seen, source.spans())
    read = source.read(predictor.trigger, _named("reading what it is judged on", progress))
    return evaluate(predictor, *read)


def _named(what: str, progress: Progress | None) -> partial[None] | None:
    return None if progress is None else partial(progress, what)

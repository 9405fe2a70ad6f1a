"""Activation thresholds for a dense SwiGLU model at a target density, and the loss they cost.

Per layer, the threshold is the quantile of |silu(gate)| that keeps the target share of neurons on
calibration text, taken from the dense model in one pass for all layers, as in CATS (arXiv:
2404.08763, section 3.2). What it costs is measured on other tokens, with all layers thresholded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kairox_exec.activations import use_rule
from kairox_exec.families import Family, Rule, decoder_layers, family_of, rule_of
from kairox_exec.loading import load_dense, model_sha256, read_config
from kairox_exec.runner import kv_argument
from kairox_exec.score import Comparison, Tally
from kairox_exec.text import EncodedText, check_vocabulary, encode_file, load_tokenizer
from kairox_exec.thresholds import METHOD, Cost, Thresholds, Tokens
from kairox_sim.errors import KairoxError

Progress = Callable[[str, int, int], None]
"""(what is being done, tokens done, of how many)"""

# Bins of the histograms: a non-negative float32's bits order like its value, and the first 17 of
# them (sign, exponent, 8 of the mantissa) make bins 1/256 of their value wide.
_SHIFT = 15
_BINS = 1 << (31 - _SHIFT)
GREEDY_TOKENS = 64
GREEDY_PROMPT = 32


def sparsify(
    model_dir: str | Path,
    text: str | Path,
    *,
    density: float,
    tokens: int = 4096,
    skip: int = 0,
    eval_text: str | Path | None = None,
    eval_tokens: int = 1024,
    window: int = 256,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Thresholds:
    """Calibrate on tokens [skip, skip + tokens) of `text`, measure on `eval_tokens` others.

    The others are the next ones of `text`, or the first of `eval_text`. Sequences are of `window`
    tokens, each without a past. Raises KairoxError for a model whose activation is exactly zero
    already, and where a token would be in both.
    """
    if not 0 < density < 1:
        raise KairoxError(
            f"density is the share of neurons kept, above 0 and below 1; got {density}"
        )
    if min(tokens, eval_tokens) < GREEDY_PROMPT or window < 2 or skip < 0:
        raise KairoxError(
            f"tokens {tokens}, eval tokens {eval_tokens}, window {window}, skip {skip}: at least "
            f"{GREEDY_PROMPT}, {GREEDY_PROMPT}, 2 and 0"
        )
    raw = read_config(model_dir)
    n_layers = raw.get("num_hidden_layers")
    none = (0.0,) * (n_layers if isinstance(n_layers, int) else 0)
    rule_of(raw, thresholds=none)  # is it a SwiGLU model at all
    tokenizer = load_tokenizer(model_dir)
    calibrating = encode_file(text, tokenizer)
    if eval_text is None:
        measuring, begin = calibrating, skip + tokens
    else:
        measuring, begin = encode_file(eval_text, tokenizer), 0
    calibrated_on = _tokens(calibrating, skip, skip + tokens)
    measured_on = _tokens(measuring, begin, begin + eval_tokens)
    if calibrated_on.overlaps(measured_on):
        raise KairoxError(
            f"tokens {measured_on.start} to {measured_on.stop} of {measured_on.text} would be "
            "calibrated and measured on; give another eval text, or none for the tokens that follow"
        )

    # Thresholds of 0 leave silu as it is, and put the modules there that are hooked.
    model, config = load_dense(model_dir, dtype=dtype, thresholds=none)
    check_vocabulary(tokenizer, int(config.vocab_size))
    family = family_of(config)
    window = min(window, int(config.max_position_embeddings))
    tell = progress or (lambda what, done, of: None)

    counts = _histograms(
        model, family, _windows(calibrating, calibrated_on, window),
        lambda done: tell("calibrating", done, tokens),
    )  # fmt: skip
    cuts = [_cut(row, density) for row in counts]
    rule = Rule("silu", tuple(t for t, _ in cuts), True)
    cost, densities = _cost(
        model, family, rule, _windows(measuring, measured_on, window),
        lambda done: tell("measuring", done, eval_tokens),
    )  # fmt: skip
    return Thresholds(
        model_sha256=model_sha256(model_dir),
        method=METHOD,
        target_density=density,
        per_layer=rule.thresholds,
        calibrated_on=calibrated_on,
        calibrated_densities=tuple(share for _, share in cuts),
        measured_on=measured_on,
        densities=densities,
        cost=cost,
    )


def _tokens(text: EncodedText, start: int, stop: int) -> Tokens:
    if stop > len(text.token_ids):
        raise KairoxError(
            f"{text.source.name} has {len(text.token_ids)} tokens, and tokens {start} to {stop} "
            "are asked for; give fewer tokens, a longer text, or another text to measure on"
        )
    return Tokens(text.source.name, text.source.sha256, start, stop)


def _windows(text: EncodedText, part: Tokens, window: int) -> list[torch.Tensor]:
    """int64 [1, window or less] each."""
    ids: NDArray[np.int64] = text.token_ids[part.start : part.stop].astype(np.int64)
    return [torch.from_numpy(ids[at : at + window])[None] for at in range(0, ids.size, window)]


@torch.inference_mode()
def _histograms(
    model: nn.Module,
    family: Family,
    sequences: Sequence[torch.Tensor],
    done: Callable[[int], None],
) -> list[torch.Tensor]:
    """Per layer, how many |silu(gate)| fell into each bin: int64 [_BINS]."""
    layers = decoder_layers(model, family)
    counts = [torch.zeros(_BINS, dtype=torch.int64) for _ in layers]

    def count(row: torch.Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            bits = out.detach().float().abs().cpu().reshape(-1).view(torch.int32) >> _SHIFT
            row.add_(torch.bincount(bits, minlength=_BINS))

        return hook

    handles = [
        layer.get_submodule(family.act).register_forward_hook(count(row))
        for layer, row in zip(layers, counts, strict=True)
    ]
    fed = 0
    for ids in sequences:
        model(ids, use_cache=False, logits_to_keep=1)
        fed += ids.numel()
        done(fed)
    for handle in handles:
        handle.remove()
    return counts


def _cut(counts: torch.Tensor, density: float) -> tuple[float, float]:
    """(threshold, share of the values at or above it): the bin's edge nearest to the density."""
    n = int(counts.sum())
    # kept[k]: values in bin k and above, which is all that is at or above the edge of bin k.
    kept = counts.flip(0).cumsum(0).flip(0).double() / n
    at = int((kept - density).abs().argmin())
    edge = torch.tensor([at << _SHIFT], dtype=torch.int32).view(torch.float32)
    return float(edge), float(kept[at])


@torch.inference_mode()
def _cost(
    model: nn.Module,
    family: Family,
    rule: Rule,
    sequences: Sequence[torch.Tensor],
    done: Callable[[int], None],
) -> tuple[Cost, tuple[float, ...]]:
    """What the rule costs against the dense model, and the density of each layer meanwhile."""
    layers = decoder_layers(model, family)
    dense = Rule("silu", (0.0,) * len(layers), True)
    kept = [0] * len(layers)
    values = [0] * len(layers)

    def counter(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            kept[i] += int((out != 0).sum())
            values[i] += out.numel()

        return hook

    greedy = _greedy(model, sequences[0][:, :GREEDY_PROMPT])
    tally, comparison, fed, divergence = Tally(), Comparison(), 0, None
    for at, ids in enumerate(sequences):
        use_rule(model, family, dense)
        theirs = model(ids, use_cache=False).logits[0]
        use_rule(model, family, rule)
        if at == 0:
            divergence = _divergence(model, greedy)
        for i, layer in enumerate(layers):
            layer.get_submodule(family.act).register_forward_hook(counter(i))
        ours = model(ids, use_cache=False).logits[0]
        for position, following in enumerate(ids[0, 1:].tolist()):
            tally.add(ours[position], following)
            comparison.add(ours[position], theirs[position], following)
        fed += ids.numel()
        done(fed)
    use_rule(model, family, dense)
    found = comparison.result()
    cost = Cost(
        positions=tally.n,
        dense_nats_per_token=found.dense_nats_per_token,
        nats_per_token=tally.nats_per_token,
        max_logit_error=found.max_logit_error,
        rms_logit_error=found.rms_logit_error,
        logit_std=found.logit_std,
        kl_nats=found.kl_nats,
        top1_agreement=found.top1_agreement,
        greedy_tokens=greedy.shape[1] - GREEDY_PROMPT,
        first_greedy_divergence=divergence,
    )
    return cost, tuple(k / n for k, n in zip(kept, values, strict=True))


def _greedy(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The prompt and the dense model's most likely tokens after it: int64 [1, n]."""
    from transformers import DynamicCache

    kv = {kv_argument(model): DynamicCache(config=model.config)}
    room = int(model.config.max_position_embeddings) - prompt.shape[1]
    chosen = [prompt]
    for _ in range(min(GREEDY_TOKENS, room)):
        logits = model(chosen[-1], use_cache=True, logits_to_keep=1, **kv).logits[0, -1]
        chosen.append(logits.argmax().reshape(1, 1))
    return torch.cat(chosen, dim=1)


def _divergence(model: Any, greedy: torch.Tensor) -> int | None:
    """The first token of the continuation that this model, given those before, does not choose.

    Up to there both texts are the same, so it is where two greedy runs part.
    """
    logits = model(greedy, use_cache=False).logits[0, GREEDY_PROMPT - 1 : -1]
    other = logits.argmax(dim=1) != greedy[0, GREEDY_PROMPT:]
    return int(other.nonzero()[0]) if bool(other.any()) else None

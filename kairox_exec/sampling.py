"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kairox_sim.errors import KairoxError

Choose = Callable[[torch.Tensor], int]
"""logits [vocab] -> token id; KairoxError where one of them is NaN or infinite"""

N_SEEDS = 2**32  # torch's CPU generator reads no more bits: a larger seed repeats a smaller one


def greedy(logits: torch.Tensor) -> int:
    """The most likely token; ties to the lowest id."""
    _require_finite(logits)
    return int(logits.argmax())


def sampler(*, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Choose:
    """Draws from softmax(logits / temperature), cut to the nucleus of `top_p`.

    The nucleus (Holtzman et al., arXiv:1904.09751) is the fewest most likely tokens whose
    probabilities reach top_p. Temperature 0 is greedy. The same seed and logits give the same text.
    """
    if not temperature >= 0:
        raise KairoxError(f"temperature must be 0 or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise KairoxError(f"top_p must be in (0, 1], got {top_p}")
    if not 0 <= seed < N_SEEDS:
        raise KairoxError(f"seed must be 0 to {N_SEEDS - 1}, got {seed}")
    if temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        _require_finite(logits)
        scaled = logits.float().cpu() / temperature
        if not math.isfinite(float(scaled.max())):  # as good as 0
            return greedy(logits)
        probabilities = torch.softmax(scaled, dim=-1)
        if top_p < 1:
            falling, order = probabilities.sort(descending=True, stable=True)
            beyond = falling.cumsum(-1) - falling >= top_p  # of the tokens before it
            beyond[0] = False  # where top_p is 0 in float32
            probabilities = probabilities.index_fill(0, order[beyond], 0.0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    return choose


def _require_finite(logits: torch.Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise KairoxError(
            "a logit is NaN or infinite, so no token can be chosen; use dtype float32, or check "
            "the model's weights"
        )

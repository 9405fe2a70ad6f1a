"""Choosing a token at the ends of what temperature, top_p and seed may be, and from no numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kairox_exec.sampling import greedy, sampler
from kairox_sim.errors import KairoxError

LOGITS = torch.tensor([-3.0, 2.0, 1.5, -40.0])


@given(
    temperature=st.floats(0, math.inf),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
)
def test_every_allowed_value_chooses_a_token(
    temperature: float, top_p: float, seed: int, scale: float
) -> None:
    choose = sampler(temperature=temperature, top_p=top_p, seed=seed)
    assert choose(LOGITS * scale) in range(4)


@pytest.mark.parametrize(
    "how", [{"temperature": 5e-324}, {"temperature": 1e-300}, {"top_p": 1e-300}]
)
def test_next_to_nothing_is_greedy(how: dict[str, float]) -> None:
    for logits in (LOGITS, LOGITS - 5):  # the largest above 0, and below
        assert {sampler(**how, seed=s)(logits) for s in range(20)} == {1}


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_seeds_that_would_repeat_others_are_refused(seed: int) -> None:
    with pytest.raises(KairoxError, match="seed must be 0 to 4294967295"):
        sampler(seed=seed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_token_is_chosen_from_what_is_no_number(value: float) -> None:
    logits = torch.tensor([0.0, value, 1.0])
    for choose in (greedy, sampler(), sampler(temperature=1e-300)):
        with pytest.raises(KairoxError, match="NaN or infinite"):
            choose(logits)

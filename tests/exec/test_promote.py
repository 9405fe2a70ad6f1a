"""Ways to bring rows into slots: each moves what it was asked for, and the fastest is taken."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.gpu_check.host_streams import HostStreams
from kairox_exec import promote
from kairox_exec.formats import FORMATS, row_width, storage_dtype
from kairox_exec.pinning import Ring
from kairox_exec.promote import as_words, choose_promotion, promote_with, runs
from kairox_sim.errors import KairoxError


def _rows(fmt: str, n: int, d_model: int) -> torch.Tensor:
    """Rows of two, with bytes that are all different from their neighbours'."""
    shape = (n, 2, row_width(fmt, d_model))
    n_bytes = int(np.prod(shape)) * storage_dtype(fmt).itemsize
    counted = torch.arange(n_bytes) * 7 % 251
    return counted.to(torch.uint8).view(storage_dtype(fmt)).view(shape)


@settings(max_examples=60, deadline=None)
@given(
    way=st.sampled_from(["staged", "per_row"]),
    fmt=st.sampled_from(FORMATS),
    d_model=st.sampled_from([32, 96]),
    data=st.data(),
)
def test_rows_come_into_their_places_and_nowhere_else(
    way: str, fmt: str, d_model: int, data: st.DataObject
) -> None:
    rows = _rows(fmt, 40, d_model)
    k = data.draw(st.integers(1, 20))
    ids = np.asarray(data.draw(st.lists(st.integers(0, 39), min_size=k, max_size=k)), np.int32)
    places = np.asarray(data.draw(st.permutations(range(30)))[:k], np.int32)
    slots = torch.full((30, *rows.shape[1:]), 0, dtype=rows.dtype)
    slots.view(torch.uint8).fill_(0xFF)
    wanted = slots.clone()
    wanted[torch.from_numpy(places).long()] = rows[torch.from_numpy(ids).long()]
    streams = HostStreams()
    promotion = promote_with(way, streams, Ring(streams))(rows, ids, slots, places)
    assert torch.equal(slots.view(torch.uint8), torch.full_like(slots.view(torch.uint8), 0xFF))
    promotion.now()
    assert torch.equal(slots.view(torch.uint8), wanted.view(torch.uint8))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_runs_are_whole_and_adjacent(pairs: list[tuple[int, int]]) -> None:
    ids, places = (np.asarray([p[i] for p in pairs], np.int32) for i in (0, 1))
    found = runs(ids, places)
    assert [at for first, last in found for at in range(first, last + 1)] == [*range(len(pairs))]
    for first, last in found:
        for numbers in (ids, places):
            here = numbers[first : last + 1].tolist()
            assert here == [*range(here[0], here[0] + len(here))]
    for (_, last), (first, _) in pairwise(found):
        assert (ids[first] - ids[last], places[first] - places[last]) != (1, 1)


@pytest.mark.parametrize(
    ("width", "offset", "dtype"),
    [
        (16, 0, torch.int64), (12, 0, torch.int32), (16, 4, torch.int32), (6, 0, torch.int16),
        (16, 2, torch.int16), (7, 0, torch.uint8), (16, 1, torch.uint8),
    ],
)  # fmt: skip
def test_words_are_the_widest_that_fit(width: int, offset: int, dtype: torch.dtype) -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    rows = memory[offset : offset + 4 * width].view(4, width)
    words = as_words(rows)
    assert words.dtype == dtype
    assert words.data_ptr() == rows.data_ptr()
    assert torch.equal(words.view(torch.uint8), rows)


def test_the_fastest_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, now = HostStreams(), [0.0]
    took = {"staged": 2.0, "per_row": 1.0}
    real = promote.promote_with

    def timed(way: str, *how: object) -> promote.Promote:
        made = real(way, *how)  # type: ignore[arg-type]

        def way_of(*given: object) -> promote.Promotion:
            now[0] += took[way]
            return made(*given)  # type: ignore[arg-type]

        return way_of

    monkeypatch.setattr(promote, "promote_with", timed)
    monkeypatch.setattr(promote.time, "perf_counter", lambda: now[0])
    rows = _rows("float32", 20, 32)
    way, rates = choose_promotion(streams, Ring(streams), rows, ("staged", "per_row"))
    assert way == "per_row"
    assert rates == {"staged": 10 * 256 / 2, "per_row": 10 * 256}
    assert choose_promotion(streams, Ring(streams), rows[:1], ("staged", "per_row")) == (
        "per_row", {},
    )  # fmt: skip


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(KairoxError, match="allowed: auto, uva_gather, staged, per_row"):
        promote_with("mail", HostStreams(), Ring(HostStreams()))

"""The replay of the fork's counting: windows, capacities and counts by hand, and its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.published import fork_sweep
from experiments.published.fork_replay import (
    Sets,
    capacity,
    consecutive,
    measured_c16,
    replay,
    sets_of,
    sizes,
    static_oracle,
    window_s,
)
from experiments.published.fork_sweep import Scale, falls
from experiments.published.shipped_sort import bitonic_descending
from experiments.published.tables import tally
from kairox_sim.controllers import SwapCap

SMALL = Scale(n_tokens=80, n_layers=1)


@pytest.fixture(scope="module")
def sets() -> Sets:
    return sets_of(0.3, SMALL.n_tokens, SMALL.n_layers)


def test_capacities_by_hand() -> None:
    """One GiB more holds 2^30 / (32 layers x 13,056 B) = 2,570 neurons a layer."""
    assert [capacity(size) for size in (5, 6, 7)] == [2617, 5187, 7757]


def test_the_window_holds_nineteen_groups() -> None:
    assert window_s() == pytest.approx(16.330 / (511 * 32))
    assert int(window_s() / 16.86e-6) == 59  # copies; three a group
    assert 59 // 3 == 19


def test_the_cap_does_not_grow_below_twenty() -> None:
    cap = SwapCap()
    cap.start([100])
    assert [cap._next(k, 100, False) for k in (19, 20, 96)] == [19, 21, 100]
    assert cap._next(20, 100, True) == 19


def test_groups_are_cut_from_one_order() -> None:
    assert consecutive(2, 8, 4).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    assert all(11008 % size == 0 for size in sizes())


def test_c16_by_hand() -> None:
    """Two of a group of 16 that fire together see 1 / 15 of their mates; one alone sees none."""
    ids = np.array([0, 1, 16], np.int32)
    assert measured_c16([[ids]]) == pytest.approx(100 * 2 / (3 * 15))


def test_the_static_oracle_by_hand() -> None:
    three = [np.array(ids, np.int32) for ids in ([0, 1], [0, 2], [0, 1])]
    # counts 3, 2, 1: one slot holds 3 of 6, two hold 5 of 6
    assert static_oracle([[ids] for ids in three], 1) == pytest.approx(50)
    assert static_oracle([[ids] for ids in three], 2) == pytest.approx(100 * 5 / 6)


def test_the_sets_have_the_published_shares(sets: Sets) -> None:
    mean = np.mean([step[0].size for step in sets]) / 11008
    assert 0.222 <= mean <= 0.246
    assert measured_c16(sets) == pytest.approx(27.5, abs=1.0)


def test_room_for_all_hits_all_and_loads_nothing(sets: Sets) -> None:
    out = replay(sets, 16, 11008)
    assert (out.hit_percent, out.before_percent, out.loads) == (100, 100, 0)


def test_single_neurons_without_a_cap_are_all_loaded_in_time(sets: Sets) -> None:
    """Counted after the plan, with fewer evaluated than slots: all of them; before it, not."""
    out = replay(sets, 1, capacity(6), capped=False)
    assert out.hit_percent == 100
    assert out.before_percent < 90
    assert out.copies == 3 * out.loads
    assert out.wasted_percent < 1


def test_the_cap_lowers_loads_and_counts_copies_by_matrix(sets: Sets) -> None:
    capped, free = (replay(sets, 4, capacity(6), capped=c) for c in (True, False))
    assert capped.loads < free.loads
    assert capped.hit_percent < free.hit_percent
    assert capped.copies == 3 * capped.loads / 4
    assert capped.resident_percent == pytest.approx(100 * (5187 // 4 * 4) / 11008)


def test_a_wider_window_never_waits(sets: Sets) -> None:
    wide = replay(sets, 4, capacity(6), per_copy_s=0.0)
    assert wide.loads == replay(sets, 4, capacity(6), capped=False).loads


def test_a_filter_that_nothing_passes_loads_nothing(sets: Sets) -> None:
    out = replay(sets, 16, capacity(6), tau=1.0)
    assert (out.loads, out.passing_percent) == (0, 0)
    assert np.isnan(out.wasted_percent)


def test_the_network_sorts_and_says_what_it_does_with_ties() -> None:
    scores = np.random.default_rng(0).random(688).astype(np.float32)
    assert bitonic_descending(scores).tolist() == np.argsort(-scores).tolist()
    assert sorted(bitonic_descending(np.zeros(5, np.float32)).tolist()) == [0, 1, 2, 3, 4]
    # By hand, four elements: (0,1) falling, (2,3) rising; then (0,2), (1,3), (0,1), (2,3) falling.
    # Scores 0 1 0 0 -> ids 1 0 2 3 -> nothing moves among equals.
    assert bitonic_descending(np.array([0, 1, 0, 0], np.float32)).tolist() == [1, 0, 2, 3]
    # Scores 0 0 1 0 -> ids 0 1 3 2 (rising) -> (0,3) stays, (1,2) swaps -> 0 2 3 1 -> 2 0 3 1.
    assert bitonic_descending(np.array([0, 0, 1, 0], np.float32)).tolist() == [2, 0, 3, 1]


def test_zeros_of_the_forks_sort_come_and_go(sets: Sets) -> None:
    """With a filter that little passes, slots are filled by the order of the sort alone."""
    stable, shipped = (
        replay(sets, 16, capacity(6), capped=False, tau=0.33, shipped_sort=s) for s in (False, True)
    )
    assert shipped.passing_percent == stable.passing_percent < 60
    assert shipped.loads > 1.5 * stable.loads


def test_falling_series() -> None:
    assert falls([80, 76, 72, 68, 68.8, 66])  # the fork's own turns up by 0.4
    assert not falls([80, 76, 78, 66])
    assert not falls([80, 79.5, 80])


def test_loads_against_bytes_by_hand() -> None:
    """205 x 32 x 13,056 B = 85.6 MB in Q8_0, 161.2 MB in FP16; 82.1 published."""
    found = {r.what: r.simulated for r in fork_sweep.byte_rows() if r.what.startswith("prosparse")}
    assert sorted(round(v, 1) for v in found.values()) == [45.3, 85.6, 161.2]
    assert all(r.kind == "audit" for r in fork_sweep.byte_rows())


def test_a_constant_passes_the_hit_gate_and_the_caveat_says_so() -> None:
    (null,) = fork_sweep.null_rows()
    assert (null.kind, null.simulated) == ("audit", 1.0)
    gate = "hit: at least 5 of 7 close, tau 0.33, persistence"
    said = fork_sweep.caveat(
        [(f"{gate} 0", "5 of 7"), (f"{gate} 0.3", "7 of 7"), (null.what, null.why)]
    )
    assert said.startswith("With tau 0.33, 2 of 7 hit rows miss at persistence 0; and a constant")
    assert "59.6 to 62.3 %" in said


def test_the_table_of_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_sweep, "PERSISTENCES", (0.3,))
    monkeypatch.setattr(fork_sweep, "rows", lambda scale: made)
    made = [
        *fork_sweep.fitted_rows(SMALL),
        *fork_sweep.sweep_rows(0.3, None, SMALL),
        *fork_sweep.budget_rows(0.3, SMALL),
        *fork_sweep.oracle_rows(0.3, SMALL),
    ]
    hits = [r for r in made if r.what.startswith("hit, group size")]
    assert len(hits) == len([r for r in made if r.what.startswith("loads, group size")]) == 7
    assert {r.kind for r in made} == {"fitted", "predicted", "audit"}
    assert all(r.why for r in made if r.verdict == "miss")
    fork_sweep.main(["-o", str(tmp_path), "--tokens", "80", "--layers", "1"])
    text = (tmp_path / "fork_sweep.md").read_text(encoding="utf-8")
    assert tally(made) in text
    assert "1 of 32 layers" in text

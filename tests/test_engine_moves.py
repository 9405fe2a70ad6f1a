"""Copies called off, look-ahead from a layer on, how a swap becomes copies, waits per layer.

The costs are those of `toy_engine.costs`; test_engine_timelines says them in words.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import Static
from tests.toy_engine import BOTH, Scripted, costs, in_ns, lanes, new_cache, ns, simulate

# -- late = cancel ----------------------------------------------------------------------------


@dataclass
class Said:
    """A predictor that says the same of every step."""

    ids: list  # [layer] -> ids
    label: str = "made up"

    def of(self, step, layer, evaluated):
        return np.array(self.ids[layer], np.int32), None


def called_off(chunks=None, **model):
    """Layer 1 has 4 to 6 and is promised 1 to 3, one a copy, in their place; it fires 1, 2, 3, 6.

    Layer 0 fires nobody: plan(1) at 120, gate -130, FFN -160; FFN(1) is at 270.
    """
    cache = new_cache(
        Scripted(([1, 2, 3], [4, 5, 6])), slots=[8, 3], warm=[[], [4, 5, 6]], swap_neurons=1
    )
    run = simulate(
        chunks or [[[[]], [[1, 2, 3, 6]]]], cache, costs(**model), late="cancel",
        predictions=Said([[], [1, 2, 3]]),
    )  # fmt: skip
    return run, cache


def test_what_has_not_begun_is_called_off_and_given_back():
    run, cache = called_off(copy_fixed=100)
    # Decided 120-131. Copies of 102: -233, -335; the third has not begun at 270: 6 is back.
    assert lanes(run)["h2d"][:2] == [("swap", 1, 131, 233), ("swap", 1, 233, 335)]
    assert [name for name, *_ in lanes(run)["h2d"]].count("swap") == 2
    assert cache.journal.splits[1] == ([1, 6], [2, 3], [2])
    assert cache.journal.cancelled == [2, 1]  # the second by the end of the run: nobody polled
    (record,) = run.records
    assert (record.loads, record.cancelled, record.evictions) == (3, 1, 2)
    # What has landed, not what was issued.
    assert record.h2d_bytes == 40
    # FFN 270-302; host d2h -275, -278, pool 15: 293, sums behind the copy: 335-341, 344.
    assert ns(record, "wait_cpu_s", "wait_io_s", "wall_s") == [344 - 302, 0, 394]


def test_a_running_copy_goes_on_into_the_next_step():
    step = [[[]], [[1, 2, 3, 6]]]
    run, cache = called_off([step, step], copy_fixed=100)
    assert cache.journal.cancelled == [2]
    assert cache.journal.splits[3] == ([1, 2, 6], [3], [])
    assert [r.h2d_bytes for r in run.records] == [40, 40]


def test_a_decision_that_comes_too_late_is_called_off_whole():
    run, cache = called_off(decide=200)  # to 323, and the FFN is at 270
    assert "swap" not in [name for name, *_ in lanes(run)["h2d"]]
    assert cache.journal.cancelled == [0, 1, 2]
    assert cache.journal.splits[1] == ([6], [1, 2, 3], [])
    (record,) = run.records
    assert (record.loads, record.cancelled, record.evictions, record.h2d_bytes) == (3, 3, 0, 0)


def test_only_the_layers_own_copies_are_called_off():
    # Three layers, plans of four copies each for 1 and 2: what waits for 2 goes on after FFN(1).
    cache = new_cache(Scripted(([0, 1], []), ([2, 3], [])), n_layers=3, swap_neurons=1)
    run = simulate(
        [[[[]], [[0, 1]], [[2, 3]]]], cache, costs(copy_fixed=148, ffn=20), n_layers=3,
        late="cancel",
    )  # fmt: skip
    # plan(1) 120-130: copies of 150: 130-280, 280-430. FFN(0) -150, attention -250, predict -270,
    # plan(2) decided 280, gate -280: copy 0 is on time, copy 1 has just begun and goes on; behind
    # it those of layer 2: 430-580, 580-730. FFN(1): host 5 + 3 + 11: 299, sums at 430-436, 439.
    # Attention -539, gate -549: copy 2 is under way, 3 has not begun.
    assert cache.journal.splits[1] == ([0], [1], [1])
    assert cache.journal.splits[2] == ([], [2, 3], [2])
    assert [e[1:] for e in lanes(run)["h2d"] if e[0] == "swap"][:3] == [
        (1, 130, 280), (1, 280, 430), (2, 436, 586),
    ]  # fmt: skip
    assert run.records[0].cancelled == 1


def test_landings_say_nothing_of_what_was_called_off():
    with pytest.raises(KairoxError, match="cannot be replayed with late = cancel"):
        simulate([BOTH], new_cache(Scripted()), costs(), late="cancel", landings=[(), ()])


# -- look-ahead from a layer on ---------------------------------------------------------------


def test_layers_before_it_are_planned_in_their_own_place():
    policy = Scripted(([0], []), ([2], []), ([4], []))
    step = [[[0]], [[2]], [[4]]]
    run = simulate([step, step], new_cache(policy, n_layers=3), costs(), n_layers=3,
                   lookahead_from=2)  # fmt: skip
    # Attention 0-100, predict(0) -120, plan: copy 129-137. Gate -130: FFN(0) does not wait, its
    # neuron is late: 130-160; host 28. Attention(1) -260, predict(1) -280, plan: copy 289-297.
    # predict(2) -300, plan(2): copy 309-317. Gate -310, FFN(1) 310-341: 2 is on time.
    # Layer 2: attention -441, no predict, gate -451, FFN 31: 482. Head -532. No plan for layer 0.
    first = [s for s in lanes(run)["gpu"] if s[3] <= 532]
    assert first == [
        ("attention", 0, 0, 100), ("predict", 0, 100, 120), ("gate", 0, 120, 130),
        ("ffn", 0, 130, 160), ("attention", 1, 160, 260), ("predict", 1, 260, 280),
        ("predict", 2, 280, 300), ("gate", 1, 300, 310), ("ffn", 1, 310, 341),
        ("attention", 2, 341, 441), ("gate", 2, 441, 451), ("ffn", 2, 451, 482),
        ("head", -1, 482, 532),
    ]  # fmt: skip
    assert [layer for layer, _ in policy.asked] == [0, 1, 2] * 2
    assert [r.late for r in run.records] == [1, 0]
    assert [r.predicted for r in run.records] == [3, 3]


def test_attn_in_looks_ahead_before_its_own_layer():
    policy = Scripted()
    simulate([[[[]]] * 3], new_cache(policy, n_layers=3), costs(), n_layers=3, trigger="attn_in",
             lookahead_from=2)  # fmt: skip
    assert [layer for layer, _ in policy.asked] == [0, 2, 1]


@pytest.mark.parametrize("trigger", ["attn_out", "attn_in", "serial", "after", "instant"])
def test_from_one_or_zero_is_what_it_always_was(trigger):
    def run(**options):
        cache = new_cache(Scripted(([2, 3], []), ([0, 1], [])), trigger=trigger)
        return simulate([BOTH, BOTH], cache, costs(), trigger=trigger, **options)

    assert repr(run()) == repr(run(lookahead_from=0)) == repr(run(lookahead_from=1))
    far = repr(run(lookahead_from=9))
    assert (far == repr(run())) == (not trigger.startswith("attn"))


def test_layers_planned_in_their_own_place_do_not_stall():
    # As above, the copies of layer 1 too slow for it: only layer 2 waits.
    policy = Scripted(([0], []), ([2], []), ([4], []))
    run = simulate([[[[0]], [[2]], [[4]]]], new_cache(policy, n_layers=3), costs(copy_fixed=200),
                   n_layers=3, late="stall", lookahead_from=2)  # fmt: skip
    # Copy 0: 129-331. Sums of layer 0: pool 138-149, at 331-337, 340. Attention(1) -440,
    # predicts -460, -480; decided 469, 489; copies 469-671 and 677-879 with layer 1's sums, given
    # at 490 + 19 = 509, in between: 671-677, 680. Attention(2) -780, gate -790; waits to 879.
    (record,) = run.records
    assert (record.late, record.hit_on_time) == (2, 1)
    assert ns(record, "wait_io_s") == [879 - 790]


def test_under_predicted_gating_every_layer_is_predicted_once():
    policy = Static(3, 8)
    cache = new_cache(policy, n_layers=3, slots=0)
    run = simulate([[[[0]], [[2]], [[4]]]], cache, costs(gating="predicted"), n_layers=3,
                   trigger="attn_out", lookahead_from=2)  # fmt: skip
    order = [s[:2] for s in lanes(run)["gpu"] if s[0] in ("predict", "attention")]
    assert order == [
        ("attention", 0), ("predict", 0), ("attention", 1), ("predict", 1), ("predict", 2),
        ("attention", 2),
    ]  # fmt: skip


# -- how a swap becomes copies ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "duration"),
    [
        ({"copies": "gather"}, 6 + 6),
        ({"copies": "matrix"}, 2 * 6 + 6),  # exact gating: up and down move
        ({"copies": "bundle"}, 3 * 6 + 6),
        ({"copies": "row"}, 6 * 6 + 6),
        ({"copies": "matrix", "gating": "oracle"}, 3 * 6 + 6),
        ({"copies": "gather", "copy_sync": 5}, 11 + 6),
        ({"copies": "row", "copy_sync": 5}, 6 * 11 + 6),
        # 1, 2 and 3 lie at 0, 1 and 4: a gap of 2 is 4 ns: one read of 5 bundles
        ({"copies": "bundle", "position": [[2, 0, 1, 4]] * 2}, 6 + 10),
        # by rows a gap of 2 is 2 ns, and there are two matrices
        ({"copies": "row", "position": [[2, 0, 1, 4]] * 2}, 12 + 10),
        # a gap of 7 rows is 7 ns: two reads a matrix
        ({"copies": "row", "position": [[2, 0, 1, 9]] * 2}, 24 + 6),
        # the synchronisation makes a read dearer, so that the gap is worth reading
        ({"copies": "row", "position": [[2, 0, 1, 9]] * 2, "copy_sync": 5}, 22 + 20),
    ],
)
def test_one_swap_of_three_neurons(model, duration):
    cache = new_cache(Scripted(([1, 2, 3], [])))
    run = simulate([[[[]], [[1]]]], cache, costs(**model), predictions=Said([[], [1, 2, 3]]))
    (swap,) = [s for s in lanes(run)["h2d"] if s[0] == "swap"]
    assert swap == ("swap", 1, 129, 129 + duration)


def test_gaps_that_are_read_count_as_bytes_of_the_plan():
    cache = new_cache(Scripted(([1, 2, 3], [])), swap_neurons=2)
    model = costs(copies="bundle", position=[[2, 0, 3, 4]] * 2)
    run = simulate([[[[]], [[1]]]], cache, model, predictions=Said([[], [1, 2, 3]]))
    # 1 and 2 lie at 0 and 3: a read of four; 3 alone.
    assert run.records[0].h2d_bytes == 5 * 40
    assert [s[2:] for s in lanes(run)["h2d"]] == [(130, 144), (144, 152)]


# -- waits per layer ----------------------------------------------------------------------------


class Listening(Fixed):
    def __init__(self):
        super().__init__()
        self.heard = []

    def update(self, record, layers=None):
        self.heard.append((layers.io.tolist(), [round(in_ns(s)) for s in layers.cpu_s]))
        return super().update(record, layers)


@pytest.mark.parametrize("late", ["cpu", "stall", "cancel"])
@pytest.mark.parametrize("copy_fixed", [6, 200])
def test_a_layer_is_told_whether_its_copies_were_unfinished(late, copy_fixed):
    controller = Listening()
    cache = new_cache(Scripted(([2, 3], [])), controller=controller)
    run = simulate([[[[]], [[2, 3, 4]]]], cache, costs(copy_fixed=copy_fixed, ffn=22), late=late)
    assert controller.heard[0][0] == [False, copy_fixed == 200]
    assert sum(controller.heard[0][1]) == ns(run.records[0], "wait_cpu_s")[0] > 0


def test_a_layer_is_told_how_long_it_waited_for_the_host():
    controller = Listening()
    cache = new_cache(Static(2, 8), slots=0, controller=controller)
    simulate([[[[0, 1]], [[1, 2, 3, 4]]]], cache, costs(), predictions=None)
    # Host 24 + 4 a neuron against an FFN of 30.
    assert controller.heard == [([False, False], [2, 10])]


def test_whole_layers_are_told_what_the_gpu_waited_through_each():
    controller = Listening()
    cache = new_cache(
        Static(2, 8), slots=[0, 8], pinned=[[], range(8)], controller=controller
    )  # fmt: skip
    simulate([BOTH], cache, costs(gating="dense", bundle=60, dram=10), predictions=None,
             dispatch="layers")  # fmt: skip
    assert controller.heard == [([False, False], [146, 8])]  # layer 1: x up and the hand-over


def test_context_before_the_trace_is_in_the_record():
    cache = new_cache(Static(2, 8), slots=0)
    run = simulate([BOTH, BOTH], cache, costs(), predictions=None, context_start=1000)
    assert [r.context_len for r in run.records] == [1001, 1002]


def test_a_running_copy_is_still_unfinished_in_the_next_step():
    """The copy behind it was called off, and it is the one that tells."""
    controller = Listening()
    cache = new_cache(Scripted(([2], []), ([], []), ([3, 4], [])), controller=controller,
                      swap_neurons=1)  # fmt: skip
    # Nobody fires: FFN(1) is at 270, 620 and 970. The first plan's copy is 129-1129; what step 1
    # plans waits behind it and is called off; that one goes on.
    simulate([[[[]], [[]]]] * 3, cache, costs(copy_fixed=998), late="cancel",
             predictions=Said([[], [2]]))  # fmt: skip
    assert cache.journal.cancelled == [1, 2, 0]  # 0 by the end of the run
    assert [io for io, _ in controller.heard] == [[False, True], [False, True], [False, True]]

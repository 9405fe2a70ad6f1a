"""Copies that are late, that share the link and DRAM, and that outlast a step: worked out by hand.

The costs are those of `toy_engine.costs`; test_engine_timelines says them in words.
"""

from math import isnan

import pytest

from kairox_sim.controllers import Anb, Fixed
from kairox_sim.policies import Lru, Static, Tam
from tests.toy_engine import BOTH, Scripted, costs, lanes, new_cache, ns, simulate

# -- late copies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copy_fixed", "on_time"), [(128, True), (129, True), (130, False), (131, False)]
)
def test_a_copy_landing_as_its_ffn_starts_is_on_time(copy_fixed, on_time):
    # Submitted at 129, lands 4 after its set-up; FFN(1) starts at 262 (see below).
    run, cache = late_by(copy_fixed, h2d=20)
    record = run.records[0]
    assert record.hit_on_time == (2 if on_time else 0)
    assert record.late == (0 if on_time else 2)
    assert record.residual == (0 if on_time else 2)
    assert cache.journal.landings[:2] == [(), (0,) if on_time else ()]
    # Late, it lands soon after, but nobody polls again.
    assert (run.unused_yet, run.cancelled_at_end) == ((0, 0) if on_time else (0, 2))


def late_by(copy_fixed, **model):
    """Layer 0 fires nobody: attention 0-100, predict -120, gate -130, FFN -152, attention -252,
    gate -262. The FFN is 22 so that its copy may end with it."""
    cache = new_cache(Scripted(([2, 3], [])))
    run = simulate(
        [[[[]], [[2, 3]]]], cache, costs(copy_fixed=copy_fixed, ffn=22, **model), late="cpu"
    )
    assert [s for s in lanes(run)["gpu"] if s[0] == "ffn"][1][2] == 262
    return run, cache


def test_late_is_the_hosts_work_or_a_stall():
    # Set-up 200: the copy is 129-333, FFN(1) could start at 262.
    run, cache = late_by(200)
    record = run.records[0]
    # Host from 262: 5 + 3 + 7 + 8 and the sums at 285 behind the copy that is not preempted:
    # 333-339, 342. FFN 262-284.
    assert lanes(run)["h2d"] == [("swap", 1, 129, 333), ("partial sums", 1, 333, 339)]
    assert ns(record, "wait_cpu_s", "wait_io_s", "wall_s") == [342 - 284, 0, 392]
    assert (record.late, record.residual) == (2, 2)

    cache = new_cache(Scripted(([2, 3], [])))
    run = simulate([[[[]], [[2, 3]]]], cache, costs(copy_fixed=200, ffn=22), late="stall")
    record = run.records[0]
    # Waits 262-333, FFN 24: 357, head 407.
    assert ns(record, "wait_io_s", "wait_cpu_s", "wait_decide_s", "wall_s") == [71, 0, 0, 407]
    assert (record.late, record.residual, record.hit_on_time) == (0, 0, 2)


def test_a_stall_waits_only_for_its_own_layer():
    # attn_out, three layers; layer 2's copy is queued behind layer 1's.
    cache = new_cache(Scripted(([1], []), ([2], [])), n_layers=3)
    model = costs(copy_fixed=398, ffn=20)
    run = simulate([[[[]], [[1]], [[]]]], cache, model, n_layers=3, late="stall")
    # plan(1) 120, copy 129-529. Layer 0: gate -130, FFN -150; attention -250, predict -270,
    # plan(2): planner 270-279, its copy 529-929. gate -280, waits to 529; FFN 21: -550.
    # Layer 2: attention -650, gate -660, waits to 929 though it wants nobody.
    assert lanes(run)["h2d"] == [("swap", 1, 129, 529), ("swap", 2, 529, 929)]
    assert ns(run.records[0], "wait_io_s") == [529 - 280 + 929 - 660]


def test_stall_in_reactive_mode_waits_in_the_next_step():
    cache = new_cache(Scripted(([0, 1], [])), n_layers=1, trigger="after")
    run = simulate(
        [[[[0, 1]]]] * 2, cache, costs(copy_fixed=300), n_layers=1, trigger="after", late="stall",
        predictions=None,
    )  # fmt: skip
    # Planner 110-119, copy 119-423. The sums are given at 133 and wait: 423-429, 432; head 482.
    # The copy has landed long before the next FFN.
    first, second = run.records
    assert ns(first, "wait_cpu_s", "wait_io_s", "wall_s") == [432 - 140, 0, 482]
    assert ns(second, "wait_io_s", "wall_s") == [0, 192]


# -- the link ---------------------------------------------------------------------------------


def test_sums_go_before_waiting_copies():
    cache = new_cache(Scripted(([2, 3, 4, 5], [])), swap_neurons=1)
    run = simulate([BOTH], cache, costs(copy_fixed=8))
    # Four copies of 8 + 2 from 120 + 8 + 4 = 132: 132-142, -152, -162, ... The sums are given at
    # 153, while the third copies: 162-168. Then the fourth: 168-178.
    assert lanes(run)["h2d"] == [
        ("swap", 1, 132, 142), ("swap", 1, 142, 152), ("swap", 1, 152, 162),
        ("partial sums", 0, 162, 168), ("swap", 1, 168, 178),
    ]  # fmt: skip
    assert ns(run.records[0], "wait_cpu_s", "swap_busy_s") == [171 - 160, 40]


def test_row_copies_pay_for_every_row():
    gathered = new_cache(Scripted(([2, 3], [])))
    run = simulate([BOTH], gathered, costs())
    assert lanes(run)["h2d"][0] == ("swap", 1, 129, 139)  # 6 + 4
    by_row = new_cache(Scripted(([2, 3], [])))
    run = simulate([BOTH], by_row, costs(rowcopies=True))
    assert lanes(run)["h2d"][0] == ("swap", 1, 129, 145)  # 2 x 6 + 4


def test_copies_and_the_pool_share_dram():
    # Link 20, pool 10, DRAM 16 bytes/ns: 8 each when both move, else 16 and 10.
    cache = new_cache(Scripted(([2, 3, 4, 5, 6, 7], [])))
    run = simulate([BOTH], cache, costs(dram=16, copy_fixed=10))
    # Copy of 240 bytes: submitted 129, set up -139; alone at 16 until the pool reads.
    # Pool: d2h 130-135, -138, 7: reads 80 bytes from 145. By then the copy has moved 96, 144 are
    # left: 8 a ns until the pool is done: 80 / 8 = 10: 155; then 64 left at 16: 159.
    # The sums wait from 155 to 159: 159 + 4 + 40 / 16 = 2.5 -> 3: 166, hand-over 169.
    assert lanes(run)["h2d"] == [("swap", 1, 129, 159), ("partial sums", 0, 159, 166)]
    assert lanes(run)["cpu"] == [("residual", 0, 138, 155)]
    assert ns(run.records[0], "cpu_busy_s", "wait_cpu_s") == [17, 169 - 160]


# -- from step to step --------------------------------------------------------------------------


def test_layer_0_belongs_to_the_step_that_plans_it():
    policy = Scripted(([], []), ([0, 1], []))
    run = simulate([BOTH, BOTH], new_cache(policy), costs(copy_fixed=60))
    # Both layers on the host (layer 0 as in test_attn_out): FFN(1) 272-302, joined at 304.
    # Plan(0) 304-313, copy 313-377; head 304-354: 41 ns of the copy are in step 0, 23 in step 1.
    first, second = run.records
    assert ns(first, "wall_s", "swap_busy_s", "decide_s") == [354, 41, 8 + 9]
    assert ns(second, "swap_busy_s") == [23]
    assert (first.loads, first.h2d_bytes) == (2, 80)
    assert (second.loads, second.h2d_bytes) == (0, 0)
    assert second.loads_used_first == 2


def test_the_last_token_of_a_chunk_stands_in_for_layer_0():
    policy = Scripted()
    simulate([[[[0, 1], [1, 5]]], [[[1]]]], new_cache(policy, n_layers=1), costs(), n_layers=1,
             n_prefill=1)  # fmt: skip
    assert policy.asked == [(0, [1, 5]), (0, [1])]


def test_copies_in_flight_at_the_end_are_cancelled():
    cache = new_cache(Scripted(([2, 3], []), ([0, 1], [])))
    run = simulate([BOTH], cache, costs(copy_fixed=46))
    # Layer 1's copy: 129-179. The sums of layer 0, given at 153, wait for it: 179-185, 188, where
    # test_attn_out has 162. So all that follows is 26 later: plan(0) at 330, its copy 339-389,
    # end of the head at 380.
    assert lanes(run)["h2d"] == [
        ("swap", 1, 129, 179), ("partial sums", 0, 179, 185), ("swap", 0, 339, 380),
    ]  # fmt: skip
    (record,) = run.records
    assert ns(record, "wall_s", "swap_busy_s") == [380, 50 + 41]
    assert record.cancelled == 0  # it happens after the last step
    assert (run.cancelled_at_end, run.unused_yet) == (2, 0)
    assert cache.journal.cancelled == [1]


def test_a_neuron_wanted_again_while_it_arrives_is_one_transfer():
    policy = Tam(1, 8, beta=0.5)  # momentum 0.5 after one activation: promoted at once
    cache = new_cache(policy, n_layers=1)
    run = simulate([[[[3]]]] * 3, cache, costs(copy_fixed=400), n_layers=1)
    # Step 0: attention, gate, FFN 110-140, joined at 138; plan(0) at 140: planner -149,
    # copy 149-551. Head -190. Step 1: late; plan(0) names neuron 3 again. Its sums are given at
    # 300 + 5 + 3 + 7 + 4 = 319 and wait for the copy: 551-557, 560.
    assert lanes(run)["h2d"][:3] == [
        ("partial sums", 0, 129, 135), ("swap", 0, 149, 551), ("partial sums", 0, 551, 557),
    ]  # fmt: skip
    assert [r.late for r in run.records] == [0, 1, 0]
    assert [r.loads for r in run.records] == [1, 0, 0]
    assert [r.hit_on_time for r in run.records] == [0, 0, 1]
    assert cache.journal.issued == cache.journal.landed == [0]


def test_nobody_fires():
    """A layer-step of nobody, a token of nobody, a layer that never fires, one that all fire in."""
    chunks = [[[[]], [[]], [range(8)]], [[[]], [[]], [[]]], [[[1]], [[]], [range(8)]]]
    cache = new_cache(Tam(3, 8, beta=0.5), n_layers=3, slots=8)
    run = simulate(chunks, cache, costs(), n_layers=3)
    _, second, third = run.records
    # Three layers of 100 + 20 + 10 + 30, the first two with predict, and a head of 50.
    assert ns(second, "wall_s", "cpu_busy_s", "act_busy_s", "wait_cpu_s") == [510, 0, 0, 0]
    assert (second.evaluated, second.hit_on_time, second.residual) == (0, 0, 0)
    assert all(s.end_ns > s.began_ns for s in run.slices)
    assert third.evaluated == 9
    assert [name for name, layer, *_ in lanes(run)["d2h"] if layer == 1] == []
    reactive = new_cache(Lru(3, 8), n_layers=3, slots=8, trigger="after")
    run = simulate(chunks, reactive, costs(), n_layers=3, predictions=None)
    assert [r.evaluated for r in run.records] == [8, 0, 9]


def test_no_steps():
    cache = new_cache(Tam(2, 8))
    run = simulate([], cache, costs())
    assert run.records == ()
    assert (run.unused_yet, run.cancelled_at_end) == (0, 0)


def test_the_knob_in_force_is_written_down():
    chunks = [[[[0, 1, 2]]]] * 3
    run = simulate(chunks, new_cache(Tam(1, 8), n_layers=1, controller=Anb()), costs(), n_layers=1)
    first, second, _ = run.records
    assert first.threshold_scale == 1.0
    # T_cpu 7 + 12 < T_gpu 190 and T_io 0: nothing moves it
    assert second.threshold_scale == 1.0
    slow = costs(cpu_cap=0.1)  # 120 bytes take 1200 ns: scale 1 - 0.05 x (1207 - 190) / 1207
    run = simulate(chunks, new_cache(Tam(1, 8), n_layers=1, controller=Anb()), slow, n_layers=1)
    assert ns(run.records[0], "cpu_busy_s", "gpu_busy_s") == [1207, 190]
    assert run.records[1].threshold_scale == pytest.approx(1 - 0.05 * 1017 / 1217, abs=1e-12)
    lru = new_cache(Lru(1, 8), n_layers=1, controller=Fixed(), trigger="after")
    run = simulate(chunks, lru, costs(), n_layers=1, predictions=None)
    assert isnan(run.records[0].threshold_scale)  # LRU does not read it


def test_predicted_gating_pays_the_predictor_whatever_the_policy():
    static = new_cache(Static(2, 8), warm=[[0, 1], [2, 3]])
    run = simulate([BOTH], static, costs(gating="predicted"), predictions=None)
    # Per layer: attention 100, predict 20, no gate, FFN 32.
    assert ns(run.records[0], "wall_s", "predict_s") == [2 * 152 + 50, 40]
    for trigger in ("attn_in", "attn_out"):
        run = simulate([BOTH], new_cache(Scripted()), costs(gating="predicted"), trigger=trigger)
        assert ns(run.records[0], "predict_s") == [40]  # layer 0 has a pass of its own


def test_a_stall_for_a_decision_that_takes_no_time():
    cache = new_cache(Scripted(([0, 1], [])), n_layers=1)
    model = costs(decide=0, decide_per_swap=0, predict=0, gate=0)
    run = simulate([[[[0, 1]]]], cache, model, n_layers=1, trigger="serial")
    # Planned, submitted and waited for at 100: the copy is 100-110.
    assert lanes(run)["h2d"] == [("swap", 0, 100, 110)]
    assert ns(run.records[0], "wait_io_s", "wait_decide_s", "decide_s") == [10, 0, 0]

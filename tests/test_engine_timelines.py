"""Timelines of one and two layers worked out by hand; the working is in the comments.

The costs are those of `toy_engine.costs`, in ns: attention 100, gate 10, predict 20, FFN 30 + 1 a
neuron, head 50; a swap 6 + 2 a neuron; a decision 8 + 1 a swap. A hand-over: d2h 5, hand-over 3,
pool 7 + 4 a neuron, partial sums 4 + 2 a token, hand-over 3.
"""

from math import isnan

import numpy as np
import pytest

from kairox_sim.controllers import Anb, Fixed
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.flows import HostTraffic
from kairox_sim.policies import AllResident, Lru, NoneResident, Static, Tam
from kairox_sim.prediction import Perfect
from tests.toy_engine import Scripted, costs, in_ns, lanes, new_cache
from tests.toys import of_chunks

BOTH = [[[0, 1]], [[2, 3]]]  # one decode step: layer 0 fires 0 and 1, layer 1 fires 2 and 3


def simulate(chunks, cache, cost_model, *, n_layers=2, n_prefill=0, **options):
    trace = of_chunks(chunks, 8, n_layers=n_layers, n_prefill=n_prefill)
    options.setdefault("predictions", Perfect())
    run = run_trace(trace, cache, cost_model, keep_slices=True, **options)
    for record in run.records:
        waits = record.wait_cpu_s + record.wait_io_s + record.wait_decide_s
        assert record.wall_s - record.gpu_busy_s - waits == pytest.approx(0, abs=1e-15)
    return run


def ns(record, *names):
    return [round(in_ns(getattr(record, name))) for name in names]


# -- nothing is planned -----------------------------------------------------------------------


def test_one_layer_split_between_device_and_host():
    cache = new_cache(Static(1, 8), n_layers=1, slots=2, warm=[[0, 1]])
    run = simulate([[[[0, 1, 2, 3, 4]]]], cache, costs(), n_layers=1, predictions=None)
    # FFN from 110: 30 + 2. Host: d2h 110-115, hand-over -118, pool 7 + 3 x 4: -137,
    # sums 4 + 2: -143, hand-over -146; the GPU has waited since 142.
    assert lanes(run) == {
        "gpu": [("attention", 0, 0, 100), ("gate", 0, 100, 110), ("ffn", 0, 110, 142),
                ("head", -1, 146, 196)],
        "d2h": [("x", 0, 110, 115)],
        "cpu": [("residual", 0, 118, 137)],
        "h2d": [("partial sums", 0, 137, 143)],
    }  # fmt: skip
    (record,) = run.records
    assert ns(record, "wall_s", "gpu_busy_s", "cpu_busy_s", "swap_busy_s", "act_busy_s") == [
        196, 192, 19, 0, 11,
    ]  # fmt: skip
    assert ns(record, "wait_cpu_s", "wait_io_s", "wait_decide_s", "decide_s", "predict_s") == [
        4, 0, 0, 0, 0,
    ]  # fmt: skip
    assert (record.evaluated, record.hit_on_time, record.residual) == (5, 2, 3)
    assert isnan(record.predicted)
    assert isnan(record.threshold_scale)  # nothing reads it


def test_a_fast_host_is_not_waited_for():
    cache = new_cache(Static(1, 8), n_layers=1, slots=2, warm=[[0, 1]])
    run = simulate([[[[0, 1, 2]]]], cache, costs(cpu_cap=20), n_layers=1, predictions=None)
    # Pool 118-125 + 2: 127; sums -133; hand-over -136: before the FFN's end at 142.
    (record,) = run.records
    assert lanes(run)["gpu"][-1] == ("head", -1, 142, 192)
    assert ns(record, "wait_cpu_s", "cpu_busy_s") == [0, 9]


def test_bounds():
    resident = new_cache(AllResident(2, 8), pinned=[range(8)] * 2)
    run = simulate([BOTH], resident, costs(), predictions=None)
    # 2 x (100 + 10 + 30 + 2) + 50; no hand-over at all
    assert ns(run.records[0], "wall_s", "cpu_busy_s", "act_busy_s") == [334, 0, 0]
    assert set(lanes(run)) == {"gpu"}
    nothing = new_cache(NoneResident(2, 8), slots=0)
    run = simulate([BOTH], nothing, costs(), predictions=None)
    # A layer from its FFN on: 5 + 3 + 7 + 8 + 6 + 3 = 32, the FFN of nobody 30.
    assert ns(run.records[0], "wall_s", "wait_cpu_s") == [2 * 142 + 50, 4]


def test_prefill_is_a_union_and_costs_by_tokens():
    # 3 tokens; union {0, 1, 2, 3}, of which 0 and 1 are resident.
    cache = new_cache(Static(1, 8), n_layers=1, slots=2, warm=[[0, 1]])
    model = costs(ffn_flops_per_ns=12, cpu_flops_per_ns=12, head_flops_per_ns=16)
    run = simulate([[[[0, 2, 2], [0, 1], [3, 2]]]], cache, model, n_layers=1, n_prefill=1,
                   predictions=None)  # fmt: skip
    # exact gating: up and down rows of 10 weights, 2 flops each: 40 flops a neuron and token.
    # GPU: 2 x 3 x 40 = 240 flops at 12: 20 ns, more than 80 bytes at 40: FFN 110-160.
    # Pool: 120 flops a neuron at 12: 10 ns for its 40 bytes, so 4 bytes/ns instead of 10:
    # 118 + 7 + 80 / 4 = 145. Sums 4 + 3 x 40 / 20: 155. Hand-over 158.
    # Head from 160: the last token's alone, 2 x 8 x 10 flops at 16: 50 + 10.
    assert lanes(run)["gpu"][2:] == [("ffn", 0, 110, 160), ("head", -1, 160, 220)]
    assert lanes(run)["cpu"] == [("residual", 0, 118, 145)]
    assert lanes(run)["h2d"] == [("partial sums", 0, 145, 155)]
    (record,) = run.records
    assert (record.phase, record.n_tokens, record.context_len) == ("prefill", 3, 3)
    assert (record.evaluated, record.hit_on_time, record.residual) == (4, 2, 2)


# -- triggers ---------------------------------------------------------------------------------


def test_attn_out():
    policy = Scripted(([2, 3], []), ([0, 1], []))
    run = simulate([BOTH, BOTH], new_cache(policy), costs())
    # Layer 0: attention 0-100, predict(1) 100-120, plan(1) 120, gate 120-130. Planner 8 + 1:
    # 120-129; the copy 6 + 4: 129-139. Nothing of layer 0 is here: d2h 130-135, -138,
    # pool 7 + 8: -153, sums -159, -162. FFN 130-160, waits 2.
    # Layer 1: attention 162-262, gate -272: 2 and 3 are here: FFN 272-304, nothing for the host.
    # Then layer 0 of the next step is planned: planner 304-313, copy 313-323, head 304-354.
    assert {lane: s for lane, s in lanes(run).items() if lane != "gpu"} == {
        "planner": [("decide", 1, 120, 129), ("decide", 0, 304, 313), ("decide", 1, 474, 482),
                    ("decide", 0, 658, 666)],
        "h2d": [("swap", 1, 129, 139), ("partial sums", 0, 153, 159), ("swap", 0, 313, 323)],
        "d2h": [("x", 0, 130, 135)],
        "cpu": [("residual", 0, 138, 153)],
    }  # fmt: skip
    # Step 1: all is here. Attention 354-454, predict -474, gate -484, FFN -516; attention -616,
    # gate -626, FFN -658, plan of layer 0 at 658.
    assert policy.asked == [(1, [2, 3]), (0, [0, 1]), (1, [2, 3]), (0, [0, 1])]
    first, second = run.records
    assert ns(first, "wall_s", "wait_cpu_s", "decide_s", "predict_s", "swap_busy_s") == [
        354, 2, 18, 20, 20,
    ]  # fmt: skip
    # Layer 0's plan counts in the step that made it, its prediction where it is looked up.
    assert (first.loads, first.h2d_bytes, first.loads_used_first) == (4, 160, 2)
    assert (first.hit_on_time, first.residual, first.late, first.hit_resident) == (2, 2, 0, 0)
    assert (first.predicted, first.predicted_active) == (2, 2)
    assert (second.loads, second.h2d_bytes, second.loads_used_first) == (0, 0, 2)
    assert (second.hit_on_time, second.residual, second.hit_resident) == (4, 0, 2)
    assert (second.predicted, second.predicted_active) == (4, 4)
    assert (run.unused_yet, run.cancelled_at_end) == (0, 0)


def test_attn_in():
    policy = Scripted(([2, 3], []), ([0, 1], []))
    run = simulate([BOTH], new_cache(policy), costs(), trigger="attn_in")
    # predict(1) 0-20 from what enters layer 0, plan at 20: planner 20-29, copy 29-39;
    # attention(0) 20-120, gate -130 and from there as with attn_out, but layer 1 has no predict:
    # attention 162-262. Layer 0 of the next step is planned at 304 all the same.
    assert lanes(run)["gpu"][:3] == [
        ("predict", 1, 0, 20), ("attention", 0, 20, 120), ("gate", 0, 120, 130),
    ]  # fmt: skip
    assert lanes(run)["planner"] == [("decide", 1, 20, 29), ("decide", 0, 304, 313)]
    assert lanes(run)["h2d"] == [
        ("swap", 1, 29, 39), ("partial sums", 0, 153, 159), ("swap", 0, 313, 323),
    ]  # fmt: skip
    assert ns(run.records[0], "wall_s", "wait_cpu_s", "predict_s") == [354, 2, 20]


def test_serial_waits_for_its_own_copies():
    policy = Scripted(([0, 1], []), ([2, 3], []))
    run = simulate([BOTH], new_cache(policy), costs(), trigger="serial")
    # attention 0-100, predict(0) -120, plan(0) 120: planner -129, copy -139; gate 120-130, waits
    # 9 for the copy; FFN 139-171. Layer 1: -271, -291, planner 291-300, copy 300-310, gate 301,
    # FFN 310-342. Head -392. No plan for layer 0 of the next step.
    assert lanes(run)["planner"] == [("decide", 0, 120, 129), ("decide", 1, 291, 300)]
    assert [s for s in lanes(run)["gpu"] if s[0] == "ffn"] == [
        ("ffn", 0, 139, 171), ("ffn", 1, 310, 342),
    ]  # fmt: skip
    (record,) = run.records
    assert ns(record, "wall_s", "wait_io_s", "wait_decide_s", "wait_cpu_s") == [392, 18, 0, 0]
    assert (record.hit_on_time, record.residual, record.late) == (4, 0, 0)


def test_serial_waits_for_the_decision_first():
    policy = Scripted(([0, 1], []))
    run = simulate([BOTH], new_cache(policy), costs(decide=18), trigger="serial")
    # Planner 120-139 where the gate ends at 130: 9 for the decision, then 10 for the copy, which
    # is 139-149; FFN 149-181. Layer 1: plan at 301, nothing to copy: planner -319, gate -311: 8.
    assert next(s for s in lanes(run)["gpu"] if s[0] == "ffn") == ("ffn", 0, 149, 181)
    assert lanes(run)["planner"][1] == ("decide", 1, 301, 319)
    assert lanes(run)["d2h"] == [("x", 1, 319, 324)]
    assert ns(run.records[0], "wait_io_s", "wait_decide_s") == [10, 9 + 8]


def test_after_gains_from_the_next_step():
    policy = Scripted(([0, 1], []))
    cache = new_cache(policy, n_layers=1, trigger="after", observes="active")
    run = simulate([[[[0, 1]]]] * 2, cache, costs(), n_layers=1, trigger="after", predictions=None)
    # Lookup at 110, the host has the work before the plan is made: d2h 110-115, pool 118-133,
    # sums -139, hand-over -142. Planner 110-119, copy 119-129. FFN of nobody 110-140, waits 2.
    # Head -192; attention -292, gate -302, FFN of both -334, head -384.
    assert lanes(run)["planner"] == [("decide", 0, 110, 119), ("decide", 0, 302, 310)]
    assert lanes(run)["h2d"] == [("swap", 0, 119, 129), ("partial sums", 0, 133, 139)]
    first, second = run.records
    assert ns(first, "wall_s", "wait_cpu_s", "predict_s") == [192, 2, 0]
    assert ns(second, "wall_s", "wait_cpu_s") == [192, 0]
    assert (first.residual, first.loads, second.hit_on_time, second.hit_resident) == (2, 2, 2, 0)
    assert isnan(first.predicted)
    assert policy.asked == [(0, [0, 1]), (0, [0, 1])]


def test_instant_has_everything_at_once_and_loads_the_link():
    policy = Scripted(([0, 1], []))
    cache = new_cache(policy, n_layers=1, trigger="instant")
    run = simulate(
        [[[[0, 1]]]], cache, costs(), n_layers=1, trigger="instant", predictions=None
    )  # fmt: skip
    # Planned, copied and committed at 110 without a wait: FFN 110-142. The link: 110-120.
    assert lanes(run) == {
        "gpu": [("attention", 0, 0, 100), ("gate", 0, 100, 110), ("ffn", 0, 110, 142),
                ("head", -1, 142, 192)],
        "h2d": [("swap", 0, 110, 120)],
    }  # fmt: skip
    (record,) = run.records
    assert ns(record, "wall_s", "decide_s", "swap_busy_s", "predict_s") == [192, 0, 10, 0]
    assert (record.hit_on_time, record.hit_resident, record.loads) == (2, 0, 2)


def test_a_decision_that_blocks_the_gpu():
    policy = Scripted(([2, 3], []))
    model = costs(decide_blocks_gpu=True)
    run = simulate([BOTH], new_cache(policy), model)
    # plan(1) at 120 holds the GPU until 129; copy 129-139; gate 129-139; FFN(0) from 139: d2h -144,
    # pool 147-162, sums -168, -171; FFN 139-169, waits 2. Attention 171-271, gate -281,
    # FFN -313; plan(0) holds until 321; head -371.
    assert lanes(run)["gpu"][2] == ("gate", 0, 129, 139)
    assert lanes(run)["h2d"][0] == ("swap", 1, 129, 139)
    assert ns(run.records[0], "wall_s", "wait_decide_s", "wait_cpu_s", "decide_s") == [
        371, 17, 2, 17,
    ]  # fmt: skip


def test_after_with_a_decision_that_blocks_while_the_host_works():
    cache = new_cache(Scripted(([0, 1], [])), n_layers=1, trigger="after")
    model = costs(decide_blocks_gpu=True)
    run = simulate([[[[0, 1]]]], cache, model, n_layers=1, trigger="after", predictions=None)
    # The host has its work at 110 as before and is done at 142. Plan 110-119, copy 119-129,
    # FFN 119-149: no wait for the host.
    assert lanes(run)["gpu"][2] == ("ffn", 0, 119, 149)
    assert lanes(run)["h2d"] == [("swap", 0, 119, 129), ("partial sums", 0, 133, 139)]
    assert ns(run.records[0], "wall_s", "wait_decide_s", "wait_cpu_s") == [199, 9, 0]


def test_the_planner_makes_one_decision_at_a_time():
    policy = Scripted(([2], []), ([4], []), ([0], []))
    trace = [[[[0]], [[2]], [[4]]]]
    run = simulate(trace, new_cache(policy, n_layers=3), costs(decide=300), n_layers=3)
    # plan(1) 120-421. plan(2): layer 1 has its attention 158-258 after 130 + 28 for one residual
    # neuron: d2h 5, 3, pool 7 + 4, sums 6, 3 = 28 and the FFN 30: 160; so 160-260, predict -280,
    # plan(2) at 280, but the planner is busy: 421-722.
    assert lanes(run)["planner"][:2] == [("decide", 1, 120, 421), ("decide", 2, 421, 722)]


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
        assert ns(run.records[0], "predict_s") == [20]  # layer 1's; layer 0's set is the last one


# -- what is refused ----------------------------------------------------------------------------


def test_refusals():
    with pytest.raises(KairoxError, match="2 layers of 8 neurons and the cache 1 of 8"):
        simulate([BOTH], new_cache(Tam(1, 8), n_layers=1), costs())
    with pytest.raises(KairoxError, match="plans from predictions and none were given"):
        simulate([BOTH], new_cache(Tam(2, 8)), costs(), predictions=None)
    with pytest.raises(KairoxError, match="give both the same trigger"):
        simulate([BOTH], new_cache(Tam(2, 8)), costs(), trigger="after")
    with pytest.raises(KairoxError, match="give both the same trigger"):
        simulate([BOTH], new_cache(Lru(2, 8), trigger="after"), costs(), trigger="serial")


def test_landings_are_replayed_and_must_fit():
    cache = new_cache(Scripted(([2, 3], [])))
    run = simulate([BOTH], cache, costs(copy_fixed=400), landings=[(), (0,)])
    # By time it lands at 529, long after the FFN; the replay says otherwise.
    assert run.records[0].hit_on_time == 2
    for landings, said in (([()], "end after 1 polls"), ([(), (0,), ()], "polled 2 times and 3")):
        with pytest.raises(KairoxError, match=said):
            simulate([BOTH], new_cache(Scripted(([2, 3], []))), costs(), landings=landings)
    with pytest.raises(KairoxError, match="swap 7 landed, but is not in flight"):
        simulate([BOTH], new_cache(Scripted(([2, 3], []))), costs(), landings=[(7,), ()])


def test_replayed_landings_are_not_waited_for():
    cache = new_cache(Scripted(([0, 1], []), ([2, 3], [])))
    run = simulate([BOTH], cache, costs(copy_fixed=900), trigger="serial", landings=[(0,), (1,)])
    assert ns(run.records[0], "wait_io_s", "wait_decide_s") == [0, 0]


def test_on_step_sees_every_record():
    seen = []
    run = simulate([BOTH, BOTH], new_cache(Scripted()), costs(), on_step=seen.append)
    assert tuple(seen) == run.records
    assert len(seen) == 2
    assert np.isfinite(seen[0].wall_s)


def test_a_host_that_never_answers_is_named(monkeypatch):
    monkeypatch.setattr(HostTraffic, "submit_cpu", lambda *_: None)
    with pytest.raises(RuntimeError, match="gpu waits for the host's partial sums of layer 0"):
        simulate([BOTH], new_cache(NoneResident(2, 8), slots=0), costs(), predictions=None)


def test_a_stall_for_a_decision_that_takes_no_time():
    cache = new_cache(Scripted(([0, 1], [])), n_layers=1)
    model = costs(decide=0, decide_per_swap=0, predict=0, gate=0)
    run = simulate([[[[0, 1]]]], cache, model, n_layers=1, trigger="serial")
    # Planned, submitted and waited for at 100: the copy is 100-110.
    assert lanes(run)["h2d"] == [("swap", 0, 100, 110)]
    assert ns(run.records[0], "wait_io_s", "wait_decide_s", "decide_s") == [10, 0, 0]

"""Timelines of one and two layers worked out by hand; the working is in the comments.

The costs are those of `toy_engine.costs`, in ns: attention 100, gate 10, predict 20, FFN 30 + 1 a
neuron, head 50; a swap 6 + 2 a neuron; a decision 8 + 1 a swap. A hand-over: d2h 5, hand-over 3,
pool 7 + 4 a neuron, partial sums 4 + 2 a token, hand-over 3.
"""

from math import isnan

import numpy as np
import pytest

from kairox_sim.errors import KairoxError
from kairox_sim.flows import HostTraffic
from kairox_sim.policies import AllResident, Lru, NoneResident, Static, Tam
from tests.toy_engine import BOTH, Scripted, costs, lanes, new_cache, ns, simulate

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

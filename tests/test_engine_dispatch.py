"""Who computes what is not on the device: timelines worked out by hand, one for each dispatch.

The costs are those of `toy_engine.costs`; test_engine_timelines says them in words. One layer of
eight neurons has its FFN from 110 on, with 0 and 1 on the device.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_sim.dispatch import cheapest_split
from kairox_sim.errors import KairoxError
from kairox_sim.policies import AllResident, NoneResident, Static, Tam
from tests.toy_engine import BOTH, Scripted, costs, lanes, new_cache, ns, simulate

FIVE = [[[[0, 1, 2, 3, 4]]]]


def one_layer(model, dispatch, *, fired=FIVE, swap_neurons=16, **options):
    cache = new_cache(Static(1, 8), n_layers=1, slots=2, warm=[[0, 1]], swap_neurons=swap_neurons)
    run = simulate(fired, cache, model, n_layers=1, predictions=None, dispatch=dispatch, **options)
    return run, run.records[0]


# -- serial -----------------------------------------------------------------------------------


def test_serial_begins_the_hosts_part_when_the_devices_is_over():
    run, record = one_layer(costs(), "serial")
    # FFN 110-142. Then d2h -147, hand-over -150, pool 7 + 3 x 4: -169, sums 4 + 2: -175, -178.
    assert lanes(run) == {
        "gpu": [("attention", 0, 0, 100), ("gate", 0, 100, 110), ("ffn", 0, 110, 142),
                ("head", -1, 178, 228)],
        "d2h": [("x", 0, 142, 147)],
        "cpu": [("residual", 0, 150, 169)],
        "h2d": [("partial sums", 0, 169, 175)],
    }  # fmt: skip
    assert ns(record, "wall_s", "wait_cpu_s") == [228, 36]
    assert (record.hit_on_time, record.fetched, record.residual) == (2, 0, 3)


def test_serial_is_not_slower_where_there_is_nothing_for_the_host():
    runs = [
        simulate([BOTH], new_cache(AllResident(2, 8), pinned=[range(8)] * 2), costs(),
                 predictions=None, dispatch=dispatch)
        for dispatch in ("serial", "concurrent", "gpu", "cost")
    ]  # fmt: skip
    assert len({repr(run) for run in runs}) == 1


def test_two_hand_overs_cost_twice():
    run, record = one_layer(costs(handovers=2), "concurrent")
    # d2h 10: 120, hand-over 6: 126, pool 19: 145, sums 2 x (4 + 2): 157, hand-over 6: 163.
    assert lanes(run)["d2h"] == [("x", 0, 110, 120)]
    assert lanes(run)["cpu"] == [("residual", 0, 126, 145)]
    assert lanes(run)["h2d"] == [("partial sums", 0, 145, 157)]
    assert ns(record, "wall_s", "wait_cpu_s", "act_busy_s") == [163 + 50, 163 - 142, 22]


# -- gpu --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copy_fixed", "waits"), [(6, 0), (20, 14)])
def test_what_is_missing_is_copied_and_computed_in_a_second_pass(copy_fixed, waits):
    run, record = one_layer(costs(copy_fixed=copy_fixed), "gpu", swap_neurons=2)
    # Copies of two and of one: fixed + 4 and fixed + 2, from 110 on: -128, or -156. The residents
    # 110-142; then the other three, 30 + 3.
    landed = 110 + 2 * copy_fixed + 6
    second = max(142, landed)
    assert lanes(run) == {
        "gpu": [("attention", 0, 0, 100), ("gate", 0, 100, 110), ("ffn", 0, 110, 142),
                ("ffn", 0, second, second + 33), ("head", -1, second + 33, second + 83)],
        "h2d": [("fetch", 0, 110, 114 + copy_fixed), ("fetch", 0, 114 + copy_fixed, landed)],
    }  # fmt: skip
    assert ns(record, "wait_io_s", "wait_cpu_s", "swap_busy_s", "act_busy_s", "cpu_busy_s") == [
        waits, 0, landed - 110, 0, 0,
    ]  # fmt: skip
    assert (record.hit_on_time, record.fetched, record.residual) == (2, 3, 0)
    assert (record.loads, record.h2d_bytes) == (0, 120)


def test_a_fetch_goes_before_swaps_that_have_not_begun_and_preempts_none():
    cache = new_cache(Scripted(([2, 3], [])), swap_neurons=1)
    run = simulate([BOTH], cache, costs(), dispatch="gpu")
    # plan(1) at 120, decided 8 + 2 later: copies of 8 from 130. FFN(0) is at 130, too: the first
    # copy, 130-138, was submitted by then. Fetches 138-146-154; the second copy after them.
    assert lanes(run)["h2d"] == [
        ("swap", 1, 130, 138), ("fetch", 0, 138, 146), ("fetch", 0, 146, 154),
        ("swap", 1, 154, 162),
    ]  # fmt: skip
    # Nobody is on the device: 130-160, then the two: 160-192. Layer 1: -292, -302, both on time.
    assert [s for s in lanes(run)["gpu"] if s[0] == "ffn"] == [
        ("ffn", 0, 130, 160), ("ffn", 0, 160, 192), ("ffn", 1, 302, 334),
    ]  # fmt: skip
    (record,) = run.records
    assert ns(record, "swap_busy_s") == [32]
    assert (record.fetched, record.hit_on_time, record.residual, record.h2d_bytes) == (2, 2, 0, 160)


def test_a_late_neuron_is_fetched_and_its_swap_still_lands():
    cache = new_cache(Scripted(([2], [])), n_layers=2)
    run = simulate([[[[]], [[2]]]], cache, costs(copy_fixed=300), dispatch="gpu", late="cpu")
    # Its copy is 129-431; the fetch waits for it, and takes 302: nothing is gained by asking twice.
    assert lanes(run)["h2d"] == [("swap", 1, 129, 431), ("fetch", 1, 431, 733)]
    (record,) = run.records
    assert (record.late, record.fetched, record.residual, record.h2d_bytes) == (1, 1, 0, 80)


def test_a_fetch_pays_for_the_reads_that_it_is():
    position = [[0, 1, 2, 5, 10, 3, 4, 6]]
    model = costs(copies="bundle", position=position)
    run, record = one_layer(model, "gpu")
    # 2, 3 and 4 lie at 2, 5 and 10. A gap of 2 takes 4 ns, less than a copy's 6: one read of 4
    # bundles. The gap of 4 takes 8: another read. 2 x 6 + 5 x 2.
    assert lanes(run)["h2d"] == [("fetch", 0, 110, 132)]
    assert record.h2d_bytes == 200


# -- cost -------------------------------------------------------------------------------------


def test_the_split_by_cost_takes_fewer_copies_of_equals():
    # FFN 1 + 1 a neuron. Host: 5 + 3 + 7 + 4 m + 6 + 3; device: 8 k + 1 + k.
    # k = 0: 36; 1: max(32, 10); 2: max(28, 19) = 28; 3: max(0, 28) = 28. Two.
    run, record = one_layer(costs(ffn=1), "cost", swap_neurons=1)
    # Residents 110-113. Copies 110-118-126; the two, 126-129. Host: d2h -115, -118, pool -129,
    # sums -135, -138.
    assert lanes(run) == {
        "gpu": [("attention", 0, 0, 100), ("gate", 0, 100, 110), ("ffn", 0, 110, 113),
                ("ffn", 0, 126, 129), ("head", -1, 138, 188)],
        "h2d": [("fetch", 0, 110, 118), ("fetch", 0, 118, 126), ("partial sums", 0, 129, 135)],
        "d2h": [("x", 0, 110, 115)],
        "cpu": [("residual", 0, 118, 129)],
    }  # fmt: skip
    assert ns(record, "wait_io_s", "wait_cpu_s") == [13, 9]
    assert (record.hit_on_time, record.fetched, record.residual) == (2, 2, 1)


def test_fetches_and_the_pool_share_dram():
    """Link 10, pool 10, DRAM 10 bytes/ns; 2 to 5 are not on the device."""
    model = costs(ffn=1, h2d=10, dram=10)
    run, record = one_layer(model, "cost", fired=[[[[0, 1, 2, 3, 4, 5]]]], swap_neurons=1)
    # Alone: host 5 + 3 + 7 + 4 m + (4 + 4) + 3, device 10 k + 1 + k.
    # k = 1: max(38, 12); 2: max(34, 23) = 34; 3: max(30, 34) = 34. Two, 2 and 3.
    # First fetch 110-120; the second is set up to 126. The pool reads its 80 bytes from 125 on:
    # 10 by 126, then 5 a ns each. The fetch lands at 134; the pool has 30 left, 137.
    # Sums 4 + 4: 145, 148. Residents 110-113; the fetched 134-137.
    assert lanes(run)["h2d"] == [
        ("fetch", 0, 110, 120), ("fetch", 0, 120, 134), ("partial sums", 0, 137, 145),
    ]  # fmt: skip
    assert lanes(run)["cpu"] == [("residual", 0, 118, 137)]
    assert lanes(run)["gpu"][2:] == [
        ("ffn", 0, 110, 113), ("ffn", 0, 134, 137), ("head", -1, 148, 198),
    ]  # fmt: skip
    assert ns(record, "wait_io_s", "wait_cpu_s") == [21, 11]


def test_sums_wait_for_the_fetches_that_were_given_before_them():
    # plan(1): decided 120-129, its copy of 60 + 2 is 129-191. FFN(0) at 130, 0 to 3 missing. Host
    # 24 + 40 m, device 60 + 2 k + 1 + k: k = 2: 104; 3: max(64, 70) = 70; 4: 73. Three.
    cache = new_cache(Scripted(([5], [])))
    model = costs(ffn=1, copy_fixed=60, cpu_cap=1)
    run = simulate([[[[0, 1, 2, 3]], [[5]]]], cache, model, dispatch="cost")
    # Fetch of three: 191-257. Pool 138 + 7 + 40: 185. Sums from 257: -263, hand-over -266.
    assert lanes(run)["cpu"] == [("residual", 0, 138, 185)]
    assert lanes(run)["h2d"][:3] == [
        ("swap", 1, 129, 191), ("fetch", 0, 191, 257), ("partial sums", 0, 257, 263),
    ]  # fmt: skip
    ffn = [s for s in lanes(run)["gpu"] if s[:2] == ("ffn", 0)]
    assert ffn == [("ffn", 0, 130, 131), ("ffn", 0, 257, 261)]
    assert next(s for s in lanes(run)["gpu"] if s[:2] == ("attention", 1))[2] == 266


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 40),
    n_tokens=st.integers(1, 3),
    part=st.integers(1, 5),
    ffn=st.sampled_from([0, 1, 30]),
    cpu_cap=st.sampled_from([1, 2, 8, 40]),
    h2d=st.sampled_from([1, 4, 20, 400]),
    copy_fixed=st.sampled_from([0, 6, 60]),
    dram=st.sampled_from([float("inf"), 3, 6]),
    copies=st.sampled_from(["gather", "bundle", "row"]),
    linked=st.booleans(),
)
def test_the_split_is_the_best_of_all(n, n_tokens, part, copies, linked, **machine):
    linked = linked and copies != "gather"
    position = np.random.default_rng(n).permutation(60)[None] if linked else None
    model = costs(copies=copies, position=position, **machine)
    residual = np.sort(np.random.default_rng(part).permutation(60)[:n]).astype(np.int32)

    def takes(k):
        parts = [residual[at : min(k, at + part)] for at in range(0, k, part)]
        device_s = sum(model.swap_of_s(0, ids) for ids in parts)
        device_s += model.ffn_gpu_s(k, n_tokens) if k else 0
        return max(round(1e9 * model.host_path_s(n - k, n_tokens)), round(1e9 * device_s))

    assert cheapest_split(model, 0, residual, n_tokens, part) == min(range(n + 1), key=takes)


# -- whole layers -----------------------------------------------------------------------------

# Weights of attention 800 bytes, keys and values 40 a token, an FFN of 8 x 60, a head of 160 and a
# row of 20. The host: 7 a pass, 10 bytes/ns. The device: attention 100, FFN 30 + 480 / 40.
DENSE = {"gating": "dense", "bundle": 60, "dram": 10}


def whole(n_resident, chunks=None, n_layers=3, **options):
    slots = [0] * (n_layers - n_resident) + [8] * n_resident
    pinned = [range(n) for n in slots]
    cache = new_cache(Static(n_layers, 8), n_layers=n_layers, slots=slots, pinned=pinned)
    chunks = chunks or [[[[0]], [[1]], [[]]]]
    return simulate(chunks, cache, costs(**DENSE), n_layers=n_layers, predictions=None,
                    dispatch="layers", **options)  # fmt: skip


def test_the_last_layers_are_the_devices():
    run = whole(1)
    # CPU: attention 7 + 840 / 10 = 91, FFN 7 + 48 = 55, head 7 + 18 = 25. x up: 4 + 20 / 20; down
    # 5; a hand-over of 3 after each.
    assert lanes(run) == {
        "cpu": [("attention", 0, 0, 91), ("ffn", 0, 91, 146), ("attention", 1, 146, 237),
                ("ffn", 1, 237, 292), ("head", -1, 450, 475)],
        "h2d": [("x", 2, 292, 297)],
        "gpu": [("attention", 2, 300, 400), ("ffn", 2, 400, 442)],
        "d2h": [("x", -1, 442, 447)],
    }  # fmt: skip
    (record,) = run.records
    assert ns(record, "wall_s", "gpu_busy_s", "cpu_busy_s", "act_busy_s", "wait_cpu_s") == [
        475, 142, 317, 10, 333,
    ]  # fmt: skip
    assert (record.evaluated, record.hit_on_time, record.residual) == (24, 8, 16)
    assert (record.active, record.loads, record.h2d_bytes) == (2, 0, 0)


def test_all_layers_take_the_head_along():
    run = whole(3)
    assert set(lanes(run)) == {"gpu"}
    assert ns(run.records[0], "wall_s", "wait_cpu_s") == [3 * 142 + 50, 0]
    run = whole(0)
    assert set(lanes(run)) == {"cpu"}
    assert ns(run.records[0], "wall_s", "wait_cpu_s") == [3 * 146 + 25, 3 * 146 + 25]


def in_part(slots, ratio, resident=None, **changed):
    pinned = [range(n) for n in (slots if resident is None else resident)]
    cache = new_cache(Static(3, 8), n_layers=3, slots=slots, pinned=pinned)
    stand_in = replace(costs(**DENSE | changed), layers_ratio=ratio)
    return simulate([[[[0]], [[1]], [[]]]], cache, stand_in, n_layers=3, predictions=None,
                    dispatch="layers")  # fmt: skip


def test_a_stand_ins_layer_at_the_boundary_is_on_both_sides():
    run = in_part([0, 2, 8], 0.5, cpu_fixed=8, ffn=32, act_fixed=5, d2h_fixed=6, handover=4)
    # A quarter of layer 1 is the device's. CPU: 92 and 56, and three quarters of them. Device: 100
    # and 44, and a quarter of them. x up once and down once, each of 6, and 4 of a hand-over: half
    # of each, as of the head's 26.
    assert lanes(run) == {
        "cpu": [("attention", 0, 0, 92), ("ffn", 0, 92, 148), ("attention", 1, 148, 217),
                ("ffn", 1, 217, 259), ("head", -1, 449, 462)],
        "h2d": [("x", 1, 259, 262)],
        "gpu": [("attention", 1, 264, 289), ("ffn", 1, 289, 300), ("attention", 2, 300, 400),
                ("ffn", 2, 400, 444)],
        "d2h": [("x", -1, 444, 447)],
    }  # fmt: skip
    (record,) = run.records
    assert (record.evaluated, record.hit_on_time, record.residual) == (24, 10, 14)


@pytest.mark.parametrize(
    ("slots", "resident", "ratio", "words"),
    [
        ([0, 2, 8], None, 1, "layer 1 has 2 slots for 8 neurons; give each layer 0 or all of them"),
        ([0, 2, 8], [0, 1, 8], 0.5, "layer 1 has 2 slots for 8 neurons; of a stand-in's layers"),
        ([2, 2, 8], None, 0.5, "layer 0 has 2 slots"),
        ([8, 2, 8], None, 0.5, "layer 1 has 2 slots"),
        ([0, 2, 0], None, 0.5, "layer 1 has 2 slots .* give slots ngl:N"),
    ],
)
def test_only_the_boundary_of_a_stand_in_is_in_part(slots, resident, ratio, words):
    with pytest.raises(KairoxError, match=words):
        in_part(slots, ratio, resident)


def test_x_crosses_once_per_change_of_side():
    slots = [8, 0, 0, 8]
    cache = new_cache(Static(4, 8), n_layers=4, slots=slots, pinned=[range(n) for n in slots])
    chunks = [[[[0], [2], [1]]] * 4, [[[0]]] * 4]
    run = simulate(chunks, cache, costs(**DENSE), n_layers=4, n_prefill=1, predictions=None,
                   dispatch="layers", context_start=5)  # fmt: skip
    prefill, decode = run.records
    # A chunk of 3 after 5: keys and values of 8 tokens: 7 + 112. x up: 4 + 3; down, for the head of
    # the last token alone, 5. Device 142 twice, host 119 + 55 twice, 5 + 3, 7 + 3, 5 + 3, head 25.
    assert (prefill.context_len, decode.context_len) == (8, 9)
    assert ns(prefill, "wall_s") == [2 * 142 + 2 * (119 + 55) + 8 + 10 + 8 + 25]
    # Then 9 tokens: 7 + 116; x up 5.
    assert ns(decode, "wall_s") == [2 * 142 + 2 * (123 + 55) + 8 + 8 + 8 + 25]
    assert [s[1] for s in lanes(run)["d2h"]] == [1, -1] * 2
    assert [s[1] for s in lanes(run)["h2d"]] == [3] * 2


def test_layers_are_whole_or_not_at_all():
    def run(cache, model=None, **options):
        simulate([BOTH], cache, model or costs(**DENSE), dispatch="layers", **options)

    with pytest.raises(KairoxError, match="layer 0 has 3 slots for 8 neurons; give each layer 0"):
        run(new_cache(Static(2, 8), slots=[3, 8], warm=[range(3), range(8)]))
    with pytest.raises(KairoxError, match="layer 1 has 8 slots for 8"):  # but nobody is there
        run(new_cache(Static(2, 8), slots=[0, 8], warm=[[], range(7)]))
    with pytest.raises(KairoxError, match="gating is 'exact'; use gating dense"):
        run(new_cache(NoneResident(2, 8), slots=0), costs())
    with pytest.raises(KairoxError, match="Tam plans copies; use the static policy"):
        run(new_cache(Tam(2, 8)))


# -- dense ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["concurrent", "gpu"])
def test_dense_computes_every_neuron_and_decides_nothing(dispatch):
    model = costs(gating="dense", bundle=60)
    _, record = one_layer(model, dispatch, fired=[[[[0, 3]]]])
    # No gate: FFN from 100 over the two that are here, 30 + 3. Host: six neurons, from 108:
    # 7 + 36: 151, sums -157, -160. Or copied: 100 + 6 + 18 = 124; the six from 133: 30 + 9.
    assert (record.evaluated, record.active) == (8, 2)
    assert record.predict_s == 0
    assert ns(record, "wall_s") == [160 + 50 if dispatch == "concurrent" else 133 + 39 + 50]


def test_what_is_no_choice_is_refused():
    with pytest.raises(KairoxError, match="'gpus'; allowed: concurrent, serial, gpu, cost, layers"):
        one_layer(costs(), "gpus")
    with pytest.raises(KairoxError, match="lookahead_from is -1, must be 0 or more"):
        one_layer(costs(), "gpu", lookahead_from=-1)
    with pytest.raises(KairoxError, match="context_start is -2, must be 0 or more"):
        one_layer(costs(), "gpu", context_start=-2)

"""Lanes and devices: intervals, order on the link, overruns, errors. No wall-clock ratios."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kairox_exec.clock import Clock
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.generation import overrun_warnings
from kairox_exec.lanes import Job, Link, Transfer, Worker
from kairox_exec.oplog import Op, Size, busy_s, clip, union_ns
from kairox_exec.pacing import in_ns
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.events import Swap
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape


@pytest.fixture(scope="module")
def costs() -> CostModel:
    shape = find_shape("tiny-reglu")
    return costs_for(
        load_profile("emu-pc1"), shape, "exact", trace_layers=6, trace_neurons=896,
        predictor="lookahead",
    )  # fmt: skip


def _swap(swap_id: int, promote: list[int], slots: list[int], layer: int = 0) -> Swap:
    ids = np.asarray(promote, np.int32)
    return Swap(swap_id, layer, ids, np.asarray(slots, np.int32), ids[:0])


def _op(t0: int, t1: int) -> Op:
    return Op("gpu", "ffn", 0, t0, t1, Size())


# -- intervals -------------------------------------------------------------------------------------


def test_clip_and_union_by_hand() -> None:
    # [0, 10] and [5, 20] overlap, [30, 40] is cut at 35, [50, 60] is outside: 20 + 5.
    ops = [_op(5, 20), _op(0, 10), _op(30, 40), _op(50, 60), _op(7, 7)]
    assert clip(ops, 0, 35) == [(5, 20), (0, 10), (30, 35)]
    assert busy_s(ops, 0, 35) == 25e-9


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_union_counts_covered_points(pairs: list[tuple[int, int]]) -> None:
    intervals = [(begin, begin + length) for begin, length in pairs]
    covered = {t for begin, end in intervals for t in range(begin, end)}
    assert union_ns(intervals) == len(covered)


# -- the link --------------------------------------------------------------------------------------


def _transfer(kind: str, given_ns: int, duration_ns: int, swap_id: int = -1) -> Transfer:
    return Transfer(kind, 0, given_ns, duration_ns, Size(), None, swap_id)


def test_partial_sums_pass_waiting_swaps_but_do_not_preempt() -> None:
    settled: list[Transfer] = []
    link = Link(Clock(), True, settled.append)
    for swap_id in range(3):
        link.give(_transfer("swap", 0, 10, swap_id))
    link.advance(0)  # the first one has started
    urgent = _transfer("partial sums", 4, 5)
    link.give(urgent)
    link.settle(urgent)
    assert (urgent.t0_ns, urgent.t1_ns) == (10, 15)
    link.advance(100)
    assert [(t.swap_id, t.t0_ns, t.t1_ns) for t in settled] == [
        (0, 0, 10), (-1, 10, 15), (1, 15, 25), (2, 25, 35),
    ]  # fmt: skip


def test_a_swap_starts_before_partial_sums_that_are_not_there_yet() -> None:
    link = Link(Clock(), True, lambda transfer: None)
    swap, urgent = _transfer("swap", 0, 10, 0), _transfer("partial sums", 3, 5)
    link.give(urgent)
    link.give(swap)
    link.settle(urgent)
    assert (swap.t0_ns, urgent.t0_ns) == (0, 10)


def test_advance_settles_only_what_has_started() -> None:
    settled: list[Transfer] = []
    link = Link(Clock(), True, settled.append)
    for swap_id in range(3):
        link.give(_transfer("swap", 0, 10, swap_id))
    link.advance(9)
    assert [t.swap_id for t in settled] == [0]
    link.advance(10)
    assert [t.swap_id for t in settled] == [0, 1]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 9)), max_size=12),
    st.integers(0, 60),
)
def test_link_is_serial_and_work_conserving(
    given: list[tuple[bool, int, int]], until_ns: int
) -> None:
    settled: list[Transfer] = []
    link = Link(Clock(), True, settled.append)
    transfers = [
        _transfer("partial sums" if urgent else "swap", at, duration)
        for urgent, at, duration in sorted(given, key=lambda item: item[1])
    ]
    for transfer in transfers:
        link.give(transfer)
    link.advance(until_ns)
    link.advance(10**6)
    assert len(settled) == len(transfers)
    free_ns = 0
    for i, transfer in enumerate(settled):
        waiting = settled[i:]
        assert transfer.t0_ns == max(free_ns, min(t.given_ns for t in waiting))
        assert transfer.t1_ns == transfer.t0_ns + transfer.duration_ns
        passed = [t for t in waiting if t.kind != "swap" and t.given_ns <= transfer.t0_ns]
        assert transfer.kind != "swap" or not passed
        free_ns = transfer.t1_ns


# -- workers ---------------------------------------------------------------------------------------


def test_worker_keeps_order_and_is_in_inference_mode() -> None:
    worker, seen = Worker("test"), []
    target = torch.inference_mode()(lambda: torch.zeros(2))()
    for i in range(20):
        worker.submit(Job(lambda i=i: (seen.append(i), target.add_(1))))
    worker.finish()
    worker.close()
    worker.close()
    assert seen == list(range(20))
    assert target.tolist() == [20, 20]


def test_worker_error_surfaces_and_stops_the_lane() -> None:
    worker, ran = Worker("test"), []
    bad, after = Job(lambda: 1 / 0), Job(lambda: ran.append(1))
    worker.submit(bad)
    bad.done.wait()
    with pytest.raises(RuntimeError, match="test failed: division by zero"):
        worker.submit(after)
    with pytest.raises(RuntimeError, match="division"):
        worker.finish()
    worker.close()
    assert not ran


def test_closed_worker_takes_no_work() -> None:
    worker = Worker("test")
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(Job(lambda: None))


# -- the device ------------------------------------------------------------------------------------


def _layer_step(device: EmulatedDevice, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One attention, a decision with two swaps, a residual beside the device's own rows."""
    size = Size(n_tokens=1, context_len=8)
    device.end(device.begin(), "attention", 0, size)
    device.think()
    device.copy([_swap(0, [0, 1], [1, 0]), _swap(1, [2, 3], [3, 2])], rows, slots)
    device.thought(0, Size(n_swaps=2))
    handed = device.hand_over(0, [torch.ones(3)], [lambda x: x * 2], Size(neurons=5, n_tokens=1))
    device.end(device.begin(), "ffn", 0, Size(neurons=4, n_tokens=1))
    return device.join(handed)


@pytest.mark.parametrize("paced", [True, False])
def test_work_is_done_and_lanes_are_serial(costs: CostModel, paced: bool) -> None:
    rows, slots = torch.randn(8, 2, 4), torch.full((6, 2, 4), torch.nan)
    with EmulatedDevice(costs if paced else None) as device:
        began = device.start_step()
        y = _layer_step(device, rows, slots)
        device.wait_landed([0, 1])
        assert device.landed() == [0, 1]
        assert device.landed() == []
        ended = device.end_step()
    assert y.tolist() == [2, 2, 2]
    assert torch.equal(slots[[1, 0, 3, 2]], rows[:4])
    assert slots[4:].isnan().all()
    kinds = {(op.lane, op.kind) for op in device.ops} - {("idle", "cpu"), ("idle", "io")}
    assert kinds == {
        ("gpu", "attention"), ("planner", "decide"), ("d2h", "x"), ("gpu", "ffn"),
        ("cpu", "residual"), ("h2d", "partial sums"), ("h2d", "swap"),
    }  # fmt: skip
    # Unpaced, partial sums come back beside a copy that is under way.
    for lane in {op.lane for op in device.ops} - (set() if paced else {"h2d"}):
        ops = sorted((op for op in device.ops if op.lane == lane), key=lambda op: op.t0_ns)
        assert all(a.t1_ns <= b.t0_ns for a, b in pairwise(ops)), lane
    # The gpu lane: one thing at a time, and paced without gaps.
    on_gpu = sorted(
        (op for op in device.ops if op.lane in ("gpu", "planner", "idle")), key=lambda op: op.t0_ns
    )
    assert all(a.t1_ns <= b.t0_ns for a, b in pairwise(on_gpu))
    if paced:
        assert on_gpu[0].t0_ns == began
        assert all(a.t1_ns == b.t0_ns for a, b in pairwise(on_gpu))
    assert on_gpu[-1].t1_ns <= ended


def test_paced_ops_last_as_modelled_or_are_overruns(costs: CostModel) -> None:
    costs = replace(costs, cpu_fixed_s=0.1)  # so long that the gpu lane has to wait
    rows, slots = torch.randn(8, 2, 4), torch.full((6, 2, 4), torch.nan)
    with EmulatedDevice(costs) as device:
        device.start_step()
        _layer_step(device, rows, slots)
        device.wait_landed([0, 1])
    expected = {
        "attention": costs.attention_s(1, 8), "ffn": costs.ffn_gpu_s(4, 1),
        "residual": costs.ffn_cpu_s(5, 1), "swap": costs.swap_s(2),
        "partial sums": costs.act_h2d_s(1), "x": costs.act_d2h_s(1),
    }  # fmt: skip
    modelled = [op for op in device.ops if op.kind in expected]
    assert len(modelled) == 7
    for op in modelled:
        lasted, asked = op.t1_ns - op.t0_ns, in_ns(expected[op.kind])
        assert lasted > asked if op.overrun else lasted == asked
    assert device.n_overruns == sum(op.overrun for op in device.ops)
    assert device.n_ops == len(device.ops)
    by_kind = {op.kind: op for op in device.ops}
    handover_ns = in_ns(costs.handover_s)
    assert by_kind["residual"].t0_ns == by_kind["x"].t1_ns + handover_ns
    assert by_kind["partial sums"].t0_ns >= by_kind["residual"].t1_ns
    assert by_kind["cpu"].t1_ns == by_kind["partial sums"].t1_ns + handover_ns
    swaps = [op for op in device.ops if op.kind == "swap"]
    assert swaps[0].t0_ns == by_kind["decide"].t1_ns  # given when deciding ends, not before
    assert by_kind["swap"].size == Size(neurons=2, n_bytes=costs.swap_bytes(2))


def test_work_longer_than_modelled_is_an_overrun(costs: CostModel) -> None:
    instant = replace(costs, attention=replace(costs.attention, fixed_s=0, bytes_per_s=1e30))
    with EmulatedDevice(instant) as device:
        t0 = device.start_step()
        sum(range(50_000))
        device.end(t0, "attention", 0, Size(n_tokens=1, context_len=1))
        assert device.n_overruns == 1
        assert device.ops[0].overrun
        # The lane's clock follows the real end, so that the next op is not blamed for it.
        assert device.begin() == device.ops[0].t1_ns
        assert device.paced_ns + device.behind_ns == device.ops[0].t1_ns - t0
        assert device.behind_ns > 100 * device.paced_ns


@pytest.mark.parametrize(
    ("n_overruns", "behind_ns", "said"),
    [(0, 0, ""), (2, 10, ""), (3, 0, "3.0%"), (1, 300, "30.0%")],
)
def test_few_ops_that_are_far_behind_are_said_too(
    n_overruns: int, behind_ns: int, said: str, costs: CostModel
) -> None:
    with EmulatedDevice(costs) as device:
        device.n_ops, device.n_overruns = 100, n_overruns
        device.paced_ns, device.behind_ns = 1000, behind_ns
        warnings = overrun_warnings(device)
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)


def test_swaps_land_in_issue_order_when_their_time_has_come(costs: CostModel) -> None:
    rows, slots = torch.randn(8, 2, 4), torch.full((8, 2, 4), torch.nan)
    slow = replace(costs, h2d_copy_fixed_s=0.002)
    with EmulatedDevice(slow) as device:
        device.start_step()
        for swap_id in range(4):
            device.copy([_swap(swap_id, [swap_id], [swap_id])], rows, slots)
        assert device.landed() == []  # not before the lane's clock has moved, copied or not
        device.wait_landed([1])
        assert device.landed() == [0, 1]
        device.drop_copies()
        assert device.landed() == []


def test_copy_at_once_is_there_and_never_reported() -> None:
    rows, slots = torch.randn(8, 2, 4), torch.full((8, 2, 4), torch.nan)
    with EmulatedDevice() as device:
        device.start_step()
        device.copy([_swap(0, [3], [5])], rows, slots, at_once=True)
        assert torch.equal(slots[5], rows[3])
        device.copy([_swap(1, [4], [6])], rows, slots)
        device.wait_landed([1])
        assert device.landed() == [1]
        assert [op.kind for op in device.ops if op.lane == "h2d"] == ["swap", "swap"]


def test_errors_of_the_other_lanes_reach_the_model_thread() -> None:
    with EmulatedDevice() as device:
        handed = device.hand_over(0, [torch.ones(2)], [lambda x: x @ torch.ones(3)], Size())
        with pytest.raises(RuntimeError, match="kairox-cpu failed"):
            device.join(handed)
    with EmulatedDevice() as device:
        device.copy([_swap(0, [99], [0])], torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))
        with pytest.raises(RuntimeError, match="kairox-h2d failed"):
            device.wait_landed([0])
        with pytest.raises(RuntimeError, match="kairox-h2d failed"):
            device.landed()


def test_device_memory_is_separate() -> None:
    with EmulatedDevice() as device:
        host = torch.ones(3, 4).T
        there = device.put(host)
        host.zero_()
        assert there.eq(1).all()
        assert there.is_contiguous()
        assert device.new_slots(2, 3, 4).isnan().all()


def test_an_unknown_op_is_refused(costs: CostModel) -> None:
    with EmulatedDevice(costs) as device, pytest.raises(ValueError, match="'embed'"):
        device.end(device.start_step(), "embed", 0, Size())


def _think_ns(device: EmulatedDevice, layer: int) -> int:
    """A decision with one swap that really takes a while: when it was made."""
    device.think()
    device.copy([_swap(layer, [layer], [layer], layer)], torch.zeros(4, 2, 4), torch.zeros(4, 2, 4))
    sum(range(100_000))
    device.thought(layer, Size(n_swaps=1))
    assert device.ops[-1].kind == "decide"
    return device.ops[-1].t1_ns


def test_thinking_beside_the_gpu_is_a_lane_of_its_own(costs: CostModel) -> None:
    with EmulatedDevice(replace(costs, decide_blocks_gpu=False)) as device:
        assert not device.decide_blocks_gpu
        began = device.start_step()
        decided = [_think_ns(device, 0), _think_ns(device, 1)]
        assert device.begin() == began  # the gpu lane has lost nothing
        first, second = device.ops
        assert first.t0_ns == began
        assert second.t0_ns == first.t1_ns  # the planner thinks of one thing at a time
        assert second.t1_ns == decided[1]
        device.wait_decided(2)  # nothing was decided for it
        assert device.begin() == began
        device.wait_decided(1)
        assert device.begin() == decided[1]
        (idle,) = [op for op in device.ops if op.lane == "idle"]
        assert (idle.kind, idle.layer, idle.t0_ns) == ("decide", 1, began)
        device.wait_landed([0, 1])
        swaps = [op for op in device.ops if op.kind == "swap"]
        assert swaps[0].t0_ns == decided[0]  # given when it was decided
        assert swaps[1].t0_ns == max(decided[1], swaps[0].t1_ns)


def test_thinking_that_blocks_holds_up_the_gpu(costs: CostModel) -> None:
    with EmulatedDevice(replace(costs, decide_blocks_gpu=True)) as device:
        device.start_step()
        decided = _think_ns(device, 0)
        assert device.begin() == decided
        device.wait_decided(0)
        assert not [op for op in device.ops if op.lane == "idle"]

"""What every device promises: the emulated machine, the cpu, a CUDA card, and one that works late.

On a card these run where there is one; elsewhere its code runs on `late`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kairox_exec.cuda import CudaDevice
from kairox_exec.device import Device
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.formats import FORMATS, storage_dtype
from kairox_exec.host_pool import HostPool
from kairox_exec.oplog import Size
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from tests.exec.late import LateDevice

ONE = Size(neurons=4, n_tokens=1, context_len=8)
CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: there is none")


def _costs(profile: str) -> Any:
    return costs_for(
        load_profile(profile), find_shape("tiny-reglu"), "exact", trace_layers=6,
        trace_neurons=896, predictor="lookahead",
    )  # fmt: skip


@pytest.fixture(
    params=[
        "emulated", "emulated-async", "cpu", "late-1", "late-2", "late-3",
        pytest.param("cuda-auto", marks=[pytest.mark.gpu, CARD]),
        pytest.param("cuda-uva_gather", marks=[pytest.mark.gpu, CARD]),
        pytest.param("cuda-staged", marks=[pytest.mark.gpu, CARD]),
        pytest.param("cuda-per_row", marks=[pytest.mark.gpu, CARD]),
    ]
)  # fmt: skip
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    kind, _, how = request.param.partition("-")
    pool = HostPool(threads=2)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        made: CudaDevice | EmulatedDevice
        if kind == "late":
            late = stack.enter_context(LateDevice(int(how)))
            made = CudaDevice(pool, streams=late, promotion="staged")
        elif kind == "cuda":
            made = CudaDevice(pool, promotion=how)
        elif kind == "emulated":
            made = EmulatedDevice(_costs("emu-pc1-async" if how else "emu-pc1"), pool)
        else:
            made = EmulatedDevice(None, pool)
        yield stack.enter_context(made)


def _swap(swap_id: int, promote: list[int], slots: list[int]) -> Swap:
    ids = np.asarray(promote, np.int32)
    return Swap(swap_id, 0, ids, np.asarray(slots, np.int32), ids[:0])


def test_device_memory_is_a_copy(device: Device) -> None:
    host = torch.arange(12.0).view(3, 4).T
    there = device.put(host)
    expected = host.clone()
    host.zero_()
    assert torch.equal(there.cpu(), expected)
    ids = device.send(np.array([2, 0], np.int32))
    assert ids.cpu().tolist() == [2, 0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_slots_of_every_format(device: Device, fmt: Any) -> None:
    dtype = storage_dtype(fmt)
    draw = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (40, 2 * 68 * dtype.itemsize), generator=draw, dtype=torch.uint8)
    rows = device.hold(bits.view(dtype).view(40, 2, 68))
    slots = device.new_slots(8, 2, 68, dtype)
    assert slots.shape == (8, 2, 68)
    assert (slots.view(torch.uint8).cpu() == 0xFF).all()
    device.fill(rows, np.array([5, 9], np.int32), slots, np.array([7, 0], np.int32))
    device.start_step()
    device.copy([_swap(0, [39, 3], [1, 4])], rows, slots)
    device.wait_landed([0])
    assert device.landed() == [0]
    device.end_step()
    here, there = slots.view(torch.uint8).cpu(), rows.view(torch.uint8)
    assert torch.equal(here[[7, 0, 1, 4]], there[[5, 9, 39, 3]])
    assert (here[[2, 3, 5, 6]] == 0xFF).all()


def test_no_slots_are_legal(device: Device) -> None:
    assert device.new_slots(0, 2, 4).shape == (0, 2, 4)


def test_swaps_land_whole_in_order_and_once(device: Device) -> None:
    rows, slots = device.hold(torch.randn(64, 2, 8)), device.new_slots(64, 2, 8)
    device.start_step()
    for swap_id in range(6):
        ids = list(range(8 * swap_id, 8 * swap_id + 8))
        device.copy([_swap(swap_id, ids, ids[::-1])], rows, slots)
    device.wait_landed([3])
    landed = device.landed()
    assert landed[:4] == [0, 1, 2, 3]
    for swap_id in landed:
        here = slice(8 * swap_id, 8 * swap_id + 8)
        assert torch.equal(slots[here].cpu(), rows[here].flip(0))
    device.wait_landed([swap_id for swap_id in (4, 5) if swap_id not in landed])
    assert landed + device.landed() == list(range(6))
    assert device.landed() == []
    device.end_step()


def test_a_copy_at_once_is_there_and_never_reported(device: Device) -> None:
    rows, slots = device.hold(torch.randn(8, 2, 8)), device.new_slots(8, 2, 8)
    device.start_step()
    device.copy([_swap(0, [3], [5])], rows, slots, at_once=True)
    assert torch.equal(slots[5].cpu(), rows[3])
    device.copy([_swap(1, [4], [6])], rows, slots)
    device.wait_landed([1])
    assert device.landed() == [1]
    device.end_step()


def test_what_is_still_to_be_read_is_not_overwritten(device: Device) -> None:
    rows, slots = device.hold(torch.randn(8, 2, 8)), device.new_slots(8, 2, 8)
    device.fill(rows, np.array([1], np.int32), slots, np.array([0], np.int32))
    device.start_step()
    device.reading()
    device.think()
    device.copy([_swap(0, [2], [0])], rows, slots)
    device.thought(0, Size(n_swaps=1))
    read = slots[0] * 1  # launched behind the copy
    device.read()
    device.wait_landed([0])
    assert device.landed() == [0]
    assert torch.equal(read.cpu(), rows[1])
    assert torch.equal(slots[0].cpu(), rows[2])
    device.end_step()


def test_dropped_copies_never_land(device: Device) -> None:
    rows, slots = device.hold(torch.randn(8, 2, 8)), device.new_slots(8, 2, 8)
    device.start_step()
    device.copy([_swap(0, [1], [0])], rows, slots)
    device.drop_copies()
    assert device.landed() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_hosts_parts_come_back_as_one_sum(device: Device, dtype: torch.dtype) -> None:
    device.start_step()
    for layer, n_tokens in enumerate((1, 5, 1)):
        x = device.put(torch.arange(n_tokens * 8.0).view(n_tokens, 8) + layer)
        expected = (x.cpu() * 7).to(dtype)
        works = [lambda t, k=k: (t * k).to(dtype) for k in (3, 4)]
        handed = device.hand_over(layer, [x], works, Size(neurons=9, n_tokens=n_tokens))
        assert torch.equal(device.join(handed).cpu(), expected)
    device.end_step()


def test_the_hosts_errors_reach_the_model(device: Device) -> None:
    device.start_step()
    works = [lambda t: t @ torch.ones(3, 3)]
    with pytest.raises(RuntimeError, match="kairox-cpu"):
        device.join(device.hand_over(0, [device.put(torch.ones(1, 2))], works, ONE))


def test_ops_of_a_step(device: Device) -> None:
    """Every op is logged, inside the step, with its lane's ops one after the other."""
    rows, slots = device.hold(torch.randn(8, 2, 8)), device.new_slots(8, 2, 8)
    began_ns = device.start_step()
    device.end(device.begin(), "attention", 0, ONE)
    device.think()
    device.copy([_swap(0, [1, 2], [0, 1])], rows, slots)
    device.thought(0, Size(n_swaps=1))
    device.wait_decided(0)
    x = device.put(torch.ones(1, 8))
    handed = device.hand_over(0, [x], [torch.clone], ONE)
    device.end(device.begin(), "ffn", 0, ONE)
    device.join(handed)
    device.wait_landed([0])
    assert device.landed() == [0]
    device.end(device.begin(), "head", -1, Size(n_tokens=1))
    ended_ns = device.end_step()
    assert began_ns < ended_ns
    counted = {(op.lane, op.kind) for op in device.ops if op.lane != "idle"}
    assert counted == {
        ("gpu", "attention"), ("planner", "decide"), ("d2h", "x"), ("gpu", "ffn"),
        ("cpu", "residual"), ("h2d", "partial sums"), ("h2d", "swap"), ("gpu", "head"),
    }  # fmt: skip
    assert {op.kind for op in device.ops if op.lane == "idle"} <= {"cpu", "io", "decide"}
    assert device.n_ops == len(device.ops)
    (swap,) = [op for op in device.ops if op.kind == "swap"]
    assert swap.size.neurons == 2
    for op in device.ops:
        assert op.t0_ns <= op.t1_ns
    on_gpu = sorted((op for op in device.ops if op.lane == "gpu"), key=lambda op: op.t0_ns)
    assert [op.kind for op in on_gpu] == ["attention", "ffn", "head"]
    assert all(a.t1_ns <= b.t0_ns for a, b in pairwise(on_gpu))


def test_a_host_that_never_answers(device: Device) -> None:
    device._stuck_after_s = 0.01  # type: ignore[attr-defined]
    release = threading.Event()

    def work(x: torch.Tensor) -> torch.Tensor:
        release.wait(10)
        return x

    device.start_step()
    handed = device.hand_over(3, [device.put(torch.ones(1, 2))], [work], ONE)
    with pytest.raises(KairoxError, match="residual neurons of layer 3 of lane cpu"):
        device.join(handed)
    device.close()  # does not wait again
    release.set()


def test_status(device: Device) -> None:
    status = device.status
    assert {"device", "host_threads", "host_nice"} <= set(status)
    assert status["host_threads"] == device.host_threads == 2
    assert isinstance(device.decide_blocks_gpu, bool)

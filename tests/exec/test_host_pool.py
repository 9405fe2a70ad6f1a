"""The host's threads: parts added in order, their priority, and work that never returns."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.host_pool import HostPool
from kairox_exec.oplog import Size
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap

ONE = Size(neurons=1, n_tokens=1)


def test_parts_are_added_in_their_order_whoever_is_first() -> None:
    ended = [threading.Event(), threading.Event()]

    def first(x: torch.Tensor) -> torch.Tensor:
        assert all(event.wait(10) for event in ended)
        return x * 1e8

    def part(i: int, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def work(x: torch.Tensor) -> torch.Tensor:
            ended[i].set()
            return x * factor

        return work

    works = [first, part(0, -1e8), part(1, 1.0)]
    with EmulatedDevice(pool=HostPool(threads=3)) as device:
        assert device.host_threads == 3
        y = device.join(device.hand_over(0, [torch.ones(1, 1)], works, ONE))
    # float32: (1e8 - 1e8) + 1 is 1; with the first part added last it is 0.
    assert y.item() == 1.0
    (op,) = [op for op in device.ops if op.lane == "cpu"]
    assert op.t1_ns >= op.t0_ns


def test_more_parts_than_threads_are_refused() -> None:
    with EmulatedDevice() as device, pytest.raises(ValueError, match="2 works for 1 host threads"):
        device.hand_over(0, [torch.ones(1, 1)], [torch.clone, torch.clone], ONE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads: Linux")
def test_nice_lowers_the_priority_of_these_threads_only() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return x

    with EmulatedDevice(pool=HostPool(threads=2, nice=19)) as device:
        device.join(device.hand_over(0, [torch.ones(1, 1)], [work, work], ONE))
    assert seen == [19, 19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


@pytest.mark.parametrize(("threads", "nice"), [(0, 0), (10**5, 0), (1, -1), (1, 20)])
def test_impossible_pools_are_refused(threads: int, nice: int) -> None:
    with pytest.raises(KairoxError, match="got"):
        HostPool(threads, nice)


def test_nice_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(KairoxError, match="Linux only"):
        HostPool(nice=5)


# -- the watchdog ----------------------------------------------------------------------------------


@contextmanager
def _stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A device whose copies do not end until the test has."""
    release = threading.Event()
    monkeypatch.setattr("kairox_exec.emulated.copy_rows", lambda *_: release.wait(10))
    device = EmulatedDevice(stuck_after_s=0.01)
    try:
        yield device
    finally:
        release.set()


def _swap(swap_id: int) -> Swap:
    here = np.zeros(1, np.int32)
    return Swap(swap_id, 4, here, here, here[:0])


def _give(device: EmulatedDevice, *, at_once: bool = False) -> None:
    device.copy([_swap(7)], torch.ones(1, 1, 4), torch.ones(1, 1, 4), at_once=at_once)


def test_waiting_for_a_copy_that_never_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stuck(monkeypatch) as device:
        device.start_step()
        _give(device)
        with pytest.raises(KairoxError, match=r"swap 7, layer 4 of lane h2d.*0\.01 s"):
            device.wait_landed([7])
        device.close()  # does not wait again


def test_ending_a_step_with_a_copy_that_never_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stuck(monkeypatch) as device:
        device.start_step()
        _give(device)
        with pytest.raises(KairoxError, match="swap 7, layer 4 of lane h2d"):
            device.end_step()
        device.close()


def test_copies_at_once_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stuck(monkeypatch) as device:
        with pytest.raises(KairoxError, match=r"swaps \[7\], layer 4 of lane h2d"):
            _give(device, at_once=True)
        device.close()


def test_dropping_copies_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stuck(monkeypatch) as device:
        _give(device)
        with pytest.raises(KairoxError, match=r"swaps \[7\].*kairox-h2d"):
            device.drop_copies()
        device.close()


def test_closing_with_a_copy_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with _stuck(monkeypatch) as device:
        _give(device)
        with pytest.raises(KairoxError, match="close waits for the work given of lane kairox-h2d"):
            device.close()


def test_host_work_that_never_returns() -> None:
    release = threading.Event()

    def work(x: torch.Tensor) -> torch.Tensor:
        release.wait(10)
        return x

    with EmulatedDevice(stuck_after_s=0.01) as device:
        handed = device.hand_over(3, [torch.ones(1, 1)], [work], ONE)
        with pytest.raises(KairoxError, match="part 0 of the residual neurons of layer 3 of lane"):
            device.join(handed)
        release.set()

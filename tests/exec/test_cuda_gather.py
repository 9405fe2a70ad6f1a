"""Rows of a staged promotion are gathered by a thread of their own; the model's thread goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kairox_exec import promote
from kairox_exec.cuda import CudaDevice
from kairox_exec.oplog import Size
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap
from tests.exec.late import LateDevice

ROWS = torch.arange(400.0).view(50, 2, 4)
SIZE = Size(neurons=1, n_tokens=1)


class Held:
    """Lets the gathers of a device begin when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.fail = threading.Event(), False
        self.threads: list[str] = []
        real = torch.index_select

        def index_select(*args: Any, **how: Any) -> torch.Tensor:
            self.threads.append(threading.current_thread().name)
            assert self.go.wait(20)
            if self.fail:
                raise RuntimeError("no such row")
            return real(*args, **how)

        monkeypatch.setattr(promote.torch, "index_select", index_select)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()  # or the thread would outlive the test


@contextmanager
def _device(stuck_after_s: float = 20.0) -> Iterator[tuple[CudaDevice, torch.Tensor]]:
    with (
        LateDevice() as late,
        torch.no_grad(),
        CudaDevice(streams=late, promotion="staged", stuck_after_s=stuck_after_s) as device,
    ):
        yield device, device.new_slots(20, 2, 4)


def _swap(swap_id: int, ids: Sequence[int], slots: Sequence[int]) -> Swap:
    promoted = np.asarray(ids, np.int32)
    return Swap(swap_id, 3, promoted, np.asarray(slots, np.int32), promoted[:0])


def test_the_model_goes_on_while_rows_are_gathered(held: Held) -> None:
    with _device() as (device, slots):
        device.start_step()
        device.copy([_swap(0, [5, 7], [1, 0])], ROWS, slots)
        device.copy([_swap(1, [6], [2])], ROWS, slots)
        device.end(device.begin(), "ffn", 3, SIZE)
        device.end_step()
        assert device.landed() == []
        assert slots[:3].cpu().isnan().all()
        held.go.set()
        device.start_step()
        device.wait_landed([1])
        assert device.landed() == [0, 1]
        device.end_step()
        assert torch.equal(slots[:3].cpu(), ROWS[[7, 5, 6]])
    assert set(held.threads) == {"kairox-gather"}
    assert [op.size.neurons for op in device.ops if op.kind == "swap"] == [2, 1]


def test_copies_are_queued_while_the_model_waits_for_the_host(held: Held) -> None:
    with _device() as (device, slots):
        device.start_step()
        x = device.put(torch.ones(1, 8))
        device.copy([_swap(0, [5], [1])], ROWS, slots)

        def residual(given: torch.Tensor) -> torch.Tensor:
            held.go.set()
            until = threading.Event()
            for _ in range(2000):
                if not device._flights.is_gathering:
                    return given
                until.wait(0.005)
            raise AssertionError("nothing was queued")

        device.join(device.hand_over(3, [x], [residual], SIZE))
        device.end_step()


def test_what_is_copied_at_once_is_there(held: Held) -> None:
    held.go.set()
    with _device() as (device, slots):
        ids = list(range(20))
        swaps = [_swap(i, [i], [19 - i]) for i in ids]
        device.copy(swaps, ROWS, slots, at_once=True)
        assert device.landed() == []
        assert torch.equal(slots.cpu(), ROWS[ids].flip(0))


def test_what_is_dropped_while_it_is_gathered_is_never_copied(held: Held) -> None:
    with _device() as (device, slots):
        device.copy([_swap(0, [5], [1])], ROWS, slots)
        threading.Timer(0.05, held.go.set).start()
        device.drop_copies()
        assert held.go.is_set()  # nothing reads the rows any more
        device.start_step()
        device.end(device.begin(), "ffn", 3, SIZE)
        device.end_step()
        assert device.landed() == []
        assert slots.cpu().isnan().all()


def _wait(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], ROWS, slots)
    device.wait_landed([8])


def _at_once(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], ROWS, slots, at_once=True)


def _drop(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], ROWS, slots)
    device.drop_copies()


@pytest.mark.parametrize("wait", [_wait, _at_once, _drop])
def test_a_gather_that_never_ends_ends_the_run(
    held: Held, wait: Callable[[CudaDevice, torch.Tensor], None]
) -> None:
    with (
        _device(stuck_after_s=0.05) as (device, slots),
        pytest.raises(KairoxError, match=r"gather of swaps \[8\], layer 3 of lane cpu"),
    ):
        wait(device, slots)  # closing does not wait again


def test_closing_finds_a_gather_that_never_ends(held: Held) -> None:
    with (
        pytest.raises(KairoxError, match="close waits for the work given of lane kairox-gather"),
        _device(stuck_after_s=0.05) as (device, slots),
    ):
        device.copy([_swap(8, [1], [0])], ROWS, slots)


@pytest.mark.parametrize("wait", [_wait, _at_once])
def test_a_gather_that_fails_says_so(
    held: Held, wait: Callable[[CudaDevice, torch.Tensor], None]
) -> None:
    held.fail = True
    held.go.set()
    with (
        _device() as (device, slots),
        pytest.raises(RuntimeError, match="kairox-gather failed: no such row"),
    ):
        wait(device, slots)


def test_a_gather_that_fails_is_told_at_the_next_look(held: Held) -> None:
    held.fail = True
    with _device() as (device, slots):
        device.copy([_swap(8, [1], [0])], ROWS, slots)
        held.go.set()
        with pytest.raises(RuntimeError, match="no such row"):
            _look(device)


def _look(device: CudaDevice) -> None:
    for _ in range(2000):
        assert device.landed() == []
        threading.Event().wait(0.005)

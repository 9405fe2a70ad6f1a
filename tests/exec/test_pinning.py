"""Locked pages: once each, refused without leaving an error behind; buffers that are used again."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kairox_exec import streams
from kairox_exec.cuda import CudaDevice
from kairox_exec.pinning import Held
from kairox_sim.events import Swap
from tests.exec.late import LateDevice

PAGE = mmap.PAGESIZE


def _side_by_side(*n_bytes: int) -> list[torch.Tensor]:
    """Rows of so many bytes, one behind the other from the beginning of a page."""
    memory = torch.arange(8 * PAGE, dtype=torch.int64).view(torch.uint8)
    at, found = -memory.data_ptr() % PAGE, []
    for n in n_bytes:
        found.append(memory[at : at + n].view(-1, 2, 32))
        at += n
    return found


def test_rows_of_whole_pages_are_locked_where_they_lie() -> None:
    late = LateDevice()
    held, rows = Held(late), _side_by_side(2 * PAGE, PAGE, 3 * PAGE)
    assert [held.hold(one) is one for one in rows] == [True] * 3
    assert late.locked == [one.data_ptr() for one in rows]
    held.release()
    assert late.locked == []


def test_rows_that_share_a_page_are_copied_and_promoted_right() -> None:
    late = LateDevice()
    first, second, third = _side_by_side(PAGE + 64, 2 * PAGE - 64, PAGE)
    with late, torch.no_grad(), CudaDevice(streams=late, promotion="per_row") as device:
        assert device.hold(first) is first
        copied = device.hold(second)
        assert copied.data_ptr() != second.data_ptr()
        assert torch.equal(copied, second)
        assert device.hold(second) is copied
        assert device.hold(third) is third
        assert late.locked == [first.data_ptr(), third.data_ptr()]
        assert device.status["host_memory"] == "pinned"
        assert device.status["pinned_bytes"] == 4 * PAGE
        slots = device.new_slots(2, 2, 32, torch.uint8)
        ids = np.array([1, 5], np.int32)
        swap = Swap(0, 0, ids, np.array([1, 0], np.int32), ids[:0])
        device.copy([swap], copied, slots, at_once=True)
        assert torch.equal(slots.cpu(), second[[5, 1]])
    assert late.locked == []


class Runtime:
    """CUDA's, refusing; torch's launches find its latest error, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.latest = 0
        monkeypatch.setattr(streams, "_runtime", lambda: self)
        monkeypatch.setattr(streams, "torch", SimpleNamespace(ones=self.launch))

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802  (CUDA's name)
        self.latest = 2
        return 2

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        self.latest = 713
        return 713

    def launch(self, *_: Any, **__: Any) -> None:
        latest, self.latest = self.latest, 0
        if latest:
            raise RuntimeError(f"CUDA error {latest}")


def test_a_refusal_leaves_no_error_for_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = object.__new__(streams.TorchStreams)  # there may be no card
    of_torch.device = torch.device("cpu")
    runtime, rows = Runtime(monkeypatch), torch.zeros(10, 2, 4)
    assert of_torch.lock_pages(rows) == "cudaHostRegister of 320 bytes: CUDA error 2"
    runtime.launch()
    of_torch.unlock_pages(rows)
    runtime.launch()

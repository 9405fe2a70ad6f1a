"""The CUDA device on fake streams: any order that only streams and events restrict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_exec.cuda import CudaDevice, _enough_memory
from kairox_exec.oplog import Size
from kairox_exec.promote import promote_with, runs
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap
from tests.exec.fake_streams import FakeStreams

ONE = Size(neurons=1, n_tokens=1)


def _device(seed: int, way: str = "staged", **how: Any) -> tuple[CudaDevice, FakeStreams]:
    rng = np.random.default_rng(seed)
    streams = FakeStreams(lambda n: int(rng.integers(n)), **how)
    return CudaDevice(streams=streams, way=way), streams


def _swap(swap_id: int, promote: list[int], slots: list[int]) -> Swap:
    ids = np.asarray(promote, np.int32)
    return Swap(swap_id, 0, ids, np.asarray(slots, np.int32), ids[:0])


def _reuse(seed: int, way: str, no_wait: str = "") -> bool:
    """A slow reader of slots, whose slots are overwritten while it may still wait; all is right."""
    device, streams = _device(seed, way, eager=False, no_wait=no_wait)
    rows = torch.arange(32.0).reshape(8, 1, 4)
    slots = device.put(rows[:4])
    seen: list[torch.Tensor] = []
    with device:
        for i in range(4):
            out = torch.full((4, 1, 4), torch.nan)
            streams.compute.run(lambda out=out: out.copy_(slots))
            seen.append(out)
            after = [(j + i + 1) % 8 for j in range(4)]
            device.copy([_swap(i, after, [0, 1, 2, 3])], rows, slots)
            device.wait_landed([i])
            assert device.landed() == [i]
        end = streams.compute.record()
        end.synchronize()
    return all(
        torch.equal(out, rows[[(j + i) % 8 for j in range(4)]]) for i, out in enumerate(seen)
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), way=st.sampled_from(["staged", "per_row"]))
def test_slots_are_reused_only_after_their_last_reader(seed: int, way: str) -> None:
    assert _reuse(seed, way)


@pytest.mark.parametrize("guard", ["promotion", "compute"])
def test_without_a_guard_readers_see_the_wrong_neurons(guard: str) -> None:
    assert not all(_reuse(seed, "staged", guard) for seed in range(30))


def _host(seed: int, no_wait: str = "") -> bool:
    """x is computed on a slow compute stream, goes to the host, and its sums come back."""
    device, streams = _device(seed, eager=False, no_wait=no_wait)
    ok = True
    with device:
        for i in range(4):
            x, out = torch.full((1, 4), torch.nan), torch.full((1, 4), torch.nan)
            streams.compute.run(lambda x=x, i=i: x.fill_(i))
            handed = device.hand_over(0, [x], [lambda t: t * 2], ONE)
            sums = device.join(handed)
            streams.compute.run(lambda out=out, sums=sums: out.copy_(sums))
            streams.compute.record().synchronize()
            ok &= torch.equal(out, torch.full((1, 4), 2.0 * i))
    return ok


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_host_gets_x_and_gives_its_sums(seed: int) -> None:
    assert _host(seed)


@pytest.mark.parametrize("guard", ["critical", "compute"])
def test_without_a_guard_the_sums_are_wrong(guard: str) -> None:
    assert not all(_host(seed, guard) for seed in range(30))


def test_a_swap_that_is_still_on_the_link_has_not_landed_and_is_logged_later() -> None:
    going: list[bool] = []  # until then nothing goes on unless somebody waits for it
    streams = FakeStreams(lambda n: n - 1 if going else 0)
    with CudaDevice(streams=streams) as device:
        rows, slots = torch.ones(2, 1, 4), device.new_slots(2, 1, 4)
        assert slots.isnan().all()
        device.start_step()
        device.copy([_swap(5, [1], [0])], rows, slots)
        device.end(device.begin(), "ffn", 0, ONE)
        assert device.landed() == []
        device.end_step()
        assert [op.kind for op in device.ops] == ["ffn"]
        device._flying[0].after.synchronize()
        assert device.landed() == [5]
        assert torch.equal(slots[0], rows[1])
        device.start_step()
        device.end_step()
        assert [op.kind for op in device.ops] == ["ffn", "swap"]
        assert device.ops[-1].t1_ns > device.ops[-1].t0_ns
        going.append(True)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_runs_cover_every_row_once(ids: list[int], places: list[int]) -> None:
    a, b = np.asarray(ids, np.int32), np.asarray(places, np.int32)
    found = runs(a, b)
    assert [i for first, last in found for i in range(first, last + 1)] == list(range(6))
    for first, last in found:
        assert a[last] - a[first] == b[last] - b[first] == last - first


def test_unknown_ways_and_missing_cards_are_refused() -> None:
    with pytest.raises(KairoxError, match="allowed: uva_gather, staged, per_row"):
        promote_with("mail", FakeStreams(lambda n: 0))
    if not torch.cuda.is_available():
        with pytest.raises(KairoxError, match="torch sees none"):
            CudaDevice()


def test_out_of_memory_says_what_was_asked() -> None:
    asked = pytest.raises(KairoxError, match=r"4,096 were asked for; give fewer --slots")
    with asked, _enough_memory(4096):
        raise torch.OutOfMemoryError("out")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", ["staged", "per_row"])
def test_swaps_on_a_card(way: str) -> None:
    with CudaDevice(way=way) as device:
        rows = device.hold(torch.randn(64, 2, 32))
        slots = device.new_slots(8, 2, 32)
        device.start_step()
        device.copy([_swap(1, [3, 9, 60], [7, 0, 2])], rows, slots)
        device.wait_landed([1])
        assert device.landed() == [1]
        assert torch.equal(slots[[7, 0, 2]].cpu(), rows[[3, 9, 60]])
        device.end_step()

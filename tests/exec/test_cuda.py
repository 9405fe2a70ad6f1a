"""The CUDA device on a device that does its work late: any order that only its guards restrict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kairox_exec import flights
from kairox_exec.cuda import CudaDevice
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.ffn import HybridFFN, LivePipeline
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.host_pool import HostPool
from kairox_exec.kernels import torch_ref
from kairox_exec.layer_step import StepInfo
from kairox_exec.oplog import Size
from kairox_exec.weights import NeuronBundles
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.events import Swap
from kairox_sim.policies import POLICIES
from tests.exec.late import LateDevice
from tests.exec.late_worker import LateWorker

ONE = Size(neurons=1, n_tokens=1)
N_LAYERS, N_NEURONS, D_MODEL = 2, 200, 8
SPEC = FfnSpec(D_MODEL, True, "relu", 0.0, "float32", "deterministic")


def _bundles() -> list[NeuronBundles]:
    draw = torch.Generator().manual_seed(5)
    made = []
    for layer in range(N_LAYERS):
        rows, gate = (torch.randn(s, generator=draw) for s in ((N_NEURONS, 2, 8), (N_NEURONS, 8)))
        bias = torch.randn(D_MODEL, generator=draw)
        made.append(
            NeuronBundles(layer, "exact", SPEC, ("up", "down"), rows, gate, None, None, bias)
        )
    return made


BUNDLES = _bundles()
CHUNKS = (3, 1, 1, 1, 1, 1)


def _states() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(6)
    return [torch.randn(n, D_MODEL, generator=draw) for n in CHUNKS]


@torch.no_grad()
def _resident() -> list[torch.Tensor]:
    """What every step gives with all neurons in one place."""
    every, found = torch.arange(N_NEURONS, dtype=torch.int32), []
    for x in _states():
        for bundle in BUNDLES:
            act = torch_ref.gate_all(x, bundle.gate_w, None, SPEC)
            y = torch_ref.total(torch_ref.ffn_union(x, bundle.rows, every, SPEC, act=act))
            x = torch.tanh(x + (y + bundle.down_b))
        found.append(x)
    return found


RESIDENT = _resident()


def _hybrid(
    late: LateDevice,
    *,
    policy: str = "lru",
    trigger: str = "after",
    slots: int = 60,
    promotion: str = "staged",
    threads: int = 1,
    happened: Counter[str] | None = None,
    stall: bool = False,
    gathers: float | None = None,
) -> list[torch.Tensor]:
    """gathers: how eager the thread is that gathers; None: a real one."""
    cache = NeuronCache(
        N_LAYERS, N_NEURONS, slots, POLICIES[policy](N_LAYERS, N_NEURONS), Fixed(0.3),
        warm=[np.arange(slots // 2)] * N_LAYERS, swap_neurons=7, trigger=trigger,
    )  # fmt: skip
    rng, found = np.random.default_rng(slots), []
    # The device is closed inside: it waits for what it has queued.
    with late, torch.no_grad(), _gathering(gathers), CudaDevice(
        HostPool(threads), streams=late, promotion=promotion, stuck_after_s=5
    ) as device:  # fmt: skip
        pipeline = LivePipeline(
            cache, device, BUNDLES, host_kernels=torch_ref, device_kernels=torch_ref,
            trigger=trigger, late="stall" if stall else "cpu",
            predict=lambda layer, hidden: torch.from_numpy(
                rng.random((hidden.shape[0], N_NEURONS)) < 0.4
            ),
        )  # fmt: skip
        for step, given in enumerate(_states()):
            x = given.to(device.send(np.zeros(1, np.int32)).device)
            pipeline.start_step(
                StepInfo(0, step, "decode", np.zeros(len(given), np.int32), step + 1)
            )
            for layer in range(N_LAYERS):
                if trigger == "attn_in":
                    pipeline.before_layer(layer, x)
                pipeline.after_attention(layer, x)
                x = torch.tanh(x + HybridFFN(pipeline, layer)(x))
            pipeline.end_step()
            found.append(x.cpu())
        device.drop_copies()
        cache.check()
        counts = cache.take_counts()
    if happened is not None:
        happened.update(
            loads=counts.loads, hits=counts.hit_on_time, residual=counts.residual,
            late=counts.late, evictions=counts.evictions,
        )  # fmt: skip
    return found


@contextmanager
def _gathering(eager: float | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() if eager is not None else nullcontext() as patch:
        if patch is not None and eager is not None:
            patch.setattr(flights, "Worker", lambda name: LateWorker(eager))
        yield


def _is_right(found: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, RESIDENT, strict=True))


def test_hybrid_is_the_resident_ffn_in_any_order() -> None:
    happened: Counter[str] = Counter()

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(["lru", "lfu", "tam", "tam_paper", "tam_released", "static"]),
        trigger=st.sampled_from(["attn_in", "attn_out", "serial", "after", "instant"]),
        slots=st.sampled_from([0, 12, 60, 150, N_NEURONS]),
        promotion=st.sampled_from(["staged", "per_row", "auto"]),
        threads=st.sampled_from([1, 2]),
        stall=st.booleans(),
        gathers=st.sampled_from([None, 0.01, 0.1, 0.9]),
    )
    @example(
        seed=0, policy="lru", trigger="attn_out", slots=60, promotion="staged", threads=1,
        stall=False, gathers=0.2,
    )  # fmt: skip
    def same_bits(seed: int, **how: Any) -> None:
        assert _is_right(_hybrid(LateDevice(seed), happened=happened, **how))

    same_bits()
    every = ("loads", "hits", "residual", "late", "evictions")
    assert all(happened[what] for what in every), happened


def _corrupts(without: str, **how: Any) -> bool:
    """Whether some order shows that the guard is gone."""
    for seed in range(30):
        try:
            if not _is_right(_hybrid(LateDevice(seed, without=without), **how)):
                return True
        except (KairoxError, RuntimeError, IndexError):  # NaN in a fixed-point sum; no such slot
            return True
    return False


@pytest.mark.parametrize(
    ("without", "how"),
    [
        ("promotion waits", {"policy": "tam_paper"}),  # C34: a slot used again while it is read
        ("critical waits", {}),  # x leaves before it has been computed
        ("compute waits", {"slots": 0}),  # sums are added before they are there
        ("query", {}),  # swaps are believed to have landed
        ("synchronize", {"slots": 0}),  # the host computes before x is there
        ("ring", {}),  # pinned buffers are used again at once
    ],
)
def test_without_a_guard_outputs_are_wrong(without: str, how: dict[str, Any]) -> None:
    assert _corrupts(without, **how)


def test_without_reading_first_a_plan_overwrites_what_its_layer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaDevice, "reading", lambda self: None)
    assert _corrupts("", policy="tam_paper", promotion="per_row")


def test_without_waiting_for_a_gather_rows_are_copied_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flights.Flight, "is_gathered", property(lambda self: True))
    assert _corrupts("", gathers=0.2)


def test_nothing_that_is_sent_to_the_card_waits_for_it() -> None:
    waits = []

    class Counting(LateDevice):
        def _to_copy(self, source: torch.Tensor, **how: Any) -> torch.Tensor:
            if source.device.type == "cpu" and not how.get("non_blocking"):
                waits.append(tuple(source.shape))
            return super()._to_copy(source, **how)

    assert _is_right(_hybrid(Counting(3), trigger="attn_out", slots=60))
    inputs = [(n, D_MODEL) for n in CHUNKS]  # the test's own
    assert [shape for shape in waits if shape in inputs] == inputs
    # Before the run: gates and biases, and the warm rows and their places.
    assert len(waits) - len(inputs) == N_LAYERS * 4


def test_the_emulated_machine_gives_the_same_bits() -> None:
    with EmulatedDevice() as device:
        x = _states()[1]
        cache = NeuronCache(
            1, N_NEURONS, 50, POLICIES["static"](1, N_NEURONS), Fixed(), pinned=[np.arange(50)]
        )
        pipeline = LivePipeline(
            cache, device, BUNDLES[:1], host_kernels=torch_ref, device_kernels=torch_ref
        )
        pipeline.start_step(StepInfo(0, 0, "decode", np.zeros(1, np.int32), 1))
        y = HybridFFN(pipeline, 0)(x)
    bundle = BUNDLES[0]
    act = torch_ref.gate_all(x, bundle.gate_w, None, SPEC)
    every = torch.arange(N_NEURONS, dtype=torch.int32)
    whole = torch_ref.total(torch_ref.ffn_union(x, bundle.rows, every, SPEC, act=act))
    assert torch.equal(y, whole + bundle.down_b)


# -- ops and status --------------------------------------------------------------------------------


def _swap(swap_id: int, promote: list[int], slots: list[int], layer: int = 3) -> Swap:
    ids = np.asarray(promote, np.int32)
    return Swap(swap_id, layer, ids, np.asarray(slots, np.int32), ids[:0])


@contextmanager
def _device(late: LateDevice | None = None, **how: Any) -> Iterator[tuple[CudaDevice, LateDevice]]:
    late = late or LateDevice()
    with late, torch.no_grad(), CudaDevice(streams=late, **how) as device:
        yield device, late


def test_swaps_of_a_plan_are_copied_together_and_land_in_order() -> None:
    rows = torch.randn(400, 2, 4)
    with _device(promotion="staged") as (device, _):
        slots = device.new_slots(300, 2, 4)
        device.start_step()
        device.think()
        device.copy(
            [
                _swap(i, list(range(20 * i, 20 * i + 20)), list(range(20 * i, 20 * i + 20)))
                for i in range(10)
            ],
            rows,
            slots,
        )
        device.thought(3, Size(n_swaps=10))
        device.wait_landed([2])
        landed = device.landed()
        assert landed[:7] == list(range(7))  # 7 x 20 neurons: the first batch of 128 or more
        device.wait_landed([9])
        assert landed + device.landed() == list(range(10))
        device.end_step()
        assert torch.equal(slots[:200].cpu(), rows[:200])
        assert slots[200:].cpu().isnan().all()
    copies = [op.size for op in device.ops if op.kind == "swap"]
    assert copies == [Size(neurons=140, n_bytes=140 * 32.0, n_swaps=7),
                      Size(neurons=60, n_bytes=60 * 32.0, n_swaps=3)]  # fmt: skip


def test_a_swap_still_on_the_link_is_logged_in_a_later_step() -> None:
    late = LateDevice(stuck="promotion")
    with _device(late, promotion="per_row") as (device, _):
        rows, slots = torch.randn(4, 2, 4), device.new_slots(4, 2, 4)
        device.start_step()
        device.copy([_swap(0, [1], [2])], rows, slots)
        device.end_step()
        assert not [op for op in device.ops if op.kind == "swap"]
        assert device.landed() == []
        late.stuck = ""
        device.start_step()
        device.wait_landed([0])
        device.end_step()
        assert [op.layer for op in device.ops if op.kind == "swap"] == [3]


def test_where_the_gpu_ran_dry_for_a_decision_is_logged() -> None:
    with _device() as (device, _):
        device.start_step()
        device.think()
        device.thought(5, Size())
        device.end(device.begin(), "ffn", 5, ONE)
        device.end_step()
        (decide,) = [op for op in device.ops if op.lane == "planner"]
        idle = [op for op in device.ops if (op.lane, op.kind) == ("idle", "decide")]
        assert idle
        assert all(op.layer == 5 for op in idle)
        assert all(decide.t0_ns <= op.t0_ns < op.t1_ns <= decide.t1_ns for op in idle)


def test_rows_are_locked_once_and_let_go() -> None:
    rows = torch.randn(600, 2, 4)
    with _device() as (device, late):
        assert device.hold(rows) is rows
        device.hold(rows)
        assert late.locked == [rows.data_ptr()]
        status = device.status
        assert status["host_memory"] == "pinned"
        assert status["pinned_bytes"] == rows.numel() * 4
        assert status["promotion"] in ("staged", "per_row")
        measured = {key for key in status if key.endswith("_bytes_per_s")}
        assert measured == {f"promotion_{w}_bytes_per_s" for w in ("staged", "per_row")}
    assert late.locked == []


def test_refused_pages_are_said_and_bar_the_gpu_from_reading_them() -> None:
    rows = torch.randn(10, 2, 4)
    with _device(LateDevice(refuse="error 2"), promotion="staged") as (device, _):
        device.hold(rows)
        assert device.status["host_memory"] == "pageable: error 2"
        assert device.status["pageable_bytes"] == rows.numel() * 4
    with (
        _device(LateDevice(refuse="error 2"), promotion="uva_gather") as (device, _),
        pytest.raises(KairoxError, match=r"pageable: error 2; raise.*staged or per_row"),
    ):
        device.hold(rows)


def test_missing_cards_and_unknown_promotions_are_refused() -> None:
    with pytest.raises(KairoxError, match="allowed: auto, uva_gather, staged, per_row"):
        CudaDevice(streams=LateDevice(), promotion="mail")
    if not torch.cuda.is_available():
        with pytest.raises(KairoxError, match="torch sees none"):
            CudaDevice()


def test_out_of_memory_says_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out")

    with _device() as (device, _):
        monkeypatch.setattr(torch, "empty", out_of)
        with pytest.raises(KairoxError, match=r"1,000 bytes free and 24,576 more.*--slots"):
            device.new_slots(1024, 2, 3)
        monkeypatch.undo()


# -- the watchdog ----------------------------------------------------------------------------------


def _wait_landed(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], torch.randn(4, 2, 4), slots)
    device.wait_landed([8])


def _drop(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], torch.randn(4, 2, 4), slots)
    device.drop_copies()


def _at_once(device: CudaDevice, slots: torch.Tensor) -> None:
    device.copy([_swap(8, [1], [0])], torch.randn(4, 2, 4), slots, at_once=True)


@pytest.mark.parametrize(
    ("stuck", "wait", "says"),
    [
        ("promotion", _wait_landed, r"swaps \[8\], layer 3 of lane h2d"),
        ("promotion", _at_once, r"swaps \[8\], layer 3 of lane h2d"),
        ("promotion", _drop, r"the end of the run waits for swaps \[8\]"),
        ("compute", lambda device, _: device.start_step(), "the step's start"),
    ],
)
def test_what_never_ends_ends_the_run(
    stuck: str, wait: Callable[[CudaDevice, torch.Tensor], None], says: str
) -> None:
    with _device(promotion="per_row", stuck_after_s=0.01) as (device, late):
        slots = device.new_slots(2, 2, 4)
        late.stuck = stuck
        with pytest.raises(KairoxError, match=says):
            wait(device, slots)
        # Closing does not wait again.


def test_closing_with_work_that_never_ends() -> None:
    with LateDevice() as late:
        device = CudaDevice(streams=late, stuck_after_s=0.01)
        late.stuck = "promotion"
        with pytest.raises(KairoxError, match="close waits for what was queued"):
            device.close()


def test_a_step_that_never_ends() -> None:
    with _device(stuck_after_s=0.01) as (device, late):
        device.start_step()
        late.stuck = "compute"
        device.end(device.begin(), "ffn", 0, ONE)
        with pytest.raises(KairoxError, match="the step's end waits"):
            device.end_step()

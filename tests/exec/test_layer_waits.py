"""What a live run tells controllers that act per layer, and gate G1 with their policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.gates import g1
from kairox_exec.runner import load
from kairox_sim.cache import NeuronCache
from kairox_sim.calllog import CallLogWriter, call_log_header, read_call_log, rebuild
from kairox_sim.controllers import AnbPaper, Controller, Fixed, SwapCap
from kairox_sim.costs import costs_for
from kairox_sim.events import Cancelled, Committed, Event, LookedUp, Planned, StepEnded
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import Known, Policy, build_policy

N_LAYERS, N_NEURONS = 6, 896
TOKENS = np.random.default_rng(5).integers(0, 1024, 20).astype(np.int32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Landing:
    """The unpaced device, on which every copy has landed at a poll, or none ever does."""

    def __init__(self, *, at_once: bool) -> None:
        self._device, self._at_once = EmulatedDevice(), at_once
        self._waiting: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @property
    def ops(self) -> Any:
        return self._device.ops

    @ops.setter
    def ops(self, value: Any) -> None:
        self._device.ops = value

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *error: object) -> None:
        self._device.close()

    def copy(self, swaps: Any, *args: Any, **given: Any) -> None:
        self._waiting += [swap.id for swap in swaps]
        self._device.copy(swaps, *args, **given)

    def landed(self) -> list[int]:
        if not self._at_once:
            return []
        self._device.wait_landed(self._waiting)
        self._waiting = []
        self.ops = [op for op in self.ops if (op.lane, op.kind) != ("idle", "io")]
        return self._device.landed()  # type: ignore[no-any-return]


def _policy(name: str) -> Policy:
    return build_policy(name, N_LAYERS, N_NEURONS, Known(gpu_over_cpu=8.0))


def _run(
    model_dir: Path,
    device: Any,
    policy: str,
    controller: Controller,
    *,
    slots: int = 150,
    late: str = "cpu",
    trigger: str = "attn_out",
    wrap: Callable[[NeuronCache], Callable[[Event], None]] | None = None,
) -> list[Event]:
    """What the cache of a short run was asked, and answered."""
    events: list[Event] = []

    def build(n_layers: int, n_neurons: int) -> NeuronCache:
        cache = NeuronCache(
            n_layers, n_neurons, slots, _policy(policy), controller, swap_neurons=16,
            trigger=trigger, warm=[range(slots)] * n_layers,
        )  # fmt: skip
        write = None if wrap is None else wrap(cache)

        def tell(event: Event) -> None:
            events.append(event)
            if write is not None:
                write(event)

        cache.journal = tell
        return cache

    with load(model_dir, build, device, trigger=trigger, late=late) as runner:
        for _ in runner.run([TOKENS], prefill=8, prefill_chunk=8):
            pass
    return events


def _steps(events: list[Event]) -> list[StepEnded]:
    return [event for event in events if isinstance(event, StepEnded)]


def _late_layers(events: list[Event]) -> list[list[bool]]:
    """[n_steps][n_layers] whether copies of the layer were in flight at its lookup."""
    flying: dict[int, int] = {}  # swap id -> layer
    found, step = [], [False] * N_LAYERS
    for event in events:
        match event:
            case Planned(layer, _, _, swaps, _):
                flying |= {swap.id: layer for swap in swaps}
            case Committed(swap_ids):
                for swap_id in swap_ids:
                    del flying[swap_id]
            case Cancelled(swap_id, _):
                del flying[swap_id]
            case LookedUp():
                step[event.layer] = event.layer in flying.values()
            case StepEnded():
                found.append(step)
                step = [False] * N_LAYERS
    return found


def _slow_link() -> EmulatedDevice:
    """Paced, and a copy takes far longer than a layer."""
    costs = costs_for(
        load_profile("emu-pc1"), find_shape("tiny-reglu"), "exact", trace_layers=N_LAYERS,
        trace_neurons=N_NEURONS, predictor="lookahead",
    )  # fmt: skip
    return EmulatedDevice(replace(costs, h2d_copy_fixed_s=5e-3))


def test_a_layer_whose_copies_are_in_flight_at_its_ffn_waited(tiny_reglu_dir: Path) -> None:
    with Landing(at_once=False) as device:
        events = _run(tiny_reglu_dir, device, "tam_released", Fixed())
    late = _late_layers(events)
    assert [end.layers.io.tolist() for end in _steps(events)] == late  # type: ignore[union-attr]
    assert not any(late[0][:1])  # layer 0 has no plan before its first FFN
    assert all(late[-1])


def test_a_layer_whose_copies_have_landed_did_not(tiny_reglu_dir: Path) -> None:
    with Landing(at_once=True) as device:
        events = _run(tiny_reglu_dir, device, "tam_released", Fixed())
    assert sum(len(e.swap_ids) for e in events if isinstance(e, Committed)) > 100
    assert not np.array(_late_layers(events)).any()


@pytest.mark.parametrize("trigger", ["attn_out", "serial", "after", "instant"])
def test_waits_of_the_layers_are_those_of_the_step(tiny_reglu_dir: Path, trigger: str) -> None:
    """Paced: every second the GPU waits for the host, or for swaps, is some layer's."""
    with _slow_link() as device:
        events = _run(
            tiny_reglu_dir, device, "topk", Fixed(), trigger=trigger, late="stall", slots=60
        )
    ends = _steps(events)
    assert len(ends) == 13
    assert all(end.layers is not None for end in ends)
    for end in ends:
        assert end.layers is not None
        assert end.layers.cpu_s.shape == end.layers.io.shape == (N_LAYERS,)
        assert end.layers.cpu_s.sum() == pytest.approx(end.record.wait_cpu_s, rel=1e-9, abs=1e-12)
        assert (end.layers.cpu_s >= 0).all()
        # Whoever stalls has nothing in flight at the lookup; that it waited is known all the same.
        assert end.layers.io.any() == (end.record.wait_io_s > 0)
    assert sum(end.record.wait_cpu_s for end in ends) > 0
    waited = any(end.layers.io.any() for end in ends)  # type: ignore[union-attr]
    assert waited == (trigger in ("attn_out", "serial", "after"))


def test_the_swap_cap_falls_where_copies_are_late_and_stays_where_they_land(
    tiny_reglu_dir: Path,
) -> None:
    """Ten swaps fill the slots: late int(9.5), int(8.55), ... ; landed int(10.5) = 10."""
    with Landing(at_once=False) as device:
        late = _run(tiny_reglu_dir, device, "tam_released", SwapCap())
    caps = [end.knobs.max_swaps for end in _steps(late)]
    for layer in range(1, N_LAYERS):
        assert [cap[layer] for cap in caps[:9]] == [9, 8, 7, 6, 5, 4, 3, 2, 1]  # type: ignore[index]
    assert [cap[0] for cap in caps[:3]] == [10, 9, 8]  # type: ignore[index]
    with Landing(at_once=True) as device:
        landed = _run(tiny_reglu_dir, device, "tam_released", SwapCap())
    assert {end.knobs.max_swaps for end in _steps(landed)} == {(10,) * N_LAYERS}


def test_decay_rises_where_copies_are_late(tiny_reglu_dir: Path) -> None:
    with Landing(at_once=False) as device:
        events = _run(tiny_reglu_dir, device, "tam_released", AnbPaper())
    ends = _steps(events)
    expected = [0.5] * N_LAYERS
    for end in ends:
        assert end.layers is not None
        assert end.layers.io[1:].all()
        for layer in range(N_LAYERS):
            if end.layers.io[layer]:
                expected[layer] = min(expected[layer] * (1 + 0.05), 0.95)
            elif end.layers.cpu_s[layer] > 0:
                expected[layer] = max(expected[layer] * (1 - 0.05), 0.05)
        assert end.knobs.decay == tuple(expected)


@pytest.mark.parametrize(
    ("policy", "controller", "late"),
    [
        ("tam_paper", AnbPaper, "stall"),
        ("tam_released", SwapCap, "stall"),
        ("tam_released", AnbPaper, "cpu"),
        ("topk", SwapCap, "stall"),
        ("qinfer", Fixed, "cpu"),
    ],
)
def test_g1_with_knobs_per_layer(
    tiny_reglu_dir: Path, tmp_path: Path, policy: str, controller: type[Controller], late: str
) -> None:
    """The log alone, waits and knobs of every layer in it, repeats every decision."""
    path = tmp_path / "calls.arrow"
    writers: list[CallLogWriter] = []

    def opened(cache: NeuronCache) -> Callable[[Event], None]:
        writers.append(CallLogWriter(path, call_log_header(cache, {"policy": policy})))
        return writers[0].write

    with _slow_link() as device:
        told = _run(tiny_reglu_dir, device, policy, controller(), late=late, slots=60, wrap=opened)
    writers[0].close()
    header, events = read_call_log(path)
    assert len(events) == len(told)
    fresh = rebuild(header, _policy(policy), controller())
    again = g1(events, fresh)
    assert again.differences == []
    assert again.steps == 13
    assert min(again.loads, again.evictions, again.hits, again.residuals) > 100
    if fresh.controller.sets:
        assert len({end.knobs for end in _steps(events)}) > 3
    forgotten = [
        StepEnded(e.record, None, e.knobs) if isinstance(e, StepEnded) else e for e in events
    ]
    if fresh.controller.sets & {"decay", "max_swaps"}:
        without = g1(forgotten, rebuild(header, _policy(policy), controller())).differences
        assert any("was not told what each layer waited for" in str(d.replayed) for d in without)

"""G0: the hybrid FFN is the dense FFN: every family, any residency, landings and predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from kairox_exec.activations import FatRelu
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import FAMILIES
from kairox_exec.ffn import HybridFFN, LivePipeline
from kairox_exec.kernels import numba_cpu, torch_ref
from kairox_exec.layer_step import LayerStep, StepInfo
from kairox_exec.weights import bundle_layer
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES

N_LAYERS, N_NEURONS, D_MODEL = 3, 40, 16
LLAMA, OPT = (next(f for f in FAMILIES if f.name == name) for name in ("llama", "opt"))
TRIGGERS = ("attn_in", "attn_out", "serial", "after", "instant")

# Sums in another order: 40 products of about 1, so a few float32 ulps of the largest term.
TOLERANCE = 1e-5


def _layers(family: str, threshold: float, seed: int) -> list[nn.Module]:
    """Stand-alone decoder layers that have only an FFN, with biases wherever the family allows."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(N_LAYERS):
        layer: nn.Module = nn.Module()
        if family == "llama":
            layer.mlp = nn.Module()
            for name, shape in (
                ("gate_proj", (D_MODEL, N_NEURONS)),
                ("up_proj", (D_MODEL, N_NEURONS)),
                ("down_proj", (N_NEURONS, D_MODEL)),
            ):
                layer.mlp.add_module(name, nn.Linear(*shape))
            layer.mlp.act_fn = FatRelu(threshold)
        else:
            layer.fc1, layer.fc2 = nn.Linear(D_MODEL, N_NEURONS), nn.Linear(N_NEURONS, D_MODEL)
            layer.activation_fn = FatRelu(threshold)
        layers.append(layer.requires_grad_(False))
    return layers


def _dense(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(layer, "mlp"):
        mlp = layer.mlp
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    return layer.fc2(layer.activation_fn(layer.fc1(x)))


class SlowToLand:
    """A device whose landings are reported as late as a coin says, in issue order."""

    def __init__(self, rng: np.random.Generator, p_land: float) -> None:
        self._device, self._rng, self._p_land = EmulatedDevice(), rng, p_land
        self._waiting: list[int] = []
        self._must: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def landed(self) -> list[int]:
        self._waiting += self._device.landed()
        n = int(self._rng.binomial(len(self._waiting), self._p_land))
        waited = [i for i, swap_id in enumerate(self._waiting) if swap_id in self._must]
        n = max([n, *(i + 1 for i in waited)])
        landed, self._waiting = self._waiting[:n], self._waiting[n:]
        return landed

    def wait_landed(self, swap_ids: Sequence[int]) -> None:
        self._must |= set(swap_ids)
        self._device.wait_landed([i for i in swap_ids if i not in self._waiting])


def _run(
    *,
    family: str,
    threshold: float,
    gating: str,
    policy: str,
    trigger: str,
    late: str,
    slots: Sequence[int],
    chunks: Sequence[int],
    p_land: float,
    numba: bool,
    seed: int,
) -> Counter[str]:
    """A few steps of a pipeline, every FFN output compared; what happened on the way."""
    rng = np.random.default_rng(seed)
    layers = _layers(family, threshold, seed)
    row = LLAMA if family == "llama" else OPT
    bundles = [
        bundle_layer(m, row, layer=i, gating=gating, threshold=threshold)
        for i, m in enumerate(layers)
    ]
    cache = NeuronCache(
        N_LAYERS, N_NEURONS, slots, POLICIES[policy](N_LAYERS, N_NEURONS), Fixed(0.3),
        warm=[rng.permutation(N_NEURONS)[: s // 2] for s in slots], swap_neurons=3,
        trigger=trigger, observes="active" if trigger == "after" else "predicted",
    )  # fmt: skip
    steps: list[LayerStep] = []
    device = SlowToLand(rng, p_land)
    pipeline = LivePipeline(
        cache, device, bundles, host_kernels=numba_cpu if numba else torch_ref,
        device_kernels=torch_ref, trigger=trigger, late=late, on_layer=steps.append,
        # Wrong on purpose: any prediction must do.
        predict=lambda layer, hidden: torch.from_numpy(
            rng.random((hidden.shape[0], N_NEURONS)) < 0.3
        ),
    )  # fmt: skip
    for step, n_tokens in enumerate(chunks):
        info = StepInfo(0, step, "decode", np.zeros(n_tokens, np.int32), step + 1)
        pipeline.start_step(info)
        for layer, module in enumerate(layers):
            x = torch.from_numpy(rng.standard_normal((n_tokens, D_MODEL), np.float32))
            if trigger == "attn_in":
                pipeline.before_layer(layer, x)
            pipeline.after_attention(layer, x)
            dense, hybrid = _dense(module, x), HybridFFN(pipeline, layer)(x)
            scale = max(1.0, float(dense.abs().max()))
            assert (hybrid - dense).abs().max() <= TOLERANCE * scale
        pipeline.end_step()
        cache.check()
    counts = cache.take_counts()
    assert counts.evaluated == counts.hit_on_time + counts.residual
    device.drop_copies()
    device.close()
    assert [s.layer for s in steps] == list(range(N_LAYERS)) * len(chunks)
    return Counter(
        swaps=counts.loads, hits=counts.hit_on_time, residuals=counts.residual,
        late=counts.late, evictions=counts.evictions, wasted=counts.wasted,
    )  # fmt: skip


def test_g0_hybrid_equals_dense() -> None:
    happened: Counter[str] = Counter()

    @settings(max_examples=50, deadline=None)
    @given(
        family=st.sampled_from(["llama", "opt"]),
        threshold=st.sampled_from([0.0, 0.2]),
        gating=st.sampled_from(["exact", "oracle"]),
        policy=st.sampled_from(["lru", "lfu", "tam", "static"]),
        trigger=st.sampled_from(TRIGGERS),
        late=st.sampled_from(["cpu", "stall"]),
        slots=st.lists(st.integers(0, N_NEURONS + 2), min_size=N_LAYERS, max_size=N_LAYERS),
        chunks=st.lists(st.sampled_from([1, 1, 1, 4]), min_size=3, max_size=8),
        p_land=st.sampled_from([0.0, 0.5, 1.0]),
        numba=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    @example(
        family="llama", threshold=0.2, gating="exact", policy="lru", trigger="attn_out",
        late="cpu", slots=[20] * N_LAYERS, chunks=[4] + [1] * 9, p_land=0.5, numba=False, seed=0,
    )  # fmt: skip
    def any_residency(**drawn: Any) -> None:
        happened.update(_run(**drawn))

    any_residency()
    for what in ("swaps", "hits", "residuals", "late", "evictions", "wasted"):
        assert happened[what] > 10, happened


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("slots", [0, N_NEURONS])
def test_g0_at_the_bounds(family: str, slots: int) -> None:
    happened = _run(
        family=family, threshold=0.0, gating="exact", policy="lru", trigger="serial", late="cpu",
        slots=[slots] * N_LAYERS, chunks=[4, 1, 1, 1, 1, 1], p_land=1.0, numba=True, seed=3,
    )  # fmt: skip
    assert bool(happened["residuals"]) == (slots == 0 or happened["swaps"] > 0)
    assert bool(happened["hits"]) == (slots > 0)


def test_a_slot_that_was_never_filled_shows() -> None:
    """The other way round: without its copy the output is not merely a little off."""
    layers = _layers("llama", 0.0, 0)
    bundles = [bundle_layer(layers[0], LLAMA, layer=0, gating="exact", threshold=0.0)]
    cache = NeuronCache(
        1, N_NEURONS, N_NEURONS, POLICIES["lru"](1, N_NEURONS), Fixed(), trigger="after"
    )
    with EmulatedDevice() as device:
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref,
            trigger="after",
        )  # fmt: skip
        cache.state[0] = 2  # a lie: resident, though nothing was copied
        cache.slot_of[0] = np.arange(N_NEURONS)
        assert pipeline.ffn(0, torch.randn(1, D_MODEL)).isnan().all()


# -- the order of a layer-step ---------------------------------------------------------------------


def _order(trigger: str, *, policy: str = "lru", always_predict: bool = False) -> list[str]:
    """Two decode steps of two layers: cache calls and device ops, in order."""
    layers = _layers("opt", 0.0, 1)[:2]
    bundles = [
        bundle_layer(m, OPT, layer=i, gating="exact", threshold=0.0) for i, m in enumerate(layers)
    ]
    calls: list[str] = []

    def journal(event: Any) -> None:
        calls.append(f"{type(event).__name__} {getattr(event, 'layer', '')}".strip())

    cache = NeuronCache(
        2, N_NEURONS, 8, POLICIES[policy](2, N_NEURONS), Fixed(), trigger=trigger, journal=journal
    )
    with EmulatedDevice() as device:
        logged = device._log

        def log(op: Any) -> None:
            logged(op)
            if op.lane == "gpu":
                calls.append(f"{op.kind} {op.layer}")

        device._log = log  # type: ignore[method-assign]
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref,
            trigger=trigger, late="cpu", always_predict=always_predict,
            predict=lambda layer, hidden: torch.ones(1, N_NEURONS, dtype=torch.bool),
        )  # fmt: skip
        for step in range(2):
            pipeline.start_step(StepInfo(0, step, "decode", np.zeros(1, np.int32), step + 1))
            for layer in range(2):
                x = torch.randn(1, D_MODEL)
                if trigger == "attn_in":
                    pipeline.before_layer(layer, x)
                pipeline.after_attention(layer, x)
                pipeline.ffn(layer, x)
            pipeline.end_step()
    short = {"Planned": "plan", "Committed": "commit", "LookedUp": "lookup"}
    return [" ".join([short.get(c.split()[0], c.split()[0]), *c.split()[1:]]) for c in calls]


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (
            "attn_in",
            "predict 1, plan 1, attention 0, gate 0, commit, lookup 0, ffn 0, "
            "attention 1, gate 1, commit, lookup 1, ffn 1, plan 0, head -1",
        ),
        (
            "attn_out",
            "attention 0, predict 1, plan 1, gate 0, commit, lookup 0, ffn 0, "
            "attention 1, gate 1, commit, lookup 1, ffn 1, plan 0, head -1",
        ),
        (
            "serial",
            "attention 0, predict 0, plan 0, gate 0, commit, lookup 0, ffn 0, "
            "attention 1, predict 1, plan 1, gate 1, commit, lookup 1, ffn 1, head -1",
        ),
        (
            "after",
            "attention 0, gate 0, commit, lookup 0, plan 0, ffn 0, "
            "attention 1, gate 1, commit, lookup 1, plan 1, ffn 1, head -1",
        ),
        (
            "instant",
            "attention 0, gate 0, plan 0, commit, lookup 0, ffn 0, "
            "attention 1, gate 1, plan 1, commit, lookup 1, ffn 1, head -1",
        ),
    ],
)
def test_order_of_a_step(trigger: str, expected: str) -> None:
    assert _order(trigger) == expected.split(", ") * 2


def test_a_policy_that_never_plans_pays_for_no_predictor() -> None:
    expected = "attention 0, gate 0, commit, lookup 0, ffn 0, attention 1, gate 1, commit, "
    expected += "lookup 1, ffn 1, head -1"
    assert _order("after", policy="static") == expected.split(", ") * 2
    assert _order("attn_out", policy="static") == expected.split(", ") * 2
    with_prediction = _order("attn_out", policy="static", always_predict=True)
    assert with_prediction.count("predict 1") == 2
    assert not [call for call in with_prediction if call.startswith("plan")]


def test_layer_0_is_planned_from_the_last_token() -> None:
    """After a chunk, what its last token evaluated in layer 0 stands in, with no share."""
    layers = _layers("llama", 0.0, 2)[:2]
    bundles = [
        bundle_layer(m, LLAMA, layer=i, gating="exact", threshold=0.0) for i, m in enumerate(layers)
    ]
    events: list[Any] = []
    cache = NeuronCache(
        2, N_NEURONS, 8, POLICIES["lru"](2, N_NEURONS), Fixed(), trigger="attn_out",
        journal=events.append,
    )  # fmt: skip
    seen: list[LayerStep] = []
    with EmulatedDevice() as device:
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref,
            trigger="attn_out", on_layer=seen.append,
            predict=lambda layer, hidden: torch.arange(N_NEURONS) % 4 < torch.arange(3)[:, None],
        )  # fmt: skip
        pipeline.start_step(StepInfo(0, 0, "prefill", np.zeros(3, np.int32), 3))
        for layer in range(2):
            pipeline.after_attention(layer, torch.randn(3, D_MODEL))
            pipeline.ffn(layer, torch.randn(3, D_MODEL))
        assert not seen  # outside the step's time
        pipeline.end_step()
    plans = [event for event in events if type(event).__name__ == "Planned"]
    assert [plan.layer for plan in plans] == [1, 0]
    # Tokens 0, 1, 2 predict 0, 1, 2 of every 4 neurons: ids 0 and 1 mod 4, shares 2/3 and 1/3.
    assert plans[0].predicted.tolist() == [i for i in range(N_NEURONS) if i % 4 < 2]
    assert plans[0].share.tolist() == pytest.approx([2 / 3, 1 / 3] * 10)
    assert plans[1].predicted.tolist() == np.flatnonzero(seen[0].active[2]).tolist()
    assert plans[1].share is None
    lookup = next(event for event in events if type(event).__name__ == "LookedUp")
    fired = seen[0].active.sum(0)
    assert lookup.evaluated.tolist() == np.flatnonzero(fired).tolist()
    assert lookup.share.tolist() == pytest.approx((fired[fired > 0] / 3).tolist())
    assert seen[0].predicted is None
    assert seen[1].predicted is not None
    assert seen[1].predicted.shape == (3, N_NEURONS)


def test_host_works_while_the_device_does() -> None:
    """A layer-step with both sides: x goes down, then both run, then the sums come back."""
    layers = _layers("llama", 0.0, 4)
    bundles = [
        bundle_layer(m, LLAMA, layer=i, gating="exact", threshold=0.0) for i, m in enumerate(layers)
    ]
    cache = NeuronCache(
        N_LAYERS, N_NEURONS, 20, POLICIES["static"](N_LAYERS, N_NEURONS), Fixed(),
        pinned=[range(20), range(20), []],
    )  # fmt: skip
    with EmulatedDevice() as device:
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref
        )
        pipeline.start_step(StepInfo(0, 0, "decode", np.zeros(1, np.int32), 1))
        pipeline.ffn(0, torch.randn(1, D_MODEL))
        ops = {(op.lane, op.kind): op for op in device.ops}
    x, residual, ffn = ops["d2h", "x"], ops["cpu", "residual"], ops["gpu", "ffn"]
    back = ops["h2d", "partial sums"]
    assert x.t1_ns <= residual.t0_ns
    assert x.t1_ns <= ffn.t0_ns
    assert max(residual.t1_ns, ffn.t1_ns) <= back.t0_ns
    assert ffn.size.neurons + residual.size.neurons == cache.take_counts().evaluated
    ordered = [ops[key] for key in (("gpu", "gate"), ("d2h", "x"), ("gpu", "ffn"))]
    assert all(a.t1_ns <= b.t0_ns for a, b in pairwise(ordered))


def test_a_whole_layer_hands_nothing_over() -> None:
    layers = _layers("llama", 0.0, 5)[:1]
    bundles = [bundle_layer(layers[0], LLAMA, layer=0, gating="exact", threshold=0.0)]
    cache = NeuronCache(
        1, N_NEURONS, N_NEURONS, POLICIES["all"](1, N_NEURONS), Fixed(), pinned=[range(N_NEURONS)]
    )
    with EmulatedDevice() as device:
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref
        )
        pipeline.ffn(0, torch.randn(1, D_MODEL))
        assert {op.lane for op in device.ops} == {"gpu"}


# -- refusals --------------------------------------------------------------------------------------


def _pipeline(**changed: Any) -> LivePipeline:
    costs = changed.pop("costs", None)
    gating = changed.pop("gating", "exact")
    trigger = changed.pop("cache_trigger", "attn_out")
    n_neurons = changed.pop("n_neurons", N_NEURONS)
    layers = _layers("llama", 0.0, 0)[:1]
    bundles = [bundle_layer(layers[0], LLAMA, layer=0, gating=gating, threshold=0.0)]
    cache = NeuronCache(1, n_neurons, 4, POLICIES["lru"](1, n_neurons), Fixed(), trigger=trigger)
    device: Any = SimpleNamespace(costs=costs)
    given = {"trigger": "attn_out", "predict": lambda layer, hidden: hidden} | changed
    return LivePipeline(
        cache, device, bundles, host_kernels=torch_ref, device_kernels=torch_ref, **given
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gating": "predicted", "predict": None}, "what a predictor says and none was given"),
        ({"n_neurons": 7}, "cache has 1 layers of 7 neurons, the model 1 of 40"),
        ({"cache_trigger": "after"}, "another trigger than 'attn_out'"),
        ({"predict": None}, "needs a predictor"),
        ({"late": "cancel"}, "built in the simulator only: a live copy cannot be taken back"),
        (
            {"costs": SimpleNamespace(gating="oracle", swap_neurons=16, predictor="none")},
            "costs are for gating 'oracle'",
        ),
        (
            {"costs": SimpleNamespace(gating="exact", swap_neurons=1, predictor="lookahead")},
            "swap_neurons = 1",
        ),
        (
            {"costs": SimpleNamespace(gating="exact", swap_neurons=16, predictor="none")},
            "predictor = 'lookahead'",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(KairoxError, match=message):
        _pipeline(**changed)

"""Seconds: units, what is charged when, stand-ins, what scales with what, and the memory plan."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_sim.costs import CostModel, costs_for, fits, max_slots
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    HardwareProfile,
    Quantity,
    bundled_profiles,
    load_link,
    load_profile,
    scaled,
    with_link,
)
from kairox_sim.model import CATALOGUE, GATINGS, ModelShape

PC1 = load_profile("pc1")
PROSPARSE = CATALOGUE["prosparse-7b"]
OPT = CATALOGUE["opt-6.7b"]
TINY = CATALOGUE["tiny-reglu"]

# Every cost in seconds, as a function of (neurons of the trace, tokens).
SECONDS: dict[str, Callable[[CostModel, int, int], float]] = {
    "attention": lambda c, n, t: c.attention_s(t, n + t),
    "gate": lambda c, n, t: c.gate_s(t),
    "predict": lambda c, n, t: c.predict_s(t),
    "head": lambda c, n, t: c.head_s(t),
    "ffn_gpu": lambda c, n, t: c.ffn_gpu_s(n, t),
    "ffn_cpu": lambda c, n, t: c.ffn_cpu_s(n, t),
    "swap": lambda c, n, t: c.swap_s(n),
    "swap_fixed": lambda c, n, t: c.swap_fixed_s(n),
    "act_d2h": lambda c, n, t: c.act_d2h_s(t),
    "act_h2d": lambda c, n, t: c.act_h2d_s(t),
    "handover": lambda c, n, t: c.handover_s,
}
GATING_PREDICTOR = [
    (gating, predictor)
    for gating in GATINGS
    for predictor in ("rank", "lookahead", "none")
    if (gating, predictor) != ("predicted", "none")
]


def costs(
    profile: HardwareProfile = PC1,
    shape: ModelShape = PROSPARSE,
    gating: str = "exact",
    **changes: Any,
) -> CostModel:
    """Costs of a shape at its own size unless `changes` say otherwise."""
    return costs_for(
        profile,
        shape,
        gating,
        **{"trace_layers": shape.n_layers, "trace_neurons": shape.n_neurons, **changes},
    )


def rate(profile: HardwareProfile, path: str, factor: float) -> HardwareProfile:
    """The profile with one number multiplied; `path` is `field` or `part.field`."""
    head, _, tail = path.partition(".")
    part = getattr(profile, head)
    quantity = getattr(part, tail) if tail else part
    new = Quantity(value=quantity.value * factor, source="a test")
    return profile.model_copy(update={head: part.model_copy(update={tail: new}) if tail else new})


def unit_link(copy_fixed_s: float, bytes_per_s: float) -> HardwareProfile:
    link = PC1.h2d.model_copy(
        update={
            "copy_fixed_s": Quantity(value=copy_fixed_s, source="a test"),
            "bytes_per_s": Quantity(value=bytes_per_s, source="a test"),
        }
    )
    return PC1.model_copy(update={"h2d": link, "d2h": link})


def test_c16_one_gib_over_one_gib_per_s_is_one_second() -> None:
    """A neuron of 3 x 4096 float16 is 24 KiB: with 2 ** 30 / 24576 a second, that many take 1 s."""
    model = costs(unit_link(0.0, 2.0**30), gating="oracle")
    assert model.swap_bytes(1) == 24 * 1024
    assert model.swap_s(2**30 // 24_576) == pytest.approx(1.0, rel=1e-4)
    assert model.swap_bytes(8192) / model.h2d_bytes_per_s == 8192 * 24 * 1024 / 1024**3
    # the same rate in GB/s is 7.4 % faster: GB and GiB are not one unit
    decimal = costs(unit_link(0.0, 1e9), gating="oracle")
    assert decimal.swap_s(100) / model.swap_s(100) == pytest.approx(1.073741824)


def test_c16_twice_the_bandwidth_halves_the_copy_term() -> None:
    slow, fast = (costs(unit_link(5e-6, r)) for r in (10e9, 20e9))
    for n in (1, 16, 1000):
        assert slow.swap_s(n) - slow.swap_fixed_s(n) == pytest.approx(
            2 * (fast.swap_s(n) - fast.swap_fixed_s(n)), rel=1e-9
        )
        assert slow.swap_fixed_s(n) == fast.swap_fixed_s(n) == 5e-6
    assert costs(rate(PC1, "ffn_cpu.bytes_per_s", 0.5)).ffn_cpu_s(1000, 1) - 3e-5 == pytest.approx(
        2 * (costs().ffn_cpu_s(1000, 1) - 3e-5)
    )


def test_neither_side_is_faster_than_dram() -> None:
    """Alone on a DRAM of 1 GB/s, both a swap and residual work take their bytes in ns."""
    model = costs(rate(PC1, "dram_bytes_per_s", 1 / 68))
    assert model.swap_s(100) == pytest.approx(6e-6 + 100 * 16_384e-9)
    assert model.ffn_cpu_s(100, 1) == pytest.approx(30e-6 + 100 * 16_384e-9)


def test_one_layer_of_pc1_by_hand() -> None:
    """Decode, context 100. The comments are the working."""
    model = costs()
    bandwidth = 443.7e9
    # 4 x 4096 x 4096 x 2 B of weights, 100 x 2 x 4096 x 2 B of keys and values, 8 launches of 5 us
    assert model.attention_s(1, 100) == pytest.approx(
        40e-6 + (134_217_728 + 100 * 16_384) / bandwidth
    )
    assert model.gate_s(1) == pytest.approx(10e-6 + 11_008 * 8192 / bandwidth)
    assert model.predict_s(1) == pytest.approx(15e-6 + 1024 * (4096 + 11_008) * 2 / bandwidth)
    assert model.head_s(1) == pytest.approx(15e-6 + (32_000 + 1) * 8192 / bandwidth)
    # exact gating: up and down of a neuron, 16 384 B
    assert model.ffn_gpu_s(500, 1) == pytest.approx(15e-6 + 500 * 16_384 / bandwidth)
    assert model.ffn_cpu_s(500, 1) == pytest.approx(30e-6 + 500 * 16_384 / 34e9)
    assert model.swap_s(16) == pytest.approx(6e-6 + 16 * 16_384 / 24.5e9)
    # x and the gate's values out, a float32 partial sum back
    assert model.act_d2h_s(1) == pytest.approx(6e-6 + (4096 + 11_008) * 2 / 24.5e9)
    assert model.act_h2d_s(1) == pytest.approx(6e-6 + 4096 * 4 / 24.5e9)
    assert model.decide_s("tam", 3) == pytest.approx(10e-6 + 11_008e-9 + 3 * 2e-6)


def test_what_each_gating_is_charged_for() -> None:
    for gating, predictor in GATING_PREDICTOR:
        model = costs(gating=gating, predictor=predictor)
        assert (model.gate_s(1) > 0) == (gating in ("exact", "screened")), gating
        predicts = predictor != "none" and gating != "dense"
        assert (model.predict_s(1) > 0) == predicts, predictor
        assert model.bundle_bytes == PROSPARSE.bundle_bytes(gating)
    exact, screened = costs(), costs(gating="screened")
    assert costs(predictor="lookahead").predict_s(1) == exact.gate_s(1)
    fixed = PC1.gate.fixed_s.value
    assert (screened.gate_s(1) - fixed) / (exact.gate_s(1) - fixed) == pytest.approx(0.5, rel=0.01)
    assert costs(gating="predicted").act_d2h_bytes(1) == 8192 + 11_008 / 8


def test_nothing_to_do() -> None:
    """The device launches its kernel whatever is resident; the host and the link do nothing."""
    model = costs()
    assert model.ffn_gpu_s(0, 1) == PC1.ffn_gpu.fixed_s.value > 0
    assert model.ffn_cpu_s(0, 1) == model.swap_s(0) == model.swap_fixed_s(0) == 0.0


def test_row_copies_pay_for_each_bundle() -> None:
    gather, rows = (costs(load_profile(name)) for name in ("pc1", "pc1-rowcopies"))
    assert (gather.swap_copies(16), rows.swap_copies(16)) == (1, 16)
    assert rows.swap_fixed_s(16) == pytest.approx(16 * gather.swap_fixed_s(16))
    assert rows.swap_bytes(16) == gather.swap_bytes(16)
    # 16 KiB a copy takes 0.67 us on the bus and 6 us to start
    assert rows.swap_s(16) > 5 * gather.swap_s(16)


def test_a_prefill_chunk_is_bound_by_flops() -> None:
    model = costs()
    one, chunk = model.ffn_gpu_s(11_008, 1), model.ffn_gpu_s(11_008, 64)
    assert one == chunk  # at 64 tokens the weights' bytes still take longer than the flops
    huge = model.ffn_gpu_s(11_008, 4096) - PC1.ffn_gpu.fixed_s.value
    assert huge == pytest.approx(11_008 * 4 * 4096 * 4096 / 58e12)
    # the host: 660 GFLOP/s, two flops a weight of two bytes, 64 tokens
    assert model.cpu_rate_cap_bytes_per_s(1) == 34e9
    assert model.cpu_rate_cap_bytes_per_s(64) == pytest.approx(660e9 / 64)


@given(
    n=st.integers(0, 11_007),
    tokens=st.integers(1, 256),
    pair=st.sampled_from(GATING_PREDICTOR),
    name=st.sampled_from(bundled_profiles()),
)
def test_more_work_never_takes_less(n: int, tokens: int, pair: tuple[str, str], name: str) -> None:
    model = costs(load_profile(name), gating=pair[0], predictor=pair[1])
    for label, seconds in SECONDS.items():
        now = seconds(model, n, tokens)
        assert now >= 0
        assert seconds(model, n + 1, tokens) >= now, label
        assert seconds(model, n, tokens + 1) >= now, label
    assert model.swap_bytes(n + 1) > model.swap_bytes(n)
    more = model.decide_s("tam", n + 1) - model.decide_s("tam", n)
    assert more > 0 or (more == 0 and name == "guide")  # where deciding is free


NUMBERS = [
    "attention.bytes_per_s", "gate.bytes_per_s", "predictor.bytes_per_s", "ffn_gpu.bytes_per_s",
    "head.bytes_per_s", "ffn_cpu.bytes_per_s", "h2d.bytes_per_s", "d2h.bytes_per_s",
    "gpu_flops_per_s", "cpu_flops_per_s", "dram_bytes_per_s",
    "attention.fixed_s", "gate.fixed_s", "predictor.fixed_s", "ffn_gpu.fixed_s", "head.fixed_s",
    "ffn_cpu.fixed_s", "h2d.copy_fixed_s", "d2h.copy_fixed_s", "handover_fixed_s",
]  # fmt: skip


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_of_a_profile_counts_and_in_the_right_direction(path: str) -> None:
    """A hundredth of a rate, or a hundred times a fixed cost: slower somewhere, never faster."""
    factor = 0.01 if path.endswith("_per_s") else 100.0
    before, after = costs(), costs(rate(PC1, path, factor))
    points = [(1, 1), (500, 1), (500, 4096)]
    changes = [
        seconds(after, n, t) - seconds(before, n, t)
        for seconds in SECONDS.values()
        for n, t in points
    ]
    assert min(changes) >= 0
    assert max(changes) > 0


@given(
    time_scale=st.floats(0.1, 100),
    n=st.integers(0, 896),
    tokens=st.integers(1, 128),
    name=st.sampled_from(bundled_profiles()),
    link=st.sampled_from([None, "pcie3", "pcie5"]),
)
def test_scaled_multiplies_every_cost_by_time_scale(
    time_scale: float, n: int, tokens: int, name: str, link: str | None
) -> None:
    profile = load_profile(name)
    slow = scaled(profile, time_scale)
    if link is not None:
        profile, slow = (with_link(machine, load_link(link)) for machine in (profile, slow))
    sizes = {"trace_layers": 6, "trace_neurons": 896, "gating": "predicted"}
    before, after = (costs(machine, **sizes) for machine in (profile, slow))
    for label, seconds in SECONDS.items():
        assert seconds(after, n, tokens) == pytest.approx(
            time_scale * seconds(before, n, tokens), rel=1e-12, abs=0
        ), label
    assert after.decide_s("tam", n) == before.decide_s("tam", n)


def test_scaled_is_exact_for_powers_of_two() -> None:
    before, after = costs(), costs(scaled(PC1, 8.0))
    for label, seconds in SECONDS.items():
        assert seconds(after, 500, 3) == 8.0 * seconds(before, 500, 3), label


def test_stand_in_by_hand() -> None:
    """tiny-reglu's 6 x 896 for ProSparse-7B's 32 x 11 008: a neuron is 12.29 bundles."""
    model = costs(trace_layers=6, trace_neurons=896, gating="predicted")
    full = costs(gating="predicted")
    assert model.bundles_per_neuron == 11_008 / 896
    assert model.layers_ratio == 6 / 32
    assert model.bundle_bytes * 896 == pytest.approx(11_008 * 24_576)
    assert model.swap_neurons == 1  # 16 bundles are 1.3 neurons
    assert costs(trace_neurons=896, swap_neurons=100).swap_neurons == 8  # 8.14
    # a layer costs what it costs on the target, and the whole FFN too
    for name in ("attention", "gate", "predict", "act_d2h", "act_h2d", "handover"):
        assert SECONDS[name](model, 5, 2) == SECONDS[name](full, 5, 2)
    assert model.ffn_gpu_s(896, 3) == pytest.approx(full.ffn_gpu_s(11_008, 3))
    assert model.ffn_cpu_s(448, 1) == pytest.approx(full.ffn_cpu_s(5504, 1))
    # the head: its share for 6 of 32 layers
    assert model.head_s(1) == full.head_s(1) * 6 / 32
    # fixed costs stay: a copy is a copy
    assert model.swap_fixed_s(1) == full.swap_fixed_s(16)
    rows = costs(load_profile("pc1-rowcopies"), trace_layers=6, trace_neurons=896)
    assert rows.swap_copies(1) == pytest.approx(11_008 / 896)


def test_without_a_stand_in_nothing_is_scaled() -> None:
    model = costs(shape=TINY, predictor="lookahead")
    assert (model.bundles_per_neuron, model.layers_ratio, model.swap_neurons) == (1.0, 1.0, 16)
    assert model.bundle_bytes == 2 * 192 * 4


def test_decide_by_policy_class() -> None:
    entry = PC1.decide["default"].model_copy(
        update={"fixed_s": Quantity(value=7e-5, source="a test")}
    )
    profile = PC1.model_copy(update={"decide": {**PC1.decide, "lru": entry}})
    model = costs(profile)
    assert model.decide_s("lru", 0) - model.decide_s("tam", 0) == pytest.approx(6e-5)
    assert model.decide_s("tam", 0) == costs().decide_s("anything", 0)


def test_a_calibration_belongs_to_its_stand_in() -> None:
    profile = PC1.model_copy(update={"kind": "calibrated", "calibrated_as": "prosparse-7b"})
    sizes = {"trace_layers": 6, "trace_neurons": 896}
    # its plans were timed over the trace's 896 neurons; a datasheet's are the target's
    assert costs(profile, **sizes).decide_neurons == 896
    assert costs(**sizes).decide_neurons == 11_008
    with pytest.raises(KairoxError, match="'prosparse-7b' and is valid only with them, got 'opt"):
        costs(profile, OPT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gating": "exactly"}, "'exactly'; allowed: oracle, exact, screened, predicted"),
        ({"predictor": "mlp"}, "'mlp'; allowed: rank, lookahead, none"),
        ({"gating": "predicted", "predictor": "none"}, "allowed: rank, lookahead"),
        ({"shape": TINY}, "no published predictor"),
        ({"trace_neurons": 0}, "trace_neurons is 0"),
        ({"trace_layers": 0}, "trace_layers is 0"),
        ({"swap_neurons": 0}, "swap_neurons is 0"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(KairoxError, match=words):
        costs(**changes)


def test_cost_model_is_plain() -> None:
    """No pydantic object inside: the live path holds these without it."""
    model = costs()
    for name in inspect.signature(CostModel).parameters:
        assert not hasattr(getattr(model, name), "model_dump"), name


def test_fixed_costs_of_a_layer_are_what_the_profile_says() -> None:
    """pc1's source for the hand-over: about 0.2 ms a layer with the other fixed costs."""
    ops = (PC1.attention, PC1.predictor, PC1.gate, PC1.ffn_gpu, PC1.ffn_cpu)
    copies = PC1.h2d.copy_fixed_s.value + PC1.d2h.copy_fixed_s.value
    fixed_s = sum(op.fixed_s.value for op in ops) + copies + 2 * PC1.handover_fixed_s.value
    assert 0.15e-3 < fixed_s + costs().decide_s("tam", 1) < 0.25e-3


@pytest.mark.parametrize("name", ["pc1", "pc2", "emu-pc1"])
def test_where_neurons_are_matters(name: str) -> None:
    """All rows moving and 15 % evaluated: none resident takes twice as long as all, or more.

    The arithmetic bound of what any placement can gain, without which policies cannot be compared.
    """
    model = costs(load_profile(name), gating="predicted")
    n = 11_008 * 15 // 100
    shared_s = model.attention_s(1, 256) + model.predict_s(1)
    host_s = model.act_d2h_s(1) + model.ffn_cpu_s(n, 1) + model.act_h2d_s(1)
    host_s += 2 * model.handover_s
    assert shared_s + host_s > 2 * (shared_s + model.ffn_gpu_s(n, 1))


# Memory


def test_memory_plan_by_hand() -> None:
    plan = fits(PC1, PROSPARSE, "predicted", 1000, 1024)
    assert plan.attention == 32 * 134_217_728
    assert plan.head == 32_000 * 8192
    assert plan.predictor == 32 * 1024 * (4096 + 11_008) * 2
    assert plan.gate == 0
    assert plan.kv == 32 * 1024 * 16_384 == 512 * 2**20
    assert plan.slots == 32 * 1000 * 24_576
    assert (plan.margin, plan.vram) == (1_300_000_000, 12 * 2**30)
    parts = (plan.attention, plan.head, plan.predictor, plan.kv, plan.slots, plan.margin)
    assert plan.total == sum(parts)
    assert plan.fits
    text = plan.explain()
    assert "slots 0.786" in text
    assert "= 8.170 GB <= 12.885 GB" in text


def test_thirteen_billion_in_12_gb_leaves_a_few_percent() -> None:
    """LLaMA-2-13B in FP16 on 12 GB: well under a tenth of its neurons can be resident."""
    shape = replace(
        PROSPARSE,
        name="13b",
        n_layers=40,
        d_model=5120,
        n_neurons=13_824,
        n_heads=40,
        n_kv_heads=40,
    )
    assert 0.01 < max_slots(PC1, shape, "predicted", 1024) / 13_824 < 0.06
    plan = fits(PC1, shape, "predicted", 2500, 1024)
    assert not plan.fits
    assert "does not fit on pc1" in plan.explain()
    assert "> 12.885 GB" in plan.explain()


def test_stand_in_plans_the_whole_target() -> None:
    small = fits(PC1, PROSPARSE, "predicted", 400, 256, trace_neurons=896)
    assert small.slots_per_layer == 400 * 11_008 / 896
    assert small.slots == round(32 * 400 * 11_008 / 896 * 24_576)
    full = fits(PC1, PROSPARSE, "predicted", 896, 256, trace_neurons=896)
    assert full == fits(PC1, PROSPARSE, "predicted", 11_008, 256)
    per_layer = fits(PC1, PROSPARSE, "predicted", [300, 500], 256, trace_neurons=896)
    assert per_layer == small
    with pytest.raises(KairoxError, match="897 slots per layer; allowed are 0 to 896"):
        fits(PC1, PROSPARSE, "predicted", 897, 256, trace_neurons=896)


@given(
    gating=st.sampled_from(GATINGS),
    context=st.integers(0, 4096),
    trace_neurons=st.sampled_from([None, 896, 3072]),
    vram_gib=st.integers(8, 24),
)
def test_max_slots_is_the_last_that_fits(
    gating: str, context: int, trace_neurons: int | None, vram_gib: int
) -> None:
    options: dict[str, Any] = {"trace_neurons": trace_neurons, "vram_bytes": vram_gib * 2.0**30}
    try:
        most = max_slots(PC1, PROSPARSE, gating, context, **options)
    except KairoxError:
        assert not fits(PC1, PROSPARSE, gating, 0, context, **options).fits
        return
    assert fits(PC1, PROSPARSE, gating, most, context, **options).fits
    if most < (trace_neurons or PROSPARSE.n_neurons):
        assert not fits(PC1, PROSPARSE, gating, most + 1, context, **options).fits


def test_no_room_at_all_says_the_arithmetic() -> None:
    with pytest.raises(KairoxError, match=r"attention 4\.295 \+ .* GB > 4\.000 GB .*larger device"):
        max_slots(PC1, PROSPARSE, "predicted", 256, vram_bytes=4e9)

"""From Settings to a Runner: devices and their pace, models and their names, kernels compiled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kairox_exec import live
from kairox_exec.kernels import numba_rows
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, load_link, load_profile, scaled, with_link
from kairox_sim.model import find_shape
from kairox_sim.settings import Settings
from kairox_sim.trace import read_trace

SHAPE = find_shape("prosparse-7b")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
TRACES = Path(__file__).parents[2] / "traces"


def _layer_s(profile: HardwareProfile) -> float:
    costs = costs_for(
        profile, SHAPE, "exact", trace_layers=6, trace_neurons=896, predictor="lookahead"
    )
    return live.shortest_layer_s(costs)


def test_default_pace_makes_the_shortest_layer_last_three_milliseconds() -> None:
    fast = load_profile("pc1")
    slow = live.emulated_profile("pc1", SHAPE, "exact")
    assert live.LAYER_S == 3e-3
    assert slow.time_scale == np.ceil(live.LAYER_S / _layer_s(fast)) > 1
    assert live.LAYER_S <= _layer_s(slow) < live.LAYER_S + _layer_s(fast)
    # Slow enough already: left as it is.
    assert live.emulated_profile(slow, SHAPE, "exact") == slow


def test_given_pace_is_taken_and_slows_a_link_override_too() -> None:
    profile = live.emulated_profile("pc1", SHAPE, "exact", time_scale=7.5, link="pcie3")
    by_hand = with_link(scaled(load_profile("pc1"), 7.5), load_link("pcie3"))
    assert profile.time_scale == 7.5
    assert profile.h2d.bytes_per_s.value == by_hand.h2d.bytes_per_s.value
    assert profile.h2d.copy_fixed_s.value == by_hand.h2d.copy_fixed_s.value
    assert profile.attention.fixed_s.value == 7.5 * load_profile("pc1").attention.fixed_s.value


def test_every_policy_gets_the_same_pace(tiny_reglu_dir: Path) -> None:
    scales = {
        live.profile_for(
            Settings(policy=policy, model_as="prosparse-7b"), tiny_reglu_dir, "emu-pc1"
        ).time_scale
        for policy in ("all", "none", "lru", "tam")
    }
    assert len(scales) == 1


def test_device_is_paced_by_the_stand_in(tiny_reglu_dir: Path) -> None:
    settings = Settings(model_as="prosparse-7b", swap_neurons=16)
    with live.device_for(settings, tiny_reglu_dir, "emulated", emulate="emu-pc1") as device:
        assert device.costs is not None
        assert device.costs.shape.name == "prosparse-7b"
        assert device.costs.layers_ratio == 6 / 32
        assert device.costs.predictor == "lookahead"
        live.start(tiny_reglu_dir, settings, device)  # cache and costs agree about swaps
    with live.device_for(Settings(), tiny_reglu_dir, "auto") as device:
        assert device.costs is None


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        pytest.param("cuda", {}, "needs a CUDA GPU", marks=NO_GPU),
        ("gpu", {}, "unknown device 'gpu'; allowed: auto, cuda, emulated, cpu"),
        ("emulated", {}, "needs a profile"),
        ("cpu", {"emulate": "pc1"}, "emulate is for the emulated device"),
        ("auto", {"time_scale": 2.0}, "time_scale is for the emulated device"),
        ("cpu", {"link": "pcie3"}, "link is for the emulated device"),
        ("emulated", {"emulate": "pc11"}, "did you mean 'pc1'"),
    ],
)
def test_devices_that_cannot_be(
    tiny_reglu_dir: Path, name: str, given: dict[str, object], said: str
) -> None:
    with pytest.raises(KairoxError, match=said):
        live.device_for(Settings(), tiny_reglu_dir, name, **given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(gating="predicted"), "rank with a --predictor-file"),
        (Settings(gating="dense"), "allowed: exact, oracle, screened, predicted"),
        (Settings(predictor="rank"), "rank with a --predictor-file"),
        (Settings(slots="vram"), "it needs a model, a machine"),
        (Settings(slots="ngl:2"), "allowed: a number, density, a size, vram, all"),
        (Settings(predictor="none"), "needs a predictor"),
        (Settings(policy="static"), "needs a prior"),
    ],
)
def test_settings_that_cannot_run(tiny_reglu_dir: Path, settings: Settings, said: str) -> None:
    with (
        live.device_for(Settings(), tiny_reglu_dir, "cpu") as device,
        pytest.raises(KairoxError, match=said),
    ):
        live.start(tiny_reglu_dir, settings, device)


def test_a_prior_of_another_model_is_refused(tiny_opt_dir: Path) -> None:
    prior = read_trace(TRACES / "tiny-reglu-profile.arrow")
    settings = Settings(policy="static", slots=10)
    with (
        live.device_for(settings, tiny_opt_dir, "cpu") as device,
        pytest.raises(KairoxError, match="recorded with tiny-reglu"),
    ):
        live.start(tiny_opt_dir, settings, device, prior=prior)


def test_static_starts_with_its_prior_resident(tiny_reglu_dir: Path) -> None:
    settings = Settings(policy="static", slots=100, prior=str(TRACES / "tiny-reglu-profile.arrow"))
    runner = live.load(tiny_reglu_dir, settings, device="cpu")
    with runner.device, runner:
        assert [int((row > 0).sum()) for row in runner.cache.state] == [100] * 6
        records = [record for _, record in runner.run([np.arange(40)], prefill=32)]
    assert sum(record.hit_resident for record in records) > 0


@pytest.mark.parametrize("gating", ["exact", "oracle"])
def test_nothing_compiles_after_the_start(tiny_reglu_dir: Path, gating: str) -> None:
    settings = Settings(policy="lru", slots=50, gating=gating)
    runner = live.load(tiny_reglu_dir, settings, device="cpu")
    compiled = [list(f.signatures) for f in (numba_rows.gates, numba_rows.union)]
    assert all(compiled)
    with runner.device, runner:
        for _ in runner.run([np.arange(36)], prefill=32):
            pass
    assert [list(f.signatures) for f in (numba_rows.gates, numba_rows.union)] == compiled


def test_names_of_the_catalogue_are_taken_at_their_word(
    tiny_reglu_dir: Path, tmp_path: Path
) -> None:
    assert live.model_shape(tiny_reglu_dir) == find_shape("tiny-reglu")
    config = json.loads((tiny_reglu_dir / "config.json").read_text())
    for name, layers in (("mine", 6), ("prosparse-7b", 6)):
        (tmp_path / name).mkdir()
        changed = config | {"num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
    assert live.model_shape(tmp_path / "mine").bytes_per_weight == 4
    whole = {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "7b" / "prosparse-7b").mkdir(parents=True)
    path = tmp_path / "7b" / "prosparse-7b"
    (path / "config.json").write_text(json.dumps(config | whole))
    shape = live.model_shape(path)  # as it runs here, not as the catalogue has it
    assert (shape.bytes_per_weight, shape.predictor_rank) == (4, 1024)
    with pytest.raises(KairoxError, match="give the folder another name"):
        live.model_shape(tmp_path / "prosparse-7b")


def test_threads_are_set_and_checked() -> None:
    before = live.set_threads(None)
    try:
        assert live.set_threads(1) == 1
        with pytest.raises(KairoxError, match="1 to 1024"):
            live.set_threads(0)
    finally:
        live.set_threads(before)


def test_a_damaged_model_is_a_clear_error(tiny_reglu_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(tiny_reglu_dir / "config.json", broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(KairoxError, match="cut in its header, or is not safetensors"):
        live.load(broken, Settings(), device="cpu")

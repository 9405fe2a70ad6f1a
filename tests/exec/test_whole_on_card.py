"""A whole model on the CUDA device, its streams made late: what is where, and the same bits.

`late` stands for the card: a tensor in the wrong memory, or read too early, shows. Attention is
computed by other kernels there than on the CPU, so bits are compared between runs on the card.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kairox_exec import live, live_device
from kairox_exec.cuda import CudaDevice
from kairox_exec.generation import generate
from kairox_exec.kernels import torch_ref
from kairox_exec.live import HostSide, device_for, start
from kairox_exec.live_run import ForcedText, calibrate, machine_for
from kairox_exec.loading import load_bundled
from kairox_exec.recording import record
from kairox_exec.runner import run_bundles
from kairox_exec.score import score
from kairox_exec.validation import validate
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES
from kairox_sim.settings import Settings
from kairox_sim.trace import read_trace
from kairox_sim.trace_stats import counts
from tests.exec.late import LateDevice
from tests.exec.tiny_families import N_LAYERS, N_NEURONS, TINY, VOCAB, save_tiny

MODEL = Path("experiments/models/tiny-reglu")
PREDICTOR = Path("experiments/models/tiny-reglu-predictor.safetensors")
TEXT = Path("experiments/prompts/prose.txt")
TOKENS = np.arange(40, 54, dtype=np.int32)
GB12 = 12 * 10**9


@contextmanager
def card(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Iterator[LateDevice]:
    """device="cuda" is a late one."""
    late = LateDevice(seed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(live_device, "find_spec", lambda name: name)  # triton is there
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (GB12, 2 * GB12))
    monkeypatch.setattr(
        live_device,
        "CudaDevice",
        lambda pool, promotion: CudaDevice(
            pool,
            promotion="staged" if promotion == "auto" else promotion,
            streams=late,
            stuck_after_s=20,
        ),
    )
    with late, torch.no_grad():
        yield late


@pytest.fixture(scope="module")
def resident() -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch, card(patch):
        return _logits(Settings(policy="all", numerics="deterministic"))


@pytest.fixture(scope="module")
def on_cpu() -> list[torch.Tensor]:
    with device_for(Settings(), MODEL, "cpu") as device:
        runner = start(MODEL, Settings(policy="all"), device)
        return [runner.logits for _ in runner.run([TOKENS], prefill=8)]


def _logits(settings: Settings, host: HostSide | None = None) -> list[torch.Tensor]:
    with device_for(settings, MODEL, "auto", host=host or HostSide()) as device:
        assert isinstance(device, CudaDevice)
        runner = start(MODEL, settings, device, kernels="torch")
        found = [runner.logits.cpu() for _ in runner.run([TOKENS], prefill=8)]
        runner.finish()
        runner.cache.check()
    return found


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"policy": "lru", "slots": 100}, HostSide(promotion="per_row")),
        ({"policy": "tam", "slots": 100, "trigger": "attn_in"}, HostSide()),
        ({"policy": "tam", "slots": 60, "gating": "screened"}, HostSide()),
        ({"policy": "lfu", "slots": 40, "gating": "oracle"}, HostSide()),
        ({"policy": "none"}, HostSide(live_device.HostPool(threads=3))),
        ({"policy": "tam", "predictor": "rank", "predictor_file": PREDICTOR}, HostSide()),
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_every_placement_gives_the_bits_of_all_resident(
    monkeypatch: pytest.MonkeyPatch,
    resident: list[torch.Tensor],
    on_cpu: list[torch.Tensor],
    settings: dict[str, Any],
    host: HostSide,
) -> None:
    with card(monkeypatch, seed=1):
        found = _logits(Settings.of(settings | {"numerics": "deterministic"}), host)
    assert all(torch.equal(a, b) for a, b in zip(found, resident, strict=True))
    for a, b in zip(found, on_cpu, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_predicted_gating_leaves_the_same_neurons_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy: dict[str, Any] = {
        "policy": "tam", "gating": "predicted", "predictor": "rank", "predictor_file": PREDICTOR,
        "numerics": "deterministic",
    }  # fmt: skip
    with card(monkeypatch):
        few = _logits(Settings.of(lossy | {"slots": 50}))
    with card(monkeypatch, seed=2):
        many = _logits(Settings.of(lossy | {"slots": 300}))
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


def test_score_generate_and_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(policy="lru", slots=80)
    how: dict[str, Any] = {"device": "cuda", "kernels": "torch"}
    cut = {"tokens": 10, "window": 10, "prefill": 4}
    with card(monkeypatch):
        there = score(MODEL, TEXT, settings, **cut, **how)
        text = generate(MODEL, "The old", settings, max_new_tokens=4, temperature=0, **how)
        path = record(MODEL, TEXT, tmp_path / "run.arrow", settings=settings, **cut, **how)
    here = score(MODEL, TEXT, settings, **cut, device="cpu")
    assert there.nats_per_token == pytest.approx(here.nats_per_token, abs=1e-5)
    assert text.text == generate(
        MODEL, "The old", settings, max_new_tokens=4, temperature=0, device="cpu"
    ).text  # fmt: skip
    other = record(MODEL, TEXT, tmp_path / "cpu.arrow", settings=settings, **cut, device="cpu")
    trace, on_cpu = read_trace(path), read_trace(other)
    assert trace.header.hardware["device"] == "cuda"
    assert trace.n_tokens == on_cpu.n_tokens == 10
    assert np.abs(counts(trace) - counts(on_cpu)).sum() <= 1e-3 * counts(on_cpu).sum()


def test_what_is_free_is_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with card(monkeypatch), device_for(Settings(vram="6GiB"), MODEL, "cuda") as device:
        assert device.profile is not None
        assert device.profile.vram_bytes.value == 6 * 2**30
    with card(monkeypatch), device_for(Settings(), MODEL, "auto") as device:
        assert device.profile is not None
        assert device.profile.vram_bytes.value == GB12
        assert not device.profile.decide_blocks_gpu


@pytest.mark.parametrize(
    ("without", "says"), [("gpu", "sees none"), ("triton", "needs triton")], ids=["gpu", "triton"]
)
def test_cuda_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, without: str, says: str
) -> None:
    find: Callable[[str], object] = lambda name: None if without == "triton" else name  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: without != "gpu")
    monkeypatch.setattr(live_device, "find_spec", find)
    with pytest.raises(KairoxError, match=says):
        live.choose_device("cuda")
    assert live.choose_device("auto") == "cpu"


def test_promotion_is_a_cuda_devices() -> None:
    with pytest.raises(KairoxError, match="promotion 'staged'"):
        device_for(Settings(), MODEL, "cpu", host=HostSide(promotion="staged"))


# Not Falcon: it indexes with a list, of which torch makes a tensor that no dispatch mode sees.
@pytest.mark.parametrize("name", ["llama", "mistral-drelu", "opt", "nemotron", "swiglu"])
def test_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    directory = save_tiny(name, tmp_path / name)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 10)
    loaded = load_bundled(directory, numerics="deterministic", thresholds=TINY[name].thresholds)
    found = []
    for seed, slots in enumerate((N_NEURONS, 20)):
        cache = NeuronCache(
            N_LAYERS, N_NEURONS, slots, POLICIES["lru"](N_LAYERS, N_NEURONS), Fixed(0.3),
            warm=[np.arange(slots)] * N_LAYERS, swap_neurons=7, trigger="attn_out",
        )  # fmt: skip
        with card(monkeypatch, seed), device_for(Settings(), MODEL, "cuda") as device:
            runner = run_bundles(
                copy.deepcopy(loaded.model), loaded.config, loaded.family, loaded.bundles,
                lambda *_, given=cache: given, device, trigger="attn_out",
            )  # fmt: skip
            found.append([runner.logits.cpu() for _ in runner.run([tokens], prefill=6)])
            runner.finish()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_calibrated_and_validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its times say nothing here; what was decided, and where swaps landed, do."""
    monkeypatch.setattr(live, "_kernels", lambda *_: (torch_ref, torch_ref))
    text = ForcedText([TEXT], tokens=9, prefill=4, window=9)
    settings = [Settings(policy="tam", slots=150), Settings(policy="lfu", slots=90, late="stall")]
    with card(monkeypatch):
        machine = machine_for(MODEL, "cuda")
        calibration = calibrate(MODEL, text, machine)
        other = dataclasses.replace(text, skip=600)
        result = validate(MODEL, settings, other, calibration, machine, tmp_path, repeats=1)
    assert machine.label == "measured on this machine's GPU"
    assert not calibration.profile.decide_blocks_gpu
    assert list(result.table["g1_differences"]) == list(result.table["g2_differences"]) == [0, 0]
    assert (result.table["g1_swaps"] > 0).all()


@pytest.mark.parametrize(
    ("fails", "says"),
    [("to", "the rest of the model"), ("forward", r"a step of 8 tokens at a context of 8")],
)
def test_no_memory_left(monkeypatch: pytest.MonkeyPatch, fails: str, says: str) -> None:
    def out_of(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out")

    monkeypatch.setattr(LlamaForCausalLM, fails, out_of)
    with (
        pytest.raises(KairoxError, match=f"no memory left for {says}.*prefill_chunk"),
        device_for(Settings(), MODEL, "cpu") as device,
        start(MODEL, Settings(), device) as runner,
    ):
        next(runner.run([TOKENS], prefill=8))

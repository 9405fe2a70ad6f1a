"""Machines of parts: what the parts are, what lies over what, and fits laid over them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    Quantity,
    bundled_cpus,
    bundled_gpus,
    dump_profile,
    load_cpu,
    load_gpu,
    load_link,
    load_profile,
    with_dram_efficiency,
    with_margin,
)
from tests.test_hardware import quantities

ROOT = Path(__file__).parent.parent

# The machines of the first releases, in numbers: parts may be added to them, never move them.
GPU_OPS = ("attention", "gate", "predictor", "ffn_gpu", "head")
PC1 = {
    "vram_bytes": 12884901888, "vram_margin_bytes": 1.3e9, "gpu_flops_per_s": 58e12,
    "cpu_flops_per_s": 660e9, "dram_bytes_per_s": 68e9, "copies_per_bundle": 0,
    "handover_fixed_s": 3e-5, "attention.fixed_s": 4e-5, "gate.fixed_s": 1e-5,
    "predictor.fixed_s": 1.5e-5, "ffn_gpu.fixed_s": 1.5e-5, "head.fixed_s": 1.5e-5,
    **{f"{op}.bytes_per_s": 443.7e9 for op in GPU_OPS},
    "ffn_cpu.fixed_s": 3e-5, "ffn_cpu.bytes_per_s": 34e9,
    "h2d.copy_fixed_s": 6e-6, "h2d.bytes_per_s": 24.5e9,
    "d2h.copy_fixed_s": 6e-6, "d2h.bytes_per_s": 24.5e9,
    "decide.default.fixed_s": 1e-5, "decide.default.neurons_per_s": 1e9,
    "decide.default.per_swap_s": 2e-6,
}  # fmt: skip
PC2 = PC1 | {
    "gpu_flops_per_s": 25e12, "cpu_flops_per_s": 550e9, "dram_bytes_per_s": 40e9,
    **{f"{op}.bytes_per_s": 316.8e9 for op in GPU_OPS},
    "ffn_cpu.bytes_per_s": 20e9, "h2d.bytes_per_s": 12.3e9, "d2h.bytes_per_s": 12.3e9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pc1", PC1), ("pc1-rowcopies", PC1 | {"copies_per_bundle": 1}), ("pc2", PC2)],
)
def test_machines_of_parts_have_the_numbers_they_had(name: str, expected: dict[str, float]) -> None:
    profile = load_profile(name)
    numbers = {key: quantity.value for key, quantity in quantities(profile)}
    added = {"dram_peak_bytes_per_s", "h2d.sync_fixed_s"}
    added |= {"deterministic.cpu_ratio", "deterministic.gpu_ratio"}
    assert {key: value for key, value in numbers.items() if key not in added} == expected
    assert numbers.keys() - expected.keys() == added
    assert (profile.kind, profile.decide_blocks_gpu, profile.time_scale) == ("datasheet", False, 1)


def test_a_machine_of_parts_is_its_parts_and_what_it_says_itself() -> None:
    low, gpu, cpu = load_profile("pc-low"), load_gpu("rtx3080ti"), load_cpu("xeon-e5-2680v4")
    for op in (low.attention, low.gate, low.predictor, low.ffn_gpu, low.head):
        assert op.bytes_per_s == gpu.stream_bytes_per_s
    assert (low.vram_bytes, low.gpu_flops_per_s) == (gpu.vram_bytes, gpu.gpu_flops_per_s)
    assert low.h2d == load_link("pcie3").h2d
    capped = low.cpu_flops_per_s.value / cpu.cpu_flops_per_s.value  # 12 of its 14 cores
    assert capped == pytest.approx(12 / 14, rel=0.01)
    by_hand = load_profile("rtx3080ti+xeon-e5-2680v4+pcie3")
    assert by_hand.dram_bytes_per_s == cpu.dram_bytes_per_s
    assert by_hand.ffn_cpu.bytes_per_s == cpu.sparse_bytes_per_s
    own = ("name", "cpu_flops_per_s", "vram_margin_bytes", "dram_bytes_per_s", "ffn_cpu")
    assert by_hand.model_copy(update={key: getattr(low, key) for key in own}) == low
    assert load_profile("pcie3+rtx3080ti+xeon-e5-2680v4").h2d == by_hand.h2d
    assert by_hand.decide == load_profile("pc1").decide


@pytest.mark.parametrize("name", bundled_gpus())
def test_gpus_are_in_order(name: str) -> None:
    """A pass over all of its memory takes 15 to 45 ms, and its flops outrun its bytes."""
    gpu = load_gpu(name)
    assert 0.01 < gpu.vram_bytes.value / gpu.stream_bytes_per_s.value < 0.05
    assert 50 < gpu.gpu_flops_per_s.value / gpu.stream_bytes_per_s.value < 200


@pytest.mark.parametrize("name", bundled_cpus())
def test_dram_is_an_efficiency_of_its_peak(name: str) -> None:
    cpu = load_cpu(name)
    assert 0.6 < cpu.dram_bytes_per_s.value / cpu.dram_peak_bytes_per_s.value < 0.85
    share = 1.0 if name == "fork-host" else 0.5  # measured there, chosen elsewhere
    assert cpu.sparse_bytes_per_s.value == share * cpu.dram_bytes_per_s.value


OWN = {
    "name": "mine", "gpu": "rtx4070", "cpu": "i7-13700k", "link": "pcie4",
    "gate": {"fixed_s": {"value": 2e-5, "source": "measured here"}},
}  # fmt: skip


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "changed.toml"
    path.write_text(tomli_w.dumps(data), encoding="utf-8")
    return path


def test_own_entries_lie_over_the_parts(tmp_path: Path) -> None:
    mine, pc1 = load_profile(written(tmp_path, OWN)), load_profile("pc1")
    assert mine.gate.fixed_s == Quantity(value=2e-5, source="measured here")
    update = {"name": "pc1", "gate": pc1.gate}
    assert mine.model_copy(update=update) == pc1
    whole = load_profile(dump_profile(mine, tmp_path / "whole.toml"))
    assert whole == mine


def test_a_machine_like_another_but_for_what_it_says(tmp_path: Path) -> None:
    beside, waits = load_profile("emu-pc1-async"), load_profile("emu-pc1")
    assert waits.decide_blocks_gpu
    assert beside == waits.model_copy(update={"name": beside.name, "decide_blocks_gpu": False})
    other = load_profile(written(tmp_path, {"name": "mine", "like": "pc1", "gate": OWN["gate"]}))
    assert other.gate.fixed_s.source == "measured here"
    assert other.attention == load_profile("pc1").attention
    for like in ("pc11", 3):
        with pytest.raises(KairoxError, match=f"'like' is {like!r}.*bundled machine: emu-pc1"):
            load_profile(written(tmp_path, {"name": "mine", "like": like}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "rtx4071"}, ["no GPU 'rtx4071'", "did you mean 'rtx4070'", "h200, rtx3060"]),
        ({"cpu": "8086"}, ["no CPU '8086'", "epyc-7542, fork-host"]),
        ({"link": 4}, ["'link' is 4", "name of a part"]),
        ({"gate": {"fixd_s": 1}}, ["'gate.fixd_s'", "mean 'fixed_s'"]),
        # a number of one's own never keeps the source of the number below it
        ({"gate": {"fixed_s": {"value": 1e-5}}}, ["missing key 'gate.fixed_s.source'"]),
        ({"dram_peak_bytes_per_s": {"src": "x"}}, ["'dram_peak_bytes_per_s.src'", "mean 'source'"]),
    ],
)
def test_parts_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(KairoxError) as error:
        load_profile(written(tmp_path, OWN | change))
    for word in words:
        assert word in str(error.value)


def test_a_part_left_out_is_missed_by_its_keys(tmp_path: Path) -> None:
    data = {key: value for key, value in OWN.items() if key != "link"}
    with pytest.raises(KairoxError, match=r"missing key 'h2d'; missing key 'd2h'"):
        load_profile(written(tmp_path, data))


@pytest.mark.parametrize(
    "name", ["rtx4090+pcie4", "rtx4090+rtx3080+pcie4", "pc1+pcie3", "rtx4090+epyc-7542+pcie4+pcie3",
             "rtx4090+epyc-7542+pcie9"],
)  # fmt: skip
def test_not_a_machine_of_parts(name: str) -> None:
    with pytest.raises(KairoxError, match=r"one of each.*gpu: h200.*cpu: epyc.*link: pcie3, pcie4"):
        load_profile(name)


@pytest.mark.parametrize("name", ["pc-low", "pc-high"])
def test_the_papers_machines_have_the_fitted_constants(name: str) -> None:
    """What a user gets by name is what is held against published numbers."""
    fitted = tomllib.loads((ROOT / "experiments/published/fitted.toml").read_text())
    cpu = {"pc-low": "xeon-e5-2680v4", "pc-high": "epyc-7542"}[name]
    profile = load_profile(name)
    assert profile.dram_peak_bytes_per_s is not None
    effective = fitted["dram_efficiency"][cpu] * profile.dram_peak_bytes_per_s.value
    assert profile.dram_bytes_per_s.value == pytest.approx(effective, rel=1e-12)
    assert profile.ffn_cpu.bytes_per_s.value == pytest.approx(effective / 2, rel=1e-12)
    assert profile.vram_margin_bytes.value == fitted["vram_margin"]["bytes"]


def test_synchronising_costs_what_was_measured() -> None:
    """Copies of 68 KB on an RTX 3070, us each by copies per synchronisation; inf: at the end."""
    sync = load_link("pcie4").h2d.sync_fixed_s
    assert sync is not None
    measured = {float("inf"): 5.92, 16: 7.70, 4: 14.64, 1: 40.12}
    for copies, us in measured.items():
        assert 5.92 + 1e6 * sync.value / copies == pytest.approx(us, rel=0.05)


def test_dram_efficiency_takes_the_sparse_kernel_with_it() -> None:
    low = load_profile("pc-low")
    fitted = with_dram_efficiency(low, 0.58, "fitted on llama.cpp bars")
    assert fitted.dram_bytes_per_s.value == 0.58 * 76.8e9
    assert fitted.ffn_cpu.bytes_per_s.value == pytest.approx(0.5 * 0.58 * 76.8e9, rel=1e-12)
    assert fitted.ffn_cpu.fixed_s == low.ffn_cpu.fixed_s
    for quantity in (fitted.dram_bytes_per_s, fitted.ffn_cpu.bytes_per_s):
        assert "fitted on llama.cpp bars" in quantity.source
    update = {"dram_bytes_per_s": low.dram_bytes_per_s, "ffn_cpu": low.ffn_cpu}
    assert fitted.model_copy(update=update) == low
    fork = with_dram_efficiency(load_profile("fork-3080"), 0.5, "a test")
    share = fork.ffn_cpu.bytes_per_s.value / fork.dram_bytes_per_s.value
    assert share == pytest.approx(1.0)
    with pytest.raises(KairoxError, match="has no dram_peak_bytes_per_s"):
        with_dram_efficiency(load_profile("emu-pc1"), 0.5, "a test")
    for efficiency in (0, 1.01, float("nan")):
        with pytest.raises(KairoxError, match=r"\(0, 1\]"):
            with_dram_efficiency(low, efficiency, "a test")


def test_margin() -> None:
    pc1 = load_profile("pc1")
    wide = with_margin(pc1, 1.5e9, "fitted on llama.cpp bars")
    assert wide.vram_margin_bytes == Quantity(value=1.5e9, source="fitted on llama.cpp bars")
    assert wide.model_copy(update={"vram_margin_bytes": pc1.vram_margin_bytes}) == pc1
    with pytest.raises(KairoxError, match="0 or more"):
        with_margin(pc1, -1, "a test")

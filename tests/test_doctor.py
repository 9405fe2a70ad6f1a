"""kairox doctor: made-up trees of sysfs and NVML, budgets by hand, machines without any of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from kairox_sim import machine_facts
from kairox_sim.cli import app
from kairox_sim.doctor import (
    Bandwidth,
    budgets_for,
    cpu_features,
    diagnose,
    limits_of,
    measured_bandwidth,
    stream_rate,
    verdict_of,
    warnings_of,
)
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_gpu
from kairox_sim.machine_facts import MemoryLimit
from kairox_sim.model import find_shape
from kairox_sim.pcie import PcieLink, link_bytes_per_s, sysfs_links


def _device(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir()
    for key, value in files.items():
        (folder / key).write_text(value + "\n")


def _tree(root: Path) -> Path:
    _device(
        root, "0000:01:00.0", vendor="0x10de", **{"class": "0x030000"},
        current_link_speed="2.5 GT/s PCIe", max_link_speed="16.0 GT/s PCIe",
        current_link_width="8", max_link_width="16",
    )  # fmt: skip
    _device(root, "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    _device(root, "0000:00:02.0", vendor="0x8086", **{"class": "0x030000"})
    _device(
        root, "0000:02:00.0", vendor="0x10de", **{"class": "0x030200"},
        current_link_speed="Unknown", current_link_width="255",
    )  # fmt: skip
    return root


class _Nvml:
    """One GPU whose driver says nothing of its bus."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class Memory:
        total = 12 * 2**30
        used = 2**30

    def __getattr__(self, name: str) -> Callable[..., Any]:
        known: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetName": "Test GPU",
            "nvmlDeviceGetMemoryInfo": self.Memory,
        }

        def answer(*args: object) -> Any:
            if name not in known:
                raise self.NVMLError(name)
            return known[name]

        return answer


def test_links_by_sysfs(tmp_path: Path) -> None:
    assert sysfs_links(_tree(tmp_path)) == [
        PcieLink(1, 8, 4, 16, "sysfs"),
        PcieLink(None, None, None, None, "sysfs"),
    ]
    assert sysfs_links(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [
        (3, 16, 15.75),
        (4, 16, 31.51),
        (5, 16, 63.02),
        (2, 8, 4.0),
        (None, 16, None),
        (4, None, None),
    ],
)
def test_what_a_link_carries(
    generation: int | None, lanes: int | None, gigabytes: float | None
) -> None:
    rate = link_bytes_per_s(generation, lanes)
    assert (None if rate is None else round(rate / 1e9, 2)) == gigabytes


def test_without_a_driver_everything_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = diagnose(measure=False, sysfs=Path("/nowhere"))
    assert (found.gpus, found.links, found.budgets, found.bandwidth) == (None, [], (), None)
    assert any("no NVIDIA driver" in note for note in found.notes)
    assert any("--vram" in note for note in found.notes)
    assert all(limit.seconds is None for limit in found.limits)
    assert "not known" in verdict_of(found.limits)


def test_where_nvml_does_not_say_sysfs_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    found = diagnose(measure=False, sysfs=_tree(tmp_path))
    assert found.links[0] == PcieLink(1, 8, 4, 16, "sysfs")
    assert any("8 of 16 PCIe lanes" in note for note in found.notes)
    assert any("generation 1 of 4 now; cards at rest" in note for note in found.notes)
    assert {row.vram_bytes for row in found.budgets} == {12 * 2**30}


def test_budgets_by_hand() -> None:
    rows = {(row.model, row.weights): row for row in budgets_for(12 * 2**30)}
    shape = find_shape("prosparse-7b")
    row = rows["prosparse-7b", "float16"]
    rest = 32 * (shape.attention_bytes + shape.gate_bytes + 2048 * shape.kv_bytes_per_token)
    rest += shape.head_bytes + 1_300_000_000
    assert row.needs_bytes == rest
    assert row.slots == (12 * 2**30 - rest) // (32 * 2 * 8192)
    assert rows["opt-125m", "float16"].resident_share == 1.0
    large = rows["opt-66b", "float16"]
    assert large.slots is None
    assert large.resident_share != large.resident_share  # nan: nothing fits
    assert large.needs_bytes > 12 * 2**30


def test_the_arithmetic_of_a_token() -> None:
    link = PcieLink(1, 16, 4, 16, "test")
    shape = find_shape("prosparse-7b")
    device, host, over = limits_of(shape, Bandwidth(1e9, 4e9, 2), [link], 400e9)
    assert shape.active_share is not None
    n_bytes = 32 * 11008 * shape.active_share / 2 * 16384
    assert host.n_bytes == over.n_bytes == pytest.approx(n_bytes)
    assert host.seconds == pytest.approx(n_bytes / 4e9)
    assert over.bytes_per_s == pytest.approx(0.78 * 31.51e9, rel=1e-3)  # at its best, not as now
    # float16; attention 4 d^2, the gate, keys and values of 2,048 tokens, then the head
    layer = 4 * 4096**2 * 2 + 11008 * 8192 + 2048 * 2 * 4096 * 2
    assert device.n_bytes == pytest.approx(32 * layer + 32000 * 8192 + n_bytes)
    said = verdict_of((device, host, over))
    assert "host memory is 6.1 times as slow as link" in said
    assert said.startswith("device memory sets the pace of a token")
    slow = limits_of(shape, Bandwidth(1e9, 4e9, 2), [PcieLink(1, 1, 1, 1, "test")], 400e9)
    assert verdict_of(slow).startswith("host memory sets the pace of a token, 77.")
    assert "computing a miss beats copying it" in verdict_of(slow)
    with pytest.raises(KairoxError, match="no share of active neurons"):
        limits_of(find_shape("tiny-reglu"), None, [])


def test_memory_is_read(tmp_path: Path) -> None:
    found = measured_bandwidth(2**22)
    assert 1e8 < found.one_thread_bytes_per_s < 1e13
    assert 1e8 < found.all_threads_bytes_per_s < 1e13


def test_cpu_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    features = cpu_features(info)
    assert features is not None
    assert {name for name, has in features.items() if has} == {"avx2", "avx512f"}
    info.write_text("processor : 0\nFeatures\t: fp asimd bf16\n")  # an Arm CPU
    features = cpu_features(info)
    assert features is not None
    assert {name for name, has in features.items() if has} == {"asimd", "bf16"}
    assert cpu_features(tmp_path / "none") is None
    info.write_text("processor : 0\n")
    assert cpu_features(info) is None


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for sysctl")
def test_cpu_features_of_a_mac(tmp_path: Path) -> None:
    told = tmp_path / "sysctl"
    told.write_text("#!/bin/sh\necho FPU F16C AVX1.0\necho AVX2 AVX512F AVX512VNNI\n")
    told.chmod(0o755)
    features = cpu_features(system="Darwin", sysctl=str(told))
    assert features is not None
    has = {name for name, present in features.items() if present}
    assert has == {"avx2", "f16c", "avx512f", "avx512_vnni"}
    told.write_text("#!/bin/sh\nexit 1\n")  # an Apple CPU: no such keys
    assert cpu_features(system="Darwin", sysctl=str(told)) is None


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA GeForce RTX 4070", "rtx4070"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", None),
        (None, None),
    ],
)
def test_the_rate_of_a_gpu_by_its_name(name: str | None, gpu: str | None) -> None:
    known = None if gpu is None else load_gpu(gpu).stream_bytes_per_s.value
    assert stream_rate(name) == known


def test_warnings() -> None:
    host: dict[str, Any] = {
        "on_battery": True, "memory_bytes": 16 * 10**9, "memory_limit_bytes": 4 * 10**9,
        "load_1min": 7.5, "cpu": {"threads": 8},
    }  # fmt: skip
    gpu = {"power_limit_w": 120.0, "power_w": 119.0, "power_default_w": 200.0}
    narrow = PcieLink(3, 4, 4, 16, "test")
    said = " | ".join(warnings_of(host, [gpu], [narrow]))
    for words in (
        "4 of 16 PCIe lanes", "generation 3 of 4 now", "limited to 120 W, and 200 W is usual",
        "draws 119 W of the 120 W", "on battery", "may use 4.0 GB", "7.5 programs compute",
    ):  # fmt: skip
        assert words in said
    gpu |= {"power_limit_w": 200.0, "power_w": None}
    for limit in (None, 16 * 10**9):
        host |= {"on_battery": None, "load_1min": 0.0, "memory_limit_bytes": limit}
        quiet = warnings_of(host, [gpu], [PcieLink(4, 16, 4, 16, "test")])
        assert [text for text in quiet if "swapped out" not in text] == []


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    told = CliRunner().invoke(app, ["doctor", "--no-measure", "--vram", "12GiB", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["gpus"] is None
    assert [row["seconds"] for row in found["limits"]] == [None] * 3
    assert any(row["resident_share"] is None for row in found["budgets"])
    assert {"memory_limit_bytes", "memory_limit_available_bytes"} <= found["host"].keys()
    shown = CliRunner().invoke(app, ["doctor", "--no-measure", "--vram", "12GiB"])
    assert "needs" in shown.stdout
    assert "prosparse-7b" in shown.stdout


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        (None, ("-",)),
        (MemoryLimit(4 * 2**30, None), ("4.0 GiB, - of it left", "may use 4.3 GB")),
        (MemoryLimit(4 * 2**30, 2**30), ("4.0 GiB, 1.0 GiB of it left", "may use 4.3 GB")),
    ],
)
def test_the_limit_of_a_container_is_shown(
    limit: MemoryLimit | None, row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_facts, "memory_limit", lambda: limit)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Memory)
    shown = CliRunner().invoke(app, ["doctor", "--no-measure"]).stdout
    (line,) = (line for line in shown.splitlines() if "memory limit" in line)
    assert row[0] in line
    assert all(words in shown for words in row)
    assert ("may use" in shown) == (limit is not None)
    told = CliRunner().invoke(app, ["doctor", "--no-measure", "--json"]).stdout
    host = json.loads(told)["host"]
    assert host["memory_limit_bytes"] == (None if limit is None else limit.limit_bytes)
    assert host["memory_limit_available_bytes"] == (limit and limit.available_bytes)


class _Memory:
    total = 16 * 2**30
    available = 9 * 2**30

"""kairox doctor: made-up trees of sysfs and NVML, budgets by hand, machines without any of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kairox_sim.cli import app
from kairox_sim.doctor import (
    Bandwidth,
    budgets_for,
    cpu_features,
    diagnose,
    limits_of,
    measured_bandwidth,
    verdict_of,
)
from kairox_sim.errors import KairoxError
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
    host, over = limits_of(shape, Bandwidth(1e9, 4e9, 2), [link])
    assert shape.active_share is not None
    n_bytes = 32 * 11008 * shape.active_share / 2 * 16384
    assert host.n_bytes == over.n_bytes == pytest.approx(n_bytes)
    assert host.seconds == pytest.approx(n_bytes / 4e9)
    assert over.bytes_per_s == pytest.approx(0.78 * 31.51e9, rel=1e-3)  # at its best, not as now
    assert "host memory is 6.1 times as slow as link" in verdict_of((host, over))
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
    assert cpu_features(tmp_path / "none") is None
    info.write_text("processor : 0\n")
    assert cpu_features(info) is None


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    told = CliRunner().invoke(app, ["doctor", "--no-measure", "--vram", "12GiB", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["gpus"] is None
    assert found["limits"][1]["seconds"] is None
    assert any(row["resident_share"] is None for row in found["budgets"])
    shown = CliRunner().invoke(app, ["doctor", "--no-measure", "--vram", "12GiB"])
    assert "needs" in shown.stdout
    assert "prosparse-7b" in shown.stdout

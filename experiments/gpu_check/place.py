"""Where a check runs: a CUDA card, or this CPU as a rehearsal, and under which conditions."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kairox_exec.device import Device
from kairox_exec.kernels import Kernels, torch_ref
from kairox_exec.streams import Streams

LIBRARIES = ("numpy", "torch", "triton", "transformers", "numba", "accelerate")
# Of `nvidia-smi --query-gpu`.
ASKED = (
    "name", "driver_version", "vbios_version", "memory.total", "clocks.sm", "clocks.max.sm",
    "clocks.mem", "clocks.max.mem", "power.limit", "temperature.gpu", "pcie.link.gen.current",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip

Left = Callable[[], float]
"""Seconds that are left of a part's budget."""


@dataclass(frozen=True, slots=True)
class Place:
    """`rehearse`: toy sizes on the CPU, to run the code; its numbers mean nothing."""

    rehearse: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def label(self) -> str:
        if self.rehearse:
            return "rehearsal on the CPU: nothing is claimed"
        return f"measured on {torch.cuda.get_device_name()}"

    def synchronize(self) -> None:
        if not self.rehearse:
            torch.cuda.synchronize()

    def device_kernels(self) -> Kernels:
        """Triton's where they are; torch's stand in for them in a rehearsal only."""
        if self.rehearse:
            return torch_ref
        from kairox_exec.kernels import triton_cuda

        return triton_cuda

    def host_kernels(self) -> Kernels:
        from kairox_exec.kernels import numba_cpu

        return numba_cpu

    def new_streams(self) -> Streams:
        if self.rehearse:
            from experiments.gpu_check.host_streams import HostStreams

            return HostStreams()
        from kairox_exec.streams import TorchStreams

        return TorchStreams()

    def new_device(self) -> Device:
        """Closed by whoever asked for it."""
        if self.rehearse:
            from kairox_exec.emulated import EmulatedDevice

            return EmulatedDevice()
        from kairox_exec.cuda import CudaDevice
        from kairox_exec.host_pool import HostPool

        return CudaDevice(pool=HostPool(threads=self.host_threads))

    @property
    def host_threads(self) -> int:
        return 1 if self.rehearse else min(16, usable_cores())


def write_json(path: Path, content: Any) -> None:
    """Strict JSON: what is unknown (nan) is null. Whole or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(_plain(content), allow_nan=False) + "\n")
    beside.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def missing() -> str | None:
    """Why this machine cannot be checked, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton, or the extra `cuda`)"
    return None


def conditions(place: Place) -> dict[str, Any]:
    """What a number here depends on. Unknown is None."""
    facts: dict[str, Any] = {
        "label": place.label,
        "rehearsal": place.rehearse,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": {name: _version(name) for name in LIBRARIES},
        "git_commit": _said("git", "rev-parse", "HEAD"),
        "git_changes": _said("git", "status", "--porcelain", "--untracked-files=no"),
        "gpu": None,
    }
    if not place.rehearse:
        properties = torch.cuda.get_device_properties(place.device)
        facts["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nvidia_smi": _nvidia_smi(),
        }
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str] | None:
    said = _said("nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader")
    if not said:
        return None
    values = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(ASKED, values, strict=False))


def _said(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model n")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else None

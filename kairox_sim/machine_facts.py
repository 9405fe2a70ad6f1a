"""A machine and its state, by psutil, NVML, sysfs and control groups. Not known is None, never 0.

No names of hosts or users, and no paths: traces are shared.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from kairox_sim.pcie import content_of, sysfs_links

# Files of Linux's memory controller: its limit, its use, and what its memory.stat calls the part of
# the use that is given up when asked for (Documentation/admin-guide/cgroup-v2.rst and
# cgroup-v1/memory.rst, where `total_` counts the groups below, as the use does).
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NO_LIMIT = 2**60  # version 1 has a number beyond any memory where there is no limit


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What control groups let this process use, and what is left of it; None where not told."""

    limit_bytes: int
    available_bytes: int | None


def host_facts() -> dict[str, Any]:
    """Plain values for JSON: system, processor, memory, load, links of NVIDIA cards by sysfs."""
    memory, limit = psutil.virtual_memory(), memory_limit()
    return {
        "system": platform.system(),
        "python": platform.python_version(),
        "cpu": {
            "name": cpu_name(),
            "architecture": platform.machine() or None,
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(logical=True),
            "max_hz": _max_hz(),
        },
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": None if limit is None else limit.limit_bytes,
        "memory_limit_available_bytes": None if limit is None else limit.available_bytes,
        "load_1min": _load(),
        "on_battery": _on_battery(),
        "pcie_links": [asdict(link) for link in sysfs_links()],
    }


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest of this process's control group and those above it; None: none, or not known.

    A container's limit is such a one. root: where /proc and /sys are.
    """
    limits, left = [], []
    for folder, (limit_file, use_file, reclaimable) in _memory_groups(root):
        limit, use = _count(folder / limit_file), _count(folder / use_file)
        if limit is None or limit >= NO_LIMIT:
            continue
        limits.append(limit)
        if use is not None:
            left.append(max(0, limit - use + _stat(folder / "memory.stat", reclaimable)))
    return MemoryLimit(min(limits), min(left, default=None)) if limits else None


def available_bytes(limit: MemoryLimit | None) -> int:
    """Host memory that this process can still get: the machine's, within `limit`."""
    free = int(psutil.virtual_memory().available)
    if limit is None:
        return free
    return min(free, limit.limit_bytes if limit.available_bytes is None else limit.available_bytes)


def _memory_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders that may limit memory, this process's own first, and the files of their version.

    A container may be told its path on the machine and see only its own part of the tree, so that
    folders on the way are not there; the mount itself then is the container's group.
    """
    for line in (content_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", CGROUP_V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", CGROUP_V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside of what this namespace shows
            continue
        for n in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:n]), files


def _count(path: Path) -> int | None:
    text = content_of(path) or ""
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    """One line of memory.stat; 0 where it is not said, so that nothing is promised."""
    for line in (content_of(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions; None where a package is not there."""
    return {name: _version(name) for name in names}


def gpu_facts() -> list[dict[str, Any]] | None:
    """One dict per GPU that NVML sees; None without NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: all of them mean unknown
        return None
    try:
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(_n_gpus(nvml))]
    finally:
        nvml.nvmlShutdown()


def _n_gpus(nvml: Any) -> int:
    return int(nvml.nvmlDeviceGetCount())


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    def known(read: Callable[[], Any]) -> Any:
        """What NVML says, or None: virtual and older GPUs do not answer everything."""
        try:
            return read()
        except nvml.NVMLError:
            return None

    def text(value: Any) -> str | None:
        return value.decode() if isinstance(value, bytes) else value

    def watts(milliwatts: Any) -> float | None:
        return None if milliwatts is None else milliwatts / 1000

    memory = known(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    busy = known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    mhz = known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    return {
        "name": text(known(lambda: nvml.nvmlDeviceGetName(handle))),
        "driver": text(known(nvml.nvmlSystemGetDriverVersion)),
        "memory_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "busy_share": None if busy is None else busy.gpu / 100,
        "sm_hz": None if mhz is None else mhz * 1_000_000,
        "celsius": known(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "power_w": watts(known(lambda: nvml.nvmlDeviceGetPowerUsage(handle))),
        "power_limit_w": watts(known(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
        "power_default_w": watts(
            known(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        ),
        "pcie_generation": known(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_lanes": known(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_generation_max": known(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_lanes_max": known(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    """Linux says it in /proc/cpuinfo, others through `platform`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            if name := next(names, ""):
                return name
    except OSError:
        pass
    return platform.processor() or None


def _max_hz() -> float | None:
    """psutil says 0 MHz where it does not know."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, RuntimeError):
        return None
    return frequency.max * 1e6 if frequency is not None and frequency.max > 0 else None


def _load() -> float | None:
    try:
        return psutil.getloadavg()[0]
    except OSError:
        return None


def _on_battery() -> bool | None:
    sensors = getattr(psutil, "sensors_battery", None)
    battery = None if sensors is None else sensors()
    return None if battery is None else not battery.power_plugged

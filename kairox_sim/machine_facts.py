"""A machine and its state, by psutil, NVML and sysfs. What cannot be known is None, never 0.

No names of hosts or users, and no paths: traces are shared.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import metadata
from typing import Any

import psutil

from kairox_sim.pcie import sysfs_links


def host_facts() -> dict[str, Any]:
    """Plain values for JSON: system, processor, memory, load, links of NVIDIA cards by sysfs."""
    memory = psutil.virtual_memory()
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
        "load_1min": _load(),
        "on_battery": _on_battery(),
        "pcie_links": [asdict(link) for link in sysfs_links()],
    }


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

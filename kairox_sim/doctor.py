"""What a machine has, what will limit it, and which budget fits which model. Needs no torch.

What cannot be known is None and the reason stands in `notes`.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile, bundled_gpus, load_gpu, load_profile, with_vram
from kairox_sim.machine_facts import gpu_facts, host_facts
from kairox_sim.memory import fits, max_slots
from kairox_sim.model import CATALOGUE, ModelShape, find_shape, quantised
from kairox_sim.pcie import SYSFS, PcieLink, link_bytes_per_s, sysfs_links

CPUINFO = Path("/proc/cpuinfo")
FEATURES = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile")
ARM_FEATURES = ("asimd", "asimddp", "i8mm", "bf16", "sve")
SYSCTL = ("machdep.cpu.features", "machdep.cpu.leaf7_features")  # of a Mac with an Intel CPU
CONTEXT = 2048  # tokens
MEASURE_BYTES = 256 * 2**20  # beyond every cache that a desktop has
REPEATS = 5
LINK_SHARE = 0.78  # of a link's line rate that copies reach: 24.5 of 31.5 GB/s, as of profile pc1
RESIDENT = 0.5  # share of what fires that is on the device, for the arithmetic: chosen
KINDS = ("float16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second that NumPy reads from memory: a lower bound of what kernels reach."""

    one_thread_bytes_per_s: float
    all_threads_bytes_per_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Budget:
    """How a model's weights lie in device memory under exact gating, whose gate stays there."""

    model: str
    weights: str
    slots: int | None  # per layer; None: the rest alone is too large
    n_neurons: int
    needs_bytes: int  # with no neuron resident, the margin included
    vram_bytes: int

    @property
    def resident_share(self) -> float:
        """Of each layer's neurons; nan where nothing fits."""
        return float("nan") if self.slots is None else self.slots / self.n_neurons


@dataclass(frozen=True, slots=True)
class Limit:
    """What a token of a model asks of one part of the machine; None: not known here."""

    part: str
    n_bytes: float
    bytes_per_s: float | None
    how: str

    @property
    def seconds(self) -> float | None:
        return None if self.bytes_per_s is None else self.n_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Doctor:
    """Everything that `kairox doctor` says; `notes` are warnings and why something is unknown."""

    host: dict[str, Any]
    gpus: list[dict[str, Any]] | None
    links: list[PcieLink]
    features: dict[str, bool] | None
    pinned_limit_bytes: int | None
    bandwidth: Bandwidth | None
    limits: tuple[Limit, Limit, Limit]
    budgets: tuple[Budget, ...]
    notes: tuple[str, ...]


def diagnose(
    model: str = "prosparse-7b",
    vram_bytes: int | None = None,
    *,
    measure: bool = True,
    sysfs: Path = SYSFS,
    progress: Callable[[str], None] = lambda what: None,
) -> Doctor:
    """Look at this machine. `vram_bytes`: in place of the first GPU's. `model`: for the arithmetic.

    measure: also read a quarter of a GiB a few times, about a second.
    """
    progress("asking the driver")
    host, gpus, notes = host_facts(), gpu_facts(), []
    links = _links(gpus, sysfs)
    if gpus is None:
        notes.append("no NVIDIA driver answers (NVML): what a GPU here can do is not known")
    elif not gpus:
        notes.append("the driver is there and finds no GPU")
    bandwidth = None
    if measure:
        progress("measuring memory")
        bandwidth = measured_bandwidth()
    limit, limit_note = pinned_limit()
    notes += [limit_note] if limit_note else []
    notes += warnings_of(host, gpus, links)
    memory = vram_bytes or (int(gpus[0]["memory_bytes"]) if gpus and gpus[0]["memory_bytes"] else 0)
    budgets: tuple[Budget, ...] = ()
    if memory:
        budgets = tuple(budgets_for(memory))
    else:
        notes.append("which budget fits is not known without device memory: give --vram 12GiB")
    device = None if not gpus else stream_rate(gpus[0]["name"])
    if gpus and device is None:
        notes.append(
            f"how fast {gpus[0]['name'] or 'this GPU'} reads its memory is not known: no bundled "
            "GPU has its name; `kairox calibrate` measures it"
        )
    return Doctor(
        host=host,
        gpus=gpus,
        links=links,
        features=cpu_features(),
        pinned_limit_bytes=limit,
        bandwidth=bandwidth,
        limits=limits_of(find_shape(model), bandwidth, links, device),
        budgets=budgets,
        notes=tuple(notes),
    )


def measured_bandwidth(n_bytes: int = MEASURE_BYTES) -> Bandwidth:
    """Read a large array with one thread and with all: median of a few passes each."""
    threads = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    data = np.ones(n_bytes // 8, np.int64)
    return Bandwidth(
        one_thread_bytes_per_s=_read_rate(data, 1),
        all_threads_bytes_per_s=_read_rate(data, threads),
        threads=threads,
    )


def _read_rate(data: np.ndarray[Any, np.dtype[np.int64]], n_threads: int) -> float:
    parts = np.array_split(data, n_threads)
    seconds = []
    for _ in range(REPEATS):
        workers = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        began_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds.append(time.perf_counter() - began_s)
    return data.nbytes / median(seconds)


def cpu_features(
    cpuinfo: Path = CPUINFO, system: str | None = None, sysctl: str = "sysctl"
) -> dict[str, bool] | None:
    """Which of FEATURES (of an Arm CPU: ARM_FEATURES) there are; None where nothing says."""
    if (system or platform.system()) == "Darwin":
        return _features_of_mac(sysctl)
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for key, names in (("flags", FEATURES), ("Features", ARM_FEATURES)):
        line = next((line for line in text.splitlines() if line.startswith(key)), None)
        if line is not None:
            has = set(line.partition(":")[2].split())
            return {name: name in has for name in names}
    return None


def _features_of_mac(sysctl: str) -> dict[str, bool] | None:
    try:
        told = subprocess.run(
            [sysctl, "-n", *SYSCTL], capture_output=True, text=True, check=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):  # an Apple CPU has no such keys
        return None
    has = set(told.stdout.lower().replace("avx512vnni", "avx512_vnni").split())
    return {name: name in has for name in FEATURES}


def stream_rate(gpu: str | None) -> float | None:
    """Bytes a second of the bundled GPU of this name, such as "NVIDIA GeForce RTX 4070"."""
    plain = "".join((gpu or "").lower().replace("nvidia", "").replace("geforce", "").split())
    return load_gpu(plain).stream_bytes_per_s.value if plain in bundled_gpus() else None


def pinned_limit() -> tuple[int | None, str]:
    """(the limit of locked memory in bytes, None: none or not known; what to know about it)."""
    if "microsoft" in platform.release().lower():
        return None, (
            "this is WSL, where page-locked memory is limited by the Windows driver: weights may "
            "have to stay pageable, which slows copies"
        )
    try:
        resource: Any = importlib.import_module("resource")
    except ModuleNotFoundError:
        return None, "this system has no limit of locked memory to ask for"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None, ""
    return int(soft), (
        f"locked memory is limited to {soft / 2**20:.0f} MiB (ulimit -l); where registering "
        "weights with the driver fails for it, they stay pageable and that is said"
    )


def limits_of(
    shape: ModelShape,
    bandwidth: Bandwidth | None,
    links: list[PcieLink],
    device_bytes_per_s: float | None = None,
) -> tuple[Limit, Limit, Limit]:
    """One decode token with half of what fires resident: device memory, host memory, the link."""
    share = shape.active_share
    if share is None:
        raise KairoxError(
            f"no share of active neurons is published for {shape.name!r}; name one of "
            f"{', '.join(name for name, s in CATALOGUE.items() if s.active_share is not None)}"
        )
    missing = shape.n_layers * shape.n_neurons * share * (1 - RESIDENT)
    n_bytes = missing * shape.bundle_bytes("exact")
    line = [link_bytes_per_s(link.generation_max, link.lanes_max) for link in links]
    link = None if not line or line[0] is None else line[0] * LINK_SHARE
    dram = None if bandwidth is None else bandwidth.all_threads_bytes_per_s
    what = f"{missing:,.0f} neurons of {shape.bundle_bytes('exact') / 1024:.4g} KiB"
    layer = shape.attention_bytes + shape.gate_bytes + CONTEXT * shape.kv_bytes_per_token
    resident = shape.n_layers * shape.n_neurons * share * RESIDENT * shape.bundle_bytes("exact")
    on_device = shape.n_layers * layer + shape.head_bytes + resident
    how = f"attention, gate, head, {CONTEXT:,} tokens of keys and values, the other half"
    return (
        Limit("device memory", on_device, device_bytes_per_s, how),
        Limit("host memory", n_bytes, dram, f"the CPU computes the missing half: {what}"),
        Limit("link", n_bytes, link, "the missing half is copied instead, at the link's best"),
    )


def verdict_of(limits: tuple[Limit, Limit, Limit]) -> str:
    """Which part sets the pace, or what is not known for saying so.

    What is missing is computed or copied, by whichever is faster, beside what the device reads.
    """
    known = [(limit.seconds, limit.part) for limit in limits if limit.seconds is not None]
    if len(known) < len(limits):
        missing = " and of ".join(limit.part for limit in limits if limit.seconds is None)
        return f"what limits this machine is not known, as the rate of {missing} is not"
    device, *misses = known
    fast, slow = sorted(misses)
    pace_s, pace = max(device, fast)
    return (
        f"{pace} sets the pace of a token, {pace_s * 1e3:.1f} ms at least. {slow[1]} is "
        f"{slow[0] / fast[0]:.1f} times as slow as {fast[1]} for the same neurons: "
        + ("computing a miss beats copying it, unless it is used again"
           if slow[1] == "link" else "copying a miss beats computing it")
    )  # fmt: skip


def budgets_for(vram_bytes: int) -> list[Budget]:
    """Every sparse model of the catalogue in three kinds of weights, for a context of 2,048."""
    profile = with_vram(load_profile("pc1"), vram_bytes)  # its margin: context and workspaces
    found = []
    for name, shape in CATALOGUE.items():
        if shape.relu_sparse and shape.n_experts == 1 and shape.n_layers > 8:
            for kind in KINDS:
                found.append(_budget(profile, name, quantised(shape, kind), kind, vram_bytes))
    return found


def _budget(
    profile: HardwareProfile, name: str, shape: ModelShape, kind: str, vram_bytes: int
) -> Budget:
    empty = fits(profile, shape, "exact", 0, CONTEXT, predictor="none")
    slots = max_slots(profile, shape, "exact", CONTEXT, predictor="none") if empty.fits else None
    return Budget(name, kind, slots, shape.n_neurons, empty.total, vram_bytes)


def _links(gpus: list[dict[str, Any]] | None, sysfs: Path) -> list[PcieLink]:
    """By NVML where it says, else by sysfs."""
    told = [
        PcieLink(
            gpu["pcie_generation"], gpu["pcie_lanes"],
            gpu["pcie_generation_max"], gpu["pcie_lanes_max"], "NVML",
        )
        for gpu in gpus or []
    ]  # fmt: skip
    known = [link for link in told if link.generation is not None and link.lanes is not None]
    return told if told and len(known) == len(told) else sysfs_links(sysfs) or told


def warnings_of(
    host: dict[str, Any],
    gpus: list[dict[str, Any]] | None,
    links: list[PcieLink],
) -> list[str]:
    """What about this machine makes it slower, or what was measured on it."""
    said = []
    for link in links:
        if link.lanes_max is not None and link.lanes is not None and link.lanes < link.lanes_max:
            said.append(
                f"the GPU has {link.lanes} of {link.lanes_max} PCIe lanes: another slot may have "
                "more (riser cables and second slots often have 4), and swaps go over them"
            )
        if link.generation is not None and (link.generation_max or 0) > link.generation:
            said.append(
                f"the link is at generation {link.generation} of {link.generation_max} now; cards "
                "at rest slow it down, so look again under load"
            )
    for gpu in gpus or []:
        cap, draw = gpu["power_limit_w"], gpu["power_w"]
        if cap is not None and draw is not None and draw > 0.95 * cap:
            said.append(f"the GPU draws {draw:.0f} W of the {cap:.0f} W it is limited to")
        usual = gpu["power_default_w"]
        if cap is not None and usual is not None and cap < 0.9 * usual:
            said.append(
                f"the GPU is limited to {cap:.0f} W, and {usual:.0f} W is usual: it may be slower "
                "than others of its kind (nvidia-smi -q -d POWER)"
            )
    if host["on_battery"]:
        said.append("running on battery: clocks are lowered")
    swap = psutil.swap_memory()
    if swap.total and swap.percent > 10:
        said.append(f"{swap.used / 1e9:.1f} GB are swapped out: weights may be, too")
    allowed = host["memory_limit_bytes"]
    if allowed is not None and allowed < host["memory_bytes"]:
        said.append(
            f"this process may use {allowed / 1e9:.1f} GB of memory (the limit of a container or "
            "service): a model that needs more is refused"
        )
    load, threads = host["load_1min"], host["cpu"]["threads"]
    if load is not None and threads and load > 0.5 * threads:
        said.append(f"{load:.1f} programs compute already: what was measured is low")
    return said

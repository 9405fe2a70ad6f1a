"""The machine a live run is on: which device, at which pace, with how much memory.

`auto` is the GPU where there is one, else this host's CPU, unpaced; emulated has to be asked for.
The device outlives the Runner and is closed by whoever built it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from kairox_exec.checkpoint import Progress
from kairox_exec.cuda import CudaDevice
from kairox_exec.device import Device
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.host_pool import HostPool
from kairox_exec.loading import dtype_named, read_config
from kairox_exec.mlp_predictor import load_predictor
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    HardwareProfile,
    LinkProfile,
    Quantity,
    load_profile,
    scaled,
    with_vram,
)
from kairox_sim.model import CATALOGUE, ModelShape, Numerics
from kairox_sim.settings import Settings, group_size, predictor_of, target_of
from kairox_sim.shape_config import shape_from_config
from kairox_sim.simulation import machine, of_groups
from kairox_sim.units import parse_bytes

DEVICES = ("auto", "cuda", "emulated", "cpu")

# The shortest decode layer of an emulated machine. At 2 ms the real work of an attention op, about
# 1 ms of Python on a 2-core machine, came too close to its pace: 2 % of ops overran; now 0.2 %.
LAYER_S = 3e-3


@dataclass(frozen=True, slots=True)
class HostSide:
    """What the host does beside the device, and how.

    pool: the threads that compute residual neurons. promotion: how a CUDA device is given rows,
    see `promote`. cache_dir: where bundles are kept, see `load_bundled`. on_load, on_loaded: told
    how far loading is, and then where a large model's bundles came from.
    """

    pool: HostPool = field(default_factory=HostPool)
    promotion: str = "auto"
    cache_dir: str | Path | None = None
    on_load: Progress | None = None
    on_loaded: Callable[[str], None] | None = None


ONE_THREAD = HostSide()  # of the usual priority


def model_shape(model_dir: str | Path, settings: Settings | None = None) -> ModelShape:
    """What a model directory describes, as `settings` run it, named as its folder.

    A folder with the name of a catalogue entry must have its shape.
    """
    config = read_config(model_dir)
    name = Path(model_dir).resolve().name
    n_bytes = float(dtype_named((settings or Settings()).dtype).itemsize)
    approximate = settings is not None and settings.thresholds is not None
    shape = shape_from_config(config, name=name, bytes_per_weight=n_bytes, approximate=approximate)
    known = CATALOGUE.get(name)
    if known is None:
        return shape
    for part in ("n_layers", "n_neurons", "d_model"):
        if getattr(known, part) != getattr(shape, part):
            raise KairoxError(
                f"{name!r} is a model of the catalogue with {part} {getattr(known, part)}, and "
                f"config.json says {getattr(shape, part)}; give the folder another name"
            )
    return replace(known, bytes_per_weight=n_bytes, kv_bytes_per_value=None)


def charged_shape(model_dir: str | Path, settings: Settings) -> ModelShape:
    """The model whose costs are charged: itself or its stand-in, with the rows it is run with."""
    target = target_of(settings, model_shape(model_dir, settings))
    assert target is not None
    if settings.predictor_file is not None and settings.model_as is None:
        return replace(target, predictor_rank=load_predictor(settings.predictor_file).rank)
    return target


def shortest_layer_s(costs: CostModel) -> float:
    """Seconds of the shortest decode layer: attention over one token, gate, FFN of no neuron.

    Without the predictor, which depends on the policy: every setting of a machine gets one pace.
    """
    return costs.attention_s(1, 1) + costs.gate_s(1) + costs.ffn_gpu_s(0, 1)


def emulated_profile(
    emulate: HardwareProfile | str | Path,
    shape: ModelShape,
    gating: str,
    *,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    numerics: Numerics = "fast",
) -> HardwareProfile:
    """`emulate`, with `link` as its bus where given, slowed by `time_scale`.

    By default it is slowed as far as the shortest decode layer of `shape` needs to last 3 ms:
    time_scale = max(1, ceil(3 ms / shortest_layer_s)). The profile's own time_scale says which.
    """
    profile = machine(emulate, link)
    if time_scale is None:
        costs = costs_for(
            profile,
            shape,
            gating,
            trace_layers=shape.n_layers,
            trace_neurons=shape.n_neurons,
            predictor="lookahead",
            numerics=numerics,
        )
        time_scale = max(1.0, float(math.ceil(LAYER_S / shortest_layer_s(costs))))
    return profile if time_scale == 1 else scaled(profile, time_scale)


def choose_device(name: str) -> str:
    """cuda, emulated or cpu: `auto` is the best that there is."""
    if name not in DEVICES:
        raise KairoxError(f"unknown device {name!r}; allowed: {', '.join(DEVICES)}")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and _has_triton() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise KairoxError(
                f"device 'cuda' needs a CUDA GPU, and torch {torch.__version__} sees none; use "
                "cpu, or emulated (with --emulate). Where there is one, `kairox doctor` says "
                "whether the driver sees it"
            )
        if not _has_triton():
            raise KairoxError(
                "device 'cuda' needs triton, whose kernels it runs, and it is not installed: "
                'pip install triton, or in the checkout pip install -e ".[exec,cuda]"'
            )
    return name


def refuse_pace(device: str, **given: object) -> None:
    """What paces an emulated device says nothing of another one; None: not given."""
    for option, value in given.items():
        if value is not None:
            raise KairoxError(
                f"{option} is for the emulated device and the device is {device!r}; "
                "use device 'emulated', or leave it out"
            )


def _has_triton() -> bool:
    return find_spec("triton") is not None


def this_machine(device: str) -> HardwareProfile:
    """What is known of this machine without timing it; its rates are never used.

    Of a GPU: what is free now is its memory, since that is what a budget can be planned for.
    """
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        memory = Quantity(value=float(free), source="torch.cuda.mem_get_info: free at the start")
        margin = load_profile("pc1").vram_margin_bytes
    else:
        memory = Quantity(
            value=float(psutil.virtual_memory().total), source="psutil: the device is host memory"
        )
        margin = Quantity(value=0.0, source="none kept free")
    return load_profile("pc1").model_copy(
        update={
            "name": "this-gpu" if device == "cuda" else "this-host",
            "vram_bytes": memory,
            "vram_margin_bytes": margin,
            "decide_blocks_gpu": device != "cuda",
            "time_scale": 1.0,
        }
    )


def profile_for(
    settings: Settings,
    model_dir: str | Path,
    emulate: HardwareProfile | str | Path,
    *,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
) -> HardwareProfile:
    """`emulated_profile` for what `settings` charge, with the memory they give it."""
    profile = emulated_profile(
        emulate, charged_shape(model_dir, settings), settings.gating,
        time_scale=time_scale, link=link, numerics=settings.numerics,
    )  # fmt: skip
    return profile if settings.vram is None else with_vram(profile, parse_bytes(settings.vram))


def device_for(
    settings: Settings,
    model_dir: str | Path,
    name: str = "auto",
    *,
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    always_predict: bool = False,
    host: HostSide = ONE_THREAD,
) -> EmulatedDevice | CudaDevice:
    """The device `name` for a model directory and settings; what paces it is in `.costs`."""
    chosen = choose_device(name)
    if host.promotion != "auto" and chosen != "cuda":
        raise KairoxError(
            f"promotion {host.promotion!r} is a way to give a CUDA device its rows, and the device "
            f"is {chosen!r}; leave it out"
        )
    if chosen != "emulated":
        refuse_pace(name, emulate=emulate, time_scale=time_scale, link=link)
        return _unpaced(chosen, settings, host)
    if emulate is None:
        raise KairoxError("device 'emulated' needs a profile to emulate, such as emu-pc1 or pc1")
    own = model_shape(model_dir, settings)
    predictor = predictor_of(settings)
    if predictor == "none" and always_predict:
        predictor = "lookahead"
    profile = profile_for(settings, model_dir, emulate, time_scale=time_scale, link=link)
    costs = costs_for(
        profile,
        charged_shape(model_dir, settings),
        settings.gating,
        trace_layers=own.n_layers,
        trace_neurons=own.n_neurons,
        predictor=predictor,
        swap_neurons=settings.swap_neurons,
        numerics=settings.numerics,
    )
    if settings.groups is not None:
        costs = of_groups(costs, group_size(settings, own.n_neurons))
    device = EmulatedDevice(costs, host.pool)
    device.profile = profile
    return device


def _unpaced(name: str, settings: Settings, host: HostSide) -> EmulatedDevice | CudaDevice:
    """cuda, or cpu: as fast as it goes. A GPU's budget may be what is free."""
    if name == "cuda":
        device: EmulatedDevice | CudaDevice = CudaDevice(host.pool, promotion=host.promotion)
        device.profile = this_machine(name)
    else:
        device = EmulatedDevice(pool=host.pool)
    if settings.vram is not None:
        device.profile = with_vram(this_machine(name), parse_bytes(settings.vram))
    return device


def pace_lost(device: Device) -> tuple[float, float]:
    """How far an emulated device fell behind its profile; nan where nothing is paced.

    (share of all ops that took longer than they may, by how much those of its GPU were longer in
    all): few ops that are very late are no better than many that are a little late.
    """
    if not isinstance(device, EmulatedDevice) or device.costs is None:
        return math.nan, math.nan
    return device.n_overruns / max(1, device.n_ops), device.behind_ns / max(1, device.paced_ns)

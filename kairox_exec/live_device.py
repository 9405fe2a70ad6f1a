"""The machine a live run is on: which device, at which pace, with how much memory.

The device outlives the Runner and is closed by whoever built it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.loading import DTYPES, read_config
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


def model_shape(model_dir: str | Path, settings: Settings | None = None) -> ModelShape:
    """What a model directory describes, as `settings` run it, named as its folder.

    A folder with the name of a catalogue entry must have its shape.
    """
    config = read_config(model_dir)
    name = Path(model_dir).resolve().name
    n_bytes = float(DTYPES[(settings or Settings()).dtype].itemsize)
    approximate = settings is not None and settings.thresholds is not None
    shape = shape_from_config(config, name=name, bytes_per_weight=n_bytes, approximate=approximate)
    known = CATALOGUE.get(name)
    if known is None:
        return shape
    for field in ("n_layers", "n_neurons", "d_model"):
        if getattr(known, field) != getattr(shape, field):
            raise KairoxError(
                f"{name!r} is a model of the catalogue with {field} {getattr(known, field)}, and "
                f"config.json says {getattr(shape, field)}; give the folder another name"
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
    """emulated or cpu: `auto` is the best that there is."""
    if name not in DEVICES:
        raise KairoxError(f"unknown device {name!r}; allowed: {', '.join(DEVICES)}")
    if name == "cuda":
        why = (
            "is not built yet" if torch.cuda.is_available() else "needs a CUDA GPU: torch sees none"
        )
        raise KairoxError(f"device 'cuda' {why}; use cpu, or emulated (with --emulate)")
    return "cpu" if name == "auto" else name


def this_host() -> HardwareProfile:
    """What is known of this machine without timing it; its rates are never used."""
    ram = Quantity(
        value=float(psutil.virtual_memory().total), source="psutil: the device is host memory"
    )
    nothing = Quantity(value=0.0, source="none kept free")
    return load_profile("pc1").model_copy(
        update={
            "name": "this-host",
            "vram_bytes": ram,
            "vram_margin_bytes": nothing,
            "decide_blocks_gpu": True,
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
) -> EmulatedDevice:
    """The device `name` for a model directory and settings; what paces it is in `.costs`."""
    chosen = choose_device(name)
    if chosen != "emulated":
        for option, given in (("emulate", emulate), ("time_scale", time_scale), ("link", link)):
            if given is not None:
                raise KairoxError(
                    f"{option} is for the emulated device and the device is {name!r}; "
                    "use device 'emulated', or leave it out"
                )
        device = EmulatedDevice()
        if settings.vram is not None:
            device.profile = with_vram(this_host(), parse_bytes(settings.vram))
        return device
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
    device = EmulatedDevice(costs)
    device.profile = profile
    return device

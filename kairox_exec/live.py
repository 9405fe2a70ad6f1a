"""From Settings to a model that runs: which device, at which pace, and a Runner ready to be timed.

`build_device`, then `start`; `load` is both. The device outlives the Runner and is closed by
whoever built it. Torch's thread count is the caller's, see `set_threads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.gating import LOSSLESS
from kairox_exec.kernels import Kernels, torch_ref
from kairox_exec.layer_step import LayerStep
from kairox_exec.loading import load_dense, model_sha256, read_config
from kairox_exec.runner import Runner, attach
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event
from kairox_sim.hardware import HardwareProfile, LinkProfile, scaled
from kairox_sim.model import CATALOGUE, ModelShape, Numerics
from kairox_sim.policies import POLICIES
from kairox_sim.settings import (
    Settings,
    build_cache,
    group_size,
    load_prior,
    predictor_of,
    shape_of,
)
from kairox_sim.shape_config import shape_from_config
from kairox_sim.simulation import machine, of_groups
from kairox_sim.trace import Trace

DEVICES = ("auto", "cuda", "emulated", "cpu")
KernelChoice = Literal["numba", "torch"]

RUN_BYTES_PER_WEIGHT = 4  # the executor runs in float32
# The shortest decode layer of an emulated machine. At 2 ms the real work of an attention op, about
# 1 ms of Python on a 2-core machine, came too close to its pace: 2 % of ops overran; now 0.2 %.
LAYER_S = 3e-3


def model_shape(model_dir: str | Path) -> ModelShape:
    """What a model directory describes, as the executor runs it: in float32, named as its folder.

    A folder with the name of a catalogue entry must have its shape.
    """
    config = read_config(model_dir)
    name = Path(model_dir).resolve().name
    shape = shape_from_config(config, name=name, bytes_per_weight=RUN_BYTES_PER_WEIGHT)
    known = CATALOGUE.get(name)
    if known is None:
        return shape
    for field in ("n_layers", "n_neurons", "d_model"):
        if getattr(known, field) != getattr(shape, field):
            raise KairoxError(
                f"{name!r} is a model of the catalogue with {field} {getattr(known, field)}, and "
                f"config.json says {getattr(shape, field)}; give the folder another name"
            )
    return replace(known, bytes_per_weight=RUN_BYTES_PER_WEIGHT, kv_bytes_per_value=None)


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
    if name == "cuda":
        raise KairoxError(
            "device 'cuda' is not built yet; allowed: auto, cpu, and emulated (with --emulate)"
        )
    return "cpu" if name == "auto" else name


def build_device(
    name: str,
    *,
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    shape: ModelShape,
    gating: str,
    model_as: str | None = None,
    n_layers: int,
    n_neurons: int,
    predictor: str = "lookahead",
    swap_neurons: int = 16,
    numerics: Numerics = "fast",
) -> tuple[EmulatedDevice, CostModel | None]:
    """The device `name` for a model of `n_layers` x `n_neurons`, and what paces it (cpu: nothing).

    shape: of the model itself; `model_as`, where given, is charged instead. swap_neurons: bundles
    of the model that is charged, as in Settings.
    """
    chosen = choose_device(name)
    if chosen == "cpu":
        for option, given in (("emulate", emulate), ("time_scale", time_scale), ("link", link)):
            if given is not None:
                raise KairoxError(
                    f"{option} is for the emulated device and the device is {name!r}; "
                    "use device 'emulated', or leave it out"
                )
        return EmulatedDevice(), None
    if emulate is None:
        raise KairoxError("device 'emulated' needs a profile to emulate, such as emu-pc1 or pc1")
    target = shape if model_as is None else shape_of(model_as)
    profile = emulated_profile(
        emulate, target, gating, time_scale=time_scale, link=link, numerics=numerics
    )
    costs = costs_for(
        profile,
        target,
        gating,
        trace_layers=n_layers,
        trace_neurons=n_neurons,
        predictor=predictor,
        swap_neurons=swap_neurons,
        numerics=numerics,
    )
    return EmulatedDevice(costs), costs


def profile_for(
    settings: Settings,
    model_dir: str | Path,
    emulate: HardwareProfile | str | Path,
    *,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
) -> HardwareProfile:
    """`emulated_profile` for what `settings` charge: the model itself, or their stand-in."""
    shape = model_shape(model_dir)
    target = shape if settings.model_as is None else shape_of(settings.model_as)
    return emulated_profile(
        emulate, target, settings.gating,
        time_scale=time_scale, link=link, numerics=settings.numerics,
    )  # fmt: skip


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
    """`build_device` for a model directory and settings; its costs are in `.costs`."""
    shape = model_shape(model_dir)
    predictor = predictor_of(settings)
    if predictor == "none" and always_predict:
        predictor = "lookahead"
    device, costs = build_device(
        name,
        emulate=emulate,
        time_scale=time_scale,
        link=link,
        shape=shape,
        gating=settings.gating,
        model_as=settings.model_as,
        n_layers=shape.n_layers,
        n_neurons=shape.n_neurons,
        predictor=predictor,
        swap_neurons=settings.swap_neurons,
        numerics=settings.numerics,
    )
    if costs is not None and settings.groups is not None:
        device.costs = of_groups(costs, group_size(settings, shape.n_neurons))
    return device


def start(
    model_dir: str | Path,
    settings: Settings,
    device: EmulatedDevice,
    *,
    prior: Trace | str | Path | None = None,
    on_layer: Callable[[LayerStep], None] | None = None,
    journal: Callable[[Event], None] | None = None,
    kernels: KernelChoice = "numba",
    always_predict: bool = False,
) -> Runner:
    """Load a model, put hybrid FFNs in, and compile what will be timed.

    prior: instead of the one `settings` name. journal: told every call of the cache, see calllog.
    always_predict: predict even if the policy never plans, so that a recorder sees what it says.
    """
    _require_built(settings)
    shape = model_shape(model_dir)
    learnt_from = load_prior(settings, prior)
    if learnt_from is not None:
        learnt_from.header.check_model(
            model_sha256=model_sha256(model_dir),
            n_layers=shape.n_layers,
            n_neurons=shape.n_neurons,
        )
    cache = build_cache(
        settings, shape.n_layers, shape.n_neurons, prior=learnt_from, shape=shape, journal=journal
    )
    host = _kernels(kernels)
    model, config = load_dense(model_dir)
    runner = attach(
        model,
        config,
        lambda n_layers, n_neurons: cache,
        device,
        gating=settings.gating,
        numerics=settings.numerics,
        trigger=settings.trigger,
        late=settings.late,
        look_ahead=settings.predictor != "none",
        always_predict=always_predict,
        host_kernels=host,
        device_kernels=host,
        on_layer=on_layer,
    )
    warm_up(runner, host)
    return runner


def load(
    model_dir: str | Path,
    settings: Settings | None = None,
    *,
    device: str = "auto",
    emulate: HardwareProfile | str | Path | None = None,
    time_scale: float | None = None,
    link: LinkProfile | str | Path | None = None,
    prior: Trace | str | Path | None = None,
    kernels: KernelChoice = "numba",
) -> Runner:
    """A model with hybrid FFNs under `settings` (the defaults: TAM, a quarter of the neurons).

    The device is the Runner's `.device`; close it when done.
    """
    chosen = settings or Settings()
    built = device_for(chosen, model_dir, device, emulate=emulate, time_scale=time_scale, link=link)
    try:
        return start(model_dir, chosen, built, prior=prior, kernels=kernels)
    except BaseException:
        built.close()
        raise


@torch.inference_mode()
def warm_up(runner: Runner, kernels: Kernels) -> None:
    """Compile the host's kernels in the forms this run calls them in; nothing is kept."""
    bundle = runner.pipeline.bundles[0]
    index = torch.from_numpy(np.arange(min(4, bundle.n_neurons), dtype=np.int32))
    for n_tokens in (1, 2):
        x = torch.zeros((n_tokens, bundle.d_model))
        act = kernels.gate_all(x, bundle.gate_w, bundle.gate_b, bundle.spec)
        kernels.ffn_union(
            x,
            bundle.rows,
            index,
            bundle.spec,
            act=act[:, index],
            up_b=None if bundle.up_b is None else bundle.up_b[index],
        )


def set_threads(n: int | None) -> int:
    """Set torch's threads where `n` is given; returns how many there are.

    The host's and the link's lane have a thread each beside them: on a few cores give one to torch.
    """
    if n is not None:
        if n < 1:
            raise KairoxError(f"threads must be 1 or more, got {n}")
        torch.set_num_threads(n)
    return torch.get_num_threads()


def _kernels(choice: KernelChoice) -> Kernels:
    if choice == "torch":
        return torch_ref
    if choice == "numba":
        from kairox_exec.kernels import numba_cpu

        return numba_cpu
    raise KairoxError(f"unknown kernels {choice!r}; allowed: numba, torch")


def _require_built(settings: Settings) -> None:
    """What a simulation can be asked for and the executor cannot do yet, all in one message."""
    policy = POLICIES[settings.policy]
    said = [
        f"{key} {getattr(settings, key)!r} (allowed: {allowed})"
        for key, allowed, runs in (
            ("gating", "exact, oracle, screened", settings.gating in LOSSLESS),
            (
                "predictor",
                "lookahead, none",
                settings.predictor != "rank" or policy.admits == "never",
            ),
            ("policy", "one that does not know the future", "future" not in policy.needs),
            ("policy", "one that needs no machine's rates", "gpu_over_cpu" not in policy.needs),
            # A live run knows no profile of the machine it is on, so nothing follows from one.
            ("slots", "a number, density, a size, all", not _of_a_machine(settings.slots)),
            ("placement", "counts", settings.placement == "counts"),
            ("dispatch", "concurrent", settings.dispatch == "concurrent"),
            ("late", "cpu, stall", (settings.late or policy.default_late) != "cancel"),
            ("layout", "natural", settings.layout == "natural"),
            *(
                (key, repr(default), getattr(settings, key) == default)
                for key in ONLY_SIMULATED
                for default in [Settings.model_fields[key].default]
            ),
        )
        if not runs
    ]
    if said:
        raise KairoxError(
            f"cannot be run live yet, only simulated: {'; '.join(said)}. Change them, and of a "
            "system give its policy, controller and groups themselves"
        )


ONLY_SIMULATED = (
    "weights",
    "dtype",
    "vram",
    "predictor_file",
    "thresholds",
    "copies",
    "copies_per_sync",
    "handovers",
    "lookahead_from",
    "context_start",
)


def _of_a_machine(slots: object) -> bool:
    return isinstance(slots, str) and (slots == "vram" or slots.startswith("ngl"))

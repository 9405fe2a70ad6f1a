"""From Settings to a model that runs: a Runner ready to be timed, on the machine of `live_device`.

`device_for`, then `start`; `load` is both. Torch's thread count is the caller's, see `set_threads`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from kairox_exec.checkpoint import Progress
from kairox_exec.device import Device
from kairox_exec.kernels import Kernels, torch_ref
from kairox_exec.layer_step import LayerStep
from kairox_exec.live_device import (
    LAYER_S,
    ONE_THREAD,
    HostSide,
    charged_shape,
    choose_device,
    device_for,
    emulated_profile,
    model_shape,
    profile_for,
    shortest_layer_s,
)
from kairox_exec.loading import load_bundled, model_sha256
from kairox_exec.mlp_predictor import load_predictor
from kairox_exec.runner import Runner, run_bundles
from kairox_exec.thresholds import read_thresholds
from kairox_sim.errors import KairoxError
from kairox_sim.events import Event
from kairox_sim.hardware import HardwareProfile, LinkProfile
from kairox_sim.policies import POLICIES
from kairox_sim.settings import Settings, build_cache, load_prior, predictor_of
from kairox_sim.trace import Trace

__all__ = [
    "LAYER_S",
    "ONE_THREAD",
    "HostSide",
    "KernelChoice",
    "charged_shape",
    "choose_device",
    "device_for",
    "emulated_profile",
    "load",
    "model_shape",
    "profile_for",
    "set_threads",
    "shortest_layer_s",
    "start",
    "warm_up",
]

KernelChoice = Literal["numba", "torch"]
"""numba: on the host, with Triton's on a GPU; torch: the reference, on both"""
CPU = torch.device("cpu")
MOST_THREADS = 1024


def start(
    model_dir: str | Path,
    settings: Settings,
    device: Device,
    *,
    prior: Trace | str | Path | None = None,
    on_layer: Callable[[LayerStep], None] | None = None,
    journal: Callable[[Event], None] | None = None,
    kernels: KernelChoice = "numba",
    always_predict: bool = False,
    audit: bool = False,
    context_len: int | None = None,
    cache_dir: str | Path | None = None,
    on_load: Progress | None = None,
    on_loaded: Callable[[str], None] | None = None,
) -> Runner:
    """Load a model, put hybrid FFNs in, and compile what will be timed.

    prior: instead of the one `settings` name. journal: told every call of the cache, see calllog.
    always_predict: predict even if the policy never plans, so that a recorder sees what it says.
    audit: of `run_bundles`. context_len: tokens of the longest sequence to come, for a budget that
    is what fits; the model's longest by default. cache_dir: of `load_bundled`, as
    on_load, which is also told of hashing and compiling. on_loaded: told where the bundles of a
    large model came from.
    """
    _require_built(settings)
    shape = model_shape(model_dir, settings)
    learnt_from = load_prior(settings, prior)
    if learnt_from is not None:
        learnt_from.header.check_model(
            model_sha256=model_sha256(model_dir, on_load),
            n_layers=shape.n_layers,
            n_neurons=shape.n_neurons,
        )
    learnt = None
    if predictor_of(settings) == "rank" and settings.predictor_file is not None:
        learnt = load_predictor(
            settings.predictor_file,
            model_sha256=model_sha256(model_dir, on_load),
            n_layers=shape.n_layers,
            n_neurons=shape.n_neurons,
        )
    host, on_device = _kernels(kernels, device)
    thresholds = None
    if settings.thresholds is not None:
        thresholds = read_thresholds(settings.thresholds, model_dir).per_layer
    loaded = load_bundled(
        model_dir, gating=settings.gating, fmt=settings.weights or settings.dtype,
        numerics=settings.numerics, dtype=settings.dtype, thresholds=thresholds,
        cache_dir=cache_dir, on_progress=on_load,
    )  # fmt: skip
    if on_loaded is not None and loaded.notice:
        on_loaded(loaded.notice)
    longest = int(loaded.config.max_position_embeddings)
    cache = build_cache(
        settings, shape.n_layers, shape.n_neurons,
        prior=learnt_from, shape=shape, profile=device.profile, journal=journal,
        context_len=min(context_len or longest, longest),
    )  # fmt: skip
    runner = run_bundles(
        loaded.model,
        loaded.config,
        loaded.family,
        loaded.bundles,
        lambda n_layers, n_neurons: cache,
        device,
        trigger=settings.trigger,
        late=settings.late,
        look_ahead=settings.predictor != "none",
        learnt=learnt,
        always_predict=always_predict,
        audit=audit,
        host_kernels=host,
        device_kernels=on_device,
        on_layer=on_layer,
    )
    if on_load is not None:
        on_load("compiling kernels", 0, 1)
    warm_up(runner, host)
    if on_device is not host:
        warm_up(runner, on_device, device.where)
    if on_load is not None:
        on_load("compiling kernels", 1, 1)
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
    host: HostSide = ONE_THREAD,
) -> Runner:
    """A model with hybrid FFNs under `settings` (the defaults: TAM, a quarter of the neurons).

    The device is the Runner's `.device`; close it when done.
    """
    chosen = settings or Settings()
    built = device_for(
        chosen, model_dir, device, emulate=emulate, time_scale=time_scale, link=link, host=host
    )
    try:
        return start(
            model_dir, chosen, built, prior=prior, kernels=kernels,
            cache_dir=host.cache_dir, on_load=host.on_load, on_loaded=host.on_loaded,
        )  # fmt: skip
    except BaseException:
        built.close()
        raise


@torch.inference_mode()
def warm_up(runner: Runner, kernels: Kernels, where: torch.device = CPU) -> None:
    """Compile kernels in the forms this run calls them in; nothing is kept."""
    bundle = runner.pipeline.bundles[0]
    n = min(4, bundle.n_neurons)
    index = torch.arange(n, dtype=torch.int32, device=where)
    rows, gate_rows = bundle.rows[:n].to(where), bundle.gate_w[:n].to(where)
    gate_b, up_b = (None if b is None else b[:n].to(where) for b in (bundle.gate_b, bundle.up_b))
    for n_tokens in (1, 2):
        x = torch.zeros((n_tokens, bundle.d_model), device=where)
        given: dict[str, Any] = {"gate_b": gate_b, "up_b": up_b}
        if bundle.gating in ("exact", "oracle"):
            act = kernels.gate_all(x, gate_rows, gate_b, bundle.spec)
            given |= {"act": act, "gate_b": None}
        else:
            given["fired"] = torch.empty((n_tokens, n), dtype=torch.bool, device=where)
        kernels.ffn_union(x, rows, index, bundle.spec, **given)
        if bundle.gating == "screened":
            codes = torch.zeros((n, bundle.d_model), dtype=torch.int8, device=where)
            kernels.code_dots(x, codes)
        elif runner.pipeline.predicts:  # a look-ahead is a guess, so in fast numerics always
            kernels.gate_all(x, gate_rows, gate_b, replace(bundle.spec, numerics="fast"))


def set_threads(n: int | None) -> int:
    """Set torch's threads where `n` is given; returns how many there are.

    The host's and the link's lane have a thread each beside them: on a few cores give one to torch.
    """
    if n is not None:
        if not 1 <= n <= MOST_THREADS:
            raise KairoxError(f"threads must be 1 to {MOST_THREADS}, got {n}")
        torch.set_num_threads(n)
    return torch.get_num_threads()


def _kernels(choice: KernelChoice, device: Device) -> tuple[Kernels, Kernels]:
    """(the host's, the device's)"""
    if choice == "torch":
        return torch_ref, torch_ref
    if choice == "numba":
        from kairox_exec.kernels import numba_cpu

        if device.where.type != "cuda":
            return numba_cpu, numba_cpu
        from kairox_exec.kernels import triton_cuda

        return numba_cpu, triton_cuda
    raise KairoxError(f"unknown kernels {choice!r}; allowed: numba, torch")


def _require_built(settings: Settings) -> None:
    """What a simulation can be asked for and the executor cannot do yet, all in one message."""
    untrained = predictor_of(settings) == "rank" and settings.predictor_file is None
    policy = POLICIES[settings.policy]
    in_force = {
        **{key: getattr(settings, key) for key in Settings.model_fields},
        "predictor": predictor_of(settings),
        "late": settings.late or policy.default_late,
    }
    said = [
        f"{key} {in_force[key]!r} (allowed: {allowed})"
        for key, allowed, runs in (
            ("gating", "exact, oracle, screened, predicted", settings.gating != "dense"),
            ("policy", "one that does not know the future", "future" not in policy.needs),
            ("policy", "one that needs no machine's rates", "gpu_over_cpu" not in policy.needs),
            (
                "slots",
                "a number, density, a size, vram, all",
                not str(settings.slots).startswith("ngl"),
            ),
            (
                "predictor",
                "lookahead, or rank with a --predictor-file of `kairox train-predictor`",
                not untrained,
            ),
            ("placement", "counts", settings.placement == "counts"),
            ("dispatch", "concurrent", settings.dispatch == "concurrent"),
            ("late", "cpu, stall", in_force["late"] != "cancel"),
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


ONLY_SIMULATED = ("copies", "copies_per_sync", "handovers", "lookahead_from", "context_start")

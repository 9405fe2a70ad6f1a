"""Part 4: the 7B-shaped model at two memory budgets under four policies, timed op by op.

Every run is written as soon as it is over: its records and means (large-<run>.json), its ops
(large-<run>.ops.json) and what fired and was predicted, as bits (large-<run>.<what>.bits).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.gpu_check.big import (
    BigShape,
    described,
    new_bundles,
    new_model,
    shape_for,
    slots_within,
    sticky_tokens,
)
from experiments.gpu_check.offload import against_accelerate
from experiments.gpu_check.place import Left, Place, write_json
from experiments.gpu_check.timeline import op_from_row, op_rows, overlap_s, write_trace_events
from kairox_exec.families import family_of
from kairox_exec.layer_step import LayerStep
from kairox_exec.oplog import NS, Op
from kairox_exec.runner import run_bundles
from kairox_exec.weights import NeuronBundles
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Fixed
from kairox_sim.policies import POLICIES
from kairox_sim.record import StepRecord

GB = 1e9
BUDGETS_BYTES = (12 * GB, 24 * GB)
MARGIN_BYTES = 1 * GB  # CUDA's context, cuBLAS, activations
SETTINGS = (("static", "fixed"), ("lru", "fixed"), ("tam", "fixed"), ("tam", "anb"))
PREFILL = 16
SECONDS_A_RUN = 25.0  # what must be left for another one to begin


@dataclass(frozen=True, slots=True)
class Setting:
    policy: str
    controller: str
    slots: int
    budget_bytes: float | None  # None: a rehearsal's

    @property
    def label(self) -> str:
        policy = self.policy if self.controller == "fixed" else f"{self.policy}+{self.controller}"
        if self.budget_bytes is None:
            return f"{policy}-{self.slots}-slots"
        return f"{policy}-{self.budget_bytes / GB:g}GB"


@dataclass(slots=True)
class Fired:
    """What fired, and what was predicted, row by row as layers report it."""

    counts: NDArray[np.int64]  # [n_layers, n_neurons]
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # step, token, layer, phase
    active: list[bytes] = field(default_factory=list)
    predicted: list[bytes] = field(default_factory=list)
    known: list[bool] = field(default_factory=list)  # whether something was predicted

    def add(self, done: LayerStep) -> None:
        self.counts[done.layer] += np.count_nonzero(done.active, axis=0)
        for at, token in enumerate(done.step.tokens):
            decode = done.step.phase == "decode"
            self.rows.append((done.step.step, int(token), done.layer, int(decode)))
            self.active.append(_packed(done.active[at]))
            said = done.predicted
            self.known.append(said is not None)
            self.predicted.append(_packed(np.zeros_like(done.active[at]) if said is None
                                          else said[at]))  # fmt: skip


def check_large(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    """Times, so nothing passes; it fails where a run does, or is left out."""
    shape = shape_for(place)
    bundles = new_bundles(place, shape)
    n_decode = 6 if place.rehearse else 48
    settings = settings_of(place, shape)
    most = shape.n_neurons
    if not place.rehearse:
        most = slots_within(shape, min(BUDGETS_BYTES[-1], _memory_bytes(place)), MARGIN_BYTES)
    everything = Setting("static", "fixed", most, None)
    runs, left_out, failed = [], [], []
    counts = np.ones((shape.n_layers, shape.n_neurons), np.int64)
    profiled, fired = run_big(place, shape, bundles, everything, counts, n_decode, seed=10)
    runs.append(_kept(folder, "profile", profiled, fired))
    for setting in settings:
        if left() < SECONDS_A_RUN:
            left_out.append(f"{setting.label} for lack of time")
            continue
        if setting.budget_bytes and setting.budget_bytes > _memory_bytes(place):
            left_out.append(f"{setting.label} on a card of {_memory_bytes(place) / GB:.1f} GB")
            continue
        try:
            result, what = run_big(place, shape, bundles, setting, fired.counts, n_decode, seed=11)
        except Exception as error:  # the other runs are worth having
            failed.append({"setting": setting.label, "error": f"{type(error).__name__}: {error}"})
            continue
        runs.append(_kept(folder, setting.label, result, what))
    budgets = BUDGETS_BYTES if not place.rehearse else (0.0,)
    offloaded = [
        against_accelerate(place, shape, bundles, budget, left, n_decode) for budget in budgets
    ]
    return {
        "passed": False if left_out or failed else None,
        "said": f"{len(runs)} runs of {n_decode} decode tokens; left out: "
        f"{', '.join(left_out) or 'none'}; failed: "
        f"{', '.join(row['setting'] for row in failed) or 'none'}",
        "model": described(shape),
        "host_threads": place.host_threads,
        "runs": runs,
        "accelerate": offloaded,
        "left_out": left_out,
        "failed": failed,
    }


def settings_of(place: Place, shape: BigShape) -> list[Setting]:
    if place.rehearse:
        return [Setting(*names, shape.n_neurons // 4, None) for names in SETTINGS]
    return [
        Setting(*names, slots_within(shape, budget, MARGIN_BYTES), budget)
        for budget in BUDGETS_BYTES
        for names in SETTINGS
    ]


def run_big(
    place: Place,
    shape: BigShape,
    bundles: Sequence[NeuronBundles],
    setting: Setting,
    counts: NDArray[np.int64],
    n_decode: int,
    *,
    seed: int,
) -> tuple[dict[str, Any], Fired]:
    """One run over drawn tokens; the most frequent of `counts` are resident at its start."""
    cache = new_cache(setting, counts)
    _limit_memory(place, setting.budget_bytes)
    fired = Fired(np.zeros((shape.n_layers, shape.n_neurons), np.int64))
    tokens = sticky_tokens(shape, PREFILL + n_decode, seed)
    records: list[StepRecord] = []
    steps: list[tuple[int, int, list[Op]]] = []
    try:
        with closing(place.new_device()) as device:
            model, config = new_model(place, shape)
            runner = run_bundles(
                model,
                config,
                family_of(config),
                bundles,
                lambda n_layers, n_neurons: cache,
                device,
                host_kernels=place.host_kernels(),
                device_kernels=place.device_kernels(),
                on_layer=fired.add,
            )
            runner.keep_ops = True
            with runner:
                for _, record in runner.run([tokens], prefill=PREFILL, prefill_chunk=PREFILL):
                    ops, runner.ops = runner.ops, []
                    began_ns = min(op.t0_ns for op in ops if op.lane == "gpu")
                    steps.append((began_ns, began_ns + round(record.wall_s * NS), ops))
                    records.append(record)
            status = getattr(device, "status", {})
            blocks = bool(getattr(device, "decide_blocks_gpu", True))
            peak = None if place.rehearse else torch.cuda.max_memory_allocated()
            del runner, model
    finally:
        _limit_memory(place, None)
        gc.collect()
    result = {
        **asdict(setting), "setting": setting.label, "model": described(shape),
        "label": place.label, "decide_blocks_gpu": blocks,
        "peak_device_bytes": peak, "device_status": dict(status), "seed": seed,
        "means": means(records, steps), "records": [asdict(record) for record in records],
        "steps": [
            {"began_ns": t0, "ended_ns": t1, "n_tokens": record.n_tokens, "ops": op_rows(ops)}
            for (t0, t1, ops), record in zip(steps, records, strict=True)
        ],
    }  # fmt: skip
    return result, fired


def new_cache(setting: Setting, counts: NDArray[np.int64]) -> NeuronCache:
    """counts [n_layers, n_neurons]: the most frequent neurons are resident at the start."""
    order = np.argsort(-counts, axis=1, kind="stable")[:, : setting.slots].astype(np.int32)
    hottest = [np.sort(layer) for layer in order]
    static = setting.policy == "static"
    return NeuronCache(
        *counts.shape,
        setting.slots,
        POLICIES[setting.policy](*counts.shape),
        Anb() if setting.controller == "anb" else Fixed(),
        pinned=hottest if static else None,
        warm=None if static else hottest,
    )


def means(
    records: Sequence[StepRecord], steps: Sequence[tuple[int, int, list[Op]]]
) -> dict[str, float]:
    """Of the decode steps; the first is left out, since kernels are compiled in it."""
    chosen = [
        (record, overlap_s(ops, t0, t1))
        for record, (t0, t1, ops) in zip(records, steps, strict=True)
        if record.phase == "decode"
    ][1:]
    only = [record for record, _ in chosen]
    some = fmean(overlap[0] for _, overlap in chosen)
    names = (
        "gpu_busy_s", "cpu_busy_s", "swap_busy_s", "act_busy_s", "predict_s", "decide_s",
        "wait_cpu_s", "wait_io_s", "evaluated", "hit_resident", "hit_on_time", "late", "residual",
        "loads", "h2d_bytes",
    )  # fmt: skip
    return {
        "tokens_per_s": 1 / median(record.wall_s for record in only),
        "wall_s": median(record.wall_s for record in only),
        **{name: fmean(getattr(record, name) for record in only) for name in names},
        "hit_on_time_share": sum(r.hit_on_time for r in only) / sum(r.evaluated for r in only),
        "overlap_share": fmean(overlap[1] for _, overlap in chosen) / some,
    }


def _kept(folder: Path, name: str, result: dict[str, Any], fired: Fired) -> dict[str, Any]:
    """Write a run's files; returns what belongs in the part's own."""
    steps = result.pop("steps")
    bits = {
        "rows": fired.rows, "predicted_known": fired.known,
        "bytes_per_row": len(fired.active[0]), "order": "little-endian bits, neuron 0 first",
    }  # fmt: skip
    for what, some in (("active", fired.active), ("predicted", fired.predicted)):
        (folder / f"large-{name}.{what}.bits").write_bytes(b"".join(some))
    for what, content in (("", result), (".ops", steps), (".bits", bits)):
        write_json(folder / f"large-{name}{what}.json", content)
    last = [op_from_row(row) for step in steps[-2:] for row in step["ops"]]
    write_trace_events(last, folder / f"large-{name}.timeline.json")
    return {key: value for key, value in result.items() if key != "records"} | {"run": name}


def _limit_memory(place: Place, budget_bytes: float | None) -> None:
    """Hold torch to the budget: what is above it fails instead of passing unseen."""
    if place.rehearse:
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    share = 1.0 if budget_bytes is None else min(1.0, budget_bytes / _memory_bytes(place))
    torch.cuda.set_per_process_memory_fraction(share)


def _memory_bytes(place: Place) -> float:
    return float(torch.cuda.get_device_properties(place.device).total_memory)


def _packed(mask: NDArray[np.bool_]) -> bytes:
    return np.packbits(mask, bitorder="little").tobytes()

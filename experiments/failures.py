"""What the figures of failure modes share: systems on equal terms, their steps, planted bursts.

A stand-in's neuron is several of the model's, so groups are of so many of the trace's neurons as
come nearest to the 16 to 36 of the OSDI '26 paper in the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kairox_sim.controllers import Knobs
from kairox_sim.engine import run_trace
from kairox_sim.events import Event, StepEnded
from kairox_sim.figure_data import LABELS
from kairox_sim.hardware import load_profile
from kairox_sim.metrics import RunResult
from kairox_sim.prediction import Perfect
from kairox_sim.settings import Settings, build_cache
from kairox_sim.simulation import costs_of, simulate, target_shape
from kairox_sim.systems import find_system
from kairox_sim.trace import Trace, pack, unpack
from kairox_sim.trace_stats import counts
from kairox_sim.workload import Workload
from kairox_sim.workload_presets import PRESETS

HOT_SHARE = 0.3  # the OSDI '26 paper calls the other 70 % cold


def run_system(
    trace: Trace, system: str, hardware: str, prior: Trace | None, groups: str, **settings: Any
) -> RunResult:
    """A system as it is, its groups, if it has any, made to measure."""
    return simulate(trace, _settings(system, groups, **settings), hardware=hardware, prior=prior)


def _settings(system: str, groups: str, **settings: Any) -> Settings:
    grouped = {"groups": groups} if "groups" in find_system(system).settings else {}
    return Settings.of({"system": system, **grouped, **settings})


def knobs_in_force(
    trace: Trace, system: str, hardware: str, prior: Trace, groups: str, **settings: Any
) -> list[Knobs]:
    """The knobs during each step of the same run, from the cache's journal."""
    asked = _settings(system, groups, **settings)
    profile, shape = load_profile(hardware), target_shape(asked, trace.header)
    events: list[Event] = []
    cache = build_cache(
        asked, trace.header.n_layers, trace.header.n_neurons,
        prior=prior, shape=shape, profile=profile, evaluated=trace, journal=events.append,
    )  # fmt: skip
    first = cache.controller.knobs
    costs = costs_of(asked, profile, shape, cache)
    run_trace(
        trace, cache, costs,
        trigger=asked.trigger, late=asked.late, predictions=Perfect(),
        dispatch=asked.dispatch, lookahead_from=asked.lookahead_from,
    )  # fmt: skip
    after = [event.knobs for event in events if isinstance(event, StepEnded)]
    return [first, *after[:-1]]


def decode_steps(run: RunResult, **said: Any) -> pd.DataFrame:
    """A run's decode steps, numbered, with LABELS, `said`, and `token_s`: wall_s at the model's
    number of layers."""
    steps = run.steps[run.steps["phase"] == "decode"].reset_index(drop=True)
    ratio = run.summary["tok_s"] / run.summary["tok_s_scaled"]
    labels = {name: run.labels[name] for name in LABELS}
    return steps.assign(decode_step=steps.index, token_s=steps["wall_s"] * ratio, **labels, **said)


def synthetic(spec: Mapping[str, Any]) -> Workload:
    """A preset with fields replaced; without predicted sets, so that what fires is computed."""
    changed = {key: value for key, value in spec.items() if key != "preset"}
    return dataclasses.replace(PRESETS[spec["preset"]], predicted=None, recall=1.0, **changed)


def cold_ids(prior: Trace, layer: int) -> NDArray[np.intp]:
    """All but the most frequent HOT_SHARE of a layer's neurons in the prior."""
    order = np.argsort(-counts(prior)[layer], kind="stable")
    return order[round(HOT_SHARE * len(order)) :]


def planted(
    trace: Trace, layer: int, cold: NDArray[np.intp], at: Mapping[int, int], seed: int = 0
) -> Trace:
    """The trace with `at[step]` more neurons of `layer` active at a decode step, drawn from `cold`
    without those that are active anyway."""
    rng = np.random.default_rng(seed)
    fired = unpack(trace.bits, trace.header.n_neurons).astype(bool)
    for step, n_more in at.items():
        row = int(np.flatnonzero((trace.step == step) & (trace.layer == layer))[0])
        silent = cold[~fired[row, cold]]
        fired[row, rng.choice(silent, n_more, replace=False)] = True
    return Trace.from_arrays(
        trace.header,
        seq=trace.seq, step=trace.step, token=trace.token, layer=trace.layer, phase=trace.phase,
        bits=pack(fired),
    )  # fmt: skip


def joined(traces: Sequence[Trace]) -> Trace:
    """Decode traces of the same model one after the other, as one sequence."""
    first = np.cumsum([0, *(trace.n_steps for trace in traces[:-1])])
    columns = {
        name: np.concatenate([getattr(trace, name) for trace in traces])
        for name in ("seq", "token", "layer", "phase", "bits")
    }
    step = np.concatenate([t.step + start for t, start in zip(traces, first, strict=True)])
    n_tokens = sum(trace.n_tokens for trace in traces)
    sequence = dataclasses.replace(traces[0].header.sequences[0], token_stop=n_tokens)
    header = dataclasses.replace(traces[0].header, sequences=(sequence,))
    return Trace.from_arrays(header, step=step, **columns)

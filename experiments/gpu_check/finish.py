"""Part 5: a profile fitted to some runs of part 4, and what the simulator then says of the others.

Needs the simulator's libraries. Where they are missing the op timings are on disk, and
`python -m experiments.gpu_check --finish DIR` does it later, on any machine.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.gpu_check.big import BigShape
from experiments.gpu_check.large import Setting, new_cache
from experiments.gpu_check.place import Left, Place
from experiments.gpu_check.timeline import op_from_row

NEEDED = ("simpy", "pydantic", "pandas", "pyarrow", "psutil", "tomli_w")


@dataclass(frozen=True, slots=True)
class Kept:
    """A run of part 4, read from its files. Bits are packed, [n_rows, bytes_per_row]."""

    name: str
    about: dict[str, Any]
    steps: list[dict[str, Any]]
    bits: dict[str, Any]
    active: NDArray[np.uint8]
    predicted: NDArray[np.uint8]

    @property
    def setting(self) -> Setting:
        keys = ("policy", "controller", "slots", "budget_bytes")
        return Setting(**{key: self.about[key] for key in keys})

    @property
    def calibrates(self) -> bool:
        """All resident, and the smallest budget under the two simplest policies."""
        return self.name == "profile" or (self.setting.policy in ("static", "lru") and (
            self.setting.budget_bytes in (None, 12e9)
        ))  # fmt: skip


def check_prediction(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    return finish(folder)


def finish(folder: Path) -> dict[str, Any]:
    """Fit, predict and compare; or what is missing for it. No pass and no fail: errors."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return {
            "passed": None,
            "said": f"not done here, {', '.join(lacking)} missing; the op timings are kept: run "
            f"`python -m experiments.gpu_check --finish {folder}` where they are installed",
            "skipped": lacking,
        }
    runs = [_read(path) for path in sorted(folder.glob("large-*.ops.json"))]
    if not any(run.calibrates for run in runs):
        raise FileNotFoundError(f"no runs of part 4 in {folder}")
    profile, fits, shape = _fitted(runs, folder)
    counts = _counts(next(run for run in runs if run.name == "profile"), shape)
    rows = [_compared(run, shape, profile, counts) for run in runs]
    held_out = [row for row in rows if not row["calibrated_on"]]
    constant = fmean(row["live_s"] for row in rows if row["calibrated_on"])
    for row in rows:
        row["constant_error"] = constant / row["live_s"] - 1
    errors = sorted(abs(row["error"]) for row in held_out)
    worst = f"{errors[-1]:.1%}" if errors else "unknown"
    return {
        "passed": None,
        "said": f"{len(held_out)} runs that were not calibrated on: worst error of time {worst}",
        "label": runs[0].about["label"],
        "rows": rows,
        "fits": fits,
    }


def _read(ops: Path) -> Kept:
    name = ops.name.removeprefix("large-").removesuffix(".ops.json")

    def content(what: str) -> Any:
        return json.loads((ops.parent / f"large-{name}{what}.json").read_text())

    bits = content(".bits")
    packed = [
        np.fromfile(ops.parent / f"large-{name}.{what}.bits", np.uint8).reshape(
            -1, bits["bytes_per_row"]
        )
        for what in ("active", "predicted")
    ]
    return Kept(name, content(""), content(".ops"), bits, *packed)


def _shape(runs: list[Kept]) -> BigShape:
    return BigShape(**{key: runs[0].about["model"][key] for key in BigShape.__slots__})


def _counts(run: Kept, shape: BigShape) -> NDArray[np.int64]:
    counts = np.zeros((shape.n_layers, shape.n_neurons), np.int64)
    layers = np.asarray(run.bits["rows"])[:, 2]
    fired = np.unpackbits(run.active, axis=1, count=shape.n_neurons, bitorder="little")
    np.add.at(counts, layers, fired.astype(np.int64))
    return counts


def _fitted(runs: list[Kept], folder: Path) -> tuple[Any, list[dict[str, Any]], BigShape]:
    from kairox_exec.calibration import StepOps, TimedRun, fit_profile
    from kairox_sim.costs import costs_for
    from kairox_sim.hardware import Quantity, dump_profile, load_profile
    from kairox_sim.policies import POLICIES

    shape, about = _shape(runs), runs[0].about
    source = Quantity(value=24e9, source="the larger budget of the check; not a measurement")
    machine = load_profile("pc1").model_copy(
        update={
            "vram_bytes": source,
            "decide_blocks_gpu": about["decide_blocks_gpu"],
            "time_scale": 1.0,
        }
    )
    timed = [
        TimedRun(
            label=run.name,
            policy_class=POLICIES[run.setting.policy].__name__.lower(),
            steps=[
                StepOps(
                    step["began_ns"],
                    step["ended_ns"],
                    step["n_tokens"],
                    [op_from_row(row) for row in step["ops"]],
                )
                for step in _without_first_decode(run.steps)
            ],
            seconds_per_token=run.about["means"]["wall_s"],
            residual_per_token=run.about["means"]["residual"],
            overrun_share=0.0,
            host_memory=str(run.about["device_status"].get("host_memory", "")),
        )
        for run in runs
        if run.calibrates
    ]
    counted = shape.costs_shape()
    costs = costs_for(
        machine, counted, "exact", trace_layers=shape.n_layers, trace_neurons=shape.n_neurons,
        predictor="lookahead",
    )  # fmt: skip
    fitted = fit_profile(
        timed, costs, name="gpu-check", machine=machine, measured_on=about["label"],
        calibrated_as=counted.name,
    )  # fmt: skip
    dump_profile(fitted.profile, folder / "hw.toml")
    return fitted.profile, list(fitted.fits), shape


def _without_first_decode(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels are compiled in it."""
    first = next(at for at, step in enumerate(steps) if step["n_tokens"] == 1)
    return steps[:first] + steps[first + 1 :]


def _compared(
    run: Kept, shape: BigShape, profile: Any, counts: NDArray[np.int64]
) -> dict[str, Any]:
    """Live and simulated time of the same decode steps; the first is left out, as in `means`."""
    from kairox_sim.costs import costs_for
    from kairox_sim.engine import run_trace
    from kairox_sim.prediction import Recorded

    setting = run.setting
    if run.name == "profile":
        counts = np.ones_like(counts)
    cache = new_cache(setting, counts)
    predicts = cache.policy.admits != "never"
    costs = costs_for(
        profile, shape.costs_shape(), "exact", trace_layers=shape.n_layers,
        trace_neurons=shape.n_neurons, predictor="lookahead" if predicts else "none",
    )  # fmt: skip
    ahead = any(run.bits["predicted_known"])
    trace = _trace(run, shape, ahead)
    predictions = Recorded() if ahead else None
    records = run_trace(trace, cache, costs, predictions=predictions).records
    live, simulated = (
        [row for row in some if row["phase"] == "decode"][1:]
        for some in (run.about["records"], [asdict(record) for record in records])
    )
    live_s, simulated_s = (fmean(row["wall_s"] for row in some) for some in (live, simulated))
    names = ("hit_on_time", "residual", "loads", "gpu_busy_s", "cpu_busy_s", "swap_busy_s")
    return {
        "run": run.name,
        "calibrated_on": run.calibrates,
        "live_s": live_s,
        "simulated_s": simulated_s,
        "error": simulated_s / live_s - 1,
        **{f"live_{name}": fmean(row[name] for row in live) for name in names},
        **{f"simulated_{name}": fmean(row[name] for row in simulated) for name in names},
    }


def _trace(run: Kept, shape: BigShape, ahead: bool) -> Any:
    from hashlib import sha256

    from kairox_sim.trace import SequenceInfo, Trace, TraceHeader

    step, token, layer, phase = np.asarray(run.bits["rows"]).T
    said = sha256(run.name.encode()).hexdigest()
    n_tokens = int(np.count_nonzero(layer == 0))
    header = TraceHeader(
        model="synthetic-7b-shape",
        model_sha256=said,
        n_layers=shape.n_layers,
        n_neurons=shape.n_neurons,
        d_model=shape.d_model,
        activation="relu",
        activation_threshold=0.0,
        gating="exact",
        complete=True,
        tokenizer_sha256=said,
        sequences=(SequenceInfo(0, "synthetic", "drawn tokens", said, 0, n_tokens),),
        predicted_trigger="attn_out" if ahead else None,
        synthetic=True,
    )
    return Trace.from_arrays(
        header,
        seq=np.zeros_like(step),
        step=step,
        token=token,
        layer=layer,
        phase=phase,
        bits=_padded(run.active, shape),
        predicted_bits=_padded(run.predicted, shape) if ahead else None,
        predicted_known=np.asarray(run.bits["predicted_known"]) if ahead else None,
    )


def _padded(bits: NDArray[np.uint8], shape: BigShape) -> NDArray[np.bool_]:
    return np.unpackbits(bits, axis=1, count=shape.n_neurons, bitorder="little").astype(bool)

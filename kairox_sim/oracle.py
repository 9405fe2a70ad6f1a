"""The time of an oracle beside a run: the bypass oracle in the same slots, at the same costs.

It has the fewest misses of all policies; it is not the fastest there could be, for it moves its
neurons when their layer has been computed, and pays for them. `lower_bound` is below it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from kairox_sim.errors import KairoxError
from kairox_sim.hardware import HardwareProfile
from kairox_sim.provenance import profile_sha256
from kairox_sim.settings import Settings
from kairox_sim.trace import Trace

_KNOWN: dict[tuple[str, int | None, str, str], float] = {}  # what was simulated in this process


def oracle_settings(settings: Settings, slots: Sequence[int]) -> Settings | None:
    """The bypass oracle where `settings` ran, beginning with what is used first; None where it is
    no policy's question (whole layers, and everything computed densely).

    What it does not hold the CPU computes, whatever the dispatch of `settings`.
    """
    if settings.dispatch == "layers" or settings.gating == "dense":
        return None
    kept = ("gating", "model_as", "swap_neurons", "handovers", "context_start", "prediction",
            "predictor", "seed", "numerics", "weights", "dtype", "thresholds",
            "predictor_file")  # fmt: skip
    values = {key: getattr(settings, key) for key in kept}
    return Settings.of(
        values
        | {
            "policy": "belady_bypass", "observes": "evaluated", "slots": tuple(slots),
            "start": "warm",
        }
    )  # fmt: skip


def oracle_tpot_s(
    trace: Trace, settings: Settings, slots: Sequence[int], profile: HardwareProfile
) -> float:
    """Mean seconds per decode token; nan where there is no such oracle or no future to know."""
    from kairox_sim.simulation import simulate  # which asks for this

    asked = oracle_settings(settings, slots)
    if asked is None:
        return math.nan
    key = (
        trace.sha256,
        trace.truncated_at,
        profile_sha256(profile),
        json.dumps(asked.model_dump(mode="json"), sort_keys=True),
    )
    if key not in _KNOWN:
        try:
            run = simulate(trace, asked, hardware=profile)
        except KairoxError:  # a trace that was cut has no future; the bounds may not fit
            return math.nan
        _KNOWN[key] = run.summary["tpot_s"]
    return _KNOWN[key]

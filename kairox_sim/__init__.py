"""Decide and simulate: traces, policies, the cache, the discrete-event engine. Imports no torch.

The names below are the public API. They are looked up on first use, so that the live path, which
needs the cache alone, loads neither simpy nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairox_sim.choice import best
    from kairox_sim.errors import KairoxError
    from kairox_sim.hardware import load_link, load_profile
    from kairox_sim.metrics import RunResult, summarise
    from kairox_sim.plot_sweep import plot_budget, plot_throughput, plot_time_split
    from kairox_sim.settings import Settings, build_cache
    from kairox_sim.simulation import simulate
    from kairox_sim.sweeps import Sweep, sweep
    from kairox_sim.trace import Trace, read_trace, seal
    from kairox_sim.trace_stats import trace_stats

_HOME = {
    "KairoxError": "errors",
    "RunResult": "metrics",
    "Settings": "settings",
    "Sweep": "sweeps",
    "Trace": "trace",
    "best": "choice",
    "build_cache": "settings",
    "load_link": "hardware",
    "load_profile": "hardware",
    "plot_budget": "plot_sweep",
    "plot_throughput": "plot_sweep",
    "plot_time_split": "plot_sweep",
    "read_trace": "trace",
    "seal": "trace",
    "simulate": "simulation",
    "summarise": "metrics",
    "sweep": "sweeps",
    "trace_stats": "trace_stats",
}

__all__ = [
    "KairoxError",
    "RunResult",
    "Settings",
    "Sweep",
    "Trace",
    "best",
    "build_cache",
    "load_link",
    "load_profile",
    "plot_budget",
    "plot_throughput",
    "plot_time_split",
    "read_trace",
    "seal",
    "simulate",
    "summarise",
    "sweep",
    "trace_stats",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kairox_sim.{_HOME[name]}"), name)

"""The same decisions on real devices. Torch lives only here.

The names below are the public API. They are looked up on first use, so that importing the package
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairox_exec.generation import generate
    from kairox_exec.host_pool import HostPool
    from kairox_exec.live import load
    from kairox_exec.live_device import HostSide
    from kairox_exec.live_run import ForcedText, Machine, calibrate
    from kairox_exec.recording import record
    from kairox_exec.validation import validate

_HOME = {
    "ForcedText": "live_run",
    "HostPool": "host_pool",
    "HostSide": "live_device",
    "Machine": "live_run",
    "calibrate": "live_run",
    "generate": "generation",
    "load": "live",
    "record": "recording",
    "validate": "validation",
}

__all__ = [
    "ForcedText",
    "HostPool",
    "HostSide",
    "Machine",
    "calibrate",
    "generate",
    "load",
    "record",
    "validate",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kairox_exec.{_HOME[name]}"), name)

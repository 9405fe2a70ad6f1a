"""The same decisions on real devices. Torch lives only here.

The names below are the public API. They are looked up on first use, so that importing the package
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairox_exec.generation import generate
    from kairox_exec.live import load
    from kairox_exec.live_run import calibrate
    from kairox_exec.recording import record
    from kairox_exec.validation import validate

_HOME = {
    "calibrate": "live_run",
    "generate": "generation",
    "load": "live",
    "record": "recording",
    "validate": "validation",
}

__all__ = ["calibrate", "generate", "load", "record", "validate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kairox_exec.{_HOME[name]}"), name)

"""What follows from Settings: the trigger and predictor in force, and a short name for tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kairox_sim.policies import POLICIES
from kairox_sim.policies.base import Trigger
from kairox_sim.settings_file import Settings, Slots


def trigger_of(settings: Settings) -> Trigger:
    """The trigger in force."""
    return settings.trigger or POLICIES[settings.policy].default_trigger


def predictor_of(settings: Settings) -> str:
    """The predictor whose time and memory are charged.

    `predicted` gating computes what the predictor says, so it is always there. Otherwise only a
    plan made before the truth is known needs one: the one that was trained, if a file is given.
    """
    if settings.gating == "dense":
        return "none"
    if settings.gating == "predicted":
        return settings.predictor or "rank"
    ahead = trigger_of(settings) in ("attn_in", "attn_out", "serial")
    if POLICIES[settings.policy].admits == "never" or not ahead:
        return "none"
    return settings.predictor or ("lookahead" if settings.predictor_file is None else "rank")


# What a label says besides policy and controller, where it is not the default's or the preset's.
_SAID = (
    "placement", "dispatch", "groups", "layout", "copies", "copies_per_sync", "handovers",
    "lookahead_from", "observes", "predictor", "swap_neurons", "context_start", "numerics",
    "weights", "dtype", "vram", "predictor_file", "thresholds",
)  # fmt: skip
_NAMED = ("weights", "dtype", "vram")  # whose values do not say what they are of
_FILES = ("predictor_file", "thresholds")


def label(settings: Settings) -> str:
    """A short name for tables and legends: "tam+anb 128", "powerinfer", "kairox-paper late=cpu"."""
    if settings.system is not None:
        return _label_of_system(settings)
    policy = POLICIES[settings.policy]
    name = settings.policy + _params(settings.policy_params)
    if settings.controller != "fixed" or settings.controller_params:
        name += f"+{settings.controller}{_params(settings.controller_params)}"
    if settings.trigger not in (None, policy.default_trigger):
        name += f" {settings.trigger}"
    if settings.late not in (None, policy.default_late):
        name += f" {settings.late}"
    if settings.start != "empty" and policy.fills == "slots":
        name += f" {settings.start}"
    for key in _SAID:
        value = getattr(settings, key)
        if value != Settings.model_fields[key].default:
            name += _said(key, value)
    if policy.fills in ("all", "none") or (settings.slots is None and settings.vram is not None):
        return name
    return f"{name} {_slots(settings.slots)}"


def _label_of_system(settings: Settings) -> str:
    name = str(settings.system)
    preset = Settings.of({"system": name})
    rules = ("policy", "controller", "trigger", "late", "start", "gating")
    for key in (*rules, *_SAID):
        value = getattr(settings, key)
        if value != getattr(preset, key):
            name += _said(key, value)
    for key in ("policy_params", "controller_params"):
        if getattr(settings, key) != getattr(preset, key):
            name += _params(getattr(settings, key))
    return name if settings.slots == preset.slots else f"{name} {_slots(settings.slots)}"


def _said(key: str, value: object) -> str:
    if key in _FILES:
        value = None if value is None else Path(str(value)).stem
    return f" {value}" if isinstance(value, str) and key not in _NAMED else f" {key}={value}"


def _slots(slots: Slots) -> str:
    if slots is None:
        return "n/4"
    return f"{sum(slots) / len(slots):g} mean" if isinstance(slots, tuple) else str(slots)


def _params(params: Mapping[str, Any]) -> str:
    return f"({', '.join(f'{k}={params[k]}' for k in sorted(params))})" if params else ""

"""Settings: what a sweep varies and the executor loads. A frozen model; unknown keys are errors.

The file is TOML. Paths in it are relative to the folder the command runs in.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kairox_sim.controllers import CONTROLLERS, Controller
from kairox_sim.cost_model import Copies
from kairox_sim.dispatch import Dispatch
from kairox_sim.errors import KairoxError
from kairox_sim.groups import METHODS
from kairox_sim.model import Gating, Numerics, Predictor, Weights
from kairox_sim.placement import Placement
from kairox_sim.policies import POLICIES, Known, Policy, build_policy
from kairox_sim.policies.base import Late, Observes, Trigger
from kairox_sim.policies.future import Future
from kairox_sim.settings_toml import explain, nearest, read_toml
from kairox_sim.systems import find_system
from kairox_sim.units import is_size

Slots = int | tuple[int, ...] | str | None
Whole = Annotated[int, Field(strict=True, le=2**63 - 1)]  # no bool, and what a table can hold
_RULE = re.compile(r"(density|ngl)(:\d+)?|vram|all")
_GROUPS = re.compile(r"([a-z]+):(\d+)")
# Of the run rather than of the system: kept when another system is chosen.
_OF_THE_RUN = (
    "prior", "prior_sha256", "model_as", "seed", "context_start", "prefill_chunk",
    "numerics", "weights", "dtype", "vram", "predictor_file", "thresholds",
)  # fmt: skip


class Settings(BaseModel):
    """One configuration to simulate or to run. None means the default of the policy or the model.

    system: a preset of systems.py; what is given beside it goes before the preset's value.
    slots: per layer, pinned included: a number; one per layer; "density" or "density:N" (N on
    average, a quarter of the neurons by default, shared over the layers as the prior's activations
    are); a size such as "4GiB" for the slots of all layers; "vram": as many as the machine's memory
    leaves; "all"; "ngl" or "ngl:N": the last N layers of the model whole, by default as many as
    fit, which in a stand-in of fewer layers may end within one of them; None: a quarter of the
    neurons.
    placement, start: who is resident at the start, see placement.py; a policy that never moves
    anything starts with its placement, others as `start` says.
    groups: neurons move in groups: the path of a file that `kairox group` wrote, or METHOD:SIZE,
    whose size counts neurons of the model, like swap_neurons.
    layout: the order of neurons in host memory; linked: co-active ones side by side.
    copies: how a swap becomes copies: gather (one), matrix (one a matrix), bundle (one a neuron),
    row (one a row); None: the machine's. copies_per_sync: synchronise after so many of them.
    handovers: times per layer-step that the host's sums are merged.
    lookahead_from: the first layer predicted a layer ahead; those below predict in their place.
    context_start: tokens in the KV cache before the trace's first one.
    prediction: "trace" (the recorded column), "perfect", or "recall,precision" such as "0.9,0.8".
    numerics: deterministic: sums in fixed point, the same bits wherever a neuron is computed.
    weights: how the FFN's rows are stored; None: as the model is (a live run: as dtype). dtype: of
    everything else in a live run, the residual stream included. A simulation charges a trace's own
    model as published, and in 2 bytes a value where dtype is not float32; a stand-in is as its name
    says (`prosparse-7b@q8_0`), and weights are put over either.
    vram: a size such as "12GiB" in place of the machine's; a budget that is not given is then what
    fits. predictor_file: of `kairox train-predictor`, for predictor rank: its rank is charged for
    the model it was trained for, the published one for a stand-in. thresholds: of `kairox
    sparsify`, for a model whose activation is never zero: approximate. A simulation only replays
    what they left in its trace, which has to be of such a run.
    prefill_chunk: of a live run; a trace keeps the chunks it was recorded with.
    model_as: replay at the costs of another model, by name or by the path of a config.json.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    system: str | None = None
    policy: str = "tam"
    policy_params: dict[str, Any] = Field(default_factory=dict)
    controller: str = "fixed"
    controller_params: dict[str, Any] = Field(default_factory=dict)
    slots: Slots = None
    swap_neurons: Whole = Field(default=16, ge=1)
    gating: Gating = "exact"
    numerics: Numerics = "fast"
    weights: Weights | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vram: str | None = None
    predictor_file: str | None = None
    thresholds: str | None = None
    trigger: Trigger | None = None
    observes: Observes | None = None
    late: Late | None = None
    layer0: Literal["last"] = "last"
    prefill_chunk: Whole = Field(default=64, ge=1)
    start: Literal["empty", "warm", "first"] = "empty"
    placement: Placement = "counts"
    dispatch: Dispatch = "concurrent"
    groups: str | None = None
    layout: Literal["natural", "linked"] = "natural"
    copies: Copies | None = None
    copies_per_sync: Whole | None = Field(default=None, ge=1)
    handovers: Whole = Field(default=1, ge=1)
    lookahead_from: Whole = Field(default=1, ge=0)
    context_start: Whole = Field(default=0, ge=0)
    batch: Whole = Field(default=1, ge=1)
    prior: str | None = None
    prior_sha256: str | None = None
    model_as: str | None = None
    predictor: Predictor | None = None
    prediction: str = "trace"
    seed: Whole = Field(default=0, ge=0)

    @field_validator("slots", mode="before")
    @classmethod
    def _slots(cls, given: Any) -> Any:
        if isinstance(given, str):
            text = given.strip()
            if re.fullmatch(r"\d+", text):
                given = int(text)
            elif re.fullmatch(r"\d+(\s*,\s*\d+)*\s*,?", text):
                given = tuple(int(part) for part in text.split(",") if part.strip())
            elif _RULE.fullmatch(text) or is_size(text):
                return text
        if isinstance(given, list):
            given = tuple(given)
        numbers = given if isinstance(given, tuple) else (given,)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if given is not None and (not numbers or not whole):
            raise ValueError(
                f"got {given!r}; allowed: a number of slots per layer, one number for each layer, "
                "'density', 'density:N', 'vram', 'all', 'ngl', 'ngl:N', or a size such as 4GiB"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("system") is not None:
            return {**find_system(str(given["system"])).settings, **given}
        return given

    @field_validator("groups", mode="before")
    @classmethod
    def _known_groups(cls, given: Any) -> Any:
        text = os.fspath(given) if isinstance(given, os.PathLike) else given
        if isinstance(text, str) and not text.endswith(".parquet"):
            match = _GROUPS.fullmatch(text)
            if match is None or match[1] not in METHODS or int(match[2]) < 1:
                raise ValueError(
                    f"got {text!r}; allowed: the path of a .parquet file that `kairox group` "
                    f"wrote, or METHOD:SIZE such as metis:16, with {', '.join(METHODS)}"
                )
        return text

    @field_validator("vram")
    @classmethod
    def _a_size(cls, given: str | None) -> str | None:
        if given is not None and not is_size(given):
            raise ValueError(f"got {given!r}; allowed: a size such as 12GiB")
        return given

    @field_validator("batch")
    @classmethod
    def _one_sequence(cls, given: int) -> int:
        if given != 1:
            raise ValueError(
                f"batch {given} is not built: decoding is of one sequence at a time; use batch 1"
            )
        return given

    @field_validator("prior", "model_as", "predictor_file", "thresholds", mode="before")
    @classmethod
    def _text(cls, given: Any) -> Any:
        return os.fspath(given) if isinstance(given, os.PathLike) else given

    @field_validator("policy_params", "controller_params")
    @classmethod
    def _params_given(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if value is not None}  # the default's

    @field_validator("prediction")
    @classmethod
    def _prediction(cls, given: str) -> str:
        quality_of(given)
        return given

    @model_validator(mode="after")
    def _known(self) -> Self:
        _require_name(self.policy, POLICIES, "policy")
        _require_name(self.controller, CONTROLLERS, "controller")
        _require_params(self.policy_params, policy_parameters(self.policy), self.policy)
        _require_params(
            self.controller_params, controller_parameters(self.controller), self.controller
        )
        if self.predictor_file is not None and self.predictor not in (None, "rank"):
            raise ValueError(
                f"predictor_file {self.predictor_file!r} is of predictor 'rank', got predictor "
                f"{self.predictor!r}; leave one of them out"
            )
        # Refuses values out of range here rather than in mid-sweep.
        make_policy(self, 1, 1, _ANY)
        make_controller(self)
        preset = {} if self.system is None else find_system(self.system).settings
        for key, value in preset.items():
            if value is not None and getattr(self, key) is None:
                raise ValueError(f"{key}: system {self.system!r} sets it; give a value, or remove")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file; every problem in it becomes one message."""
        return cls.of(read_toml(path, "settings"), f"settings {os.fspath(path)!r}")

    @classmethod
    def of(cls, content: Mapping[str, Any], where: str = "settings") -> Self:
        """From plain values; problems as KairoxError, naming the nearest key."""
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            raise KairoxError(f"{where}: {explain(error, cls)}") from error

    def dump(self, path: str | Path) -> Path:
        """Write as TOML; `load` gives an equal object back."""
        target = Path(path)
        target.write_text(tomli_w.dumps(self.model_dump(exclude_none=True)), encoding="utf-8")
        return target

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """A copy with other values, by field ("slots"), by parameter of the policy or controller in
        force ("beta"), or both ("tam.beta", "policy_params.beta"). Fields are set first.

        A new policy or controller starts from its own default parameters.
        """
        values = self.model_dump()
        if overrides.get("system") is not None:
            kept = {key: values[key] for key in _OF_THE_RUN}
            values = type(self).of({**kept, "system": overrides["system"]}).model_dump()
        fields = {key: value for key, value in overrides.items() if key in values}
        for chooser in ("policy", "controller"):
            if fields.get(chooser, values[chooser]) != values[chooser]:
                values[f"{chooser}_params"] = {}
        values |= fields
        for chooser in ("policy_params", "controller_params"):
            if not isinstance(values[chooser], Mapping):
                raise KairoxError(
                    f"{chooser} must be a table of parameters, got {values[chooser]!r}"
                )
            values[chooser] = dict(values[chooser])
        for key, value in overrides.items():
            if key not in fields:
                where, name = _find_parameter(key, values["policy"], values["controller"])
                values[where][name] = value
        return type(self).of(values)


def _require_name(name: str, table: Mapping[str, object], noun: str) -> None:
    if name not in table:
        raise ValueError(f"unknown {noun} {name!r}; {nearest(name, table)}")


def _require_params(given: Mapping[str, Any], allowed: Sequence[str], owner: str) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{owner} has no parameter {name!r}; {nearest(name, allowed)}")


def policy_parameters(name: str) -> list[str]:
    """What `policy_params` may hold for this policy."""
    if name not in POLICIES:
        return []
    given = {"n_layers", "n_neurons", *POLICIES[name].needs}
    return [p for p in inspect.signature(POLICIES[name]).parameters if p not in given]


def controller_parameters(name: str) -> list[str]:
    """What `controller_params` may hold for this controller."""
    return list(inspect.signature(CONTROLLERS[name]).parameters) if name in CONTROLLERS else []


def setting_keys() -> list[str]:
    """Fields of Settings."""
    return list(Settings.model_fields)


def whole_keys() -> list[str]:
    """Those of them that hold one whole number, or none."""
    of = Settings.model_fields
    return [key for key, field in of.items() if field.annotation in (int, Whole | None)]


def owner_of(key: str) -> str | None:
    """The policy or controller that a key such as "tam.beta" belongs to; None of a plain key."""
    head, dot, _ = key.partition(".")
    return head if dot and (head in POLICIES or head in CONTROLLERS) else None


def _find_parameter(key: str, policy: str, controller: str) -> tuple[str, str]:
    """(dict of Settings, parameter) that `key` means."""
    head, dot, tail = key.partition(".")
    for where, owner, parameters in (
        ("policy_params", policy, policy_parameters(policy)),
        ("controller_params", controller, controller_parameters(controller)),
    ):
        if dot and head in (owner, where) and tail in parameters:
            return where, tail
        if not dot and key in parameters:
            return where, key
    known = [*setting_keys(), *policy_parameters(policy), *controller_parameters(controller)]
    raise KairoxError(f"unknown key {key!r}; {nearest(key, known)}")


_ANY = Known(  # enough to try a policy's parameters on one neuron
    np.random.default_rng(0), Future.of([[]], 1), 1.0, np.zeros((1, 1), np.int32)
)


def make_policy(
    settings: Settings, n_layers: int, n_neurons: int, known: Known | None = None
) -> Policy:
    """The policy that `settings` names, for ids of neurons or of groups."""
    params = settings.policy_params
    _require_numbers(POLICIES[settings.policy], settings.policy, params)
    return build_policy(settings.policy, n_layers, n_neurons, known, **params)


def make_controller(settings: Settings) -> Controller:
    """The controller that `settings` names."""
    build: Any = CONTROLLERS[settings.controller]
    _require_numbers(build, settings.controller, settings.controller_params)
    return build(**settings.controller_params)  # type: ignore[no-any-return]


def _require_numbers(build: Any, owner: str, params: Mapping[str, Any]) -> None:
    kinds = inspect.get_annotations(build.__init__)  # text: "float", "int" or "int | None"
    for name, value in params.items():
        if isinstance(value, str) and ("str" in str(kinds[name]) or "Literal" in str(kinds[name])):
            continue
        if isinstance(value, bool) and "bool" in str(kinds[name]):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KairoxError(f"{owner}'s {name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise KairoxError(f"{owner}'s {name} must be a finite number, got {value}")
        if "int" in str(kinds[name]) and not isinstance(value, int):
            raise KairoxError(f"{owner}'s {name} must be a whole number, got {value}")


def quality_of(prediction: str) -> tuple[float, float] | None:
    """(recall, precision), or None where `prediction` is "trace" or "perfect"."""
    if prediction in ("trace", "perfect"):
        return None
    parts = prediction.split(",")
    try:
        recall, precision = (float(part) for part in parts)
    except ValueError as error:
        raise KairoxError(
            f"prediction {prediction!r}; allowed: trace, perfect, or recall,precision such as "
            "0.9,0.8"
        ) from error
    if not (0 <= recall <= 1 and 0 < precision <= 1):
        raise KairoxError(
            f"prediction {prediction!r}: recall must be in [0, 1] and precision in (0, 1]"
        )
    return recall, precision

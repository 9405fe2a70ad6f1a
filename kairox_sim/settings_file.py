"""Settings: what a sweep varies and the executor loads. A frozen model; unknown keys are errors.

The file is TOML. Paths in it are relative to the folder the command runs in.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kairox_sim.controllers import CONTROLLERS, Controller
from kairox_sim.errors import KairoxError
from kairox_sim.model import Gating, Predictor
from kairox_sim.policies import POLICIES, Policy
from kairox_sim.policies.base import Late, Observes, Trigger
from kairox_sim.units import is_size

Slots = int | tuple[int, ...] | str | None
Whole = Annotated[int, Field(strict=True, le=2**63 - 1)]  # no bool, and what a table can hold
_DENSITY = re.compile(r"density(?::(\d+))?")


class Settings(BaseModel):
    """One configuration to simulate or to run. None means the default of the policy or the model.

    slots: per layer, pinned included: a number; one per layer; "density" or "density:N" (N on
    average, a quarter of the neurons by default, shared over the layers as the prior's activations
    are); a size such as "4GiB" for the slots of all layers; None: a quarter of the neurons.
    prediction: "trace" (the recorded column), "perfect", or "recall,precision" such as "0.9,0.8".
    prefill_chunk: of a live run; a trace keeps the chunks it was recorded with.
    model_as: replay at the costs of another model, by name or by the path of a config.json.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    policy: str = "tam"
    policy_params: dict[str, Any] = Field(default_factory=dict)
    controller: str = "fixed"
    controller_params: dict[str, Any] = Field(default_factory=dict)
    slots: Slots = None
    swap_neurons: Whole = Field(default=16, ge=1)
    gating: Gating = "exact"
    numerics: Literal["fast"] = "fast"
    trigger: Trigger | None = None
    observes: Observes | None = None
    late: Late | None = None
    layer0: Literal["last"] = "last"
    prefill_chunk: Whole = Field(default=64, ge=1)
    start: Literal["empty", "warm"] = "empty"
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
            elif _DENSITY.fullmatch(text) or is_size(text):
                return text
        if isinstance(given, list):
            given = tuple(given)
        numbers = given if isinstance(given, tuple) else (given,)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if given is not None and (not numbers or not whole):
            raise ValueError(
                f"got {given!r}; allowed: a number of slots per layer, one number for each layer, "
                "'density', 'density:N', or a size such as 4GiB"
            )
        return given

    @field_validator("prior", "model_as", mode="before")
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
        make_policy(self, 1, 1)  # refuses values out of range here rather than in mid-sweep
        make_controller(self)
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
        raise ValueError(f"unknown {noun} {name!r}; {_nearest(name, table)}")


def _require_params(given: Mapping[str, Any], allowed: Sequence[str], owner: str) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{owner} has no parameter {name!r}; {_nearest(name, allowed)}")


def _nearest(name: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names) or 'none'}"


def policy_parameters(name: str) -> list[str]:
    """What `policy_params` may hold for this policy."""
    if name not in POLICIES:
        return []
    given = ("n_layers", "n_neurons")
    return [p for p in inspect.signature(POLICIES[name]).parameters if p not in given]


def controller_parameters(name: str) -> list[str]:
    """What `controller_params` may hold for this controller."""
    return list(inspect.signature(CONTROLLERS[name]).parameters) if name in CONTROLLERS else []


def setting_keys() -> list[str]:
    """Fields of Settings."""
    return list(Settings.model_fields)


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
    raise KairoxError(f"unknown key {key!r}; {_nearest(key, known)}")


def make_policy(settings: Settings, n_layers: int, n_neurons: int) -> Policy:
    """The policy that `settings` names."""
    build: Any = POLICIES[settings.policy]
    return _called(build, settings.policy, n_layers, n_neurons, **settings.policy_params)  # type: ignore[no-any-return]


def make_controller(settings: Settings) -> Controller:
    """The controller that `settings` names."""
    build: Any = CONTROLLERS[settings.controller]
    return _called(build, settings.controller, **settings.controller_params)  # type: ignore[no-any-return]


def _called(build: Any, owner: str, *args: int, **params: Any) -> Any:
    kinds = inspect.get_annotations(build.__init__)  # text: "float", "int" or "int | None"
    for name, value in params.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KairoxError(f"{owner}'s {name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise KairoxError(f"{owner}'s {name} must be a finite number, got {value}")
        if "int" in str(kinds[name]) and not isinstance(value, int):
            raise KairoxError(f"{owner}'s {name} must be a whole number, got {value}")
    return build(*args, **params)


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


def trigger_of(settings: Settings) -> Trigger:
    """The trigger in force."""
    return settings.trigger or POLICIES[settings.policy].default_trigger


def predictor_of(settings: Settings) -> str:
    """The predictor whose time and memory are charged.

    `predicted` gating computes what the predictor says, so it is always there. Otherwise only a
    plan made before the truth is known needs one.
    """
    if settings.gating == "predicted":
        return settings.predictor or "rank"
    ahead = trigger_of(settings) in ("attn_in", "attn_out", "serial")
    if POLICIES[settings.policy].admits == "never" or not ahead:
        return "none"
    return settings.predictor or "lookahead"


def label(settings: Settings) -> str:
    """A short name for tables and legends: "tam+anb 128"."""
    policy = POLICIES[settings.policy]
    name = settings.policy + _params(settings.policy_params)
    if settings.controller != "fixed" or settings.controller_params:
        name += f"+{settings.controller}{_params(settings.controller_params)}"
    if settings.trigger not in (None, policy.default_trigger):
        name += f" {settings.trigger}"
    if settings.late not in (None, policy.default_late):
        name += f" {settings.late}"
    if settings.start == "warm" and policy.fills == "slots":
        name += " warm"
    if policy.fills in ("all", "none"):
        return name
    slots = settings.slots
    if slots is None:
        return f"{name} n/4"
    return (
        f"{name} {sum(slots) / len(slots):g} mean"
        if isinstance(slots, tuple)
        else f"{name} {slots}"
    )


def _params(params: Mapping[str, Any]) -> str:
    return f"({', '.join(f'{k}={params[k]}' for k in sorted(params))})" if params else ""


def read_toml(path: str | Path, noun: str) -> dict[str, Any]:
    """The content of a TOML file; what is wrong with it as KairoxError."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KairoxError(f"cannot read the {noun} file {str(file)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KairoxError(f"the {noun} file {str(file)!r} is not valid TOML: {error}") from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line: each problem with what was got, and of an unknown key the nearest one."""
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key {key!r}; {_nearest(key, model.model_fields)}")
        elif item["type"] == "missing":
            problems.append(f"missing key {key!r}")
        elif not key:
            problems.append(item["msg"].removeprefix("Value error, "))
        else:
            said = item["msg"].removeprefix("Value error, ")
            got = (
                "" if "got " in said or repr(item["input"]) in said else f" (got {item['input']!r})"
            )
            problems.append(f"{key}: {said}{got}")
    return "; ".join(problems)

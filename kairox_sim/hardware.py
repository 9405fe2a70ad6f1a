"""A machine as run: every resource `fixed + n / rate`, every number with its source, in TOML.

Knows nothing of models. `costs` turns a profile and a shape into seconds. A profile's `time_scale`
says how much slower than its original an emulated machine runs; it is already in the numbers and is
never multiplied into or out of a result.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kairox_sim.errors import KairoxError

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class Quantity(BaseModel):
    """A number and where it is from; its unit is in the name of the key."""

    model_config = _FROZEN
    value: float = Field(strict=True)
    source: str = Field(min_length=1)


def _positive(quantity: Quantity) -> Quantity:
    if not (math.isfinite(quantity.value) and quantity.value > 0):
        raise ValueError(f"must be a finite number above 0, got {quantity.value}")
    return quantity


def _not_negative(quantity: Quantity) -> Quantity:
    if not (math.isfinite(quantity.value) and quantity.value >= 0):
        raise ValueError(f"must be a finite number, 0 or more, got {quantity.value}")
    return quantity


def _zero_or_one(quantity: Quantity) -> Quantity:
    if quantity.value not in (0, 1):
        raise ValueError(f"must be 0 (a gather) or 1 (row copies), got {quantity.value}")
    return quantity


Rate = Annotated[Quantity, AfterValidator(_positive)]
Cost = Annotated[Quantity, AfterValidator(_not_negative)]


class Op(BaseModel):
    """A pass over weights: launching it, and reading them."""

    model_config = _FROZEN
    fixed_s: Cost
    bytes_per_s: Rate


class Link(BaseModel):
    """One direction of the bus between host and device."""

    model_config = _FROZEN
    copy_fixed_s: Cost
    bytes_per_s: Rate


class Decide(BaseModel):
    """One `plan` of a policy: fixed + n_neurons / rate + swaps x per_swap."""

    model_config = _FROZEN
    fixed_s: Cost
    neurons_per_s: Rate
    per_swap_s: Cost


def _has_default(table: dict[str, Decide]) -> dict[str, Decide]:
    if "default" not in table:
        raise ValueError("needs an entry 'default', for policy classes that have none")
    return table


class LinkProfile(BaseModel):
    """A bus to put on a machine with `with_link`."""

    model_config = _FROZEN
    name: str
    h2d: Link
    d2h: Link


class HardwareProfile(BaseModel):
    """One machine as run. The GPU's ops share one stream; CPU work and copies share DRAM."""

    model_config = _FROZEN
    name: str
    kind: Literal["datasheet", "calibrated"]
    decide_blocks_gpu: bool = Field(strict=True)  # the planning thread also feeds the GPU
    time_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # provenance only
    calibrated_as: str | None = None  # the stand-in's target the calibration was made with

    vram_bytes: Rate
    vram_margin_bytes: Cost  # context, workspaces, display
    attention: Op
    gate: Op
    predictor: Op
    ffn_gpu: Op
    head: Op
    gpu_flops_per_s: Rate
    ffn_cpu: Op  # its rate is a cap: what the sparse kernel reaches alone
    cpu_flops_per_s: Rate
    dram_bytes_per_s: Rate  # effective, shared by the CPU's kernel and host-to-device copies
    h2d: Link
    copies_per_bundle: Annotated[Quantity, AfterValidator(_zero_or_one)]
    d2h: Link
    handover_fixed_s: Cost  # waking the side that waits, once each way
    decide: Annotated[dict[str, Decide], AfterValidator(_has_default)]  # by policy class


ModelT = TypeVar("ModelT", bound=BaseModel)

_PROFILES = "profiles"
_LINKS = "profiles/links"


def bundled_profiles() -> list[str]:
    """Names that `load_profile` knows."""
    return _bundled(_PROFILES)


def bundled_links() -> list[str]:
    """Names that `load_link` knows."""
    return _bundled(_LINKS)


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """A bundled profile by name, or a TOML file by path (a Path, or text with `/` or `.toml`)."""
    return _load(name_or_path, _PROFILES, HardwareProfile, "hardware profile")


def load_link(name_or_path: str | Path) -> LinkProfile:
    """A bundled link by name, or a TOML file by path."""
    return _load(name_or_path, _LINKS, LinkProfile, "link profile")


def dump_profile(profile: HardwareProfile | LinkProfile, path: str | Path) -> Path:
    """Write as TOML; `load_profile` or `load_link` gives an equal object back."""
    target = Path(path)
    content = profile.model_dump(exclude_none=True)
    target.write_text(tomli_w.dumps(content), encoding="utf-8")
    return target


def with_link(profile: HardwareProfile, link: LinkProfile) -> HardwareProfile:
    """The same machine on another bus, which is slowed by the machine's time_scale."""
    h2d, d2h = (_slower(part, profile.time_scale) for part in (link.h2d, link.d2h))
    return profile.model_copy(
        update={"name": f"{profile.name}+{link.name}", "h2d": h2d, "d2h": d2h}
    )


def scaled(profile: HardwareProfile, time_scale: float) -> HardwareProfile:
    """The same machine, `time_scale` times slower: rates divided, fixed costs multiplied.

    `decide` stays: on an emulated machine the policies run for real and are not paced.
    """
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise KairoxError(f"time_scale is {time_scale}, must be a finite number above 0")
    parts = {
        field: _slower(getattr(profile, field), time_scale, field)
        for field in HardwareProfile.model_fields
        if isinstance(getattr(profile, field), (Op, Link))
        or field in ("gpu_flops_per_s", "cpu_flops_per_s", "dram_bytes_per_s", "handover_fixed_s")
    }
    return profile.model_copy(update={**parts, "time_scale": profile.time_scale * time_scale})


def _slower(part: Any, time_scale: float, key: str = "") -> Any:
    """A quantity, or every quantity of an op or link; the suffix says whether it is a rate."""
    if not isinstance(part, Quantity):
        fields = type(part).model_fields
        return part.model_copy(
            update={name: _slower(getattr(part, name), time_scale, name) for name in fields}
        )
    if time_scale == 1:
        return part
    value = part.value / time_scale if key.endswith("_per_s") else part.value * time_scale
    return Quantity(value=value, source=f"{part.source}; slowed by time_scale {time_scale:g}")


def _folder(where: str) -> Traversable:
    return resources.files("kairox_sim").joinpath(where)


def _bundled(where: str) -> list[str]:
    names = (entry.name for entry in _folder(where).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _load(name_or_path: str | Path, where: str, model: type[ModelT], noun: str) -> ModelT:
    text_form = str(name_or_path)
    is_path = (
        isinstance(name_or_path, Path)
        or text_form.endswith(".toml")
        or "/" in text_form
        or "\\" in text_form
    )
    file: Path | Traversable
    file = Path(name_or_path) if is_path else _folder(where).joinpath(f"{text_form}.toml")
    if not file.is_file():
        names = _bundled(where)
        near = difflib.get_close_matches(text_form, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KairoxError(
            f"no {noun} {text_form!r}; {hint}bundled: {', '.join(names)}; "
            "or give the path of a .toml file"
        )
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KairoxError(f"{noun} {text_form!r} is not valid TOML: {error}") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_problem(item, model) for item in error.errors())
        raise KairoxError(f"{noun} {text_form!r}: {problems}") from error


def _problem(item: Any, model: type[BaseModel]) -> str:
    loc: tuple[Any, ...] = item["loc"]
    dotted = ".".join(str(part) for part in loc)
    if item["type"] == "extra_forbidden":
        allowed = _allowed_keys(model, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), allowed, n=1, cutoff=0.0)
        return f"unknown key {dotted!r}; did you mean {near[0]!r}? allowed: {', '.join(allowed)}"
    if item["type"] == "missing":
        return f"missing key {dotted!r}"
    return f"{dotted!r}: {item['msg']} (got {item['input']!r})"


def _allowed_keys(model: type[BaseModel], loc: Iterable[Any]) -> list[str]:
    """The fields of the model found by walking `loc` down from `model`."""
    inner: Any = model
    for part in loc:
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            inner = inner.model_fields[str(part)].annotation
        else:  # dict[str, Model]
            inner = inner.__args__[1]
    return list(inner.model_fields)

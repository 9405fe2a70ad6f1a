"""A machine as run: every resource `fixed + n / rate`, every number with its source, in TOML.

A machine's TOML is complete (as `kairox calibrate` writes it), or names bundled parts with `gpu`,
`cpu` and `link` and adds only what is its own: `profiles/base/datasheet.toml` is laid under the
parts, and the machine's own entries over them; or it names a bundled machine with `like` and says
what differs. Knows nothing of models: `costs` turns a profile and a shape into seconds. A profile's
`time_scale` says how much slower than its original an emulated machine runs; it is already in the
numbers and is never multiplied into or out of a result.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kairox_sim.bundled_toml import ModelT, bundled, is_path, read, validated
from kairox_sim.errors import KairoxError
from kairox_sim.model import Numerics

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
    sync_fixed_s: Cost | None = None  # waiting for the copies queued so far; None: not known


class Decide(BaseModel):
    """One `plan` of a policy: fixed + n_neurons / rate + swaps x per_swap."""

    model_config = _FROZEN
    fixed_s: Cost
    neurons_per_s: Rate
    per_swap_s: Cost


class Deterministic(BaseModel):
    """How many times as long as in float32 a pass takes in fixed point, launching it left out."""

    model_config = _FROZEN
    cpu_ratio: Rate  # residual neurons
    gpu_ratio: Rate  # the gate, and neurons in slots


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


class GpuPart(BaseModel):
    """A GPU to build a machine from. `stream_bytes_per_s`: what a pass over weights reaches."""

    model_config = _FROZEN
    name: str
    vram_bytes: Rate
    stream_bytes_per_s: Rate
    gpu_flops_per_s: Rate


class CpuPart(BaseModel):
    """A CPU with its memory. `sparse_bytes_per_s`: the kernel over scattered neurons, alone."""

    model_config = _FROZEN
    name: str
    cpu_flops_per_s: Rate
    dram_peak_bytes_per_s: Rate
    dram_bytes_per_s: Rate
    sparse_bytes_per_s: Rate


class HardwareProfile(BaseModel):
    """One machine as run. The GPU's ops share one stream; CPU work and copies share DRAM."""

    model_config = _FROZEN
    name: str
    kind: Literal["datasheet", "calibrated"]
    decide_blocks_gpu: bool = Field(strict=True)  # the planning thread also feeds the GPU
    time_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # provenance only
    calibrated_as: str | None = None  # the stand-in's target the calibration was made with
    calibrated_numerics: Numerics | None = None  # and the numerics; it is valid with no others

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
    dram_peak_bytes_per_s: Rate | None = None  # of the memory's datasheet; None: not known
    h2d: Link
    copies_per_bundle: Annotated[Quantity, AfterValidator(_zero_or_one)]
    d2h: Link
    handover_fixed_s: Cost  # waking the side that waits, once each way
    decide: Annotated[dict[str, Decide], AfterValidator(_has_default)]  # by policy class
    deterministic: Deterministic | None = None  # None: not known


_PROFILES = "profiles"
_LINKS = "profiles/links"
_GPUS = "profiles/gpus"
_CPUS = "profiles/cpus"
_UNDER_PARTS = "profiles/base"  # one file, datasheet.toml
_GPU_OPS = ("attention", "gate", "predictor", "ffn_gpu", "head")


def bundled_profiles() -> list[str]:
    """Names that `load_profile` knows."""
    return bundled(_PROFILES)


def bundled_links() -> list[str]:
    """Names that `load_link` knows."""
    return bundled(_LINKS)


def bundled_gpus() -> list[str]:
    """Names that `load_gpu` and a machine's `gpu` know."""
    return bundled(_GPUS)


def bundled_cpus() -> list[str]:
    """Names that `load_cpu` and a machine's `cpu` know."""
    return bundled(_CPUS)


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """A bundled machine by name, a TOML file by path, or a machine of parts: "gpu+cpu+link".

    A path is a Path, or text with `/` or `.toml`. "rtx4090+epyc-7542+pcie4" (in any order) is a
    machine of these bundled parts and nothing of its own.
    """
    noun, text = "hardware profile", str(name_or_path)
    if "+" in text and not is_path(name_or_path):
        data: dict[str, Any] = {"name": text, **_parts_named_in(text)}
    else:
        _refuse_part(name_or_path)
        data = read(name_or_path, _PROFILES, noun)
    return validated(_with_parts(data, text), HardwareProfile, f"{noun} {text!r}")


def load_link(name_or_path: str | Path) -> LinkProfile:
    """A bundled link by name, or a TOML file by path."""
    return _load(name_or_path, _LINKS, LinkProfile, "link profile")


def load_gpu(name_or_path: str | Path) -> GpuPart:
    """A bundled GPU by name, or a TOML file by path."""
    return _load(name_or_path, _GPUS, GpuPart, "GPU")


def load_cpu(name_or_path: str | Path) -> CpuPart:
    """A bundled CPU by name, or a TOML file by path."""
    return _load(name_or_path, _CPUS, CpuPart, "CPU")


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


def with_dram_efficiency(profile: HardwareProfile, efficiency: float, why: str) -> HardwareProfile:
    """The same machine whose DRAM reaches `efficiency` of its datasheet's peak. `why`: the source.

    The CPU's sparse kernel keeps its share of the effective rate.
    """
    if not 0 < efficiency <= 1:
        raise KairoxError(f"a DRAM efficiency of {efficiency}; allowed are numbers in (0, 1]")
    peak = profile.dram_peak_bytes_per_s
    if peak is None:
        raise KairoxError(
            f"profile {profile.name!r} has no dram_peak_bytes_per_s, so an efficiency says nothing "
            "of it; add the peak of its memory's datasheet"
        )
    dram = Quantity(value=peak.value * efficiency, source=f"{peak.source}, x {efficiency:g} {why}")
    sparse, before = profile.ffn_cpu.bytes_per_s, profile.dram_bytes_per_s.value
    share = sparse.value / before
    kept = Quantity(
        value=dram.value * share,
        source=f"{share:.3g} x the effective DRAM rate ({efficiency:g} of its peak, {why}); the "
        f"share is from: {sparse.source}",
    )
    ffn_cpu = profile.ffn_cpu.model_copy(update={"bytes_per_s": kept})
    return profile.model_copy(update={"dram_bytes_per_s": dram, "ffn_cpu": ffn_cpu})


def with_margin(profile: HardwareProfile, margin_bytes: float, why: str) -> HardwareProfile:
    """The same machine with so much VRAM kept free of weights and keys. `why`: the source."""
    if not (math.isfinite(margin_bytes) and margin_bytes >= 0):
        raise KairoxError(f"a VRAM margin of {margin_bytes} bytes; must be finite, 0 or more")
    margin = Quantity(value=float(margin_bytes), source=why)
    return profile.model_copy(update={"vram_margin_bytes": margin})


def with_vram(profile: HardwareProfile, vram_bytes: float) -> HardwareProfile:
    """The same machine with so much device memory, its margin included."""
    vram = Quantity(value=float(vram_bytes), source="given: in place of the machine's own")
    return profile.model_copy(update={"vram_bytes": vram})


_SCALED = (
    "gpu_flops_per_s", "cpu_flops_per_s", "dram_bytes_per_s", "dram_peak_bytes_per_s",
    "handover_fixed_s",
)  # fmt: skip


MOST_TIME_SCALE = 1e6  # a token of milliseconds then takes hours, which no run is waited for


def scaled(profile: HardwareProfile, time_scale: float) -> HardwareProfile:
    """The same machine, `time_scale` times slower: rates divided, fixed costs multiplied.

    `decide` stays: on an emulated machine the policies run for real and are not paced.
    """
    if not 0 < time_scale <= MOST_TIME_SCALE:
        raise KairoxError(
            f"time_scale is {time_scale}, must be a number above 0, at most {MOST_TIME_SCALE:g}"
        )
    parts = {
        field: _slower(getattr(profile, field), time_scale, field)
        for field in HardwareProfile.model_fields
        if isinstance(getattr(profile, field), (Op, Link)) or field in _SCALED
    }
    return profile.model_copy(update={**parts, "time_scale": profile.time_scale * time_scale})


def _slower(part: Any, time_scale: float, key: str = "") -> Any:
    """A quantity, or every quantity of an op or link; the suffix says whether it is a rate."""
    if part is None:
        return None
    if not isinstance(part, Quantity):
        fields = type(part).model_fields
        return part.model_copy(
            update={name: _slower(getattr(part, name), time_scale, name) for name in fields}
        )
    if time_scale == 1:
        return part
    value = part.value / time_scale if key.endswith("_per_s") else part.value * time_scale
    return Quantity(value=value, source=f"{part.source}; slowed by time_scale {time_scale:g}")


def parts_of(name: str) -> dict[str, str]:
    """The bundled parts that a bundled machine's file names, by kind: gpu, cpu, link."""
    data = read(name, _PROFILES, "hardware profile")
    return {kind: str(data[kind]) for kind in _known_parts() if kind in data}


def _known_parts() -> dict[str, list[str]]:
    return {"gpu": bundled_gpus(), "cpu": bundled_cpus(), "link": bundled_links()}


def _refuse_part(name: str | Path) -> None:
    """A part alone is no machine: say which form is."""
    for kind, names in _known_parts().items():
        if name in names and name not in bundled_profiles():
            form = {"gpu": "rtx4090", "cpu": "epyc-7542", "link": "pcie4"} | {kind: str(name)}
            raise KairoxError(
                f"no hardware profile {name!r}: it is a {kind}, and a machine is gpu+cpu+link, "
                f"such as {'+'.join(form.values())!r}; `kairox hardware` lists machines and parts"
            )


def _parts_named_in(text: str) -> dict[str, str]:
    """Of "rtx4090+epyc-7542+pcie4": which part is the GPU, the CPU and the link."""
    known = _known_parts()
    named = text.split("+")
    found = {kind: name for name in named for kind, names in known.items() if name in names}
    if len(named) != len(known) or len(found) != len(known):
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in known.items())
        raise KairoxError(
            f"no hardware profile {text!r}: with '+' it is a GPU, a CPU and a link, one of each, "
            f"as in 'rtx4090+epyc-7542+pcie4'. {listed}"
        )
    return found


def _with_parts(data: dict[str, Any], label: str) -> dict[str, Any]:
    """A machine's own entries over those of the parts or of the machine that it names; complete
    ones as they are."""
    own = dict(data)
    if (like := own.pop("like", None)) is not None:
        if not isinstance(like, str) or like not in bundled_profiles():
            raise KairoxError(
                f"hardware profile {label!r}: 'like' is {like!r}, must be the name of a bundled "
                f"machine: {', '.join(bundled_profiles())}"
            )
        return _over(_with_parts(read(like, _PROFILES, "hardware profile"), like), own)
    named = {kind: own.pop(kind) for kind in ("gpu", "cpu", "link") if kind in own}
    if not named:
        return own
    for kind, name in named.items():
        if not isinstance(name, str):
            raise KairoxError(
                f"hardware profile {label!r}: {kind!r} is {name!r}, must be the name of a part"
            )
    merged = read("datasheet", _UNDER_PARTS, "base")
    if "gpu" in named:
        gpu = load_gpu(named["gpu"]).model_dump(exclude={"name"})
        stream = gpu.pop("stream_bytes_per_s")
        merged = _over(merged, gpu | {op: {"bytes_per_s": stream} for op in _GPU_OPS})
    if "cpu" in named:
        cpu = load_cpu(named["cpu"]).model_dump(exclude={"name"})
        sparse = cpu.pop("sparse_bytes_per_s")
        merged = _over(merged, cpu | {"ffn_cpu": {"bytes_per_s": sparse}})
    if "link" in named:
        merged = _over(merged, load_link(named["link"]).model_dump(exclude={"name"}))
    return _over(merged, own)


def _over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged; a quantity replaces another whole, so that no number keeps a source."""
    merged = dict(under)
    for key, entry in over.items():
        below = merged.get(key)
        is_table = isinstance(entry, dict) and not {"value", "source"} & entry.keys()
        merged[key] = _over(below, entry) if is_table and isinstance(below, dict) else entry
    return merged


def _load(name_or_path: str | Path, where: str, model: type[ModelT], noun: str) -> ModelT:
    data = read(name_or_path, where, noun)
    return validated(data, model, f"{noun} {str(name_or_path)!r}")

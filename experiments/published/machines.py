"""The machines and models of the published bars, with the constants of fitted.toml on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments.published.data import FOLDER, sha256, table
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import (
    HardwareProfile,
    load_profile,
    with_dram_efficiency,
    with_margin,
)
from kairox_sim.memory import fits
from kairox_sim.model import find_shape
from kairox_sim.workload_presets import PRESETS

FITTED = FOLDER / "fitted.toml"
CPU_OF = {"pc-low": "xeon-e5-2680v4", "pc-high": "epyc-7542"}
CONTEXT_RESERVED = 1024  # Kairox, OSDI '26, section 9.1
# ShareGPT prompts, up to 512 tokens of output and 1,024 in all: no distribution is printed, so the
# context of the tokens that are timed is taken as half of what is reserved.
CONTEXT_MEAN = 512


@dataclass(frozen=True, slots=True)
class Bar:
    """One model on one machine: four published bars."""

    machine: str  # pc-low, pc-high
    name: str  # as in bars.toml
    workload: str  # preset
    shape: str  # catalogue, with the weights' type
    group_size: int  # neurons / groups per layer of the Kairox artifact
    published: Mapping[str, float]  # tokens/s by system

    @property
    def key(self) -> str:
        return f"{self.name} on {self.machine}"


# name in bars.toml: (workload, shape, name in paper.toml's group_counts)
_MODELS = {
    "bamboo-7b": ("bamboo-7b", "bamboo-7b", "bamboo-7b"),
    "opt-6.7b": ("opt-6.7b", "opt-6.7b", "opt-6.7b"),
    "prosparse-7b": ("prosparse-7b", "prosparse-7b", "prosparse-7b"),
    "sparseqwen2-7b": ("sparseqwen2-7b", "sparseqwen2-7b", "sparseqwen2-7b"),
    "opt-13b": ("opt-13b", "opt-13b", "opt-13b"),
    "prosparse-13b": ("prosparse-13b", "prosparse-13b", "prosparse-13b"),
    "opt-30b-q8": ("opt-30b", "opt-30b@q8_0", "opt-30b"),
    "falcon-40b-q8": ("falcon-40b-relu", "falcon-40b-relu@q8_0", "falcon-40b"),
}


@cache
def bars() -> tuple[Bar, ...]:
    """All ten, PC-Low first."""
    systems = ("llama.cpp", "PowerInfer", "Neuralink", "Kairox")
    found = []
    for machine, part in (("pc-low", "pc_low"), ("pc-high", "pc_high")):
        for name, values in table("bars", part).items():
            workload, shape, groups = _MODELS[name]
            size = PRESETS[workload].n_neurons // int(table("paper", "group_counts")[groups])
            given = dict(zip(systems, values, strict=True))
            found.append(Bar(machine, name, workload, shape, size, given))
    return tuple(found)


@cache
def constants() -> dict[str, Any]:
    """fitted.toml, as committed before any other row was run."""
    if not FITTED.is_file():
        raise KairoxError(
            f"there is no {FITTED.name}; make it with python -m experiments.published.fit"
        )
    return tomllib.loads(FITTED.read_text(encoding="utf-8"))


SPARSE_SHARES = (0.2, 0.8)  # of the effective DRAM rate, that sparse CPU kernels reach


def with_sparse_share(profile: HardwareProfile, share: float) -> HardwareProfile:
    """The sparse kernel at another share of the effective DRAM rate than the chosen one."""
    rate = profile.ffn_cpu.bytes_per_s.model_copy(
        update={
            "value": share * profile.dram_bytes_per_s.value,
            "source": f"{share:g} x the effective DRAM rate, to see what leans on it",
        }
    )
    host = profile.ffn_cpu.model_copy(update={"bytes_per_s": rate})
    return profile.model_copy(update={"ffn_cpu": host})


def leans_on(*names: str) -> str:
    """What a row owes to constants of fitted.toml's table `chosen`: the end of its `why`."""
    known = constants()["chosen"]
    return f"(leans on: {'; '.join(known[name]['short'] for name in names)})"


def fitted_hash() -> dict[str, str]:
    """For provenance."""
    return {FITTED.name: sha256(FITTED)}


def with_constants(machine: str, efficiency: float, margin_bytes: float) -> HardwareProfile:
    """A machine of the paper with this DRAM efficiency and margin instead of its profile's."""
    why = "fitted on the llama.cpp bars (experiments/published/fitted.toml)"
    profile = with_dram_efficiency(load_profile(machine), efficiency, why)
    return with_margin(profile, margin_bytes, why)


def paper_machine(name: str) -> HardwareProfile:
    """pc-low or pc-high with the fitted constants."""
    if name not in CPU_OF:
        raise KairoxError(f"no machine {name!r} has fitted constants; allowed: {', '.join(CPU_OF)}")
    known = constants()
    return with_constants(
        name, known["dram_efficiency"][CPU_OF[name]], known["vram_margin"]["bytes"]
    )


def refusal(bar: Bar) -> str:
    """Why a sparse system cannot run there with the fitted constants; empty where it can."""
    profile = paper_machine(bar.machine)
    plan = fits(profile, find_shape(bar.shape), "predicted", 0, CONTEXT_RESERVED)
    return "" if plan.fits else plan.explain()


def artifact_margin(profile: HardwareProfile) -> HardwareProfile:
    """With the margin that the Kairox artifact leaves, which is smaller than the fitted one."""
    mebibytes = table("paper", "released_code")["margin_mib"][1]
    why = f"github.com/Anhelor/kairox.cpp: {mebibytes} MiB"
    return with_margin(profile, mebibytes * 2**20, why)


def margined(name: str) -> HardwareProfile:
    """Any other machine with the fitted margin; its DRAM as its profile says."""
    why = "fitted on the llama.cpp bars (experiments/published/fitted.toml)"
    return with_margin(load_profile(name), constants()["vram_margin"]["bytes"], why)

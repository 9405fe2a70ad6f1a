"""The systems of the field, each a preset of Settings: placement, policy, pipeline, dispatch,
controller. Every field can be overridden; nothing here is code that only one system runs.

Add one: a row. `decided` says what its source leaves open and what is done here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kairox_sim.errors import KairoxError


@dataclass(frozen=True, slots=True)
class System:
    """`settings`: fields of Settings that differ from its defaults."""

    name: str
    line: str
    source: str
    settings: Mapping[str, Any]
    decided: str = ""


# What hybrid engines share: a trained predictor decides what is computed, and all rows move.
_SPARSE = {"gating": "predicted", "predictor": "rank", "prediction": "perfect", "slots": "vram"}
_KAIROX_PAPER = (
    "Kairox, OSDI '26: Adaptive GPU-CPU Hybrid LLM Inference via Online Neuron Balancing"
)
_KAIROX_CODE = "github.com/Anhelor/kairox.cpp at 1f071d53, github.com/ganminghao/SparkInfer"
# The released engine: groups contiguous in each matrix, a copy per matrix, a synchronisation every
# 4 copies, and two merges a layer (before the activation and after down).
_ENGINE = {
    "groups": "metis:16", "start": "first", "late": "stall",
    "copies": "matrix", "copies_per_sync": 4, "handovers": 2,
}  # fmt: skip

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "llama.cpp",
            "the last N whole layers on the GPU, the rest dense on the CPU, one after the other",
            "github.com/ggml-org/llama.cpp, -ngl N: src/llama-model.cpp",
            {
                "policy": "static", "placement": "layers", "slots": "ngl", "dispatch": "layers",
                "gating": "dense",
            },
            "N is the most that fits; the output head is on the GPU only with every layer.",
        ),
        System(
            "powerinfer",
            "static hot set by profiled counts; CPU and GPU at once; nothing moves",
            "PowerInfer, SOSP '24, arXiv 2312.12456",
            {**_SPARSE, "policy": "static", "placement": "solver"},
            "The integer program is solved greedily, 64 neurons at a time, with its minimum per "
            "layer.",
        ),
        System(
            "powerinfer-serial",
            "the same without overlap: the GPU's neurons, then the CPU's",
            f"the baseline `pwif` of the Kairox artifact ({_KAIROX_CODE})",
            {**_SPARSE, "policy": "static", "placement": "solver", "dispatch": "serial"},
        ),
        System(
            "powerinfer-shipped",
            "as its tool ships: hot sets taken from another layer's statistics",
            "github.com/SJTU-IPADS/PowerInfer at d3ebd7c5: export_split.py, solver.py",
            {**_SPARSE, "policy": "static", "placement": "solver-shipped"},
        ),
        System(
            "neuralink-eager",
            "Neuralink as the Kairox paper runs it: load the active set, as far as slots go",
            f"{_KAIROX_PAPER}, section 9; {_KAIROX_CODE}",
            {**_SPARSE, **_ENGINE, "policy": "topk", "trigger": "attn_out"},
            "On the Kairox engine with decay 0 and no adaptation; the CPU does what does not fit.",
        ),
        System(
            "neuralink-linked",
            "co-active neurons side by side in memory, so that reads are longer and fewer",
            "Neuralink (Ripple), ASPLOS '25, arXiv 2410.19274",
            {
                **_SPARSE, "policy": "s3fifo_segments", "layout": "linked", "trigger": "serial",
                "dispatch": "gpu", "copies": "bundle", "swap_neurons": 4096,
            },
            "Its flash is the host's memory here and its DRAM the GPU's. Linking: a greedy path on "
            "1 - P(ij) over each neuron's 32 strongest edges, two links a neuron. Reads collapse "
            "while gap x bytes / rate < copy_fixed_s, and the gap's bytes are charged. Missing "
            "stretches of 4 neurons or more are admitted with probability 0.5. A swap is large: no "
            "read is longer than one.",
        ),
        System(
            "qinfer",
            "balanced hot set, swapped row by row in the background while the CPU is behind",
            "Q-Infer, ACM TACO 2025, DOI 10.1145/3764589; github.com/PDS-Lab/Q-Infer at 32679c43",
            {
                **_SPARSE, "policy": "qinfer", "placement": "balanced", "start": "warm",
                "trigger": "attn_out", "late": "cancel", "lookahead_from": 5, "copies": "row",
                "swap_neurons": 1,
            },
            "Up, gate and down move together; copies that have not begun when the layer computes "
            "are given up. Attention is not split and no tokens are selected.",
        ),
        System(
            "kairox-guide",
            "momentum per neuron (0.90, 0.35, 0.08), one global controller",
            "the Kairox Guide's listing",
            {**_SPARSE, "policy": "tam", "controller": "anb", "trigger": "attn_in",
             "copies": "bundle"},
            "Its predictor reads the state that enters the layer before; a copy per neuron, as its "
            "cost per load says.",
        ),
        System(
            "kairox-paper",
            "groups by METIS, smoothed activity, threshold, top-k, a decay per layer",
            f"{_KAIROX_PAPER}, sections 5-7",
            {**_SPARSE, **_ENGINE, "policy": "tam_paper", "controller": "anb_paper",
             "trigger": "attn_out"},
            "Residents that fail the threshold stay while slots are free; copies and merges are "
            "the released engine's.",
        ),
        System(
            "kairox-released",
            "fixed decay 0.67, no threshold, top-k under a swap cap that adapts per layer",
            _KAIROX_CODE,
            {**_SPARSE, **_ENGINE, "policy": "tam_released", "controller": "swap_cap",
             "trigger": "attn_out"},
        ),
        System(
            "lru",
            "least recently used goes; everything computed is admitted",
            "the strawman of the Kairox paper, figure 5, and the usual cache",
            {**_SPARSE, "policy": "lru", "observes": "evaluated"},
        ),
        System(
            "lfu",
            "least frequently used goes; everything computed is admitted",
            "the usual cache, counts over the whole run",
            {**_SPARSE, "policy": "lfu", "observes": "evaluated"},
        ),
        System(
            "llm-in-a-flash",
            "neurons of the last 5 tokens stay; missing ones are loaded before the layer computes",
            "LLM in a Flash, ACL '24, arXiv 2312.11514",
            {**_SPARSE, "policy": "window", "trigger": "serial", "dispatch": "gpu",
             "copies": "bundle"},
            "Rows and columns of a neuron are bundled, so a copy per neuron; the host's memory "
            "stands for its flash.",
        ),
        System(
            "dejavu",
            "everything on the GPU, only predicted neurons computed",
            "Deja Vu, ICML '23; github.com/FMInference/DejaVu at ee902c1a",
            {**_SPARSE, "policy": "static", "slots": "all"},
            "Refused where the model does not fit; its attention predictor is left out.",
        ),
        System(
            "fiddler",
            "static popularity; each miss goes to the CPU or over the link, whichever is cheaper",
            "Fiddler, arXiv 2402.07033; src/fiddler/mixtral.py",
            {**_SPARSE, "policy": "static", "dispatch": "cost"},
            "Neurons take the place of its experts; copies are not kept, as there.",
        ),
    )
}  # fmt: skip


def find_system(name: str) -> System:
    """A system by name; raises naming the nearest."""
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KairoxError(f"unknown system {name!r}; {hint}allowed: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]

"""Named workloads: what is published of how a model's FFN neurons fire, one row per model.

Densities are published for every row but one; skew for two models only, the others borrow it, and
the row's source says so. No source gives persistence (published figures conflict, so it is a thing
to sweep) or the share of one-hit neurons: presets leave both open. Layers are equally dense.
"""

from __future__ import annotations

from kairox_sim.errors import KairoxError
from kairox_sim.firing_rates import Rates
from kairox_sim.workload import Workload, fit_co_activation

PROSPARSE = "ProSparse, arXiv 2402.13516"
POWERINFER = "PowerInfer, SOSP 2024 (arXiv 2312.12456)"
FORK = "github.com/brothergiven/kairox.cpp (RTX 3070, Q8_0, 511 tokens)"
# C(group_size) of the evaluated sets, where one is published (ProSparse-7B: that fork, 16).
CO_ACTIVATION = {"prosparse-7b": 0.275}

# Skew: the share of the neurons that carries 80 % of an MLP block's activations (PowerInfer, 2.2).
OPT_TOP = 0.26  # OPT-30B
REGLU_TOP = 0.43  # LLaMA2-ReGLU-70B
MOST = 0.80
_OPT_SKEW = f"skew (26 % carry 80 %) of OPT-30B: {POWERINFER}, section 2.2"
_REGLU_SKEW = f"skew (43 % carry 80 %) of LLaMA2-ReGLU-70B: {POWERINFER}, section 2.2"
_BORROWED = ", assumed for this model"


def _opt(name: str, n_layers: int, d_model: int, density: float, source: str) -> Workload:
    return Workload(
        name=name,
        model=name,
        n_layers=n_layers,
        n_neurons=4 * d_model,
        d_model=d_model,
        active=Rates(density, OPT_TOP, MOST),
        source=source,
    )


def _reglu(
    name: str, n_layers: int, n_neurons: int, d_model: int, density: float, source: str
) -> Workload:
    return Workload(
        name=name,
        model=name,
        n_layers=n_layers,
        n_neurons=n_neurons,
        d_model=d_model,
        active=Rates(density, REGLU_TOP, MOST),
        source=source,
    )


PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="prosparse-7b",
            model="prosparse-7b",
            n_layers=32,
            n_neurons=11008,
            d_model=4096,
            active=Rates(0.1068, REGLU_TOP, MOST),
            predicted=Rates(0.23, 0.47, 0.70),
            recall=0.95,
            group_size=16,
            source=f"density: {PROSPARSE}; {_REGLU_SKEW}{_BORROWED}; predicted sets: {FORK}, 22.2 "
            "to 24.6 % of the neurons, of which the most frequent 47 % carry 70 %; recall assumed "
            "within the 90 to 99 % of the OSDI '26 paper; co_activation fitted to "
            f"C(16) = {CO_ACTIVATION['prosparse-7b']:.1%} of the same fork",
        ),
        Workload(
            name="prosparse-13b",
            model="prosparse-13b",
            n_layers=40,
            n_neurons=13824,
            d_model=5120,
            active=Rates(0.112, REGLU_TOP, MOST),
            predicted=Rates(0.22, 0.47, 0.70),
            recall=0.95,
            source=f"density: {PROSPARSE}; {_REGLU_SKEW}{_BORROWED}; predicted sets assumed as of "
            f"the 7B model ({FORK}); recall assumed within the 90 to 99 % of the OSDI '26 paper",
        ),
        _reglu(
            "relu-llama-7b", 32, 11008, 4096, 0.330,
            f"density (ReluLLaMA-7B): {PROSPARSE}; {_REGLU_SKEW}{_BORROWED}",
        ),
        _reglu(
            "relu-llama-13b", 40, 13824, 5120, 0.284,
            f"density (ReluLLaMA-13B): {PROSPARSE}; {_REGLU_SKEW}{_BORROWED}",
        ),
        _reglu(
            "relu-llama-70b", 80, 28672, 8192, 0.18,
            f"density: {POWERINFER}, table 3; {_REGLU_SKEW}",
        ),
        _reglu(
            "bamboo-7b", 32, 14336, 4096, 0.125,
            f"density: middle of the 10 to 15 % of {POWERINFER}, table 3, and the model card; "
            f"{_REGLU_SKEW}{_BORROWED}",
        ),
        _reglu(
            "turbosparse-mistral-7b", 32, 14336, 4096, 0.10,
            f"density: TurboSparse, arXiv 2406.05955; {_REGLU_SKEW}{_BORROWED}",
        ),
        _reglu(
            "sparseqwen2-7b", 28, 18944, 3584, 0.125,
            "density assumed as of bamboo-7b, which has the same activation: none is published; "
            f"{_REGLU_SKEW}{_BORROWED}",
        ),
        _opt(
            "opt-6.7b", 32, 4096, 0.0328,
            f"density: Ripple, arXiv 2410.19274; {_OPT_SKEW}{_BORROWED}",
        ),
        _opt(
            "opt-13b", 40, 5120, 0.03,
            f"density: middle of the 2 to 4 % of {POWERINFER}, table 3; {_OPT_SKEW}{_BORROWED}",
        ),
        _opt(
            "opt-30b", 48, 7168, 0.03,
            f"density: middle of the 2 to 4 % of {POWERINFER}, table 3; {_OPT_SKEW}",
        ),
        _opt(
            "opt-66b", 64, 9216, 0.03,
            f"density: middle of the 2 to 4 % of {POWERINFER}, table 3; {_OPT_SKEW}{_BORROWED}",
        ),
        _opt(
            "falcon-40b-relu", 60, 8192, 0.05,
            f"density: {POWERINFER}, table 3; {_OPT_SKEW}{_BORROWED}",
        ),
    )
}  # fmt: skip


def find_workload(name: str) -> Workload:
    """A preset by name, its co-activation fitted where a target for it is published."""
    if name not in PRESETS:
        raise KairoxError(f"no workload {name!r}; there are {', '.join(PRESETS)}")
    workload = PRESETS[name]
    target = CO_ACTIVATION.get(name)
    return workload if target is None else fit_co_activation(workload, target)

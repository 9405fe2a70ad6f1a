"""Caching policies: what to promote and what to evict. Add one: a file beside, a row here."""

from typing import Any

from kairox_sim.errors import KairoxError
from kairox_sim.policies.arc import Arc
from kairox_sim.policies.base import Known, Policy
from kairox_sim.policies.bounds import AllResident, NoneResident, Static
from kairox_sim.policies.classic import Lfu, Lru
from kairox_sim.policies.oracles import Belady, BeladyBypass
from kairox_sim.policies.qinfer import QInfer
from kairox_sim.policies.queues import Fifo, Sieve
from kairox_sim.policies.random import RandomEvict
from kairox_sim.policies.s3fifo import S3Fifo, S3FifoSegments
from kairox_sim.policies.tam import Tam
from kairox_sim.policies.tam_paper import TamPaper
from kairox_sim.policies.tam_released import TamReleased, TopK
from kairox_sim.policies.window import Window
from kairox_sim.policies.wtinylfu import WTinyLfu

POLICIES: dict[str, type[Policy]] = {
    "tam": Tam,
    "tam_paper": TamPaper,
    "tam_released": TamReleased,
    "topk": TopK,
    "qinfer": QInfer,
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
    "s3fifo_segments": S3FifoSegments,
    "arc": Arc,
    "wtinylfu": WTinyLfu,
    "window": Window,
    "random": RandomEvict,
    "belady": Belady,
    "belady_bypass": BeladyBypass,
    "static": Static,
    "all": AllResident,
    "none": NoneResident,
}
BOUNDS = ("all", "none")  # not something to choose: what the others lie between
ORACLES = ("belady", "belady_bypass")  # nor is this: they know the future


def build_policy(
    name: str, n_layers: int, n_neurons: int, known: Known | None = None, **params: Any
) -> Policy:
    """The policy of this name. Raises where something it needs is not known."""
    build: Any = POLICIES[name]
    given: dict[str, Any] = {}
    for need in sorted(build.needs):
        given[need] = getattr(known or Known(), need)
        if given[need] is None:
            raise KairoxError(f"policy {name!r} cannot be built without {_NEEDS[need]}")
    return build(n_layers, n_neurons, **given, **params)  # type: ignore[no-any-return]


_NEEDS = {
    "rng": "a random generator",
    "future": "the uses that are still to come: it needs the whole recorded trace it is run on",
    "gpu_over_cpu": "the rates of the machine it decides for",
    "position": "the order of the neurons in host memory",
}

__all__ = [
    "BOUNDS",
    "ORACLES",
    "POLICIES",
    "AllResident",
    "Arc",
    "Belady",
    "BeladyBypass",
    "Fifo",
    "Known",
    "Lfu",
    "Lru",
    "NoneResident",
    "Policy",
    "QInfer",
    "RandomEvict",
    "S3Fifo",
    "S3FifoSegments",
    "Sieve",
    "Static",
    "Tam",
    "TamPaper",
    "TamReleased",
    "TopK",
    "WTinyLfu",
    "Window",
    "build_policy",
]

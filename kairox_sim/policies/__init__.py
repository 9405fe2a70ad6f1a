"""Caching policies: what to promote and what to evict. Add one: a file beside, a row here."""

from kairox_sim.policies.base import Policy
from kairox_sim.policies.bounds import AllResident, NoneResident, Static
from kairox_sim.policies.classic import Lfu, Lru
from kairox_sim.policies.tam import Tam

POLICIES: dict[str, type[Policy]] = {
    "tam": Tam,
    "lru": Lru,
    "lfu": Lfu,
    "static": Static,
    "all": AllResident,
    "none": NoneResident,
}
BOUNDS = ("all", "none")  # not something to choose: what the others lie between

__all__ = [
    "BOUNDS",
    "POLICIES",
    "AllResident",
    "Lfu",
    "Lru",
    "NoneResident",
    "Policy",
    "Static",
    "Tam",
]

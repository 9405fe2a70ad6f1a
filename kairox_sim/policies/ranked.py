"""The one plan shared by policies that rank neurons: admit everything seen, give up the lowest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_sim.policies.base import ABSENT, NOTHING, RESIDENT, Ids, State


def admit_seen(
    seen: Ids, score: NDArray[Any], state: State, free_slots: int, limit: int
) -> tuple[Ids, Ids]:
    """Promote what was seen and is absent; evict the lowest `score` [n_neurons, int64] not seen.

    When more is wanted than fits: highest score first, ties to the lowest index. Victims are the
    lowest scores, ties to the lowest index.
    """
    at = seen.astype(np.intp)  # indexing with int32 takes several times as long
    want = seen.compress(state.take(at) == ABSENT)
    if want.size == 0 or limit == 0:
        return NOTHING, NOTHING
    missing = min(want.size, limit) - free_slots
    victims = NOTHING
    if missing > 0:
        may_go = state == RESIDENT
        may_go[at] = False
        candidates = may_go.nonzero()[0].astype(np.int32)
        victims = lowest(candidates, score, min(missing, candidates.size))
    room = min(want.size, limit, free_slots + victims.size)
    order = np.argsort(-score[want], kind="stable")  # want ascends, so ties keep the lowest index
    return want[order[:room]], victims


def lowest(candidates: Ids, score: NDArray[Any], k: int) -> Ids:
    """The k candidates (ascending ids) of lowest int64 `score`, ties to the lowest index."""
    if k <= 0:
        return NOTHING
    # One unique key per candidate makes the chosen set independent of the partition's internals.
    key = score[candidates] * np.int64(score.size) + candidates
    if k < candidates.size:
        chosen = np.argpartition(key, k - 1)[:k]
        chosen = chosen[np.argsort(key[chosen])]
    else:
        chosen = np.argsort(key)
    return candidates[chosen]

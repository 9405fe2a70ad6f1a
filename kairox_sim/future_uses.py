"""The Future of a recorded trace: what an oracle is told. Refused where the recording has an end
that the run did not have: what is not recorded would count as never used again.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kairox_sim.errors import KairoxError
from kairox_sim.policies.base import Ids
from kairox_sim.policies.future import Future
from kairox_sim.policies.grouped import Members, group_of
from kairox_sim.trace import Trace, TraceStep


def future_of(
    trace: Trace,
    members: Members | None = None,
    *,
    observes: Literal["active", "evaluated"] = "active",
) -> Future:
    """When everything in the trace is used next, a prefill chunk as one step.

    members: int32[n_layers, n_groups, size], or [n_groups, size] for all layers alike: the future
    of groups, each used where any member is.
    observes: which sets the oracle will be shown.

    Raises KairoxError for a trace that was cut, and, of the active sets, for one whose header says
    that it does not hold every active neuron.
    """
    require_whole(trace, observes)
    n_layers, n_neurons = trace.header.n_layers, trace.header.n_neurons
    sets_of = TraceStep.active if observes == "active" else TraceStep.evaluated
    shown = [[sets_of(step, layer) for step in trace.steps()] for layer in range(n_layers)]
    if members is None:
        return Future.of(shown, n_neurons)
    per_layer = np.broadcast_to(members, (n_layers, *members.shape[-2:]))
    if members.ndim not in (2, 3) or per_layer[0].size != n_neurons:
        raise KairoxError(
            f"groups of shape {list(members.shape)} for a trace of {n_layers} layers x "
            f"{n_neurons} neurons; give [n_layers, n_groups, size], each neuron in one group"
        )
    groups = group_of(per_layer)
    n_groups = per_layer.shape[1]
    sets = [[_groups(ids, groups[layer], n_groups) for ids in of] for layer, of in enumerate(shown)]
    return Future.of(sets, n_groups)


def require_whole(trace: Trace, observes: str = "active") -> None:
    """Refuse a trace from which the future cannot be read, saying why."""
    why = None
    if trace.truncated_at is not None:
        why = f"it was cut at token {trace.truncated_at} and goes on behind that"
    elif observes == "active" and not trace.header.complete:
        why = (
            f"its header says complete = false (gating {trace.header.gating!r}): it does not hold "
            "every active neuron (what it evaluated is known: observes = evaluated)"
        )
    if why is not None:
        raise KairoxError(
            f"no future can be read from the trace{_named(trace)}: {why}, so that what an oracle "
            "would take for never used again may be used. Record a whole trace, or run a policy "
            "that needs no future"
        )


def _groups(ids: Ids, group_of_neuron: NDArray[np.int32], n_groups: int) -> Ids:
    here = np.zeros(n_groups, bool)
    here[group_of_neuron.take(ids)] = True
    return here.nonzero()[0].astype(np.int32)


def _named(trace: Trace) -> str:
    return "" if trace.path is None else f" {str(trace.path)!r}"

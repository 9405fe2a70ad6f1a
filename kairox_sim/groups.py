"""Groups of neurons that move together: building them from a prior, and their file.

The file is Parquet, one row per neuron (layer, group, neuron), with a JSON note of how the groups
were made under the key `kairox.groups` of its metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairox_sim.coactivation import TOP_NEIGHBOURS, Edges, fired, strongest_edges
from kairox_sim.errors import KairoxError
from kairox_sim.outputs import require_place
from kairox_sim.policies.grouped import Members, group_of
from kairox_sim.trace import SequenceInfo, Trace, unpack

NOTE_KEY = b"kairox.groups"
FORMAT_VERSION = 1
COLUMNS = ("layer", "group", "neuron")
_TOKENS_AT_ONCE = 1024
_WEIGHT_SUM_MAX = 2**30  # of all edges: METIS may be built with 32-bit integers


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Every neuron of every layer in one group of exactly `size`; members ascend."""

    members: Members  # int32[n_layers, n_groups, size]
    method: str
    size: int
    seed: int  # of `random` and `metis`; the others draw nothing
    prior_sha256: str | None = None  # None: the method learns nothing
    prior_tokens: int = 0
    # What the prior was recorded from, so that groups are not measured on tokens they know.
    prior_sequences: tuple[SequenceInfo, ...] = field(default=())

    def __post_init__(self) -> None:
        shape = self.members.shape
        if len(shape) != 3 or shape[2] != self.size or self.members.dtype != np.int32:
            raise KairoxError(
                f"members must be int32 [n_layers, n_groups, {self.size}], got "
                f"{self.members.dtype} {list(shape)}"
            )
        group_of(self.members)  # raises where they are no partition

    @property
    def n_layers(self) -> int:
        return int(self.members.shape[0])

    @property
    def n_neurons(self) -> int:
        return int(self.members.shape[1] * self.size)


# Learnt in this process: the systems of a sweep ask for the same groups, and METIS on layers of ten
# thousand neurons takes seconds each.
_LEARNT: dict[tuple[str, str, int, int], NDArray[np.int32]] = {}
_LEARNT_MOST = 8


def group_neurons(
    prior: Trace | None,
    n_layers: int,
    n_neurons: int,
    size: int,
    method: str,
    seed: int = 0,
    on_layer: Callable[[int], None] | None = None,
) -> Groups:
    """Groups of exactly `size` by one of METHODS. on_layer is called after each layer.

    metis: what the OSDI '26 paper does (section 5.2), a weighted partition of the co-activation
    graph; see `partition`. frequency: neurons of falling count in the prior, cut into chunks.
    random and chunks (neighbouring ids) learn nothing and need no prior.
    """
    if method not in METHODS:
        raise KairoxError(f"no way of grouping called {method!r}; there are {', '.join(METHODS)}")
    if size < 1 or n_neurons % size:
        raise KairoxError(
            f"{n_neurons} neurons are no multiple of a group size of {size}; the nearest sizes "
            f"that divide are {', '.join(map(str, _divisors_near(n_neurons, size)))}"
        )
    if not 0 <= seed < 2**63:
        raise KairoxError(f"the seed of groups is {seed}; allowed: 0 to 2**63 - 1")
    learns = method in LEARNING
    if learns:
        if prior is None:
            raise KairoxError(f"grouping by {method} learns from a prior trace; give one")
        theirs = (prior.header.n_layers, prior.header.n_neurons)
        if theirs != (n_layers, n_neurons):
            raise KairoxError(
                f"the prior has {theirs[0]} layers of {theirs[1]} neurons, and the groups are "
                f"for {n_layers} of {n_neurons}"
            )
        if prior.n_tokens == 0:
            raise KairoxError("the prior is empty: there are no tokens to group neurons by")
    build = METHODS[method]
    key = ("" if prior is None or not learns else prior.sha256, method, size, seed)
    members = _LEARNT.get(key)
    if members is None:
        members = np.empty((n_layers, n_neurons // size, size), np.int32)
        for layer in range(n_layers):
            order = build(prior, layer, n_neurons, size, seed)
            members[layer] = np.sort(order.reshape(-1, size), axis=1)
            if on_layer is not None:
                on_layer(layer)
        if learns:
            if len(_LEARNT) >= _LEARNT_MOST:
                del _LEARNT[next(iter(_LEARNT))]
            _LEARNT[key] = members
    if not learns or prior is None:
        return Groups(members, method, size, seed)
    sequences = prior.header.sequences
    return Groups(members.copy(), method, size, seed, prior.sha256, prior.n_tokens, sequences)


# Each returns the neurons of a layer in an order that is cut into groups.
Order = NDArray[np.int64]


def _by_metis(prior: Trace | None, layer: int, n_neurons: int, size: int, seed: int) -> Order:
    assert prior is not None
    part = partition(strongest_edges(prior, layer, TOP_NEIGHBOURS), n_neurons, size, seed)
    return np.argsort(part, kind="stable")


def _by_frequency(prior: Trace | None, layer: int, n_neurons: int, size: int, seed: int) -> Order:
    assert prior is not None
    return np.argsort(-fired(prior, layer), kind="stable")


def _by_chance(prior: Trace | None, layer: int, n_neurons: int, size: int, seed: int) -> Order:
    return np.random.default_rng([seed, layer]).permutation(n_neurons)


def _by_id(prior: Trace | None, layer: int, n_neurons: int, size: int, seed: int) -> Order:
    return np.arange(n_neurons)


METHODS: dict[str, Callable[[Trace | None, int, int, int, int], Order]] = {
    "metis": _by_metis,
    "random": _by_chance,
    "frequency": _by_frequency,
    "chunks": _by_id,
}
LEARNING = frozenset({"metis", "frequency"})


def partition(edges: Edges, n_neurons: int, size: int, seed: int) -> NDArray[np.int64]:
    """int64[n_neurons]: the group of each neuron, exactly `size` in each, lowest members first.

    METIS by recursive bisection (its k-way default leaves parts empty at this many parts) cuts the
    least weight, weight being f(ij); what stays within groups is the numerator of
    `co_activation_within` on the prior, as far as the kept edges go. Its parts differ in size by a
    few neurons and are then `repaired`.
    """
    n_groups = n_neurons // size
    if n_groups == 1 or size == 1:
        return np.arange(n_neurons) // size
    try:
        import pymetis
    except ModuleNotFoundError as error:
        if error.name != "pymetis":
            raise
        raise KairoxError(
            'grouping by METIS needs pymetis, of the extra `group`: pip install "kairox[group]", '
            'or in the checkout pip install -e ".[group]"'
        ) from error
    graph = _Graph.of(edges, n_neurons)
    scale = -(-int(graph.weights.sum()) // _WEIGHT_SUM_MAX) or 1
    found = pymetis.part_graph(
        n_groups,
        pymetis.CSRAdjacency(adj_starts=graph.starts, adjacent=graph.neighbours),
        eweights=np.maximum(graph.weights // scale, 1),
        recursive=True,
        options=pymetis.Options(seed=seed),
    )
    part = repaired(np.array(found.vertex_part, np.int64), edges, size)
    # METIS numbers parts as it likes; ties of a policy go to the lowest group.
    first = np.full(n_groups, n_neurons)
    np.minimum.at(first, part, np.arange(n_neurons))
    number = np.empty(n_groups, np.int64)
    number[np.argsort(first)] = np.arange(n_groups)
    return number[part]


def repaired(part: NDArray[np.int64], edges: Edges, size: int) -> NDArray[np.int64]:
    """`part` with exactly `size` neurons in each part: single ones leave what is too large.

    The neuron with the weakest tie to its part (sum of f with its other members) goes first, to
    the part with room that it has the strongest tie to. Ties: lowest neuron, lowest part.
    """
    part = part.copy()
    n_groups = part.size // size
    graph = _Graph.of(edges, part.size)
    filled = np.bincount(part, minlength=n_groups)
    inside = part[edges.low] == part[edges.high]
    tie = np.zeros(part.size, np.int64)  # of each neuron to its part
    for end in (edges.low, edges.high):
        np.add.at(tie, end[inside], edges.both[inside])
    while True:
        movable = np.flatnonzero(filled[part] > size)
        if movable.size == 0:
            return part
        neuron = int(movable[np.argmin(tie[movable])])
        mates, weight = graph.of_neuron(neuron)
        pull = np.zeros(n_groups, np.int64)
        np.add.at(pull, part[mates], weight)
        pull[filled >= size] = -1
        old, new = int(part[neuron]), int(np.argmax(pull))
        tie[mates] += np.where(part[mates] == new, weight, 0)
        tie[mates] -= np.where(part[mates] == old, weight, 0)
        tie[neuron] = pull[new]
        part[neuron] = new
        filled[old] -= 1
        filled[new] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """Both directions of every edge, by neuron: neighbours[starts[i]:starts[i + 1]]."""

    starts: NDArray[np.int64]  # [n_neurons + 1]
    neighbours: NDArray[np.int64]  # [2 * n_edges]
    weights: NDArray[np.int64]  # [2 * n_edges], 1 or more

    @classmethod
    def of(cls, edges: Edges, n_neurons: int) -> _Graph:
        own = np.concatenate([edges.low, edges.high])
        other = np.concatenate([edges.high, edges.low])
        order = np.lexsort((other, own))
        starts = np.zeros(n_neurons + 1, np.int64)
        np.cumsum(np.bincount(own, minlength=n_neurons), out=starts[1:])
        return cls(starts, other[order], np.tile(edges.both, 2)[order])

    def of_neuron(self, neuron: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        mine = slice(self.starts[neuron], self.starts[neuron + 1])
        return self.neighbours[mine], self.weights[mine]


def co_activation_within(groups: Groups, trace: Trace) -> NDArray[np.float64]:
    """C, float64[n_layers]: the chance that a mate of an active neuron is active, too.

    Over every (token, active neuron): the share of its size - 1 group mates that are active for
    that token; the mean of these, P(mate active | active). nan where a layer never fired, and for
    groups of one.
    """
    header = trace.header
    _require_shape(groups, trace)
    result = np.full(header.n_layers, np.nan)
    for layer in range(header.n_layers if groups.size > 1 else 0):
        bits = trace.bits[trace.layer == layer]
        order = groups.members[layer].reshape(-1)
        pairs = active = 0
        for start in range(0, len(bits), _TOKENS_AT_ONCE):
            mask = unpack(bits[start : start + _TOKENS_AT_ONCE], header.n_neurons)
            here = mask[:, order].reshape(len(mask), -1, groups.size)
            n = here.sum(axis=2, dtype=np.int64)  # [n_tokens, n_groups]
            pairs += int((n * (n - 1)).sum())
            active += int(n.sum())
        if active:
            result[layer] = pairs / ((groups.size - 1) * active)
    return result


def hottest(
    groups: Groups, counts: NDArray[np.int64], slots: Sequence[int]
) -> list[NDArray[np.int32]]:
    """Per layer the neurons of as many whole groups as fit in its slots: warm or pinned neurons.

    Groups by the sum of their members' `counts` [n_layers, n_neurons]; ties to the lowest group.
    """
    taken = []
    for layer, room in enumerate(slots):
        members = groups.members[layer]
        order = np.argsort(-counts[layer][members].sum(axis=1), kind="stable")
        taken.append(np.sort(members[order[: room // groups.size]].reshape(-1)))
    return taken


def require_unseen(groups: Groups, trace: Trace) -> None:
    """Refuse groups of another shape, or made from tokens that `trace` would measure them on."""
    _require_shape(groups, trace)
    for a in groups.prior_sequences:
        for b in trace.header.sequences:
            meet = max(a.token_start, b.token_start) < min(a.token_stop, b.token_stop)
            if a.source_sha256 == b.source_sha256 and meet:
                raise KairoxError(
                    "the groups were made from tokens they would be evaluated on (same source "
                    f"text, {a.source}, meeting token ranges); make them from other text"
                )


def write_groups(groups: Groups, path: str | Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = require_place(path, "groups")
    n_layers, n_groups, size = groups.members.shape
    note = {
        "format_version": FORMAT_VERSION,
        "method": groups.method,
        "size": groups.size,
        "seed": groups.seed,
        "prior_sha256": groups.prior_sha256,
        "prior_tokens": groups.prior_tokens,
        "prior_sequences": [dataclasses.asdict(s) for s in groups.prior_sequences],
    }
    table = pa.table(
        {
            "layer": np.repeat(np.arange(n_layers, dtype=np.int32), n_groups * size),
            "group": np.tile(np.repeat(np.arange(n_groups, dtype=np.int32), size), n_layers),
            "neuron": groups.members.reshape(-1),
        }
    ).replace_schema_metadata({NOTE_KEY: json.dumps(note).encode()})
    pq.write_table(table, place)
    return place


def read_groups(path: str | Path) -> Groups:
    """The groups `write_groups` wrote; KairoxError for anything else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = Path(path)
    if not place.is_file():  # Arrow's own error would name no file; of a folder it reads all
        what = "is a folder" if place.is_dir() else "does not exist"
        raise KairoxError(f"the groups file {str(path)!r} {what}; make one with `kairox group`")
    try:
        table = pq.read_table(place)
        note: dict[str, Any] = json.loads((table.schema.metadata or {})[NOTE_KEY])
        if note.pop("format_version") != FORMAT_VERSION:
            raise KairoxError(f"{str(path)!r} is of another version of the groups format")
        sequences = tuple(SequenceInfo(**s) for s in note.pop("prior_sequences"))
        layer, group, neuron = (table.column(c).to_numpy().astype(np.int32) for c in COLUMNS)
        n_layers, n_groups = int(layer.max()) + 1, int(group.max()) + 1
        order = np.lexsort((neuron, group, layer))
        members = neuron[order].reshape(n_layers, n_groups, note["size"])
        whole = np.repeat(np.arange(n_layers * n_groups), note["size"])
        if not np.array_equal(layer[order] * n_groups + group[order], whole):
            raise ValueError("groups of different sizes")
        return Groups(members=members, prior_sequences=sequences, **note)
    except KairoxError:
        raise
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise KairoxError(
            f"{str(path)!r} is not a groups file ({error}); make one with `kairox group`"
        ) from error


def _require_shape(groups: Groups, trace: Trace) -> None:
    theirs = (trace.header.n_layers, trace.header.n_neurons)
    if theirs != (groups.n_layers, groups.n_neurons):
        raise KairoxError(
            f"the groups are of {groups.n_layers} layers of {groups.n_neurons} neurons, and the "
            f"trace has {theirs[0]} of {theirs[1]}"
        )


def _divisors_near(n: int, size: int) -> list[int]:
    """Up to four divisors of n, ascending: the two nearest to `size` on either side."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    divisors = sorted({*small, *(n // d for d in small)})
    return [d for d in divisors if d < size][-2:] + [d for d in divisors if d > size][:2]

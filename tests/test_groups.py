"""Groups: exact counts, exact sizes, and co-activation on tokens that no group was made from."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import from_masks
from toys import random_trace

from kairox_sim import coactivation as counting
from kairox_sim import groups as groups_module
from kairox_sim.cli import main
from kairox_sim.coactivation import Edges, coactivation, fired, neighbours, strongest_edges
from kairox_sim.errors import KairoxError
from kairox_sim.group_report import compare_groups
from kairox_sim.groups import (
    METHODS,
    Groups,
    co_activation_within,
    group_neurons,
    hottest,
    partition,
    read_groups,
    repaired,
    require_unseen,
    write_groups,
)
from kairox_sim.policies import Lfu, Lru, Static
from kairox_sim.trace import Trace, read_trace, write_trace

SAMPLES = Path(__file__).parents[1] / "traces"
SIZES = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def prior() -> Trace:
    return read_trace(SAMPLES / "tiny-reglu-profile.arrow")


@pytest.fixture(scope="module")
def held_out() -> Trace:
    return read_trace(SAMPLES / "tiny-reglu-eval.arrow")


def of_sets(sets: list[list[int]], n_neurons: int) -> Trace:
    masks = np.zeros((len(sets), 1, n_neurons), bool)
    for token, ids in enumerate(sets):
        masks[token, 0, ids] = True
    return from_masks(masks)


def edges_of(pairs: dict[tuple[int, int], int]) -> Edges:
    low, high = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    return Edges(low, high, np.array([pairs[p] for p in sorted(pairs)], np.int64))


# -- counts ---------------------------------------------------------------------------------------


def test_counts_by_hand() -> None:
    trace = of_sets([[0, 1, 2], [0, 1], [2], []], 4)
    assert coactivation(trace, 0).tolist() == [[2, 2, 1, 0], [2, 2, 1, 0], [1, 1, 2, 0], [0] * 4]
    assert fired(trace, 0).tolist() == [2, 2, 2, 0]
    ids, both = neighbours(trace, 0, 2)
    assert both.tolist() == [[2, 1], [2, 1], [1, 1], [0, 0]]
    assert ids[:3].tolist() == [[1, 2], [0, 2], [0, 1]]
    # 0 and 1 name each other, 2 names 0 (ties go to the lowest); nobody names 3.
    edges = strongest_edges(trace, 0, 1)
    named = zip(edges.low.tolist(), edges.high.tolist(), edges.both.tolist(), strict=True)
    assert list(named) == [(0, 1, 2), (0, 2, 1)]


def test_counts_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    masks = rng.random((50, 2, 23)) < rng.random(23)
    trace = from_masks(masks)
    monkeypatch.setattr(counting, "_NEURONS_AT_ONCE", 5)
    monkeypatch.setattr(counting, "_TOKENS_AT_ONCE", 7)
    for layer in range(2):
        ones = masks[:, layer].astype(int)
        both = ones.T @ ones
        assert np.array_equal(coactivation(trace, layer), both)
        assert np.array_equal(fired(trace, layer), ones.sum(axis=0))
        ids, count = neighbours(trace, layer, 6)
        for i in range(23):
            others = sorted((j for j in range(23) if j != i), key=lambda j: (-both[i, j], j))
            assert ids[i].tolist() == others[:6]
            assert count[i].tolist() == [both[i, j] for j in others[:6]]


def test_one_neuron_has_no_neighbours() -> None:
    assert strongest_edges(of_sets([[0]], 1), 0).low.size == 0


# -- exact sizes ----------------------------------------------------------------------------------


def test_repair_by_hand() -> None:
    # Part 0 holds 0 to 3. Ties to it: 0 has 5 + 1, 1 has 5, 2 has 1 + 4, 3 has 4; 3 goes first, to
    # part 2, which it has 2 with, not to part 1 (1). Part 2 is full then.
    pairs = {(0, 1): 5, (0, 2): 1, (2, 3): 4, (3, 4): 1, (3, 5): 2}
    part = np.array([0, 0, 0, 0, 1, 2])
    # Then 2 is the weakest (1, its tie with 3 is gone), and only part 1 has room.
    assert repaired(part, edges_of(pairs), 2).tolist() == [0, 0, 1, 2, 1, 2]
    assert part.tolist() == [0, 0, 0, 0, 1, 2]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data(), size=st.integers(1, 5), n_groups=st.integers(1, 6))
def test_repair_gives_exact_sizes_and_moves_no_more_than_it_must(
    data: st.DataObject, size: int, n_groups: int
) -> None:
    n = size * n_groups
    part = np.array(data.draw(st.lists(st.integers(0, n_groups - 1), min_size=n, max_size=n)))
    ids = st.integers(0, n - 1)
    drawn = data.draw(st.dictionaries(st.tuples(ids, ids), st.integers(1, 9), max_size=30))
    edges = edges_of({(a, b): w for (a, b), w in drawn.items() if a < b} or {(0, n): 1})
    if edges.high.max() >= n:  # nothing real was drawn
        edges = Edges(*(np.zeros(0, np.int64),) * 3)
    fixed = repaired(part, edges, size)
    assert Counter(fixed.tolist()) == dict.fromkeys(range(n_groups), size)
    too_many = np.bincount(part, minlength=n_groups) - size
    assert (fixed != part).sum() == too_many[too_many > 0].sum()
    assert np.array_equal(repaired(part, edges, size), fixed)


@pytest.mark.parametrize("weight_sum_max", [2**30, 2000])
def test_metis_finds_planted_groups(monkeypatch: pytest.MonkeyPatch, weight_sum_max: int) -> None:
    """Neurons i, i + 8, i + 16, i + 24 fire together, with noise; also with weights scaled down."""
    monkeypatch.setattr("kairox_sim.groups._WEIGHT_SUM_MAX", weight_sum_max)
    rng = np.random.default_rng(1)
    masks = np.tile(rng.random((400, 8)) < 0.2, (1, 4)) ^ (rng.random((400, 32)) < 0.02)
    trace = from_masks(masks[:, None])
    part = partition(strongest_edges(trace, 0), 32, 4, seed=0)
    assert part.tolist() == [*range(8)] * 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_every_method_gives_a_partition(method: str, size: int) -> None:
    """With a layer that never fires, too; and the same again for the same seed."""
    masks = np.random.default_rng(2).random((60, 2, 64)) < 0.2
    masks[:, 1] = False
    trace = from_masks(masks)
    groups = group_neurons(trace, 2, 64, size, method, seed=3)
    assert groups.members.shape == (2, 64 // size, size)
    assert (np.diff(groups.members, axis=2) > 0).all()
    for layer in range(2):
        assert sorted(groups.members[layer].ravel().tolist()) == list(range(64))
    assert np.array_equal(group_neurons(trace, 2, 64, size, method, 3).members, groups.members)
    assert (groups.prior_sha256 is None) == (method in ("random", "chunks"))


def test_baselines_by_hand() -> None:
    trace = of_sets([[3, 1], [3, 1], [3, 5]], 6)
    frequency = group_neurons(trace, 1, 6, 2, "frequency").members[0]
    assert frequency.tolist() == [[1, 3], [0, 5], [2, 4]]  # counts 3: 3, 1: 2, 5: 1, then ids
    assert group_neurons(None, 1, 6, 3, "chunks").members[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    drawn = group_neurons(None, 2, 64, 2, "random", 0).members
    assert not np.array_equal(drawn, group_neurons(None, 2, 64, 2, "random", 1).members)
    assert not np.array_equal(drawn[0], drawn[1])


def test_what_cannot_be_grouped() -> None:
    trace = of_sets([[0]], 12)
    with pytest.raises(KairoxError, match=r"12 neurons .* size of 5; .* 3, 4, 6, 12"):
        group_neurons(trace, 1, 12, 5, "chunks")
    with pytest.raises(KairoxError, match="'kmeans'; there are metis, random, frequency, chunks"):
        group_neurons(trace, 1, 12, 4, "kmeans")
    with pytest.raises(KairoxError, match="give one"):
        group_neurons(None, 1, 12, 4, "metis")
    with pytest.raises(KairoxError, match="1 layers of 12 neurons, and the groups are for 2 of 12"):
        group_neurons(trace, 2, 12, 4, "frequency")
    for seed in (-1, 10**30):
        with pytest.raises(KairoxError, match=f"seed of groups is {seed}"):
            group_neurons(trace, 1, 12, 4, "metis", seed)
    with pytest.raises(KairoxError, match="empty"):
        group_neurons(of_sets([], 12), 1, 12, 4, "metis")
    with pytest.raises(KairoxError, match="each of 4 neurons of a layer once"):
        Groups(np.array([[[0, 1], [1, 2]]], np.int32), "metis", 2, 0)


def test_groups_of_the_same_prior_are_learnt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(trace: Trace | None, layer: int, n: int, size: int, seed: int) -> np.ndarray:
        built.append(layer)
        return METHODS["chunks"](trace, layer, n, size, seed)

    monkeypatch.setitem(METHODS, "frequency", build)
    monkeypatch.setattr(groups_module, "_LEARNT", {})
    one, other = of_sets([[0, 1]], 12), of_sets([[2, 3]], 12)
    first = group_neurons(one, 1, 12, 4, "frequency")
    first.members[:] = 0  # whoever has them may do what they like
    again = group_neurons(one, 1, 12, 4, "frequency")
    assert again.members[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert built == [0]
    group_neurons(other, 1, 12, 4, "frequency")
    group_neurons(one, 1, 12, 6, "frequency")
    group_neurons(one, 1, 12, 4, "frequency", seed=1)
    assert built == [0] * 4
    for size in (1, 2, 3, 12) * 3:  # no more of them are kept than that
        for seed in range(5):
            group_neurons(one, 1, 12, size, "frequency", seed)
    assert len(groups_module._LEARNT) == groups_module._LEARNT_MOST


def test_without_pymetis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(KairoxError, match=r'pip install "kairox\[group\]"'):
        group_neurons(of_sets([[0, 1]], 4), 1, 4, 2, "metis")


# -- how good they are ----------------------------------------------------------------------------


def test_co_activation_within_by_hand() -> None:
    groups = group_neurons(None, 1, 6, 3, "chunks")
    # 0 and 1 have one of two mates each, 2 none beside it in its group of 3, 4, 5: (1/2 + 1/2 + 0)
    # of token one; all three mates of token two have both: 3. Mean over 6 active neurons.
    trace = of_sets([[0, 1, 3], [3, 4, 5]], 6)
    assert co_activation_within(groups, trace) == pytest.approx([(0.5 + 0.5 + 0 + 3) / 6])
    assert np.isnan(co_activation_within(groups, of_sets([[]], 6))).all()
    assert np.isnan(co_activation_within(group_neurons(None, 1, 6, 1, "chunks"), trace)).all()


@pytest.mark.parametrize("size", SIZES)
def test_metis_on_held_out_tokens(prior: Trace, held_out: Trace, size: int) -> None:
    """More co-activation within groups than random, frequency-sorted or neighbouring ones."""
    within = {}
    for method in METHODS:
        groups = group_neurons(prior, 6, 896, size, method)
        require_unseen(groups, held_out)
        within[method] = co_activation_within(groups, held_out)
    assert (within["metis"] > 1.4 * within["random"]).all()
    assert (within["metis"] > within["frequency"]).all()
    # Random groups are chance: a mate is active as often as another active neuron at random.
    on = np.array([held_out.bits[held_out.layer == i] for i in range(6)])
    n = np.bitwise_count(on).sum(axis=2, dtype=np.int64)  # [n_layers, n_tokens] active
    by_chance = (n * (n - 1)).sum(axis=1) / (895 * n.sum(axis=1))
    assert within["random"] == pytest.approx(by_chance, rel=0.1)


def test_more_co_activation_is_not_more_hits(prior: Trace, held_out: Trace) -> None:
    """At equal bytes METIS has more hits than random groups, and fewer than frequency-sorted ones
    where groups are large: those put the hot neurons into few groups, and co-activation does not.
    """
    policies = {"lfu": Lfu, "lru": Lru, "static": Static}
    methods = ("metis", "random", "frequency")
    measured = held_out.select(seqs=[0])
    rows = compare_groups(prior, measured, 224, policies, sizes=(4, 16), methods=methods)
    assert len(rows) == 2 * 3 * 3
    hit = {(r["policy"], r["size"], r["method"]): r["hit_resident"] for r in rows}
    for policy in policies:
        for size in (4, 16):
            assert hit[policy, size, "metis"] > hit[policy, size, "random"]
        assert hit[policy, 16, "metis"] < hit[policy, 16, "frequency"]
    assert hit["lfu", 4, "metis"] > hit["lfu", 4, "frequency"]
    with pytest.raises(KairoxError, match=r"225 slots are no multiple of group sizes \[16\]"):
        compare_groups(prior, held_out, 225, {"lfu": Lfu}, sizes=(16,))


def test_hottest_groups_whole() -> None:
    groups = group_neurons(None, 2, 6, 2, "chunks")
    counts = np.array([[0, 0, 1, 4, 5, 0], [1, 1, 1, 1, 1, 1]])
    taken = hottest(groups, counts, [3, 4])
    assert [t.tolist() for t in taken] == [[2, 3], [0, 1, 2, 3]]  # equal sums: the lowest group
    assert hottest(groups, counts, [1, 99])[0].size == 0


# -- the file -------------------------------------------------------------------------------------


def test_file_round_trip(tmp_path: Path, prior: Trace, held_out: Trace) -> None:
    groups = group_neurons(prior, 6, 896, 16, "metis", seed=2)
    path = write_groups(groups, tmp_path / "groups.parquet")
    again = read_groups(path)
    assert np.array_equal(again.members, groups.members)
    for name in ("method", "size", "seed", "prior_sha256", "prior_tokens", "prior_sequences"):
        assert getattr(again, name) == getattr(groups, name)
    assert (again.prior_sha256, again.prior_tokens) == (prior.sha256, 1280)
    frame = pd.read_parquet(path)
    assert list(frame.columns) == ["layer", "group", "neuron"]
    assert len(frame) == 6 * 896
    assert frame.groupby(["layer", "group"]).size().unique().tolist() == [16]
    require_unseen(again, held_out)
    with pytest.raises(KairoxError, match="made from tokens they would be evaluated on"):
        require_unseen(again, prior)
    with pytest.raises(KairoxError, match="groups are of 6 layers of 896 neurons"):
        require_unseen(again, of_sets([[0]], 896))


def test_what_is_no_groups_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain.parquet"
    pd.DataFrame({"layer": [0], "group": [0], "neuron": [0]}).to_parquet(plain)
    other = tmp_path / "other.parquet"
    other.write_bytes(b"not parquet")
    for path in (plain, other):
        with pytest.raises(KairoxError, match="not a groups file"):
            read_groups(path)
    with pytest.raises(KairoxError, match="does not exist"):
        read_groups(tmp_path / "none.parquet")
    with pytest.raises(KairoxError, match="is a folder"):
        read_groups(tmp_path)
    made = write_groups(group_neurons(None, 1, 4, 2, "chunks"), tmp_path / "made.parquet")
    import pyarrow.parquet as pq

    table = pq.read_table(made)
    pq.write_table(table.slice(0, 3), made)
    with pytest.raises(KairoxError, match="not a groups file"):
        read_groups(made)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(of_sets([[0, 3], [1, 2], [0, 3], [1, 2]], 4), tmp_path / "prior.arrow")
    out = tmp_path / "groups.parquet"
    command = ["group", str(trace), "-o", str(out), "--size", "2"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["co_activation_within"] == [1.0]
    assert said["prior_sha256"] == read_trace(trace).sha256
    assert read_groups(out).members[0].tolist() == [[0, 3], [1, 2]]
    with pytest.raises(SystemExit):
        main(command)
    table = capsys.readouterr().out
    assert "metis" in table
    assert "on the prior itself" in " ".join(table.split())
    assert f"next: kairox simulate TRACE --set groups={out}" in table.replace("\n", "")
    for wrong, said_so in ((["--size", "3"], "2, 4"), (["--method", "x"], "chunks")):
        with pytest.raises(SystemExit) as ended:
            main([*command, *wrong])
        assert ended.value.code == 2
        assert said_so in capsys.readouterr().err


def test_the_command_checks_groups_on_other_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prior = random_trace(n_decode=12)
    held_out = random_trace(seed=1, source="b")
    paths = [write_trace(t, tmp_path / f"{i}.arrow") for i, t in enumerate((prior, held_out))]
    command = ["group", str(paths[0]), "-o", str(tmp_path / "g.parquet"), "--size", "2",
               "--method", "frequency", "--json", "--check"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*command, str(paths[1])])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    assert said["co_activation_on"] == str(paths[1])
    made = group_neurons(prior, 2, 64, 2, "frequency")
    assert said["co_activation_within"] == co_activation_within(made, held_out).tolist()
    assert said["co_activation_within"] != co_activation_within(made, prior).tolist()
    with pytest.raises(SystemExit) as ended:
        main([*command, str(paths[0])])
    assert ended.value.code == 2
    assert "made from tokens they would be evaluated on" in capsys.readouterr().err

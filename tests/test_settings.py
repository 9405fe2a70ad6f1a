"""Settings as a file and as objects: what is refused, what a budget is, what starts resident."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from toys import of_chunks, random_trace

from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.settings import (
    Settings,
    build_cache,
    group_size,
    label,
    load_prior,
    predictor_of,
    require_usable,
    shape_of,
    share_by_density,
    slots_per_layer,
)
from kairox_sim.trace import write_trace
from kairox_sim.units import parse_bytes

TINY = find_shape("tiny-reglu")


def test_file_round_trip(tmp_path: Path) -> None:
    settings = Settings(
        policy="tam",
        policy_params={"beta": 0.8},
        controller="anb",
        slots=(1, 2, 3),
        trigger="attn_in",
        prior="prior.kxtrace",
        prediction="0.9,0.8",
    )
    assert Settings.load(settings.dump(tmp_path / "s.toml")) == settings
    assert Settings.load(str(Settings().dump(tmp_path / "t.toml"))) == Settings()


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('polcy = "tam"\n', encoding="utf-8")
    with pytest.raises(KairoxError, match=r"unknown key 'polcy'; did you mean 'policy'\?"):
        Settings.load(file)
    with pytest.raises(KairoxError, match=r"unknown key 'bta'; did you mean 'beta'\?"):
        Settings().with_overrides({"bta": 0.8})
    with pytest.raises(KairoxError, match=r"did you mean 'swap_neurons'\?"):
        Settings().with_overrides({"swap_neuron": 3})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policy": "lur"}, "unknown policy 'lur'; did you mean 'lru'"),
        ({"controller": "abn"}, "unknown controller 'abn'; did you mean 'anb'"),
        ({"policy_params": {"btea": 0.8}}, "tam has no parameter 'btea'; did you mean 'beta'"),
        ({"policy_params": {"beta": 1.5}}, r"beta must be in \[0, 1\)"),
        ({"policy_params": {"beta": "high"}}, "tam's beta must be a number, got 'high'"),
        ({"slots": -1}, "got -1; allowed"),
        ({"slots": "many"}, "got 'many'; allowed"),
        ({"slots": []}, "allowed: a number of slots"),
        ({"slots": True}, "got True"),
        ({"prediction": "good"}, "allowed: trace, perfect"),
        ({"prediction": "0.9"}, "allowed: trace, perfect"),
        ({"prediction": "1.2,0.9"}, r"recall must be in \[0, 1\]"),
        ({"gating": "guess"}, "'oracle', 'exact', 'screened', 'predicted' or 'dense'"),
        ({"numerics": "exact"}, "'fast' or 'deterministic'"),
        ({"vram": "lots"}, "allowed: a size such as 12GiB"),
        ({"weights": "q5_0"}, "'q8_0' or 'q4_0'"),
        ({"layer0": "embedding"}, "'last'"),
        ({"swap_neurons": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(KairoxError, match=said):
        Settings.of(values)
    with pytest.raises(ValidationError):
        Settings(**values)  # type: ignore[arg-type]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(KairoxError, match="cannot read the settings file"):
        Settings.load(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("policy = \n", encoding="utf-8")
    with pytest.raises(KairoxError, match="not valid TOML"):
        Settings.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        (5, [5, 5]),
        ("5", [5, 5]),
        ("3, 4", [3, 4]),
        ("9,", None),
        (100, [64, 64]),
        (None, [16, 16]),
        # 2 layers stand in for 6 of 896: a slot is 14 bundles of 2 rows of 192 float32 in 6 layers
        (f"{5 * 14 * 2 * 192 * 4 * 6}B", [5, 5]),
        (f"{5 * 14 * 2 * 192 * 4 * 6 - 1}B", [4, 4]),
        ("1GB", [64, 64]),
        ("1kB", [0, 0]),
    ],
)
def test_budgets(given: object, slots: list[int] | None) -> None:
    settings = Settings(slots=given, model_as="tiny-reglu")  # type: ignore[arg-type]
    if slots is None:
        with pytest.raises(KairoxError, match="1 numbers and the trace or model 2 layers"):
            slots_per_layer(settings, 2, 64)
    else:
        assert slots_per_layer(settings, 2, 64) == slots


def test_a_size_needs_a_model() -> None:
    settings = Settings(slots="1GB")
    with pytest.raises(KairoxError, match="name it with --as"):
        slots_per_layer(settings, 2, 64)
    assert slots_per_layer(settings, 6, 896, shape=TINY) == [896] * 6


def test_gb_is_not_gib() -> None:
    assert parse_bytes("12GiB") == 12 * 2**30
    assert parse_bytes("12GB") == 12 * 10**9
    assert parse_bytes(" 1.5 MiB ") == 3 * 2**19
    for text in ("12", "12 gb", "GB", "12Gb", "-1GB"):
        with pytest.raises(KairoxError, match="is not a size"):
            parse_bytes(text)


def test_overrides() -> None:
    one = Settings(policy_params={"beta": 0.5, "theta_promote": 0.3}, slots=7)
    assert one.with_overrides({"beta": 0.8}).policy_params == {"beta": 0.8, "theta_promote": 0.3}
    assert one.with_overrides({"tam.beta": 0.8}) == one.with_overrides({"beta": 0.8})
    assert one.with_overrides({"policy_params.beta": 0.8}) == one.with_overrides({"beta": 0.8})
    assert one.with_overrides({"policy": "lru"}).policy_params == {}  # tam's are not lru's
    assert one.with_overrides({"policy": "tam"}) == one
    anb = one.with_overrides({"controller": "anb", "eta_up": 0.2})
    assert (anb.controller_params, anb.slots) == ({"eta_up": 0.2}, 7)
    assert one.policy_params == {"beta": 0.5, "theta_promote": 0.3}  # the first one is as it was
    with pytest.raises(KairoxError, match=r"unknown key 'lru\.beta'"):
        one.with_overrides({"lru.beta": 0.8})


def test_what_is_of_the_run_stays_when_a_system_is_chosen() -> None:
    run = {"numerics": "deterministic", "weights": "q8_0", "dtype": "bfloat16", "vram": "9GiB",
           "predictor_file": "p.safetensors", "thresholds": "t.json"}  # fmt: skip
    moved = Settings(slots=7, **run).with_overrides({"system": "powerinfer"})  # type: ignore[arg-type]
    assert moved.model_dump().items() >= run.items()
    assert moved.slots != 7


def test_labels() -> None:
    kept = Settings(numerics="deterministic", weights="q8_0", dtype="bfloat16", vram="9GiB")
    assert label(kept) == "tam deterministic weights=q8_0 dtype=bfloat16 vram=9GiB"
    assert label(kept.with_overrides({"slots": 5})).endswith("vram=9GiB 5")
    assert label(Settings(thresholds="a/half.json", slots=5)) == "tam half 5"
    system = Settings.of({"system": "powerinfer", "vram": "9GiB"})
    assert label(system) == "powerinfer vram=9GiB"
    assert label(Settings(controller="anb", slots=128)) == "tam+anb 128"
    assert label(Settings(policy_params={"beta": 0.8})) == "tam(beta=0.8) n/4"
    assert label(Settings(trigger="attn_in", late="stall", slots=(1, 2))) == (
        "tam attn_in stall 1.5 mean"
    )
    assert label(Settings(policy="all", slots=3)) == "all"


def test_predictor_is_charged_only_where_something_is_predicted() -> None:
    assert predictor_of(Settings()) == "lookahead"
    assert predictor_of(Settings(policy="lru")) == "none"
    assert predictor_of(Settings(policy="static", trigger="attn_out")) == "none"
    assert predictor_of(Settings(policy="static", gating="predicted")) == "rank"
    assert predictor_of(Settings(predictor="rank")) == "rank"
    assert predictor_of(Settings(predictor_file="p.safetensors")) == "rank"
    assert predictor_of(Settings(policy="lru", predictor_file="p.safetensors")) == "none"
    with pytest.raises(KairoxError, match="is of predictor 'rank', got predictor 'lookahead'"):
        Settings.of({"predictor_file": "p", "predictor": "lookahead"})


def test_swaps_are_as_many_bytes_as_on_the_target() -> None:
    for target, n_neurons in (("prosparse-7b", 896), ("opt-6.7b", 64), ("tiny-reglu", 896)):
        settings = Settings(model_as=target)
        costs = costs_for(
            load_profile("pc1"), find_shape(target), "exact", trace_layers=6,
            trace_neurons=n_neurons, predictor="lookahead",
        )  # fmt: skip
        assert build_cache(settings, 6, n_neurons).swap_neurons == costs.swap_neurons


def test_static_holds_the_priors_most_frequent() -> None:
    # fired: layer 0: 3 x 4, 2 x 1 and 2 x 2; layer 1: only 5
    prior = of_chunks([[[[4, 1, 2]], [[5]]], [[[4, 1, 2]], [[5]]], [[[4]], [[5]]]], 6, n_layers=2)
    cache = build_cache(Settings(policy="static", slots=(2, 1)), 2, 6, prior=prior)
    assert np.flatnonzero(cache.state[0]).tolist() == [1, 4]  # of the tie 1, 2 the lower one
    assert np.flatnonzero(cache.state[1]).tolist() == [5]
    warm = build_cache(Settings(policy="lru", slots=(2, 1), start="warm"), 2, 6, prior=prior)
    assert (warm.state == cache.state).all()
    assert not build_cache(Settings(policy="lru", slots=2), 2, 6, prior=prior).state.any()


def test_bounds_hold_everything_or_nothing() -> None:
    assert build_cache(Settings(policy="all", slots=1), 2, 6).is_whole(1)
    assert build_cache(Settings(policy="none", slots=5), 2, 6).capacity == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(policy="static", slots=2),
        Settings(policy="lru", slots=2, start="warm"),
        Settings(slots="density"),
    ],
)
def test_what_learns_needs_a_prior(settings: Settings) -> None:
    with pytest.raises(KairoxError, match="--prior"):
        build_cache(settings, 2, 6)


def test_controller_and_policy_with_nothing_in_common() -> None:
    settings = Settings(policy="lru", controller="anb", slots=2)
    with pytest.raises(KairoxError, match=r"Anb sets .* Lru reads .* nothing in common"):
        build_cache(settings, 2, 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_built_from_its_name_alone(policy: str) -> None:
    cache = build_cache(
        Settings(policy=policy, slots=3), 2, 64,
        prior=random_trace(), profile=load_profile("pc1"), evaluated=random_trace(source="b"),
    )  # fmt: skip
    cache.check()


def test_groups_of_a_method_are_of_the_models_neurons() -> None:
    """prosparse-7b has 172 neurons to one of these 64: a group of 16 is less than one of them."""
    assert group_size(Settings(groups="chunks:16"), 64) == 16  # of its own model
    as_7b = Settings(groups="chunks:16", model_as="prosparse-7b")
    assert group_size(as_7b, 64) == 1
    assert group_size(as_7b, 11008) == 16
    many = as_7b.with_overrides({"groups": "chunks:1204"})  # 7 of them, and 4 is the next divisor
    assert group_size(many, 64) == 4
    cache = build_cache(many, 2, 64)
    assert cache.swap_neurons == 4
    assert group_size(Settings(), 64) == 1


def test_density_budgets_by_hand() -> None:
    # Layer 0 fires 6 times, layer 1 twice: of 2 x 2 slots, 3 and 1.
    prior = of_chunks([[[[0, 1, 2]], [[0]]], [[[0, 1, 2]], [[1]]]], 4, n_layers=2)
    assert share_by_density(2, prior) == [3, 1]
    assert share_by_density(3, prior) == [4, 2]  # 4.5 is more than there are; the rest goes on
    assert slots_per_layer(Settings(slots="density:2"), 2, 4, prior=prior) == [3, 1]
    assert slots_per_layer(Settings(slots="density"), 2, 4, prior=prior) == [2, 0]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 3))
def test_density_budgets_keep_their_sum(mean: int, n_layers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sets = [[[np.flatnonzero(rng.random(32) < rng.random()).tolist()] for _ in range(n_layers)]]
    slots = share_by_density(mean, of_chunks(sets, 32, n_layers=n_layers))
    assert sum(slots) == min(mean, 32) * n_layers
    assert 0 <= min(slots) <= max(slots) <= 32


def test_prior_is_the_one_the_settings_were_made_with(tmp_path: Path) -> None:
    path = write_trace(random_trace(source="b"), tmp_path / "prior.kxtrace")
    named = Settings(prior=str(path))
    found = load_prior(named)
    assert found is not None
    assert load_prior(Settings()) is None
    assert load_prior(Settings(prior=path, prior_sha256=found.sha256)) is not None
    with pytest.raises(KairoxError, match="remove prior_sha256"):
        load_prior(Settings(prior=str(path), prior_sha256="f" * 64))


def test_prior_must_be_of_the_model_and_of_other_tokens() -> None:
    evaluated = random_trace(source="a")
    require_usable(random_trace(source="b"), evaluated)
    with pytest.raises(KairoxError, match="overlaps the tokens"):
        require_usable(random_trace(source="a", seed=5), evaluated)
    with pytest.raises(KairoxError, match="both must be of the same model"):
        require_usable(random_trace(source="b", model_sha256="2" * 64), evaluated)
    with pytest.raises(KairoxError, match="n_layers 3"):
        require_usable(random_trace(n_layers=3, source="b"), evaluated)


def test_shape_by_path_of_its_config() -> None:
    folder = Path(__file__).parent.parent / "experiments" / "models" / "tiny-reglu"
    assert shape_of(str(folder)).n_neurons == shape_of("tiny-reglu").n_neurons
    with pytest.raises(KairoxError, match="unknown model"):
        shape_of("tiny")
    with pytest.raises(KairoxError, match="cannot read the model's"):
        shape_of("nowhere/config.json")

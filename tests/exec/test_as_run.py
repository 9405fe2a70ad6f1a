"""For which runs a calibration holds: what has to match is named, what may differ is free."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kairox_exec.as_run import AsRun, all_as, kind_of, require_calibrated_as
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings

TRAINED = Path(__file__).parents[2] / "experiments" / "models" / "tiny-reglu-predictor.safetensors"
AHEAD: dict[str, Any] = {"policy": "lru", "slots": 100, "trigger": "attn_out"}
ON = "measured on this machine's cpu"
HERE = {"cpu": {"name": "a processor"}, "gpus": [{"name": "a card"}]}


def conditions(model_dir: Path, settings: Settings) -> dict[str, Any]:
    return {"time": ON, "as_run": asdict(AsRun.of(model_dir, settings)), "machine": HERE}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"weights": "int8"}, ("model tiny-reglu and weights float32",
                               "model tiny-reglu@ffn-int8 and weights int8")),
        ({"dtype": "bfloat16"}, ("weights float32 and dtype float32",
                                 "weights bfloat16 and dtype bfloat16")),
        ({"numerics": "deterministic"}, ("numerics fast", "numerics deterministic")),
        ({"gating": "screened"}, ("gating exact", "gating screened")),
        ({"predictor_file": str(TRAINED)}, ("predictor lookahead", "predictor rank 96")),
        ({"model_as": "prosparse-7b"}, ("model tiny-reglu", "model prosparse-7b")),
    ],
)  # fmt: skip
def test_what_changes_an_operation_has_to_match(
    tiny_reglu_dir: Path, other: dict[str, Any], said: tuple[str, str]
) -> None:
    made, runs = Settings(**AHEAD), Settings(**(AHEAD | other))
    for one, theirs, (of, against) in ((made, runs, said), (runs, made, said[::-1])):
        calibrated, wanted = conditions(tiny_reglu_dir, one), AsRun.of(tiny_reglu_dir, theirs)
        why = f"was calibrated with {of} and these runs are with {against}, .*--hardware"
        with pytest.raises(KairoxError, match=why):
            require_calibrated_as(calibrated, wanted, ON, HERE)
    with pytest.raises(KairoxError, match="a calibration holds for one of them"):
        all_as(tiny_reglu_dir, [made, runs])


@pytest.mark.parametrize(
    "other",
    [
        {"policy": "tam"},
        {"slots": 300},
        {"vram": "12MB"},
        {"trigger": "attn_in", "late": "stall"},
        {"swap_neurons": 3},
        {"controller": "anb"},
        {"weights": None, "dtype": "float32"},
    ],
)
def test_what_only_moves_neurons_is_free(tiny_reglu_dir: Path, other: dict[str, Any]) -> None:
    made, runs = Settings(**AHEAD), Settings(**(AHEAD | other))
    require_calibrated_as(
        conditions(tiny_reglu_dir, made), AsRun.of(tiny_reglu_dir, runs), ON, HERE
    )
    assert all_as(tiny_reglu_dir, [made, runs]) == AsRun.of(tiny_reglu_dir, made)


def test_a_setting_that_predicts_nothing_goes_with_any_predictor(tiny_reglu_dir: Path) -> None:
    never, trained = Settings(policy="none"), Settings(**AHEAD, predictor_file=str(TRAINED))
    assert AsRun.of(tiny_reglu_dir, never).predictor == "none"
    require_calibrated_as(
        conditions(tiny_reglu_dir, trained), AsRun.of(tiny_reglu_dir, never), ON, HERE
    )
    for some in ([never, trained], [trained, never]):
        assert all_as(tiny_reglu_dir, some).predictor == "rank 96"
        assert kind_of(some).predictor_file == str(TRAINED)
    with pytest.raises(KairoxError, match="predictor rank 96"):
        all_as(tiny_reglu_dir, [never, trained, Settings(**AHEAD)])


def test_a_stand_in_charges_its_own_predictor(tiny_reglu_dir: Path) -> None:
    setting = Settings(**AHEAD, predictor_file=str(TRAINED), model_as="prosparse-7b")
    assert AsRun.of(tiny_reglu_dir, setting).predictor == "rank 1024"


def test_another_machine_is_refused(tiny_reglu_dir: Path) -> None:
    made, runs = Settings(**AHEAD), AsRun.of(tiny_reglu_dir, Settings(**AHEAD))
    said = conditions(tiny_reglu_dir, made)
    with pytest.raises(
        KairoxError, match=r"times are measured .* and those of these runs emulated"
    ):
        require_calibrated_as(said, runs, "emulated", HERE)
    require_calibrated_as(said, runs, ON, HERE)
    for other in ({"gpus": None}, {"gpus": [{"name": None}]}, {"cpu": {"name": "another"}}):
        with pytest.raises(KairoxError, match="calibrated on a processor, a card and this is"):
            require_calibrated_as(said, runs, ON, HERE | other)


@pytest.mark.parametrize("as_run", [None, {}, {"gating": "exact"}, 5])
def test_a_calibration_that_does_not_say_is_refused(tiny_reglu_dir: Path, as_run: Any) -> None:
    wanted = AsRun.of(tiny_reglu_dir, Settings(**AHEAD))
    good = conditions(tiny_reglu_dir, Settings(**AHEAD))
    for said in (good | {"as_run": as_run}, good | {"machine": as_run}, {"time": ON}):
        with pytest.raises(KairoxError, match="does not say on what and with which weights"):
            require_calibrated_as(said, wanted, ON, HERE)


def test_a_kind_is_how_they_run_and_nothing_of_what_they_move() -> None:
    best = Settings(
        policy="tam", policy_params={"beta": 0.5}, slots="vram", vram="2GiB", weights="q8_0",
        dtype="bfloat16", gating="screened", numerics="deterministic", predictor="none",
        start="first", controller="anb", trigger="after",
    )  # fmt: skip
    assert kind_of([best]) == Settings(
        vram="2GiB", weights="q8_0", dtype="bfloat16", gating="screened", numerics="deterministic"
    )

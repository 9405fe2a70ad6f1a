"""What of a system runs live: groups, queues and controllers per layer; the rest is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kairox_exec import live
from kairox_exec.gates import g1, g2
from kairox_exec.recording import record
from kairox_sim.calllog import read_call_log
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.events import Planned, StepEnded
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.prediction import Recorded
from kairox_sim.settings import Settings, build_cache, group_size, label, predictor_of, trigger_of
from kairox_sim.simulation import of_groups
from kairox_sim.systems import SYSTEMS
from kairox_sim.trace import read_trace

GROUPED = Settings(
    policy="tam_paper", controller="anb_paper", groups="chunks:16", slots=320, start="first",
    # At the paper's 0.5 half of a group must fire for long, which sets of one token seldom do.
    controller_params={"initial": 0.93, "lowest": 0.9},
)  # fmt: skip
QUEUES = Settings(policy="s3fifo", slots=100)
RELEASED = Settings(policy="tam_released", controller="swap_cap", groups="chunks:8", slots=160)


@pytest.mark.parametrize("settings", [GROUPED, QUEUES, RELEASED], ids=label)
def test_g1_and_g2_hold(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, settings: Settings
) -> None:
    """What was decided live is decided again from the call log, and from the trace it left."""
    path = record(
        tiny_reglu_dir, prompts_dir / "prose.txt", tmp_path / "t.arrow", tokens=40, prefill=16,
        settings=settings, call_log=tmp_path / "c.arrow",
    )  # fmt: skip
    _, events = read_call_log(tmp_path / "c.arrow")
    trace = read_trace(path, strict=True)
    again = g1(events, build_cache(settings, 6, 896))
    assert again.differences == []
    assert min(again.loads, again.evictions, again.hits, again.residuals) > 50
    size = group_size(settings, 896)
    plans = [event for event in events if isinstance(event, Planned)]
    if settings.groups is not None:  # neighbours, whole
        loads = np.concatenate([swap.promote for plan in plans for swap in plan.swaps])
        assert {swap.promote.size for plan in plans for swap in plan.swaps} == {size}
        assert (np.diff(loads.reshape(-1, size), axis=1) == 1).all()
        assert (loads.reshape(-1, size)[:, 0] % size == 0).all()
    costs = of_groups(
        costs_for(
            load_profile("pc1"), find_shape("tiny-reglu"), "exact", trace_layers=6,
            trace_neurons=896, predictor=predictor_of(settings),
        ),
        size if settings.groups else 16,
    )  # fmt: skip
    replayed = g2(
        trace, events, [e.record for e in events if isinstance(e, StepEnded)],
        build_cache(settings, 6, 896), costs, trigger=trigger_of(settings),
        late=settings.late or POLICIES[settings.policy].default_late,
        predictions=None if trace.predicted_bits is None else Recorded(),
    )  # fmt: skip
    assert replayed.differences == ()
    assert replayed.holds


def test_a_paced_device_moves_groups_too(tiny_reglu_dir: Path) -> None:
    """Its costs have swaps of a group: the runner refuses others."""
    # 197 neurons of the model are 16 of this one's.
    settings = GROUPED.with_overrides({"model_as": "prosparse-7b", "groups": "chunks:197"})
    with live.device_for(settings, tiny_reglu_dir, "emulated", emulate="emu-pc1") as device:
        assert device.costs is not None
        assert device.costs.swap_neurons == 16
        assert device.costs.decide_neurons == 896 // 16  # a plan goes over groups
        with live.start(tiny_reglu_dir, settings, device) as runner:
            for _ in runner.run([np.arange(9, dtype=np.int32)], prefill=4):
                pass
            assert runner.cache.swap_neurons == 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dispatch": "gpu"}, "dispatch 'gpu' (allowed: concurrent)"),
        ({"dispatch": "serial"}, "dispatch 'serial'"),
        ({"placement": "layers"}, "placement 'layers' (allowed: counts)"),
        ({"placement": "solver"}, "placement 'solver'"),
        ({"policy": "qinfer", "late": "cpu"}, "one that needs no machine's rates"),
        ({"policy": "lru", "late": "cancel"}, "late 'cancel' (allowed: cpu, stall)"),
        ({"layout": "linked"}, "layout 'linked' (allowed: natural)"),
        ({"handovers": 2}, "handovers 2 (allowed: 1)"),
        ({"copies": "row"}, "copies 'row' (allowed: None)"),
        ({"copies_per_sync": 4}, "copies_per_sync 4 (allowed: None)"),
        ({"lookahead_from": 5}, "lookahead_from 5 (allowed: 1)"),
        ({"context_start": 100}, "context_start 100 (allowed: 0)"),
        ({"gating": "dense"}, "gating 'dense' (allowed: exact, oracle, screened, predicted)"),
        ({"predictor": "rank"}, "predictor 'rank' (allowed: lookahead, or rank with a"),
        ({"policy": "belady"}, "policy 'belady' (allowed: one that does not know the future)"),
        ({"slots": "ngl:2"}, "slots 'ngl:2'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_only_the_simulator_knows_is_refused(
    tiny_reglu_dir: Path, given: dict[str, object], said: str
) -> None:
    settings = Settings().with_overrides(given)
    with (
        live.device_for(Settings(), tiny_reglu_dir, "cpu") as device,
        pytest.raises(KairoxError) as refused,
    ):
        live.start(tiny_reglu_dir, settings, device)
    assert said in str(refused.value)
    assert "cannot be run live yet, only simulated" in str(refused.value)
    assert str(refused.value).count("allowed") == 1  # nothing else is wrong with it


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_preset_is_refused_with_everything_that_stands_in_its_way(
    tiny_reglu_dir: Path, name: str
) -> None:
    settings = Settings.of({"system": name})
    with (
        live.device_for(Settings(), tiny_reglu_dir, "cpu") as device,
        pytest.raises(KairoxError) as refused,
    ):
        live.start(tiny_reglu_dir, settings, device)
    said = str(refused.value)
    for key in ("dispatch", "layout", "copies", "handovers", "lookahead_from"):
        default = Settings.model_fields[key].default
        expected = getattr(settings, key) != default
        assert (f"{key} {getattr(settings, key)!r} (" in said) == expected, key
    assert ("gating 'dense' (" in said) == (settings.gating == "dense")
    assert ("slots 'ngl" in said) == str(settings.slots).startswith("ngl")
    assert ("predictor 'rank' (" in said) == (predictor_of(settings) == "rank")


def test_what_fits_needs_a_machine_or_a_size(tiny_reglu_dir: Path) -> None:
    """The unpaced device is no machine whose memory could be planned for."""
    with live.device_for(Settings(), tiny_reglu_dir, "cpu") as device:
        with pytest.raises(KairoxError, match="slots 'vram' is what fits"):
            live.start(tiny_reglu_dir, Settings(slots="vram"), device)
        given = Settings(vram="8MiB", policy="lru")
        with live.device_for(given, tiny_reglu_dir, "cpu") as sized:
            runner = live.start(tiny_reglu_dir, given, sized, context_len=64)
            assert 0 < runner.cache.capacity[0] < 896

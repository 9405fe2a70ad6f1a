"""G1 and G2 on live runs: what was decided live is decided again, bit for bit, by the simulator."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_exec.gates import free_running, g1, g2
from kairox_exec.recording import record
from kairox_sim.cache import NeuronCache
from kairox_sim.calllog import read_call_log
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.engine import run_trace
from kairox_sim.errors import KairoxError
from kairox_sim.events import Committed, Event, Planned, StepEnded
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.prediction import Recorded
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, build_cache, label, predictor_of, trigger_of
from kairox_sim.trace import Trace, read_trace

LOW = {"theta_promote": 0.12, "theta_evict": 0.05}
SETTINGS = [
    Settings(policy="tam", slots=200, policy_params=LOW),
    Settings(policy="tam", controller="anb", slots=120, policy_params=LOW),
    Settings(policy="tam", slots=200, policy_params=LOW, trigger="attn_in", start="warm"),
    Settings(policy="tam", controller="anb_prose", slots=150, policy_params=LOW),
    Settings(policy="tam_paper", controller="anb_paper", slots=120),
    Settings(policy="tam_released", controller="swap_cap", slots=200, late="cpu"),
    Settings(policy="topk", slots=90, policy_params={"ties": "resident"}),
    Settings(policy="lru", slots=90),
    Settings(policy="lru", slots=200, trigger="attn_out", late="stall"),
    Settings(policy="lfu", slots=150, trigger="serial", late="stall"),
    Settings(policy="lfu", slots=[300, 50, 60, 70, 80, 90], trigger="instant"),
    Settings(policy="tam", slots=200, policy_params=LOW, gating="screened"),
    Settings(policy="lru", slots=150, gating="screened"),
    Settings(policy="tam", slots=200, policy_params=LOW, gating="predicted", predictor="lookahead"),
    Settings(policy="lru", slots=150, gating="predicted", predictor="lookahead"),
    Settings(policy="lfu", slots=150, trigger="serial", gating="predicted", predictor="lookahead"),
    Settings(policy="tam", slots=200, policy_params=LOW, numerics="deterministic"),
]


@dataclass
class Live:
    settings: Settings
    trace: Trace
    events: list[Event]
    prior: Trace

    @property
    def records(self) -> list[StepRecord]:
        return [event.record for event in self.events if isinstance(event, StepEnded)]

    def fresh(self) -> NeuronCache:
        return build_cache(self.settings, 6, 896, prior=self.prior)

    def costs(self) -> CostModel:
        predictor = predictor_of(self.settings)
        return costs_for(load_profile("pc1"), find_shape("tiny-reglu"), self.settings.gating,
                         trace_layers=6, trace_neurons=896, predictor=predictor)  # fmt: skip

    def how(self) -> dict[str, Any]:
        trigger = trigger_of(self.settings)
        late = self.settings.late or POLICIES[self.settings.policy].default_late
        predicted = self.trace.predicted_bits is not None
        return {
            "trigger": trigger,
            "late": late,
            "predictions": Recorded() if predicted else None,
        }


@pytest.fixture(scope="module", params=SETTINGS, ids=label)
def live(
    request: pytest.FixtureRequest,
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Live:
    folder = tmp_path_factory.mktemp("gates")
    prior = read_trace(
        record(tiny_reglu_dir, prompts_dir / "json.txt", folder / "p.arrow", tokens=48)
    )
    path = record(
        tiny_reglu_dir,
        [prompts_dir / "prose.txt", prompts_dir / "code.txt"],
        folder / "t.arrow",
        tokens=48,
        prefill=24,
        settings=request.param,
        prior=prior,
        call_log=folder / "c.arrow",
    )
    _, events = read_call_log(folder / "c.arrow")
    return Live(request.param, read_trace(path, strict=True), events, prior)


def test_g1_the_call_log_replays_bit_for_bit(live: Live) -> None:
    again = g1(live.events, live.fresh())
    assert again.differences == []
    assert again.swaps > 10
    assert again.evictions > 0
    assert again.hits > 100
    assert again.residuals > 100
    assert again.steps == len(live.records) == live.trace.n_steps


def test_g1_finds_a_planted_difference(live: Live) -> None:
    at = next(i for i, e in enumerate(live.events) if isinstance(e, Planned) and e.swaps)
    event = live.events[at]
    assert isinstance(event, Planned)
    swap = replace(event.swaps[0], slots=event.swaps[0].slots + 1)
    events = [*live.events]
    events[at] = replace(event, swaps=(swap, *event.swaps[1:]))
    found = g1(events, live.fresh()).differences
    assert [d.call for d in found] == [at]
    assert "slots" in found[0].what


def test_g2_with_landings_and_knobs_replayed_everything_agrees(live: Live) -> None:
    again = g2(live.trace, live.events, live.records, live.fresh(), live.costs(), **live.how())
    assert again.differences == ()
    assert again.holds
    assert again.swaps > 10
    assert again.hits > 100
    assert again.residuals > 100


def test_g2_finds_a_landing_that_is_moved(live: Live) -> None:
    if live.settings.trigger == "instant":
        pytest.skip("instant swaps land in the call that plans them")
    commits = [i for i, e in enumerate(live.events) if isinstance(e, Committed) and e.swap_ids]
    events = [*live.events]
    first = events[commits[0]]
    assert isinstance(first, Committed)
    later = events[commits[-1]]
    assert isinstance(later, Committed)
    events[commits[0]] = Committed(first.swap_ids[1:])
    events[commits[-1]] = Committed((*later.swap_ids, first.swap_ids[0]))
    try:
        again = g2(live.trace, events, live.records, live.fresh(), live.costs(), **live.how())
    except KairoxError as error:  # a later eviction or landing does not go with it
        assert "in flight" in str(error)  # noqa: PT017
    else:
        assert again.differences


def test_free_running_differences_are_finite_and_known_to_be_zero_against_itself(
    live: Live,
) -> None:
    run = run_trace(live.trace, live.fresh(), live.costs(), **live.how())
    same = free_running(run.records, run.records)
    assert (same.hit_resident_points, same.hit_on_time_points, same.loads_share) == (0, 0, 0)
    other = free_running(live.records, run.records)
    assert np.isfinite([other.hit_resident_points, other.hit_on_time_points]).all()

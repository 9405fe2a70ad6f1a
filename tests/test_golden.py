"""The guide's rules, decision by decision (golden/seed_replay.json), through NeuronCache."""

import json
from pathlib import Path

import numpy as np
import pytest

from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Knobs
from kairox_sim.policies import Tam
from kairox_sim.record import StepRecord

GOLDEN = json.loads((Path(__file__).parent / "golden" / "seed_replay.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}


@pytest.mark.parametrize("name", CASES)
def test_every_decision(name: str) -> None:
    case = CASES[name]
    cost = case["cost_ms"]
    policy = Tam(
        case["n_layers"],
        case["n_neurons"],
        beta=case["beta"],
        theta_promote=case["theta_promote"],
        theta_evict=case["theta_evict"],
    )
    cache = NeuronCache(case["n_layers"], case["n_neurons"], case["slots_per_layer"], policy, Anb())
    promoted = evicted = 0
    for step, expected in enumerate(case["steps"]):
        assert cache.controller.knobs.threshold_scale == pytest.approx(
            expected["threshold_scale_used"], abs=1e-9
        )
        hits = residual = loads = 0
        for layer, row in enumerate(expected["layers"]):
            was_resident = cache.state[layer] >= 2
            swaps = cache.plan(layer, row["active"])
            assert sorted(i for swap in swaps for i in swap.promote) == sorted(row["promote"])
            gone = np.flatnonzero(was_resident & (cache.state[layer] == 0))
            assert gone.tolist() == sorted(row["evict"])
            cache.commit([swap.id for swap in swaps])  # trigger = instant
            split = cache.lookup(layer, row["active"], row["active"])
            assert split.on_time.size == row["hits_after_promotion"]
            assert split.hit_resident == row["hits_before_step"]
            hits += split.on_time.size
            residual += split.residual.size
            loads += len(row["promote"])
            evicted += len(row["evict"])
            cache.check()
        promoted += loads
        t_gpu_s = (cost["gpu_base"] + cost["gpu"] * hits) * 1e-3
        assert t_gpu_s == pytest.approx(expected["t_gpu_ms"] * 1e-3, rel=1e-12)
        record = StepRecord.with_unknown(
            step=step,
            gpu_busy_s=t_gpu_s,
            cpu_busy_s=cost["cpu"] * residual * 1e-3,
            swap_busy_s=cost["io"] * loads * 1e-3,
        )
        knobs = cache.end_step(record)
        assert knobs.threshold_scale == pytest.approx(expected["threshold_scale_after"], abs=1e-9)
    assert promoted > 0
    assert evicted > 0 or name == "demo"  # the guide's own demo never evicts


def test_momentum_table() -> None:
    table = GOLDEN["momentum_table"]
    policy = Tam(1, 2, beta=table["beta"])
    for step, (transient, sustained) in enumerate(
        zip(table["transient"], table["sustained"], strict=True)
    ):
        seen = np.array([0, 1] if step == 0 else [1], np.int32)
        policy.observe(0, seen, None)
        assert policy.momentum[0] == pytest.approx([transient, sustained], abs=1e-6)


def test_a_scale_other_than_one_moves_the_threshold() -> None:
    policy = Tam(1, 4)
    for _ in range(4):
        policy.observe(0, np.array([2], np.int32), None)  # M = 0.3439, just under 0.35
    state, seen = np.zeros(4, np.uint8), np.array([2], np.int32)
    assert policy.plan(0, seen, state, 4, 99, Knobs())[0].size == 0
    assert policy.plan(0, seen, state, 4, 99, Knobs(threshold_scale=0.968))[0].tolist() == [2]

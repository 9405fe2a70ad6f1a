"""The runner against plain transformers: logits, text, records. Unpaced unless a test says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import decoder_layers, family_of
from kairox_exec.kernels import numba_cpu, torch_ref
from kairox_exec.layer_step import LayerStep
from kairox_exec.loading import load_dense
from kairox_exec.oplog import NS, busy_s
from kairox_exec.runner import Runner, kv_argument, load
from kairox_exec.sampling import Choose, greedy, sampler
from kairox_exec.text import load_tokenizer
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Fixed
from kairox_sim.costs import costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile
from kairox_sim.model import find_shape
from kairox_sim.policies import POLICIES
from kairox_sim.record import StepRecord

LOGIT_TOLERANCE = 2e-5  # float32 sums in another order; logits have a standard deviation near 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _cache(
    policy: str = "lru", slots: int = 150, trigger: str = "attn_out", **given: Any
) -> Callable[[int, int], NeuronCache]:
    def build(n_layers: int, n_neurons: int) -> NeuronCache:
        made = POLICIES[policy](n_layers, n_neurons)
        controller = given.pop("controller", None) or Fixed()
        return NeuronCache(n_layers, n_neurons, slots, made, controller, trigger=trigger, **given)

    return build


def _text(model_dir: Path, prompts_dir: Path, domain: str, n_tokens: int) -> NDArray[np.int32]:
    text = (prompts_dir / f"{domain}.txt").read_text(encoding="utf-8")[: 12 * n_tokens]
    return load_tokenizer(model_dir).encode(text)[:n_tokens]


@torch.inference_mode()
def _plain_logits(
    model: Any, config: Any, tokens: NDArray[np.int32], prefill: int, chunk: int
) -> list[torch.Tensor]:
    """What plain transformers gives after the same chunks and the same single-token steps."""
    from transformers import DynamicCache

    kv, logits = DynamicCache(config=config), []
    ends = [*range(chunk, prefill, chunk), *range(prefill, tokens.size + 1)]
    for begin, end in pairwise([0, *ends]):
        ids = torch.from_numpy(tokens[begin:end].astype(np.int64))[None]
        logits.append(model(input_ids=ids, **{kv_argument(model): kv}).logits[0, -1])
    return logits


def _largest_error(runner: Runner, plain: Sequence[torch.Tensor], tokens: Any, **how: int) -> float:
    errors = [
        float((runner.logits - expected).abs().max())
        for (_, _), expected in zip(runner.run([tokens], **how), plain, strict=True)
    ]
    return max(errors)


# -- the same numbers as plain transformers ------------------------------------------------------


@pytest.mark.parametrize(
    ("gating", "trigger", "late", "kernels", "threshold"),
    [
        ("exact", "attn_out", "cpu", torch_ref, None),
        ("exact", "attn_in", "stall", numba_cpu, None),
        ("oracle", "after", "cpu", numba_cpu, None),
        ("exact", "serial", "cpu", torch_ref, 0.2),
    ],
)
def test_logits_of_tiny_reglu(
    tiny_reglu_dir: Path,
    prompts_dir: Path,
    gating: str,
    trigger: str,
    late: str,
    kernels: Any,
    threshold: float | None,
) -> None:
    tokens = _text(tiny_reglu_dir, prompts_dir, "prose", 48)
    model, config = load_dense(tiny_reglu_dir, fatrelu_threshold=threshold)
    plain = _plain_logits(model, config, tokens, prefill=20, chunk=8)
    with (
        EmulatedDevice() as device,
        load(
            tiny_reglu_dir, _cache(trigger=trigger), device, gating=gating, trigger=trigger,
            late=late, host_kernels=kernels, fatrelu_threshold=threshold,
        ) as runner,
    ):  # fmt: skip
        error = _largest_error(runner, plain, tokens, prefill=20, prefill_chunk=8)
        assert error <= LOGIT_TOLERANCE
        totals = runner.cache.totals
        assert totals["loads"] > 100
        assert totals["used"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["prose", "code", "json", "html", "math"])
def test_logits_of_256_tokens_per_domain(
    tiny_reglu_dir: Path, prompts_dir: Path, domain: str
) -> None:
    tokens = _text(tiny_reglu_dir, prompts_dir, domain, 256)
    model, config = load_dense(tiny_reglu_dir)
    plain = _plain_logits(model, config, tokens, prefill=32, chunk=64)
    with (
        EmulatedDevice() as device,
        load(
            tiny_reglu_dir, _cache(), device, trigger="attn_out", host_kernels=numba_cpu
        ) as runner,
    ):
        assert _largest_error(runner, plain, tokens, prefill=32) <= LOGIT_TOLERANCE
        assert runner.cache.totals["loads"] > 1000
        assert runner.cache.totals["wasted"] > 100


@pytest.mark.parametrize("gating", ["exact", "oracle"])
def test_logits_of_a_tiny_opt(tiny_opt_dir: Path, gating: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 64, 60).astype(np.int32)
    model, config = load_dense(tiny_opt_dir)
    plain = _plain_logits(model, config, tokens, prefill=10, chunk=4)
    with (
        EmulatedDevice() as device,
        load(tiny_opt_dir, _cache(slots=30), device, gating=gating, trigger="attn_out") as runner,
    ):
        error = _largest_error(runner, plain, tokens, prefill=10, prefill_chunk=4)
        assert error <= LOGIT_TOLERANCE
        assert runner.cache.totals["wasted"] > 20


def _plain_text(model_dir: Path, prompt: NDArray[np.int32], choose: Choose, n: int) -> list[int]:
    from transformers import DynamicCache

    model, config = load_dense(model_dir)
    name, kv, out = kv_argument(model), DynamicCache(config=config), []
    ids: Any = prompt
    with torch.inference_mode():
        for _ in range(n):
            given = torch.tensor([[int(i) for i in ids]])
            out.append(choose(model(input_ids=given, **{name: kv}).logits[0, -1]))
            ids = [out[-1]]
    return out


@pytest.mark.parametrize(
    "how", [None, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "top_p": 0.9, "seed": 2}]
)
def test_text_is_that_of_the_plain_model(
    tiny_reglu_dir: Path, prompts_dir: Path, how: dict[str, Any] | None
) -> None:
    prompt = _text(tiny_reglu_dir, prompts_dir, "code", 24)
    plain, live = (greedy, greedy) if how is None else (sampler(**how), sampler(**how))
    expected = _plain_text(tiny_reglu_dir, prompt, plain, 32)
    with (
        EmulatedDevice() as device,
        load(tiny_reglu_dir, _cache("tam", controller=Anb()), device) as runner,
    ):
        steps = list(runner.generate(prompt, live, max_new_tokens=32))
    assert [token for token, _ in steps] == expected
    assert [record.phase for _, record in steps] == ["prefill"] + ["decode"] * 31
    if how is not None:
        other = sampler(**{**how, "seed": 99})
        assert _plain_text(tiny_reglu_dir, prompt, other, 32) != expected


def test_generation_stops(tiny_opt_dir: Path) -> None:
    prompt = np.arange(6, dtype=np.int32)
    with EmulatedDevice() as device, load(tiny_opt_dir, _cache(), device, trigger="attn_out") as r:
        tokens = [token for token, _ in r.generate(prompt, max_new_tokens=8, prefill_chunk=4)]
        assert tokens[0] is None  # the first of two chunks
        assert len(tokens) == 9
        stop = tokens[3]
        again = [t for t, _ in r.generate(prompt, max_new_tokens=8, stop_tokens=[stop])]
        assert again == tokens[1 : tokens.index(stop) + 1]
        # 126 tokens leave room for 2 more in a context of 128; the last one chosen is not fed.
        long = np.zeros(126, np.int32)
        assert len(list(r.generate(long, max_new_tokens=50, prefill_chunk=128))) == 3


# -- records -------------------------------------------------------------------------------------


def _records(runner: Runner, *sequences: Any, **how: int) -> list[StepRecord]:
    return [record for _, record in runner.run(sequences, **how)]


def test_steps_and_chunks_by_hand(tiny_opt_dir: Path) -> None:
    """Prefill of 5 in chunks of 2, then 2 single tokens; a second sequence shorter than that."""
    first, second = np.asarray([1, 2, 3, 4, 5, 6, 7], np.int32), [9, 8]
    with EmulatedDevice() as device, load(tiny_opt_dir, _cache(), device, trigger="attn_out") as r:
        steps = list(r.run([first, second], prefill=5, prefill_chunk=2))
    rows = [
        (t, x.seq, x.step, x.phase, x.n_tokens, x.context_len) for t, x in steps
    ]  # fmt: skip
    assert rows == [
        (3, 0, 0, "prefill", 2, 2), (5, 0, 1, "prefill", 2, 4), (6, 0, 2, "prefill", 1, 5),
        (7, 0, 3, "decode", 1, 6), (None, 0, 4, "decode", 1, 7), (None, 1, 5, "prefill", 2, 2),
    ]  # fmt: skip


def test_a_sequence_starts_fresh_and_residency_stays(tiny_opt_dir: Path) -> None:
    tokens = np.arange(20, dtype=np.int32)
    with EmulatedDevice() as device, load(
        tiny_opt_dir, _cache(trigger="after"), device
    ) as r:  # fmt: skip
        last: list[torch.Tensor] = []
        records = []
        for _, record in r.run([tokens, tokens], prefill=4):
            records.append(record)
            last.append(r.logits)
        assert (last[-1] - last[len(last) // 2 - 1]).abs().max() <= LOGIT_TOLERANCE
    half = len(records) // 2
    assert records[0].hit_resident == 0
    assert records[half].hit_resident > 0.5 * records[half].evaluated


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("trigger", ["attn_in", "attn_out", "serial", "after", "instant"])
def test_identities_of_the_records(tiny_reglu_dir: Path, trigger: str, paced: bool) -> None:
    costs = costs_for(
        load_profile("emu-pc1"), find_shape("tiny-reglu"), "exact", trace_layers=6,
        trace_neurons=896, predictor="lookahead",
    )  # fmt: skip
    tokens = np.random.default_rng(5).integers(0, 1024, 24).astype(np.int32)
    with (
        EmulatedDevice(costs if paced else None) as device,
        load(tiny_reglu_dir, _cache(trigger=trigger), device, trigger=trigger) as runner,
    ):
        records = _records(runner, tokens, prefill=12)
        ending = runner.finish()
        bundle_bytes = runner.pipeline.bundles[0].bundle_bytes
    for r in records:
        assert r.evaluated == r.hit_on_time + r.residual == r.active
        assert r.hit_resident <= r.evaluated
        assert r.late <= r.residual
        assert (r.cpu_busy_s > 0) == (r.residual > 0)
        parts = (r.gpu_busy_s, r.cpu_busy_s, r.swap_busy_s, r.act_busy_s, r.decide_s)
        assert all(0 <= part <= r.wall_s for part in parts)
        waits = r.wait_cpu_s + r.wait_io_s + r.wait_decide_s
        assert r.gpu_busy_s + waits <= r.wall_s + 1e-12
        assert r.predict_s <= r.gpu_busy_s
        assert (r.predict_s > 0) == (trigger in ("attn_in", "attn_out", "serial"))
        assert r.h2d_bytes == r.loads * bundle_bytes
        assert isnan(r.threshold_scale)  # LRU reads none
        assert r.wait_io_s == 0 or trigger == "serial"

    def total(name: str) -> float:
        return sum(getattr(r, name) for r in records)

    assert total("loads") > 100
    assert total("loads") == (
        total("loads_used_first") + total("wasted") + ending.cancelled + ending.unused_yet
    )
    # The first step has no prediction for layer 0; `after` never counts its plans as one.
    assert isnan(records[-1].predicted) == (trigger == "after")


def test_copies_in_flight_at_the_end_are_cancelled(tiny_reglu_dir: Path) -> None:
    """Layer 0 is planned behind every step; what was planned behind the last is never polled."""
    with EmulatedDevice() as device:
        runner = load(tiny_reglu_dir, _cache(), device, trigger="attn_out")
        record = _records(runner, [5], prefill=1)[0]
        in_flight = sum(swap.promote.size for swap in runner.cache.in_flight.values())
        assert record.cancelled == 0
        ending = runner.finish()
        assert ending.cancelled == in_flight > 0
        assert not runner.cache.in_flight
        assert runner.finish() == ending
        with pytest.raises(RuntimeError, match="has been finished"):
            next(runner.run([[1]]))


def test_a_copy_across_steps_counts_in_both(tiny_reglu_dir: Path) -> None:
    """swap_busy_s is the part of every swap that lies inside the step, whenever it was logged."""
    costs = costs_for(
        load_profile("emu-pc1"), find_shape("tiny-reglu"), "exact", trace_layers=6,
        trace_neurons=896, predictor="lookahead",
    )  # fmt: skip
    with (
        # A swap takes longer than the head that follows its plan.
        EmulatedDevice(replace(costs, h2d_copy_fixed_s=20 * costs.head_s(1))) as device,
        load(tiny_reglu_dir, _cache(), device, trigger="attn_out") as runner,
    ):
        runner.keep_ops = True
        records = _records(runner, [5, 9, 6, 5], prefill=1)
        ops = runner.ops
    starts = [op.t0_ns for op in ops if op.kind == "attention" and op.layer == 0]
    swaps = [op for op in ops if op.kind == "swap"]
    across = 0
    for began_ns, record in zip(starts, records, strict=True):
        ended_ns = began_ns + round(record.wall_s * NS)
        assert record.swap_busy_s == pytest.approx(busy_s(swaps, began_ns, ended_ns), rel=1e-6)
        across += sum(op.t0_ns < ended_ns < op.t1_ns for op in swaps)
    assert across > 1


def test_the_controller_sees_every_record(tiny_reglu_dir: Path) -> None:
    events: list[Any] = []
    with (
        EmulatedDevice() as device,
        load(tiny_reglu_dir, _cache("tam", controller=Anb(), journal=events.append), device) as r,
    ):
        records = _records(r, np.arange(12), prefill=4)
    ended = [event for event in events if type(event).__name__ == "StepEnded"]
    assert [event.record for event in ended] == records
    assert [r.threshold_scale for r in records[1:]] == [e.knobs.threshold_scale for e in ended[:-1]]
    assert isinstance(r.cache.controller, Anb)
    assert ended[-1].knobs == r.cache.controller.knobs


def test_stand_in_costs_are_charged(tiny_reglu_dir: Path) -> None:
    """Bytes of loads are the target's: 896 of the trace's neurons carry 11,008 bundles."""
    costs = costs_for(
        load_profile("emu-pc1"), find_shape("prosparse-7b"), "exact", trace_layers=6,
        trace_neurons=896, predictor="lookahead",
    )  # fmt: skip
    with (
        EmulatedDevice(costs) as device,
        load(tiny_reglu_dir, _cache(swap_neurons=costs.swap_neurons, trigger="after"), device,
             trigger="after") as runner,
    ):  # fmt: skip
        record = _records(runner, [3, 4, 5], prefill=3)[0]
    assert record.loads > 0
    assert record.h2d_bytes == pytest.approx(record.loads * 2 * 8192 * 11008 / 896)


# -- what a recorder sees ------------------------------------------------------------------------


def test_on_layer_sees_what_the_dense_model_does(tiny_opt_dir: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 64, 12).astype(np.int32)
    model, config = load_dense(tiny_opt_dir)
    fired: list[NDArray[np.bool_]] = []
    for layer in decoder_layers(model, family_of(config)):
        layer.activation_fn.register_forward_hook(  # type: ignore[union-attr, operator]
            lambda module, args, out: fired.append((out > 0).reshape(-1, 96).numpy())
        )
    _plain_logits(model, config, tokens, prefill=6, chunk=4)

    seen: list[LayerStep] = []
    with (
        EmulatedDevice() as device,
        load(tiny_opt_dir, _cache(slots=20), device, trigger="attn_in", on_layer=seen.append) as r,
    ):
        records = _records(r, tokens, prefill=6, prefill_chunk=4)
    assert len(seen) == len(fired) == 3 * len(records)
    for i, (step, expected) in enumerate(zip(seen, fired, strict=True)):
        assert step.layer == i % 3
        assert step.step.step == i // 3
        assert np.array_equal(step.active, expected)
        assert (step.predicted is None) == (step.layer == 0)
    chunk = seen[0].step
    assert (chunk.phase, chunk.tokens.tolist(), chunk.context_len) == (
        "prefill", tokens[:4].tolist(), 4,
    )  # fmt: skip
    predicted = sum(int(step.predicted.sum()) for step in seen if step.predicted is not None)
    both = sum(int((s.predicted & s.active).sum()) for s in seen if s.predicted is not None)
    assert both > 0.2 * predicted  # a look-ahead that looks at the wrong layer would not be


def test_recording_a_policy_that_never_plans(tiny_opt_dir: Path) -> None:
    seen: list[LayerStep] = []
    with (
        EmulatedDevice() as device,
        load(
            tiny_opt_dir, _cache("static", trigger="attn_out"), device, trigger="attn_out",
            always_predict=True, on_layer=seen.append,
        ) as runner,
    ):  # fmt: skip
        record = _records(runner, [1, 2, 3], prefill=3)[0]
    assert [step.predicted is not None for step in seen] == [False, True, True]
    assert record.loads == 0
    assert record.predict_s > 0


# -- sampling ------------------------------------------------------------------------------------


def test_nucleus_by_hand() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05: top_p = 0.7 keeps the first two, 0.5 only the first."""
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    assert {sampler(top_p=0.7, seed=s)(logits) for s in range(60)} == {1, 3}
    assert {sampler(top_p=0.5, seed=s)(logits) for s in range(20)} == {1}
    assert {sampler(seed=s)(logits) for s in range(200)} == {0, 1, 2, 3}
    assert sampler(temperature=0) is greedy
    assert greedy(torch.tensor([1.0, 3.0, 3.0])) == 1


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_sampler_refuses(bad: dict[str, float]) -> None:
    with pytest.raises(KairoxError, match="must be"):
        sampler(**bad)


# -- refusals ------------------------------------------------------------------------------------


def test_bad_input_is_refused(tiny_opt_dir: Path) -> None:
    with EmulatedDevice() as device:
        with pytest.raises(KairoxError, match="what a predictor says and none was given"):
            load(
                tiny_opt_dir, _cache(), device, gating="predicted", trigger="attn_out",
                look_ahead=False,
            )  # fmt: skip
        with pytest.raises(KairoxError, match="needs a predictor"):
            load(tiny_opt_dir, _cache(), device, trigger="attn_out", look_ahead=False)
        with load(tiny_opt_dir, _cache(), device, trigger="attn_out") as runner:
            for tokens, message in (
                ([], "1 token or more"),
                ([3, 64], "0 to 63, got 3 to 64"),
                ([0] * 129, "129 tokens; the model's context holds 128"),
            ):
                with pytest.raises(KairoxError, match=message):
                    next(runner.run([tokens]))
            with pytest.raises(KairoxError, match="prefill_chunk must be 1"):
                next(runner.run([[1]], prefill_chunk=0))


def test_the_live_path_runs_on_a_bare_box() -> None:
    """None of the simulator's own dependencies is imported."""
    code = (
        "import sys, kairox_exec.runner, kairox_exec.kernels.numba_cpu\n"
        "bad = {'simpy', 'pandas', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

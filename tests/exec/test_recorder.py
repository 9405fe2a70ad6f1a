"""The recorder: nothing missing, ids as in the model, predictions where there were some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from kairox_exec.compiled import uncompiled
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import decoder_layers, family_of
from kairox_exec.layer_step import LayerStep, StepInfo
from kairox_exec.loading import load_dense
from kairox_exec.recorder import Recorder
from kairox_exec.runner import Runner, attach, kv_argument
from kairox_sim.errors import KairoxError
from kairox_sim.events import Split
from kairox_sim.record import StepRecord
from kairox_sim.settings import Settings, build_cache
from kairox_sim.trace import SequenceInfo, Trace, TraceHeader, read_trace, unpack
from kairox_sim.trace_stats import trace_stats

Change = Callable[[nn.Module], nn.Module]
ROUNDING = 1e-4  # gate values this near 0 may fall to either side in another order of sums


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _header(runner: Runner, n_sequences: int = 1, **given: Any) -> TraceHeader:
    bundle = runner.pipeline.bundles[0]
    return TraceHeader(
        model="test", model_sha256="0", n_layers=runner.cache.n_layers, n_neurons=bundle.n_neurons,
        d_model=bundle.d_model, activation="relu", activation_threshold=0.0, gating=bundle.gating,
        complete=True, tokenizer_sha256="0",
        sequences=tuple(SequenceInfo(i, "d", "s", "h", 0, 4096) for i in range(n_sequences)),
        predicted_trigger=runner.pipeline.trigger if runner.pipeline.predicts else None, **given,
    )  # fmt: skip


@contextmanager
def _running(model_dir: Path, settings: Settings, change: Change = lambda m: m) -> Iterator[Runner]:
    model, config = load_dense(model_dir)
    model = change(model)
    with EmulatedDevice() as device:
        yield attach(
            model, config, lambda n, m: build_cache(settings, n, m), device,
            gating=settings.gating, trigger=settings.trigger, always_predict=True,
        )  # fmt: skip


def _recorded(
    model_dir: Path,
    path: Path,
    feed: Callable[[Runner], Iterator[tuple[int | None, StepRecord]]],
    settings: Settings | None = None,
    change: Change = lambda m: m,
) -> Trace:
    chosen = settings or Settings(policy="all", trigger="attn_out")
    with _running(model_dir, chosen, change) as runner:
        _record_all(runner, path, feed)
        runner.finish()
    return read_trace(path, strict=True)


def _record_all(
    runner: Runner, path: Path, feed: Callable[[Runner], Iterator[tuple[int | None, StepRecord]]]
) -> None:
    with Recorder(path, _header(runner)) as recorder:
        runner.pipeline.on_layer = recorder
        for _, step in feed(runner):
            recorder.end_step(step)


def _tokens(n: int) -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 64, n).astype(np.int32)


def _forced(n: int, prefill: int = 6) -> Callable[[Runner], Iterator[Any]]:
    return lambda runner: runner.run([_tokens(n)], prefill=prefill)


# -- what is recorded ---------------------------------------------------------------------------


@torch.inference_mode()
def _dense_gates(model_dir: Path, tokens: NDArray[np.int32], prefill: int) -> torch.Tensor:
    """[n_layers, n_tokens, n_neurons] pre-activations of plain transformers, same chunks."""
    from transformers import DynamicCache

    model, config = load_dense(model_dir)
    layers = decoder_layers(model, family_of(config))
    family = family_of(config)
    seen: list[list[torch.Tensor]] = [[] for _ in layers]
    for layer, into in zip(layers, seen, strict=True):
        layer.get_submodule(family.gate).register_forward_hook(
            lambda module, args, out, into=into: into.append(out.reshape(-1, out.shape[-1]).clone())
        )
    kv = DynamicCache(config=config)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    for part in (ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)):
        model(input_ids=part, use_cache=True, **{kv_argument(model): kv})
    return torch.stack([torch.cat(parts) for parts in seen])


@pytest.mark.parametrize("family", ["tiny_reglu_dir", "tiny_opt_dir"])
def test_ids_are_the_models_own_whatever_moves(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model_dir = request.getfixturevalue(family)
    settings = Settings(policy="lru", slots=12, swap_neurons=4)  # slots are a permutation of ids
    trace = _recorded(model_dir, tmp_path / "t.arrow", _forced(24), settings)
    gates = _dense_gates(model_dir, _tokens(24), 6).numpy()
    header = trace.header
    for layer in range(header.n_layers):
        fired = unpack(trace.bits[trace.layer == layer], header.n_neurons)
        plain = gates[layer]
        told = np.abs(plain) > ROUNDING
        assert told.mean() > 0.9
        assert (fired == (plain > 0))[told].all()
    assert trace.token[trace.layer == 0].tolist() == _tokens(24).tolist()


def test_predictions_are_recorded_where_there_were_some(tiny_opt_dir: Path, tmp_path: Path) -> None:
    trace = _recorded(tiny_opt_dir, tmp_path / "a.arrow", _forced(10))
    assert trace.header.predicted_trigger == "attn_out"
    assert trace.predicted_known is not None
    assert (trace.predicted_known == (trace.layer > 0)).all()
    assert trace.evaluated_bits is None  # the same as the active ones
    after = Settings(policy="lru", slots=12)
    trace = _recorded(tiny_opt_dir, tmp_path / "b.arrow", _forced(10), after)
    assert trace.header.predicted_trigger is None
    assert trace.predicted_bits is None
    serial = Settings(policy="tam", slots=12, trigger="serial")
    trace = _recorded(tiny_opt_dir, tmp_path / "c.arrow", _forced(10), serial)
    assert trace.predicted_known is not None
    assert trace.predicted_known.all()  # of layer 0 too


@pytest.mark.parametrize(
    ("feed", "phases"),
    [
        (lambda r: r.run([_tokens(100)], prefill=100, prefill_chunk=16), "p" * 100),
        (lambda r: r.run([_tokens(1)], prefill=0), "d"),
        (lambda r: r.run([_tokens(1)], prefill=1), "p"),
        (lambda r: r.generate(_tokens(70), max_new_tokens=1, prefill_chunk=64), "p" * 70),
        (lambda r: r.generate(_tokens(5), max_new_tokens=4), "p" * 5 + "ddd"),
        (lambda r: r.run([_tokens(40)], prefill=33, prefill_chunk=32), "p" * 33 + "d" * 7),
    ],
    ids=["long prefill", "one token", "one prefilled", "one generated", "four", "rest chunk"],
)
def test_every_token_fed_is_recorded_once(
    tiny_opt_dir: Path, tmp_path: Path, feed: Callable[[Runner], Any], phases: str
) -> None:
    trace = _recorded(tiny_opt_dir, tmp_path / "t.arrow", feed)
    assert trace.n_tokens == len(phases)
    assert len(trace.step) == trace.header.n_layers * len(phases)
    got = trace.phase[trace.layer == 0]
    assert "".join("pd"[p] for p in got) == phases


def test_a_layer_that_never_fires_is_named(tiny_opt_dir: Path, tmp_path: Path) -> None:
    def silence(model: nn.Module) -> nn.Module:
        fc1: Any = model.get_submodule("model.decoder.layers.1.fc1")
        fc1.weight.zero_()
        fc1.bias.fill_(-1.0)
        return model

    trace = _recorded(tiny_opt_dir, tmp_path / "t.arrow", _forced(12), change=silence)
    assert trace_stats(trace).zero_layers == (1,)


def test_evaluated_is_stored_where_it_differs(tiny_opt_dir: Path, tmp_path: Path) -> None:
    with _running(tiny_opt_dir, Settings(policy="all")) as runner:
        header = replace(_header(runner), n_layers=1, predicted_trigger=None)
    active = np.zeros((1, header.n_neurons), bool)
    active[0, 5] = True
    computed = active.copy()
    computed[0, 9] = True
    with Recorder(tmp_path / "t.arrow", header) as recorder:
        recorder(_layer_step(0, 0, active, computed, None))
        recorder.end_step(_record(0))
    step = next(read_trace(tmp_path / "t.arrow").steps())
    assert step.active(0).tolist() == [5]
    assert step.evaluated(0).tolist() == [5, 9]


# -- what may not be missing --------------------------------------------------------------------


def _layer_step(
    step: int,
    layer: int,
    active: NDArray[np.bool_],
    evaluated: NDArray[np.bool_] | None = None,
    predicted: NDArray[np.bool_] | None = None,
) -> LayerStep:
    none = np.zeros(0, np.int32)
    info = StepInfo(0, step, "decode", np.array([1], np.int32), step + 1)
    evaluated = active if evaluated is None else evaluated
    return LayerStep(info, layer, active, evaluated, predicted, Split(0, none, none, none))


def _record(step: int, wall_s: float = 1e-3) -> StepRecord:
    values = dict.fromkeys(StepRecord.__dataclass_fields__, 0)
    given = {"step": step, "phase": "decode", "n_tokens": 1, "wall_s": wall_s}
    return StepRecord(**(values | given))


def _wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _each_layer(model: nn.Module) -> nn.Module:
    for name in [n for n, _ in model.named_modules() if n.rpartition(".")[0].endswith("layers")]:
        model.set_submodule(name, _wrapped(model.get_submodule(name)))
    return model


@pytest.mark.parametrize("compiled", [_wrapped, _in_place, _forward, _each_layer])
def test_a_model_compiled_before_is_recorded_whole(
    tiny_opt_dir: Path, tmp_path: Path, compiled: Change
) -> None:
    def change(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it imports
            return compiled(model)

    with pytest.warns(UserWarning, match="the model was compiled; it runs without"):
        trace = _recorded(tiny_opt_dir, tmp_path / "a.arrow", _forced(8), change=change)
    plain = _recorded(tiny_opt_dir, tmp_path / "b.arrow", _forced(8))
    assert trace.sha256 == plain.sha256


def test_a_plain_model_stays_as_it_is(tiny_opt_dir: Path) -> None:
    model, _ = load_dense(tiny_opt_dir)
    assert uncompiled(model) is model  # and no warning: those are errors here


def test_a_step_that_brings_no_records_is_refused(tiny_opt_dir: Path, tmp_path: Path) -> None:
    """As when hooks never fire: the recording fails, it does not come out empty."""
    with _running(tiny_opt_dir, Settings(policy="all")) as runner:
        recorder = Recorder(tmp_path / "t.arrow", _header(runner))
        step = next(iter(runner.run([_tokens(3)], prefill=0)))[1]  # on_layer was never set
        with pytest.raises(KairoxError, match=r"step 0 brought no layers \[0, 1, 2\] of 3"):
            recorder.end_step(step)
        recorder.abandon()


def test_a_layer_that_is_not_hybrid_any_more_is_named(tiny_opt_dir: Path, tmp_path: Path) -> None:
    with _running(tiny_opt_dir, Settings(policy="all")) as runner:
        runner.model.get_submodule("model.decoder.layers.1").set_submodule("fc1", nn.Identity())
        with pytest.raises(KairoxError, match=r"brought no layers \[1\] of 3"):
            _record_all(runner, tmp_path / "t.arrow", _forced(3, prefill=0))


def test_a_prediction_that_went_missing_is_named(tiny_opt_dir: Path, tmp_path: Path) -> None:
    with _running(tiny_opt_dir, Settings(policy="all", trigger="attn_out")) as runner:
        norm = runner.model.get_submodule("model.decoder.layers.1.final_layer_norm")
        norm._forward_pre_hooks.clear()  # what predicts layer 2
        with pytest.raises(KairoxError, match=r"layer 2: nothing was predicted.*compiled before"):
            _record_all(runner, tmp_path / "t.arrow", _forced(3, prefill=0))


def test_overhead_is_the_share_of_the_steps_time(tiny_opt_dir: Path, tmp_path: Path) -> None:
    with _running(tiny_opt_dir, Settings(policy="all")) as runner:
        header = replace(_header(runner), n_layers=1, predicted_trigger=None)
    active = np.zeros((1, header.n_neurons), bool)
    with Recorder(tmp_path / "t.arrow", header) as recorder:
        assert isnan(recorder.overhead)
        recorder(_layer_step(0, 0, active))
        recorder.end_step(_record(0, wall_s=100.0))
        low = recorder.overhead
        assert 0 < low < 0.5
        recorder(_layer_step(1, 0, active))
        recorder.end_step(_record(1, wall_s=900.0))
        assert recorder.overhead < low
        assert (recorder.n_steps, recorder.n_tokens) == (2, 2)

"""A plain model's recording: every token once, no padding, the same bits as the executor's."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import TINY, save_tiny
from torch import nn

from kairox_exec.families import decoder_layers, family_of
from kairox_exec.hidden_states import read_hidden_states
from kairox_exec.loading import load_dense
from kairox_exec.plain_recording import record_plain
from kairox_exec.plain_rows import PassWriter
from kairox_exec.plain_run import record_plain_run
from kairox_exec.recording import record
from kairox_exec.text import Tokenizer
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace, read_trace, unpack

PROMPT = "The old house on the hill"


def _ids(tokenizer: Tokenizer, text: str = PROMPT) -> torch.Tensor:
    return torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None]


def _fed(trace: Trace, seq: int = 0) -> list[int]:
    fed: list[int] = trace.token[(trace.seq == seq) & (trace.layer == 0)].tolist()
    return fed


def _almost_equal(a: Trace, b: Trace) -> None:
    """Bits of the same rows: a gate that is all but zero may fall to either side by rounding."""
    assert (a.token == b.token).all()
    assert (a.layer == b.layer).all()
    assert np.unpackbits(a.bits ^ b.bits).sum() <= 1e-6 * a.bits.size * 8


# -- what is recorded ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_bits_as_the_executor(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, batch: int
) -> None:
    texts = [prompts_dir / "prose.txt", prompts_dir / "code.txt"]
    how: dict[str, Any] = {"tokens": 80, "window": 40, "prefill": 30, "skip": 5}
    ours = read_trace(record(tiny_reglu_dir, texts, tmp_path / "h.arrow", **how), strict=True)
    path = record_plain_run(tiny_reglu_dir, texts, tmp_path / "p.arrow", batch=batch, **how)
    plain = read_trace(path, strict=True)
    assert plain.header.sequences == ours.header.sequences
    for info in plain.header.sequences:
        mine, theirs = plain.select(seqs=[info.seq]), ours.select(seqs=[info.seq])
        assert (mine.phase == theirs.phase).all()
        _almost_equal(mine, theirs)
    assert plain.header.run["kind"] == "plain"
    assert ours.header.run["kind"] == "hybrid"
    assert (plain.header.gating, plain.header.complete) == ("exact", True)
    assert 0 < plain.header.recorder_overhead < 1


def test_prompts_are_written_on_from_as_by_the_executor(
    tiny_reglu_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    traces = [
        read_trace(run(tiny_reglu_dir, (), out, prompts=tmp_path / "p.txt", tokens=12, seed=3))
        for run, out in ((record, tmp_path / "h.arrow"), (record_plain_run, tmp_path / "p.arrow"))
    ]
    assert traces[0].header.sequences == traces[1].header.sequences
    _almost_equal(*traces)


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_family_by_what_reaches_its_down_projection(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tiny, directory = TINY[name], save_tiny(name, tmp_path / "model")
    loaded, config = load_dense(directory, thresholds=tiny.thresholds)
    family = family_of(config)
    reached: list[torch.Tensor] = []
    for layer in decoder_layers(loaded, family):
        layer.get_submodule(family.down).register_forward_pre_hook(
            lambda module, args: reached.append(args[0].reshape(12, -1) != 0)
        )
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    with record_plain(loaded, tokenizer, tmp_path / "t.arrow", model_dir=directory):
        loaded(input_ids=ids)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    assert (trace.header.approximate is not None) == (tiny.activation == "silu")
    for i, truth in enumerate(reached):
        fired = unpack(trace.bits[trace.layer == i], trace.header.n_neurons)
        assert np.array_equal(fired, truth.numpy())
        assert 0 < fired.mean() < 1


def test_padding_and_rows_that_have_ended_are_no_tokens(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = [_ids(tokenizer)[0].tolist(), _ids(tokenizer, "x = 1")[0].tolist()]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    free = model.generate(ids, **how)
    stop = int(free[0, width + 2])
    with record_plain(model, tokenizer, tmp_path / "t.arrow", stop=[stop]):
        told = model.generate(ids, **how, eos_token_id=stop, pad_token_id=0)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    for row, prompt in enumerate(prompts):
        written = told[row, width:-1].tolist()
        written = written[: written.index(stop)] if stop in written else written
        assert _fed(trace, row) == prompt + written
        info = trace.header.sequences[row]
        assert (info.token_start, info.token_stop, info.generated) == (0, len(prompt), True)
        with record_plain(model, tokenizer, tmp_path / f"{row}.arrow"), torch.inference_mode():
            model(input_ids=torch.tensor([prompt]))
        alone = read_trace(tmp_path / f"{row}.arrow")
        mine = trace.select(seqs=[row])
        prefilled = mine.bits[mine.phase == 0]
        assert np.unpackbits(prefilled ^ alone.bits).sum() <= 1e-5 * alone.bits.size * 8
    assert _fed(trace, 0)[-1] != stop


Feed = Callable[[Any, torch.Tensor], Any]


@pytest.mark.parametrize(
    ("feed", "n_fed"),
    [
        (lambda m, ids: m(input_ids=ids), 300),
        (lambda m, ids: m(input_ids=ids, use_cache=False), 300),
        (lambda m, ids: m.generate(ids, max_new_tokens=1, do_sample=False), 300),
        (lambda m, ids: m.generate(ids[:, :1], max_new_tokens=3, do_sample=False), 3),
    ],
    ids=["long prefill", "no cache", "one new token", "one prompt token"],
)
def test_every_token_fed_is_recorded_once(
    model: Any, tokenizer: Tokenizer, prompts_dir: Path, tmp_path: Path, feed: Feed, n_fed: int
) -> None:
    ids = _ids(tokenizer, (prompts_dir / "prose.txt").read_text()[:4000])[:, :300]
    with record_plain(model, tokenizer, tmp_path / "t.arrow"):
        feed(model, ids)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    assert trace.n_tokens == n_fed
    assert len(trace.step) == 6 * n_fed
    assert _fed(trace)[: min(n_fed, 300)] == ids[0].tolist()[: len(_fed(trace))] or n_fed == 3


def test_a_cached_prefix_is_recorded_where_it_was_fed(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import DynamicCache

    ids = _ids(tokenizer)
    n = ids.shape[1]
    before = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :4], cache=before)
    other = copy.deepcopy(before)
    with record_plain(model, tokenizer, tmp_path / "t.arrow"):
        model.generate(ids, cache=before, max_new_tokens=3, do_sample=False)
        model.generate(ids, cache=other, max_new_tokens=1, do_sample=False)
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    assert _fed(trace)[: n - 4] == ids[0, 4:].tolist()
    assert (len(_fed(trace)), len(_fed(trace, 1))) == (n - 4 + 2, n - 4)
    assert [(s.token_start, s.token_stop) for s in trace.header.sequences] == [(4, n)] * 2


def test_hidden_states_are_those_of_the_executor(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path
) -> None:
    text, states = prompts_dir / "math.txt", []
    for run, name in ((record, "h"), (record_plain_run, "p")):
        run(
            tiny_reglu_dir, text, tmp_path / f"{name}.arrow", tokens=16, prefill=12,
            hidden=tmp_path / name,
        )  # fmt: skip
        states.append(read_hidden_states(tmp_path / name))
    ours, plain = states
    assert ours.header == plain.header
    for layer in range(6):
        a, b = ours.fed_to(layer), plain.fed_to(layer)
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=2e-3, atol=2e-3)


def test_a_layer_that_never_fires_is_warned_of(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model.model.layers[2].mlp.gate_proj.weight.zero_()
    with (
        pytest.warns(UserWarning, match="layers that never fired: 2"),
        record_plain(model, tokenizer, tmp_path / "t.arrow"),
    ):
        model(input_ids=_ids(tokenizer))


# -- what cannot be ------------------------------------------------------------------------------


def _wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _layers(model: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("compiled", [_wrapped, _in_place, _layers])
def test_a_model_compiled_before_is_recorded_whole_or_not_at_all(
    model: Any,
    tokenizer: Tokenizer,
    tmp_path: Path,
    tiny_reglu_dir: Path,
    compiled: Callable[[Any], Any],
    has_run: bool,
) -> None:
    ids = _ids(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        changed = compiled(model)
        if has_run:
            changed(input_ids=ids)
        recorder = record_plain(changed, tokenizer, tmp_path / "t.arrow", model_dir=tiny_reglu_dir)
        refused = ""
        try:
            with recorder:
                changed(input_ids=ids)
        except KairoxError as error:
            refused = str(error)
        with record_plain(
            recorder.model, tokenizer, tmp_path / "u.arrow", model_dir=tiny_reglu_dir
        ):
            recorder.model(input_ids=ids)
    plain = read_trace(tmp_path / "u.arrow", strict=True)
    assert plain.n_tokens == ids.shape[1]
    if refused:
        assert re.search("no forward pass was recorded|records missing", refused)
        assert not (tmp_path / "t.arrow").exists()
    else:
        _almost_equal(read_trace(tmp_path / "t.arrow", strict=True), plain)
    torch._dynamo.reset()


def test_hooks_that_never_run_leave_no_file(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with (
        pytest.raises(KairoxError, match="no forward pass was recorded"),
        record_plain(model, tokenizer, tmp_path / "t.arrow"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_is_gone_past_is_named(
    model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model.model.layers[1].mlp, mlp = nn.Identity(), model.model.layers[1].mlp
    model.model.layers[1].mlp.gate_proj = mlp.gate_proj  # there, and never called
    with (
        pytest.raises(KairoxError, match=r"brought no layers \[1\] of 6"),
        record_plain(model, tokenizer, tmp_path / "t.arrow"),
    ):
        model(input_ids=_ids(tokenizer))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("feed", "said"),
    [
        (lambda m, ids: m.generate(ids, max_new_tokens=4, num_beams=2), "beam search"),
        (lambda m, ids: m.generate(ids, max_new_tokens=4, use_cache=False), "use_cache=True"),
        (lambda m, ids: [m(input_ids=ids) for _ in range(31)], "more than 30 sequences"),
        (lambda m, ids: m(inputs_embeds=m.model.embed_tokens(ids)), "passes over input_ids"),
        (
            lambda m, ids: m(input_ids=ids, attention_mask=torch.ones(1, 1, 11, 11).bool()),
            "attention mask",
        ),
    ],
    ids=["beams", "no cache", "too many", "embeddings", "mask of another kind"],
)
def test_runs_that_cannot_be_recorded_say_why(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, feed: Feed, said: str
) -> None:
    with (
        pytest.raises(KairoxError, match=said),
        record_plain(model, tokenizer, tmp_path / "t.arrow", max_sequences=30),
    ):
        feed(model, _ids(tokenizer))
    assert not any(layer.mlp.gate_proj._forward_hooks for layer in model.model.layers)


def test_a_model_from_nowhere_needs_its_folder(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, tiny_reglu_dir: Path
) -> None:
    model.name_or_path = ""
    with pytest.raises(KairoxError, match="give model_dir"):
        record_plain(model, tokenizer, tmp_path / "t.arrow")
    assert record_plain(model, tokenizer, tmp_path / "t.arrow", model_dir=tiny_reglu_dir)


def test_an_error_of_the_writing_thread_reaches_the_caller(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: PassWriter, forwards: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PassWriter, "write", full)
    with (
        pytest.raises(KairoxError, match=r"No space left on device\. Nothing was recorded"),
        record_plain(model, tokenizer, tmp_path / "t.arrow"),
    ):
        model(input_ids=_ids(tokenizer))


def test_a_disk_that_is_full_at_the_end_keeps_what_can_be_read(
    model: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: PassWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PassWriter, "close", full)
    with (
        pytest.raises(KairoxError, match=r"No space left on device\. .*recorded|tokens before it"),
        record_plain(model, tokenizer, tmp_path / "t.arrow"),
    ):
        model(input_ids=_ids(tokenizer))


# -- runs that end early --------------------------------------------------------------------------


def test_an_interrupt_seals_what_there_is(model: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def run() -> Iterator[None]:
        with record_plain(model, tokenizer, tmp_path / "t.arrow"):
            model.generate(_ids(tokenizer), max_new_tokens=10, do_sample=False)
            raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt, match="the first 20 tokens are in"):
        list(run())
    trace = read_trace(tmp_path / "t.arrow")
    assert trace.truncated_at == trace.n_tokens == 20
    assert trace.header.sequences[0].token_stop == 11
    assert (tmp_path / "t.arrow").read_bytes().startswith(b"ARROW1")

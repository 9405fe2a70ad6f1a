"""Traces: what the writer, the reader and the header refuse, and what they say."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from small_traces import from_masks, header, recording, write

from kairox_sim.errors import KairoxError
from kairox_sim.trace import SequenceInfo, Trace, TraceHeader, TraceWriter, read_trace


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# --- what the writer refuses


def test_missing_layers_are_named_and_whole_steps_are_kept(tmp_path, rng):
    made = recording([(0, 2), (0, 1), (0, 1)], rng, n_layers=3)
    writer = TraceWriter(tmp_path / "t", made.header, steps_per_batch=8)
    for layer_step in made.layer_steps[:-2]:  # the last step has layer 0 only
        writer.append(**layer_step.arguments())
    with pytest.raises(KairoxError, match=r"records missing.*step 6.*layers \[1, 2\] of 3"):
        writer.close()
    trace = read_trace(tmp_path / "t")
    assert (trace.truncated_at, trace.n_steps) == (3, 2)


def test_a_step_that_begins_before_the_last_is_complete_is_refused(tmp_path, rng):
    made = recording([(0, 1), (0, 1)], rng, n_layers=3)
    writer = TraceWriter(tmp_path / "t", made.header)
    for index in (0, 2):
        writer.append(**made.layer_steps[index].arguments())
    with pytest.raises(KairoxError, match=r"step 3 began and step 0 has no rows for layers \[1\]"):
        writer.append(**made.layer_steps[3].arguments())
    writer.abandon()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "layer 2: the header says 2 layers"),
        ({"layer": 0}, "recorded twice"),
        ({"phase": "generate"}, r"phase 'generate', must be one of \('prefill', 'decode'\)"),
        ({"tokens": [1, 2], "phase": "decode"}, "2 tokens in decode"),
        ({"tokens": []}, "0 tokens in prefill"),
        ({"tokens": [5, 7]}, "tokens differ"),
        ({"seq": 3}, r"sequence 3 is not in the header, which lists \[0\]"),
        ({"step": -1}, "unsigned 32-bit"),
        ({"active": np.zeros((2, 71), bool)}, r"active is bool\[2, 71\]: expected bool\[2, 70\]"),
        ({"active": np.zeros((2, 70))}, r"active is float64\[2, 70\]"),
        ({"active": np.full((2, 16), 255, np.uint8)}, "padding must be zero"),
        ({"evaluated": np.zeros((2, 70), bool)}, "for every layer-step or for none"),
        ({"predicted": np.zeros((2, 70), bool)}, "names no predicted_trigger"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path, rng, change, message):
    first, second = recording([(0, 2)], rng).layer_steps
    with TraceWriter(tmp_path / "t", header()) as writer:
        writer.append(**first.arguments())
        with pytest.raises(KairoxError, match=message):
            writer.append(**{**second.arguments(), **change})
        writer.append(**second.arguments())  # a refused row changes nothing
    assert read_trace(tmp_path / "t", strict=True).n_tokens == 2
    with pytest.raises(KairoxError, match="is closed"):
        writer.append(**second.arguments())


def test_steps_must_grow(tmp_path, rng):
    made = recording([(0, 1), (0, 1)], rng, n_layers=1)
    with TraceWriter(tmp_path / "t", made.header) as writer:
        writer.append(**made.layer_steps[1].arguments())
        with pytest.raises(KairoxError, match="step numbers must grow; the one before was 3"):
            writer.append(**made.layer_steps[0].arguments())


def test_an_exception_while_recording_keeps_whole_steps_and_no_end_mark(tmp_path, rng):
    made = recording([(0, 2), (0, 1)], rng)

    def record():
        with TraceWriter(tmp_path / "t", made.header) as writer:
            for layer_step in made.layer_steps[:3]:
                writer.append(**layer_step.arguments())
            raise RuntimeError("the model broke")

    with pytest.raises(RuntimeError, match="the model broke"):
        record()
    trace = read_trace(tmp_path / "t")
    assert trace.truncated_at == trace.n_tokens == 2
    with pytest.raises(KairoxError, match="truncated at token 2"):
        read_trace(tmp_path / "t", strict=True)


# --- what reading refuses


@pytest.mark.parametrize("make", [str, Path])
def test_str_and_path_read_the_same(tmp_path, rng, make):
    path = write(tmp_path / "t", recording([(0, 3)], rng))
    assert read_trace(make(path)).n_tokens == 3


def test_no_path_gives_an_empty_trace(tmp_path):
    with pytest.raises(KairoxError, match="No such file"):
        read_trace(tmp_path / "missing.arrow")
    with pytest.raises(KairoxError, match="cannot read the trace"):
        read_trace(tmp_path)
    with pytest.raises(KairoxError, match="a str or a Path, not 3"):
        read_trace(3)
    (tmp_path / "empty").touch()
    with pytest.raises(KairoxError, match="is empty"):
        read_trace(tmp_path / "empty")


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("layer,neuron\n0,1\n")
    with pytest.raises(KairoxError, match="is not a trace"):
        read_trace(tmp_path / "text")
    table = pa.table({"step": [1, 2]}, metadata={"pandas": "x"})
    for new, name in ((ipc.new_stream, "stream"), (ipc.new_file, "file")):
        with new(tmp_path / name, table.schema) as out:
            out.write_table(table)
        with pytest.raises(KairoxError, match="Arrow file but not a Kairox trace"):
            read_trace(tmp_path / name)


def test_a_trace_of_another_model_is_refused(rng):
    trace = from_masks(rng.random((1, 2, 70)) < 0.5)
    trace.header.check_model(model_sha256="m" * 64, n_layers=2, n_neurons=70)
    with pytest.raises(KairoxError, match=r"model_sha256 'mmm.* model of model_sha256 'other'"):
        trace.header.check_model(model_sha256="other")
    with pytest.raises(KairoxError, match=r"n_layers 2, and is used .* n_layers 3"):
        trace.header.check_model(n_layers=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": [0, 0, 0, 1]}, "row 1 is out of order"),
        ({"token": [5, 6, 7, 7]}, "row 1 is out of order"),
        ({"seq": [0, 0, 1, 1]}, "row 2 is out of order"),
        ({"phase": [1, 1, 2, 2]}, "row 2 is out of order"),
        ({"phase": [1, 0, 1, 1]}, "row 1 is out of order"),
        ({"step": [4, 4, 3, 3]}, "row 2 is out of order"),
        ({"step": [3, 3, 3, 4]}, "step 3 has 3 rows: not a multiple of the 2 layers"),
        ({"step": [3, 3, 3, 3], "layer": [0, 0, 1, 1], "token": [5, 7, 5, 7]}, "row 0 is out"),
    ],
)
def test_rows_in_another_order_are_refused(change, message):
    rows = {
        "seq": [0, 0, 0, 0],
        "step": [3, 3, 4, 4],
        "token": [5, 5, 7, 7],
        "layer": [0, 1, 0, 1],
        "phase": [1, 1, 1, 1],
    }
    bits = np.zeros((4, 70), bool)
    assert Trace.from_arrays(header(), **rows, bits=bits).n_steps == 2
    with pytest.raises(KairoxError, match=message):
        Trace.from_arrays(header(), **{**rows, **change}, bits=bits)


def test_rows_as_wide_as_the_header_says_and_no_wider(rng, tmp_path):
    trace = from_masks(rng.random((2, 2, 70)) < 0.5)
    for n_neurons in (10, 69, 200):  # 69: same width, but neuron 69 fired
        other = header(2, n_neurons)
        with pytest.raises(KairoxError, match=r"rows of 16 bytes|behind neuron 68"):
            Trace(
                other,
                {n: getattr(trace, n) for n in ("seq", "step", "token", "layer", "phase", "bits")},
            )


# --- the header


def test_the_header_comes_back_from_json():
    full = header(
        n_seqs=2,
        hardware={"cpu": "EPYC", "clock_hz": [3.1e9, math.nan]},
        capacities=(4, 8),
        recorder_overhead=0.02,
        synthetic=True,
        predicted_trigger="attn_in",
    )
    back = TraceHeader.from_json(full.to_json())
    assert back.hardware == {"cpu": "EPYC", "clock_hz": [3.1e9, None]}
    assert full.to_json() == back.to_json()
    assert back.sequences[1] == SequenceInfo(1, "code", "text 1", "sha-1", 100, 150)
    assert TraceHeader.from_json(header().to_json()) == header()  # an unknown overhead is nan again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gating": "none"}, "gating 'none'"),
        ({"n_layers": 0}, "0 layers"),
        ({"n_neurons": 0}, "0 neurons"),
        ({"activation_threshold": math.nan}, "activation_threshold nan"),
        ({"sequences": (SequenceInfo(0, "", "", "", 5, 4),)}, r"spans tokens \[5, 4\)"),
        ({"sequences": (SequenceInfo(-1, "", "", "", 0, 4),)}, "sequence number -1"),
        ({"sequences": (SequenceInfo(1, "", "", "", 0, 4),) * 2}, "lists a sequence twice"),
    ],
)
def test_headers_that_mean_nothing_are_refused(change, message):
    with pytest.raises(KairoxError, match=message):
        header(**change)


def test_json_headers_of_other_versions_or_with_strange_keys_are_refused():
    text = header().to_json()
    with pytest.raises(KairoxError, match="version 2: this release reads version 1"):
        TraceHeader.from_json(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(KairoxError, match=r"unknown keys \['modle'\]"):
        TraceHeader.from_json(text.replace('"model"', '"modle"'))
    with pytest.raises(KairoxError, match="lacks or misspells"):
        TraceHeader.from_json(text.replace('"d_model": 8, ', ""))
    with pytest.raises(KairoxError, match="cannot be written as JSON"):
        header(hardware={"device": object()}).to_json()

"""Traces: what is written comes back, wrong input is refused, and other tools can read the file."""

import math
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import from_masks, header, recording, write

from kairox_sim.errors import KairoxError
from kairox_sim.trace import (
    SequenceInfo,
    Trace,
    TraceHeader,
    TraceWriter,
    pack,
    read_trace,
    seal,
    unpack,
    write_trace,
)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


# --- bits


def test_pack_puts_neuron_i_into_bit_i_mod_8_of_byte_i_div_8():
    mask = np.zeros(70, bool)
    mask[[0, 9, 69]] = True
    packed = pack(mask)
    # 70 neurons are padded to 128: 16 bytes. 69 = 8 * 8 + 5.
    assert packed.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 1 << 5, 0, 0, 0, 0, 0, 0, 0]
    assert np.array_equal(unpack(packed, 70), mask)


@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack_and_padding_is_zero(lead, n, seed):
    mask = np.random.default_rng(seed).random((*lead, n)) < 0.5
    packed = pack(mask)
    assert packed.shape == (*lead, -(-n // 64) * 8)
    assert np.array_equal(unpack(packed, n), mask)
    assert not unpack(packed, packed.shape[-1] * 8)[..., n:].any()


# --- round trip

steps_of_a_run = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=7)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps_of_a_run,
    n_layers=st.integers(1, 4),
    n_neurons=st.integers(1, 150),
    density=st.sampled_from([0.0, 0.2, 1.0]),
    evaluated=st.booleans(),
    trigger=st.sampled_from([None, "attn_out"]),
    steps_per_batch=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_recorded_is_read_back(
    tmp_path_factory, steps, n_layers, n_neurons, density, evaluated, trigger, steps_per_batch, seed
):
    rng = np.random.default_rng(seed)
    made = recording(
        steps,
        rng,
        density=density,
        evaluated=evaluated,
        n_layers=n_layers,
        n_neurons=n_neurons,
        predicted_trigger=trigger,
    )
    path = write(tmp_path_factory.mktemp("trace") / "a.arrow", made, steps_per_batch)
    trace = read_trace(path, strict=True)
    assert trace.header == made.header
    assert (trace.truncated_at, trace.warnings) == (None, ())
    assert trace.n_tokens == sum(n for _, n in steps)
    assert trace.n_steps == len(steps)
    held = {seq: 0 for seq, _ in steps}  # tokens in the KV cache
    expected = iter(made.layer_steps)
    for index, step in enumerate(trace.steps()):
        for layer in range(n_layers):
            want = next(expected)
            if layer == 0:
                held[want.seq] += len(want.tokens)
            assert (step.seq, step.step, step.phase) == (want.seq, 3 * index, want.phase)
            assert step.tokens.tolist() == want.tokens
            assert (step.n_tokens, step.context_len) == (len(want.tokens), held[want.seq])
            _same_set(step.active(layer), step.share(layer), want.active)
            given_evaluated = want.active if want.evaluated is None else want.evaluated
            _same_set(step.evaluated(layer), step.evaluated_share(layer), given_evaluated)
            assert step.last_active(layer).tolist() == np.flatnonzero(want.active[-1]).tolist()
            if want.predicted is None:
                assert step.predicted(layer) is None
                assert step.predicted_share(layer) is None
            else:
                _same_set(step.predicted(layer), step.predicted_share(layer), want.predicted)

    sealed = seal(path, path.with_name("b.arrow"))
    again = read_trace(sealed, strict=True)
    assert again.header == made.header
    assert again.sha256 == trace.sha256
    optional = {n: getattr(trace, n) for n in ("evaluated_bits", "predicted_bits")}
    columns = {n: getattr(trace, n) for n in ("seq", "step", "token", "layer", "phase", "bits")}
    by_hand = Trace.from_arrays(
        made.header, **columns, **optional, predicted_known=trace.predicted_known
    )
    assert by_hand.sha256 == trace.sha256


def _same_set(ids, share, mask):
    assert ids.dtype == np.int32
    assert share.dtype == np.float32
    assert ids.tolist() == np.flatnonzero(mask.any(axis=0)).tolist()
    want = mask.sum(axis=0)[mask.any(axis=0)] / len(mask)
    assert np.allclose(share, want, rtol=1e-6, atol=0)


def test_layers_may_come_in_any_order_and_buffers_may_be_reused(tmp_path, rng):
    made = recording([(0, 3), (0, 1), (0, 1)], rng, n_layers=3)
    plain = read_trace(write(tmp_path / "plain", made))
    buffer = np.zeros((3, made.header.n_bytes), np.uint8)
    with TraceWriter(tmp_path / "shuffled", made.header) as writer:
        for at in range(0, 9, 3):
            for layer in (2, 0, 1):
                arguments = made.layer_steps[at + layer].arguments()
                packed = pack(arguments["active"])
                buffer[: len(packed)] = packed
                writer.append(**{**arguments, "active": buffer[: len(packed)]})
                buffer[:] = 255 if made.header.n_neurons % 64 == 0 else 0
    assert read_trace(tmp_path / "shuffled", strict=True).sha256 == plain.sha256


def test_sha256_covers_every_column(rng):
    masks = rng.random((4, 2, 70)) < 0.5
    base = from_masks(masks)
    assert base.sha256 == from_masks(masks).sha256
    flipped = masks.copy()
    flipped[3, 1, 69] ^= True
    others = [
        from_masks(flipped),
        from_masks(masks, tokens=[0, 1, 2, 4]),
        from_masks(masks, seqs=[0, 0, 0, 1]),
        base.select(steps=[0, 1, 2]),
    ]
    assert len({base.sha256, *(t.sha256 for t in others)}) == 5


def test_arrays_are_read_only(rng):
    trace = from_masks(rng.random((2, 1, 8)) < 0.5)
    with pytest.raises(ValueError, match="read-only"):
        trace.bits[0, 0] = 1


# --- selecting


def test_select_keeps_step_numbers_and_the_context_left_out(rng):
    trace = from_masks(rng.random((6, 2, 9)) < 0.5, seqs=[0, 0, 1, 1, 0, 1])
    part = trace.select(seqs=[1])
    assert [s.seq for s in part.header.sequences] == [1]
    assert [(s.step, s.context_len) for s in part.steps()] == [(2, 1), (3, 2), (5, 3)]
    later = part.select(steps=range(3, 6, 2))
    assert [(s.step, s.context_len) for s in later.steps()] == [(3, 2), (5, 3)]
    for step in later.steps():
        assert step.active(1).tolist() == trace.at(step.step).active(1).tolist()


def test_select_refuses_what_is_not_there(rng):
    trace = from_masks(rng.random((2, 1, 9)) < 0.5)
    with pytest.raises(KairoxError, match=r"no sequences \[4\]"):
        trace.select(seqs=[4])
    with pytest.raises(KairoxError, match=r"no steps \[2, 3\].*numbered 0 to 1"):
        trace.select(steps=[1, 2, 3])


def test_a_layer_or_step_outside_the_trace_is_an_index_error(rng):
    trace = from_masks(rng.random((2, 3, 9)) < 0.5)
    for layer in (-1, 3):
        with pytest.raises(IndexError, match=f"layer {layer} "):
            trace.at(0).active(layer)
    with pytest.raises(IndexError, match="step 2 "):
        trace.at(2)


# --- edges (0 tokens, 1 token, 1 layer; nothing or everything active)


def test_a_trace_of_no_tokens(tmp_path):
    path = tmp_path / "none"
    with TraceWriter(path, header(predicted_trigger="attn_in")):
        pass
    for trace in (read_trace(path, strict=True), read_trace(seal(path), strict=True)):
        assert (trace.n_steps, trace.n_tokens, list(trace.steps())) == (0, 0, [])
        assert trace.bits.shape == (0, 16)
        assert trace.select(seqs=[0]).n_steps == 0


def test_one_token_one_layer_one_neuron(tmp_path, rng):
    made = recording([(0, 1)], rng, n_layers=1, n_neurons=1, density=1.0)
    trace = read_trace(write(tmp_path / "one", made), strict=True)
    assert trace.at(0).active(0).tolist() == [0]
    assert trace.at(0).share(0).tolist() == [1.0]


@pytest.mark.parametrize(("density", "n_active"), [(0.0, 0), (1.0, 70)])
def test_layer_steps_with_nothing_or_everything_active(tmp_path, rng, density, n_active):
    trace = read_trace(write(tmp_path / "t", recording([(0, 4), (0, 1)], rng, density=density)))
    for step in trace.steps():
        assert len(step.active(1)) == len(step.share(1)) == len(step.last_active(1)) == n_active
        assert np.isfinite(step.share(1)).all()


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


# --- sealing


def test_seal_in_place_updates_the_header_and_leaves_nothing_beside(tmp_path, rng):
    path = write(tmp_path / "t", recording([(0, 3), (0, 1)], rng))
    before = read_trace(path)
    assert seal(path, header_updates={"recorder_overhead": 0.04}) == path
    after = read_trace(path, strict=True)
    assert after.header.recorder_overhead == 0.04
    assert after.sha256 == before.sha256
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    with pytest.raises(KairoxError, match=r"no such header fields: \['overhead'\]"):
        seal(path, header_updates={"overhead": 0.04})


def test_a_sealed_file_is_split_into_batches_of_whole_steps(tmp_path, rng, monkeypatch):
    monkeypatch.setattr("kairox_sim.trace.SEALED_BATCH_ROWS", 5)
    trace = read_trace(write(tmp_path / "t", recording([(0, 3)] * 3 + [(0, 1)] * 4, rng)))
    path = write_trace(trace, tmp_path / "sealed")
    with ipc.open_file(path) as file:
        rows = [file.get_batch(i).num_rows for i in range(file.num_record_batches)]
    assert rows == [6, 6, 6, 6, 2]
    assert read_trace(path, strict=True).sha256 == trace.sha256


# --- other tools


@pytest.fixture
def both_containers(tmp_path, rng):
    made = recording([(0, 3), (0, 1), (0, 1)], rng, evaluated=True, predicted_trigger="attn_out")
    stream = write(tmp_path / "stream.arrows", made)
    return made, stream, seal(stream, tmp_path / "sealed.arrow")


def _ids_of(blob: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(blob, np.uint8), bitorder="little")).tolist()


def test_pandas_reads_both_containers(both_containers):
    made, stream, sealed = both_containers
    for table in (ipc.open_stream(stream).read_all(), ipc.open_file(sealed).read_all()):
        frame = table.to_pandas()
        row = frame[(frame.step == 3) & (frame.layer == 1)].iloc[0]
        assert _ids_of(row.bits) == np.flatnonzero(made.layer_steps[3].active[0]).tolist()
        assert _ids_of(row.evaluated) == np.flatnonzero(made.layer_steps[3].evaluated[0]).tolist()
        assert frame[(frame.step == 0) & (frame.layer == 0)].predicted.isna().all()
        assert frame.predicted.notna().sum() == len(frame) - 3
        assert TraceHeader.from_json(table.schema.metadata[b"kairox"].decode()) == made.header


def test_polars_reads_both_containers(both_containers):
    pl = pytest.importorskip("polars")
    made, stream, sealed = both_containers
    for frame in (pl.read_ipc_stream(stream), pl.read_ipc(sealed)):
        row = frame.filter((pl.col("step") == 3) & (pl.col("layer") == 1)).row(0, named=True)
        assert _ids_of(row["bits"]) == np.flatnonzero(made.layer_steps[3].active[0]).tolist()
        assert frame["predicted"].null_count() == 3


def test_duckdb_queries_both_containers(both_containers):
    duckdb = pytest.importorskip("duckdb")
    made, stream, sealed = both_containers
    query = "select bits from rows where step = 3 and layer = 1"
    for table in (ipc.open_stream(stream).read_all(), ipc.open_file(sealed).read_all()):
        with duckdb.connect() as db:
            db.register("rows", table)
            (blob,) = db.execute(query).fetchone()
            (nulls,) = db.execute("select count(*) from rows where predicted is null").fetchone()
        assert _ids_of(blob) == np.flatnonzero(made.layer_steps[3].active[0]).tolist()
        assert nulls == 3


def test_the_checksum_is_the_one_the_format_page_describes(both_containers):
    _, stream, _ = both_containers
    reader = ipc.open_stream(stream)
    seen = 0
    while True:
        try:
            batch, about = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        rows = batch.to_pylist()
        data = b""
        for name, code in zip(("seq", "step", "token", "layer", "phase"), "IIiHB", strict=True):
            data += struct.pack(f"<{len(rows)}{code}", *(row[name] for row in rows))
        for name in ("bits", "evaluated", "predicted"):
            data += b"".join(row[name] or bytes(16) for row in rows)
        data += bytes(row["predicted"] is not None for row in rows)
        assert about[b"kairox.crc32"] == f"{zlib.crc32(data):08x}".encode()
        assert about[b"kairox.batch"] == str(seen).encode()
        assert about[b"kairox.first_step"] == str(rows[0]["step"]).encode()
        assert about[b"kairox.last_step"] == str(rows[-1]["step"]).encode()
        seen += 1
    assert seen == 2


LEAN = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from small_traces import recording, write
from kairox_sim.trace import read_trace, seal
from kairox_sim.trace_stats import trace_stats
made = recording([(0, 2), (0, 1)], np.random.default_rng(0), predicted_trigger="attn_in")
trace = read_trace(seal(write(sys.argv[2], made)))
assert trace_stats(trace).n_tokens == 3
heavy = {"pandas", "pydantic", "simpy", "torch", "matplotlib"} & set(sys.modules)
sys.exit(str(sorted(heavy)) if heavy else 0)
"""


def test_recording_and_reading_need_neither_pandas_nor_pydantic(tmp_path):
    """Not only importing: pyarrow imports pandas inside some of its conversions."""
    command = [sys.executable, "-c", LEAN, str(Path(__file__).parent), str(tmp_path / "t")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_shipped_samples_are_whole_and_described():
    folder = Path(__file__).parent.parent / "traces"
    described = (folder / "README.md").read_text()
    for path in sorted(folder.glob("*.arrow*")):
        trace = read_trace(path, strict=True)
        assert trace.n_tokens > 0
        assert path.name in described

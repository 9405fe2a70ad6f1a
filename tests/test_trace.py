"""Traces: what is written comes back, selected or sealed, and other tools can read the file."""

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow.ipc as ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import from_masks, header, recording, write

from kairox_sim.errors import KairoxError
from kairox_sim.trace import (
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


ROW_COLUMNS = ("seq", "step", "token", "layer", "phase")

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
    columns = {n: getattr(trace, n) for n in (*ROW_COLUMNS, "bits")}
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
        for name, code in zip(ROW_COLUMNS, "IIiHB", strict=True):
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

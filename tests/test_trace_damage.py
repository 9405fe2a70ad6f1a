"""Cut and damaged traces: a cut end loses its last batch and says so; damage is never silent."""

import os
import signal
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from small_traces import recording, write

from kairox_sim.errors import KairoxError
from kairox_sim.trace import TraceHeader, read_trace, seal, write_trace

END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """4 batches of one step each: 3, 1, 2 and 1 tokens."""
    made = recording(
        [(0, 3), (0, 1), (1, 2), (1, 1)],
        np.random.default_rng(3),
        predicted_trigger="attn_out",
        hardware={"cpu": "a made-up one"},
    )
    return write(tmp_path_factory.mktemp("stream") / "t", made, steps_per_batch=1)


@pytest.fixture(scope="module")
def sealed(stream):
    """The same rows and batches in a random-access file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kairox_sim.trace.SEALED_BATCH_ROWS", 1)
        return write_trace(read_trace(stream), stream.with_name("sealed"))


TOKENS_AFTER_BATCH = [0, 3, 4, 6, 7]


def batch_offsets(path):
    """Where each batch begins, and where the end mark is: found by cutting, not by parsing."""
    raw = path.read_bytes()
    probe = path.with_name(path.name + ".probe")
    offsets = []
    for at in range(0, len(raw), 8):
        if raw[at : at + 4] != END_MARK[:4]:
            continue
        probe.write_bytes(raw[:at])
        try:
            kept = read_trace(probe).n_tokens
        except KairoxError:
            continue  # inside the header
        if kept == TOKENS_AFTER_BATCH[len(offsets)]:
            offsets.append(at)
            if len(offsets) == len(TOKENS_AFTER_BATCH):
                break
    assert len(offsets) == 5
    return offsets


def read_bytes(path, raw, **options):
    probe = path.with_name(path.name + ".probe")
    probe.write_bytes(raw)
    return read_trace(probe, **options)


@pytest.mark.parametrize("container", ["stream", "sealed"])
def test_a_cut_at_every_byte_of_the_last_two_batches_keeps_the_valid_prefix(container, request):
    path = request.getfixturevalue(container)
    raw, whole = path.read_bytes(), read_trace(path)
    offsets = batch_offsets(path)
    seen = set()
    footer = range(offsets[4] + len(END_MARK), len(raw), 16)  # none in a stream
    for cut in (*range(offsets[2], min(offsets[4] + len(END_MARK), len(raw))), *footer):
        trace = read_bytes(path, raw[:cut])
        batches = max(i for i, at in enumerate(offsets) if at <= cut)
        kept = TOKENS_AFTER_BATCH[batches]
        assert trace.n_tokens == trace.truncated_at == kept
        (warning,) = trace.warnings
        assert f"truncated at token {kept};" in warning
        assert trace.bits.tobytes() == whole.bits[: 2 * kept].tobytes()
        assert trace.token.tolist() == whole.token[: 2 * kept].tolist()
        seen.add(kept)
    assert seen == {4, 6, 7}


def test_strict_refuses_a_cut_and_accepts_a_whole_trace(stream, sealed):
    for path in (stream, sealed):
        raw = path.read_bytes()
        assert read_bytes(path, raw, strict=True).n_tokens == 7
        for cut in (batch_offsets(path)[2], batch_offsets(path)[3] + 5, len(raw) - 1):
            with pytest.raises(KairoxError, match=r"truncated at token \d.*Strict reading"):
                read_bytes(path, raw[:cut], strict=True)


def test_a_cut_in_the_header_leaves_nothing_to_recover(stream, sealed):
    for path in (stream, sealed):
        raw = path.read_bytes()
        first = batch_offsets(path)[0]
        for cut in (1, 7, 12, first // 2, first - 1):
            with pytest.raises(KairoxError, match="header is cut or damaged"):
                read_bytes(path, raw[:cut])


def test_a_sealed_file_without_its_footer_keeps_every_row_and_says_so(sealed):
    raw, whole = sealed.read_bytes(), read_trace(sealed)
    end = batch_offsets(sealed)[4] + len(END_MARK)
    for damaged in (raw[:end], raw[:-3], raw[: end + 20] + b"\0" * 40 + raw[end + 60 :]):
        trace = read_bytes(sealed, damaged)
        assert (trace.truncated_at, trace.sha256) == (7, whole.sha256)
        assert (
            f"truncated at token 7; the footer of the sealed file, from byte offset {end}"
            in (trace.warnings[0])
        )
        with pytest.raises(KairoxError, match="Strict reading"):
            read_bytes(sealed, damaged, strict=True)


@pytest.mark.parametrize("container", ["stream", "sealed"])
def test_nuls_in_the_middle_are_an_error_that_names_the_batch(container, request):
    path = request.getfixturevalue(container)
    raw, offsets = path.read_bytes(), batch_offsets(path)
    for start, stop in pairwise(offsets):
        for at in (start, start + 3, start + 8, (start + stop) // 2, stop - 1):
            inserted = raw[:at] + bytes(4096) + raw[at:]
            overwritten = raw[:at] + bytes(512) + raw[at + 512 :]
            for damaged in (inserted, overwritten) if at + 512 < offsets[3] else (inserted,):
                # Batches end in zero padding, so the damage may begin a little behind `at`.
                first = next(i for i, byte in enumerate(damaged) if byte != raw[i])
                batch = max(offset for offset in offsets if offset <= first)
                with pytest.raises(KairoxError, match=f"byte offset {batch}:"):
                    read_bytes(path, damaged)


def test_damage_in_the_middle_of_a_recording_without_an_end_is_damage_too(stream):
    raw, offsets = stream.read_bytes(), batch_offsets(stream)
    for stop in (offsets[4], offsets[3], offsets[4] + 3):  # killed here
        for count in (4096, 4099):  # what follows may be out of step with 8-byte alignment
            damaged = raw[: offsets[1] + 40] + bytes(count) + raw[offsets[1] + 40 : stop]
            with pytest.raises(KairoxError, match=f"byte offset {offsets[1]}:"):
                read_bytes(stream, damaged)


def test_nuls_that_replace_the_end_are_a_cut(stream):
    """What a power cut leaves: the file has its length, its last blocks were never written."""
    raw, offsets = stream.read_bytes(), batch_offsets(stream)
    for at in (offsets[3], offsets[3] + 11, offsets[3] + 300):
        trace = read_bytes(stream, raw[:at] + bytes(4096))
        assert trace.truncated_at == 6
    assert read_bytes(stream, raw[: offsets[4]] + bytes(4096)).truncated_at == 7


def test_bytes_after_the_end_lose_nothing_but_are_mentioned(stream):
    raw = stream.read_bytes()
    trace = read_bytes(stream, raw + bytes(4096))
    assert (trace.truncated_at, trace.n_tokens) == (None, 7)
    assert "4096 bytes after the end mark" in trace.warnings[0]
    with pytest.raises(KairoxError, match="Strict reading"):
        read_bytes(stream, raw + bytes(4096), strict=True)


def test_two_recordings_in_one_file_are_refused(stream):
    raw = stream.read_bytes()
    with pytest.raises(KairoxError, match="two recordings put in one file"):
        read_bytes(stream, raw + raw)


def test_a_batch_that_is_missing_repeated_or_moved_is_an_error(stream):
    raw, offsets = stream.read_bytes(), batch_offsets(stream)
    first, second, third, *rest = [raw[a:b] for a, b in pairwise(offsets)]
    head, tail = raw[: offsets[0]], b"".join(rest) + END_MARK
    for batches in (first + third, first + second + second + third, second + first + third):
        with pytest.raises(KairoxError, match=r"batch \d was due"):
            read_bytes(stream, head + batches + tail)


@pytest.mark.parametrize("container", ["stream", "sealed"])
def test_no_flipped_bit_gives_other_rows_in_silence(container, request):
    """A flipped bit: an error, a cut that says so, or, in padding, the same trace."""
    path = request.getfixturevalue(container)
    raw, whole = path.read_bytes(), read_trace(path)
    outcomes = dict.fromkeys(("error", "cut", "same"), 0)
    flips = range(0, len(raw), 3 if container == "stream" else 7)
    for at in flips:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at // 3 % 8)
        try:
            trace = read_bytes(path, bytes(damaged))
        except KairoxError:
            outcomes["error"] += 1
            continue
        assert trace.header == whole.header
        if trace.truncated_at is None:
            assert trace.sha256 == whole.sha256
            outcomes["same"] += 1
        else:
            rows = 2 * trace.truncated_at
            assert trace.bits.tobytes() == whole.bits[:rows].tobytes()
            outcomes["cut"] += 1
    assert outcomes["error"] > 0.5 * len(flips)
    assert outcomes["cut"] > 0


def test_sealing_a_cut_recording_keeps_saying_where_it_was_cut(stream, tmp_path):
    raw = stream.read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(raw[: batch_offsets(stream)[3] + 9])
    trace = read_trace(seal(cut))
    assert (trace.n_tokens, trace.truncated_at) == (6, 6)
    assert "truncated at token 6: its recording was stopped there" in trace.warnings[0]
    with pytest.raises(KairoxError, match="Strict reading"):
        read_trace(cut, strict=True)
    assert read_trace(seal(cut)).truncated_at == 6  # sealing twice hides nothing


def test_a_damaged_header_checksum_is_told_apart_from_a_foreign_file(stream):
    raw = stream.read_bytes()
    text = read_trace(stream).header.to_json().encode()
    other = text.replace(b"a made-up one", b"a made-up two")
    assert TraceHeader.from_json(other.decode()) != read_trace(stream).header
    with pytest.raises(KairoxError, match="header at byte offset 0 does not match its checksum"):
        read_bytes(stream, raw.replace(text, other))


KILLED = """
import os, sys, signal
import numpy as np
sys.path.insert(0, sys.argv[1])
from small_traces import recording
from kairox_sim.trace import TraceWriter
made = recording([(0, 1)] * 40, np.random.default_rng(0))
writer = TraceWriter(sys.argv[2], made.header, steps_per_batch=8)
for number, row in enumerate(made.layer_steps):
    writer.append(**row.arguments())
    if number == 2 * 27:  # in the middle of step 27: 24 steps are acknowledged
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on Windows")
def test_a_killed_recording_keeps_every_acknowledged_batch(tmp_path):
    tests = os.path.dirname(__file__)
    command = [sys.executable, "-c", KILLED, tests, str(tmp_path / "t")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    trace = read_trace(tmp_path / "t")
    assert (trace.n_steps, trace.truncated_at) == (24, 24)
    want = recording([(0, 1)] * 40, np.random.default_rng(0))
    for step, row in zip(trace.steps(), want.layer_steps[::2], strict=False):
        assert step.active(0).tolist() == np.flatnonzero(row.active[0]).tolist()

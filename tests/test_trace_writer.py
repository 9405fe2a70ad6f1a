"""Steps written whole or layer by layer, and when they are in the file."""

import numpy as np
import pytest
from small_traces import header

from kairox_sim.errors import KairoxError
from kairox_sim.trace import TraceWriter, pack, read_trace
from kairox_sim.trace_file import ContainerWriter


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_whole_steps_are_written_as_layer_by_layer(tmp_path, rng):
    about = header(n_layers=2, n_neurons=70)
    masks = rng.random((3, 2, 2, 70)) < 0.3  # step, layer, token
    files = tmp_path / "steps.arrow", tmp_path / "layers.arrow"
    with TraceWriter(files[0], about) as steps, TraceWriter(files[1], about) as layers:
        for step, mask in enumerate(masks):
            place = {"seq": 0, "step": step, "phase": "prefill", "tokens": [3, 4]}
            steps.append_step(**place, active=pack(mask))
            for layer in range(2):
                layers.append(**place, layer=layer, active=mask[layer])
    assert read_trace(files[0], strict=True).sha256 == read_trace(files[1], strict=True).sha256


@pytest.mark.parametrize("in_steps", [True, False])
def test_steps_of_any_length_share_a_batch(tmp_path, rng, in_steps):
    about = header(n_layers=3, n_neurons=70)
    lengths = [4, 1, 1, 3, 1]
    masks = [rng.random((3, n, 70)) < 0.3 for n in lengths]
    want_tokens, want_layers, want_steps = [], [], []
    with TraceWriter(tmp_path / "t.arrow", about, steps_per_batch=4) as writer:
        for step, mask in enumerate(masks):
            n = mask.shape[1]
            tokens = [10 * step + i for i in range(n)]
            phase = "decode" if n == 1 else "prefill"
            place = {"seq": 0, "step": step, "phase": phase, "tokens": tokens}
            if in_steps:
                writer.append_step(**place, active=pack(mask))
            else:
                for layer in (2, 0, 1):  # they are stored in order
                    writer.append(**place, layer=layer, active=mask[layer])
            want_tokens += tokens * 3
            want_layers += [layer for layer in range(3) for _ in range(n)]
            want_steps += [step] * 3 * n
    trace = read_trace(tmp_path / "t.arrow", strict=True)
    assert trace.token.tolist() == want_tokens
    assert trace.layer.tolist() == want_layers
    assert trace.step.tolist() == want_steps
    assert trace.phase.tolist() == [0] * 12 + [1] * 6 + [0] * 9 + [1] * 3
    assert np.array_equal(trace.bits, np.concatenate([pack(m).reshape(-1, 16) for m in masks]))


def test_what_was_flushed_is_in_the_file(tmp_path):
    about = header(n_layers=1, n_neurons=70)
    with TraceWriter(tmp_path / "t.arrow", about, steps_per_batch=100) as writer:
        for step in range(5):
            none = np.zeros((1, 1, 16), np.uint8)
            writer.append_step(seq=0, step=step, phase="decode", tokens=[3], active=none)
            if step == 2:
                writer.flush()
        kept = tmp_path / "killed.arrow"
        kept.write_bytes((tmp_path / "t.arrow").read_bytes())
        writer.flush()
        writer.flush()  # there is nothing left
    assert read_trace(kept).n_steps == read_trace(kept).truncated_at == 3
    assert read_trace(tmp_path / "t.arrow", strict=True).n_steps == 5


def test_whole_steps_that_do_not_fit_are_refused(tmp_path):
    about = header(n_layers=2, n_neurons=70)
    none = np.zeros((2, 1, 16), np.uint8)
    place = {"seq": 0, "step": 0, "phase": "decode", "tokens": [3]}
    with TraceWriter(tmp_path / "t.arrow", about) as writer:
        with pytest.raises(KairoxError, match="for 2 layers of 1 tokens"):
            writer.append_step(**place, active=none[:1])
        with pytest.raises(KairoxError, match="bits set behind neuron 69"):
            writer.append_step(**place, active=np.full_like(none, 255))
        writer.append_step(**place, active=none)
        with pytest.raises(KairoxError, match="step numbers must grow"):
            writer.append_step(**place, active=none)
        writer.append(**place | {"step": 1}, layer=0, active=np.zeros((1, 70), bool))
        with pytest.raises(KairoxError, match="layer by layer"):
            writer.append_step(**place | {"step": 1}, active=none)
        writer.append(**place | {"step": 1}, layer=1, active=np.zeros((1, 70), bool))
    with pytest.raises(KairoxError, match="closed"):
        writer.append_step(**place | {"step": 2}, active=none)


def test_a_batch_that_failed_is_not_written_again(tmp_path, monkeypatch):
    """As on a disk that was full: what came before is read, and half a batch is a cut."""
    about = header(n_layers=1, n_neurons=70)
    place = {"seq": 0, "phase": "decode", "tokens": [3], "active": np.zeros((1, 1, 16), np.uint8)}
    write = ContainerWriter.write

    def half(self, columns):
        write(self, columns)
        self._file.truncate(self._file.tell() - 40)
        self._file.seek(0, 2)
        raise OSError(28, "No space left on device")

    writer = TraceWriter(tmp_path / "t.arrow", about, steps_per_batch=2)
    for step in range(3):
        writer.append_step(step=step, **place)
    monkeypatch.setattr(ContainerWriter, "write", half)
    with pytest.raises(OSError, match="No space left"):
        writer.append_step(step=3, **place)
    monkeypatch.setattr(ContainerWriter, "write", write)
    writer.abandon()
    trace = read_trace(tmp_path / "t.arrow")
    assert trace.n_steps == trace.truncated_at == 2

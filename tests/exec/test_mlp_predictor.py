"""Hidden states beside a trace, and the predictor that is trained on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kairox_exec.families import family_of, hook_layer
from kairox_exec.hidden_states import AFTER_ATTENTION, ENTERING, HiddenStates, read_hidden_states
from kairox_exec.loading import load_dense
from kairox_exec.mlp_predictor import LayerNet, MlpPredictor, PredictorInfo, load_predictor
from kairox_exec.predictor_judging import evaluate
from kairox_exec.predictor_training import active_of, apart, train
from kairox_exec.recording import record
from kairox_exec.text import encode_file, load_tokenizer
from kairox_sim.errors import KairoxError
from kairox_sim.trace import Trace, read_trace

Recorded = tuple[Trace, HiddenStates]


def _record(model: Path, text: Path, folder: Path, name: str, **how: object) -> Recorded:
    path = record(model, text, folder / f"{name}.arrow", hidden=folder / f"{name}.hidden", **how)  # type: ignore[arg-type]
    return read_trace(path), read_hidden_states(folder / f"{name}.hidden")


@pytest.fixture(scope="module")
def recorded(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recorded, Recorded]:
    """What is learnt from, and other tokens of the same text."""
    folder, text = tmp_path_factory.mktemp("states"), prompts_dir / "prose.txt"
    return (
        _record(tiny_reglu_dir, text, folder, "train", tokens=1024, skip=2048, prefill=250),
        _record(tiny_reglu_dir, text, folder, "eval", tokens=256, prefill=250),
    )


@pytest.mark.parametrize("trigger", ["attn_out", "attn_in"])
def test_states_are_those_of_the_dense_model(
    tiny_reglu_dir: Path, prompts_dir: Path, tmp_path: Path, trigger: str
) -> None:
    text = prompts_dir / "code.txt"
    trace, hidden = _record(
        tiny_reglu_dir, text, tmp_path, "run", tokens=20, prefill=12, trigger=trigger
    )
    model, config = load_dense(tiny_reglu_dir)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        hook_layer(
            layer, family_of(config),
            entering=lambda h, i=i: seen.__setitem__((i, ENTERING), h[0]),
            after_attention=lambda h, i=i: seen.__setitem__((i, AFTER_ATTENTION), h[0]),
        )  # fmt: skip
    ids = encode_file(text, load_tokenizer(tiny_reglu_dir)).token_ids[:20]
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(ids.astype("int64"))[None])
    assert hidden.n_tokens == trace.n_tokens == 20
    for layer in range(1, 6):
        at = AFTER_ATTENTION if trigger == "attn_out" else ENTERING
        theirs = seen[layer - 1, at].half().float()
        ours = torch.from_numpy(hidden.fed_to(layer).astype(np.float32))
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    own = torch.from_numpy(hidden.fed_to(0).astype(np.float32))
    torch.testing.assert_close(own, seen[0, AFTER_ATTENTION].half().float(), rtol=2e-3, atol=2e-3)


def test_training_reaches_its_recall_on_other_tokens(recorded: tuple[Recorded, Recorded]) -> None:
    learnt_from, other = recorded
    low, high = (train(*learnt_from, rank=48, recall=recall, epochs=6) for recall in (0.7, 0.95))
    for predictor, target in ((low, 0.7), (high, 0.95)):
        rows = evaluate(predictor, *other).layers
        recall = np.mean([row.recall for row in rows])
        assert abs(recall - target) < 0.06
        # Better than guessing: guesses are right as often as neurons fire.
        assert all(row.precision > 1.1 * row.density for row in rows)
    assert (
        evaluate(low, *other).layers[3].predicted_share
        < evaluate(high, *other).layers[3].predicted_share
    )
    moved = high.shifted(1.0)
    assert evaluate(moved, *other).layers[2].recall < evaluate(high, *other).layers[2].recall


def test_what_was_trained_on_is_no_test(recorded: tuple[Recorded, Recorded]) -> None:
    learnt_from, (trace, hidden) = recorded
    predictor = train(*learnt_from, rank=8, epochs=1)
    with pytest.raises(KairoxError, match=r"were trained on.* \(of this text the last is \d+\)"):
        evaluate(predictor, *learnt_from)
    with pytest.raises(KairoxError, match="different models or texts"):
        train(trace, learnt_from[1])
    lossy = Trace.from_arrays(
        replace(trace.header, complete=False), seq=trace.seq, step=trace.step, token=trace.token,
        layer=trace.layer, phase=trace.phase, bits=trace.bits,
    )  # fmt: skip
    with pytest.raises(KairoxError, match="does not hold every active neuron"):
        train(lossy, hidden)
    with pytest.raises(KairoxError, match=r"recall 1\.5"):
        train(*learnt_from, recall=1.5)


def _made(d: int = 4, n: int = 6, layers: int = 2) -> MlpPredictor:
    g = torch.Generator().manual_seed(0)
    nets = tuple(
        LayerNet(
            torch.randn((3, d), generator=g).half().float(), torch.zeros(3),
            torch.randn((n, 3), generator=g).half().float(), torch.zeros(n),
        )
        for _ in range(layers)
    )  # fmt: skip
    info = PredictorInfo("m", "a" * 64, "attn_out", 3, 0.9, (0.0,) * layers, (("b" * 64, 0, 9),))
    return MlpPredictor(info, nets)


def test_a_prediction_by_hand() -> None:
    net = LayerNet(
        torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2),
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, -0.5]),
    )  # fmt: skip
    made = _made()
    info = replace(made.info, thresholds=(0.1,))
    predictor = MlpPredictor(info, (net,))
    # (3, 4) / sqrt(12.5): (0.849, 1.131); outputs (0.849, -0.5)
    assert predictor.predict(0, torch.tensor([3.0, 4.0])).tolist() == [[True, False]]
    assert predictor.predict(0, torch.tensor([[-3.0, 4.0]])).tolist() == [[False, True]]
    # Scale of the state plays no part.
    assert predictor.predict(0, torch.tensor([300.0, 400.0])).tolist() == [[True, False]]


def test_a_file_gives_the_same_predictor_back(tmp_path: Path) -> None:
    made = _made()
    path = made.save(tmp_path / "p.safetensors")
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode
    back = load_predictor(path, model_sha256="a" * 64, n_layers=2, n_neurons=6)
    assert back.info == made.info
    x = torch.randn((5, 4), generator=torch.Generator().manual_seed(1))
    assert torch.equal(back.predict(1, x), made.predict(1, x))
    for wrong in ({"model_sha256": "c" * 64}, {"n_layers": 3}, {"n_neurons": 7}):
        with pytest.raises(KairoxError, match="train one for this model"):
            load_predictor(path, **wrong)  # type: ignore[arg-type]


def test_files_that_are_no_predictors(tmp_path: Path, tiny_reglu_dir: Path) -> None:
    path = _made().save(tmp_path / "p.safetensors")
    data = path.read_bytes()
    for cut in (3, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(KairoxError, match="cannot read the predictor"):
            load_predictor(path)
    with pytest.raises(KairoxError, match="no predictor"):
        load_predictor(tmp_path / "none")
    with pytest.raises(KairoxError, match="is no predictor"):
        load_predictor(tiny_reglu_dir / "model.safetensors")


def test_a_target_of_each_layer_is_kept(
    recorded: tuple[Recorded, Recorded], tmp_path: Path
) -> None:
    learnt_from, other = recorded
    targets = (0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
    predictor = train(*learnt_from, rank=32, recall=targets, epochs=3)
    assert load_predictor(predictor.save(tmp_path / "p")).info.recall_target == targets
    layers = evaluate(predictor, *other).layers
    assert [row.recall_target for row in layers] == list(targets)
    assert all(abs(row.recall - row.recall_target) < 0.12 for row in layers)
    with pytest.raises(KairoxError, match="one for each of the 6"):
        train(*learnt_from, recall=(0.9, 0.8))


def test_thresholds_hold_on_the_tokens_that_were_kept_apart(
    recorded: tuple[Recorded, Recorded],
) -> None:
    """Exactly: the share of active neurons above it; a little higher would not do."""
    (trace, hidden), _ = recorded
    predictor = train(trace, hidden, rank=16, recall=0.9, epochs=1)
    assert int(0.2 * trace.n_tokens) == 204
    for layer in range(6):
        active = active_of(trace, layer)[-204:]
        states = torch.from_numpy(hidden.fed_to(layer)[-204:].copy())
        assert (predictor.predict(layer, states).numpy() & active).sum() >= 0.9 * active.sum()
        higher = predictor.shifted(0.05).predict(layer, states).numpy()
        assert (higher & active).sum() < 0.9 * active.sum()


def test_every_text_chooses_thresholds(recorded: tuple[Recorded, Recorded]) -> None:
    (trace, _), _ = recorded
    sequences = trace.header.sequences
    texts = tuple(replace(s, source_sha256=f"{s.seq // 2}" * 64) for s in sequences)
    other = Trace.from_arrays(
        replace(trace.header, sequences=texts), seq=trace.seq, step=trace.step, token=trace.token,
        layer=trace.layer, phase=trace.phase, bits=trace.bits,
    )  # fmt: skip
    kept = apart(other).reshape(len(sequences), -1)  # windows of one length
    of_text = [int(kept[i : i + 2].sum()) for i in range(0, len(sequences), 2)]
    assert of_text == [int(0.2 * 2 * kept.shape[1])] * (len(sequences) // 2)
    assert kept[:, 0].sum() == 0  # the last ones of each
    assert kept[1::2, -1].all()


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _made().save(tmp_path / "p.safetensors")
    before = path.read_bytes()

    def stopped(_tensors: object, to: Path, **_how: object) -> None:
        Path(to).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        _made(n=7).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "about", ["{", "[]", "{}", '{"format": 1}', '{"format": 1, "seen": 3}', '{"format": 7}']
)
def test_a_predictor_that_does_not_say_what_it_is(tmp_path: Path, about: str) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "p", metadata={"kairox.predictor": about})
    with pytest.raises(KairoxError, match=r"is damaged|another version"):
        load_predictor(tmp_path / "p")

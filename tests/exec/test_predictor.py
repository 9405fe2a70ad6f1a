"""The look-ahead: what it computes, how well it does on a real model, and how that is counted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from kairox_exec.families import Family, decoder_layers, family_of, fires
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.kernels import numba_cpu
from kairox_exec.loading import load_dense
from kairox_exec.predictor import (
    LayerGate,
    LayerRecall,
    RecallTally,
    gates_of,
    predict,
    recall_table,
)
from kairox_exec.text import encode_file, load_tokenizer
from kairox_exec.weights import bundle_model


def states(
    model: nn.Module, family: Family, ids: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Per layer of one forward pass: state entering it, input of its FFN norm, who fires."""
    entering, before_ffn, active = [], [], []
    hooks = []
    for layer in decoder_layers(model, family):
        hooks += [
            layer.register_forward_pre_hook(
                lambda _m, args, kwargs: entering.append(
                    (args[0] if args else kwargs["hidden_states"]).clone()
                ),
                with_kwargs=True,
            ),
            layer.get_submodule(family.ffn_norm).register_forward_pre_hook(
                lambda _m, args: before_ffn.append(args[0].clone())
            ),
            layer.get_submodule(family.gate).register_forward_hook(
                lambda _m, _args, out: active.append(fires(out.reshape(-1, out.shape[-1]), 0.0))
            ),
        ]
    with torch.inference_mode():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return entering, before_ffn, active


@pytest.mark.parametrize("which", ["tiny_reglu_dir", "tiny_opt_dir"])
@pytest.mark.parametrize("gating", ["exact", "predicted"])
def test_on_its_own_layers_state_the_look_ahead_is_the_truth(
    which: str, gating: str, request: pytest.FixtureRequest
) -> None:
    model, config = load_dense(request.getfixturevalue(which))
    family = family_of(config)
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    _, before_ffn, active = states(model, family, ids)
    gates = gates_of(model, family, bundle_model(model, family, gating=gating, threshold=0.0))
    for gate, hidden, truth in zip(gates, before_ffn, active, strict=True):
        assert torch.equal(predict(gate, hidden), truth)
        assert truth.any()
        assert not truth.all()


@pytest.mark.parametrize("trigger", ["attn_out", "attn_in"])
def test_recall_on_tiny_reglu_is_clearly_above_chance(
    trigger: str, tiny_reglu_dir: Path, prompts_dir: Path
) -> None:
    """Chance: predicting as many neurons at random recalls their share of all neurons."""
    model, config = load_dense(tiny_reglu_dir)
    family = family_of(config)
    text = encode_file(prompts_dir / "prose.txt", load_tokenizer(tiny_reglu_dir))
    ids = torch.from_numpy(text.token_ids[:256]).long()
    entering, before_ffn, active = states(model, family, ids)
    gates = gates_of(model, family, bundle_model(model, family, gating="exact", threshold=0.0))
    tally = RecallTally(len(gates))
    source = before_ffn if trigger == "attn_out" else entering
    for layer in range(1, len(gates)):
        tally.add(layer, predict(gates[layer], source[layer - 1]), active[layer])

    rows = tally.table()
    assert (rows[0].predicted, rows[0].active) == (0, 0)
    for row in rows[1:]:
        chance = row.predicted / (256 * 896)
        assert row.recall > chance + 0.05, row
    for row in rows[2:]:
        chance = row.predicted / (256 * 896)
        assert row.recall > 5 * chance, row
        assert row.precision > 0.3, row


def test_predict_by_hand() -> None:
    """Norm doubles; gates 2x0 - 1 and 2x1 - 1 and 0 - 1; fires above 0.5."""
    gate = LayerGate(
        norm=lambda x: 2 * x,
        gate_w=torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
        gate_b=torch.tensor([-1.0, -1.0, -1.0]),
        spec=FfnSpec(2, False, "relu", 0.5, "float32"),
    )
    hidden = torch.tensor([[[1.0, 0.5], [0.75, 2.0]]])  # [1, 2 tokens, 2]
    assert predict(gate, hidden).tolist() == [[True, False, False], [False, True, False]]
    assert torch.equal(predict(gate, hidden, numba_cpu), predict(gate, hidden))


def test_tally_by_hand() -> None:
    tally = RecallTally(3)
    predicted = torch.tensor([[True, True, False, False], [True, False, False, False]])
    active = torch.tensor([[True, False, True, True], [True, False, False, False]])
    tally.add(1, predicted, active)
    tally.add(1, predicted[:1], active[:1])
    tally.add(2, torch.zeros(1, 4, dtype=torch.bool), active[:1])
    rows = tally.table()
    assert rows[1] == LayerRecall(layer=1, predicted=5, active=7, predicted_active=3)
    assert rows[1].recall == 3 / 7
    assert rows[1].precision == 3 / 5
    assert rows[2].recall == 0.0
    assert math.isnan(rows[2].precision)
    assert math.isnan(rows[0].recall)
    assert recall_table(rows).splitlines() == [
        "layer  recall  precision  predicted  active",
        "    0       -          -          0       0",
        "    1   0.429      0.600          5       7",
        "    2   0.000        nan          0       3",
    ]


def test_tally_refuses_masks_of_different_tokens() -> None:
    with pytest.raises(ValueError, match="same tokens"):
        RecallTally(1).add(0, torch.zeros(2, 4).bool(), torch.zeros(1, 4).bool())

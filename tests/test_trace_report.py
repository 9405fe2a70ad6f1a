"""What a recording says at a glance, by hand."""

from __future__ import annotations

from math import isnan

import numpy as np

from kairox_sim.trace import SequenceInfo, Trace, TraceHeader
from kairox_sim.trace_report import by_domain, predictions


def _trace(n_tokens: int = 3) -> Trace:
    """2 layers x 5 neurons; token t is sequence t, fires {0..t} in layer 0 and {4} in layer 1.

    Predicted is known in layer 1 alone: {4} for token 0, {0, 4} for token 1, {} for token 2.
    """
    header = TraceHeader(
        model="m", model_sha256="0", n_layers=2, n_neurons=5, d_model=4, activation="relu",
        activation_threshold=0.0, gating="exact", complete=True, tokenizer_sha256="0",
        sequences=tuple(
            SequenceInfo(i, domain, "s", "h", 0, 1, generated=domain == "b")
            for i, domain in enumerate("aba")
        ),
        predicted_trigger="attn_out",
    )  # fmt: skip
    bits = np.zeros((2 * n_tokens, 5), bool)
    predicted = np.zeros_like(bits)
    for t in range(n_tokens):
        bits[2 * t, : t + 1] = True
        bits[2 * t + 1, 4] = True
        predicted[2 * t + 1, [[4], [0, 4], []][t]] = True
    layer = np.tile([0, 1], n_tokens)
    return Trace.from_arrays(
        header,
        seq=np.repeat(np.arange(n_tokens), 2),
        step=np.repeat(np.arange(n_tokens), 2),
        token=np.zeros(2 * n_tokens),
        layer=layer,
        phase=np.ones(2 * n_tokens),
        bits=bits,
        predicted_bits=predicted,
        predicted_known=layer == 1,
    )


def test_domains_in_order_of_appearance() -> None:
    a, b = by_domain(_trace())
    assert (a.domain, a.sequences, a.tokens, a.generated) == ("a", 2, 2, False)
    assert (b.domain, b.sequences, b.tokens, b.generated) == ("b", 1, 1, True)
    assert a.density == ((1 + 1) + (3 + 1)) / (4 * 5)  # rows of tokens 0 and 2
    assert b.density == (2 + 1) / (2 * 5)


def test_predictions_count_only_what_was_predicted() -> None:
    first, second = predictions(_trace())
    assert (first.rows, second.rows) == (0, 3)
    assert isnan(first.recall)
    assert isnan(first.precision)
    assert second.recall == 2 / 3  # of three active ones
    assert second.precision == 2 / 3  # of three predicted ones


def test_nothing_recorded_is_unknown() -> None:
    a, b = by_domain(_trace(0))
    assert (a.tokens, b.tokens) == (0, 0)
    assert isnan(a.density)
    assert all(isnan(row.recall) and row.rows == 0 for row in predictions(_trace(0)))


def test_no_predicted_column_no_rows() -> None:
    whole = _trace()
    plain = Trace.from_arrays(
        whole.header, seq=whole.seq, step=whole.step, token=whole.token, layer=whole.layer,
        phase=whole.phase, bits=whole.bits,
    )  # fmt: skip
    assert predictions(plain) == []

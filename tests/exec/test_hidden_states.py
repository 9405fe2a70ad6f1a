"""Files of hidden states: cut, damaged, and of models whose states are broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_exec.hidden_states import HiddenStates, read_hidden_states
from kairox_exec.recording import record
from kairox_sim.errors import KairoxError

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def file(tiny_reglu_dir: Path, prompts_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tokens, of which four are a prefill: five steps."""
    folder = tmp_path_factory.mktemp("hidden")
    record(
        tiny_reglu_dir, prompts_dir / "math.txt", folder / "w.arrow", tokens=8, prefill=4,
        hidden=folder / "w.hidden",
    )  # fmt: skip
    return folder / "w.hidden"


@pytest.fixture(scope="module")
def whole(file: Path) -> HiddenStates:
    return read_hidden_states(file)


@given(share=st.floats(0.3, 1.0))
def test_a_cut_file_keeps_its_whole_steps(
    file: Path, whole: HiddenStates, tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    data = file.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut"
    path.write_bytes(data[: int(len(data) * share)])
    try:
        cut = read_hidden_states(path)
    except KairoxError as error:
        assert "holds no whole step" in str(error)  # noqa: PT017
        return
    assert 4 <= cut.n_tokens <= whole.n_tokens == 8
    for key, states in cut.states.items():
        assert np.array_equal(states, whole.states[key][: cut.n_tokens])


def _changed(
    file: Path,
    to: Path,
    *,
    row: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda row: row,
    header: Callable[[dict[str, Any]], Any] = lambda header: header,
) -> Path:
    """The file with its rows (None: left out) and its header changed."""
    with file.open("rb") as source:
        reader = pa.ipc.open_stream(source)
        schema, steps = reader.schema, [batch.to_pylist() for batch in reader]
    about = json.dumps(header(json.loads(schema.metadata[b"kairox.hidden"])))
    schema = schema.with_metadata({"kairox.hidden": about})
    with to.open("wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for step in steps:
            kept = [new for old in step if (new := row(old)) is not None]
            stream.write_batch(pa.RecordBatch.from_pylist(kept, schema=schema))
    return to


def _nan_in(layer: int, step: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        if (row["layer"], row["step"]) != (layer, step):
            return row
        state = np.frombuffer(row["state"], np.float16).copy()
        state[3] = np.nan
        return row | {"state": state.tobytes()}

    return change


def test_changing_nothing_changes_nothing(file: Path, whole: HiddenStates, tmp_path: Path) -> None:
    same = read_hidden_states(_changed(file, tmp_path / "same"))
    assert same.header == whole.header
    assert all(np.array_equal(same.states[key], whole.states[key]) for key in whole.states)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row": _nan_in(2, 3)}, r"NaN in the states fed to layer 3, first of token 6, 1 tokens"),
        ({"row": lambda row: None if row["layer"] == 1 else row}, r"damaged: 0 states of 8 .* 2"),
        (
            {"row": lambda row: None if (row["layer"], row["step"]) == (4, 2) else row},
            r"damaged: 7 states of 8 tokens for layer 5",
        ),
        ({"row": lambda row: None}, "holds no whole step"),
        ({"header": lambda about: about | {"format": 2}}, "another version"),
        ({"header": lambda about: about | {"trigger": "after"}}, "trigger 'after'"),
        ({"header": lambda about: about | {"d_model": 7}}, "d_model 7 of states of 384 bytes"),
        ({"header": lambda about: about | {"sequences": [{}]}}, "header .* is damaged"),
        ({"header": lambda about: about | {"more": 1}}, "header .* is damaged"),
        ({"header": lambda about: []}, "header .* is damaged"),
    ],
)
def test_what_is_wrong_with_a_file(
    file: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(KairoxError, match=says):
        read_hidden_states(_changed(file, tmp_path / "changed", **change))


def test_files_that_hold_no_hidden_states(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"not arrow")
    with pytest.raises(KairoxError, match="cannot read the hidden states"):
        read_hidden_states(tmp_path / "other")
    with pytest.raises(KairoxError, match="cannot read the hidden states"):
        read_hidden_states(tmp_path / "none")
    with pytest.raises(KairoxError, match="cannot read the hidden states"):
        read_hidden_states(file.with_name("w.arrow"))  # a trace

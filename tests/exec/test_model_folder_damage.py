"""Model folders whose JSON is not what it should be: one message, never another program's error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kairox_exec.checkpoint import INDEX, open_checkpoint
from kairox_exec.live import set_threads, start
from kairox_exec.live_device import device_for
from kairox_exec.loading import load_bundled, load_dense, read_config
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings
from tests.exec.tiny_families import save_tiny

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mistral", tmp_path_factory.mktemp("damage") / "mistral")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def _config(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, r"config\.json"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1.0}}, r"config\.json.*foo"),
        ({"text_config": {"hidden_size": 32}}, r"config\.json"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 .*up to 1000"),
    ],
    ids=["yarn", "unknown-rope", "nested", "layers"],
)
def test_configs_of_no_model(model: Path, changes: dict[str, Any], says: str) -> None:
    _config(model, **changes)
    for load in (load_dense, load_bundled):
        with pytest.raises(KairoxError, match=says):
            load(model)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}"], ids=["deep", "long"]
)
def test_configs_that_json_gives_up_on(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(KairoxError, match="is not JSON"):
        read_config(model)


def test_a_byte_order_mark_is_no_part_of_a_config(model: Path) -> None:
    path = model / "config.json"
    plain = read_config(model)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_config(model) == plain


@pytest.mark.parametrize("file", [1, None, "../model.safetensors", "/etc/passwd", "a/b"])
def test_an_index_names_files_of_its_folder(model: Path, file: Any) -> None:
    (model / "model.safetensors").rename(model / "other.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(KairoxError, match=r"is not an index of safetensors.*same folder"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "said",
    [
        {"dtype": 5, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
    ],
)
def test_headers_hold_whole_numbers(model: Path, said: dict[str, Any]) -> None:
    header = json.dumps({"a": said}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(KairoxError, match="its header is not safetensors'"):
        open_checkpoint(model)


def test_dtypes_and_threads_that_are_none(model: Path) -> None:
    with pytest.raises(KairoxError, match="unknown dtype 'x'; allowed: float32, bfloat16, float16"):
        load_dense(model, dtype="x")
    with pytest.raises(KairoxError, match="threads must be 1 to 1024"):
        set_threads(10**13)


def test_a_policy_that_cannot_be_run_live_is_told_with_what_is_in_force(model: Path) -> None:
    settings = Settings(policy="qinfer")
    with (
        device_for(settings, model, "cpu") as device,
        pytest.raises(KairoxError, match=r"late 'cancel' \(allowed: cpu, stall\)"),
    ):
        start(model, settings, device)


def test_no_context_beyond_the_models_is_planned_for(model: Path) -> None:
    settings = Settings(policy="lru", vram="1GiB")
    capacities = []
    for context_len in (None, 10**12):
        with device_for(settings, model, "cpu") as device:
            runner = start(model, settings, device, kernels="torch", context_len=context_len)
            capacities.append(runner.cache.capacity)
    assert list(capacities[0]) == list(capacities[1])

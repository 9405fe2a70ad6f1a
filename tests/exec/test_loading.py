"""Model directories into memory: as transformers loads them, FFNs as bundles, damage by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kairox_exec import loading
from kairox_exec.activations import use_rule
from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import decoder_layers, family_of, replace_ffn, rule_of
from kairox_exec.loading import Loaded, load_bundled, load_dense
from kairox_exec.runner import run_bundles
from kairox_exec.weights import NeuronBundles, bundle_model
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.errors import KairoxError
from kairox_sim.policies import POLICIES
from tests.exec.tiny_families import TINY, VOCAB, save_tiny

FILE = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]
Rewrite = Callable[[Callable[[Tensors], Any]], Path]


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(name, tmp_path_factory.mktemp(name)) for name in TINY}


@pytest.fixture
def llama(dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(dirs["llama"], tmp_path / "model")


@pytest.fixture
def rewrite(llama: Path) -> Rewrite:
    """Save its weights again, after a change."""

    def save(change: Callable[[Tensors], Any]) -> Path:
        tensors = load_file(llama / FILE)
        change(tensors)
        save_file(tensors, llama / FILE, metadata={"format": "pt"})
        return llama

    return save


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out: torch.Tensor = model(ids).logits[0]
    return out


def same_bundles(ours: list[NeuronBundles], others: list[NeuronBundles]) -> None:
    """Bit for bit, by bytes: codes and scales are no numbers to compare."""
    for a, b in zip(ours, others, strict=True):
        assert (a.layer, a.gating, a.spec, a.row_names) == (b.layer, b.gating, b.spec, b.row_names)
        pairs = [
            (getattr(a, name), getattr(b, name))
            for name in ("rows", "gate_w", "gate_b", "up_b", "down_b")
        ]
        assert (a.screen is None) == (b.screen is None)
        if a.screen is not None and b.screen is not None:
            pairs += [
                (getattr(a.screen, name), getattr(b.screen, name))
                for name in ("codes", "scale", "error")
            ]
        for x, y in pairs:
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                x, y = (t.contiguous().view(torch.uint8) for t in (x, y))
                assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_the_dense_model_is_the_one_that_transformers_loads(
    name: str, dtype: str, dirs: dict[str, Path]
) -> None:
    """Parameters, buffers (rotary frequencies are in no file), dtypes and logits."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    ours, config = load_dense(dirs[name], dtype=dtype, thresholds=TINY[name].thresholds)
    bars: Any = logging
    bars.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(dirs[name], config=config, dtype=getattr(torch, dtype)).eval()
    use_rule(theirs, family_of(config), rule_of(config))
    for kind in ("named_parameters", "named_buffers"):
        a, b = (dict(getattr(model, kind)()) for model in (ours, theirs))
        assert a.keys() == b.keys()
        for key, tensor in a.items():
            assert tensor.dtype == b[key].dtype
            assert torch.equal(tensor, b[key])
    assert torch.equal(logits(ours), logits(theirs))
    assert not any(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("gating", ["exact", "oracle", "screened"])
@pytest.mark.parametrize("name", TINY)
def test_bundles_from_files_are_those_of_the_model(
    name: str, gating: str, dirs: dict[str, Path]
) -> None:
    thresholds = TINY[name].thresholds
    model, config = load_dense(dirs[name], thresholds=thresholds)
    rule = rule_of(config)
    for fmt in ("float32", "bfloat16", "int8", "q4_0"):
        loaded = load_bundled(
            dirs[name], gating=gating, fmt=fmt, thresholds=thresholds, cache_dir="off"
        )  # type: ignore[arg-type]
        expected = bundle_model(
            model, family_of(config), gating=gating, threshold=rule.thresholds,
            activation=rule.activation, fmt=fmt,
        )  # type: ignore[arg-type]  # fmt: skip
        same_bundles(loaded.bundles, expected)
        assert (loaded.from_cache, loaded.cache) == (False, "off")


def run(loaded: Loaded, tokens: list[int]) -> torch.Tensor:
    def cache(n_layers: int, n_neurons: int) -> NeuronCache:
        policy = POLICIES["lru"](n_layers, n_neurons)
        return NeuronCache(n_layers, n_neurons, slots=24, policy=policy, controller=Fixed())

    with EmulatedDevice() as device:
        runner = run_bundles(
            loaded.model, loaded.config, loaded.family, loaded.bundles, cache, device,
            trigger="after",
        )  # fmt: skip
        seen = []
        for _ in runner.run([tokens], prefill=4):
            seen.append(runner.logits.clone())
        runner.finish()
    return torch.stack(seen)


@pytest.mark.parametrize("name", TINY)
def test_hybrid_ffns_on_bundles_from_files_give_the_dense_logits(
    name: str, dirs: dict[str, Path]
) -> None:
    thresholds = TINY[name].thresholds
    dense, _ = load_dense(dirs[name], thresholds=thresholds)
    tokens = [3, 9, 27, 17, 51, 25, 11, 33]
    with torch.inference_mode():
        expected = dense(torch.tensor([tokens])).logits[0, 3:]
    for gating in ("exact", "oracle"):
        loaded = load_bundled(dirs[name], gating=gating, thresholds=thresholds, cache_dir="off")
        torch.testing.assert_close(run(loaded, tokens), expected, rtol=0, atol=2e-5)


def test_ffns_are_left_without_weights(dirs: dict[str, Path]) -> None:
    """Only theirs, and all of theirs: they would be a second copy."""
    loaded = load_bundled(dirs["llama"], dtype="bfloat16", fmt="float32", cache_dir="off")
    for name, parameter in loaded.model.named_parameters():
        assert parameter.is_meta == (".mlp." in name), name
        assert parameter.dtype == torch.bfloat16
    assert not any(buffer.is_meta for buffer in loaded.model.buffers())


def test_rows_come_from_the_files_and_not_through_the_dtype_of_the_rest(
    dirs: dict[str, Path],
) -> None:
    wide = load_bundled(dirs["llama"], cache_dir="off").bundles
    same_bundles(load_bundled(dirs["llama"], dtype="bfloat16", cache_dir="off").bundles, wide)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_precision_files(source: torch.dtype, rewrite: Rewrite) -> None:
    directory = rewrite(lambda t: t.update({k: v.to(source) for k, v in t.items()}))
    model, config = load_dense(directory)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = bundle_model(model, family_of(config), gating="exact", threshold=0.0)
    same_bundles(load_bundled(directory, cache_dir="off").bundles, expected)


def shard(directory: Path, n_files: int = 3) -> list[Path]:
    """Split model.safetensors, with an index."""
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    where = {
        name: f"model-{i % n_files + 1:05d}-of-{n_files:05d}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in sorted({*where.values()}):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, directory / file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_files(with_index: bool, llama: Path, dirs: dict[str, Path]) -> None:
    shard(llama)
    if not with_index:
        (llama / "model.safetensors.index.json").unlink()
    same_bundles(
        load_bundled(llama, cache_dir="off").bundles,
        load_bundled(dirs["llama"], cache_dir="off").bundles,
    )
    assert torch.equal(logits(load_dense(llama)[0]), logits(load_dense(dirs["llama"])[0]))


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_files_saved_without_the_head(name: str, dirs: dict[str, Path], tmp_path: Path) -> None:
    """Some OPT checkpoints were: their names lack `model.`, and the head is tied or apart."""
    directory = shutil.copytree(dirs[name], tmp_path / "model")
    tensors = load_file(directory / FILE)
    short = {n.removeprefix("model."): t for n, t in tensors.items()}
    save_file(short, directory / FILE, metadata={"format": "pt"})
    assert torch.equal(logits(load_dense(directory)[0]), logits(load_dense(dirs[name])[0]))
    same_bundles(
        load_bundled(directory, cache_dir="off").bundles,
        load_bundled(dirs[name], cache_dir="off").bundles,
    )


def test_a_tied_head_is_one_tensor(dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(dirs["opt"], tmp_path / "model")
    model: Any = load_dense(directory)[0]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    tensors = load_file(directory / FILE)
    assert "lm_head.weight" not in tensors
    both = tensors | {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"].clone()}
    save_file(both, directory / FILE, metadata={"format": "pt"})
    assert torch.equal(logits(load_dense(directory)[0]), logits(model))
    both["lm_head.weight"][3, 5] += 1
    save_file(both, directory / FILE, metadata={"format": "pt"})
    with pytest.raises(KairoxError, match=r"lm_head\.weight differs from .*tie_word_embeddings"):
        load_dense(directory)


# -- what is wrong with a directory ---------------------------------------------------------------


def refused(directory: Path, words: str, **how: Any) -> None:
    for load in (load_dense, lambda d: load_bundled(d, cache_dir="off", **how)):
        with pytest.raises(KairoxError, match=words):
            load(directory)


@pytest.mark.parametrize("kept", [0, 5, 8, 500, -1, -3000])
def test_a_file_that_is_cut_anywhere(kept: int, llama: Path) -> None:
    content = (llama / FILE).read_bytes()
    (llama / FILE).write_bytes(content[:kept])
    cut = "cut in its header" if kept in (0, 5, 8, 500) else r"truncated"
    refused(llama, rf"model\.safetensors .*{cut}.*again")


def test_a_header_that_is_none(llama: Path) -> None:
    content = bytearray((llama / FILE).read_bytes())
    content[20:24] = b"\x00\xff{{"
    (llama / FILE).write_bytes(content)
    refused(llama, "its header is not safetensors'")


def test_bytes_too_many(llama: Path) -> None:
    (llama / FILE).write_bytes((llama / FILE).read_bytes() + b"more")
    refused(llama, "damaged; download")


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard(with_index: bool, llama: Path) -> None:
    shard(llama)[1].unlink()
    if not with_index:
        (llama / "model.safetensors.index.json").unlink()
    refused(llama, r"model-00002-of-00003\.safetensors")


def test_an_index_of_another_download(llama: Path) -> None:
    shard(llama)
    path = llama / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][DOWN] = "model-00001-of-00003.safetensors"
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refused(llama, "which model.safetensors.index.json says is there")
    path.write_text("[]")
    refused(llama, "is not an index")


def test_two_models_in_one_directory(llama: Path) -> None:
    shard(llama, 1)
    (llama / "model.safetensors.index.json").unlink()
    first = next(llama.glob("*.safetensors"))
    shutil.copy(first, llama / "other.safetensors")
    refused(llama, "holds one model")


@pytest.mark.parametrize(
    "name", [DOWN, "model.embed_tokens.weight", "model.layers.2.input_layernorm.weight"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number(name: str, bad: float, rewrite: Rewrite) -> None:
    directory = rewrite(lambda t: t[name].view(-1)[5:7].fill_(bad))
    n_nan, n_inf = (2, 0) if bad != bad else (0, 2)
    words = rf"model\.safetensors: {re.escape(name)} holds {n_nan} NaN and {n_inf} infinite of"
    refused(directory, words)


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.mlp.up_proj.bias", "model.norm.weight"])
def test_shapes_against_the_config(name: str, rewrite: Rewrite) -> None:
    directory = rewrite(lambda t: t.update({name: t[name][:-1].clone()}))
    refused(directory, rf"{re.escape(name)} is \(\d+.* and config\.json calls for \(\d+")


def test_a_tensor_that_is_missing(rewrite: Rewrite) -> None:
    refused(rewrite(lambda t: t.pop(DOWN)), rf"lack 1 tensors .*{re.escape(DOWN)}")


def test_more_layers_than_the_config_has(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 2}
    (llama / "config.json").write_text(json.dumps(config))
    refused(llama, r"model\.layers\.2\..* and config\.json has 2 layers")


def test_quantised_checkpoints(rewrite: Rewrite) -> None:
    directory = rewrite(lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}))
    refused(directory, rf"{re.escape(DOWN)} is I8 \(allowed: .*GPTQ")
    rewrite(lambda t: t.update({DOWN.replace("weight", "qweight"): t.pop(DOWN)}))
    refused(directory, "lack 1 tensors .*they hold I8, so they are quantised")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    refused(directory, r"quantization_config \(gptq\)")


def test_weights_too_large_for_float16(rewrite: Rewrite) -> None:
    name = "model.embed_tokens.weight"
    directory = rewrite(lambda t: t[name].view(-1)[:1].fill_(1e5))
    load_bundled(directory, cache_dir="off")
    words = rf"{re.escape(name)} as float16 holds 0 NaN and 1 infinite .*bfloat16"
    with pytest.raises(KairoxError, match=words):
        load_bundled(directory, dtype="float16", cache_dir="off")
    rewrite(lambda t: (t[name].fill_(0.1), t[DOWN].view(-1)[:1].fill_(1e5)))
    with pytest.raises(KairoxError, match="too large for float16"):
        load_bundled(directory, fmt="float16", cache_dir="off")


def test_less_host_memory_than_the_model_needs(
    dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is read; smaller rows need less."""
    import psutil

    layers = 3 * 3 * 96 * 32  # rows of three matrices in three layers
    model, _ = load_dense(dirs["mistral"])
    rest = sum(p.numel() for n, p in model.named_parameters() if ".mlp." not in n)

    def with_free(n_bytes: int) -> None:
        free = type("Free", (), {"available": n_bytes})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    monkeypatch.setattr(loading, "fill", None)  # it must not come to that
    with_free(4 * (layers + rest) - 1)
    refused(dirs["mistral"], "GB of host memory")
    monkeypatch.undo()
    load_bundled(dirs["mistral"], cache_dir="off")
    with_free(4 * (layers + rest))
    load_bundled(dirs["mistral"], cache_dir="off")
    with_free(2 * layers + 4 * rest)
    load_bundled(dirs["mistral"], fmt="bfloat16", cache_dir="off")


def test_a_container_that_may_use_less(tmp_path: Path) -> None:
    """The limit of its control group is what counts, and is named; a wider one is neither."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text("3000000000\n")
    (group / "memory.current").write_text("2500000000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 400000000\n")
    words = r"0\.9 GB are available of the 3\.0 GB that this container .* raise that limit"
    with pytest.raises(KairoxError, match=words):
        loading._require_memory(tmp_path, 900_000_001, tmp_path)
    loading._require_memory(tmp_path, 900_000_000, tmp_path)
    (group / "memory.max").write_text(f"{2**59}\n")
    with pytest.raises(KairoxError, match=r"GB are available; .* end other programs"):
        loading._require_memory(tmp_path, 2**59, tmp_path)


def test_an_ffn_that_is_replaced_needs_no_weights(dirs: dict[str, Path]) -> None:
    """Left alone, it cannot be mistaken for one that computes."""
    loaded = load_bundled(dirs["llama"], cache_dir="off")
    with pytest.raises(RuntimeError):
        logits(loaded.model)
    for layer in decoder_layers(loaded.model, loaded.family):
        replace_ffn(layer, loaded.family, torch.nn.Identity())
    assert torch.isfinite(logits(loaded.model)).all()

"""The same weights under the same budget with Accelerate: whole modules moved when they are run."""

from __future__ import annotations

import importlib.util
import time
from statistics import median
from typing import Any

import torch

from experiments.gpu_check.big import BigShape, dense_weights, new_model, sticky_tokens
from experiments.gpu_check.place import Left, Place
from kairox_exec.runner import kv_argument
from kairox_exec.weights import NeuronBundles

SECONDS_IT_TAKES = 40.0  # to build the dense model and move it for a few tokens


def against_accelerate(
    place: Place,
    shape: BigShape,
    bundles: list[NeuronBundles],
    budget_bytes: float,
    left: Left,
    n_decode: int,
) -> dict[str, Any]:
    """Seconds per decode token of `dispatch_model` with `budget_bytes` on the GPU, or why not.

    The weights are those of the other runs: these bundles, and `new_model`'s.
    """
    about: dict[str, Any] = {"budget_bytes": budget_bytes}
    if importlib.util.find_spec("accelerate") is None:
        return about | {"skipped": "accelerate is not installed"}
    if place.rehearse:
        return about | {"skipped": "a rehearsal has no device to offload from"}
    if left() < SECONDS_IT_TAKES:
        return about | {"skipped": f"{left():.0f} s are left, it needs {SECONDS_IT_TAKES:.0f}"}
    return about | _timed(place, shape, bundles, budget_bytes, left, n_decode)


@torch.inference_mode()
def _timed(
    place: Place,
    shape: BigShape,
    bundles: list[NeuronBundles],
    budget_bytes: float,
    left: Left,
    n_decode: int,
) -> dict[str, Any]:
    from accelerate import dispatch_model, infer_auto_device_map
    from transformers import DynamicCache

    torch.cuda.empty_cache()
    model, config = dense_model(place, shape, bundles)
    at_most = {0: int(budget_bytes - 1e9), "cpu": 1 << 40}
    where = infer_auto_device_map(
        model, max_memory=at_most, no_split_module_classes=["LlamaDecoderLayer"]
    )
    model = dispatch_model(model, device_map=where, main_device=0)
    kv = DynamicCache(config=config)
    tokens = sticky_tokens(shape, 16 + n_decode, 11).tolist()
    seconds = []
    for at, chunk in enumerate([tokens[:16], *([token] for token in tokens[16:])]):
        place.synchronize()
        began = time.perf_counter()
        ids = torch.tensor([chunk], device=place.device)
        model(input_ids=ids, use_cache=True, **{kv_argument(model): kv})
        place.synchronize()
        if at > 1:
            seconds.append(time.perf_counter() - began)
        if left() < 5 or len(seconds) == 8:
            break
    if not seconds:
        return {"skipped": "no time was left after building the model"}
    on_gpu = sum(str(device) == "0" for device in where.values())
    return {
        "wall_s": median(seconds),
        "tokens_per_s": 1 / median(seconds),
        "n_decode": len(seconds),
        "modules_on_gpu": on_gpu,
        "modules_on_cpu": len(where) - on_gpu,
        "memory": "weights pageable in host memory, as accelerate leaves them",
    }


def dense_model(place: Place, shape: BigShape, bundles: list[NeuronBundles]) -> tuple[Any, Any]:
    """Plain transformers with the weights of `new_model` and the bundles, bfloat16, host memory."""
    from transformers import LlamaForCausalLM

    config = shape.config()
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).to(torch.bfloat16)
    model = empty.to_empty(device="cpu").eval()
    rest, _ = new_model(place, shape)
    kept = {name: t.cpu() for name, t in rest.state_dict().items() if ".mlp." not in name}
    model.load_state_dict(kept, strict=False)
    for layer, weights in zip(model.model.layers, dense_weights(bundles), strict=True):
        layer.mlp.load_state_dict(weights)
    # Its buffers are computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model, config

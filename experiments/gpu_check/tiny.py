"""Part 3: small models end to end on the device, against plain transformers on the same device.

tiny-reglu with its own weights and text, and a random OPT. `fast`: logits within a tolerance of the
dense model's, and the same greedy tokens. `deterministic`: the same bits wherever neurons are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.gpu_check.place import Left, Place
from kairox_exec.device import Device
from kairox_exec.families import family_of, rule_of
from kairox_exec.ffn_spec import Numerics
from kairox_exec.loading import load_dense
from kairox_exec.runner import Runner, kv_argument, run_bundles
from kairox_exec.text import load_tokenizer
from kairox_exec.weights import bundle_model
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb, Fixed
from kairox_sim.policies import POLICIES

TINY_REGLU = Path(__file__).parents[1] / "models" / "tiny-reglu"
PROSE = Path(__file__).parents[1] / "prompts" / "prose.txt"
# Float32 sums in another order, as a share of the logits' standard deviation. Dense float32 itself
# is off by about 5e-6 from float64 (6 layers, width 256; see `kairox score`).
TOLERANCE = 5e-5
PLACEMENTS = (("static", 0.0), ("static", 0.5), ("lru", 0.25), ("tam", 0.25), ("static", 1.0))


@dataclass(frozen=True, slots=True)
class Small:
    name: str
    model: Any  # dense, float32, host memory
    config: Any
    tokens: np.ndarray[Any, np.dtype[np.int32]]


def check_tiny(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    """Passes where every row does."""
    models = [_tiny_reglu(place), random_opt(place)]
    rows, left_out = [], []
    for small in models:
        for gating in ("exact",) if place.rehearse else ("exact", "screened"):
            for check in (_fast_against_dense, _same_bits_everywhere):
                if left() < 5:
                    left_out.append([small.name, gating, check.__name__])
                    continue
                rows.append({"model": small.name, "gating": gating} | check(place, small, gating))
    wrong = [row for row in rows if not row["passed"]]
    return {
        "passed": not wrong and not left_out,
        "said": f"{len(rows)} checks of {len(models)} models, {len(wrong)} failed",
        "rows": rows,
        "left_out_for_lack_of_time": left_out,
    }


def run_tiny(
    place: Place, small: Small, *, policy: str, share: float, gating: str, numerics: Numerics
) -> tuple[Sequence[torch.Tensor], list[int], dict[str, float]]:
    """Logits after every token, greedy continuation of the first ones, and what was moved.

    share: of the neurons that have a slot.
    """
    with closing(place.new_device()) as device:
        runner = _attached(place, small, device, policy, share, gating=gating, numerics=numerics)
        logits, moved = [], {"loads": 0.0, "residual": 0.0, "hit_on_time": 0.0}
        with runner:
            for _, record in runner.run([small.tokens], prefill=8, prefill_chunk=4):
                logits.append(runner.logits.float().cpu().clone())
                for name in moved:
                    moved[name] += getattr(record, name)
            steps = runner.generate(small.tokens[:16], max_new_tokens=16)
            greedy = [token for token, _ in steps if token is not None]
        return logits, greedy, moved


def _attached(
    place: Place,
    small: Small,
    device: Device,
    policy: str,
    share: float,
    *,
    gating: str,
    numerics: Numerics,
) -> Runner:
    def build(n_layers: int, n_neurons: int) -> NeuronCache:
        slots = round(share * n_neurons)
        pinned = None
        if policy == "static":
            pinned = [np.arange(slots, dtype=np.int32)] * n_layers
        controller = Anb() if policy == "tam" else Fixed()
        chosen = POLICIES[policy](n_layers, n_neurons)
        return NeuronCache(
            n_layers, n_neurons, slots, chosen, controller, pinned=pinned, swap_neurons=8
        )

    model, family = copy.deepcopy(small.model), family_of(small.config)
    rule = rule_of(small.config)
    bundles = bundle_model(
        model, family, gating=gating, threshold=rule.thresholds, activation=rule.activation,
        numerics=numerics,
    )  # fmt: skip
    return run_bundles(
        model.to(place.device),  # bundles stay in host memory
        small.config,
        family,
        bundles,
        build,
        device,
        host_kernels=place.host_kernels(),
        device_kernels=place.device_kernels(),
    )


def _fast_against_dense(place: Place, small: Small, gating: str) -> dict[str, Any]:
    expected, greedy = _dense(place, small)
    logits, mine, moved = run_tiny(
        place, small, policy="lru", share=0.25, gating=gating, numerics="fast"
    )
    scale = float(torch.stack(expected).std())
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    happened = all(moved.values())
    return {
        "numerics": "fast",
        "largest_logit_error": worst,
        "logit_std": scale,
        "tolerance": TOLERANCE * scale,
        "greedy_tokens_equal": mine == greedy,
        "moved": moved,
        "passed": worst <= TOLERANCE * scale and mine == greedy and happened,
    }


def _same_bits_everywhere(place: Place, small: Small, gating: str) -> dict[str, Any]:
    placements = PLACEMENTS[::2] if place.rehearse else PLACEMENTS
    runs = [
        run_tiny(place, small, policy=policy, share=share, gating=gating, numerics="deterministic")
        for policy, share in placements
    ]
    first = torch.stack(list(runs[0][0]))
    equal = [torch.equal(torch.stack(list(logits)), first) for logits, _, _ in runs]
    happened = any(moved["loads"] and moved["hit_on_time"] for _, _, moved in runs)
    return {
        "numerics": "deterministic",
        "placements": placements,
        "bits_equal": equal,
        "greedy_tokens_equal": all(greedy == runs[0][1] for _, greedy, _ in runs),
        "moved": [moved for _, _, moved in runs],
        "passed": all(equal) and happened,
    }


@torch.inference_mode()
def _dense(place: Place, small: Small) -> tuple[list[torch.Tensor], list[int]]:
    """Plain transformers, the same chunks: logits after each, and a greedy continuation."""
    from transformers import DynamicCache

    model = copy.deepcopy(small.model).to(place.device)

    def feed(kv: Any, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=place.device)
        out = model(input_ids=ids, use_cache=True, **{kv_argument(model): kv})
        last: torch.Tensor = out.logits[0, -1]
        return last

    kv, logits = DynamicCache(config=small.config), []
    chunks = [small.tokens[:4], small.tokens[4:8], *small.tokens[8:, None]]
    for chunk in chunks:
        logits.append(feed(kv, chunk.tolist()).float().cpu())
    kv, greedy = DynamicCache(config=small.config), []
    # The runner's prefill chunks are longer than this prompt: one pass.
    token = int(feed(kv, small.tokens[:16].tolist()).argmax())
    for _ in range(15):
        greedy.append(token)
        token = int(feed(kv, [token]).argmax())
    return logits, [*greedy, token]


def _tiny_reglu(place: Place) -> Small:
    model, config = load_dense(TINY_REGLU)
    text = PROSE.read_text(encoding="utf-8")[:2000]
    tokens = load_tokenizer(TINY_REGLU).encode(text)[: 16 if place.rehearse else 64]
    return Small("tiny-reglu", model, config, tokens)


def random_opt(place: Place) -> Small:
    """3 layers, random weights, biases and norms not at their initial zeros and ones."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64, hidden_size=64, ffn_dim=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=64, do_layer_norm_before=True,
        init_std=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = OPTForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    model.eval().requires_grad_(False)
    n_tokens = 16 if place.rehearse else 64
    tokens = torch.randint(0, 64, (n_tokens,), generator=draw).int().numpy()
    return Small("random OPT", model, config, tokens)

"""Greedy text on the CUDA device, its streams made late: resident, offloaded, split.

Where the GPU computes everything, text and logits are the same bits wherever rows came from, in
float32 sums too: entries are added in the order of their neurons. Where the host computes a part,
float32 sums differ by rounding, which is reported: how far the logits are apart, and the first
token that differs. Deterministic numerics differ in nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kairox_exec.cuda import CudaDevice
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.kernels import torch_ref
from kairox_exec.live import warm_up
from kairox_exec.loading import Loaded, load_bundled
from kairox_exec.runner import run_bundles
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import POLICIES
from kairox_sim.policies.base import Late, Trigger
from tests.exec.late import LateDevice

PROMPT = np.array([40, 44], np.int32)
N = 896  # neurons of a layer of tiny-reglu


@dataclass(frozen=True)
class Placement:
    policy: str
    slots: int
    trigger: Trigger
    promotion: str = "staged"
    pinned: bool = False
    late: Late = "cpu"


RESIDENT = Placement("static", N, "after", pinned=True)
# Everything is copied in before its layer computes, into slots that others had before.
OFFLOADED = Placement("lru", 650, "instant")
SPLIT = {
    "static": Placement("static", 300, "after", pinned=True),
    "moving": Placement("lru", 400, "attn_out", late="stall"),
}


@dataclass(frozen=True)
class Text:
    tokens: list[int]
    logits: torch.Tensor  # [n, vocab]
    loads: float
    residual: float
    hits: float  # on time


def _text(
    loaded: Loaded, placement: Placement, n_tokens: int, seed: int = 0, kernels: Any = torch_ref
) -> Text:
    def cache(n_layers: int, n_neurons: int) -> NeuronCache:
        slots = placement.slots
        pinned = [np.arange(slots)] * n_layers if placement.pinned else None
        policy = POLICIES[placement.policy](n_layers, n_neurons)
        return NeuronCache(
            n_layers, n_neurons, slots, policy, Fixed(), pinned=pinned, trigger=placement.trigger
        )

    tokens, rows, records = [], [], []
    late = LateDevice(seed)
    with late, torch.no_grad(), CudaDevice(
        streams=late, promotion=placement.promotion, stuck_after_s=20
    ) as device:  # fmt: skip
        runner = run_bundles(
            copy.deepcopy(loaded.model), loaded.config, loaded.family, loaded.bundles, cache,
            device, trigger=placement.trigger, late=placement.late, device_kernels=kernels,
        )  # fmt: skip
        for token, record in runner.generate(PROMPT, max_new_tokens=n_tokens, prefill_chunk=1):
            records.append(record)
            if token is not None:
                tokens.append(token)
                rows.append(runner.logits.cpu())
        runner.finish()
    loads, residual, hits = (
        sum(getattr(r, name) for r in records) for name in ("loads", "residual", "hit_on_time")
    )
    return Text(tokens, torch.stack(rows), loads, residual, hits)


@pytest.fixture(scope="module")
def load(tiny_reglu_dir: Path) -> Callable[[str], Loaded]:
    known: dict[str, Loaded] = {}

    def of(numerics: Any) -> Loaded:
        if numerics not in known:
            known[numerics] = load_bundled(tiny_reglu_dir, numerics=numerics)
        return known[numerics]

    return of


# A step takes 0.1 s here: 256 tokens are test_deterministic.py's, on the CPU.
@pytest.mark.parametrize(
    ("n_tokens", "splits"), [(8, SPLIT), pytest.param(96, ("static",), marks=pytest.mark.slow)]
)
def test_float32_sums_differ_only_where_the_host_computes(
    load: Callable[[str], Loaded], n_tokens: int, splits: Iterable[str], record_property: Any
) -> None:
    model = load("fast")
    resident = _text(model, RESIDENT, n_tokens)
    assert (resident.loads, resident.residual) == (0, 0)
    offloaded = _text(model, OFFLOADED, n_tokens)
    assert offloaded.loads > 0
    assert offloaded.residual == 0
    assert offloaded.tokens == resident.tokens
    assert torch.equal(offloaded.logits, resident.logits)
    for name in splits:
        split = _text(model, SPLIT[name], n_tokens)
        assert min(split.residual, split.hits) > 0
        error, first = difference(split, resident)
        record_property(f"{name}: largest logit error", error)
        record_property(f"{name}: first divergence", "none" if first is None else first)
        assert 0 < error < 1e-4  # of logits of about 10


def test_deterministic_text_is_the_same_wherever_it_is_computed(
    load: Callable[[str], Loaded],
) -> None:
    model, n_tokens = load("deterministic"), 8
    resident = _text(model, RESIDENT, n_tokens)
    for seed, placement in enumerate((OFFLOADED, SPLIT["moving"])):
        other = _text(model, placement, n_tokens, seed)
        assert min(other.loads, other.hits) > 0
        assert other.tokens == resident.tokens
        assert torch.equal(other.logits, resident.logits)


def test_the_look_ahead_is_asked_with_the_cards_kernels(load: Callable[[str], Loaded]) -> None:
    gates = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch_ref, name)

        def gate_all(self, x: torch.Tensor, *how: Any) -> torch.Tensor:
            gates.append(len(x))
            return torch_ref.gate_all(x, *how)

    _text(load("fast"), SPLIT["moving"], 1, kernels=Counted())
    assert gates == [1] * len(PROMPT) * (6 + 5)  # every layer's gate, and a look ahead at 5


class Asked:
    """Kernels that note the forms they are called in; a GPU's are compiled for each."""

    def __init__(self) -> None:
        self.forms: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(torch_ref, name)

        def call(*given: Any, **how: Any) -> Any:
            spec = next((a for a in given if isinstance(a, FfnSpec)), None)
            kept = frozenset(k for k, v in how.items() if v is not None)
            self.forms.add((name, spec, kept))
            return real(*given, **how)

        return call


@pytest.mark.parametrize("gating", ["exact", "screened"])
@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_every_form_that_a_run_needs_is_compiled_before_it(
    tiny_reglu_dir: Path, gating: str, numerics: Any
) -> None:
    loaded, asked = load_bundled(tiny_reglu_dir, gating=gating, numerics=numerics), Asked()
    with LateDevice() as late, torch.no_grad(), CudaDevice(streams=late) as device:
        runner = run_bundles(
            loaded.model, loaded.config, loaded.family, loaded.bundles,
            lambda n_layers, n: NeuronCache(
                n_layers, n, 400, POLICIES["lru"](n_layers, n), Fixed(), trigger="attn_out"
            ),
            device, trigger="attn_out", device_kernels=asked,
        )  # fmt: skip
        warm_up(runner, asked, device.where)
        known, asked.forms = asked.forms, set()
        list(runner.run([PROMPT], prefill=0))
        runner.finish()
    asked.forms = {form for form in asked.forms if form[0] != "total"}  # torch's own
    assert asked.forms
    assert asked.forms <= known


def test_a_pretended_card_takes_no_host_memory_into_an_op() -> None:
    with LateDevice() as late:
        there = torch.ones(3).to(late.device)
        assert torch.equal((there + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))
        with pytest.raises(AssertionError, match=r"add\.Tensor of the device's memory and"):
            there + torch.ones(3)
        with pytest.raises(AssertionError, match="index_select"):
            there.index_select(0, torch.zeros(2, dtype=torch.int32))


def difference(ours: Text, theirs: Text) -> tuple[float, int | None]:
    """(largest logit error while the texts are one, the first token that differs)"""
    pairs: Sequence[tuple[int, int]] = list(zip(ours.tokens, theirs.tokens, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    until = len(pairs) if first is None else first + 1
    return float((ours.logits[:until] - theirs.logits[:until]).abs().max()), first

"""Part 2: deterministic kernels give the same bits on the CPU and on the GPU.

Whole layers of every format and activation, random and adversarial inputs: numba and torch on the
CPU, torch and Triton on the card. Integers are compared for equality, gates and marks too.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_check.place import Left, Place
from kairox_exec.ffn_spec import ACTIVATIONS, FIXED_LIMIT, FfnSpec
from kairox_exec.formats import FORMATS, encode
from kairox_exec.kernels import Kernels, torch_ref

THRESHOLDS = {"relu": 0.05, "relu2": 0.0, "drelu": 0.0, "silu": 0.02}


def check_bits(place: Place, folder: Path, left: Left) -> dict[str, Any]:
    """Passes where every kernel gives the reference's bits in every case."""
    d, n = (96, 24) if place.rehearse else (4096, 256)
    others: list[tuple[str, Kernels, torch.device]] = [
        ("numba on the CPU", place.host_kernels(), torch.device("cpu"))
    ]
    if not place.rehearse:
        others += [
            ("torch on the GPU", torch_ref, place.device),
            ("triton on the GPU", place.device_kernels(), place.device),
        ]
    rows, left_out = [], []
    cases = itertools.product(FORMATS, ACTIVATIONS, ("random", "adversarial"), (1, 3))
    for fmt, activation, inputs, n_tokens in cases:
        if left() < 2:
            left_out.append([fmt, activation, inputs, n_tokens])
            continue
        spec = FfnSpec(d, True, activation, THRESHOLDS[activation], fmt, "deterministic")  # type: ignore[arg-type]
        x, stored = _inputs(spec, n, n_tokens, inputs)
        expected = _all_of(torch_ref, x, stored, spec)
        largest = float(torch_ref.total(expected["sums"]).abs().max())
        assert largest < FIXED_LIMIT, f"the case itself leaves fixed point: {largest}"
        for name, kernels, device in others:
            got = _all_of(kernels, x.to(device), stored.to(device), spec)
            differ = {
                what: int((got[what].cpu() != expected[what]).sum()) for what in ("sums", "gate")
            }
            differ["fired"] = int((got["fired"].cpu() ^ expected["fired"]).sum())
            rows.append(
                {
                    "format": fmt, "activation": activation, "inputs": inputs,
                    "n_tokens": n_tokens, "kernels": name, "n_fired": int(expected["fired"].sum()),
                    "elements_that_differ": differ,
                }
            )  # fmt: skip
    wrong = [row for row in rows if any(row["elements_that_differ"].values())]
    return {
        "passed": not wrong and not left_out,
        "said": f"{len(rows)} comparisons with torch on the CPU, {len(wrong)} differ",
        "d_model": d,
        "n_neurons": n,
        "kernels": [name for name, _, _ in others],
        "rows": rows,
        "left_out_for_lack_of_time": left_out,
    }


def _all_of(
    kernels: Kernels, x: torch.Tensor, stored: torch.Tensor, spec: FfnSpec
) -> dict[str, torch.Tensor]:
    """gate [n_tokens, n], fixed-point sums [n_tokens, d], fired [n_tokens, n]."""
    n = stored.shape[0]
    index = torch.arange(n - 1, -1, -1, dtype=torch.int32, device=x.device)
    fired = torch.zeros((x.shape[0], n), dtype=torch.bool, device=x.device)
    sums = kernels.ffn_union(x, stored, index, spec, fired=fired)
    return {
        "gate": kernels.gate_all(x, stored[:, 0].contiguous(), None, spec),
        "sums": sums,
        "fired": fired,
    }


def _inputs(spec: FfnSpec, n: int, n_tokens: int, inputs: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n_tokens, d], stored rows [n, 3, width]."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn((n_tokens, spec.d_model), generator=draw)
    weights = torch.randn((n, 3, spec.d_model), generator=draw) / spec.d_model**0.5
    if inputs == "adversarial":
        odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e-39, 1.0, -20.0, 1e-13, 20.0])
        tiny = torch.tensor([6e-8, -6e-8, 0.0, -0.0, 1e-30, 1e-38, 1e-41, 0.5])
        x = _mixed(x, odd, 0.5, draw)
        weights = _mixed(weights, tiny, 0.2, draw)
        weights[1] = 0.0
        x[-1, : spec.d_model // 2] = 0.0
    return x, encode(weights, spec.fmt)


def _mixed(
    values: torch.Tensor, others: torch.Tensor, share: float, draw: torch.Generator
) -> torch.Tensor:
    pick = others[torch.randint(0, others.numel(), values.shape, generator=draw)]
    return torch.where(torch.rand(values.shape, generator=draw) < share, pick, values)

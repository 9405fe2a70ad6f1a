"""Triton kernels without a GPU: run by Triton's interpreter, and compiled for five generations.

The interpreter is chosen by an environment variable that Triton reads when it is imported, so the
cases of triton_cases.py run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kairox_exec.ffn_spec import ACTIVATIONS, FfnSpec
from kairox_exec.formats import FORMATS

triton = pytest.importorskip("triton", reason="triton is not installed (extra `cuda`, Linux only)")

HERE = Path(__file__).parent
COMPUTE_CAPABILITIES = (75, 80, 86, 89, 90)  # Turing, A100, Ampere, Ada, Hopper


def _run_cases(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / "triton_cases.py"],
        cwd=HERE.parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels_give_what_the_reference_gives() -> None:
    _run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_gpu_give_what_the_reference_gives() -> None:
    _run_cases()


def _compiled(kernel: Any, pointers: dict[str, str], capability: int, **how: Any) -> str:
    """PTX of a kernel as `triton_cuda` launches it; its cubin has been made as well."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {k: how.pop(k) for k in ("num_warps", "enable_fp_fusion") if k in how}
    signature = {
        name: "constexpr" if name.isupper() else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    constants = {name: value for name, value in how.items() if name.isupper()}
    assert set(constants) == {name for name, kind in signature.items() if kind == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(made.asm["cubin"]) > 0
    ptx: str = made.asm["ptx"]
    return ptx


def _stored(fmt: str) -> str:
    return {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8"}.get(
        fmt, "*u8"
    )


def _ffn_ptx(spec: FfnSpec, capability: int, *, given: bool) -> list[str]:
    """gate, hidden and down kernels of one layer."""
    from kairox_exec.kernels import triton_cuda, triton_rows

    how = triton_cuda.how_compiled(spec)
    row = {"x": "*fp32", "rows": _stored(spec.fmt), "threshold": "fp32", "hidden": "*fp32"}
    biases = {"gate_b": "*fp32", "up_b": "*fp32", "act": "*fp32", "fired": "*u8", "index": "*i32"}
    sums = "*i64" if spec.numerics == "deterministic" else "*fp32"
    dots = how | {"BLOCK_N": triton_cuda.BLOCK_N, "ACT": spec.activation}
    down = how | {"BLOCK_N": triton_cuda.DOWN_N, "ENTRIES": triton_cuda.ENTRIES}
    asked = {"GATED": spec.gated, "ACT_GIVEN": given, "HAS_GATE_B": not given}
    return [
        _compiled(
            triton_rows.gate_kernel, row | {"gate_b": "*fp32", "out": "*fp32"}, capability,
            HAS_B=True, **dots,
        ),
        _compiled(
            triton_rows.hidden_kernel, row | biases, capability,
            HAS_UP_B=True, TELL=True, **asked, **dots,
        ),
        _compiled(
            triton_rows.down_kernel, {**row, "index": "*i32", "y": sums}, capability,
            **down | {"BLOCK_D": triton_cuda.DOWN_D},
        ),
    ]  # fmt: skip


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_deterministic_kernels_round_each_product_and_keep_denormals(
    fmt: str, capability: int
) -> None:
    k = FORMATS.index(fmt)
    activation = ACTIVATIONS[k % len(ACTIVATIONS)]
    spec = FfnSpec(4096, True, activation, 0.0, fmt, "deterministic")  # type: ignore[arg-type]
    for ptx in _ffn_ptx(spec, capability, given=k % 2 == 0):
        assert "fma" not in ptx
        assert "mad" not in ptx.replace("mad.lo", "").replace("mad.wide", "")  # of addresses
        assert ".ftz" not in ptx
        assert "mul.f32" in ptx or "mul.rn.f32" in ptx
        assert "cvt.rzi.s64.f32" in ptx


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES)
def test_fast_kernels_and_gathers_compile(capability: int) -> None:
    from kairox_exec.kernels import triton_rows

    for fmt in FORMATS:
        spec = FfnSpec(4096, True, "silu", 0.1, fmt, "fast")  # type: ignore[arg-type]
        fused = [ptx for ptx in _ffn_ptx(spec, capability, given=False) if "fma.rn" in ptx]
        assert fused, "the check for `fma` would never fail"
    for kind in ("*i32", "*i64"):
        pointers = {"rows": kind, "slots": kind, "ids": "*i32", "places": "*i32"}
        ptx = _compiled(
            triton_rows.gather_kernel, pointers, capability, WORDS=3072, BLOCK=4096, num_warps=8
        )
        assert "ld.global.v2" in ptx or "ld.global.v4" in ptx, "16 bytes at a time"

"""The host's FFN kernels at the shape of a 7B model, beside a dense FFN and the memory's speed.

    python benchmarks/bench_kernels.py [--repeats 5] [--formats bfloat16 int8] [--json]

15 % of a layer's neurons, drawn at random, cache-cold: calls go around layers of more bytes than
the caches hold. The reference is the dense FFN by torch's `F.linear` in bfloat16 on as many
threads; the read bandwidth is that of NumPy's (vectorised) sum over 384 MiB, one thread. Both are
timed between the kernels in the same run, so that on a busy machine the ratios hold better than the
times. One thread: process CPU time; two threads, each with half of the index: wall time. Medians of
the repeats. The gate row is read and decides (gate "here"), or its values are given, as under exact
gating ("given").

Weights are synthetic: normal rows drawn from a pool, so that a layer is made in a second.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from torch.nn import functional

from kairox_exec.ffn_spec import FfnSpec, Numerics
from kairox_exec.formats import Format, encode, row_bytes, storage_dtype
from kairox_exec.kernels import numba_cpu

D_MODEL, D_FF, ACTIVE = 4096, 11_008, 0.15
FORMATS: tuple[Format, ...] = ("bfloat16", "int8", "q8_0", "float32")
LAYERS = 2  # 270 MB each in bfloat16
READ_BYTES = 384 * 2**20
POOL = 1024  # distinct rows of synthetic weights
GOAL_DENSE, GOAL_BANDWIDTH = 5.0, 0.5  # of bfloat16, fast, one thread


@dataclass(frozen=True)
class Timed:
    """One way of calling the kernels, medians over the repeats; ratios are of the same repeat."""

    fmt: str
    numerics: str
    gate: str  # here, given
    us_per_neuron: float
    bytes_per_s: float
    of_read_bandwidth: float
    times_dense: float
    us_per_neuron_2t: float
    times_dense_2t: float


@dataclass(frozen=True)
class Layers:
    x: torch.Tensor
    rows: list[torch.Tensor]  # [d_ff, 3, width] each
    index: list[torch.Tensor]  # active neurons, ascending
    act: list[torch.Tensor]  # [1, n]


def make_layers(fmt: Format, n_active: int) -> Layers:
    g = torch.Generator().manual_seed(0)
    pool = encode(torch.randn((POOL, D_MODEL), generator=g) / D_MODEL**0.5, fmt)
    x = torch.randn((1, D_MODEL), generator=g)
    spec = FfnSpec(D_MODEL, True, "relu", 0.0, fmt)
    rows, index, act = [], [], []
    for _ in range(LAYERS):
        layer = torch.empty((D_FF, 3, spec.width), dtype=storage_dtype(fmt))
        for i in range(3):
            layer[:, i] = pool[torch.randint(0, POOL, (D_FF,), generator=g)]
        gate = numba_cpu.gate_all(x, layer[:, 0], None, spec)
        fires = torch.nonzero(gate[0])[:, 0]  # half of them: some are left out
        chosen = fires[torch.randperm(len(fires), generator=g)[:n_active]].sort().values
        rows.append(layer)
        index.append(chosen.to(torch.int32))
        act.append(gate[:, chosen].contiguous())
    return Layers(x, rows, index, act)


def dense_ffn() -> Callable[[int], object]:
    g = torch.Generator().manual_seed(1)
    make = torch.randn((D_FF, D_MODEL), generator=g).to(torch.bfloat16) / D_MODEL**0.5
    layers = [(make.clone(), make.clone(), make.T.contiguous()) for _ in range(LAYERS)]
    x = torch.randn((1, D_MODEL), generator=g).to(torch.bfloat16)

    def call(i: int) -> torch.Tensor:
        gate, up, down = layers[i % LAYERS]
        hidden = functional.relu(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(hidden, down)

    return call


def kernel(layers: Layers, spec: FfnSpec, given: bool) -> Callable[[int], object]:
    def call(i: int) -> torch.Tensor:
        k = i % LAYERS
        act = layers.act[k] if given else None
        return numba_cpu.ffn_union(layers.x, layers.rows[k], layers.index[k], spec, act=act)

    return call


def kernel_2t(
    layers: Layers, spec: FfnSpec, given: bool, pool: ThreadPoolExecutor
) -> Callable[[int], object]:
    halves = [torch.tensor_split(index, 2) for index in layers.index]
    acts = [torch.tensor_split(act, 2, dim=1) for act in layers.act]

    def call(i: int) -> torch.Tensor:
        k = i % LAYERS
        parts = pool.map(
            lambda half: numba_cpu.ffn_union(
                layers.x, layers.rows[k], halves[k][half], spec,
                act=acts[k][half] if given else None,
            ),
            range(2),
        )  # fmt: skip
        first, second = parts
        return numba_cpu.total(first + second)

    return call


def seconds(call: Callable[[int], object], i: int, clock: Callable[[], float]) -> float:
    start = clock()
    call(i)
    return clock() - start


def measure(
    fmt: Format, dense: Callable[[int], object], repeats: int, n_active: int
) -> tuple[list[Timed], list[float], list[float]]:
    """Timings; and of all repeats, the read bandwidths in bytes/s and the dense seconds."""
    layers = make_layers(fmt, n_active)
    to_read = np.ones(READ_BYTES // 8, np.int64)
    timed, bandwidths, dense_s = [], [], []
    ways: list[tuple[Numerics, bool]] = [
        ("fast", False), ("fast", True), ("deterministic", False), ("deterministic", True),
    ]  # fmt: skip
    cpu, wall = time.process_time, time.perf_counter
    with ThreadPoolExecutor(2) as pool:
        for numerics, given in ways:
            spec = FfnSpec(D_MODEL, True, "relu", 0.0, fmt, numerics)
            one = kernel(layers, spec, given)
            two = kernel_2t(layers, spec, given, pool)
            n_bytes = n_active * (2 if given else 3) * row_bytes(fmt, D_MODEL)
            rows = []
            for i in range(-2, repeats):  # two to warm up
                read = READ_BYTES / seconds(lambda _: to_read.sum(), i, cpu)
                own, reference = seconds(one, i, cpu), seconds(dense, i, cpu)
                own_2t = seconds(two, i, wall)
                torch.set_num_threads(2)
                reference_2t = seconds(dense, i, wall)
                torch.set_num_threads(1)
                if i < 0:
                    continue
                bandwidths.append(read)
                dense_s.append(reference)
                rows.append(
                    (own, n_bytes / own / read, reference / own, own_2t, reference_2t / own_2t)
                )
            own, share, ratio, own_2t, ratio_2t = (median(c) for c in zip(*rows, strict=True))
            timed.append(
                Timed(
                    fmt, numerics, "given" if given else "here", own / n_active * 1e6,
                    n_bytes / own, share, ratio, own_2t / n_active * 1e6, ratio_2t,
                )
            )  # fmt: skip
    return timed, bandwidths, dense_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    numba_cpu.warm_up()
    n_active = round(ACTIVE * D_FF)
    dense = dense_ffn()
    results, bandwidths, dense_s = [], [], []
    for fmt in args.formats:
        timed, read, reference = measure(fmt, dense, args.repeats, n_active)
        results += timed
        bandwidths += read
        dense_s += reference
    bandwidth, dense_ms = median(bandwidths), 1e3 * median(dense_s)
    if args.json:
        facts = {
            "d_model": D_MODEL, "d_ff": D_FF, "n_active": n_active,
            "read_bytes_per_s": bandwidth, "dense_bfloat16_ms": dense_ms,
            "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
        }  # fmt: skip
        json.dump({**facts, "kernels": [asdict(row) for row in results]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    write = sys.stdout.write
    write(
        f"FFN of d_model {D_MODEL}, d_ff {D_FF}, {n_active} neurons active; measured here: "
        f"{bandwidth / 1e9:.1f} GB/s read by one thread, dense bfloat16 {dense_ms:.1f} ms\n"
    )
    write(f"{'format':10}{'numerics':15}{'gate':7}{'us/neuron':>10}{'GB/s':>7}{'of read':>9}")
    write(f"{'x dense':>9}{'2T us/neuron':>14}{'2T x dense':>12}\n")
    for r in results:
        write(f"{r.fmt:10}{r.numerics:15}{r.gate:7}{r.us_per_neuron:10.2f}")
        write(f"{r.bytes_per_s / 1e9:7.1f}{r.of_read_bandwidth:9.0%}{r.times_dense:9.1f}")
        write(f"{r.us_per_neuron_2t:14.2f}{r.times_dense_2t:12.1f}\n")
    for r in results:
        if (r.fmt, r.numerics) == ("bfloat16", "fast"):
            met = r.times_dense >= GOAL_DENSE and r.of_read_bandwidth >= GOAL_BANDWIDTH
            write(
                f"gate {r.gate}: {r.times_dense:.1f} x dense (goal {GOAL_DENSE:g}), "
                f"{r.of_read_bandwidth:.0%} of the read bandwidth (goal {GOAL_BANDWIDTH:.0%}): "
                f"{'met' if met else 'NOT met'}\n"
            )


if __name__ == "__main__":
    main()

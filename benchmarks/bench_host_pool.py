"""What threads and priority of the host's pool do to a token, on an idle and on a busy machine.

    python benchmarks/bench_host_pool.py [--repeats 5] [--tokens 12] [--json]

The executor's own layer-steps (gate, lookup, swaps, residual and resident neurons, join) at the
shape of a 7B model in bfloat16, two layers, LRU with a quarter of the neurons, 15 % active, on this
host's CPU, unpaced: the model's thread stands in for the GPU, so that it and the pool compete for
the same cores and memory. Attention and head are left out. Busy: as many other processes as there
are cores, each in a loop at the usual priority. Wall times, medians over the repeats, which take
turns; the reference is one thread of the usual priority on the idle machine, in the same run.

nice is Linux's: the pool's threads get a smaller share of cores they compete for. Weights and
inputs are synthetic: normal rows drawn from a pool.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch

from kairox_exec.emulated import EmulatedDevice
from kairox_exec.families import family_of
from kairox_exec.ffn import LivePipeline
from kairox_exec.ffn_spec import FfnSpec
from kairox_exec.formats import storage_dtype
from kairox_exec.host_pool import HostPool
from kairox_exec.kernels import numba_cpu
from kairox_exec.layer_step import StepInfo
from kairox_exec.weights import NeuronBundles, row_names
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Fixed
from kairox_sim.policies import POLICIES

D_MODEL, D_FF, LAYERS, FMT = 4096, 11_008, 2, "bfloat16"
THRESHOLD = 1.036  # of a normal gate: 15 % exceed it
POOLS = ((1, 0), (2, 0), (1, 10), (1, 19), (2, 19))
POOL = 1024  # distinct rows of synthetic weights
SPIN = "while True: pass"


@dataclass(frozen=True)
class Timed:
    """Medians over the repeats, in ms per token."""

    others: int  # busy processes beside
    threads: int
    nice: int
    token_ms: float
    times_reference: float
    host_ms: float  # the pool's, from its first start to its last end, layers added
    waited_ms: float  # the model's thread, for the pool


def make_bundles() -> list[NeuronBundles]:
    g = torch.Generator().manual_seed(0)
    pool = (torch.randn((POOL, D_MODEL), generator=g) / D_MODEL**0.5).to(torch.bfloat16)
    family = family_of({"model_type": "llama", "hidden_act": "relu"})
    spec = FfnSpec(D_MODEL, True, "relu", THRESHOLD, FMT)
    names = row_names(family, "exact")
    made = []
    for layer in range(LAYERS):
        rows = torch.empty((D_FF, len(names), spec.width), dtype=storage_dtype(FMT))
        for i in range(len(names)):
            rows[:, i] = pool[torch.randint(0, POOL, (D_FF,), generator=g)]
        gate = (torch.randn((D_FF, D_MODEL), generator=g) / D_MODEL**0.5).to(torch.bfloat16)
        made.append(NeuronBundles(layer, "exact", spec, names, rows, gate, None, None, None))
    return made


@contextmanager
def others(n: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(n):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(process.kill)
        yield


def token_times(
    bundles: Sequence[NeuronBundles], pool: HostPool, n_tokens: int
) -> tuple[float, float, float]:
    """(ms per token, of the pool, waited for it): medians over `n_tokens` after a warm-up of 3."""
    g = torch.Generator().manual_seed(1)
    slots = D_FF // 4
    cache = NeuronCache(
        LAYERS, D_FF, slots, POLICIES["lru"](LAYERS, D_FF), Fixed(0.3),
        warm=[np.arange(slots)] * LAYERS, trigger="after",
    )  # fmt: skip
    tokens, hosts, waits = [], [], []
    with EmulatedDevice(pool=pool) as device:
        pipeline = LivePipeline(
            cache, device, bundles, host_kernels=numba_cpu, device_kernels=numba_cpu
        )
        for step in range(n_tokens + 3):
            x = torch.randn((1, D_MODEL), generator=g)
            began_ns = pipeline.start_step(StepInfo(0, step, "decode", np.zeros(1, np.int32), 1))
            for layer in range(LAYERS):
                pipeline.after_attention(layer, x)
                pipeline.ffn(layer, x)
            ended_ns = pipeline.end_step()
            ops, device.ops = device.ops, []
            if step >= 3:
                tokens.append((ended_ns - began_ns) / 1e6)
                hosts.append(sum(op.t1_ns - op.t0_ns for op in ops if op.lane == "cpu") / 1e6)
                waits.append(
                    sum(op.t1_ns - op.t0_ns for op in ops if (op.lane, op.kind) == ("idle", "cpu"))
                    / 1e6
                )
        device.drop_copies()
    return median(tokens), median(hosts), median(waits)


def measure(repeats: int, n_tokens: int) -> list[Timed]:
    torch.set_num_threads(1)
    bundles = make_bundles()
    token_times(bundles, HostPool(2), 3)  # compiles
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[tuple[int, int, int], list[tuple[float, float, float]]] = {}
    for _ in range(repeats):
        for n_others in (0, n_cores or 1):
            with others(n_others):
                for threads, nice in POOLS:
                    if nice and not sys.platform.startswith("linux"):
                        continue
                    timed = token_times(bundles, HostPool(threads, nice), n_tokens)
                    found.setdefault((n_others, threads, nice), []).append(timed)
    reference = found[0, 1, 0]
    rows = []
    for (n_others, threads, nice), timed in found.items():
        token_ms, host_ms, waited_ms = (median(column) for column in zip(*timed, strict=True))
        ratios = [one[0] / of[0] for one, of in zip(timed, reference, strict=True)]
        rows.append(Timed(n_others, threads, nice, token_ms, median(ratios), host_ms, waited_ms))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.repeats, options.tokens)
    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return
    sys.stdout.write(
        f"host pool, {LAYERS} layers of {D_FF} x {D_MODEL} {FMT}, {platform.machine()}, "
        f"{os.cpu_count()} cores, wall times, {options.repeats} repeats of {options.tokens} "
        "tokens\n"
        "busy others  threads  nice  ms/token  x reference  pool ms  waited for it ms\n"
    )
    for row in rows:
        sys.stdout.write(
            f"{row.others:11d}  {row.threads:7d}  {row.nice:4d}  {row.token_ms:8.1f}  "
            f"{row.times_reference:11.2f}  {row.host_ms:7.1f}  {row.waited_ms:16.1f}\n"
        )


if __name__ == "__main__":
    main()

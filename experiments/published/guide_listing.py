"""The ten lines that the guide's listing prints, from our objects, with what was resident before.

    python -m experiments.published.guide_listing -o out/published

Inputs are those of the guide's demo (tests/golden/seed_replay.json, case `demo`); decisions are
made by NeuronCache, Tam and Anb with swaps that land at once (trigger `instant`); times are of the
profile `guide`. The guide counts as a hit what it has loaded in this very step; `before` counts
what was resident when the step began, and 83.3 % is 150 / 180 by construction.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.published.data import number, sha256, source_hashes, table
from experiments.published.tables import Row, relative, write_tables
from kairox_sim.cache import NeuronCache
from kairox_sim.controllers import Anb
from kairox_sim.costs import CostModel, costs_for
from kairox_sim.errors import KairoxError
from kairox_sim.hardware import load_profile
from kairox_sim.model import ModelShape
from kairox_sim.policies import Tam
from kairox_sim.provenance import profile_sha256
from kairox_sim.record import StepRecord

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "seed_replay.json"
STEM = "guide_listing"


@dataclass(frozen=True, slots=True)
class Line:
    """One step of the demo. Percentages of the neurons evaluated in it."""

    step: int  # from 1
    hit_percent: float  # as the guide counts: after this step's promotions
    before_percent: float  # resident before the step
    promoted: int
    t_gpu_ms: float
    t_io_ms: float
    t_cpu_ms: float
    modifier: float  # threshold_scale after the step, as printed

    def text(self) -> str:
        """In the guide's order, `before` last."""
        return (
            f"step {self.step:2d}  hit {self.hit_percent:4.1f} %  promoted {self.promoted:3d}  "
            f"T_GPU {self.t_gpu_ms:.2f} ms  T_IO {self.t_io_ms:.2f} ms  "
            f"T_CPU {self.t_cpu_ms:5.2f} ms  mod {self.modifier:.3f}   "
            f"resident before: {self.before_percent:4.1f} %"
        )


def demo_case(golden: Path = GOLDEN) -> dict[str, Any]:
    """The guide's demo: inputs per step and layer."""
    cases = json.loads(golden.read_text(encoding="utf-8"))["cases"]
    return next(case for case in cases if case["name"] == "demo")


def demo_costs(n_layers: int, n_neurons: int) -> CostModel:
    """The profile `guide` on a model of the demo's size whose bundles are the guide's 13B ones."""
    shape = ModelShape(
        name="guide-demo", n_layers=n_layers, d_model=5120, n_neurons=n_neurons, n_heads=40,
        n_kv_heads=40, head_dim=128, vocab=32000, gated=True, activation="relu",
        activation_threshold=0.0, bytes_per_weight=2, tied_embedding=False, predictor_rank=None,
        source="the Kairox Guide's demo: 4 layers of 4,096; rows of its LLaMA-2-13B",
    )  # fmt: skip
    return costs_for(
        load_profile("guide"), shape, "oracle",
        trace_layers=n_layers, trace_neurons=n_neurons, predictor="none",
    )  # fmt: skip


def replay(case: dict[str, Any]) -> list[Line]:
    """Step by step: plan, land at once, look up; the controller sees the guide's three times."""
    n_layers, n_neurons = case["n_layers"], case["n_neurons"]
    costs = demo_costs(n_layers, n_neurons)
    tam = {name: number("guide", "listing_tam", name) for name in table("guide", "listing_tam")}
    anb = {name: number("guide", "listing_anb", name) for name in table("guide", "listing_anb")}
    slots = case["slots_per_layer"]
    cache = NeuronCache(n_layers, n_neurons, slots, Tam(n_layers, n_neurons, **tam), Anb(**anb))
    lines = []
    for step, given in enumerate(case["steps"], start=1):
        for layer, row in enumerate(given["layers"]):
            swaps = cache.plan(layer, row["active"])
            cache.commit([swap.id for swap in swaps])
            cache.lookup(layer, row["active"], row["active"])
        counts = cache.take_counts()
        t_gpu_s = costs.head_s(1) + costs.ffn_gpu_s(counts.hit_on_time, 1)
        t_io_s = costs.swap_s(counts.loads) if counts.loads else 0.0
        t_cpu_s = costs.ffn_cpu_s(counts.residual, 1)
        record = StepRecord.with_unknown(
            step=step, gpu_busy_s=t_gpu_s, cpu_busy_s=t_cpu_s, swap_busy_s=t_io_s
        )
        knobs = cache.end_step(record)
        lines.append(
            Line(
                step, 100 * counts.hit_on_time / counts.evaluated,
                100 * counts.hit_resident / counts.evaluated, counts.loads,
                t_gpu_s * 1e3, t_io_s * 1e3, t_cpu_s * 1e3, knobs.threshold_scale,
            )
        )  # fmt: skip
    return lines


def rows(lines: list[Line]) -> list[Row]:
    """Each printed number beside ours; the same to every printed digit, or a miss."""
    printed = table("guide", "printed_demo")
    units = {"hit_percent": ("%", 1), "promoted": ("neurons", 0), "t_cpu_ms": ("ms", 2),
             "t_io_ms": ("ms", 2), "modifier": ("1", 3)}  # fmt: skip
    made = []
    for line in lines:
        for name, (unit, digits) in units.items():
            published, ours = float(printed[name][line.step - 1]), float(asdict(line)[name])
            same = round(ours, digits) == published
            made.append(
                Row(
                    source="the Kairox Guide, listing", what=f"step {line.step}, {name}",
                    published=published, simulated=ours, unit=unit, kind="predicted",
                    error=relative(published, ours) if unit != "%" else ours - published,
                    verdict="pass" if same else "miss",
                    why="" if same else f"differs in digit {digits} after the point",
                )
            )  # fmt: skip
    return made


def main(arguments: list[str] | None = None) -> None:
    """Print the lines; write them beside the printed ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("out/published"))
    given = parser.parse_args(arguments)
    lines = replay(demo_case())
    sys.stdout.write("\n".join(line.text() for line in lines) + "\n")
    inputs = {
        **source_hashes("guide"),
        "seed_replay.json": sha256(GOLDEN),
        "profile guide": profile_sha256(load_profile("guide")),
    }
    notes = ["```\n" + "\n".join(line.text() for line in lines) + "\n```"]
    title = "The guide's listing, from our objects"
    _, page = write_tables(rows(lines), given.out, STEM, title, inputs, notes)
    sys.stdout.write(f"wrote {page}\n")


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"{STEM}: {error}")

"""The guide's throughput, time breakdown and hit rates against runs of its systems.

    python -m experiments.published.guide_table -o out/published

ProSparse-13B stands for its LLaMA-2-13B (the plain one is not ReLU-sparse), in FP16, on `pc1`;
synthetic sets. The guide's testbeds are not the paper's and its numbers have no source, so every
row is an audit: shown, above our ceiling where the bytes of the share
assumed are too many, not reachable where no share helps. Nothing is fitted here; the margin of VRAM
is that of fitted.toml, as on every page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.published.audit_basis import Basis
from experiments.published.data import number, source_hashes, table
from experiments.published.guide_runs import GROUPS, MACHINE, SYSTEMS, hits, run
from experiments.published.machines import fitted_hash, margined
from experiments.published.tables import Row, row, write_tables
from kairox_sim.errors import KairoxError
from kairox_sim.provenance import profile_sha256

STEM = "guide_table"
SOURCE = "the Kairox Guide"
PERSISTENCES = (0.0, 0.3, 0.6, 0.9)
BUDGETS = (0.019, 0.03, 0.05, 0.10, 0.22, 0.47, 0.70, 0.90)  # of a layer's neurons
NEAR = 3.0  # points


def throughput_rows(persistences: tuple[float, ...]) -> list[Row]:
    """Tokens/s by system; Kairox's and PowerInfer's bounds as ceilings."""
    basis = Basis()
    pc1, share = basis.pc1, basis.predicted_share
    static = 1 / pc1.static_s(share)
    true = 1 / pc1.any_policy_s(basis.true_share)
    assumed = (
        f"assumes for 13B the {share:.1%} that a predictor fires on 7B; with the "
        f"{basis.true_share:.1%} that fire it is {true:.1f} tokens/s (guide_audit, T5)"
    )
    ceiling = {
        "PowerInfer": static,
        "Q-Infer": static,
        "Neuralink": 1 / pc1.any_policy_s(share),
        "Kairox": 1 / pc1.any_policy_s(share),
        "llama.cpp": 1 / pc1.llama_s,
    }
    rows = []
    for published, ours in SYSTEMS.items():
        for system in ours:
            for persistence in persistences if system != "llama.cpp" else (0.0,):
                ran = run(system, persistence)
                rows.append(
                    row(
                        f"{SOURCE}, throughput",
                        f"{published}: {system}, persistence {persistence:g}",
                        number("guide", "throughput", published), ran.tokens_per_s, "tokens/s",
                        kind="audit", ceiling=ceiling[published],
                        ceiling_leans_on=assumed
                        if number("guide", "throughput", published) <= true
                        else "",
                        number=f"throughput, {published}",
                        why=f"simulated: {ran.hit_resident:.0f} % resident before, "
                        f"{ran.hit_on_time:.0f} % on time, {ran.loads_per_layer_step:.0f} loads a "
                        f"layer-step; roofline {ceiling[published]:.1f} tokens/s",
                    )
                )  # fmt: skip
    return rows


def breakdown_rows(persistence: float) -> list[Row]:
    """Milliseconds a token by part."""
    said = table("guide", "time_breakdown")
    rows = []
    for name, system in (("powerinfer", "powerinfer"), ("kairox", "kairox-guide")):
        ran = run(system, persistence)
        parts = {"gpu": ran.gpu_ms, "cpu": ran.cpu_ms, "prefetch": ran.io_ms}
        parts["total"] = 1e3 / ran.tokens_per_s
        rows += [
            row(f"{SOURCE}, time breakdown", f"{system}: {part}, persistence {persistence:g}",
                said[f"{name}_{part}"], ours, "ms/token", kind="audit",
                why="busy time of a part; parts overlap, except in the guide's totals")
            for part, ours in parts.items() if f"{name}_{part}" in said
        ]  # fmt: skip
    return rows


def hit_rows(persistences: tuple[float, ...]) -> list[Row]:
    """For each hit rate and each definition: the nearest workload, and all that come near."""
    said = table("guide", "hit_rate")
    wanted = [("tam", said["kairox_low"]), ("tam", said["kairox_high"]), ("lru", said["lru"])]
    names = {"before": "resident before the step", "after": "after the step's loads",
             "of_resident": "share of residents that fire"}  # fmt: skip
    cells = [(budget, p) for budget in BUDGETS for p in persistences]
    rows = []
    for policy, published in wanted:
        for definition, text in names.items():
            found = {cell: float(getattr(hits(policy, *cell), definition)) for cell in cells}
            best = min(cells, key=lambda cell: abs(found[cell] - published))
            near = [cell for cell in cells if abs(found[cell] - published) <= NEAR]
            said_near = "; ".join(f"{b:.0%} resident, persistence {p:g}" for b, p in near)
            rows.append(
                row(
                    f"{SOURCE}, hit rate",
                    f"{policy}: {text}; nearest at {best[0]:.0%} resident, persistence {best[1]:g}",
                    published, found[best], "%", kind="audit",
                    why=f"within {NEAR:g} points: {said_near or 'no workload tried'}",
                )
            )  # fmt: skip
    return rows


def rows(persistences: tuple[float, ...] = PERSISTENCES) -> list[Row]:
    """All of it."""
    made = [*throughput_rows(persistences), *hit_rows(persistences)]
    for persistence in persistences:
        made += breakdown_rows(persistence)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Run and write the table: about a minute."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("out/published"))
    given = parser.parse_args(arguments)
    inputs = {
        **source_hashes("guide", "prosparse", "fork"),
        **fitted_hash(),
        f"profile {MACHINE}": profile_sha256(margined(MACHINE)),
    }
    pc1 = Basis().pc1
    fitting = pc1.slots / pc1.shape.n_neurons
    notes = [
        "Simulated rows are synthetic: ProSparse-13B, 4 of 40 alike layers, 100 tokens up to a "
        f"context of 1,024; prior: other text of the same workload; groups: {GROUPS}. Hit rates: "
        "one layer of the neurons that fire (11.2 %), loads free and at once, the second half of "
        f"120 tokens; what fits the guide's machine is {fitting:.1%} of a layer's neurons, with "
        "the margin of fitted.toml.",
    ]
    title = "The guide's numbers against runs of its systems"
    _, page = write_tables(rows(), given.out, STEM, title, inputs, notes)
    sys.stdout.write(f"wrote {page}\n")


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"{STEM}: {error}")

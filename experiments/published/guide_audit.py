"""The guide, row by row: what it says, what follows from it, a roofline, what our simulator says.

    python -m experiments.published.guide_audit -o out/published

T1 to T8 are its throughput table and time breakdown; 1 to 30 everything else that can be checked.
Every number is computed from the published values (*.toml beside), the catalogue and the profiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.published import audit_arithmetic, audit_paper, audit_rules, audit_tables
from experiments.published.audit_basis import AuditRow, Basis, Machine
from experiments.published.audit_simulated import simulated
from experiments.published.data import SOURCES, source_hashes
from experiments.published.guide_runs import described
from experiments.published.machines import fitted_hash, margined
from experiments.published.tables import footer, markdown, provenance, write_csv
from kairox_sim.errors import KairoxError
from kairox_sim.model import find_shape
from kairox_sim.outputs import require_folder
from kairox_sim.provenance import profile_sha256

STEM = "guide_audit"
VERDICTS = {
    "follows": "what it says follows from what it gives",
    "contradicts itself": "two of its own statements exclude each other",
    "contradicts its source": "the paper, the code or the datasheet says otherwise",
    "impossible by byte conservation": "more bytes than the memory, the link or the bus can give",
    "depends on the share evaluated": "bytes exclude it with one share of neurons evaluated and "
    "not "
    "with another; the row says which",
    "plausible": "within the roofline; not shown to be true",
    "not checkable": "nothing to check it against",
}
MACHINES = ("pc1", "pc2")


def all_rows(basis: Basis) -> list[AuditRow]:
    """T1 to T8, then 1 to 30."""
    seven = Machine(basis.pc1.profile, find_shape("prosparse-7b"))
    opt = Machine(basis.pc1.profile, find_shape("opt-6.7b"))
    return [
        *audit_tables.rows(basis),
        *audit_arithmetic.rows(basis, seven, opt),
        *audit_paper.rows(basis),
        *audit_rules.rows(basis),
    ]


def cells(rows: Sequence[AuditRow], said: dict[str, str]) -> list[dict[str, str]]:
    """The columns of the page; `said`: item -> what our simulator says."""
    return [
        {
            "row": row.item,
            "subject": row.subject,
            "the guide says": row.says,
            "from its own constants": row.own,
            "roofline, source or datasheet": row.roofline,
            "our simulator": said[row.item],
            "verdict": row.verdict,
        }
        for row in rows
    ]


def main(arguments: list[str] | None = None) -> None:
    """Write the page and the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("out/published"))
    parser.add_argument("--no-runs", action="store_true", help="leave out runs of the systems")
    given = parser.parse_args(arguments)
    folder = require_folder(given.out, "audit page")
    basis = Basis()
    rows = all_rows(basis)
    runs = None if given.no_runs else described()
    table = cells(rows, {row.item: simulated(row.item, basis, runs) for row in rows})
    profiles = {f"profile {n}": profile_sha256(margined(n)) for n in MACHINES}
    origin = provenance({**source_hashes(*SOURCES), **fitted_hash(), **profiles})
    numbers = [
        [row.item, name, f"{value:.6g}"] for row in rows for name, value in row.numbers.items()
    ]
    parts = [
        "# The Kairox Guide, row by row",
        "The guide is a secondary account of the OSDI '26 paper. A roofline is bytes over the "
        "rates "
        "of the profiles `pc1` and `pc2`, without fixed costs, and the VRAM margin is the fitted "
        "one of "
        f"{basis.pc1.profile.vram_margin_bytes.value / 1e9:g} GB (fitted.toml) on every page of "
        f"the "
        "guide, although it was fitted on other machines: one set of constants for all rows. It "
        f"leaves {basis.pc1.slots} slots a layer, the profile's own {basis.pc1_unfitted.slots}. "
        f"Shares of neurons: "
        f"{basis.true_share:.1%} fire (ProSparse-13B, arXiv 2402.13516), {basis.guide_share:.0%} "
        "is "
        f"the middle of the guide's range, {basis.predicted_share:.1%} are predicted (measured on "
        "ProSparse-7B, github.com/brothergiven/kairox.cpp, and assumed for 13B).",
        markdown(list(table[0]), [list(line.values()) for line in table]),
        "## Verdicts\n\n" + markdown(
            ["verdict", "means", "rows"],
            [[v, text, ", ".join(r.item for r in rows if r.verdict == v)]
             for v, text in VERDICTS.items()],
        ),
        "## Numbers behind the rows\n\n" + markdown(["row", "what", "value"], numbers),
        footer(origin),
    ]  # fmt: skip
    page = folder / f"{STEM}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    write_csv(folder / f"{STEM}.csv", table, origin)
    sys.stdout.write(f"wrote {page}\n")


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"{STEM}: {error}")

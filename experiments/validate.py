"""Gate G3 on emulated machines: calibrate each, run its settings of validate.toml live, compare.

    python -m experiments.validate --out out/validate
    python -m experiments.validate --judge experiments/results/validation.json

Wants a quiet machine: an emulated run that cannot keep its pace is refused by calibration, and a
setting with such a repeat is named and not judged; of fewer than SETTINGS clean ones nothing is
claimed. About nine minutes. Exits with 1 unless the gate passes. --judge judges a report again.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kairox_exec.as_run import kind_of
from kairox_exec.live import set_threads
from kairox_exec.live_run import ForcedText, calibrate, machine_for
from kairox_exec.validation import Validation, combined, validate
from kairox_sim.commands.calibrate import print_calibration
from kairox_sim.commands.options import progress
from kairox_sim.commands.validate import print_validation
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings
from kairox_sim.trace import Trace, read_trace

SPEC = Path(__file__).with_suffix(".toml")
SETTINGS = 12  # held out and clean, that the gate asks for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/validate"))
    parser.add_argument("--judge", type=Path, metavar="JSON", help="only judge this report again")
    asked = parser.parse_args()
    if asked.judge is None:
        result, where = run_all(asked.out), asked.out
    else:
        result, where = Validation.load(asked.judge, settings_needed=SETTINGS), asked.judge
    print_validation(result, where)
    return 0 if result.verdict.passed else 1


def run_all(out: Path) -> Validation:
    """Every machine of validate.toml, judged together; the report is in `out`."""
    spec = tomllib.loads(SPEC.read_text())
    prior = read_trace(spec["run"]["prior"], strict=True)
    set_threads(1)
    parts = []
    with progress() as bar:
        task = bar.add_task("calibrating", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        for machine in spec["machines"]:
            parts.append(_on(machine, spec["run"], spec["base"], prior, out, show))
    result = combined(parts, settings_needed=SETTINGS)
    result.dump(out)
    return result


def _on(
    wanted: dict[str, Any],
    run: dict[str, Any],
    base: dict[str, Any],
    prior: Trace,
    out: Path,
    show: Callable[[str, int, int], None],
) -> Validation:
    """One machine: calibrated on other tokens, then judged. Its files are in its own folder."""
    base = base | {"numerics": wanted["numerics"]}
    settings = [Settings.of(base | one) for one in wanted["settings"]]
    kind = kind_of(settings)
    machine = machine_for(
        run["model"],
        "emulated",
        emulate=run["emulate"],
        link=wanted["link"],
        kind=kind,
    )
    folder = out / f"{wanted['link']}-{wanted['numerics']}"
    folder.mkdir(parents=True, exist_ok=True)
    calibration = calibrate(
        run["model"],
        ForcedText([run["text"]], tokens=128, skip=run["calibration_skip"]),
        machine,
        kind=kind,
        on_run=show,
    )
    print_calibration(calibration, calibration.dump(folder / "hw.toml"))
    result = validate(
        run["model"],
        settings,
        ForcedText([run["text"]], tokens=run["tokens"], skip=run["skip"]),
        calibration,
        machine,
        folder,
        prior=prior,
        repeats=run["repeats"],
        on_progress=show,
    )
    result.dump(folder)  # a machine that is done is kept if a later one stops
    return result


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KairoxError as error:
        sys.exit(f"validate: {error}")

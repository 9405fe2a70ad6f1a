"""Gate G3 on the emulated machine: calibrate, run every setting of validate.toml live, compare.

    python -m experiments.validate --out out/validate

Wants a quiet machine: an emulated run that cannot keep its pace is refused by calibration, and its
share of overruns stands in the report.
"""

import argparse
import sys
import tomllib
from pathlib import Path

from kairox_exec.live import set_threads
from kairox_exec.live_run import ForcedText, calibrate, machine_for
from kairox_exec.validation import validate
from kairox_sim.commands.calibrate import print_calibration
from kairox_sim.commands.options import progress
from kairox_sim.commands.validate import print_validation
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings
from kairox_sim.trace import read_trace

SPEC = Path(__file__).with_suffix(".toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/validate"))
    out: Path = parser.parse_args().out
    spec = tomllib.loads(SPEC.read_text())
    run, base = spec["run"], spec["base"]
    settings = [Settings.of(base | one) for one in spec["settings"]]
    prior = read_trace(run["prior"], strict=True)
    set_threads(1)
    machine = machine_for(
        run["model"], "emulated", emulate=run["emulate"], model_as=base["model_as"]
    )
    with progress() as bar:
        task = bar.add_task("calibrating", total=None)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        before = ForcedText([run["text"]], tokens=128, skip=run["calibration_skip"])
        calibration = calibrate(
            run["model"], before, machine, model_as=base["model_as"], on_run=show
        )
        result = validate(
            run["model"],
            settings,
            ForcedText([run["text"]], tokens=run["tokens"], skip=run["skip"]),
            calibration,
            machine,
            out,
            prior=prior,
            repeats=run["repeats"],
            on_progress=show,
        )
    print_calibration(calibration, calibration.dump(out / "hw.toml"))
    result.dump(out)
    print_validation(result, out)


if __name__ == "__main__":
    try:
        main()
    except KairoxError as error:
        sys.exit(f"validate: {error}")

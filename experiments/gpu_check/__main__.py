"""Everything that needs a CUDA card, in under nine minutes: `make gpu-check`.

    python -m experiments.gpu_check --out out/gpu-check      on the card; offline, torch + numba
    python -m experiments.gpu_check --finish out/gpu-check   later, where the simulator is installed
    python -m experiments.gpu_check --rehearse               toy sizes on the CPU, nothing claimed

Five parts, each with its own time and its own file, written when it is done: a part that fails is
reported and the rest goes on. Without a card it says so and claims nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.gpu_check.place import Left, Place

NOTHING = "gpu-check: {}; nothing was run and nothing is claimed\n"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    budget_s: float  # 500 s together
    run: Callable[[Place, Path, Left], dict[str, Any]]


def parts() -> list[Part]:
    from experiments.gpu_check.bits import check_bits
    from experiments.gpu_check.finish import check_prediction
    from experiments.gpu_check.large import check_large
    from experiments.gpu_check.links import check_links
    from experiments.gpu_check.tiny import check_tiny

    return [
        Part("links", 60, check_links),
        Part("bits", 60, check_bits),
        Part("tiny", 60, check_tiny),
        Part("large", 290, check_large),
        Part("prediction", 30, check_prediction),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"))
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--parts", help="some of links,bits,tiny,large,prediction")
    parser.add_argument("--finish", type=Path, metavar="DIR", help="fit and predict what DIR holds")
    asked = parser.parse_args()
    if asked.finish is not None:
        return _finish(asked.finish)
    try:
        import torch
    except ModuleNotFoundError:
        sys.stdout.write(NOTHING.format(f"torch is not installed for {sys.executable}"))
        return 0
    from experiments.gpu_check.place import Place, conditions, missing, write_json
    from kairox_exec.kernels import numba_cpu

    why = None if asked.rehearse else missing()
    if why is not None:
        sys.stdout.write(NOTHING.format(why))
        return 0
    place, out = Place(asked.rehearse), asked.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1 if place.rehearse else place.host_threads)
    chosen = _chosen(asked.parts)
    write_json(out / "conditions.json", conditions(place))
    sys.stdout.write(f"{place.label}\n")
    numba_cpu.warm_up()  # seconds of compiling that are in no part's time
    failed = [part.name for part in chosen if not _ran(part, place, out)]
    from experiments.gpu_check.figures import draw

    sys.stdout.write(f"{draw(out)}\nresults: {out}\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _chosen(names: str | None) -> list[Part]:
    every = {part.name: part for part in parts()}
    wanted = list(every) if names is None else names.split(",")
    unknown = [name for name in wanted if name not in every]
    if unknown:
        sys.exit(f"gpu-check: no part {', '.join(unknown)}; allowed: {', '.join(every)}")
    return [every[name] for name in wanted]


def _ran(part: Part, place: Place, out: Path) -> bool:
    """Run a part and write its file; whether it did not fail."""
    from experiments.gpu_check.place import write_json

    began = time.monotonic()

    def left() -> float:
        return part.budget_s - (time.monotonic() - began)

    try:
        result = part.run(place, out, left)
    except Exception as error:  # whatever it is, the other parts are worth having
        result = {
            "passed": False,
            "said": f"failed: {type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    result = {
        "part": part.name,
        "label": place.label,
        "seconds": time.monotonic() - began,
        "budget_s": part.budget_s,
    } | result
    write_json(out / f"{part.name}.json", result)
    word = {True: "passes", False: "fails", None: "claims nothing"}[result["passed"]]
    sys.stdout.write(f"{part.name:<11}{word}, {result['seconds']:.0f} s: {result['said']}\n")
    sys.stdout.flush()
    return result["passed"] is not False


def _finish(folder: Path) -> int:
    from experiments.gpu_check.figures import draw
    from experiments.gpu_check.finish import finish
    from experiments.gpu_check.place import write_json

    if not (folder / "large.json").is_file():
        sys.exit(f"gpu-check: {folder} holds no large.json; --finish wants the folder of a run")
    result = {"part": "prediction"} | finish(folder)
    write_json(folder / "prediction.json", result)
    sys.stdout.write(f"{result['said']}\n{draw(folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

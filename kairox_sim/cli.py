"""The `kairox` program. A command is one function in one module of `commands`, and a row here.

The functions import what they need inside, so that `kairox --help` is quick and the commands of
the simulator run without torch.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer
from pydantic import ValidationError

from kairox_sim.commands.best import best
from kairox_sim.commands.bundles import bundles
from kairox_sim.commands.calibrate import calibrate
from kairox_sim.commands.catalogue import hardware, models
from kairox_sim.commands.doctor import doctor
from kairox_sim.commands.generate import generate
from kairox_sim.commands.group import group
from kairox_sim.commands.info import info
from kairox_sim.commands.options import print_warnings, say
from kairox_sim.commands.plot import plot
from kairox_sim.commands.record import record
from kairox_sim.commands.score import score
from kairox_sim.commands.simulate import simulate
from kairox_sim.commands.sparsify import sparsify
from kairox_sim.commands.sweep import sweep
from kairox_sim.commands.systems import policies, systems
from kairox_sim.commands.train_predictor import train_predictor
from kairox_sim.commands.validate import validate
from kairox_sim.commands.workload import workload
from kairox_sim.errors import KairoxError

COMMANDS: tuple[Callable[..., Any], ...] = (
    record, info, workload, group, systems, policies, hardware, models, simulate, sweep, plot, best,
    calibrate, generate, score, sparsify, train_predictor, validate, doctor, bundles,
)  # fmt: skip
BAD_INPUT = 2  # exit code
NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write; of another one it is a mistake

app = typer.Typer(
    name="kairox",
    help="Record which FFN neurons fire, replay them through a model of GPU, CPU and PCIe, sweep "
    "caching policies, and run the best one live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Bad input is one message on standard error and exit code 2."""
    warnings.showwarning = _warn
    try:
        app(args=None if arguments is None else list(arguments))
    except KairoxError as error:
        say(f"kairox: {error}")
        sys.exit(BAD_INPUT)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        say(f"kairox: {'; '.join(problems)}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:  # a file that cannot be made or read; every one of them has a name
        if error.filename is None and error.errno in NAMELESS:
            say(f"kairox: cannot write: {error.strerror}; free some space, or name another folder")
            sys.exit(BAD_INPUT)
        if error.filename is None:
            raise
        say(f"kairox: cannot use {os.fsdecode(error.filename)!r}: {error.strerror}")
        sys.exit(BAD_INPUT)


def _warn(message: Warning | str, category: Any, *place: Any, **more: Any) -> None:
    """Without the place in the source that Python names, which is ours and helps nobody."""
    print_warnings([str(message)])


if __name__ == "__main__":
    main()

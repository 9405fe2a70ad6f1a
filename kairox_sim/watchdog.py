"""Run a simulation to its end, or say who waits for whom."""

from collections.abc import Callable, Mapping
from math import inf

import simpy


def run_to_end(
    env: simpy.Environment,
    processes: Mapping[str, simpy.Process],
    describe: Callable[[simpy.Event], str] = str,
) -> None:
    """Run until these processes have finished; raise if that cannot happen any more.

    SimPy's own `run` returns silently when every process left is waiting for another. The error
    names who waits for whom; `describe` says what an event is that is no request of a resource.
    """
    for process in processes.values():
        while not process.processed:  # not merely dead: a failure is raised when it is processed
            if env.peek() == inf:
                raise RuntimeError(_stranded(env.now, processes, describe))
            env.step()


def _stranded(
    now_ns: float,
    processes: Mapping[str, simpy.Process],
    describe: Callable[[simpy.Event], str],
) -> str:
    names = {process: name for name, process in processes.items()}
    lines = []
    for name, process in processes.items():
        if not process.is_alive:
            continue
        target = process.target
        resource = getattr(target, "resource", None)
        holders = [names.get(user.proc, "somebody") for user in getattr(resource, "users", [])]
        if isinstance(target, simpy.Process):
            what = names.get(target, str(target))
        elif holders:
            what = f"{' and '.join(holders)} to give up a resource"
        else:
            what = describe(target)
        lines.append(f"{name} waits for {what}")
    return f"at {now_ns} ns nothing can happen any more: " + "; ".join(lines)

"""Run a simulation to its end, or say who waits for whom."""

from collections.abc import Mapping

import simpy


def run_to_end(env: simpy.Environment, processes: Mapping[str, simpy.Process]) -> None:
    """Run until nothing is scheduled; raise if a process has not finished, with who waits for whom.

    SimPy's own `run` returns silently when every process left is waiting for another.
    """
    env.run()
    stuck = {name: process for name, process in processes.items() if process.is_alive}
    if not stuck:
        return
    names = {process: name for name, process in processes.items()}
    lines = []
    for name, process in stuck.items():
        resource = getattr(process.target, "resource", None)
        holders = [names.get(user.proc, "?") for user in getattr(resource, "users", [])]
        what = f"{' and '.join(holders)} to give up a resource" if holders else str(process.target)
        lines.append(f"{name} waits for {what}")
    raise RuntimeError(f"at {env.now} ns nothing can happen any more: " + "; ".join(lines))

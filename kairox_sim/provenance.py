"""Where a result came from: version, commit, and hashes of what went in. No clock times."""

from __future__ import annotations

import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from kairox_sim.hardware import HardwareProfile
from kairox_sim.settings import Settings
from kairox_sim.trace import Trace


def code_version() -> dict[str, str]:
    """Package version, and the git commit of a checkout ("unknown" outside of one)."""
    try:
        version = metadata.version("kairox")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {"version": version, "git_commit": _git_commit(Path(__file__).parent.parent)}


def _git_commit(root: Path) -> str:
    if not (root / ".git").exists():  # installed: a repository around it is somebody else's
        return "unknown"
    try:
        commit = _git(root, "rev-parse", "HEAD")
        # What is made is no change to what makes it.
        code = (".", ":(exclude)experiments/results")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def profile_sha256(profile: HardwareProfile) -> str:
    """Of all its numbers and sources, the link put on it included."""
    content = json.dumps(profile.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def inputs_of(
    trace: Trace, prior: Trace | None, profile: HardwareProfile, settings: Settings
) -> dict[str, Any]:
    """Hashes and names of what a simulated run was made from."""
    return {
        "trace_sha256": trace.sha256,
        "trace_model": trace.header.model,
        "prior_sha256": None if prior is None else prior.sha256,
        "hardware": profile.name,
        "profile_sha256": profile_sha256(profile),
        "seed": settings.seed,
    }

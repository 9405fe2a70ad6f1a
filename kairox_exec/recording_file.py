"""The file of a recording: where it is streamed to, and what becomes of it at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from kairox_sim.errors import KairoxError
from kairox_sim.machine_facts import gpu_facts
from kairox_sim.trace import seal
from kairox_sim.trace_format import TraceHeader


class Recorded(Protocol):
    """A recorder, when it is closed."""

    @property
    def header(self) -> TraceHeader: ...
    @property
    def n_steps(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def overhead(self) -> float:
        """Share of the steps' time."""
        ...


def free_path(out: Path, force: bool) -> Path:
    """Where to stream to, so that nothing that is already recorded can be lost."""
    if not out.parent.is_dir():
        raise KairoxError(f"there is no folder {out.parent} to record {out.name} in")
    if not out.exists():
        return out
    if out.is_dir():
        raise KairoxError(f"{out} is a folder; name the file to record")
    if not force:
        raise KairoxError(f"{out} exists; name another file, or overwrite it with --force")
    beside = out.with_name(out.name + ".recording")
    if beside.exists():
        raise KairoxError(
            f"{beside} is of a recording that did not end; rename it to keep it, or remove it"
        )
    return beside


def seal_recording(recorded: Recorded, stream: Path, out: Path, **header_updates: Any) -> Path:
    """The stream as a sealed file at `out`, with what is known only at the end."""
    updates = {"recorder_overhead": recorded.overhead, **header_updates}
    hardware = recorded.header.hardware | {"gpus_at_end": gpu_facts()}
    sealed = seal(stream, out, header_updates={"hardware": hardware, **updates})
    if stream != out:
        stream.unlink()
    return sealed


def seal_what_there_is(recorded: Recorded, stream: Path, out: Path, **header_updates: Any) -> str:
    """Of a run that was stopped; what to say of it."""
    if recorded.n_steps == 0:
        stream.unlink()
        return "stopped before the first step; nothing was recorded"
    seal_recording(recorded, stream, out, **header_updates)
    return f"stopped; the first {recorded.n_tokens} tokens are in {out}"


def keep_what_there_is(recorded: Recorded, stream: Path) -> str:
    """Of a run that failed; what to say of it."""
    if recorded.n_steps == 0:
        stream.unlink()
        return "Nothing was recorded"
    return f"The {recorded.n_tokens} tokens before it are in {stream}"

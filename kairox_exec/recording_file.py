"""The file of a recording: where it is streamed to, and what becomes of it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kairox_sim.errors import KairoxError
from kairox_sim.machine_facts import gpu_facts
from kairox_sim.outputs import require_place
from kairox_sim.trace import read_trace, seal
from kairox_sim.trace_format import TraceHeader

STOPPED_EARLY = "stopped before the first step; nothing was recorded"


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
    if not out.is_file():  # it would be replaced, /dev/null for everybody
        raise KairoxError(f"{out} is a device or a pipe; name the file to record")
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
    try:
        sealed = seal(stream, out, header_updates={"hardware": hardware, **updates})
    except OSError as error:
        raise KairoxError(
            f"cannot seal {out}: {error.strerror or error}. The whole recording is in {stream} and "
            "can be read as it is"
        ) from error
    if stream != out:
        stream.unlink()
    return sealed


def seal_what_there_is(recorded: Recorded, stream: Path, out: Path, **header_updates: Any) -> str:
    """Of a run that was stopped; what to say of it."""
    if recorded.n_steps == 0:
        stream.unlink()
        return STOPPED_EARLY
    seal_recording(recorded, stream, stream, **header_updates)
    old = "" if stream == out else f"; {out} is as it was"
    return f"stopped; the first {recorded.n_tokens} tokens are in {stream}{old}"


def keep_what_there_is(recorded: Recorded, stream: Path) -> str:
    """Of a run that failed; what to say of it."""
    try:
        n_tokens = read_trace(stream).n_tokens if recorded.n_steps else 0
    except KairoxError:  # not even its header is whole
        n_tokens = 0
    if n_tokens == 0:
        stream.unlink()
        return "Nothing was recorded"
    return f"The {n_tokens} tokens before it are in {stream}"


def failure(error: KairoxError | OSError, said: str) -> KairoxError:
    """Of a run that ended in `error`: what it was, and what `keep_what_there_is` said."""
    if isinstance(error, KairoxError):
        return KairoxError(f"{error}. {said}")
    return KairoxError(f"cannot write the recording: {error.strerror or error}. {said}")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside the trace. With force it is streamed to another name, and then replaces it."""

    out: Path
    stream: Path

    def keep(self) -> None:
        if self.stream != self.out:
            self.stream.replace(self.out)

    def drop(self) -> None:
        self.stream.unlink(missing_ok=True)


def drop_if_empty(recorded: Recorded, files: Sequence[SideFile]) -> None:
    """Of a run that ended early: files of no step would be in the way of the next one."""
    if recorded.n_steps == 0:
        for file in files:
            file.drop()


def side_file(path: str | Path, noun: str, force: bool) -> SideFile:
    place = require_place(path, noun)
    return SideFile(place, free_path(place, force))

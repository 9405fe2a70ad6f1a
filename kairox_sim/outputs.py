"""Where results go: refused before anything is computed, not after."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kairox_sim.errors import KairoxError


def require_place(path: str | Path, noun: str) -> Path:
    """`path`, if a file can be made there; KairoxError says why it cannot. Makes nothing."""
    place = Path(path)
    if not place.name:
        raise KairoxError(f"{os.fspath(path)!r} names no file for the {noun}")
    if place.is_dir():
        raise KairoxError(f"{str(place)!r} is a folder; name a file for the {noun}")
    if place.exists() and not place.is_file():  # it would be replaced, /dev/null for everybody
        raise KairoxError(
            f"{str(place)!r} is a device or a pipe; name an ordinary file for the {noun}"
        )
    if not place.parent.is_dir():
        raise KairoxError(
            f"there is no folder {str(place.parent)!r} for the {noun} {place.name!r}; make it first"
        )
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise KairoxError(f"no permission to write the {noun} {str(place)!r}")
    return place


def require_folder(path: str | Path, noun: str) -> Path:
    """`path` as a folder, made where it is missing."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KairoxError(
            f"cannot make the folder {str(folder)!r} for the {noun}: {error.strerror}; name another"
        ) from error
    return folder


def require_apart(outputs: Mapping[str, str | Path | None], inputs: Iterable[str | Path]) -> None:
    """Refuse two outputs in one file, and one over what is read. outputs: by noun, None: none."""
    taken = {Path(path).resolve(): "is read in this run" for path in inputs}
    for noun, path in outputs.items():
        if path is None:
            continue
        place = Path(path).resolve()
        if place in taken:
            raise KairoxError(f"{noun}: {os.fspath(path)!r} {taken[place]}; name another file")
        taken[place] = f"is the file of the {noun} too"

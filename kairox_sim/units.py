"""Sizes in bytes with their unit said: GB is 1e9, GiB is 2**30."""

from __future__ import annotations

import re

from kairox_sim.errors import KairoxError

UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


def is_size(text: str) -> bool:
    """Whether `text` reads as a number with a unit of bytes."""
    match = _SIZE.fullmatch(text)
    return match is not None and match[2] in UNITS


def parse_bytes(text: str) -> int:
    """ "12GiB" -> 12 * 2**30, "12GB" -> 12 * 10**9. A number without a unit is refused."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in UNITS:
        raise KairoxError(
            f"{text!r} is not a size; write a number and a unit, such as 12GB (1e9) or 12GiB "
            f"(2**30); units: {', '.join(UNITS)}"
        )
    return round(float(match[1]) * UNITS[match[2]])

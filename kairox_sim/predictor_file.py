"""What a file of `kairox train-predictor` says of itself, read without torch: safetensors' header.

Eight bytes of length, little-endian, then JSON (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path

from kairox_sim.errors import KairoxError

KEY = "kairox.predictor"
_MOST_BYTES = 100_000_000  # of a header, as safetensors itself allows


def rank_of(path: str | Path) -> int:
    """The rank that it was trained with, the same in every layer."""
    try:
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= _MOST_BYTES else b""
        rank = json.loads(json.loads(text)["__metadata__"][KEY])["rank"]
    except OSError as error:
        raise KairoxError(f"cannot read the predictor {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KairoxError(
            f"{str(path)!r} is no predictor that `kairox train-predictor` wrote; give its file"
        ) from error
    if not isinstance(rank, int) or rank < 1:
        raise KairoxError(f"the predictor {str(path)!r} has rank {rank!r}, must be 1 or more")
    return rank

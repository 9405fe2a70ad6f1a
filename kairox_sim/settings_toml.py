"""Settings as TOML: read, and what is wrong with them in one line, with the nearest name.

Knows nothing of what the settings mean.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kairox_sim.errors import KairoxError

_ALSO_CALLED = {"oracle": "belady", "opt": "belady"}


def nearest(name: str, allowed: Iterable[str]) -> str:
    """What is allowed, and which of it was perhaps meant, spelling and other names forgiven."""
    names = list(allowed)
    plain = {re.sub(r"[-_ ]", "", each).lower(): each for each in reversed(names)}
    given = re.sub(r"[-_ ]", "", name).lower()
    near = [n for n in (plain.get(given), _ALSO_CALLED.get(given)) if n in names]
    near += [plain[n] for n in difflib.get_close_matches(given, plain, n=1, cutoff=0.5)]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names) or 'none'}"


def read_toml(path: str | Path, noun: str) -> dict[str, Any]:
    """The content of a TOML file; what is wrong with it as KairoxError."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KairoxError(f"cannot read the {noun} file {str(file)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KairoxError(f"the {noun} file {str(file)!r} is not valid TOML: {error}") from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line: each problem with what was got, and of an unknown key the nearest one."""
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key {key!r}; {nearest(key, model.model_fields)}")
        elif item["type"] == "missing":
            problems.append(f"missing key {key!r}")
        elif not key:
            problems.append(item["msg"].removeprefix("Value error, "))
        else:
            said = item["msg"].removeprefix("Value error, ")
            got = (
                "" if "got " in said or repr(item["input"]) in said else f" (got {item['input']!r})"
            )
            problems.append(f"{key}: {said}{got}")
    return "; ".join(problems)

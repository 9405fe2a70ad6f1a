"""Bundled TOML files, and others by path, read as pydantic models; every problem named at once."""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kairox_sim.errors import KairoxError

ModelT = TypeVar("ModelT", bound=BaseModel)


def _folder(where: str) -> Traversable:
    return resources.files("kairox_sim").joinpath(where)


def bundled(where: str) -> list[str]:
    """Names of the .toml files in a folder of the package."""
    names = (entry.name for entry in _folder(where).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def is_path(name_or_path: str | Path) -> bool:
    """Whether this is a path (a Path, or text with a slash or `.toml`), else a bundled name."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text or "\\" in text


def read(name_or_path: str | Path, where: str, noun: str) -> dict[str, Any]:
    """The content of a bundled file by name, or of a file by path. `noun`: for the errors."""
    text_form = str(name_or_path)
    file: Path | Traversable
    if is_path(name_or_path):
        file = Path(name_or_path)
    else:
        file = _folder(where).joinpath(f"{text_form}.toml")
    if not file.is_file():
        names = bundled(where)
        near = difflib.get_close_matches(text_form, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise KairoxError(
            f"no {noun} {text_form!r}; {hint}bundled: {', '.join(names)}; "
            "or give the path of a .toml file"
        )
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KairoxError(f"{noun} {text_form!r} is not valid TOML: {error}") from error


def validated(data: dict[str, Any], model: type[ModelT], label: str) -> ModelT:
    """`data` as a `model`. Raises KairoxError with all that is wrong with it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(_problem(item, model) for item in error.errors())
        raise KairoxError(f"{label}: {problems}") from error


def _problem(item: Any, model: type[BaseModel]) -> str:
    loc: tuple[Any, ...] = item["loc"]
    dotted = ".".join(str(part) for part in loc)
    if item["type"] == "extra_forbidden":
        allowed = _allowed_keys(model, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), allowed, n=1, cutoff=0.0)
        return f"unknown key {dotted!r}; did you mean {near[0]!r}? allowed: {', '.join(allowed)}"
    if item["type"] == "missing":
        return f"missing key {dotted!r}"
    return f"{dotted!r}: {item['msg']} (got {item['input']!r})"


def _allowed_keys(model: type[BaseModel], loc: Iterable[Any]) -> list[str]:
    """The fields of the model found by walking `loc` down from `model`."""
    inner: Any = model
    for part in loc:
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            inner = _model_in(inner.model_fields[str(part)].annotation)
        else:  # dict[str, Model]
            inner = inner.__args__[1]
    return list(inner.model_fields)


def _model_in(annotation: Any) -> Any:
    """Of `Annotated[Model, check] | None` the model; anything else as it is."""
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation

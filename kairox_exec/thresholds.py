"""Thresholds on |silu(gate)| for a dense SwiGLU model: the file, and what running with them costs.

A neuron is left out where |silu(gate)| is at most its layer's threshold (CATS, arXiv:2404.08763,
section 3.2). Its contribution was small, not zero: the result is an approximation of the model, and
the file carries the measured loss. `sparsify` makes such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kairox_exec.loading import model_sha256
from kairox_sim.errors import KairoxError

FORMAT = 1
_LARGEST = 3.4028234663852886e38  # of float32, in which gates are compared
_TYPES: dict[str, Any] = {
    "str": str, "int": int, "float": (int, float), "int | None": (int, type(None)),
}  # fmt: skip
METHOD = "keep |silu(gate)| > threshold (CATS, arXiv:2404.08763)"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Which tokens something was measured on: offsets in the whole file's tokens."""

    text: str  # file name
    text_sha256: str
    start: int
    stop: int

    def overlaps(self, other: Tokens) -> bool:
        """Whether a token is in both."""
        same = self.text_sha256 == other.text_sha256
        return same and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Cost:
    """Against the dense model, over the evaluated positions whose next token is known."""

    positions: int
    dense_nats_per_token: float
    nats_per_token: float
    max_logit_error: float
    rms_logit_error: float
    logit_std: float  # of the dense logits
    kl_nats: float  # mean of KL(dense || this)
    top1_agreement: float
    greedy_tokens: int  # of the dense model's own continuation of the text
    first_greedy_divergence: int | None  # the first of them that this model would not have chosen


@dataclass(frozen=True, slots=True)
class Thresholds:
    """One file. Densities are shares of a layer's neurons that are kept, per layer."""

    model_sha256: str
    method: str
    target_density: float
    per_layer: tuple[float, ...]
    calibrated_on: Tokens
    calibrated_densities: tuple[float, ...]
    measured_on: Tokens  # other tokens
    densities: tuple[float, ...]
    cost: Cost

    @property
    def density(self) -> float:
        """Mean over layers, on the tokens that it was measured on."""
        return sum(self.densities) / len(self.densities)

    @property
    def approximate(self) -> str:
        """A line for traces and reports."""
        c = self.cost
        return (
            f"SwiGLU by activation thresholds: {self.density:.3f} of the neurons kept (target "
            f"{self.target_density:g}), {c.nats_per_token - c.dense_nats_per_token:+.4f} nats per "
            f"token ({c.dense_nats_per_token:.4f} dense) over {c.positions} positions of "
            f"{self.measured_on.text}"
        )

    def save(self, path: str | Path) -> None:
        """JSON."""
        content = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(
            json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )


def read_thresholds(path: str | Path, model_dir: str | Path | None = None) -> Thresholds:
    """A file of `kairox sparsify`; raises KairoxError where it was made for another model."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KairoxError(f"cannot read thresholds from {path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise KairoxError(
            f"{path} is not a file of thresholds of format {FORMAT} (got {got!r}); make one with "
            "kairox sparsify"
        )
    try:
        found = Thresholds(
            model_sha256=str(content["model_sha256"]),
            method=str(content["method"]),
            target_density=float(content["target_density"]),
            per_layer=_numbers(content["per_layer"]),
            calibrated_on=Tokens(**_known(Tokens, content["calibrated_on"])),
            calibrated_densities=_numbers(content["calibrated_densities"]),
            measured_on=Tokens(**_known(Tokens, content["measured_on"])),
            densities=_numbers(content["densities"]),
            cost=Cost(**_known(Cost, content["cost"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise KairoxError(f"{path} is damaged: {error}; make it again") from error
    if not found.per_layer or not all(0 <= t <= _LARGEST for t in found.per_layer):
        raise KairoxError(
            f"{path}: thresholds must be finite in float32 and >= 0, got {found.per_layer}"
        )
    if {len(found.densities), len(found.calibrated_densities)} != {len(found.per_layer)}:
        raise KairoxError(
            f"{path} is damaged: {len(found.per_layer)} thresholds, {len(found.densities)} "
            f"densities and {len(found.calibrated_densities)} calibrated ones; make it again"
        )
    if model_dir is not None and (its := model_sha256(model_dir)) != found.model_sha256:
        raise KairoxError(
            f"the thresholds in {path} are of a model with sha256 {found.model_sha256[:12]}..., "
            f"and {model_dir} has {its[:12]}...: make them for this one with kairox sparsify"
        )
    return found


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise TypeError(f"a list of numbers was expected, got {type(values).__name__}")
    return tuple(float(v) for v in values)


def _known(kind: type[Tokens] | type[Cost], values: Any) -> Mapping[str, Any]:
    names = {f.name for f in fields(kind)}
    if not isinstance(values, dict) or values.keys() != names:
        raise ValueError(f"{kind.__name__.lower()} must have the keys {', '.join(sorted(names))}")
    for f in fields(kind):
        value = values[f.name]
        if isinstance(value, bool) or not isinstance(value, _TYPES[str(f.type)]):
            raise TypeError(f"{f.name} is {value!r}, not a value of type {f.type}")
    return values

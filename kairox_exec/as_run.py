"""What a calibration was made as, and so which runs it holds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kairox_exec.live_device import charged_shape
from kairox_sim.errors import KairoxError
from kairox_sim.settings import Settings, label, predictor_of

NO_PREDICTOR = "none"


# A profile holds seconds per byte of the kernels that its runs called, and most kinds of op came in
# one size, at which all of their time was charged to the rate. So whatever chooses a kernel, or the
# size of an op that has but one, must be the same: the model whose costs are charged; numerics
# (float32 sums or fixed point); weights (each format has its own kernel to read it); dtype
# (attention, head, keys and values); gating (a gate over all rows, over their int8 copy, or none,
# and after it two matrices of a neuron or all three); the predictor (the gate of the next layer, or
# a low-rank one of this rank). Free is what only says how many neurons are where and which of them
# move: policy, controller, budget, trigger, memory, prior, thresholds.
@dataclass(frozen=True, slots=True)
class AsRun:
    """What decides which kernels are timed, and on what size."""

    model: str  # whose costs are charged
    numerics: str
    weights: str  # of the FFN's rows
    dtype: str  # of everything else
    gating: str
    predictor: str  # lookahead, "rank N", or none: nothing was predicted in time that counts

    @classmethod
    def of(cls, model_dir: str | Path, settings: Settings) -> AsRun:
        """How `settings` run the model of a directory."""
        shape, predictor = charged_shape(model_dir, settings), predictor_of(settings)
        return cls(
            model=shape.name,
            numerics=settings.numerics,
            weights=settings.weights or settings.dtype,
            dtype=settings.dtype,
            gating=settings.gating,
            predictor=f"rank {shape.predictor_rank}" if predictor == "rank" else predictor,
        )

    def differences(self, other: AsRun) -> list[str]:
        """Fields in which they differ. Where one of them predicts nothing, predictors do not."""
        ours, theirs = asdict(self), asdict(other)
        if NO_PREDICTOR in (self.predictor, other.predictor):
            theirs["predictor"] = ours["predictor"]
        return [name for name in ours if ours[name] != theirs[name]]

    def said(self, names: Sequence[str]) -> str:
        """Those fields in words: "weights int8 and gating exact"."""
        return " and ".join(f"{name} {getattr(self, name)}" for name in names)


def all_as(model_dir: str | Path, settings: Sequence[Settings]) -> AsRun:
    """How all of these run, with the predictor of those that have one.

    Raises KairoxError where two differ: one profile cannot hold for both.
    """
    found, first = AsRun.of(model_dir, settings[0]), settings[0]
    for one in settings[1:]:
        also = AsRun.of(model_dir, one)
        if names := found.differences(also):
            raise KairoxError(
                f"setting {label(first)!r} runs with {found.said(names)} and {label(one)!r} with "
                f"{also.said(names)}, and a calibration holds for one of them: validate them "
                "apart, or give one value for all on the command line"
            )
        if found.predictor == NO_PREDICTOR:
            found, first = replace(found, predictor=also.predictor), one
    return found


KIND = (
    "model_as", "numerics", "weights", "dtype", "gating", "predictor", "predictor_file",
    "thresholds", "vram",
)  # fmt: skip


def kind_of(settings: Sequence[Settings]) -> Settings:
    """What a calibration for these settings is run with: no policy of theirs, only how they run."""
    predicting = [one for one in settings if predictor_of(one) != NO_PREDICTOR]
    chosen = (predicting or settings)[0]
    kept = {key: getattr(chosen, key) for key in KIND}
    if kept["predictor"] == NO_PREDICTOR:
        kept["predictor"] = None  # calibration times one all the same
    return Settings.of({key: value for key, value in kept.items() if value is not None})


def require_calibrated_as(
    conditions: Mapping[str, Any], runs: AsRun, machine: str, facts: Mapping[str, Any]
) -> None:
    """Refuse runs, on a machine of this label and these facts, for which a calibration is not.

    conditions: of the calibration.
    """
    again = "calibrate as they run (`kairox calibrate`), or leave out --hardware"
    if conditions["time"] != machine:
        raise KairoxError(
            f"the profile's times are {conditions['time']} and those of these runs {machine}; "
            f"{again}"
        )
    try:
        there, made = _chips(conditions["machine"]), AsRun(**conditions["as_run"])
    except (KeyError, TypeError) as error:
        raise KairoxError(
            "the calibration does not say on what and with which weights, dtype, gating and "
            f"predictor it was made, so whether it holds for these runs is unknown; {again}"
        ) from error
    if there != (here := _chips(facts)):
        raise KairoxError(f"the profile was calibrated on {there} and this is {here}; {again}")
    if names := made.differences(runs):
        raise KairoxError(
            f"the profile was calibrated with {made.said(names)} and these runs are with "
            f"{runs.said(names)}, where operations take another time; {again}"
        )


def _chips(facts: Mapping[str, Any]) -> str:
    """The processor and the GPUs, of `machine_facts`. "This machine" may be another one each time.

    An emulated one is paced, but its policies think as fast as the processor lets them.
    """
    names = [facts["cpu"]["name"], *(gpu["name"] for gpu in facts["gpus"] or ())]
    return ", ".join(name or "an unknown processor" for name in names)

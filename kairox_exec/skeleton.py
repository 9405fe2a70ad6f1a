"""A transformers model without its weights, and its weights put into it, tensor by tensor.

transformers' own loading reads all of a model, fills what is missing with random numbers, and its
inner names differ between versions; this reads what is asked for and needs `from_config` only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kairox_exec.checkpoint import FLOATS, Checkpoint, Progress, require_finite, told
from kairox_exec.families import Family, decoder_layers
from kairox_sim.errors import KairoxError

# What transformers raises where a config's values are no model's; several of them by accident.
UNBUILDABLE = (
    ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip


def reason(error: BaseException) -> str:
    """In one line; a bare key or name says little without its kind."""
    text = " ".join(str(error).split())
    kinds = (LookupError, AttributeError, ArithmeticError, AssertionError)
    return f"{type(error).__name__} {text}" if isinstance(error, kinds) else text


class _EmptyOnMeta(TorchFunctionMode):
    """torch.empty has no memory. Buffers, which are computed, are real: rotary frequencies are."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def skeleton(directory: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without its weights: every matrix is on the meta device, ties are tied."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        with _EmptyOnMeta():
            model: nn.Module = auto.from_config(config, dtype=dtype)
    except UNBUILDABLE as error:
        raise KairoxError(
            f"{directory / 'config.json'} describes no model: {reason(error)}"
        ) from error
    return model.eval().requires_grad_(False)


def _names_in(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """What the model calls its tensors -> what the files do.

    Files saved from the model without its head leave out its prefix (`model.` of Llama); the rule
    is transformers': it is left out if no name in the files begins with it.
    """
    prefix = f"{model.base_model_prefix}."
    names = list(model.state_dict(keep_vars=True))
    if any(name.startswith(prefix) for name in checkpoint.entries):
        return {name: name for name in names}
    return {name: name.removeprefix(prefix) for name in names}


def plan(
    model: nn.Module, checkpoint: Checkpoint, family: Family
) -> tuple[dict[str, str], list[list[str]]]:
    """Check names and shapes of all, before anything is read.

    Returns the names in the files, and the model's own in groups that share one tensor.
    """
    in_files = _names_in(model, checkpoint)
    groups: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    missing = [
        names[0]
        for names in groups.values()
        if not any(in_files[name] in checkpoint.entries for name in names)
    ]
    if missing:
        strange = sorted({e.dtype for e in checkpoint.entries.values()} - {*FLOATS})
        raise KairoxError(
            f"the weights in {checkpoint.directory} lack {len(missing)} tensors that config.json "
            f"calls for, e.g. {sorted(missing)[0]}; "
            + (
                f"they hold {', '.join(strange)}, so they are quantised: use the original weights"
                if strange
                else "the two are of different models, or a file is missing"
            )
        )
    for name, tensor in tensors.items():
        if in_files[name] in checkpoint.entries:
            checkpoint.require(in_files[name], tensor.shape)
    n_layers = len(decoder_layers(model, family))
    stack = in_files[next(n for n in in_files if n.startswith(family.layers + "."))]
    stack = stack[: stack.index(".0.") + 1]
    for name, entry in checkpoint.entries.items():
        of = name.removeprefix(stack).partition(".")[0]
        if name.startswith(stack) and of.isdigit() and int(of) >= n_layers:
            raise KairoxError(
                f"{entry.path} holds {name} and config.json has {n_layers} layers; the two are of "
                "different models: take both from one"
            )
    return in_files, list(groups.values())


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    in_files: dict[str, str],
    groups: list[list[str]],
    leave: frozenset[str] = frozenset(),
    tell: Progress | None = None,
) -> None:
    """Give the model its weights, in its own dtype and memory, but for those named in `leave`."""
    tensors = model.state_dict(keep_vars=True)
    for names in told(groups, tell, "reading the rest, tensors"):
        if leave.issuperset(names):
            continue
        stored = [in_files[name] for name in names if in_files[name] in checkpoint.entries]
        old = tensors[names[0]]
        read = [checkpoint.read(name, old.shape) for name in stored]
        for name, other in zip(stored[1:], read[1:], strict=True):
            if not torch.equal(read[0], other):
                raise KairoxError(
                    f"{checkpoint.entries[name].path}: {name} differs from {stored[0]}, and "
                    "config.json ties the two; set tie_word_embeddings to false in config.json"
                )
        new = read[0].to(dtype=old.dtype, copy=True).contiguous()
        if old.dtype == torch.float16:
            where = f"{checkpoint.entries[stored[0]].path}: {stored[0]} as float16"
            require_finite(new, where, "use dtype bfloat16 or float32")
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        for name in names:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, new)


def stored_bytes(model: nn.Module, leave: frozenset[str] = frozenset()) -> int:
    """Bytes of its weights once filled, each shared one counted once, but for those in `leave`."""
    tensors = {
        id(t): t.numel() * t.element_size()
        for name, t in model.state_dict(keep_vars=True).items()
        if name not in leave
    }
    return sum(tensors.values())

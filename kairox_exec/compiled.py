"""Models that were compiled before: what has to be undone before FFNs are replaced and hooked.

Compiled code was traced through the modules and hooks there were then. Dynamo does not guard on
hooks by default, so ones added later may never be called, and a recording would miss layers.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

_WRAPPED = "_orig_mod"  # where torch.compile(module) keeps the module
_ORIGINAL = "_torchdynamo_orig_callable"  # set on a compiled function


def uncompiled(model: nn.Module) -> nn.Module:
    """The same weights without torch.compile, on the model or any of its modules; warns if it was.

    Undoes `torch.compile(module)`, `module.compile()` and `module.forward = torch.compile(...)`.
    """
    plain, found = _unwrapped(model)
    for name, module in list(plain.named_modules()):
        if name and name.rpartition(".")[2] != _WRAPPED:
            inner, wrapped = _unwrapped(module)
            if wrapped:
                plain.set_submodule(name, inner)
                found = True
    for module in plain.modules():
        found |= _clear_calls(module)
    if found:
        warnings.warn(
            "the model was compiled; it runs without, because compiled code goes past the hybrid "
            "FFNs and their hooks. Give the plain model to be rid of this warning",
            stacklevel=3,
        )
    return plain


def _unwrapped(module: nn.Module) -> tuple[nn.Module, bool]:
    found = False
    while (inner := module._modules.get(_WRAPPED)) is not None:
        module, found = inner, True
    return module, found


def _clear_calls(module: Any) -> bool:
    found = False
    if getattr(module, "_compiled_call_impl", None) is not None:
        module._compiled_call_impl = None
        found = True
    if hasattr(vars(module).get("forward"), _ORIGINAL):
        del module.forward  # the class's own shows again
        found = True
    return found

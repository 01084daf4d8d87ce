# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Forward hooks may change what a model computes, and cannot be compared: those of others are refused by name."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import UnsupportedModelError

KNOWN = ("hf_blend", "transformers", "accelerate", "torch")  # their hooks watch, or put weights in place
HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")  # of PEFT, for training
_MARK = "_hf_blend_observer"

Hook = TypeVar("Hook", bound=Callable[..., Any] | TorchFunctionMode | TorchDispatchMode)


def observer(hook: Hook) -> Hook:
    """Mark a forward hook that changes nothing, such as one that logs, so that a model with it can be blended.

        layer.register_forward_hook(hf_blend.observer(log_norms))

    Args:
        hook: a function or method that returns None and does not write to what it is given; or an object of a
            `TorchFunctionMode` or `TorchDispatchMode` that gives what torch gives.

    Returns:
        The same function or object.
    """
    getattr(hook, "__func__", hook).__dict__[_MARK] = True
    return hook


def is_observer(hook: Any) -> bool:
    """Return True if a hook, or a mode of torch, was marked by `observer`."""
    return getattr(hook, _MARK, False) is True


def refuse_foreign_hooks(modules: Iterable[nn.Module]) -> None:
    """Refuse forward hooks that are neither ours nor the libraries'."""
    everywhere = (torch_hooks._global_forward_pre_hooks, torch_hooks._global_forward_hooks)
    hooked = [one for one in modules if one.__dict__["_forward_hooks"] or one.__dict__["_forward_pre_hooks"]]
    for module in hooked:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _refuse_foreign(hook, f"a {type(module).__name__}")
    for hook in (hook for hooks in everywhere for hook in hooks.values()):
        _refuse_foreign(hook, "every module")


def _refuse_foreign(hook: Any, place: str) -> None:
    if is_observer(hook):
        return
    inner = hook.func if isinstance(hook, functools.partial) else hook
    home = getattr(inner, "__module__", None) or type(inner).__module__
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    package = str(home).partition(".")[0]
    if package in KNOWN or name.rpartition(".")[2] in HARMLESS:
        return
    if package == "peft":
        raise UnsupportedModelError(
            f"{place} has the forward hook {name} of PEFT: an adapter was chosen for this request alone "
            "(adapter_names=…), which no stored chunk can be told by. Choose it for the model with set_adapter."
        )
    raise UnsupportedModelError(
        f"{place} has the forward hook {home}.{name}, which may change keys and values unseen. Remove it for blending "
        "(handle.remove()), or mark it with hf_blend.observer if it only looks."
    )

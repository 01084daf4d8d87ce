# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The state in which chunks are computed, and the refusal of wrappers, modes and hooks that blending cannot support.

A forward hook may change what a model computes, and hooks cannot be compared. So forward hooks of others are refused.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from ...errors import ConfigError, UnsupportedModelError

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
KNOWN = ("hf_blend", "transformers", "accelerate", "torch")  # their hooks watch, or put weights in place
HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")  # of PEFT, for training
_MARK = "_hf_blend_observer"
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")

Hook = TypeVar("Hook", bound=Callable[..., Any])


@contextmanager
def canonical(model: nn.Module) -> Iterator[None]:
    """Run without dropout, autocast and gradients, and restore the caller's state afterwards."""
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in filter(torch.is_autocast_enabled, DEVICE_TYPES):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(_set_mode, training, True)
        _set_mode(training, False)
        yield


@contextmanager
def notes_kept(model: nn.Module) -> Iterator[None]:
    """Put back the tensors that a forward writes into attributes of its modules, such as where its images end."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            attributes |= {name: saved.get(name) for name, value in attributes.items() if isinstance(value, Tensor)}


def refuse_wrapper(model: nn.Module) -> None:
    """Refuse what is around a causal language model, or inside one, with what to pass instead."""
    name = type(model).__name__
    if type(model).__module__.startswith(_WRAPPERS) or (hasattr(model, "module") and not hasattr(model, "config")):
        raise UnsupportedModelError(
            f"{name} is a wrapper that spreads a model over processes or devices. Pass the model inside it "
            "(model.module), with one cache per replica."
        )
    if not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{name} has no config, so it is no model of transformers. Pass what AutoModelForCausalLM loads."
        )
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and not can_generate():
        raise UnsupportedModelError(
            f"{name} has no language modelling head, so it cannot generate. Pass the whole causal language model, as "
            "AutoModelForCausalLM loads it, and not its base model."
        )


def refuse_request_state(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a forward that runs in another precision than the stored chunks, or that keeps no cache."""
    own = {weight.device.type for layer in (layers[0], layers[-1]) for weight in layer.parameters()}
    for kind in filter(torch.is_autocast_enabled, own.intersection(DEVICE_TYPES)):
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        raise ConfigError(
            f"torch.autocast is on ({dtype} on {kind}), but stored chunks are computed in the model's own dtype "
            f"({model.dtype}). Leave the autocast block, or load the model with dtype=torch.{dtype}."
        )
    checkpointed = [layer for layer in layers if layer.training and getattr(layer, "gradient_checkpointing", False)]
    if checkpointed:
        raise ConfigError(
            f"{len(checkpointed)} layers of {type(model).__name__} checkpoint their gradients in training mode, and "
            "then keep no cache. Call model.eval(), or model.gradient_checkpointing_disable()."
        )


def _set_mode(modules: list[nn.Module], training: bool) -> None:
    for module in modules:
        module.training = training


def observer(hook: Hook) -> Hook:
    """Mark a forward hook that changes nothing, such as one that logs, so that a model with it can be blended.

        layer.register_forward_hook(hf_blend.observer(log_norms))

    Args:
        hook: a function or method that returns None and does not write to what it is given.

    Returns:
        The same function.
    """
    getattr(hook, "__func__", hook).__dict__[_MARK] = True
    return hook


def refuse_foreign_hooks(modules: Iterable[nn.Module]) -> None:
    """Refuse forward hooks that are neither ours nor the libraries'."""
    everywhere = (torch_hooks._global_forward_pre_hooks, torch_hooks._global_forward_hooks)
    hooked = [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
    placed = [
        (hook, f"a {type(module).__name__}")
        for module in hooked
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    for hook, place in (*placed, *((hook, "every module") for hooks in everywhere for hook in hooks.values())):
        inner = hook.func if isinstance(hook, functools.partial) else hook
        home = getattr(inner, "__module__", None) or type(inner).__module__
        name = getattr(inner, "__qualname__", type(inner).__qualname__)
        package = str(home).partition(".")[0]
        if package in KNOWN or name.rpartition(".")[2] in HARMLESS or getattr(hook, _MARK, False) is True:
            continue
        if package == "peft":
            raise UnsupportedModelError(
                f"{place} has the forward hook {name} of PEFT: an adapter was chosen for this request alone "
                "(adapter_names=…), which no stored chunk can be told by. Choose it for the model with set_adapter."
            )
        raise UnsupportedModelError(
            f"{place} has the forward hook {home}.{name}, which may change keys and values unseen. Remove it for "
            "blending (handle.remove()), or mark it with hf_blend.observer if it only looks."
        )

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a library could leave behind in a model, recorded and compared."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .floor import device_of
from .subject import ModelUnderTest

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@torch.no_grad()
def traces(subject: ModelUnderTest) -> dict[str, Any]:
    """Record a model: per module its class, attributes, hooks, forward and mode; config, weights, logits."""
    model = subject.model
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in HOOKS]
        found[f"module {name or '(model)'}"] = (type(module), sorted(vars(module)), hooks, module.training)
    found["config"] = copy.deepcopy(model.config.to_dict())
    found["attention"] = model.config._attn_implementation
    found["weights"] = {name: _identity(weight) for name, weight in model.named_parameters()}
    ids = torch.tensor([subject.ids(12, seed=5)], device=device_of(model))
    found["logits"] = model(ids, use_cache=False).logits
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same in two records."""
    return [name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))]


def hooks_of(model: nn.Module) -> int:
    """How many hooks a model and its modules carry."""
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in HOOKS)


def _identity(weight: nn.Parameter) -> tuple[Any, ...]:
    """Which tensor a weight is and how often it was written; offloaded ones are put in place anew at every call."""
    return (weight.shape, weight.dtype) if weight.is_meta else (id(weight), weight._version)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)

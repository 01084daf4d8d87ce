# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The promise that a model is left as it was found: a snapshot before, one after, and what differs."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_blend.model.hooks import hears_forwards

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _keys(hooks: Any) -> list[int]:
    return [key for key, hook in hooks.items() if not hears_forwards(hook)]


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Record all of a model that a library could leave behind: attributes, hooks, classes, config, weights, logits."""
    prompt = torch.arange(3, 19)[None] % model.get_input_embeddings().num_embeddings
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [_keys(getattr(module, kind)) for kind in HOOKS]
        found[f"module {name}"] = (type(module), sorted(vars(module)), module.training, hooks)
    for name, weight in model.named_parameters():
        found[f"weight {name}"] = (id(weight), weight._version)
    found["attention"] = model.config._attn_implementation
    found["config"] = copy.deepcopy(model.config.to_dict())
    if model.can_generate():
        found["generation_config"] = copy.deepcopy(model.generation_config.to_dict())
    # Last, as whatever else differs says more.
    with torch.no_grad():
        found["logits"] = model(prompt, use_cache=False).logits
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail at the first thing that differs between two snapshots, and say which."""
    assert before.keys() == after.keys(), f"parts of the model changed: {sorted(before.keys() ^ after.keys())}"
    for name, old in before.items():
        new = after[name]
        if isinstance(old, torch.Tensor):
            difference = (old - new).abs()
            assert torch.equal(old, new), f"{name} moved: max {difference.max():.3g}, mean {difference.mean():.3g}"
        else:
            assert old == new, f"{name} changed: {old!r} → {new!r}"


@contextmanager
def leaves_untouched(model: PreTrainedModel) -> Iterator[None]:
    """Check, by a forward before and after, that what happens inside, even if it raises, leaves a model as it was."""
    before = snapshot(model)
    try:
        yield
    finally:
        assert_same(before, snapshot(model))

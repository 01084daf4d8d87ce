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
    modules = dict(model.named_modules(remove_duplicate=False))
    prompt = torch.arange(3, 19)[None] % model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        logits = model(prompt, use_cache=False).logits
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {name: [_keys(getattr(module, kind)) for kind in HOOKS] for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "attention": model.config._attn_implementation,
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()) if model.can_generate() else None,
        "weights": {name: (id(weight), weight._version) for name, weight in model.named_parameters()},
        "logits": logits,
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail at the first thing that differs between two snapshots, and say which."""
    for name, old in before.items():
        new = after[name]
        if isinstance(old, torch.Tensor):
            difference = (old - new).abs()
            assert torch.equal(old, new), f"{name} moved: max {difference.max():.3g}, mean {difference.mean():.3g}"
        elif isinstance(old, dict):
            pairs = {key: (old.get(key), new.get(key)) for key in old.keys() | new.keys()}
            changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
            assert not changed, f"{name} changed: {changed}"
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

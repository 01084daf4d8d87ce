# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of what a request leaves behind in the model: nothing."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..model.anatomy import cache_argument, decoder_layers, input_device
from ..model.checks import CheckResult, check, inconclusive, violations
from ..model.hooks import hears_forwards
from .model_under_test import ModelUnderTest, distance

RATIO = 0.3
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class _Burst(Exception):
    """The exception that passes through a layer."""


@check()
def untouched(subject: ModelUnderTest) -> CheckResult:
    """A request leaves hooks, attributes, config, weights and logits of the model as they were.

    After a prefill, after a generate, and after an exception in each of some layers, behind which a second try gives
    the same logits. Two requests and a plain forward that interleave do not see each other. The one hook by which a
    living cache hears of forwards does not count.
    """
    expected = subject.blend(subject.prompts, RATIO)  # what is done once per model, such as the probe, is not counted
    if not any(expected.cache.report.chosen_columns):
        return inconclusive("nothing was blended, so nothing was shown")
    before = traces(subject)
    subject.blend(subject.prompts, RATIO)
    wrong = _differences(before, traces(subject), "after a prefill")
    _generate(subject, subject.cache(RATIO))
    wrong += _differences(before, traces(subject), "after a generate")
    # In the first layers, at and behind the check layer, and in the last
    layers = decoder_layers(subject.model)
    tried = {0, 1, 2, len(layers) - 1}
    for index in sorted(tried.intersection(range(len(layers)))):
        cache = subject.cache(RATIO)
        watched = traces(subject)  # the cache has a hook on the model as long as it lives
        wrong += _burst(subject, cache, layers[index], index)
        wrong += _differences(watched, traces(subject), f"after an error in layer {index}")
        error = distance(subject.prefill(cache, subject.prompts), expected.logits)
        del cache
        if error:
            wrong.append(f"the second try after an error in layer {index} is off by {error:.2g}")
    wrong += _interleaved(subject, before["logits"])
    return violations([*wrong, *_differences(before, traces(subject), "after two requests")])


def _interleaved(subject: ModelUnderTest, plain: Tensor) -> list[str]:
    """What differs where a request and a plain forward come between the inputs of another request and its forward."""
    prompts = [[prompt] for prompt in subject.prompts[:2]]
    first, second = (subject.blend(prompt, RATIO).logits for prompt in prompts)
    cache = subject.cache(RATIO)
    inputs = subject.inputs(cache, prompts[0])
    wrong = []
    if not torch.equal(_logits(subject), plain):
        wrong.append("the logits of a plain forward beside a request")
    if not torch.equal(subject.blend(prompts[1], RATIO).logits, second):
        wrong.append("the logits of a request beside another one")
    if not torch.equal(subject.forward(cache, inputs, first.shape[1]), first):
        wrong.append("the logits of a request that others came before")
    return wrong


def _generate(subject: ModelUnderTest, cache: BlendCache) -> None:
    inputs = subject.inputs(cache, subject.prompts)
    inputs.pop("position_ids")
    # The configs of some types, such as MPT, switch the cache off
    subject.model.generate(
        **inputs,
        **cache_argument(subject.model, cache),
        use_cache=True,
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
    )


def _burst(subject: ModelUnderTest, cache: BlendCache, layer: nn.Module, index: int) -> list[str]:
    """Run a request into an exception; gives back what was wrong on the way."""
    hooks: list[int] = []

    def burst(*_: object) -> None:
        count = 0
        for module in subject.model.modules():
            count += sum(len(getattr(module, kind)) for kind in HOOKS)
        hooks.append(count)
        raise _Burst

    inner = next((child for name, child in layer.named_children() if "att" in name), next(layer.children()))
    handle = inner.register_forward_hook(burst)
    try:
        with torch.no_grad():
            subject.prefill(cache, subject.prompts)
    except _Burst:
        return [] if hooks[0] > 1 else [f"layer {index} was not entered, so nothing was shown"]
    finally:
        handle.remove()
    return [f"layer {index} swallowed the exception"]


def traces(subject: ModelUnderTest) -> dict[str, Any]:
    """Record a model: per module its class, attributes, hooks, forward and mode; config, weights, logits."""
    model = subject.model
    records: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = []
        for kind in HOOKS:
            hooks.append([key for key, hook in getattr(module, kind).items() if not hears_forwards(hook)])
        records[f"module {name or '(model)'}"] = (type(module), sorted(vars(module)), hooks, module.training)
    records["config"] = copy.deepcopy(model.config.to_dict())
    records["attention"] = model.config._attn_implementation
    records["weights"] = {name: _identity(weight) for name, weight in model.named_parameters()}
    records["logits"] = _logits(subject)
    return records


@torch.no_grad()
def _logits(subject: ModelUnderTest) -> Tensor:
    ids = torch.tensor([subject.ids(12, seed=5)], device=input_device(subject.model))
    logits: Tensor = subject.model(ids, use_cache=False).logits
    return logits


def _identity(weight: nn.Parameter) -> tuple[Any, ...]:
    """Which tensor a weight is and how often it was written; offloaded ones are put in place anew at every call."""
    return (weight.shape, weight.dtype) if weight.is_meta else (id(weight), weight._version)


def _differences(before: dict[str, Any], after: dict[str, Any], when: str) -> list[str]:
    """Names of what is not the same in two records."""
    wrong = []
    for name in before.keys() | after.keys():
        left, right = before.get(name), after.get(name)
        is_same = torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right
        if not is_same:
            wrong.append(f"{name} {when}")
    return wrong

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a request leaves behind: nothing in the model, in the store, or for another request."""

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..model.anatomy import decoder_layers
from ..model.cache_keyword import cache_argument
from ..model.checks import CheckResult, check, nothing_shown, violations
from ..model.fingerprint import fingerprint
from ..model.placement import input_device
from ..prompt.pieces import Prompt
from ..store import ChunkStore
from ..store.chunk import ChunkKey
from .model_under_test import ModelUnderTest, distance, states_apart

RATIO, STEPS = 0.3, 3
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class _Burst(Exception):
    """The exception that passes through a layer."""


@check()
def untouched(subject: ModelUnderTest) -> CheckResult:
    """After a blended request the model has the hooks, attributes, config, weights and logits that it had before.

    After a prefill, after a generate, and after a cache that was made and never used.
    """
    subject.blend(subject.prompts, RATIO)  # what is done once per model, such as the probe, is not counted
    before = traces(subject)
    got = subject.blend(subject.prompts, RATIO)
    if not any(got.cache.report.chosen_columns):
        return nothing_shown("nothing was blended, so nothing was shown")
    wrong = differences(before, traces(subject))
    _generate(subject, subject.cache(RATIO))
    wrong += differences(before, traces(subject))
    unused = subject.cache(RATIO)
    unused.get_seq_length()
    del unused
    return violations([*wrong, *differences(before, traces(subject))])


@check()
def untouched_after_error(subject: ModelUnderTest) -> CheckResult:
    """An exception inside a layer leaves the model as it was, and the cache ready for a second try.

    It is raised in the first layers, at and behind the check layer, and in the last.
    """
    expected = subject.blend(subject.prompts, RATIO).logits
    before, wrong = traces(subject), []
    layers = decoder_layers(subject.model)
    for index in sorted({0, 1, 2, len(layers) - 1} & set(range(len(layers)))):
        cache = subject.cache(RATIO)
        wrong += _burst(subject, cache, layers[index], index)
        wrong += [f"{name} after an error in layer {index}" for name in differences(before, traces(subject))]
        error = distance(subject.prefill(cache, subject.prompts), expected)
        if error:
            wrong.append(f"the second try after an error in layer {index} is off by {error:.2g}")
    return violations(wrong)


@check()
def store_bytes(subject: ModelUnderTest) -> CheckResult:
    """A request changes no byte of the store, and neither does its answer: chunks are shared, in memory too."""
    store, prompt = ChunkStore.open("memory://"), subject.prompts[0]
    keys = [ChunkKey(fingerprint(subject.model), subject.chunk_prefix_ids, ids) for ids in prompt.chunks]
    subject.blend([prompt], 0.0, store)
    before = [_digest(store, key) for key in keys]
    for ratio in (0.0, RATIO, 1.0):
        _generate(subject, subject.cache(ratio, store))
    return violations([f"chunk {number}" for number, key in enumerate(keys) if _digest(store, key) != before[number]])


@check()
def same_bits(subject: ModelUnderTest) -> CheckResult:
    """The same request gives the same bits twice, with chunks computed or loaded."""
    store = ChunkStore.open("memory://")
    first, *others = [subject.blend(subject.prompts, RATIO, store) for _ in range(3)]
    errors = [distance(first.logits, other.logits) for other in others]
    return CheckResult(max(errors + [states_apart(first.layers, other.layers) for other in others]), 0.0)


@check()
def two_caches(subject: ModelUnderTest) -> CheckResult:
    """Two requests and a plain forward that interleave on one model do not see each other.

    Prefills and single steps in turn, against the same requests one after the other.
    """
    prompts = subject.prompts[:2]
    expected = [_steps(subject, [prompt])[0] for prompt in prompts]
    pairs = zip(expected, _steps(subject, prompts), strict=True)
    return CheckResult(max(distance(a, b) for pair in pairs for a, b in zip(*pair, strict=True)), 0.0)


def _generate(subject: ModelUnderTest, cache: BlendCache) -> None:
    inputs = subject.inputs(cache, subject.prompts)
    inputs.pop("position_ids")
    subject.model.generate(
        **inputs, **cache_argument(subject.model, cache), max_new_tokens=3, do_sample=False, pad_token_id=0
    )


def _burst(subject: ModelUnderTest, cache: BlendCache, layer: nn.Module, index: int) -> list[str]:
    """Run a request into an exception; gives back what was wrong on the way."""
    hooks: list[int] = []

    def burst(*_: object) -> None:
        hooks.append(hooks_of(subject.model))
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


def _digest(store: ChunkStore, key: ChunkKey) -> str:
    chunk, state = store.get(key), hashlib.sha256()
    for name, tensor in [] if chunk is None else chunk.named_tensors():
        state.update(name.encode())
        state.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
    return state.hexdigest()


@torch.no_grad()
def _steps(subject: ModelUnderTest, prompts: list[Prompt]) -> list[list[Tensor]]:
    """Logits of each request and of a plain forward beside them, at the prefill and at some steps."""
    device = input_device(subject.model)
    caches: list[BlendCache] = [subject.cache(RATIO) for _ in prompts]
    inputs = [subject.inputs(cache, [prompt]) for cache, prompt in zip(caches, prompts, strict=True)]  # all watch now
    plain = subject.model(torch.tensor([subject.ids(11, seed=3)], device=device)).logits.float()
    seen = [[plain, subject.forward(cache, arguments, 1)] for cache, arguments in zip(caches, inputs, strict=True)]
    for step in range(STEPS):
        for cache, logits in zip(caches, seen, strict=True):
            ids = torch.tensor([subject.ids(1, seed=step)], device=device)
            logits.append(subject.model(ids, **cache_argument(subject.model, cache), use_cache=True).logits.float())
    return seen


@torch.no_grad()
def traces(subject: ModelUnderTest) -> dict[str, Any]:
    """Record a model: per module its class, attributes, hooks, forward and mode; config, weights, logits."""
    model = subject.model
    records: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in HOOKS]
        records[f"module {name or '(model)'}"] = (type(module), sorted(vars(module)), hooks, module.training)
    records["config"] = copy.deepcopy(model.config.to_dict())
    records["attention"] = model.config._attn_implementation
    records["weights"] = {name: _identity(weight) for name, weight in model.named_parameters()}
    ids = torch.tensor([subject.ids(12, seed=5)], device=input_device(model))
    records["logits"] = model(ids, use_cache=False).logits
    return records


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same in two records."""
    return [name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name))]


def hooks_of(model: nn.Module) -> int:
    """How many hooks a model and its modules carry."""
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in HOOKS)


def _identity(weight: nn.Parameter) -> tuple[Any, ...]:
    """Which tensor a weight is and how often it was written; offloaded ones are put in place anew at every call."""
    return (weight.shape, weight.dtype) if weight.is_meta else (id(weight), weight._version)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)

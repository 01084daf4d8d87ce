# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of one chunk at the beginning of a prompt, which is prefix caching."""

import torch
from torch import Tensor
from transformers import Cache

from ..model.anatomy import full_cache, stock_cache
from ..model.checks import BlendedPrefill, CheckResult, check, kv_of
from ..prompt.pieces import Prompt
from .model_under_test import ModelUnderTest, continued, distance


@check()
def prefix_cache(subject: ModelUnderTest) -> CheckResult:
    """One chunk at the beginning at ratio 0 is prefix caching, bit for bit: logits, and K and V at any layer.

    With a prefix and without, against a stock cache that holds the chunk and is continued with the question. A stock
    cache keeps all keys or, made with a config, those in a layer's window; the same sum is rounded in two ways then.
    It is enough to be one of the two, in every layer alike. A mixer scans the prompt in one piece, where the stock
    cache is continued in two: with mixers as much is allowed as full prefills differ by.
    """
    allowed = max(subject.logit_tolerance, subject.floor.states) if any(subject.mixers) else 0.0
    return CheckResult(max(_prefix_error(subject, prefix) for prefix in {(), subject.chunk_prefix_ids}), allowed)


@torch.no_grad()
def _prefix_error(subject: ModelUnderTest, prefix: tuple[int, ...]) -> float:
    prompt = Prompt.of_pieces(prefix, subject.prompts[0].chunks[:1], subject.prompts[0].question)
    got = subject.blend([prompt], 0.0, chunk_prefix_ids=prefix)
    errors = []
    for stock in (full_cache(subject.model), stock_cache(subject.model)):
        logits = _after_chunk(subject, prompt, stock)
        errors.append(_cache_error(got, logits, stock))
    return min(errors)


def _after_chunk(subject: ModelUnderTest, prompt: Prompt, stock: Cache) -> Tensor:
    """Fill a stock cache with prefix and chunk, and continue it: the question's logits.

    A product of one row may round unlike that of many, so the prefix's columns come from a forward of it alone, as
    they do in a store, where many chunks share it.
    """
    continued(subject.model, prompt.prefix + prompt.chunks[0], stock)
    if prompt.prefix:
        alone = full_cache(subject.model)
        tokens = len(prompt.prefix + prompt.chunks[0])
        continued(subject.model, prompt.prefix, alone)
        for layer, own in zip(filter(None, kv_of(stock)), filter(None, kv_of(alone)), strict=True):
            forgotten = tokens - layer[0].shape[2]  # outside of the window
            count = max(0, len(prompt.prefix) - forgotten)
            if count:
                for states, of_prefix in zip(layer, own, strict=True):
                    states[:, :, :count] = of_prefix[:, :, -count:]
    return continued(subject.model, prompt.question, stock)


def _cache_error(got: BlendedPrefill, logits: Tensor, stock: Cache) -> float:
    error = distance(got.logits[0], logits)
    for mine, stocked in zip(filter(None, got.layers), filter(None, kv_of(stock)), strict=True):
        for states, other in zip(mine, stocked, strict=True):
            held = states[:, :, -other.shape[2] :]
            error = max(error, distance(held, other))
    return error

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk at the beginning at ratio 0 is prefix caching, bit for bit."""

import torch
from torch import Tensor
from transformers import Cache

from ..model.anatomy import full_cache, stock_cache
from ..prompt.pieces import Prompt
from .base import Check, Outcome
from .floor import device_of, distance, kv_of
from .subject import Blended, ModelUnderTest


class PrefixCache(Check):
    """With a sink and without, against a stock cache that holds the chunk and is continued with the question."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of logits, and of any K or V at any layer; 0 is allowed.

        A stock cache keeps all keys or, made with a config, those in a layer's window; the same sum is rounded in two
        ways then. It is enough to be one of the two, in every layer alike. A mixer scans the prompt in one piece,
        where the stock cache is continued in two: with mixers as much is allowed as full prefills differ by.
        """
        allowed = max(subject.logit_tolerance, subject.floor.states) if any(subject.mixers) else 0.0
        return Outcome(max(_error(subject, sink) for sink in {(), subject.chunk_prefix_ids}), allowed)


@torch.no_grad()
def _error(subject: ModelUnderTest, sink: tuple[int, ...]) -> float:
    prompt = Prompt(sink, subject.prompts[0].chunks[:1], subject.prompts[0].question)
    got = subject.blend([prompt], 0.0, chunk_prefix_ids=sink)
    stocks = [full_cache(subject.model), stock_cache(subject.model)]
    return min(_apart(got, _continued(subject, prompt, stock), stock) for stock in stocks)


def _continued(subject: ModelUnderTest, prompt: Prompt, stock: Cache) -> Tensor:
    """Fill a stock cache with sink and chunk, and continue it: the question's logits.

    A product of one row may round unlike that of many, so the sink's columns come from a forward of the sink alone, as
    they do in a store, where many chunks share it.
    """
    _run(subject, prompt.prefix + prompt.chunks[0], stock)
    if prompt.prefix:
        alone, tokens = full_cache(subject.model), len(prompt.prefix + prompt.chunks[0])
        _run(subject, prompt.prefix, alone)
        for whole, part in zip(filter(None, kv_of(stock)), filter(None, kv_of(alone)), strict=True):
            forgotten = tokens - whole[0].shape[2]  # outside of the window
            kept = max(0, len(prompt.prefix) - forgotten)
            if kept:
                for states, sink in zip(whole, part, strict=True):
                    states[:, :, :kept] = sink[:, :, -kept:]
    return _run(subject, prompt.question, stock)


def _run(subject: ModelUnderTest, ids: tuple[int, ...], cache: Cache) -> Tensor:
    tokens = torch.tensor([ids], device=device_of(subject.model))
    return subject.model(tokens, past_key_values=cache, use_cache=True).logits.float()


def _apart(got: Blended, logits: Tensor, stock: Cache) -> float:
    pairs = [(got.asked, logits)]
    for mine, kept in zip(got.layers, kv_of(stock), strict=True):
        pairs += [(one[:, :, -other.shape[2] :], other) for one, other in zip(mine, kept, strict=True)]
    return max(distance(*pair) for pair in pairs)

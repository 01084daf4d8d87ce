# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence caches as many tests make them; apart from `asking.py`, so that tests of the core import the core alone."""

import torch
from transformers import DynamicCache

from hf_blend import SequenceCache
from tests.asking import prompt, rotated


@torch.no_grad()
def fed(cache, ids):
    """Logits of a forward with a sequence cache."""
    return cache.model(ids, past_key_values=cache).logits


def filled(model, tokens=24, **settings):
    """A sequence cache that holds a prompt."""
    cache = SequenceCache(model, **settings)
    fed(cache, prompt(tokens))
    return cache


def shifted_by_hand(model, ids, keep, start):
    """A stock cache of a prompt whose tokens from `start` on were moved up behind the first `keep`."""
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for layer in cache.layers:
        moved = rotated(layer.keys[:, :, start:], keep - start).float()
        layer.keys = torch.cat([layer.keys[:, :, :keep], moved], 2)
        layer.values = torch.cat([layer.values[:, :, :keep], layer.values[:, :, start:]], 2)
    return cache

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, their prompts, and the stock answer to compare with."""

import functools
import inspect

import pytest
import torch
from tiny_image_models import END, IMAGE, KINDS, START, VIDEO, image_arguments, picture, tiny_image_model
from transformers import DynamicCache, LlavaForConditionalGeneration

from hf_blend import BlendCache, ChunkStore

__all__ = ["END", "IMAGE", "KINDS", "START", "VIDEO", "picture"]

# plain positions; positions in three axes; tokens of an image that see each other, and windows
FAST = ("llava", "qwen3_vl", "gemma3")
FLOOR = 2e-5  # of logits of size 1 to 5: sums in another order; another image moves them by 0.01 to 1
PREFIX, CHUNKS, QUESTION = [1, 5, 6, 7], [[*range(10, 26)], [*range(30, 50)], [*range(52, 70)]], [7, 8, 9, 11]

HAS_ENCODED = "mm_encoder_outputs" in inspect.signature(LlavaForConditionalGeneration.forward).parameters
needs_encoding = pytest.mark.skipif(
    not HAS_ENCODED,
    reason="images cannot be encoded ahead: needs transformers 5.18 or newer",
)


@functools.cache
def _build(kind, attention, dtype):
    return tiny_image_model(kind, attention).to(dtype)


def build(kind, attention="sdpa", dtype=torch.float32):
    """A small random model that reads images, the same at each call."""
    return _build(kind, attention, dtype)


def prompt(kind, *pieces):
    """Prefix, pieces and question as `[1, tokens]`."""
    return torch.tensor([[*PREFIX, *(token for piece in pieces for token in piece), *QUESTION]])


def arguments(kind, *pieces, seeds=(0,)):
    """Ids and what a processor makes of images with these seeds, in order."""
    return image_arguments(kind, prompt(kind, *pieces), seeds)


@torch.no_grad()
def stock(kind, inputs, attention="sdpa", **more):
    """Last logits of the model alone, and its cache, which forgets nothing."""
    cache = DynamicCache()
    given = {**inputs, **more, "past_key_values": cache, "logits_to_keep": 1, "use_cache": True}
    return build(kind, attention)(**given).logits[:, -1], cache


@torch.no_grad()
def blend(kind, inputs, store, attention="sdpa", chunks=True, **settings):
    """Last logits of a blended forward, in which images are chunks or are computed in place; and the cache."""
    cache = BlendCache(build(kind, attention), store, **settings)
    if chunks:
        inputs = cache.inputs_with_images(**inputs)
    cache.get_seq_length()
    output = build(kind, attention)(**inputs, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


def exact(kind, inputs, store, attention="sdpa", chunks=True, **settings):
    """The report of a blended forward, whose last logits must be those of the model alone."""
    got, cache = blend(kind, inputs, store, attention, chunks, **settings)
    assert gap(got, stock(kind, inputs, attention)[0]) < FLOOR
    return cache.report


def filled(kind, attention="sdpa"):
    """A store with the chunks of text."""
    store = ChunkStore.open("memory://")
    store.add(build(kind, attention), None, CHUNKS)
    return store


def gap(one, other):
    """Largest difference."""
    return float((one - other).abs().max())

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, their images, and the stock answer to compare with."""

import functools

import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.verify import image_zoo
from hf_blend.verify.image_zoo import END, IMAGE, START, VIDEO, picture, tiny_image_model

__all__ = ["END", "IMAGE", "KINDS", "START", "VIDEO", "picture"]

# others are tried by `verify --all` alone: their towers and decoders are those of these, or tested with text
ONLY_VERIFIED = ("aya_vision", "cohere2_vision", "glm46v", "glm4v_moe", "qwen3_5", "qwen3_5_moe", "shieldgemma2",
                 "vipllava")  # fmt: skip
KINDS = {kind: one for kind, one in image_zoo.KINDS.items() if kind not in ONLY_VERIFIED}
plain, grid = KINDS["llava"].pixels, KINDS["qwen2_vl"].pixels
FAST = ("llava", "qwen3_vl", "gemma3")
FLOOR = 2e-5  # of logits of size 1 to 5: sums in another order; another image moves them by 0.01 to 1
PREFIX, CHUNKS, QUESTION = [1, 5, 6, 7], [[*range(10, 26)], [*range(30, 50)], [*range(52, 70)]], [7, 8, 9, 11]


def build(kind, attention="sdpa", dtype=torch.float32):
    """A small random model with eyes, the same at each call."""
    return _build(kind, attention, dtype)


@functools.cache
def _build(kind, attention, dtype):
    return tiny_image_model(kind, attention).to(dtype)


def arguments(kind, ids, seed):
    given = dict(KINDS[kind][2](seed, len(ids)).items())
    dtype = build(kind).dtype
    return {name: part.to(dtype) if part.is_floating_point() else part for name, part in given.items()} | KINDS[kind][
        3
    ](ids)


@torch.no_grad()
def stock(kind, ids, seed, attention="sdpa", **given):
    """Last logits of the model alone, and its cache, which forgets nothing."""
    cache = DynamicCache()
    given = {**arguments(kind, ids, seed), **given}
    output = build(kind, attention)(input_ids=ids, **given, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


@torch.no_grad()
def blend(kind, ids, seed, store, attention="sdpa", given=(), **settings):
    """Last logits of a blended forward, and the cache."""
    cache = BlendCache(build(kind, attention), store, **settings)
    cache.get_seq_length()
    given = {**arguments(kind, ids, seed), **dict(given)}
    output = build(kind, attention)(input_ids=ids, **given, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


def prompt(kind, *pieces):
    """Prefix, pieces and question as `[1, tokens]`."""
    return torch.tensor([[*PREFIX, *(token for piece in pieces for token in piece), *QUESTION]])


def filled(kind, attention="sdpa"):
    store = ChunkStore.open("memory://")
    store.add(build(kind, attention), None, CHUNKS)
    return store


def gap(one, other):
    return float((one - other).abs().max())

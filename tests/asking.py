# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests as many tests make them: ids, a cache over a store in memory, a blended prefill, a greedy answer."""

import json
from contextlib import contextmanager

import torch

from hf_blend import BlendCache, ChunkStore, observer
from hf_blend.model.attention import row_lines
from hf_blend.model.hooks import hears_forwards
from tests.conftest import random_pieces

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PIECES = {"prefix": [1, 4, 5], "chunks": [[*range(10, 40)], [*range(60, 85)]], "question": [5, 6, 7, 8]}
LONG = {**PIECES, "chunks": [[*range(10, 90)], [*range(20, 85)]]}
THREE = [random_pieces(), random_pieces((29,), seed=1), random_pieces((20, 12), seed=2, question=5)]


def longrope(tokens, **more):
    """Rotary parameters with other frequencies from so many tokens on."""
    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": tokens, **factors, **more}


def memory():
    """An empty store in memory."""
    return ChunkStore.open("memory://")


def batched(*requests):
    """Several requests as the keywords of one batch; one as it is."""
    if len(requests) == 1:
        return requests[0]
    batch = {}
    for name in requests[0]:
        batch[name] = [one[name] for one in requests]
    return batch


def prepared(model, *requests, store=None, **settings):
    """A cache, and the inputs of a prompt of ids or of a batch of them."""
    if store is None:
        store = memory()
    cache = BlendCache(model, store, **settings)
    return cache, cache.inputs(None, **batched(*requests))


def generated(model, inputs, cache=None, **ways):
    """Ids of prompt and answer, greedy if nothing else is said."""
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **ways})


def as_stock(model, inputs, cache, how=None, **ways):
    """Ids of prompt and answer, which are those of stock transformers; `how` is said to the first alone."""
    blended_ways = {**ways, **(how or {})}
    output = generated(model, inputs, cache, **blended_ways)
    expected = generated(model, inputs, **ways)
    assert torch.equal(output, expected)
    return output


def asked(model, *requests, store=None, ways=GREEDY, **settings):
    """The cache behind an answer, and the ids."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    return cache, generated(model, inputs, cache, **ways)


def logits(model, *requests, store=None, tokens=3, **settings):
    """Logits of each new token, `[rows, tokens, vocabulary]`, and the cache behind them."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    ways = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    output = generated(model, inputs, cache, **ways)
    return torch.stack(output.logits, 1), cache


@torch.no_grad()
def prefill(model, inputs, cache=None):
    """Last logits of one forward, each row's positions counted from its first token."""
    before = inputs["attention_mask"].cumsum(-1) - 1
    given = {**inputs, "position_ids": before.clamp_min(0), "logits_to_keep": 1}
    return model(**given, past_key_values=cache, use_cache=cache is not None).logits


def prefilled(model, *requests, store=None, **settings):
    """The cache behind a blended prefill, its last logits, and the inputs."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    return cache, prefill(model, inputs, cache), inputs


def prompt(tokens, seed=0, rows=1):
    """Random ids `[rows, tokens]`."""
    return torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def states_of(cache):
    """K and V of every layer."""
    states = []
    for layer in cache.layers:
        states += [layer.keys, layer.values]
    return states


def check_equal(got, expected):
    """Tensors are equal, each to its like."""
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def hooks(model):
    """How many hooks a model carries, without those by which living caches hear of its forwards."""
    count = 0
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not hears_forwards(hook):
                count += 1
    return count


def apart(got, expected):
    """The largest difference."""
    return float((got - expected).abs().max()) if got.numel() else 0.0


def rotated(states, positions):
    """Llama's rotation, written out in float64: `[…, tokens, width]` at `[tokens]`, or by one distance."""
    half = states.shape[-1] // 2
    positions = torch.as_tensor(positions).reshape(-1, 1)
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = positions * 10000.0**-exponents
    cos = angles.cos()
    sin = angles.sin()
    first, second = states.double().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def noting(monkeypatch, owner, name, note):
    """Let `note` see the arguments of every call of a function before the call is made."""
    real = getattr(owner, name)

    def call(*given, **more):
        note(*given, **more)
        return real(*given, **more)

    monkeypatch.setattr(owner, name, call)


def jsonl(path, *rows):
    """A file with one row on each line."""
    with path.open("w", encoding="utf-8") as opened:
        for row in rows:
            opened.write(json.dumps(row) + "\n")
    return path


@contextmanager
def failing(module):
    """Let each call of a module end in a ZeroDivisionError; the model is who it was."""
    handle = module.register_forward_hook(observer(lambda *_: 1 / 0))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def poisoned_memory():
    """What nobody wrote is NaN, and not by chance what was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def raising(error):
    """A function that raises whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


def looking_ahead(mask, rows, past, keys, *_):
    """`row_lines` that show each row the key behind its own."""
    return row_lines(mask, (rows + 1).clamp_max(keys - past - 1), past, keys)


def _rounded(states, axis, bits):
    """What is left of values that share a scale along `axis`, by the formulas that `pack` names."""
    if bits == 8:
        scale = states.abs().amax(axis, keepdim=True) / 127
        scale = torch.where(scale > 0, scale, 1.0)
        steps = (states / scale).round()
        return steps.clamp(-127, 127) * scale
    low = states.amin(axis, keepdim=True).bfloat16().float()
    high = states.amax(axis, keepdim=True)
    step = ((high - low) / 15).bfloat16().float()
    steps = ((states - low) / step).round()
    return steps.clamp(0, 15) * step + low


def packed_by_hand(keys, values, bits=8, tokens=None):
    """K and V with the first tokens in few bits, all groups but the last where nothing is said.

    K is rounded by channel over groups of 32 tokens, V by token, in 4 bits by 32 neighbouring channels or all.
    """
    if tokens is None:
        tokens = keys.shape[2] // 32 * 32 - 32
    width = values.shape[3]
    if bits == 4 and width % 32 == 0:
        width = 32
    packed_keys = keys[:, :, :tokens].unflatten(2, (-1, 32))
    packed_keys = _rounded(packed_keys, 3, bits).flatten(2, 3)
    packed_values = values[:, :, :tokens].unflatten(3, (-1, width))
    packed_values = _rounded(packed_values, 4, bits).flatten(3)
    keys = torch.cat([packed_keys, keys[:, :, tokens:]], 2)
    values = torch.cat([packed_values, values[:, :, tokens:]], 2)
    return keys, values

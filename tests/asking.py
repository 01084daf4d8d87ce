# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests as many tests make them: ids, a cache over a store in memory, a blended prefill, a greedy answer."""

import json

import torch

from hf_blend import BlendCache, ChunkStore, SequenceCache
from hf_blend.model.row_masks import row_mask
from tests.conftest import random_pieces

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PIECES = {"prefix": [1, 4, 5], "chunks": [[*range(10, 40)], [*range(60, 85)]], "question": [5, 6, 7, 8]}
LONG = {"prefix": [1, 4, 5], "chunks": [[*range(10, 90)], [*range(20, 85)]], "question": [5, 6, 7, 8]}
THREE = [random_pieces(), random_pieces((29,), seed=1), random_pieces((20, 12), seed=2, question=5)]


def memory():
    """An empty store in memory."""
    return ChunkStore.open("memory://")


def batched(*requests):
    """Several requests as the keywords of one batch; one as it is."""
    return requests[0] if len(requests) == 1 else {name: [one[name] for one in requests] for name in requests[0]}


def prepared(model, *requests, store=None, **settings):
    """A cache, and the inputs of a prompt of ids or of a batch of them."""
    cache = BlendCache(model, memory() if store is None else store, **settings)
    return cache, cache.inputs(None, **batched(*requests))


def generated(model, inputs, cache=None, **ways):
    """Ids of prompt and answer, greedy if nothing else is said."""
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **ways})


def asked(model, *requests, store=None, ways=GREEDY, **settings):
    """The cache behind an answer, and the ids."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    return cache, generated(model, inputs, cache, **ways)


def logits(model, *requests, store=None, tokens=3, **settings):
    """Logits of each new token, `[rows, tokens, vocabulary]`, and the cache behind them."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    ways = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(generated(model, inputs, cache, **ways).logits, 1), cache


@torch.no_grad()
def prefill(model, inputs, cache=None):
    """Last logits of one forward, each row's positions counted from its first token."""
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    given = {"position_ids": positions, "logits_to_keep": 1}
    return model(**inputs, **given, past_key_values=cache, use_cache=cache is not None).logits


def prefilled(model, *requests, store=None, **settings):
    """The cache behind a blended prefill, its last logits, and the inputs."""
    cache, inputs = prepared(model, *requests, store=store, **settings)
    return cache, prefill(model, inputs, cache), inputs


def prompt(tokens, seed=0, rows=1):
    """Random ids `[rows, tokens]`."""
    return torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def filled(model, tokens=24, **settings):
    """A sequence cache that holds a prompt."""
    cache = SequenceCache(model, **settings)
    with torch.no_grad(), cache:
        model(prompt(tokens), past_key_values=cache)
    return cache


def hooks(model):
    """How many hooks a model carries."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def apart(got, expected):
    """The largest difference."""
    return float((got - expected).abs().max()) if got.numel() else 0.0


def rotated(states, positions):
    """Llama's rotation, written out in float64: `[…, tokens, width]` at `[tokens]`, or by one distance."""
    half = states.shape[-1] // 2
    positions = torch.as_tensor(positions).reshape(-1, 1)
    angles = positions * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = states[..., :half].double(), states[..., half:].double()
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def noting(monkeypatch, owner, name, note):
    """Let `note` see the arguments of every call of a function before the call is made."""
    real = getattr(owner, name)

    def call(*given, **more):
        note(*given, **more)
        return real(*given, **more)

    monkeypatch.setattr(owner, name, call)


def jsonl(path, *rows):
    """A file with one row on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def raising(error):
    """A function that raises whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


def looking_ahead(mask, rows, past, keys, *given):
    """`row_mask` that shows each row the key behind its own."""
    return row_mask(mask, (rows + 1).clamp_max(keys - past - 1), past, keys, given[0])


def packed_by_hand(states, axis):
    """The first tokens in 8 bits by the definition: K a step for 32 tokens of a channel, V one for each token."""
    tokens = states.shape[2] // 32 * 32 - 32
    groups = states[:, :, :tokens].unflatten(2, (-1, 32))
    step = groups.abs().amax(axis, keepdim=True).clamp_min(1e-30) / 127
    return torch.cat([((groups / step).round() * step).flatten(2, 3), states[:, :, tokens:]], 2)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the caller says about positions is true: beside stock transformers with the same `position_ids`."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from tests.asking import apart, longrope, memory, prepared
from tests.conftest import shared_zoo_model, slow_but

A = [*range(10, 34)]
B = [*range(60, 82)]
Q = [5, 6, 7, 8, 9]
REQUEST = {"prefix": [1], "chunks": [A, B], "question": Q}
WIDTH = 1 + len([*A, *B, *Q])
SECOND = 1 + len(A)
TOLERANCE = 2e-5  # of logits of size 1 to 10, float32
RATIOS = (0.0, 0.15, 1.0)


def moved(*steps):
    """Positions 0, 1, 2 … with so much more from some columns on."""
    positions = torch.arange(WIDTH)
    for column, step in steps:
        positions[column:] += step
    return positions


SCALED = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 60,
    "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "gpt_neox": {},  # rotates a part of each key
    "gemma3_text": {},  # windows, and two rotary tables
    "llama4_text": {"floor_scale": 4, "attn_scale": 0.5},  # attention in chunks, and a scale by columns
    "deepseek_v3": {},  # latent
    "qwen3_next": {},  # a mixer
    "phi3": {"rope_parameters": longrope(58), "original_max_position_embeddings": 58},  # frequencies by length
    "ministral3": {"rope_parameters": SCALED},  # a scale by positions
    "deepseek_v32": {},  # an indexer
    "lfm2": {},
}
# where they are, and how many tokens of the two chunks are reused
PLACES = {
    "consecutive": (moved(), 46),
    "far": (moved((0, 100)), 46),
    "a gap before the first chunk": (moved((1, 7)), 46),
    "a gap inside the first chunk": (moved((11, 5)), 22),
    "a gap inside the second chunk": (moved((SECOND + 8, 3)), 24),
    "a step back inside": (moved((11, -4)), 22),
    "a stride": (moved() * 2, 0),
    "shuffled": (moved()[torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))], 0),
}
GAP = "a gap before the first chunk"
FAST = [
    ("gpt_neox", GAP), ("deepseek_v3", GAP), ("qwen3_next", GAP), ("llama4_text", GAP), ("qwen3_next", "a stride"),
    ("gemma3_text", "a step back inside"), ("phi3", "far"), ("ministral3", "far"),
    *itertools.product(["llama"], PLACES),
]  # fmt: skip
sweep = pytest.mark.parametrize(("family", "place"), slow_but(*FAST, among=[*itertools.product(FAMILIES, PLACES)]))


def model_of(family):
    return shared_zoo_model(family, **FAMILIES.get(family, {}))


@torch.no_grad()
def prefill(model, inputs, positions, cache):
    """The last logits of a prefill at some positions, into a cache that forgets nothing."""
    cache.activate_past_recording()
    given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "logits_to_keep": 5}
    return model(**inputs, **given).logits


def check_first_layer(cache, true, mask):
    """K and V of layer 0, where it keeps any, are known; they follow from each token and its position alone."""
    if getattr(true.layers[0], "keys", None) is None:
        return
    for name in ("keys", "values"):
        got = getattr(cache.layers[0], name)
        known = getattr(true.layers[0], name)
        count = min(got.shape[2], known.shape[2])
        real = mask[:, -count:].bool()
        got = got[:, :, -count:].transpose(1, 2)
        known = known[:, :, -count:].transpose(1, 2)
        assert apart(got[real], known[real]) <= TOLERANCE


@sweep
def test_position_ids_are_those_of_stock_at_every_ratio(family, place):
    """At ratio 1 all is; at the others every key is at the caller's position, and chunks with a gap are computed."""
    model = model_of(family)
    store = memory()
    positions, reused = PLACES[place]
    for ratio in RATIOS:
        cache, inputs = prepared(model, REQUEST, store=store, recompute_ratio=ratio)
        true = DynamicCache(config=model.config)
        logits = prefill(model, inputs, positions[None], cache)
        expected = prefill(model, inputs, positions[None], true)
        check_first_layer(cache, true, inputs["attention_mask"])
        report = cache.report
        of_chunks = report.exact_tokens + report.reusable_tokens
        assert of_chunks - reused in (0, 1), "with BOS, or without"
        if ratio == 1.0 or not reused or place == "a gap inside the second chunk":
            assert apart(logits, expected) <= TOLERANCE, ratio
        assert bool(report.notice) == (reused < 46)
        if not of_chunks:
            assert "position_ids" in report.fallback_reason


OTHER = {"prefix": [1], "chunks": [B], "question": Q}
PADDED = [("llama", None), ("llama", "shuffled"), ("gemma3_text", GAP), ("llama4_text", None)]


@pytest.mark.parametrize(("family", "place"), PADDED)
def test_position_ids_of_padded_batch_are_those_of_stock(family, place):
    """Each row at its own; without any, columns are positions."""
    model = model_of(family)
    store = memory()
    positions = None
    if place is not None:
        shorter = 1 + len([*B, *Q])
        positions = torch.ones(2, WIDTH, dtype=torch.long)  # of padding
        positions[0], _ = PLACES[place]
        positions[1, -shorter:] = torch.arange(shorter) * 3
    for ratio in RATIOS:
        cache, inputs = prepared(model, REQUEST, OTHER, store=store, recompute_ratio=ratio)
        true = DynamicCache(config=model.config)
        logits = prefill(model, inputs, positions, cache)
        expected = prefill(model, inputs, positions, true)
        check_first_layer(cache, true, inputs["attention_mask"])
        if ratio == 1.0 or place == "shuffled":
            assert apart(logits, expected) <= TOLERANCE


CUT = [
    ("llama", 9, GAP), ("llama", 9, "here"), ("llama", 9, "a stride"), ("llama", 9, "before"),
    ("llama", SECOND, GAP), ("llama", SECOND + 9, "here"), ("gemma3_text", 9, "before"),
    ("qwen3_next", SECOND, "here"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "cut", "place"), CUT)
def test_position_ids_of_prompt_in_parts_are_those_of_stock(family, cut, place):
    """A gap may be where one part ends; what the first part was at is remembered."""
    model = model_of(family)
    if place == "here":
        positions = moved((cut, 6))
    elif place == "before":
        positions = moved((0, 11), (cut, -11))
    else:
        positions, _ = PLACES[place]
    for ratio in (0.15, 1.0):
        cache, inputs = prepared(model, REQUEST, recompute_ratio=ratio)
        true = DynamicCache(config=model.config)
        for part in (slice(0, cut), slice(cut, None)):
            ids = {"input_ids": inputs["input_ids"][:, part]}
            expected = prefill(model, ids, positions[None, part], true)
            got = prefill(model, ids, positions[None, part], cache)
            if ratio == 1.0:
                assert apart(got, expected) <= TOLERANCE
        check_first_layer(cache, true, inputs["attention_mask"])

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the caller says about positions is true: beside stock transformers with the same `position_ids`."""

import itertools

import pytest
import torch
from transformers import DynamicCache

from tests.asking import apart, memory, prepared
from tests.conftest import shared_zoo_model, slow_but

A = [*range(10, 34)]
B = [*range(60, 82)]
Q = [5, 6, 7, 8, 9]
REQUEST = {"prefix": [1], "chunks": [A, B], "question": Q}
IDS = torch.tensor([[1, *A, *B, *Q]])
WIDTH = IDS.shape[1]
SECOND = 1 + len(A)
TOLERANCE = 2e-5  # of logits of size 1 to 10, float32
RATIOS = (0.0, 0.15, 1.0)


def moved(*steps):
    """Positions 0, 1, 2 … with so much more from some columns on."""
    positions = torch.arange(WIDTH)
    for column, step in steps:
        positions[column:] += step
    return positions


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 58,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip
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
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 58},  # frequencies by the last position
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
MECHANISMS = ("gpt_neox", "deepseek_v3", "qwen3_next", "llama4_text")
FAST = [*((family, "a gap before the first chunk") for family in MECHANISMS), *(("llama", place) for place in PLACES)]
FAST += [("gemma3_text", "a step back inside"), ("phi3", "far"), ("ministral3", "far"), ("qwen3_next", "a stride")]
sweep = pytest.mark.parametrize(("family", "place"), slow_but(*FAST, among=[*itertools.product(FAMILIES, PLACES)]))


def model_of(family):
    return shared_zoo_model(family, **FAMILIES.get(family, {}))


@torch.no_grad()
def stock_prefill(model, positions, ids=IDS, **more):
    """Last logits of the model alone, and its cache, which forgets nothing."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "logits_to_keep": 5}
    return model(ids, **given, **more).logits, cache


@torch.no_grad()
def blended(model, store, positions, ratio, *requests):
    """Last logits of a blended prefill at some positions, and the cache."""
    cache, inputs = prepared(model, *requests, store=store, recompute_ratio=ratio)
    cache.activate_past_recording()
    return model(**inputs, position_ids=positions, past_key_values=cache, logits_to_keep=5).logits, cache


def first_layer(cache):
    """K and V of layer 0, where it keeps any; they follow from each token and its position alone."""
    layer = cache.layers[0]
    if getattr(layer, "keys", None) is None:
        return []
    return [part for part in (layer.keys, layer.values) if part.dim() == 4]


def check_first_layer(cache, true):
    for got, known in zip(first_layer(cache), first_layer(true), strict=True):
        count = min(got.shape[2], known.shape[2])
        assert apart(got[:, :, -count:], known[:, :, -count:]) <= TOLERANCE


@sweep
def test_position_ids_are_those_of_stock_at_every_ratio(family, place):
    """At ratio 1 all is; at the others every key is at the caller's position, and chunks with a gap are computed."""
    model = model_of(family)
    store = memory()
    positions, reused = PLACES[place]
    expected, true = stock_prefill(model, positions[None])
    for ratio in RATIOS:
        logits, cache = blended(model, store, positions[None], ratio, REQUEST)
        report = cache.report
        check_first_layer(cache, true)
        of_chunks = report.exact_tokens + report.reusable_tokens
        assert of_chunks - reused in (0, 1), "with BOS, or without"
        if ratio == 1.0 or not reused or place == "a gap inside the second chunk":
            assert apart(logits, expected) <= TOLERANCE, ratio
        assert bool(report.notice) == (reused < 46)
        if not reused and not of_chunks:
            assert "position_ids" in report.fallback_reason


def padded(*rows):
    """Ids, mask and positions of rows `(ids, positions)`, padded on the left; padding is at position 1."""
    width = max(len(ids) for ids, _ in rows)
    shape = (len(rows), width)
    padded_ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    padded_positions = torch.ones(shape, dtype=torch.long)
    for row, (ids, positions) in enumerate(rows):
        start = width - len(ids)
        padded_ids[row, start:] = torch.tensor(ids)
        mask[row, start:] = 1
        padded_positions[row, start:] = positions
    return padded_ids, mask, padded_positions


OTHER = {"prefix": [1], "chunks": [B], "question": Q}
OTHER_IDS = [1, *B, *Q]


GAP = "a gap before the first chunk"
PADDED = [("llama", None), ("llama", "shuffled"), ("gemma3_text", GAP), ("llama4_text", None)]


@pytest.mark.parametrize(("family", "place"), PADDED)
def test_position_ids_of_padded_batch_are_those_of_stock(family, place):
    """Each row at its own; without any, columns are positions."""
    model = model_of(family)
    store = memory()
    count = len(OTHER_IDS)
    positions, _ = PLACES[place or "consecutive"]
    ids, mask, given = padded((IDS[0].tolist(), positions), (OTHER_IDS, torch.arange(count) * 3))
    if place is None:
        given = None
    expected, true = stock_prefill(model, given, ids, attention_mask=mask)
    for ratio in RATIOS:
        logits, cache = blended(model, store, given, ratio, REQUEST, OTHER)
        for got, known in zip(first_layer(cache), first_layer(true), strict=True):
            real = mask[:, -known.shape[2] :].bool()
            got = got[:, :, -known.shape[2] :].transpose(1, 2)
            known = known.transpose(1, 2)
            assert apart(got[real], known[real]) <= TOLERANCE
        if ratio == 1.0 or place == "shuffled":
            assert apart(logits, expected) <= TOLERANCE


CUT_PLACES = ("a gap before the first chunk", "here", "a stride", "before")
CUT_FAST = [("llama", 9, place) for place in CUT_PLACES] + [("llama", SECOND, "a gap before the first chunk"),
            ("llama", SECOND + 9, "here"), ("gemma3_text", 9, "before")]  # fmt: skip


@pytest.mark.parametrize(("family", "cut", "place"), [*CUT_FAST, ("qwen3_next", SECOND, "here")])
@torch.no_grad()
def test_position_ids_of_prompt_in_parts_are_those_of_stock(family, cut, place):
    """A gap may be where one part ends; what the first part was at is remembered."""
    model = model_of(family)
    if place == "here":
        positions = moved((cut, 6))
    elif place == "before":
        positions = moved((0, 11), (cut, -11))
    else:
        positions, _ = PLACES[place]
    parts = (slice(0, cut), slice(cut, None))
    for ratio in (0.15, 1.0):
        cache, _ = prepared(model, REQUEST, recompute_ratio=ratio)
        true = DynamicCache(config=model.config)
        for one in (cache, true):
            one.activate_past_recording()
        for part in parts:
            given = {"position_ids": positions[None, part], "use_cache": True, "logits_to_keep": 1}
            expected = model(IDS[:, part], past_key_values=true, **given).logits
            got = model(IDS[:, part], past_key_values=cache, **given).logits
            if ratio == 1.0:
                assert apart(got, expected) <= TOLERANCE
        check_first_layer(cache, true)

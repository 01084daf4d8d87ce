# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention implementations beside eager and sdpa: flex is exact as it is, flash attention goes through sdpa."""

import logging

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from hf_blend.errors import UnsupportedModelError
from hf_blend.prefill import rows
from tests.asking import apart, as_stock, prefill, prefilled, prepared
from tests.conftest import shared_zoo_model, slow_but

BATCH = ({"chunks": (17, 23, 31)}, {"chunks": (29,), "seed": 1})
FLASH = "flash_attention_2"
MIXED = {"gemma3_text": {"layer_types": ["full_attention", "sliding_attention"] * 2}}
REQUESTS_OF = {"gemma3_text": 1, "mistral": 2, "llama": 2}  # how many are in a batch


def flash(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **given):
    """What flash attention computes, with the only mask it knows: rows at the end, a window, padding in front.

    Positions with gaps look like several sequences to it, which do not see each other.
    """
    places = given.get("position_ids")
    assert places is None or not _is_packed_sequence(places, len(query))
    rows = query.shape[2]
    keys = key.shape[2]
    behind = torch.arange(keys)[None] - torch.arange(keys - rows, keys)[:, None]
    seen = (behind <= 0) & (behind > -(sliding_window or keys + 1))
    if attention_mask is not None:
        assert attention_mask.dim() == 2
        seen = seen & attention_mask[:, None, None, -keys:].bool()
    seen = seen | (behind == 0)  # a row of padding sees itself
    done = scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return done.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_model(monkeypatch):
    """Models whose attention is a stand-in for flash attention, which is not installed here."""
    monkeypatch.setitem(AttentionInterface._global_mapping, FLASH, flash)
    monkeypatch.setattr(rows, "_warned", set())

    def build(family):
        model = zoo_model(family, **MIXED.get(family, {}))
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = FLASH
        return model

    return build


@pytest.mark.parametrize(("family", "batch"), REQUESTS_OF.items())
def test_flash_attention_goes_through_sdpa_for_scattered_rows_and_says_so_once(
    flash_model, pieces, untouched, caplog, family, batch
):
    model = flash_model(family)
    requests = [pieces(**one) for one in BATCH[:batch]]
    with untouched(model), caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache, inputs = prepared(model, *requests, recompute_ratio=1.0)
            as_stock(model, inputs, cache)
            assert cache.report.reusable_tokens > 0
    assert caplog.text.count("scattered rows") == 1
    assert FLASH in caplog.text


@torch.no_grad()
@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("gemma3_text", 2)])
def test_with_flash_attention_scattered_rows_are_those_of_sdpa(flash_model, pieces, family, batch):
    requests = [pieces(**one) for one in BATCH[:batch]]
    stock = shared_zoo_model(family, "sdpa", **MIXED.get(family, {}))
    expected_cache, expected, _ = prefilled(stock, *requests, recompute_ratio=0.3)
    cache, got, _ = prefilled(flash_model(family), *requests, recompute_ratio=0.3)
    assert apart(got, expected) <= 1e-5
    assert cache.report.chosen_columns == expected_cache.report.chosen_columns


def test_flash_attention_with_what_sdpa_lacks_is_refused(flash_model, pieces):
    with pytest.raises(UnsupportedModelError, match=rf"(?s){FLASH} with softcap.*attn_implementation='eager'"):
        prepared(flash_model("gemma2"), pieces())


@pytest.fixture
def uncompiled():
    """Transformers compiles flex attention, which takes a minute on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize(("family", "batch"), slow_but(("gemma3_text", 1), ("llama", 2), among=[*REQUESTS_OF.items()]))
@torch.no_grad()
def test_flex_attention_is_exact(pieces, uncompiled, family, batch):
    model = shared_zoo_model(family, "flex_attention")
    requests = [pieces(**one) for one in BATCH[:batch]]
    cache, inputs = prepared(model, *requests, recompute_ratio=1.0)
    assert apart(prefill(model, inputs, cache), prefill(model, inputs)) <= 1e-5
    assert cache.report.reusable_tokens > 0
    as_stock(model, inputs, prepared(model, *requests, recompute_ratio=1.0)[0], max_new_tokens=2)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every selector promises, checked on every selector that is found; then what each of them is for."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from transformers import DynamicCache

from hf_blend import plugins
from hf_blend.errors import ConfigError
from hf_blend.prefill.probe import AttentionObserver
from hf_blend.prefill.rows import highest
from hf_blend.selectors import expected_error
from hf_blend.selectors.attention import Attention
from hf_blend.selectors.base import Selector, TokenView
from tests.asking import PIECES, poisoned_memory, prefilled

SELECTORS = plugins.describe("selectors")
CHUNKS = (7, 12, 5)
TOKENS = 24
QUESTION = 4
LAYERS = 4
CHECK = 1
each = pytest.mark.parametrize("name", SELECTORS)


def selector(name, seed=0, **options):
    return plugins.load("selectors", name)(options, seed)


def view(seed=0, pad=0):
    """What a selector sees at the check layer: three chunks and a question, `pad` columns from the left."""
    tokens = TOKENS + QUESTION
    table = torch.full((3, 1, tokens), -1)  # number of the chunk, offset in it, its length
    start = 0
    for number, length in enumerate(CHUNKS):
        here = slice(start, start + length)
        table[0, 0, here] = number
        table[1, 0, here] = torch.arange(length)
        table[2, 0, here] = length
        start += length
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(2, 1, 2, tokens, 6, generator=generator)  # K and V
    stored = torch.randn(2, 1, 2, tokens, 6, generator=generator)
    queries = torch.randn(1, 4, QUESTION, 6, generator=generator)
    states = torch.randn(2, 1, 2, pad + tokens, 6, generator=generator)
    columns = torch.arange(pad, pad + tokens)[None]

    def pair(part):
        return fresh[part], stored[part]

    known = torch.rand(2, 1, pad + tokens, generator=generator)

    def weights(importance, words):
        return known[0] ** importance * known[1] ** words

    def probe(receive, layers, rows=QUESTION):
        """Tell of one attention as if it were that of every layer."""
        seen = Attention(queries[:, :, -rows:], *states, columns[:, -min(rows, QUESTION) :])
        for layer in layers or range(LAYERS):
            receive(layer, seen, seen.weights())

    return TokenView(CHECK, columns, table[0] >= 0, *table, pair, probe, LAYERS, weights)


def chosen(one, seen, ratio):
    count = one.count(ratio, TOKENS)
    return highest(one.score(seen), seen.reusable, torch.tensor([count]))


@each
def test_score_is_one_finite_float32_token_and_function_of_what_is_reusable(name):
    seen = view()
    scores = selector(name).score(seen)
    assert scores.shape == (1, TOKENS + QUESTION)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores[seen.reusable]).all()
    for part in (0, 1):
        for now, untouched in zip(seen.pair(part), view().pair(part), strict=True):
            assert torch.equal(now, untouched), "what is seen is not written"
    marked = chosen(selector(name), seen, 0.3)
    for part in (0, 1):
        fresh, _ = seen.pair(part)
        fresh[:, :, TOKENS:] = 7.0  # of the question, which is not reusable
    assert torch.equal(chosen(selector(name), seen, 0.3), marked)


@each
def test_count_is_size_of_nested_sets_and_share_or_end_of_scale(name):
    one = selector(name)
    seen = view()
    before = torch.zeros_like(seen.reusable)
    for ratio in (0.0, 0.01, 0.15, 0.3, 0.5, 0.9, 1.0):
        marked = chosen(one, seen, ratio)
        assert int(marked.sum()) == one.count(ratio, TOKENS)
        assert not (before & ~marked).any()
        assert not (marked & ~seen.reusable).any()
        before = marked
    assert one.count(0.15, 100) in (0, 15, 100)


@each
def test_score_needs_no_states_where_none_are_declared(name):
    one = selector(name)
    if one.needs_kv:
        pytest.skip("it has to see K and V")
    bare = replace(view(), pair=None)
    if not one.needs_question:
        bare = replace(bare, probe=None)
    assert torch.equal(one.score(bare), one.score(view()))


def test_count_is_ceiling_of_share_without_noise_of_floating_point():
    one = selector("kv-deviation")
    for hundredths in (0, 1, 7, 15, 29, 30, 57, 100):
        for tokens in (1, 3, 20, 100, 1007):
            assert one.count(hundredths / 100, tokens) == -(-hundredths * tokens // 100)


@pytest.mark.parametrize(("on", "parts"), [("v", (1,)), ("k", (0,)), ("kv", (0, 1))])
def test_kv_deviation_is_squared_distance_over_heads_and_width(on, parts):
    seen = view()
    got = selector("kv-deviation", on=on).score(view())
    expected = torch.zeros(1, TOKENS + QUESTION)
    for part in parts:
        fresh, stored = seen.pair(part)
        expected += ((fresh - stored) ** 2).sum((1, 3))
    torch.testing.assert_close(got[seen.reusable], expected[seen.reusable])


@pytest.mark.parametrize(
    ("edge", "expected"),
    [("tail", [5, 6, 17, 18, 22, 23]), ("both", [0, 6, 7, 18, 19, 23])],
)
def test_boundary_takes_each_chunk_from_its_edge(edge, expected):
    marked = chosen(selector("boundary", edge=edge), view(), 6 / TOKENS)
    assert marked[0].nonzero().flatten().tolist() == expected


def test_query_attention_is_mean_over_layers_heads_and_rows_of_question():
    seen = view()
    last = int(seen.columns[seen.reusable].max())
    columns = torch.tensor([[2, last + 1, last + 2]])  # of which the first is between chunks
    weights = torch.rand(2, 1, 4, 3, seen.columns.shape[1])  # layers, batch, heads, rows, keys

    def probe(receive, layers):
        for layer in range(2):
            receive(layer, Attention(torch.zeros(1, 4, 3, 6), None, None, columns), weights[layer])

    got = selector("query-attention").score(replace(seen, probe=probe, num_layers=2))
    torch.testing.assert_close(got, weights[:, :, :, 1:].mean(dim=(0, 2, 3)))


def test_ramp_takes_longer_heads_of_later_chunks():
    """By hand: 3.5, 13 and 21.5 tokens up to the middle of the chunks, to the power of 1.5, over 6 and the place."""
    for pad in (0, 3):
        (marked,) = chosen(selector("ramp"), view(pad=pad), 11 / TOKENS)
        assert marked.nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12, *range(19, 24)]


@pytest.mark.parametrize("factors", [*itertools.product((True, False), repeat=3)])
def test_stored_importance_is_product_of_factors_that_are_on(factors):
    seen = view(pad=3)
    is_stored, is_ramp, has_words = factors
    got = selector("stored-importance", importance=is_stored, ramp=is_ramp, words=has_words).score(seen)
    expected = seen.weights(is_stored, has_words)[:, 3:]
    if is_ramp:
        expected = expected * selector("ramp").score(seen)
    torch.testing.assert_close(got[seen.reusable], expected[seen.reusable])
    bare = replace(seen, weights=None)
    assert torch.equal(selector("stored-importance").score(bare), selector("ramp").score(bare))


def test_observer_hides_what_each_mask_hides_and_rows_that_are_left_out():
    observer = AttentionObserver(print, [0, 1], rows=2)
    observer.computed = torch.tensor([[True, True, False, True]])
    computed = torch.tensor([True, True, True, True, False, True])  # two keys are from before
    full = torch.ones(1, 1, 2, 6).bool()
    window = full.clone()
    window[..., :3] = False
    columns = torch.tensor([[1, 3]])
    states = torch.zeros(1, 1, 6, 4)
    for mask in (full, window, full):
        seen = observer._seen(Attention(states[:, :, :2], states, states, columns, 2, mask))
        assert torch.equal(seen, mask & computed)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_expected_error_sees_what_stock_attention_of_some_rows_of_question_sees(shared_model, monkeypatch, family):
    model = shared_model(family, "eager")
    first = 58  # three of the last, three of those before at equal distances
    rows = [58, 67, 76, 77, 78, 79]
    pieces = {**PIECES, "question": [*range(30, 52)]}
    weights = []
    measured = Attention.taken

    def recorded(seen, of_asking):
        is_asking = of_asking.sum(dim=(0, 1, 3)) > 0
        assert seen.columns[0, is_asking].tolist() == rows
        weights.append(of_asking * len(rows))
        return measured(seen, of_asking)

    monkeypatch.setattr(Attention, "taken", recorded)
    monkeypatch.setattr(expected_error, "ROWS", len(rows))
    cache, _, inputs = prefilled(model, pieces, selector="expected-error", recompute_ratio=0.2)
    (chosen_columns,) = cache.report.chosen_columns
    assert len(chosen_columns) == 11

    # The oracle: stock attention of these rows over the stored chunks
    reuse, _, _ = prefilled(model, pieces, recompute_ratio=0.0)
    stale = DynamicCache(config=model.config)
    for index, layer in enumerate(reuse.layers):
        stale.update(layer.keys[:, :, :first], layer.values[:, :, :first], index)
    ids = inputs["input_ids"][:, rows]
    places = torch.tensor([rows])
    with torch.no_grad():
        output = model(ids, past_key_values=stale, position_ids=places, output_attentions=True)
    seen = [*range(first), *rows]
    for of_asking, expected in zip(weights, output.attentions, strict=True):
        shares = of_asking[:, :, of_asking.sum(dim=(0, 1, 3)) > 0]
        torch.testing.assert_close(shares[..., seen], expected, rtol=1e-3, atol=1e-4)
        totals = shares.sum(dim=-1)
        assert totals.allclose(torch.ones(())), "the question's other rows are seen by none"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_expected_error_reads_no_memory_that_nothing_was_written_to(shared_model, family):
    pieces = {**PIECES, "question": [*range(30, 70)]}
    found = []
    for memory in (nullcontext(), poisoned_memory()):
        with memory:
            model = shared_model(family)
            cache, logits, _ = prefilled(model, pieces, selector="expected-error", recompute_ratio=0.2)
        assert logits.isfinite().all()
        found.append(cache.report.chosen_columns)
    assert found[0] == found[1]


class Numbered(Selector):
    defaults: ClassVar = {"share": 0.1, "is_on": False}
    score = None


def test_options_take_numbers_as_text_and_nothing_else():
    made = Numbered({"share": "0.5", "is_on": "true"})
    assert made.options == {"share": 0.5, "is_on": True}
    for name, value in (("share", "many"), ("is_on", "1")):
        with pytest.raises(ConfigError, match=f"{name}='{value}'"):
            Numbered({name: value})

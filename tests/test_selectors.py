# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every selector promises, checked on every selector that is found; then what each of them is for."""

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
from tests.asking import prefilled

SELECTORS = plugins.describe("selectors")
CHUNKS = (7, 12, 5)
QUESTION = 4
LAYERS = 4
CHECK = 1
each = pytest.mark.parametrize("name", SELECTORS)


def selector(name, seed=0, **options):
    return plugins.load("selectors", name)(options, seed)


def view(seed=0, pad=0):
    """What a selector sees at the check layer: three chunks and a question, `pad` columns from the left."""
    number = []
    offset = []
    length = []
    for chunk, tokens in enumerate(CHUNKS):
        number += [chunk] * tokens
        offset += range(tokens)
        length += [tokens] * tokens
    tokens = len(number) + QUESTION
    table = torch.full((3, 1, tokens), -1)
    table[:, 0, :-QUESTION] = torch.tensor([number, offset, length])
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(2, 1, 2, tokens, 6, generator=generator)  # K and V
    stored = torch.randn(2, 1, 2, tokens, 6, generator=generator)
    columns = torch.arange(pad, pad + tokens)[None]
    attention = _attention(seed, columns, pad)
    return TokenView(
        CHECK, columns, table[0] >= 0, *table, lambda part: (fresh[part], stored[part]),
        lambda *given, **rows: _probe(attention, *given, **rows), LAYERS,
    )  # fmt: skip


def _attention(seed, columns, pad):
    """Random queries, keys and values of every column, those of the padding among the keys hidden."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = columns.shape[1]
    queries = torch.randn(1, 4, tokens, 6, generator=generator)
    keys = torch.randn(1, 2, pad + tokens, 6, generator=generator)
    values = torch.randn(1, 2, pad + tokens, 6, generator=generator)
    places = torch.arange(pad + tokens)
    mask = (places <= columns[..., None]) & (places >= pad)
    return Attention(queries, keys, values, columns, 0, mask[:, None], 6**-0.5)


def _probe(attention, hear, layers, rows=QUESTION):
    """Tell of the same attention, of the last rows only, as if it were that of every layer."""
    rows = slice(-min(rows, QUESTION), None)
    part = replace(
        attention, queries=attention.queries[:, :, rows], columns=attention.columns[:, rows],
        mask=attention.mask[:, :, rows],
    )  # fmt: skip
    for layer in range(LAYERS) if layers is None else layers:
        hear(layer, part, part.weights())


def chosen(one, seen, ratio):
    counts = torch.tensor([one.count(ratio, int(tokens)) for tokens in seen.reusable.sum(1)])
    return highest(one.score(seen), seen.reusable, counts)


@each
def test_score_is_one_finite_float32_token_and_function_of_what_is_reusable(name):
    one = selector(name)
    seen = view()
    other = view(8)
    parts = (seen.columns, seen.reusable, seen.chunk, *seen.pair(0), *seen.pair(1))
    before = [part.clone() for part in parts]
    scores = one.score(seen)
    assert scores.shape == (1, sum(CHUNKS) + QUESTION)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores[seen.reusable]).all()
    for was, now in zip(before, parts, strict=True):
        assert torch.equal(was, now), "what is seen is not written"
    assert torch.equal(selector(name).score(view()), scores)

    def mixed(part):
        fresh, stored = seen.pair(part)
        others, _ = other.pair(part)
        return torch.where(seen.reusable[:, None, :, None], fresh, others), stored

    marked = chosen(selector(name), seen, 0.3)
    marked_of_mixed = chosen(selector(name), replace(seen, pair=mixed), 0.3)
    assert torch.equal(marked_of_mixed[seen.reusable], marked[seen.reusable])


@each
def test_count_is_size_of_nested_sets_and_share_or_end_of_scale(name):
    one = selector(name)
    seen = view()
    before = torch.zeros(1, sum(CHUNKS) + QUESTION, dtype=torch.bool)
    for ratio in (0.0, 0.01, 0.15, 0.3, 0.5, 0.9, 1.0):
        marked = chosen(one, seen, ratio)
        assert int(marked.sum()) == one.count(ratio, sum(CHUNKS))
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
    expected = torch.zeros(1, sum(CHUNKS) + QUESTION)
    for part in parts:
        fresh, stored = seen.pair(part)
        expected += ((fresh - stored) ** 2).sum((1, 3))
    torch.testing.assert_close(got[seen.reusable], expected[seen.reusable])


@pytest.mark.parametrize(
    ("edge", "expected"),
    [("tail", [5, 6, 17, 18, 22, 23]), ("both", [0, 6, 7, 18, 19, 23])],
)
def test_boundary_takes_each_chunk_from_its_edge(edge, expected):
    marked = chosen(selector("boundary", edge=edge), view(), 6 / sum(CHUNKS))
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
        (marked,) = chosen(selector("ramp"), view(pad=pad), 11 / sum(CHUNKS))
        assert marked.nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12, *range(19, 24)]


def test_observer_hides_what_each_mask_hides_and_rows_that_are_left_out():
    observer = AttentionObserver(lambda *_: None, [0, 1], rows=2)
    observer.computed = torch.tensor([[True, True, False, True]])
    full = torch.ones(1, 1, 2, 6, dtype=torch.bool)  # two keys from before
    window = full.clone()
    window[..., :3] = False
    columns = torch.tensor([[1, 3]])
    states = torch.zeros(1, 1, 6, 4)
    for _ in range(2):
        for mask in (full, window):
            seen = observer._seen(Attention(states[:, :, :2], states, states, columns, 2, mask))
            assert torch.equal(seen, mask & torch.tensor([True, True, True, True, False, True]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_expected_error_sees_what_stock_attention_of_some_rows_of_question_sees(shared_model, monkeypatch, family):
    model = shared_model(family, "eager")
    weights = []
    columns = []
    prompt = {"prefix": [1, 4, 5], "chunks": [[*range(10, 40)], [*range(60, 85)]], "question": [*range(30, 52)]}
    first = 58  # three of the last, three of those before at equal distances
    rows = [58, 67, 76, 77, 78, 79]
    reuse, _, inputs = prefilled(model, prompt, recompute_ratio=0.0)
    taken = expected_error._attention_times_length

    def recorded(seen, shares, question):
        weights.append(shares)
        columns.append(seen.columns[0, question[0] > 0].tolist())
        return taken(seen, shares, question)

    monkeypatch.setattr(expected_error, "_attention_times_length", recorded)
    monkeypatch.setattr(expected_error, "ROWS", len(rows))
    cache, _, _ = prefilled(model, prompt, selector="expected-error", recompute_ratio=0.2)
    assert columns == [rows] * model.config.num_hidden_layers
    stale = DynamicCache(config=model.config)
    for index, layer in enumerate(reuse.layers):
        keys = layer.keys[:, :, :first]
        values = layer.values[:, :, :first]
        stale.update(keys, values, index)
    with torch.no_grad():
        places = torch.tensor([rows])
        ids = inputs["input_ids"][:, rows]
        output = model(ids, past_key_values=stale, position_ids=places, output_attentions=True)
        attentions = output.attentions
    seen = [*range(first), *rows]
    for shares, expected in zip(weights, attentions, strict=True):
        torch.testing.assert_close(shares[..., seen], expected, rtol=1e-3, atol=1e-4)
        totals = shares.sum(dim=-1)
        assert totals.allclose(torch.ones(()))  # the question's other rows are seen by none
    (chosen_columns,) = cache.report.chosen_columns
    assert len(chosen_columns) == 11


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_expected_error_reads_no_memory_that_nothing_was_written_to(shared_model, monkeypatch, family):
    prompt = {"prefix": [1, 4, 5], "chunks": [[*range(10, 40)], [*range(60, 85)]], "question": [*range(30, 70)]}
    model = shared_model(family)
    chosen = []
    empty = torch.empty
    for filling in (None, torch.nan):

        def filled(*size, filling=filling, **given):
            made = empty(*size, **given)
            return made if filling is None or not made.is_floating_point() else made.fill_(filling)

        monkeypatch.setattr(torch, "empty", filled)
        monkeypatch.setattr(
            torch.Tensor, "new_empty", lambda own, *size, **given: filled(*size, dtype=own.dtype, **given)
        )
        cache, logits, _ = prefilled(model, prompt, selector="expected-error", recompute_ratio=0.2)
        chosen.append(cache.report.chosen_columns)
        assert logits.isfinite().all()
    assert chosen[0] == chosen[1]


class Numbered(Selector):
    defaults: ClassVar = {"share": 0.1, "is_on": False}
    score = None


def test_options_take_numbers_as_text_and_nothing_else():
    made = Numbered({"share": "0.5", "is_on": "true"})
    assert made.options == {"share": 0.5, "is_on": True}
    for name, value in (("share", "many"), ("is_on", "1")):
        with pytest.raises(ConfigError, match=f"{name}='{value}'"):
            Numbered({name: value})

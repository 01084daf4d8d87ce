# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fusor against plain models: equal to a full prefill where it must be, to an independent reference elsewhere."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, observer
from hf_blend.errors import UnsupportedModelError
from hf_blend.model.anatomy import decoder_layers
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.identity import fingerprint
from hf_blend.rotary.base import compose
from hf_blend.store.chunk import ChunkKey
from tests.asking import THREE, apart, check_equal, prepared, states_of
from tests.conftest import random_pieces as pieces

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 24}, "qwen2": {}, "qwen3": {"head_dim": 16}}
LAYERS = 4
CHECK = 1
BOS = (1,)
DIAGONAL = [("llama", "sdpa", 3), ("mistral", "eager", 3), ("mistral", "sdpa", 1), ("qwen2", "eager", 1),
            ("qwen3", "sdpa", 3)]  # fmt: skip
everywhere = pytest.mark.parametrize(("family", "attention", "batch"), DIAGONAL)
REQUEST = THREE[0]


def blend(model, *requests, store=None, keep=1, **settings):
    """The last logits of one prefill, and the cache."""
    cache, inputs = prepared(model, *requests, store=store, **{"selector": "kv-deviation", **settings})
    for request in requests:  # what is in memory is written to several layers at a time
        cache.store.add(model, None, request["chunks"])
        cache.store.add(model, None, [request["prefix"]], chunk_prefix_ids=())
    cache.activate_past_recording()  # so that every column can be looked at, also outside a window
    before = inputs["attention_mask"].cumsum(-1) - 1
    places = before.clamp_min(0)
    with torch.no_grad():
        output = model(**inputs, position_ids=places, past_key_values=cache, logits_to_keep=keep)
    return output.logits, cache


def laid_out(requests):
    """Ids, mask, positions `[batch, tokens]` of requests padded on the left, and the first column of each."""
    rows = []
    for one in requests:
        chunks = sum(one["chunks"], [])
        rows.append([*one["prefix"], *chunks, *one["question"]])
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    starts = []
    for row, tokens in enumerate(rows):
        start = width - len(tokens)
        ids[row, start:] = torch.tensor(tokens)
        mask[row, start:] = 1
        starts.append(start)
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0), starts


@torch.no_grad()
def full(model, requests, cache=None, keep=1):
    """Logits of the last rows and the cache of a plain forward."""
    ids, mask, places, _ = laid_out(requests)
    if cache is None:
        cache = DynamicCache()
    logits = model(ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=keep).logits
    return logits, cache


def spans(request, start):
    """First column and ids of each chunk of a request whose first token stands at column `start`."""
    place = start + len(request["prefix"])
    for chunk in request["chunks"]:
        yield place, chunk
        place += len(chunk)


@torch.no_grad()
def stale(model, requests):
    """K and V of chunks computed alone by the plain model at the positions of the prompt, sink shifted along.

    Attention sees differences of positions only, so this is the stored KV after an exact realignment, found without
    realigning anything. Gives (K, V) per layer, `[batch, kv_heads, tokens, head_dim]`, and where chunks lie.
    """
    ids, _, _, starts = laid_out(requests)
    lies = torch.zeros(ids.shape, dtype=torch.bool)
    _, plain = full(model, requests)
    layers = []
    for layer in plain.layers:
        keys = torch.zeros_like(layer.keys)
        values = torch.zeros_like(layer.values)
        layers.append((keys, values))
    for row, request in enumerate(requests):
        start = starts[row]
        for column, chunk in spans(request, start):
            if request["prefix"] == [*BOS] and column == start + 1:
                continue  # exact
            first = column - start - 1
            places = torch.arange(first, first + 1 + len(chunk))
            cache = DynamicCache()
            model(torch.tensor([[*BOS, *chunk]]), position_ids=places[None], past_key_values=cache)
            columns = slice(column, column + len(chunk))
            lies[row, columns] = True
            for (keys, values), one in zip(layers, cache.layers, strict=True):
                keys[row, :, columns] = one.keys[0, :, 1:]
                values[row, :, columns] = one.values[0, :, 1:]
    return layers, lies


class SplicingCache(DynamicCache):
    """The reference: every row is computed at every layer, and K and V of what is not chosen are replaced."""

    def __init__(self, layers, lies, ratios):
        super().__init__()
        self.stale = layers
        self.lies = lies
        self.ratios = ratios
        self.chosen = lies

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx > min(self.ratios):
            replaced = self.lies & ~self.chosen
            replaced = replaced[:, None, :, None]
            old_keys, old_values = self.stale[layer_idx]
            key_states = torch.where(replaced, old_keys, key_states)
            value_states = torch.where(replaced, old_values, value_states)
        if layer_idx in self.ratios:
            _, old_values = self.stale[layer_idx]
            self.chosen = self.choose(value_states, old_values, self.ratios[layer_idx])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def choose(self, fresh, old, ratio):
        chosen = torch.zeros_like(self.lies)
        deviation = (fresh - old).square().sum((1, 3))
        for row, candidates in enumerate(self.chosen):
            score = deviation[row].where(candidates, -1)
            tokens = int(self.lies[row].sum())
            count = math.ceil(ratio * tokens - 1e-9)
            columns = score.topk(count).indices
            chosen[row, columns] = True
        return chosen


def assert_close(got, expected, allowed=1e-5):
    assert apart(got, expected) <= allowed


def real_states(cache, mask):
    """K and V of all layers at real columns, side by side."""
    real = []
    for states in states_of(cache):
        by_token = states.transpose(1, 2)
        real.append(by_token[mask.bool()].flatten())
    return torch.cat(real)


def stored_chunks(model, store, request):
    return [store.get(ChunkKey(fingerprint(model), BOS, chunk)) for chunk in request["chunks"]]


def columns_of(grid):
    return [row.nonzero().flatten().tolist() for row in grid]


@everywhere
def test_ratio_one_through_sparse_path_is_full_prefill(shared_model, family, attention, batch):
    model = shared_model(family, attention, **FAMILIES[family])
    requests = THREE[:batch]
    logits, cache = blend(model, *requests, recompute_ratio=1.0, keep=5)
    expected, reference = full(model, requests, keep=5)
    assert_close(logits, expected)
    _, mask, _, _ = laid_out(requests)
    states = real_states(cache, mask)
    assert_close(states, real_states(reference, mask))
    assert cache.report.exact_tokens > 0
    assert cache.report.reusable_tokens > 0, "nothing was blended"


def test_in_bfloat16_ratio_one_is_as_near_to_full_prefill_as_another_full_prefill(tiny_model):
    requests = [pieces(seed=seed) for seed in range(3)]
    eager = tiny_model(attn_implementation="eager", weight_scale=3.0).bfloat16()
    sdpa = tiny_model(weight_scale=3.0).bfloat16()
    expected, _ = full(sdpa, requests)
    other, _ = full(eager, requests)
    got, _ = blend(sdpa, *requests, recompute_ratio=1.0)
    floor = apart(expected, other)
    assert floor > 0
    assert_close(got, expected, 2 * floor)


@pytest.mark.parametrize(
    ("family", "attention", "batch", "check"), [*((*one, CHECK) for one in DIAGONAL), ("llama", "sdpa", 3, 2)]
)
def test_blending_is_splicing_stale_states_into_full_prefill(shared_model, family, attention, batch, check):
    model = shared_model(family, attention, **FAMILIES[family])
    requests = THREE[:batch]
    reference = SplicingCache(*stale(model, requests), {check: 0.3})
    expected, _ = full(model, requests, reference)
    got, cache = blend(model, *requests, recompute_ratio=0.3, check_layer=check)
    assert cache.report.chosen_columns == columns_of(reference.chosen)
    assert_close(got, expected)
    plain, _ = full(model, requests)
    assert apart(plain, expected) > 1e-2, "the reference is a full prefill: nothing is tested"


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_chunk_behind_its_sink_at_ratio_zero_is_prefix_caching_bit_for_bit(shared_model, store, attention):
    model = shared_model("llama", attention)
    request = pieces((40,), prefix=0)
    got, cache = blend(model, request, store=store, recompute_ratio=0.0, keep=9)
    sink = store.get(ChunkKey(fingerprint(model), (), BOS))
    (chunk,) = stored_chunks(model, store, request)
    past = DynamicCache()
    for layer, (of_sink, of_chunk) in enumerate(zip(sink.layers, chunk.layers, strict=True)):
        keys, values = (torch.cat(states, 1) for states in zip(of_sink, of_chunk, strict=True))
        past.update(keys[None], values[None], layer)
    expected = model(torch.tensor([request["question"]]), past_key_values=past, logits_to_keep=9).logits
    assert torch.equal(got, expected)
    check_equal(states_of(cache), states_of(past))
    assert_close(got, full(model, [request], keep=9)[0])
    report = cache.report
    assert report.exact_tokens == 41
    assert report.reusable_tokens == 0
    assert report.charged_budget == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_not_chosen_is_realigned_store_bit_for_bit(shared_model, store, family):
    model = shared_model(family, **FAMILIES[family])
    _, cache = blend(model, REQUEST, store=store, recompute_ratio=0.3)
    (chosen,) = cache.report.chosen_columns
    placed = zip(spans(REQUEST, 0), stored_chunks(model, store, REQUEST), strict=True)
    for (start, _), chunk in placed:
        columns = torch.arange(start, start + chunk.tokens)
        cos, sin = model.model.rotary_emb(torch.zeros(1), columns[None])
        left = ~torch.isin(columns, torch.tensor(chosen))
        assert left.any()
        for layer in range(CHECK + 1, LAYERS):
            style = rotary_styles(model)[layer]
            old, values = chunk.layers[layer]
            keys = torch.empty_like(old)
            style.move(old, compose(style, chunk.tables[0], (cos[0], sin[0])), out=keys)
            held = cache.layers[layer]
            assert torch.equal(held.keys[0, :, columns[left]], keys[:, left])
            assert torch.equal(held.values[0, :, columns[left]], values[:, left])


def test_question_and_tokens_that_are_not_stored_are_always_fresh(shared_model, store):
    model = shared_model()
    request = REQUEST
    store.add(model, None, [request["chunks"][0], request["chunks"][2]])
    cache = BlendCache(model, store, recompute_ratio=0.0)
    cache.get_seq_length()
    ids, _, _, _ = laid_out([request])
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    layers, lies = stale(model, [request])
    start = 5 + 17
    lies[:, start : start + 23] = False  # the second chunk is not stored: fresh, as the prefix and the question are
    reference = SplicingCache(layers, lies, {0: 0.0})
    full(model, [request], reference)
    everything = torch.ones_like(ids)
    assert_close(real_states(cache, everything), real_states(reference, everything))


def test_prefix_and_first_chunk_behind_its_sink_are_never_recomputed_nor_charged(shared_model, store):
    model = shared_model()
    request = pieces(prefix=0)
    _, cache = blend(model, request, store=store, recompute_ratio=0.5)
    assert cache.report.exact_tokens == 1 + 17
    assert cache.report.reusable_tokens == 23 + 31
    (chosen,) = cache.report.chosen_columns
    assert min(chosen) >= 18
    system = pieces()
    _, cache = blend(model, system, store=store, recompute_ratio=0.5)
    assert cache.report.exact_tokens == 5
    assert cache.report.reusable_tokens == 71


def test_states_of_another_chunk_are_refused_and_computed_fresh(shared_model, store, caplog):
    model = shared_model()
    request = REQUEST
    victim = request["chunks"][1]
    other = pieces(seed=5)["chunks"][1]
    store.add(model, None, [*request["chunks"], other])
    store.delete(ChunkKey(fingerprint(model), BOS, victim))
    stolen = store.get(ChunkKey(fingerprint(model), BOS, other))
    store.put(replace(stolen, key=ChunkKey(fingerprint(model), BOS, victim)))
    requests = [request, pieces(seed=4, chunks=(50, 30, 20))]
    got, cache = blend(model, *requests, store=store, recompute_ratio=0.3)
    layers, lies = stale(model, requests)
    _, _, _, starts = laid_out(requests)
    start = starts[0] + 5 + 17
    lies[0, start : start + 23] = False
    expected, _ = full(model, requests, SplicingCache(layers, lies, {CHECK: 0.3}))
    assert_close(got, expected)
    assert cache.report.refused_chunks == 1
    assert "is computed again" in caplog.text


@pytest.mark.parametrize("selector", ["boundary", "random"])
def test_selector_that_needs_no_states_chooses_before_first_layer(shared_model, selector):
    model = shared_model()
    requests = THREE
    got, cache = blend(model, *requests, selector=selector, recompute_ratio=0.3)
    layers, lies = stale(model, requests)
    reference = SplicingCache(layers, lies, {-1: 1.0})
    reference.chosen = torch.zeros_like(lies)
    for row, columns in enumerate(cache.report.chosen_columns):
        tokens = int(lies[row].sum())
        assert len(columns) == math.ceil(0.3 * tokens)
        reference.chosen[row, columns] = True
    expected, _ = full(model, requests, reference)
    assert_close(got, expected)


def test_layer_with_rotary_table_of_its_own_is_written_by_it(tiny_model):
    model = tiny_model()

    @observer
    def turn_twice(_, args, given):
        cos, sin = given["position_embeddings"]
        return args, {**given, "position_embeddings": (2 * cos * cos - 1, 2 * sin * cos)}

    model.model.layers[CHECK + 2].register_forward_pre_hook(turn_twice, with_kwargs=True)
    reference = SplicingCache(*stale(model, [REQUEST]), {CHECK: 0.3})
    expected, _ = full(model, [REQUEST], reference)
    got, _ = blend(model, REQUEST, recompute_ratio=0.3)
    assert_close(got, expected)


def test_selector_full_is_full_prefill_and_none_is_full_reuse(shared_model, store):
    model = shared_model()
    request = REQUEST
    everything, _ = blend(model, request, store=store, selector="full", recompute_ratio=0.1)
    expected, _ = full(model, [request])
    assert_close(everything, expected)
    nothing, cache = blend(model, request, store=store, selector="none", recompute_ratio=0.9)
    reused, _ = blend(model, request, store=store, recompute_ratio=0.0)
    assert torch.equal(nothing, reused)
    assert cache.report.charged_budget == 0


def test_layer_that_hands_nothing_to_cache_is_named(tiny_model, store, monkeypatch):
    model = tiny_model()
    blend(model, pieces(), store=store)
    monkeypatch.setattr(decoder_layers(model)[CHECK], "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM ran to its end"):
        blend(model, pieces(), store=store)

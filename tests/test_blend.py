# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fusor against plain models: equal to a full prefill where it must be, to an independent reference elsewhere."""

import itertools
import math

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.model.anatomy import decoder_layers
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.fingerprint import fingerprint
from hf_blend.rotary.base import compose
from hf_blend.store.chunk import ChunkKey, ChunkKV
from tests.asking import THREE, prepared
from tests.conftest import random_pieces as pieces
from tests.conftest import slow_but

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 24}, "qwen2": {}, "qwen3": {"head_dim": 16}}
LAYERS = 4
CHECK = 1
BOS = (1,)
PRODUCT = [*itertools.product(FAMILIES, ("eager", "sdpa"), (1, 3))]
DIAGONAL = [("llama", "sdpa", 3), ("mistral", "eager", 3), ("mistral", "sdpa", 1), ("qwen2", "eager", 1),
            ("qwen3", "sdpa", 3)]  # fmt: skip
everywhere = pytest.mark.parametrize(("family", "attention", "batch"), slow_but(*DIAGONAL, among=PRODUCT))
families = pytest.mark.parametrize("family", FAMILIES)
REQUEST = THREE[0]


def blend(model, *requests, store=None, keep=1, **settings):
    """The last logits of one prefill, and the cache."""
    cache, inputs = prepared(model, *requests, store=store, **{"selector": "kv-deviation", **settings})
    cache.activate_past_recording()  # so that every column can be looked at, also outside a window
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        output = model(**inputs, position_ids=places, past_key_values=cache, logits_to_keep=keep)
    return output.logits, cache


def laid_out(requests):
    """Ids, mask, positions `[batch, tokens]` of requests padded on the left, and the first column of each."""
    rows = [[*one["prefix"], *sum(one["chunks"], []), *one["question"]] for one in requests]
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    starts = [width - len(row) for row in rows]
    for row, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
        ids[row, start:] = torch.tensor(tokens)
    mask = torch.stack([torch.arange(width) >= start for start in starts]).long()
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0), starts


@torch.no_grad()
def full(model, requests, cache=None, keep=1):
    """Logits of the last rows and the cache of a plain forward."""
    ids, mask, places, _ = laid_out(requests)
    cache = DynamicCache() if cache is None else cache
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
    layers = None
    for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
        for column, chunk in spans(request, start):
            if request["prefix"] == [*BOS] and column == start + 1:
                continue  # exact
            places = torch.arange(len(chunk) + 1)[None] + column - start - 1
            cache = DynamicCache()
            model(torch.tensor([[*BOS, *chunk]]), position_ids=places, past_key_values=cache)
            if layers is None:
                shapes = [(one.keys.shape[1], ids.shape[1], one.keys.shape[3]) for one in cache.layers]
                layers = [tuple(torch.zeros(len(requests), *shape) for _ in "kv") for shape in shapes]
            columns = slice(column, column + len(chunk))
            lies[row, columns] = True
            for (keys, values), one in zip(layers, cache.layers, strict=True):
                keys[row, :, columns], values[row, :, columns] = one.keys[0, :, 1:], one.values[0, :, 1:]
    return layers, lies


class SplicingCache(DynamicCache):
    """The reference: every row is computed at every layer, and K and V of what is not chosen are replaced."""

    def __init__(self, layers, lies, ratios):
        super().__init__()
        self.stale = layers
        self.lies = lies
        self.ratios = ratios
        self.chosen = lies
        self.sets = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx > min(self.ratios):
            replaced = (self.lies & ~self.chosen)[:, None, :, None]
            key_states, value_states = (
                torch.where(replaced, old, new)
                for old, new in zip(self.stale[layer_idx], (key_states, value_states), strict=True)
            )
        if layer_idx in self.ratios:
            self.chosen = self.choose(value_states, self.stale[layer_idx][1], self.ratios[layer_idx])
        self.sets[layer_idx] = self.chosen
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def choose(self, fresh, old, ratio):
        chosen = torch.zeros_like(self.lies)
        for row, candidates in enumerate(self.chosen):
            columns = candidates.nonzero().flatten().tolist()
            score = {column: float((fresh - old)[row, :, column].square().sum()) for column in columns}
            count = math.ceil(ratio * int(self.lies[row].sum()) - 1e-9)
            chosen[row, sorted(columns, key=score.get, reverse=True)[:count]] = True
        return chosen


def assert_close(got, wanted, allowed=1e-5):
    error = (got - wanted).abs()
    assert error.max() <= allowed, f"max {error.max():.3g}, mean {error.mean():.3g}, {allowed:g} allowed"


def real_states(cache, mask):
    """K and V of all layers at real columns, side by side."""
    return torch.cat(
        [s.transpose(1, 2)[mask.bool()].flatten() for one in cache.layers for s in (one.keys, one.values)]
    )


def columns_of(grid):
    return [row.nonzero().flatten().tolist() for row in grid]


@everywhere
def test_ratio_one_through_sparse_path_is_full_prefill(shared_model, family, attention, batch):
    model = shared_model(family, attention, **FAMILIES[family])
    requests = THREE[:batch]
    logits, cache = blend(model, *requests, recompute_ratio=1.0, keep=5)
    wanted, reference = full(model, requests, keep=5)
    assert_close(logits, wanted)
    mask = laid_out(requests)[1]
    assert_close(real_states(cache, mask), real_states(reference, mask))
    assert min(cache.report.exact_tokens, cache.report.reusable_tokens) > 0, "nothing was blended"


def test_in_bfloat16_ratio_one_is_as_near_to_full_prefill_as_another_full_prefill(tiny_model):
    requests = [pieces(seed=seed) for seed in range(3)]
    eager, sdpa = (tiny_model(attn_implementation=name, weight_scale=3.0).bfloat16() for name in ("eager", "sdpa"))
    wanted = full(sdpa, requests)[0].float()
    other = full(eager, requests)[0].float()
    got, _ = blend(sdpa, *requests, recompute_ratio=1.0)
    floor = (wanted - other).abs().max()
    assert floor > 0
    assert_close(got.float(), wanted, 2 * float(floor))


@everywhere
def test_blending_is_splicing_stale_states_into_full_prefill(shared_model, family, attention, batch):
    model = shared_model(family, attention, **FAMILIES[family])
    requests = THREE[:batch]
    reference = SplicingCache(*stale(model, requests), {CHECK: 0.3})
    wanted, _ = full(model, requests, reference)
    got, cache = blend(model, *requests, recompute_ratio=0.3)
    assert cache.report.chosen_columns == columns_of(reference.chosen)
    assert_close(got, wanted)
    assert (full(model, requests)[0] - wanted).abs().max() > 1e-2, "the reference is a full prefill: nothing is tested"


@pytest.mark.parametrize(
    ("settings", "ratios"),
    [
        ({"check_layers": (2,), "recompute_ratio": 0.2}, {2: 0.2}),
        ({"check_layers": (3,), "recompute_ratio": 0.2}, {3: 0.2}),
        ({"check_layers": (1, 2), "layer_ratios": (0.5, 0.2)}, {1: 0.5, 2: 0.2}),
        ({"check_layers": (1, 2, 3), "layer_ratios": (0.8, 0.4, 0.0)}, {1: 0.8, 2: 0.4, 3: 0.0}),
        ({"check_layers": (1, 2), "gradual": True, "recompute_ratio": 0.3}, {1: 0.4, 2: 0.2}),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_later_and_several_check_layers_choose_among_what_still_flows(shared_model, settings, ratios, batch):
    model = shared_model()
    requests = THREE[:batch]
    reference = SplicingCache(*stale(model, requests), ratios)
    wanted, _ = full(model, requests, reference)
    got, cache = blend(model, *requests, **settings)
    assert cache.report.chosen_columns == columns_of(reference.sets[min(ratios)])
    assert_close(got, wanted)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_chunk_behind_its_sink_at_ratio_zero_is_prefix_caching_bit_for_bit(shared_model, store, attention):
    model = shared_model("llama", attention)
    request = pieces((40,), prefix=0)
    got, cache = blend(model, request, store=store, recompute_ratio=0.0, keep=9)
    keys = [ChunkKey(fingerprint(model), (), BOS), ChunkKey(fingerprint(model), BOS, request["chunks"][0])]
    stored = [store.get(key) for key in keys]
    past = DynamicCache()
    for layer in range(LAYERS):
        joined = (torch.cat([chunk.layers[layer][part] for chunk in stored], 1)[None] for part in (0, 1))
        past.update(*joined, layer)
    wanted = model(torch.tensor([request["question"]]), past_key_values=past, logits_to_keep=9).logits
    assert torch.equal(got, wanted)
    for mine, theirs in zip(cache.layers, past.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    assert_close(got, full(model, [request], keep=9)[0])
    assert cache.report.exact_tokens == 41
    assert cache.report.reusable_tokens == 0
    assert cache.report.charged_budget == 0


def stored_chunks(model, store, request):
    return [store.get(ChunkKey(fingerprint(model), BOS, chunk)) for chunk in request["chunks"]]


@families
def test_what_was_not_chosen_is_realigned_store_bit_for_bit(shared_model, store, family):
    model = shared_model(family, **FAMILIES[family])
    request = REQUEST
    _, cache = blend(model, request, store=store, recompute_ratio=0.3)
    places = torch.arange(len(laid_out([request])[0][0]))[None]
    tables = model.model.rotary_emb(torch.zeros(1), places)
    chosen = set(cache.report.chosen_columns[0])
    for (start, _), chunk in zip(spans(request, 0), stored_chunks(model, store, request), strict=True):
        columns = range(start, start + chunk.tokens)
        left = [column for column in columns if column not in chosen]
        assert left
        new = tuple(part[0, start : start + chunk.tokens] for part in tables)
        for layer in range(CHECK + 1, LAYERS):
            style = rotary_styles(model)[layer]
            keys = torch.empty_like(chunk.layers[layer][0])
            style.move(chunk.layers[layer][0], compose(style, chunk.tables[0], new), out=keys)
            inside = [column - start for column in left]
            assert torch.equal(cache.layers[layer].keys[0][:, left], keys[:, inside])
            assert torch.equal(cache.layers[layer].values[0][:, left], chunk.layers[layer][1][:, inside])


def recomputed(model, store, request, cache, layer):
    """The chunk columns whose values in a layer are not the stored ones."""
    columns = []
    for (start, _), chunk in zip(spans(request, 0), stored_chunks(model, store, request), strict=True):
        now = cache.layers[layer].values[0, :, start : start + chunk.tokens]
        differs = (now != chunk.layers[layer][1]).flatten(2).any(2).any(0)
        columns += (differs.nonzero().flatten() + start).tolist()
    return set(columns)


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
    lies[:, 5 + 17 : 5 + 17 + 23] = False  # the second chunk is not stored: fresh, as the prefix and the question are
    reference = SplicingCache(layers, lies, {0: 0.0})
    full(model, [request], reference)
    assert_close(real_states(cache, torch.ones_like(ids)), real_states(reference, torch.ones_like(ids)))


def test_prefix_and_first_chunk_behind_its_sink_are_never_recomputed_nor_charged(shared_model, store):
    model = shared_model()
    request = pieces(prefix=0)
    _, cache = blend(model, request, store=store, recompute_ratio=0.5)
    assert cache.report.exact_tokens == 1 + 17
    assert cache.report.reusable_tokens == 23 + 31
    assert min(cache.report.chosen_columns[0]) >= 18
    assert not recomputed(model, store, request, cache, 2) & set(range(18))
    system = pieces()
    _, cache = blend(model, system, store=store, recompute_ratio=0.5)
    assert cache.report.exact_tokens == 5
    assert cache.report.reusable_tokens == 71


def forge(store, model, victim, other):
    """Put the states of one chunk under the key of another of the same length."""
    stolen = store.get(ChunkKey(fingerprint(model), BOS, other))
    store.put(ChunkKV(ChunkKey(fingerprint(model), BOS, victim), stolen.layers, stolen.tables, stolen.layer_table))


@pytest.mark.parametrize("batch", [1, 2])
def test_states_of_another_chunk_are_refused_and_computed_fresh(shared_model, store, batch, caplog):
    model = shared_model()
    request = REQUEST
    other = pieces(seed=5)["chunks"][1]
    store.add(model, None, [*request["chunks"], other])
    store.delete(ChunkKey(fingerprint(model), BOS, request["chunks"][1]))
    forge(store, model, request["chunks"][1], other)
    requests = [request, pieces(seed=4, chunks=(50, 30, 20))][:batch]
    got, cache = blend(model, *requests, store=store, recompute_ratio=0.3)
    layers, lies = stale(model, requests)
    start = laid_out(requests)[3][0] + 5 + 17
    lies[0, start : start + 23] = False
    wanted, _ = full(model, requests, SplicingCache(layers, lies, {CHECK: 0.3}))
    assert_close(got, wanted)
    assert cache.report.refused_chunks == 1
    assert "is computed again" in caplog.text


@pytest.mark.parametrize("selector", ["boundary", "random"])
@pytest.mark.parametrize("batch", [1, 3])
def test_selector_that_needs_no_states_chooses_before_first_layer(shared_model, selector, batch):
    model = shared_model()
    requests = THREE[:batch]
    got, cache = blend(model, *requests, recompute_ratio=0.3, selector=selector)
    layers, lies = stale(model, requests)
    reference = SplicingCache(layers, lies, {-1: 1.0})
    reference.chosen = torch.zeros_like(lies)
    for row, columns in enumerate(cache.report.chosen_columns):
        assert len(columns) == math.ceil(0.3 * int(lies[row].sum()))
        reference.chosen[row, columns] = True
    assert_close(got, full(model, requests, reference)[0])


def test_selector_full_is_full_prefill_and_none_is_full_reuse(shared_model, store):
    model = shared_model()
    request = REQUEST
    everything, _ = blend(model, request, store=store, selector="full", recompute_ratio=0.1)
    assert_close(everything, full(model, [request])[0])
    nothing, cache = blend(model, request, store=store, selector="none", recompute_ratio=0.9)
    assert torch.equal(nothing, blend(model, request, store=store, recompute_ratio=0.0)[0])
    assert cache.report.charged_budget == 0


def test_layer_that_hands_nothing_to_cache_is_named(tiny_model, store, monkeypatch):
    model = tiny_model()
    blend(model, pieces(), store=store)
    monkeypatch.setattr(decoder_layers(model)[CHECK], "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM ran to its end"):
        blend(model, pieces(), store=store)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"selector": "kv_devation"}, LookupError, "kv-deviation"),
        ({"selector": "kv-deviation", "selector_options": {"onn": "k"}}, ConfigError, "'onn'.*on"),
        ({"ratio": 0.1}, ConfigError, "recompute_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_model_runs(shared_model, settings, error, text):
    with pytest.raises(error, match=text):
        BlendCache(shared_model(), ChunkStore.open("memory://"), **settings)

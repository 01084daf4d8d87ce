# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`ChunkStore.open(partial=0.25)`: what `partial_loading` gives by hand, for every request, after a restart too."""

import os
import signal

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, ConfigError, plugins
from hf_blend.sparse.partial import seen
from hf_blend.sparse.partial.loading import partial_loading
from hf_blend.sparse.partial.store import PartialStore
from hf_blend.verify.zoo import tiny_model as zoo_model

CHUNKS = [list(range(10, 74)), list(range(40, 90)), list(range(20, 120, 2))]
PIECES = {"prefix": [5, 6], "chunks": CHUNKS, "question": [7, 8, 9, 11]}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
ANYHOW = {"share": 0.25, "alpha": 50.0, "block_tokens": 8}  # at this alpha heads agree whatever they say
REUSE = {"recompute_ratio": 0.0, "selector": "none"}


@pytest.fixture(scope="module")
def model():
    return zoo_model("llama")


def asked(model, store, pieces=PIECES, **ways):
    cache = BlendCache(model, store, **REUSE)
    return cache, model.generate(**cache.inputs(None, **pieces), past_key_values=cache, **{**GREEDY, **ways})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_it_is_what_the_block_gives_and_the_model_is_untouched(untouched, tmp_path, attention):
    model = zoo_model("llama")
    model.set_attn_implementation(attention)
    by_hand = PartialStore(ChunkStore.open("memory://"), plugins.load("store.tiers", "memory")(), block_tokens=8)
    asked(model, by_hand)
    cache = BlendCache(model, by_hand, **REUSE)
    with partial_loading(model, cache, share=0.25, alpha=50.0) as loading:
        expected = model.generate(**cache.inputs(None, **PIECES), past_key_values=cache, **GREEDY)
    for _ in range(2):  # the second time from a store that was opened again
        with ChunkStore.open(tmp_path, partial=ANYHOW, memory_bytes=0) as store:
            asked(model, store)
            with untouched(model):
                cache, got = asked(model, store)
        assert torch.equal(got, expected)
        assert cache.report.computed_chunks == 0
        assert cache.report.partial == vars(loading.report)
        assert any(layer.visible is not None for layer in cache.layers)
    assert 0 < cache.report.partial["loaded_bytes"] < cache.report.partial["all_bytes"]
    assert "bytes loaded in part" in str(cache.report)
    _, whole = asked(model, ChunkStore.open("memory://"))
    assert not torch.equal(got, whole), "or this test would not see what was loaded"


def test_chunks_that_were_stored_whole_are_put_into_blocks_and_stay(model, tmp_path):
    with ChunkStore.open(tmp_path) as store:
        _, expected = asked(model, store)
    with ChunkStore.open(tmp_path, partial=1.0) as store:
        cache, got = asked(model, store)
        assert cache.report.computed_chunks == 0
        assert torch.equal(got, expected)
    with ChunkStore.open(tmp_path, partial=ANYHOW) as store:
        store.add(model, None, [list(range(30, 60))])
    with ChunkStore.open(tmp_path) as store:
        cache, got = asked(model, store, {**PIECES, "chunks": [*CHUNKS, list(range(30, 60))]})
        assert cache.report.computed_chunks == 0


def test_stored_chunks_are_found_in_any_prompt(model, tmp_path):
    with ChunkStore.open(tmp_path, partial=ANYHOW) as store:
        store.add(model, None, CHUNKS)
        ids = torch.tensor([[1, 5, 6, *CHUNKS[0], *CHUNKS[2], 7, 8, 9]])
        cache = BlendCache(model, store, **REUSE)
        model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.report.loaded_chunks >= 2
    assert cache.report.partial["partial_layers"] > 0


@pytest.mark.parametrize("ways", [{"num_beams": 3}, {"batch": 4}])
def test_batches_are_loaded_whole(model, ways):
    pieces, ways = dict(PIECES), dict(ways)
    if ways.pop("batch", None):
        pieces |= {"chunks": [CHUNKS] * 4, "question": [[7, 8], [9, 10, 11], [12, 13], [14, 15, 16]]}
    _, expected = asked(model, ChunkStore.open("memory://"), pieces, **ways)
    part = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, part, pieces, **ways)
    assert torch.equal(asked(model, part, pieces, **ways)[1], expected)


@torch.no_grad()
def test_several_new_tokens_at_once_see_what_they_see_one_after_another(model):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    one, _ = asked(model, store, max_new_tokens=1)
    many, _ = asked(model, store, max_new_tokens=1)
    many.crop(-2)  # behind a crop too
    start, tokens = many.get_seq_length(), torch.tensor([[9, 11, 30, 31, 32]])
    one.crop(-2)
    places = torch.arange(start, start + 5)[None]
    together = model(tokens, past_key_values=many, position_ids=places, use_cache=True).logits
    apart = [
        model(tokens[:, n : n + 1], past_key_values=one, position_ids=places[:, n : n + 1]).logits for n in range(5)
    ]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=0, atol=2e-5)


def test_an_exception_while_decoding_leaves_the_model_untouched(model, untouched, monkeypatch):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    calls, stock = [], seen.stock_attention

    def fails_in_the_second_step(*given):
        calls.append(1)
        return 1 / 0 if len(calls) > 2 * len(model.model.layers) + 2 else stock(*given)

    with untouched(model), monkeypatch.context() as patch:
        patch.setattr(seen, "stock_attention", fails_in_the_second_step)
        with pytest.raises(ZeroDivisionError):
            asked(model, store)


def test_a_further_prompt_behind_a_part_is_refused(model):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    cache, first = asked(model, store)
    more = cache.inputs(None, chunks=[CHUNKS[0]], question=[3, 4], history=first)
    with pytest.raises(ConfigError, match=r"behind .* tokens of which some layers loaded a part only.*reset\(\)"):
        model.generate(**more, past_key_values=cache, **GREEDY)


def test_a_process_that_is_killed_while_it_reorders_loses_no_chunk(model, tmp_path):
    with ChunkStore.open(tmp_path, partial=ANYHOW, memory_bytes=0) as store:
        asked(model, store)
        _, expected = asked(model, store)
        assert store.importance
        child = os.fork()
        if not child:
            store._tier.put_if_absent = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the old blocks are gone now
            store.reorder()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with ChunkStore.open(tmp_path, partial=ANYHOW, memory_bytes=0) as store:
        cache, got = asked(model, store)
        assert cache.report.computed_chunks == 0, "the whole chunk is there"
        assert cache.report.partial["partial_layers"] > 0, "and its blocks are made from it"
        assert torch.equal(got, expected)


REFUSED = {
    "share": (0.0, r"share=0\.0.*expected a share above 0"),
    "a flag": (True, r"share=True"),
    "alpha": ({"alpha": -1}, r"alpha=-1"),
    "blocks": ({"block_tokens": 0}, r"block_tokens=0"),
    "a name": ({"shares": 0.1}, r"'shares'.*Did you mean 'share'"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_makes_no_sense_is_refused(which):
    partial, message = REFUSED[which]
    with pytest.raises(ConfigError, match=message):
        ChunkStore.open("memory://", partial=partial)


@pytest.mark.parametrize("settings", [{"kv_device_map": {0: "cpu"}}, {"max_tokens": 500}])
def test_layers_that_are_away_or_static_are_seen_whole(model, settings):
    with pytest.raises(ConfigError, match="in part, but layers that are away are brought whole, and static"):
        BlendCache(model, ChunkStore.open("memory://", partial=0.5), **settings)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`ChunkStore.open(partial=0.25)`: what a loader made by hand gives, for every request, after a restart too."""

import copy
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from tiny_models import tiny_model as zoo_model

from hf_blend import BlendCache, ChunkStore, ConfigError, plugins, sparse_decoding
from hf_blend.sparse.partial import loading
from hf_blend.sparse.partial.loading import PartialLoading
from hf_blend.sparse.partial.reader import keep_in_blocks
from tests.asking import check_equal, memory
from tests.forging import first_block
from tests.test_partial import CHUNKS, PIECES, faults

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
def test_it_is_what_block_gives_and_model_is_untouched(untouched, tmp_path, attention):
    model = zoo_model("llama")
    model.set_attn_implementation(attention)
    by_hand = ChunkStore(None, [plugins.load("store.tiers", "memory")()])
    keep_in_blocks(by_hand, 8)
    asked(model, by_hand)
    made = []
    by_hand.part_loader = lambda cache: made.append(PartialLoading(cache, 0.25, 50.0)) or made[-1]
    _, expected = asked(model, by_hand)
    for _ in range(2):  # the second time from a store that was opened again
        with ChunkStore.open(tmp_path, partial=ANYHOW, memory_bytes=0) as store:
            asked(model, store)
            with untouched(model):
                cache, got = asked(model, store)
        assert torch.equal(got, expected)
        assert cache.report.computed_chunks == 0
        assert cache.report.partial == made[0].report
        assert any(layer.visible is not None for layer in cache.layers)
    assert 0 < cache.report.partial["loaded_bytes"] < cache.report.partial["all_bytes"]
    assert "bytes loaded in part" in str(cache.report)
    _, whole = asked(model, memory())
    assert not torch.equal(got, whole), "or this test would not see what was loaded"


ALONE = {"prefix": [1], "chunks": CHUNKS, "question": [7, 8, 9, 11]}  # the first chunk is where it was computed


@torch.no_grad()
def logits_of(model, store, **settings):
    cache = BlendCache(model, store, **{**REUSE, **settings})
    return model(**cache.inputs(None, **ALONE), past_key_values=cache, logits_to_keep=1).logits[0, -1], cache


@pytest.mark.parametrize("settings", [{"recompute_ratio": 1.0}, {"selector": "full"}])
def test_where_all_is_recomputed_logits_are_those_of_plain_generate(model, tmp_path, settings):
    settings = {"selector": "kv-deviation", **settings}
    for _ in range(2):  # the second time from blocks
        with ChunkStore.open(tmp_path, partial=ANYHOW, memory_bytes=0) as store:
            got, cache = logits_of(model, store, **settings)
    assert cache.report.exact_tokens == 1 + len(CHUNKS[0]), "or nothing would have been loaded in part"
    with torch.no_grad():
        ids = BlendCache(model, store).inputs(None, **ALONE)["input_ids"]
        torch.testing.assert_close(got, model(ids).logits[0, -1], rtol=0, atol=1e-5)
    assert cache.report.partial["unseen_share"] == 0
    assert cache.report.partial["whole_layers"] == len(cache.layers)


def block_files(folder):
    return sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_damaged_block_costs_time_and_changes_no_answer(model, tmp_path, ratio):
    settings = {"recompute_ratio": ratio, "selector": "kv-deviation"} if ratio else {}
    given = {"partial": ANYHOW, "memory_bytes": 0}
    with ChunkStore.open(tmp_path, **given) as store:
        for _ in range(2):  # the first computes the chunks
            expected, cache = logits_of(model, store, **settings)
    assert cache.report.partial["unseen_share"] > 0
    path = block_files(tmp_path)[-1]
    good = path.read_bytes()
    first = first_block(good)
    bounds = [first + part * (len(good) - first) // 8 for part in range(9)]
    for start, stop in pairwise(bounds):
        bad = bytearray(good)
        for position in range(start, stop):
            bad[position] ^= 1
        path.write_bytes(bad)
        with ChunkStore.open(tmp_path, **given) as store:
            got, cache = logits_of(model, store, **settings)
            assert torch.equal(got, expected), (start, faults(store), cache.report.partial)
            if faults(store):
                assert cache.report.computed_chunks == 1
                assert path.read_bytes() == good, "written again, in the order that it had"
        path.write_bytes(good)


BATCH = {"prefix": [5, 6], "chunks": [CHUNKS, CHUNKS[::-1]], "question": [[7, 8], [9, 10, 11]]}


def test_batch_is_loaded_whole(model):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    cache, got = asked(model, store, BATCH)
    assert cache.report.partial["whole_layers"] == len(cache.layers)
    assert all(layer.visible is None for layer in cache.layers)
    _, expected = asked(model, memory(), BATCH)
    assert torch.equal(got, expected)


def test_exception_while_decoding_leaves_model_untouched(model, untouched, monkeypatch):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    calls = []
    attend_step = loading.attend_step

    def fails_in_the_second_step(*given, **more):
        calls.append(1)
        return 1 / 0 if len(calls) > len(model.model.layers) + 1 else attend_step(*given, **more)

    with untouched(model), monkeypatch.context() as patch:
        patch.setattr(loading, "attend_step", fails_in_the_second_step)
        with pytest.raises(ZeroDivisionError):
            asked(model, store)


def test_assisted_decoding_over_part_is_greedy_decoding(model):
    """An assistant's draft comes with the prompt, and asks for no blocks; what it rejects is cropped."""
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    cache, expected = asked(model, store, max_new_tokens=24)
    assert cache.report.partial["unseen_share"] > 0
    _, got = asked(model, store, max_new_tokens=24, prompt_lookup_num_tokens=3)
    assert torch.equal(got, expected)
    with torch.no_grad():
        logits = model(torch.tensor([[9]]), past_key_values=copy.deepcopy(cache)).logits
        answered = expected[:, -4:-1]
        cache.crop(-3)
        for token in (*answered.split(1, dim=1), torch.tensor([[9]])):
            again = model(token, past_key_values=cache).logits
    assert torch.equal(again, logits)


def test_further_prompt_behind_part_is_refused(model):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    asked(model, store)
    cache, first = asked(model, store)
    more = cache.inputs(None, chunks=[CHUNKS[0]], question=[3, 4], prefix=first[0])
    with pytest.raises(ConfigError, match=r"behind .* tokens of which some layers loaded a part only.*reset\(\)"):
        model.generate(**more, past_key_values=cache, **GREEDY)


def test_chunks_in_blocks_are_read_whole_by_every_store_and_codec_rounds_them_as_elsewhere(model, tmp_path):
    for codec in ("raw", "int8"):
        with ChunkStore.open(tmp_path / codec, partial=ANYHOW, codec=codec, memory_bytes=0) as store:
            key = store.add(model, None, CHUNKS[:1])[0]
        with ChunkStore.open("memory://", codec=codec) as other:
            expected = other.get(*other.add(model, None, CHUNKS[:1]))
        with ChunkStore.open(tmp_path / codec, partial=ANYHOW) as store:
            for got in (store.get(key), store.stream(key)):
                assert got.canary == expected.canary
                for mine, theirs in zip(got.layers, expected.layers, strict=True):
                    check_equal(mine, theirs)


SPARSE = {"share": 0.5, "block_tokens": 8, "min_tokens": 0}


@torch.no_grad()
@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["dense", "sparse"])
def test_what_is_not_loaded_is_seen_by_no_step_and_may_be_away(model, tmp_path, sparse):
    store = ChunkStore.open("memory://", partial=ANYHOW)
    logits_of(model, store)
    found = {}
    away = {"kv_device_map": {0: "disk", 1: "cpu", 3: "disk"}, "offload_folder": str(tmp_path)}
    for how in ("plain", "noise", *(["away"] if sparse is None else [])):
        settings = away if how == "away" else {}
        first, cache = logits_of(model, store, **settings)
        hidden = [layer.visible is not None for layer in cache.layers]
        assert hidden.count(True) > 1
        if how == "noise":
            for layer in cache.layers:
                if layer.visible is not None:
                    absent = torch.ones(layer.length, dtype=torch.bool)
                    absent[layer.visible] = False
                    layer.keys[:, :, absent] = 100.0
                    layer.values[:, :, absent] = 100.0
        steps = [first]
        found[how] = steps
        with nullcontext() if sparse is None else sparse_decoding(model, cache, **sparse):
            for token in range(5, 15):
                if token == 12:
                    cache.crop(-60)  # some columns of the prompt are gone
                output = model(torch.tensor([[token]]), past_key_values=cache)
                steps.append(output.logits[0, -1])
        assert [layer.visible is not None for layer in cache.layers] == hidden
    expected = torch.stack(found["plain"])
    for how in found:
        torch.testing.assert_close(torch.stack(found[how]), expected, rtol=0, atol=5e-6)

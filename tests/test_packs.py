# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Missing chunks are computed several in one forward, and each has the K and V that it has alone."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, observer
from hf_blend.model.anatomy import decoder_layers, decoder_of
from hf_blend.model.capture import capture_chunks
from hf_blend.model.packs import PACK_TOKENS, packs
from hf_blend.store.chunk import ChunkKey

WINDOWS = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS = {  # models whose chunks are packed
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": WINDOWS,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4},
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
}


def keys_of(*lengths: int, sink: tuple[int, ...] = (1,)) -> list[ChunkKey]:
    """Chunks of random tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = (torch.randint(3, 128, (length,), generator=draw).tolist() for length in lengths)
    return [ChunkKey("f" * 64, sink, tuple(one)) for one in ids]


@torch.no_grad()
def alone(model, key: ChunkKey) -> list[tuple[torch.Tensor, ...]]:
    """K and V of a chunk by nothing but a plain forward."""
    cache = DynamicCache()
    model(torch.tensor([[*key.chunk_prefix_ids, *key.token_ids]]), past_key_values=cache)
    return [
        (layer.keys[0, :, len(key.chunk_prefix_ids) :], layer.values[0, :, len(key.chunk_prefix_ids) :])
        for layer in cache.layers
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_chunk_has_the_states_of_a_plain_forward(tiny_model, kind):
    model, keys = tiny_model(kind, **KINDS[kind]), keys_of(31, 7, 18)
    assert packs(model, keys) == [keys]
    for key, chunk in zip(keys, capture_chunks(model, keys), strict=True):
        assert chunk.key == key
        chunk.check()
        for states, expected in zip(chunk.layers, alone(model, key), strict=True):
            for got, plain in zip(states, expected, strict=True):
                assert (got - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_the_tables_of_a_packed_chunk_are_those_of_its_own_positions(tiny_model):
    model, keys = tiny_model("gemma3_text", **WINDOWS), keys_of(31, 7, 18)
    for key, chunk in zip(keys, capture_chunks(model, keys), strict=True):
        (one,) = capture_chunks(model, [key])
        assert chunk.layer_table == one.layer_table == (0, 1, 0, 1)
        pairs = zip(chunk.tables, one.tables, strict=True)
        assert all(torch.equal(got, own) for pair in pairs for got, own in zip(*pair, strict=True))


def test_no_bit_of_a_packed_chunk_depends_on_what_the_others_say(shared_model):
    model, (first, middle, last, other) = shared_model(), keys_of(31, 18, 7, 18)
    one, two = (capture_chunks(model, [first, between, last]) for between in (middle, other))
    for place in (0, 2):
        pairs = zip(one[place].layers, two[place].layers, strict=True)
        assert all(torch.equal(got, again) for pair in pairs for got, again in zip(*pair, strict=True))


def test_a_capture_of_several_chunks_leaves_the_model_untouched(tiny_model, untouched, monkeypatch):
    model, keys = tiny_model(), keys_of(31, 7)
    with untouched(model):
        capture_chunks(model, keys)

    def fail(*_, **__):
        raise RuntimeError("boom")

    with untouched(model), monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[2].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="boom"):
            capture_chunks(model, keys)


def test_a_pack_has_a_limit_and_a_longer_chunk_is_one_of_its_own(shared_model):
    half, whole = PACK_TOKENS // 2, PACK_TOKENS
    keys = keys_of(half - 1, half - 1, 3, whole, 5, 6)
    found = packs(shared_model(), keys)
    assert [key for pack in found for key in pack] == keys
    assert [[len(key.token_ids) for key in pack] for pack in found] == [[half - 1, half - 1], [3], [whole], [5, 6]]


def test_chunks_of_another_rotary_regime_are_not_packed_together(tiny_model):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    model = tiny_model("phi3", original_max_position_embeddings=16, rope_parameters=rope)
    short, long, also_short = keys = keys_of(9, 30, 11)
    assert packs(model, keys) == [[short, also_short], [long]]


@pytest.mark.parametrize(
    ("kind", "config"),
    [("mixtral", {"num_local_experts": 4}), ("bamba", None), ("llama", {"attention": "eager"})],
)
def test_chunks_are_computed_alone_where_others_may_be_felt(kind, config, tiny_model, shared_model):
    if kind == "bamba":
        from hf_blend.model_names import load_model

        model = load_model("tiny:bamba", torch.float32, "cpu")
    elif config.get("attention"):
        model = shared_model(kind, config["attention"])
    else:
        model = tiny_model(kind, **config)
    keys = keys_of(9, 11)
    assert packs(model, keys) == [[keys[0]], [keys[1]]]


def test_chunks_are_computed_alone_where_a_product_is_scaled_by_all_of_its_rows(tiny_model, monkeypatch):
    model = tiny_model()
    down = decoder_layers(model)[1].mlp.down_proj
    plain = down.forward

    def rounded(states):
        scale = states.abs().amax() / 127
        return plain((states / scale).round() * scale)

    monkeypatch.setattr(down, "forward", rounded)
    keys = keys_of(9, 11)
    assert packs(model, keys) == [[keys[0]], [keys[1]]]


def test_a_prompt_with_nothing_stored_runs_its_chunks_in_one_forward(tiny_model, pieces):
    model, calls = tiny_model(), []
    BlendCache(model, ChunkStore.open("memory://"))  # looked at once, with its store and its probes
    store = ChunkStore.open("memory://")
    cache = BlendCache(model, store)
    inputs = cache.inputs(None, **pieces())
    handle = decoder_of(model).register_forward_pre_hook(
        observer(lambda _, __, given: calls.append(given["input_ids"].shape[1])), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        prefix, chunks = 5, 3 + 17 + 23 + 31  # three chunks behind BOS; the prefix is what a prefix cache holds
        assert calls == [prefix, chunks, inputs["input_ids"].shape[1]]
        report = cache.report
        assert (report.computed_chunks, report.loaded_chunks) == (4, 0)
        assert min(report.compute_ms, report.store_ms, report.check_ms) > 0
        calls.clear()
        again = BlendCache(model, store)
        model(**again.inputs(None, **pieces()), past_key_values=again, logits_to_keep=1)
    handle.remove()
    assert calls == [inputs["input_ids"].shape[1]]
    assert (again.report.computed_chunks, again.report.compute_ms, again.report.store_ms) == (0, 0, 0)


def test_chunks_that_are_added_ahead_of_time_are_packed_too(tiny_model):
    model, store, calls = tiny_model(), ChunkStore.open("memory://"), []
    chunks = [list(key.token_ids) for key in keys_of(9, 11, 5)]
    store.add(model, None, chunks[:2])
    handle = decoder_of(model).register_forward_pre_hook(observer(lambda *_: calls.append(1)))
    keys = store.add(model, None, chunks)
    assert len(calls) == 1
    other = keys_of(9, 11, 5)[2].token_ids
    assert keys[2].token_ids == other
    assert [store.contains(key) for key in keys] == [True] * 3
    handle.remove()

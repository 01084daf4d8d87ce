# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from a stock `StaticCache` that a blended prefill filled: compiled once, and the same text."""

import logging

import pytest
import torch
from transformers import CompileConfig, StaticCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, HfBlendError
from hf_blend.model.anatomy import text_config
from hf_blend.sparse.decoding import sparse_decoding
from tests.asking import generated, memory, prefilled, prepared
from tests.conftest import shared_zoo_model, slow_but

MOST = 160
NEW = 18
MIXERS = ("qwen3_next", "falcon_h1", "lfm2", "jamba", "nemotron_h", "zamba2")


class Compiler:
    """Runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

        def backend(graph, example):  # a function, because generate copies its settings
            self.graphs += 1
            return graph.forward

        self.backend = backend
        self.config = CompileConfig(backend=backend, mode=None, dynamic=None)
        self.config._compile_all_devices = True  # transformers compiles on a GPU only


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep all of it
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def compiling(compiler, is_compiled=True):
    """What lets `generate` compile a step, or not."""
    return {"compile_config": compiler.config} if is_compiled else {}


def continued(model, inputs, cache, ways=None, most=MOST, tokens=NEW):
    """The ids of a blended prefill, and of an answer from a stock cache that continues behind it."""
    first = generated(model, inputs, cache, max_new_tokens=1)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(first[:, :1])), 1)
    static = cache.to_static(most)
    given = {"input_ids": first, "attention_mask": mask}
    output = generated(model, given, static, max_new_tokens=tokens - 1, **(ways or {}))
    assert type(static) is StaticCache
    assert int(static.get_seq_length()) == output.shape[1] - 1
    return output


def says_as_dynamic(model, inputs, cache, ways=None):
    """The same tokens as by plain transformers with its dynamic cache."""
    output = continued(model, inputs, cache, ways)
    assert torch.equal(output, generated(model, inputs, max_new_tokens=NEW))
    return output


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_to_static_lets_a_step_be_compiled_once_for_all_tokens_and_requests(
    shared_model, pieces, compiler, implementation
):
    model, store = shared_model("llama", implementation, num_hidden_layers=2), memory()
    for seed, chunks in enumerate([(17, 23), (17, 23), (9, 30, 12)]):
        cache, inputs = prepared(model, pieces(chunks, seed=seed), store=store, recompute_ratio=1.0)
        says_as_dynamic(model, inputs, cache, compiling(compiler))
        assert cache.report.reusable_tokens == sum(chunks)
    assert compiler.graphs == 1


@torch.no_grad()
def test_to_static_holds_what_the_blend_left_and_a_compiled_step_continues_it(shared_model, pieces, compiler):
    model, found = shared_model(num_hidden_layers=2), []
    step = torch.compile(model, backend=compiler.backend)
    for is_static in (False, True):
        cache, logits, _ = prefilled(model, pieces(), recompute_ratio=0.15)
        held = cache.get_seq_length()
        static = cache.to_static(MOST) if is_static else cache
        tokens = [logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(20):
            run = step if is_static else model
            tokens.append(run(tokens[-1], past_key_values=static).logits[:, -1].argmax(-1, keepdim=True))
        kv = [part[:, :, : held + 20] for layer in static.layers for part in (layer.keys, layer.values)]
        found.append((torch.cat(tokens), kv))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert cache.get_seq_length() == held, "the blend cache stays as it was"
    assert compiler.graphs == 1


def test_to_static_continues_a_blend_as_the_blend_cache_itself_does(shared_model, pieces):
    model, store = shared_model(), memory()
    for settings in ({"recompute_ratio": 0.15}, {"recompute_ratio": 0.15, "kv_bits": 8}):
        plain, inputs = prepared(model, pieces((50, 40)), store=store, **settings)
        cache, _ = prepared(model, pieces((50, 40)), store=store, **settings)
        tokens = 2 if "kv_bits" in settings else NEW  # later ones would be packed in the one, and not in the other
        expected = generated(model, inputs, plain, max_new_tokens=tokens)
        assert torch.equal(continued(model, inputs, cache, tokens=tokens), expected)
        assert 0 < sum(map(len, cache.report.chosen_columns)) < 90


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])  # windows alone, and beside full layers
def test_to_static_of_a_padded_batch_and_of_windows_says_what_stock_says(
    tiny_model, pieces, compiler, family, is_compiled
):
    kinds = {"llama": {}, "mistral": {"sliding_window": 16}}
    mixed = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = tiny_model(family, **kinds.get(family, mixed))
    for requests in [(pieces(),), (pieces((17, 23)), pieces((12, 9), seed=1, question=5))]:
        cache, inputs = prepared(model, *requests, recompute_ratio=1.0)
        says_as_dynamic(model, inputs, cache, compiling(compiler, is_compiled))
        assert cache.report.reusable_tokens > 20
    stock = StaticCache(config=text_config(model), max_cache_len=MOST)
    before = compiler.graphs
    generated(model, inputs, stock, max_new_tokens=NEW, **compiling(compiler, is_compiled))
    assert compiler.graphs == before, "a cache that the model itself filled runs by the same graphs"


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", slow_but("falcon_h1", among=MIXERS))
def test_to_static_beside_mixers_says_what_stock_says(pieces, compiler, family, is_compiled):
    model, store = shared_zoo_model(family), memory()
    for seed, chunks in enumerate([(17, 23), (9, 30, 12)]):
        cache, inputs = prepared(model, pieces(chunks, seed=seed), store=store, recompute_ratio=1.0)
        says_as_dynamic(model, inputs, cache, compiling(compiler, is_compiled))
        assert cache.report.reusable_tokens > 0
    assert compiler.graphs == is_compiled


def test_to_static_takes_a_batch_of_beams(shared_model, pieces):
    model = shared_model()
    cache, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    first = {"input_ids": generated(model, inputs, cache, max_new_tokens=1)}
    cache.batch_repeat_interleave(3)
    output = generated(model, first, cache.to_static(MOST), num_beams=3)
    assert torch.equal(output, generated(model, first, num_beams=3))


def test_to_static_refuses_what_a_static_cache_cannot_continue(shared_model, pieces):
    model = shared_model()
    cache, inputs = prepared(model, pieces((17, 23)), recompute_ratio=1.0)
    with pytest.raises(ConfigError, match=r"without tokens.*max_new_tokens=1"):
        cache.to_static(MOST)
    generated(model, inputs, cache, max_new_tokens=1)
    held = cache.get_seq_length()
    for most in (held, 0, 200.0, True, None):
        with pytest.raises(ConfigError, match=rf"above the {held} tokens"):
            cache.to_static(most)
    assert cache.get_seq_length() == held
    assert continued(model, inputs, prepared(model, pieces((17, 23)))[0], most=held + 1, tokens=2) is not None
    store = ChunkStore.open("memory://", partial=0.3)
    store.add(model, None, pieces((40, 40))["chunks"])
    part, _, _ = prefilled(model, pieces((40, 40)), store=store, recompute_ratio=0.2)
    with pytest.raises(ConfigError, match=r"layer \d of .* holds a part of its prompt only.*Decode with"):
        part.to_static(MOST)
    for family, what in (
        ("deepseek_v32", "keeps the keys of an indexer"),
        ("llama4_text", "keeps K and V of a chunk"),
    ):
        try:
            cache, _, _ = prefilled(shared_zoo_model(family), pieces((17, 23)))
        except HfBlendError:  # of transformers 5.17
            continue
        with pytest.raises(ConfigError, match=rf"layer \d of .* {what}"):
            cache.to_static(MOST)


def test_to_static_refuses_what_another_model_computed(tiny_model, pieces):
    model = tiny_model(num_hidden_layers=2)
    cache, inputs = prepared(model, pieces((17, 23)))
    generated(model, inputs, cache, max_new_tokens=1)
    cache.to_static(MOST)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(ConfigError, match="weights"):
        cache.to_static(MOST)


@torch.no_grad()
def test_a_compiled_prefill_and_a_compiled_sparse_step_are_refused_by_name(shared_model, pieces, compiler):
    model = shared_model(num_hidden_layers=2)
    compiled = torch.compile(model, backend=compiler.backend)
    cache, inputs = prepared(model, pieces())
    with pytest.raises(ConfigError, match="prefill came from compiled code"):
        compiled(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.get_seq_length() == 0
    cache, _, _ = prefilled(model, pieces())
    with (
        sparse_decoding(model, cache, block_tokens=8, min_tokens=0),
        pytest.raises(ConfigError, match="sparse step came from compiled code"),
    ):
        compiled(torch.tensor([[5]]), past_key_values=cache)


def test_a_blend_cache_is_not_compiled_by_generate(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2, num_key_value_heads=4)
    cache, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    assert isinstance(cache, BlendCache)
    generated(model, inputs, cache, **compiling(compiler))
    assert (compiler.graphs, cache.is_compileable) == (0, False)

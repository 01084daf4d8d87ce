# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from static buffers: compiled once, the same text, and a clear word where there is no room."""

import copy
import logging
from functools import partial

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from transformers import CompileConfig

from hf_blend import BlendCache, BlendConfig
from hf_blend.cache.quantised_layer import QuantisedLayer, QuantisedStaticLayer
from hf_blend.cache.static_layer import StaticLayer
from hf_blend.errors import ConfigError, HfBlendError
from hf_blend.sparse.decoding import sparse_decoding
from tests import asking
from tests.asking import apart, batched, memory, prepared, prompt
from tests.test_quantised_kv import states
from tests.test_quantised_sequences import Plain

MOST = 160
MIXERS = ("lfm2", "jamba", "nemotron_h", "zamba2")


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


generated, as_stock = (partial(one, max_new_tokens=18) for one in (asking.generated, asking.as_stock))
made = partial(prepared, max_tokens=MOST)


def compiling(compiler, is_compiled=True):
    """What lets `generate` compile a step, or not."""
    return {"compile_config": compiler.config} if is_compiled else {}


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_compiled_step_serves_all_tokens_and_all_requests_and_says_what_stock_says(
    tiny_model, pieces, compiler, implementation
):
    model, store = tiny_model(num_hidden_layers=2, attn_implementation=implementation), memory()
    for seed, chunks in enumerate([(17, 23), (17, 23), (9, 30, 12)]):
        cache, inputs = made(model, pieces(chunks, seed=seed), store=store, recompute_ratio=1.0)
        output = as_stock(model, inputs, cache, compiling(compiler))
        assert cache.report.reusable_tokens == sum(chunks)
        assert cache.get_seq_length() == output.shape[1] - 1
    cache, inputs = made(model, pieces((50, 60), seed=5), store=store)
    with pytest.raises(ConfigError, match=rf"holds {MOST}, but at most max_tokens={MOST} are expected"):
        generated(model, inputs, cache, **compiling(compiler), max_new_tokens=80)
    assert cache.get_seq_length() == MOST
    assert compiler.graphs == 1


@torch.no_grad()
def steps(model, cache, inputs, step, count=20):
    """The tokens of greedy steps, three of which are taken back on the way, and what the cache then holds."""
    tokens = [model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)]
    for number in range(count):
        if number == 10:
            cache.crop(-3)
        tokens.append(step(tokens[-1], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens), [states for layer in cache.layers for states in (layer.keys, layer.values)]


def test_static_buffers_hold_what_a_growing_cache_holds(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2)
    expected = steps(model, *made(model, pieces(), recompute_ratio=0.15, max_tokens=None), model)
    for step in (model, torch.compile(model, backend=compiler.backend)):
        tokens, held = steps(model, *made(model, pieces(), recompute_ratio=0.15), step)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(held, expected[1])
    assert compiler.graphs == 1


@pytest.mark.parametrize(
    ("bits", "is_compiled"),
    [(8, False), (4, False), *(pytest.param(bits, True, marks=pytest.mark.slow) for bits in (8, 4))],
)
@torch.no_grad()
def test_static_buffers_in_few_bits_are_a_stock_cache_quantised_by_the_formula(
    tiny_model, compiler, bits, is_compiled
):
    model, ids = tiny_model(num_hidden_layers=2), prompt(200)
    cache, plain = BlendCache(model, memory(), max_tokens=180, kv_bits=bits), Plain(model, bits)
    step = torch.compile(model, backend=compiler.backend) if is_compiled else model
    for start, stop in ((0, 60), *((at, at + 1) for at in range(60, 100)), (100, 170), (170, 171)):
        run = step if stop == start + 1 else model
        got, expected = run(ids[:, start:stop], past_key_values=cache).logits, plain.forward(ids[:, start:stop])
        assert apart(got, expected) <= 2e-6 * expected.abs().max(), start
    for layer, pair in zip(cache.layers, plain.kv, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), pair, atol=2e-6, rtol=0)
        assert layer.packed_tokens == plain.packed == 128
    assert compiler.graphs <= 1
    with pytest.raises(ConfigError, match="max_tokens=180"):
        model(ids[:, :10], past_key_values=cache)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_static_layer_in_few_bits_crops_restores_and_reorders_as_a_growing_one(bits):
    layer, plain, wide = QuantisedStaticLayer(300, bits), QuantisedLayer(bits), StaticLayer(300)
    for one in (layer, plain, wide):
        one.update(*states(150))
    assert layer.nbytes < 0.6 * wide.nbytes
    snapshot, held = layer.snapshot(), layer.keys
    layer.update(*states(100, 1))
    layer.restore(snapshot)
    assert torch.equal(layer.keys, held)
    for one in (layer, plain):
        one.crop(-60)
        one.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.values, plain.values)
    assert layer.keys.shape[2] == int(layer.filled) == 90
    place = layer._cells.columns["k.bytes"].buffer.data_ptr()
    layer.reset()
    assert (layer.length, layer.packed_tokens) == (0, 0)
    for tokens in (40, 1, 70):
        seen = layer.update(*states(tokens, 2))
        assert torch.equal(seen[0][:, :, layer.length - tokens : layer.length], states(tokens, 2)[0])
    assert place == layer._cells.columns["k.bytes"].buffer.data_ptr()
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys[0], layer.keys[1])
    for one in (layer, plain):
        one.reset()
        for seed in range(100):  # groups that steps have packed
            one.update(*states(1, seed))
        one.crop(-60)
    assert torch.equal(layer.keys, plain.keys)


def test_a_compiled_step_of_a_layer_in_few_bits_is_an_eager_one(compiler):
    eager, compiled = QuantisedStaticLayer(100, 8), QuantisedStaticLayer(100, 8)
    for layer in (eager, compiled):
        layer.update(*states(60))
    step = torch.compile(compiled.update, backend=compiler.backend)
    for seed in range(10):
        new = states(1, seed)
        assert all(torch.equal(*pair) for pair in zip(eager.update(*new), step(*new), strict=True))
    assert torch.equal(eager.keys, compiled.keys)
    assert (eager.packed_tokens, compiler.graphs) == (32, 1)


def batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled):
    """The cache of a padded batch that is asked twice, says what stock says and reuses chunks each time."""
    given, history = batched(pieces((17, 23)), pieces((12, 9), seed=1, question=5)), {}
    cache = BlendCache(model, memory(), recompute_ratio=1.0, max_tokens=MOST)
    for _ in range(2):
        inputs = cache.inputs(tokenizer, **given, **history)
        history = {"history": as_stock(model, inputs, cache, compiling(compiler, is_compiled))}
        assert cache.report.reusable_tokens > 40
        given.pop("prefix", None)
    assert compiler.graphs == is_compiled
    return cache


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_padded_batch_a_later_turn_and_beams_are_the_same_from_static_buffers(
    tiny_model, pieces, tokenizer, compiler, is_compiled
):
    model = tiny_model(num_hidden_layers=2)
    batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled)
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    as_stock(model, inputs, cache, num_beams=3)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])  # windows alone, and beside layers that see everything
def test_windows_in_static_buffers_say_what_stock_says(tiny_model, pieces, tokenizer, compiler, family, is_compiled):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3_text" else {}
    model = tiny_model(family, sliding_window=16, **kinds)
    cache = batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled)
    assert any(layer.is_sliding and layer.sliding_window == 16 for layer in cache.layers)
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    later = {"chunks": pieces((12, 9), seed=2)["chunks"], "question": [5, 6]}
    as_stock(model, cache.inputs(None, **later, history=generated(model, inputs, cache)), cache)
    assert (cache.report.reusable_tokens, cache.report.computed_chunks) == (21, 2)


def test_windows_in_static_buffers_are_blended_as_in_a_growing_cache_and_cropped_at_any_depth(shared_model, pieces):
    model, store = shared_model("gemma3_text", sliding_window=16), memory()
    plain, inputs = made(model, pieces(), store=store, recompute_ratio=0.15, max_tokens=None)
    cache, _ = made(model, pieces(), store=store, recompute_ratio=0.15)
    assert torch.equal(generated(model, inputs, plain), generated(model, inputs, cache))
    assert (cache.report.reusable_tokens, cache.report.chosen_columns) == (71, plain.report.chosen_columns)
    cache, _ = made(model, pieces(), store=store, recompute_ratio=1.0)
    output = generated(model, inputs, cache)
    cache.crop(-30)  # further than any window
    as_stock(model, {"input_ids": output[:, : cache.get_seq_length() + 1]}, cache)


def test_a_cache_that_is_used_again_stays_where_it_is_and_shows_nothing_of_what_it_held(shared_model, pieces):
    model = shared_model()
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    generated(model, inputs, cache)
    places = [layer._buffers[0].data_ptr() for layer in cache.layers]
    for layer in cache.layers:
        layer.keys[:, :, 50:] = layer.values[:, :, 50:] = float("nan")
    cache.reset()
    assert (cache.get_seq_length(), bool(cache)) == (0, False)
    as_stock(model, cache.inputs(None, **pieces((9, 11), seed=3)), cache)
    assert places == [layer._buffers[0].data_ptr() for layer in cache.layers]
    assert torch.equal(copy.deepcopy(cache).layers[0].keys, cache.layers[0].keys)


def test_what_does_not_fit_is_refused_before_anything_is_written(shared_model, pieces):
    model = shared_model()
    cache, inputs = made(model, pieces((17, 23)), recompute_ratio=1.0, max_tokens=60)
    with pytest.raises(ConfigError, match=r"holds 60, but at most max_tokens=60 are expected"):
        generated(model, inputs, cache)
    assert cache.get_seq_length() == 60
    with pytest.raises(ConfigError, match=r"1 more token was to go into a BlendCache that holds 60"):
        model(torch.tensor([[5]]), past_key_values=cache)
    assert cache.get_seq_length() == 60
    with pytest.raises(ConfigError, match=r"max_tokens=60 are expected"):
        cache.inputs(None, **pieces((40, 23)))
    with pytest.raises(ConfigError, match=r"max_tokens=60 are expected"):
        generated(model, {"input_ids": torch.cat([inputs["input_ids"], torch.arange(3, 60)[None]], 1)}, cache)
    assert cache.get_seq_length() == 60
    few = {"max_new_tokens": 60 - inputs["input_ids"].shape[1] + 1}
    cache, inputs = made(model, pieces((17, 23)), recompute_ratio=1.0, max_tokens=60)
    as_stock(model, inputs, cache, **few)


def test_a_compiled_prefill_is_refused_by_name(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2)
    cache, inputs = made(model, pieces())
    with pytest.raises(ConfigError, match=r"prefill came from compiled code.*prefill_chunk_size"):
        generated(model, inputs, cache, **compiling(compiler), prefill_chunk_size=25)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["qwen3_next", "falcon_h1", *(pytest.param(name, marks=pytest.mark.slow) for name in MIXERS)]
)
def test_static_buffers_beside_mixers_say_what_stock_says(pieces, compiler, family, is_compiled):
    model, store, how = zoo_model(family), memory(), compiling(compiler, is_compiled)
    for seed, chunks in enumerate([(17, 23), (9, 30, 12)]):
        cache, inputs = made(model, pieces(chunks, seed=seed), store=store, recompute_ratio=1.0)
        as_stock(model, inputs, cache, how)
        assert cache.report.reusable_tokens > 0
    growing, inputs = made(model, pieces((17, 23)), store=store, recompute_ratio=0.3, max_tokens=None)
    cache, _ = made(model, pieces((17, 23)), store=store, recompute_ratio=0.3)
    assert torch.equal(generated(model, inputs, growing), generated(model, inputs, cache))
    assert any(isinstance(layer, StaticLayer) for layer in cache.layers)
    assert [all(layer.is_compileable for layer in one.layers) for one in (growing, cache)] == [False, True]
    with pytest.raises(ConfigError, match=rf"holds {MOST}, but at most max_tokens={MOST} are expected"):
        generated(model, inputs, made(model, pieces((17, 23)), store=store)[0], **how, max_new_tokens=140)
    assert compiler.graphs == is_compiled


def test_a_compiled_sparse_step_is_refused_by_name(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2)
    cache, inputs = made(model, pieces())
    with (
        sparse_decoding(model, cache, block_tokens=8, min_tokens=0),
        pytest.raises(ConfigError, match=r"sparse step came from compiled code.*disable_compile=True"),
    ):
        generated(model, inputs, cache, **compiling(compiler))


def test_what_is_padded_before_all_windows_in_static_buffers_is_no_token(tiny_model, pieces):
    """Transformers' masks of a later turn show nothing of it, in a model whose layers all have windows."""
    model, outputs = tiny_model("mistral", sliding_window=16), []
    first = batched(pieces((24, 20), 0, 5), pieces((10, 9), 0, 3, seed=1))
    later = batched(pieces((12,), 2, 5, seed=2), pieces((8,), 2, 3, seed=3))
    for most in (MOST, None):
        cache = BlendCache(model, memory(), recompute_ratio=0.3, max_tokens=most)
        inputs = cache.inputs(None, **first)
        output = generated(model, inputs, cache, max_new_tokens=2)
        inputs = cache.inputs(None, **later, history=output)
        outputs.append((generated(model, inputs, cache, max_new_tokens=2), cache.report.chosen_columns))
        assert (cache.report.reusable_tokens, cache.report.fallback_reason) == (20, "")
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[0][1] == outputs[1][1]


def test_what_has_no_static_buffers_is_refused_by_name(shared_model, tiny_model, pieces):
    store = memory()
    with pytest.raises(HfBlendError, match=r"layer 0 (keeps the keys of an indexer|of .* cannot be)"):  # in 5.17
        BlendCache(zoo_model("deepseek_v32"), store, max_tokens=64)
    with pytest.raises(ConfigError, match=r"(?s)max_tokens=64.*layer 0 keeps K and V of a chunk"):
        BlendCache(zoo_model("llama4_text"), store, max_tokens=64)
    for most in (0, 1.5, True):
        with pytest.raises(ConfigError, match="from 1 on"):
            BlendConfig(max_tokens=most)
    model = tiny_model(num_hidden_layers=2)
    cache, _ = made(model, pieces())
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"(?s)'flash_attention_2'.*sdpa"):
        BlendCache(model, store, max_tokens=64)
    with pytest.raises(ConfigError, match=r"(?s)'flash_attention_2'.*sdpa"):
        cache.inputs(None, **pieces())


def test_the_host_knows_how_many_tokens_a_layer_holds_and_asks_once_behind_compiled_steps():
    layer, states = StaticLayer(8), torch.ones(1, 1, 3, 2)
    layer.update(states, states)
    assert [tuple(part.shape) for part in layer.update(states[:, :, :1], states[:, :, :1])] == [(1, 1, 8, 2)] * 2
    assert (layer.length, layer.get_mask_sizes(1), layer.get_mask_sizes(2)) == (4, (8, 0), (6, 0))
    layer.filled.add_(1)
    layer._known, layer._has_stepped = None, True  # as a compiled step leaves it
    assert layer.get_query_offset() is layer.filled
    assert (layer.length, layer.get_query_offset(), layer.keys.shape[2]) == (5, 5, 5)
    with pytest.raises(ConfigError, match="4 more tokens were"):
        layer.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2))
    layer.crop(-2)
    assert (layer.length, int(layer.filled), layer._buffers[0][0, 0, 3:].abs().sum()) == (3, 3, 0)


def test_a_step_that_packs_a_group_says_that_its_tokens_have_changed():
    layers, states = (QuantisedLayer(8), QuantisedStaticLayer(160, 8)), torch.randn(1, 1, 100, 4)
    for layer in layers:
        layer.update(states, states)
    found = []
    for _ in range(40):
        for layer in layers:
            layer.unchanged_tokens = layer.length
            layer.update(states[:, :, :1], states[:, :, :1])
        found.append([layer.unchanged_tokens for layer in layers])
    assert [pair for pair in found if pair[0] < 100] == [[64, 64]]
    assert all(one == other for one, other in found)

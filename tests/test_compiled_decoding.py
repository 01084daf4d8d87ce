# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from static buffers: compiled once, the same text, and a clear word where there is no room."""

import copy
import logging

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from transformers import CompileConfig

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.cache.quantised_layer import QuantisedLayer, QuantisedStaticLayer
from hf_blend.cache.static_layer import StaticLayer
from hf_blend.errors import ConfigError, HfBlendError
from hf_blend.sparse.decoding import sparse_decoding
from tests.test_quantised_sequences import Plain

GREEDY = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LONG, FAR = {"max_new_tokens": 80}, {"max_new_tokens": 140}
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


def made(model, pieces, store=None, **settings):
    cache = BlendCache(model, store or ChunkStore.open("memory://"), **{"max_tokens": MOST, **settings})
    return cache, cache.inputs(None, **pieces)


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_compiled_step_serves_all_tokens_and_all_requests_and_says_what_stock_says(
    tiny_model, pieces, compiler, implementation
):
    model = tiny_model(num_hidden_layers=2, attn_implementation=implementation)
    store = ChunkStore.open("memory://")
    for seed, chunks in enumerate([(17, 23), (17, 23), (9, 30, 12)]):
        cache, inputs = made(model, pieces(chunks, seed=seed), store, recompute_ratio=1.0)
        expected = model.generate(**inputs, **GREEDY)
        output = model.generate(**inputs, past_key_values=cache, compile_config=compiler.config, **GREEDY)
        assert torch.equal(output, expected)
        assert cache.report.reusable_tokens == sum(chunks)
        assert cache.get_seq_length() == output.shape[1] - 1
    cache, inputs = made(model, pieces((50, 60), seed=5), store)
    with pytest.raises(ConfigError, match=rf"holds {MOST}, but at most max_tokens={MOST} are expected"):
        model.generate(**inputs, past_key_values=cache, compile_config=compiler.config, **{**GREEDY, **LONG})
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
    model, ids = (tiny_model(num_hidden_layers=2), torch.randint(3, 100, (1, 200), generator=torch.manual_seed(0)))
    cache, plain = BlendCache(model, ChunkStore.open("memory://"), max_tokens=180, kv_bits=bits), Plain(model, bits)
    step = torch.compile(model, backend=compiler.backend) if is_compiled else model
    for start, stop in ((0, 60), *((at, at + 1) for at in range(60, 100)), (100, 170), (170, 171)):
        run = step if stop == start + 1 else model
        got, expected = run(ids[:, start:stop], past_key_values=cache).logits, plain.forward(ids[:, start:stop])
        assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-6, start
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
        one.update(*states_of(150))
    assert layer.nbytes < 0.6 * wide.nbytes
    snapshot, held = layer.snapshot(), layer.keys
    layer.update(*states_of(100, 1))
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
        seen = layer.update(*states_of(tokens, 2))
        assert torch.equal(seen[0][:, :, layer.length - tokens : layer.length], states_of(tokens, 2)[0])
    assert place == layer._cells.columns["k.bytes"].buffer.data_ptr()
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys[0], layer.keys[1])
    for one in (layer, plain):
        one.reset()
        for seed in range(100):  # groups that steps have packed
            one.update(*states_of(1, seed))
        one.crop(-60)
    assert torch.equal(layer.keys, plain.keys)


def test_a_compiled_step_of_a_layer_in_few_bits_is_an_eager_one(compiler):
    eager, compiled = QuantisedStaticLayer(100, 8), QuantisedStaticLayer(100, 8)
    for layer in (eager, compiled):
        layer.update(*states_of(60))
    step = torch.compile(compiled.update, backend=compiler.backend)
    for seed in range(10):
        new = states_of(1, seed)
        assert all(torch.equal(*pair) for pair in zip(eager.update(*new), step(*new), strict=True))
    assert torch.equal(eager.keys, compiled.keys)
    assert (eager.packed_tokens, compiler.graphs) == (32, 1)


def states_of(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 2, tokens, width, generator=generator) for width in (8, 6))


def batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled):
    """The cache of a padded batch that is asked twice and says what stock says, and what was reusable each time."""
    batch, reusable = [pieces((17, 23)), pieces((12, 9), seed=1, question=5)], []
    given, history = {name: [one[name] for one in batch] for name in batch[0]}, {}
    compiled = {"compile_config": compiler.config} if is_compiled else {}
    cache = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0, max_tokens=MOST)
    for _ in range(2):
        inputs = cache.inputs(tokenizer, **given, **history)
        expected = model.generate(**inputs, **GREEDY)
        output = model.generate(**inputs, past_key_values=cache, **compiled, **GREEDY)
        assert torch.equal(output, expected)
        reusable.append(cache.report.reusable_tokens)
        given.pop("prefix", None)
        history = {"history": output}
    assert compiler.graphs == is_compiled
    return cache, reusable


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_padded_batch_a_later_turn_and_beams_are_the_same_from_static_buffers(
    tiny_model, pieces, tokenizer, compiler, is_compiled
):
    model = tiny_model(num_hidden_layers=2)
    _, reusable = batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled)
    assert min(reusable) > 40
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    beams = {**GREEDY, "num_beams": 3}
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **beams), model.generate(**inputs, **beams))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])  # windows alone, and beside layers that see everything
def test_windows_in_static_buffers_say_what_stock_says(tiny_model, pieces, tokenizer, compiler, family, is_compiled):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3_text" else {}
    model = tiny_model(family, sliding_window=16, **kinds)
    cache, reusable = batch_in_two_turns(model, pieces, tokenizer, compiler, is_compiled)
    assert min(reusable) > 40
    assert any(layer.is_sliding and layer.sliding_window == 16 for layer in cache.layers)
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    output = model.generate(**inputs, past_key_values=cache, **GREEDY)
    later = {"chunks": pieces((12, 9), seed=2)["chunks"], "question": [5, 6]}
    inputs = cache.inputs(None, **later, history=output)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), model.generate(**inputs, **GREEDY))
    assert (cache.report.reusable_tokens, cache.report.computed_chunks) == (21, 2)


def test_windows_in_static_buffers_are_blended_as_in_a_growing_cache_and_cropped_at_any_depth(shared_model, pieces):
    model, store = shared_model("gemma3_text", sliding_window=16), ChunkStore.open("memory://")
    plain, inputs = made(model, pieces(), store, recompute_ratio=0.15, max_tokens=None)
    cache, _ = made(model, pieces(), store, recompute_ratio=0.15)
    outputs = [model.generate(**inputs, past_key_values=one, **GREEDY) for one in (plain, cache)]
    assert torch.equal(*outputs)
    assert (cache.report.reusable_tokens, cache.report.chosen_columns) == (71, plain.report.chosen_columns)
    cache, _ = made(model, pieces(), store, recompute_ratio=1.0)
    output = model.generate(**inputs, past_key_values=cache, **GREEDY)
    cache.crop(-30)  # further than any window
    begun = output[:, : cache.get_seq_length() + 1]
    assert torch.equal(model.generate(begun, past_key_values=cache, **GREEDY), model.generate(begun, **GREEDY))


def test_a_cache_that_is_used_again_stays_where_it_is_and_shows_nothing_of_what_it_held(shared_model, pieces):
    model = shared_model()
    cache, inputs = made(model, pieces(), recompute_ratio=1.0)
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    places = [layer._buffers[0].data_ptr() for layer in cache.layers]
    for layer in cache.layers:
        layer.keys[:, :, 50:] = layer.values[:, :, 50:] = float("nan")
    cache.reset()
    assert (cache.get_seq_length(), bool(cache)) == (0, False)
    inputs = cache.inputs(None, **pieces((9, 11), seed=3))
    output = model.generate(**inputs, past_key_values=cache, **GREEDY)
    assert torch.equal(output, model.generate(**inputs, **GREEDY))
    assert places == [layer._buffers[0].data_ptr() for layer in cache.layers]
    assert torch.equal(copy.deepcopy(cache).layers[0].keys, cache.layers[0].keys)


def test_what_does_not_fit_is_refused_before_anything_is_written(shared_model, pieces):
    model = shared_model()
    cache, inputs = made(model, pieces((17, 23)), recompute_ratio=1.0, max_tokens=60)
    with pytest.raises(ConfigError, match=r"holds 60, but at most max_tokens=60 are expected"):
        model.generate(**inputs, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 60
    with pytest.raises(ConfigError, match=r"1 more token was to go into a BlendCache that holds 60"):
        model(torch.tensor([[5]]), past_key_values=cache)
    assert cache.get_seq_length() == 60
    with pytest.raises(ConfigError, match=r"max_tokens=60 are expected"):
        cache.inputs(None, **pieces((40, 23)))
    with pytest.raises(ConfigError, match=r"max_tokens=60 are expected"):
        model.generate(torch.arange(3, 90)[None], past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 60
    few = {**GREEDY, "max_new_tokens": 60 - inputs["input_ids"].shape[1] + 1}
    cache, inputs = made(model, pieces((17, 23)), recompute_ratio=1.0, max_tokens=60)
    output = model.generate(**inputs, past_key_values=cache, **few)
    assert torch.equal(output, model.generate(**inputs, **few))


def test_a_compiled_prefill_is_refused_by_name(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2)
    cache, inputs = made(model, pieces())
    with pytest.raises(ConfigError, match=r"prefill came from compiled code.*prefill_chunk_size"):
        model.generate(
            **inputs, past_key_values=cache, compile_config=compiler.config, prefill_chunk_size=25, **GREEDY
        )
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["qwen3_next", "falcon_h1", *(pytest.param(name, marks=pytest.mark.slow) for name in MIXERS)]
)
def test_static_buffers_beside_mixers_say_what_stock_says(pieces, compiler, family, is_compiled):
    model, store = zoo_model(family), ChunkStore.open("memory://")
    how = {"compile_config": compiler.config} if is_compiled else {}
    for seed, chunks in enumerate([(17, 23), (9, 30, 12)]):
        cache, inputs = made(model, pieces(chunks, seed=seed), store, recompute_ratio=1.0)
        output = model.generate(**inputs, past_key_values=cache, **how, **GREEDY)
        assert torch.equal(output, model.generate(**inputs, **GREEDY))
        assert cache.report.reusable_tokens > 0
    growing, inputs = made(model, pieces((17, 23)), store, recompute_ratio=0.3, max_tokens=None)
    cache, _ = made(model, pieces((17, 23)), store, recompute_ratio=0.3)
    outputs = [model.generate(**inputs, past_key_values=one, **GREEDY) for one in (growing, cache)]
    assert torch.equal(*outputs)
    assert any(isinstance(layer, StaticLayer) for layer in cache.layers)
    assert [all(layer.is_compileable for layer in one.layers) for one in (growing, cache)] == [False, True]
    with pytest.raises(ConfigError, match=rf"holds {MOST}, but at most max_tokens={MOST} are expected"):
        model.generate(**inputs, past_key_values=made(model, pieces((17, 23)), store)[0], **how, **{**GREEDY, **FAR})
    assert compiler.graphs == is_compiled


def test_a_compiled_sparse_step_is_refused_by_name(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2)
    cache, inputs = made(model, pieces())
    with (
        sparse_decoding(model, cache, block_tokens=8, min_tokens=0),
        pytest.raises(ConfigError, match=r"sparse step came from compiled code.*disable_compile=True"),
    ):
        model.generate(**inputs, past_key_values=cache, compile_config=compiler.config, **GREEDY)


def test_what_is_padded_before_all_windows_in_static_buffers_is_no_token(tiny_model, pieces):
    """Transformers' masks of a later turn show nothing of it, in a model whose layers all have windows."""
    model, outputs = tiny_model("mistral", sliding_window=16), []
    draw = torch.Generator().manual_seed(0)
    ids = lambda count: torch.randint(20, 90, (count,), generator=draw).tolist()  # noqa: E731
    first = {"prefix": [[1], [1]], "chunks": [[ids(24), ids(20)], [ids(10), ids(9)]], "question": [ids(5), ids(3)]}
    later = {"prefix": [ids(2), ids(2)], "chunks": [[ids(12)], [ids(8)]], "question": [ids(5), ids(3)]}
    few = {**GREEDY, "max_new_tokens": 2}
    for most in (MOST, None):
        cache = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=0.3, max_tokens=most)
        output = model.generate(**cache.inputs(None, **first), past_key_values=cache, **few)
        inputs = cache.inputs(None, **later, history=output)
        outputs.append((model.generate(**inputs, past_key_values=cache, **few), cache.report.chosen_columns))
        assert (cache.report.reusable_tokens, cache.report.fallback_reason) == (20, "")
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[0][1] == outputs[1][1]


def test_what_has_no_static_buffers_is_refused_by_name(shared_model, tiny_model, pieces):
    store = ChunkStore.open("memory://")
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

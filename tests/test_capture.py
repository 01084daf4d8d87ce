# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk is computed behind its prefix as if alone, in full; the model does not notice."""

from importlib.util import find_spec

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, observer
from hf_blend.errors import PromptError, UnsupportedModelError
from hf_blend.model import question
from hf_blend.model.anatomy import decoder_layers, decoder_of, full_cache
from hf_blend.model.capture import LEAST_SHARED, capture, capture_chunk, capture_chunks
from hf_blend.model.checks import KV, allowed_of, relative_error
from hf_blend.model.question import question_ids
from hf_blend.store.chunk import ChunkKey
from tests.asking import check_equal, longrope, memory, raising
from tests.chat_templates import TEMPLATES, small_tokenizer, user
from tests.conftest import IdTokenizer

CHUNK = tuple(range(10, 40))
WINDOWS = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS = {  # models whose chunks are computed behind a cached prefix; one forward is longer than a window of 16
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": WINDOWS,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4},
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "qwen3": {"head_dim": 16},
}
PREFIX = (1, *range(40, 40 + LEAST_SHARED))


def keys_of(*lengths: int, sink: tuple[int, ...] = (1,)) -> list[ChunkKey]:
    """Chunks of random tokens."""
    draw = torch.Generator().manual_seed(0)
    keys = []
    for length in lengths:
        ids = torch.randint(3, 128, (length,), generator=draw)
        keys.append(ChunkKey("f" * 64, sink, tuple(ids.tolist())))
    return keys


def tokens_of_calls(model) -> list[int]:
    """How many tokens each later forward of a model has."""
    calls: list[int] = []

    @observer
    def count(_, args, given):
        ids = args[0] if args else given["input_ids"]
        calls.append(ids.shape[1])

    decoder = decoder_of(model)
    decoder.register_forward_pre_hook(count, with_kwargs=True)
    return calls


@torch.no_grad()
def alone(model, key: ChunkKey) -> list[tuple[torch.Tensor, ...]]:
    """K and V of a chunk by nothing but a plain forward."""
    cache = DynamicCache()
    first = len(key.chunk_prefix_ids)
    model(torch.tensor([[*key.chunk_prefix_ids, *key.token_ids]]), past_key_values=cache)
    return [(layer.keys[0, :, first:], layer.values[0, :, first:]) for layer in cache.layers]


def side_by_side(one, other):
    """The tensors of two rows of pairs, each with its like."""
    pairs = []
    for layers in zip(one, other, strict=True):
        pairs.extend(zip(*layers, strict=True))
    return pairs


def check_tables(chunk, one):
    assert chunk.layer_table == one.layer_table
    for got, expected in side_by_side(chunk.tables, one.tables):
        assert torch.equal(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("sink", [(), (1,), (1, 5, 6)])
def test_capture_chunk_gives_states_of_plain_forward_without_sink(shared_model, sink):
    model = shared_model()
    key = ChunkKey("f", sink, CHUNK)
    chunk = capture_chunk(model, CHUNK, sink, "f")
    assert chunk.key == key
    for pair in side_by_side(chunk.layers, alone(model, key)):
        assert torch.equal(*pair)
    positions = torch.arange(len(sink), len(sink) + len(CHUNK))
    table = model.model.rotary_emb(torch.zeros(1), positions[None])
    check_equal(chunk.tables[0], (table[0][0], table[1][0]))
    chunk.check()


def test_capture_chunk_drops_nothing_by_window_and_tells_tables_of_layers_apart(shared_model, tiny_model):
    chunk = capture_chunk(shared_model("mistral", sliding_window=8), CHUNK, (1,), "f")
    assert all(keys.shape[1] == len(CHUNK) for keys, _ in chunk.layers)
    chunk = capture_chunk(tiny_model("gemma3_text", **WINDOWS), CHUNK, (1,), "f")
    assert len(chunk.tables) == 2
    assert chunk.layer_table == (0, 1, 0, 1)


def test_capture_leaves_model_untouched_after_exception_too(tiny_model, untouched, monkeypatch):
    model = tiny_model()
    keys = keys_of(31, 7)
    with untouched(model):
        chunk = capture_chunk(model, CHUNK, (1,), "f")
        list(capture_chunks(model, keys))
    assert not any(tensor.requires_grad for _, tensor in chunk.named_tensors())

    with untouched(model), monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[2].mlp, "forward", raising(RuntimeError("boom")))
        with pytest.raises(RuntimeError, match="boom"):
            capture_chunk(model, CHUNK, (1,), "f")
        with pytest.raises(RuntimeError, match="boom"):
            list(capture_chunks(model, keys))


def test_capture_chunk_refuses_what_cannot_be_computed_and_fills_positions_to_last(shared_model):
    with pytest.raises(PromptError, match=r"512 tokens behind a prefix of 1.*512 positions.*Split"):
        capture_chunk(shared_model(), (5,) * 512, (1,), "f")
    assert capture_chunk(shared_model(), (5,) * 511, (1,), "f").tokens == 511


def test_capture_names_layer_that_caches_nothing_or_something_else(tiny_model, monkeypatch):
    model = tiny_model()
    update = DynamicCache.update

    def cut_short(cache, keys, values, layer, *args, **kwargs):
        stored = keys[:, :, :5] if layer == 1 else keys
        update(cache, stored, values, layer, *args, **kwargs)
        return keys, values

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "update", cut_short)
        with pytest.raises(UnsupportedModelError, match=r"layer 1 of .* left \(1, 2, 5, 16\) in the cache"):
            capture(model, torch.tensor([CHUNK]))
    monkeypatch.setattr(decoder_layers(model)[3], "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match="layer 3 of LlamaForCausalLM left NoneType in the cache"):
        capture(model, torch.tensor([CHUNK]))


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("mistral", torch.bfloat16)])
def test_capture_chunks_computes_prefix_once_and_gives_each_what_plain_forward_gives(tiny_model, kind, dtype):
    model = tiny_model(kind.partition(" ")[0], **KINDS[kind]).to(dtype)
    keys = keys_of(9, 31, 1, 18, sink=PREFIX)
    list(capture_chunks(model, keys[:1]))  # with its probe
    calls = tokens_of_calls(model)
    chunks = list(capture_chunks(model, keys))
    assert calls == [len(PREFIX), 9, 31, 1, 18]
    for key, chunk in zip(keys, chunks, strict=True):
        assert chunk.key == key
        chunk.check()
        check_tables(chunk, capture_chunk(model, key.token_ids, key.chunk_prefix_ids, ""))
        for got, plain in side_by_side(chunk.layers, alone(model, key)):
            assert relative_error(got, plain) <= (1e-5 if dtype == torch.float32 else allowed_of(KV, dtype))


def test_capture_chunks_lets_no_bit_depend_on_other_chunks(shared_model):
    for model in (shared_model(), shared_model("mistral", sliding_window=8)):
        for sink in ((1,), PREFIX):
            keys = keys_of(31, 18, 7, sink=sink)
            for key, chunk in zip(keys, capture_chunks(model, keys), strict=True):
                one = capture_chunk(model, key.token_ids, sink, "")
                for pair in side_by_side(chunk.layers, one.layers):
                    assert torch.equal(*pair)


def test_prefix_is_computed_with_each_chunk_where_states_or_frequencies_depend_on_it(tiny_model):
    scaled = tiny_model("phi3", rope_parameters=longrope(32), original_max_position_embeddings=32)
    (key,) = keys_of(31, sink=PREFIX)
    for model in (scaled, zoo_model("bamba")):
        list(capture_chunks(model, [key]))
        calls = tokens_of_calls(model)
        list(capture_chunks(model, [key]))
        assert calls == [len(PREFIX) + 31]


def test_prompt_with_nothing_stored_runs_its_chunks_once(tiny_model, pieces):
    model = tiny_model()
    BlendCache(model, memory())  # looked at once, with its store and its probes
    store = memory()
    cache = BlendCache(model, store, selector="ramp")
    inputs = cache.inputs(None, **pieces())
    calls = tokens_of_calls(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        prefix = 5  # is what a prefix cache holds; the chunks stand behind BOS
        assert calls == [prefix, 1 + 17, 1 + 23, 1 + 31, inputs["input_ids"].shape[1]]
        report = cache.report
        assert (report.computed_chunks, report.loaded_chunks) == (4, 0)
        assert min(report.compute_ms, report.store_ms, report.check_ms) > 0
        calls.clear()
        again = BlendCache(model, store, selector="ramp")
        model(**again.inputs(None, **pieces()), past_key_values=again, logits_to_keep=1)
    assert calls == [inputs["input_ids"].shape[1]]
    assert again.report.computed_chunks == 0
    assert again.report.compute_ms == 0
    assert again.report.store_ms == 0


QUESTION = tuple(range(60, 86))  # more rows than are listened to
ASKED = {  # family, and fields of its config
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama of one head": ("llama", {"num_key_value_heads": 1}),
    "windows": ("gemma3_text", WINDOWS),
    "softcap": ("gemma2", {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS["layer_types"]}),
    "norms": ("qwen3", {"head_dim": 16}),
    "windows alone": ("mistral", {"sliding_window": 40}),
}
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 4e-2}


@torch.no_grad()
def importance_by_eager_attention(model, key, question):
    """Attention of the last 16 rows of one stock forward over all, times the length of V, by eager attention."""
    count = model.config.num_hidden_layers
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = full_cache(model)
    ids = torch.tensor([[*key.chunk_prefix_ids, *key.token_ids, *question]])
    attentions = model(ids, past_key_values=cache, output_attentions=True).attentions
    model.set_attn_implementation(before)
    attending = range(count)
    if len(attentions) < count:  # of a hybrid the layers without attention are left out
        attending = [index for index in range(count) if kinds[index] == "full_attention"]
    by_layer = []
    for index, weights in zip(attending, attentions, strict=True):
        if kinds[index] == "full_attention":
            values = cache.layers[index].values[0].float()
            heads = values.repeat_interleave(weights.shape[1] // len(values), dim=0)
            shares = weights[0, :, -16:].float().mean(1)
            by_layer.append((shares * heads.norm(dim=-1)).mean(0))
    first = len(key.chunk_prefix_ids)
    return torch.stack(by_layer).mean(0)[first : first + len(key.token_ids)]


@pytest.mark.parametrize("sink", [(1,), PREFIX])
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in ASKED), ("llama", torch.bfloat16)])
def test_importance_is_attention_of_last_rows_of_question_times_length_of_values(
    tiny_model, kind, dtype, sink, untouched
):
    family, fields = ASKED[kind]
    model = tiny_model(family, **fields).to(dtype)
    keys = keys_of(9, 31, 18, sink=sink)
    with untouched(model):
        chunks = list(capture_chunks(model, keys, QUESTION))
    for key, chunk, plain in zip(keys, chunks, capture_chunks(model, keys), strict=True):
        chunk.check()
        expected = importance_by_eager_attention(model, key, QUESTION)
        torch.testing.assert_close(chunk.importance.float(), expected, rtol=TOLERANCES[dtype], atol=1e-6)
        assert plain.importance is None
        for pair in side_by_side(chunk.layers, plain.layers):
            assert torch.equal(*pair)
        (other,) = capture_chunks(model, [key], QUESTION[::-1])
        assert other.question != chunk.question
        assert not torch.equal(other.importance, chunk.importance)


@pytest.mark.skipif(not find_spec("hf_blend.hybrids"), reason="the core does without hybrids")
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2"])
def test_importance_of_hybrid_is_that_of_its_layers_with_attention(kind):
    model = zoo_model(kind)
    (key,) = keys_of(31)
    (chunk,) = capture_chunks(model, [key], QUESTION)
    expected = importance_by_eager_attention(model, key, QUESTION)
    torch.testing.assert_close(chunk.importance.float(), expected, rtol=2e-3, atol=1e-6)


def test_importance_is_unknown_where_question_has_no_position_other_frequencies_or_cannot_be_heard(tiny_model):
    short = tiny_model(max_position_embeddings=50)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    scaled = tiny_model(
        "phi3",
        rope_parameters={**longrope, "original_max_position_embeddings": 40},
        original_max_position_embeddings=40,
    )
    own_attention = zoo_model("falcon")
    for model in (short, scaled, own_attention):
        (chunk,) = capture_chunks(model, keys_of(31), QUESTION)
        assert chunk.importance is None
        assert chunk.question == ""
    (chunk,) = capture_chunks(short, keys_of(31), QUESTION[:18])
    assert chunk.importance is not None


TEXT_BEHIND = "\n\nQuestion: What is the name of the person, place, date or thing that is asked about?"


@pytest.mark.parametrize("kind", ["chatml", "gemma", "llama3", "mistral"])
def test_question_is_what_a_chat_template_writes_behind_a_chunk(shared_model, kind):
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATES[kind]
    model = shared_model(vocab_size=len(tokenizer))
    message = user("A text." + TEXT_BEHIND)
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = question_ids(model, tokenizer)
    behind = tokenizer.decode(ids)
    assert behind.startswith(TEXT_BEHIND)
    assert text.endswith("A text." + behind)
    tokenizer.chat_template = None
    plain = tokenizer.decode(question_ids(model, tokenizer))
    assert plain == TEXT_BEHIND + "\nShort answer:"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert tokenizer.decode(question_ids(model, tokenizer)) == plain


def test_question_is_empty_without_words_or_where_model_continues_no_cached_tokens(shared_model, monkeypatch):
    tokenizer = small_tokenizer()
    model = shared_model(vocab_size=len(tokenizer))
    assert question_ids(model, tokenizer)
    assert question_ids(model, None) == ()
    assert question_ids(model, IdTokenizer) == ()
    if find_spec("hf_blend.hybrids"):
        assert question_ids(zoo_model("bamba"), tokenizer)
        assert question_ids(zoo_model("jamba"), tokenizer) == ()
    monkeypatch.setattr(question, "MOST_TOKENS", 8)
    assert question_ids(model, small_tokenizer()) == ()


def test_chunks_of_add_and_of_requests_have_importance_by_question_of_tokenizer(models, tmp_path):
    model, tokenizer = models["bytes"]
    ids = question_ids(model, tokenizer)
    with ChunkStore.open(tmp_path) as store:
        cache = BlendCache(model, store)
        inputs = cache.inputs(tokenizer, prefix="Read this. ", chunks=["The clock is slow."], question="Which clock?")
        with torch.no_grad():
            model(**inputs, **cache.keyword, logits_to_keep=1)
        added = store.add(model, tokenizer, ["The clock is slow.", "A pilot in Lund."])
        (bare,) = store.add(model, None, [[5, 6, 7, 8, 9]])
        assert store.get(bare).importance is None
    with ChunkStore.open(tmp_path, memory_bytes=0) as again:
        for key in added:
            (chunk,) = capture_chunks(model, [key], ids)
            for read in (again.get(key), again.stream(key)):
                assert read.question == chunk.question
                assert torch.equal(read.importance, chunk.importance)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that keep more than K and V: mixers (linear attention, state spaces, convolutions), and indexers with keys.

An indexer chooses the few tokens that its layer looks at, by keys of its own.
"""

import copy
import itertools
import re
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from families import CHECKS
from tiny_models import tiny_model

from hf_blend import BlendCache, ChunkStore, ConfigError, UnsupportedModelError, observer, plugins, sparse_decoding
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.hybrids import mixer_probe
from hf_blend.hybrids.extra_layers import MixerLayer
from hf_blend.hybrids.mixer_probe import mixers_of
from hf_blend.model import anatomy
from hf_blend.model.calibrate import ignores_states, rotary_styles
from hf_blend.prefill import observing
from hf_blend.selectors.kv_deviation import KvDeviation
from hf_blend.store.chunk import ChunkKey
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.runner import measure
from tests import asking
from tests.asking import memory, prefill, prefilled, prepared
from tests.chat_templates import CHATML, DOCUMENTS, small_tokenizer
from tests.conftest import skip_in_the_oldest, slow_but
from tests.faults.damage import tensors_of

# one for each way in which a mixer stands in a layer: before its MLP, beside attention, behind it, alone
FAST = ("qwen3_next", "lfm2", "minimax")  # the last takes no cache but one of its own class
SLOW = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "lfm3",
    "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2",
)  # fmt: skip
INDEXED = ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp",
           "qwen4_exp_text")  # fmt: skip
VARIANTS = {
    "lfm2-deep": ("lfm2", {"num_hidden_layers": 6, "layer_types": 2 * ["conv", "conv", "full_attention"]}),
    "qwen3_next-deep": (
        "qwen3_next",
        {"num_hidden_layers": 6, "layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"]},
    ),
    # every other layer looks where the one before did; and an indexer that hides nothing of a prompt
    "glm_moe_dsa-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
    "deepseek_v32-released": ("deepseek_v32", {"index_topk": 2048}),
    # a mixer and an indexer, which rotates its keys when it looks
    "qwen4-both": ("qwen4_exp_text", {"layer_types": ["linear_attention", "indexed_attention"] * 2}),
    "lfm2-half": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}
generated, as_stock = (partial(one, max_new_tokens=5) for one in (asking.generated, asking.as_stock))
TELLING = ("ratio_1_batch", "fused_ratio", "causality")


@cache
def subject_of(name):
    kind, fields = VARIANTS.get(name, (name, {}))
    if kind in INDEXED:
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    model = tiny_model(kind, **fields)
    if not getattr(model, "_supports_sdpa", True):
        model.set_attn_implementation("eager")
    return ModelUnderTest(model)


def measured(name, rungs):
    subject = subject_of(name)
    return [measure(rung, subject, "float32", subject.model.config._attn_implementation) for rung in rungs]


def failing(name, rungs):
    found = measured(name, rungs)
    return [(rung.name, rung.max_abs_error, rung.tolerance, rung.detail) for rung in found if not rung.passed]


def pieces(seed=0, lengths=(12, 9, 14), question=6):
    draw = torch.Generator().manual_seed(seed)
    ids = lambda count: torch.randint(8, 128, (count,), generator=draw).tolist()  # noqa: E731
    return {"prefix": [1, *ids(3)], "chunks": [ids(count) for count in lengths], "question": ids(question)}


@contextmanager
def poisoned_memory():
    """What nobody wrote is NaN, and not by chance what was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("lfm2-deep", TELLING),
        ("deepseek_v32", ("fused_ratio",)),
        ("hy_v4", ("fused_ratio",)),  # several streams of rows, and layers that look where an earlier one did
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in (*FAST, *SLOW, *INDEXED, *VARIANTS)),
    ],
)
def test_ladder_of_a_hybrid_holds(name, rungs):
    """Also in a padded batch, and against the dense forward with stale tokens."""
    if rungs is None:
        rungs = CHECKS if any(subject_of(name).mixers) else (*CHECKS, "prefix_cache", "question_is_fresh")
    with poisoned_memory():
        assert failing(name, rungs) == []


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("bamba", marks=pytest.mark.slow)])
def test_exact_tokens_may_be_a_single_one_of_whose_projections_some_are_stored(name):
    model, request = subject_of(name).model, {**pieces(), "prefix": [1]}
    cache, inputs = prepared(model, request, recompute_ratio=1.0, chunk_prefix_ids=(1, 3))
    with poisoned_memory():
        got = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
    assert cache.report.exact_tokens == 1
    assert torch.allclose(got, model(inputs["input_ids"], logits_to_keep=1).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["lfm2", "minimax"])
def test_question_is_fresh_is_not_judged_where_a_scan_cannot_be_cut(name):
    found = measured(name, ("prefix_cache", "question_is_fresh"))
    assert [rung.passed for rung in found] == [True, None]
    assert "mixers" in found[1].detail


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3_next", {}),
        ("lfm2", {"num_beams": 3}),
        ("minimax", {"do_sample": True, "num_return_sequences": 2}),
        ("deepseek_v32", {"num_beams": 3}),
        pytest.param("qwen4-both", {"num_beams": 3}, marks=pytest.mark.slow),
    ],
)
def test_generate_behind_a_blend_goes_on_as_stock(name, how):
    model = subject_of(name).model
    blended, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    outputs = []
    for cache_ in (blended, None):
        torch.manual_seed(0)
        outputs.append(generated(model, inputs, cache_, **how))
    assert torch.equal(*outputs)
    assert blended.report.reusable_tokens >= 35


@pytest.mark.parametrize("name", ["deepseek_v32", pytest.param("qwen4-both", marks=pytest.mark.slow)])
def test_chunks_behind_a_history_are_blended_beside_an_indexer(name):
    model = subject_of(name).model
    blended, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    first = generated(model, inputs, blended)
    as_stock(model, blended.inputs(None, **{**pieces(seed=3), "prefix": None}, history=first), blended)
    assert blended.report.reusable_tokens == 35


@pytest.mark.parametrize("name", ["qwen3_next", *(pytest.param(one, marks=pytest.mark.slow) for one in FAST[1:])])
def test_inputs_from_messages_go_on_in_the_cache_of_a_hybrid(name):
    tokenizer = small_tokenizer("spaces")
    model = tiny_model(name, vocab_size=len(tokenizer), max_position_embeddings=2048)
    blended = BlendCache(model, memory(), recompute_ratio=1.0)
    messages = [{"role": "user", "content": DOCUMENTS[0]}]
    for said in ("It is slow.", "Why?"):
        given = {"chat_template": CHATML, "add_generation_prompt": True}
        inputs = blended.inputs_from_messages(tokenizer, messages, DOCUMENTS[:1], chat_template=CHATML)
        stock = tokenizer.apply_chat_template(messages, **given, return_dict=True, return_tensors="pt")
        assert torch.equal(inputs["input_ids"], stock["input_ids"])
        as_stock(model, inputs, blended)
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]


SELECTORS = [name for name in plugins.describe("selectors") if name != "explicit"]
HALVES = [(("lfm2-half", "deepseek_v32")[number % 2], name) for number, name in enumerate(SELECTORS)]


@pytest.mark.parametrize(
    ("name", "selector"),
    slow_but(*HALVES, among=itertools.product(("lfm2-half", "deepseek_v32", "qwen4-both"), SELECTORS)),
)
def test_every_selector_chooses_among_the_tokens_of_a_hybrid(name, selector):
    model = subject_of(name).model
    for ratio in (0.3, 1.0):
        blended, inputs = prepared(model, pieces(), recompute_ratio=ratio, selector=selector)
        got = prefill(model, inputs, blended)
        assert got.isfinite().all()
        if len(blended.report.chosen_columns[0]) == 35:
            assert torch.allclose(got, prefill(model, inputs), atol=1e-5)
    assert selector == "none" or len(blended.report.chosen_columns[0]) == 35


def test_selectors_of_attention_see_what_the_indexer_leaves(monkeypatch):
    subject, seen = subject_of("deepseek_v32"), []
    take = observing.AttentionObserver.take

    def taking(self, index, attention):
        seen.append((attention.weights(slice(None)) > 0).sum(dim=-1).amax().item())
        return take(self, index, attention)

    monkeypatch.setattr(observing.AttentionObserver, "take", taking)
    blended, inputs = prepared(subject.model, pieces(), recompute_ratio=0.3, selector="query-attention")
    prefill(subject.model, inputs, blended)
    assert max(seen) == subject.model.config.index_topk < min(len(prompt.ids) for prompt in subject.prompts)


@pytest.mark.parametrize("name", [*FAST, "jamba", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_ignores_states_finds_code_that_computes_several_tokens_as_if_none_were_before_them(name):
    model = tiny_model(name)
    assert ignores_states(model) == (name in ("jamba", "zamba"))


@pytest.mark.parametrize("name", ["jamba", pytest.param("zamba", marks=pytest.mark.slow)])
def test_further_prompt_is_refused_where_the_model_would_ignore_the_state(name):
    model = tiny_model(name)
    cache, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    first = generated(model, inputs, cache)
    more, words = torch.cat((first, torch.tensor([[7, 9, 11]])), dim=1), f"the code of {name} models takes the states"
    again = cache.inputs(None, prefix=[], chunks=[], question=[7, 9, 11], history=first)
    for given in ({"input_ids": more}, again):
        with pytest.raises(ConfigError, match=words):
            generated(model, given, cache)
    cache.reset()
    as_stock(model, {"input_ids": more}, cache)


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v32"])
def test_cache_of_a_hybrid_can_be_reset_and_copied_and_cropped_where_it_keeps_keys_alone(name):
    model = subject_of(name).model
    blended, logits = BlendCache(model, memory(), recompute_ratio=0.3), []

    def step(one):
        return model(torch.tensor([[9, 17]]), past_key_values=one, use_cache=True).logits

    with torch.no_grad():
        for _ in range(2):
            logits.append(prefill(model, blended.inputs(None, **pieces()), blended))
            twin = copy.deepcopy(blended)
            first = step(blended)
            assert torch.equal(first, step(twin))
            if name == "qwen3_next":
                with pytest.raises(ConfigError, match="whose state holds"):
                    blended.crop(-1)
                blended.crop(0)
            else:
                blended.crop(-2)
                assert blended.get_seq_length() == 45
                assert torch.equal(first, step(blended))
            blended.reset()
            assert blended.get_seq_length() == 0
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("name", "has_past", "bits"),
    [("qwen3_next", False, None), ("deepseek_v32", True, None), ("deepseek_v32", True, 8), ("falcon_h1", False, None)],
)
def test_forward_that_fails_leaves_states_and_indexer_keys_as_they_were(name, has_past, bits):
    model, store, found = subject_of(name).model, memory(), []

    @observer
    def fail(*_):
        raise KeyError("on purpose")

    for fails in (None, False, True):  # the first fills the store
        blended, inputs = prepared(model, pieces(), store=store, recompute_ratio=0.3, kv_bits=bits)
        if has_past:
            said = generated(model, inputs, blended)
            inputs = blended.inputs(None, **{**pieces(seed=3), "prefix": None}, history=said)
        rest = inputs["input_ids"][:, blended.get_seq_length() :]
        if fails:
            hook = model.model.layers[2].register_forward_hook(fail)
            with hook, pytest.raises(KeyError, match="on purpose"), torch.no_grad():
                model(rest, past_key_values=blended, use_cache=True, logits_to_keep=1)
            assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.model.layers.modules())
        with torch.set_grad_enabled(fails is None):
            blended.get_seq_length()
            found.append(model(rest, past_key_values=blended, use_cache=True, logits_to_keep=1).logits)
        assert blended.report.reusable_tokens == 35
    assert torch.equal(*found[1:])


def test_mixers_keep_only_what_another_token_feels():
    model = subject_of("qwen3_next").model
    config, (first, *_) = model.config, mixers_of(model)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    assert first.width == 2 * keys + values + 2 * config.linear_num_value_heads  # without the gate, as wide as values
    out = next(one for one in first.projections if one.module is first.module.out_proj)
    assert out.width == 0


@pytest.mark.parametrize(("name", "states"), [("lfm2", [1, 1, 2, 1]), ("glm_moe_dsa-shared", [3, 2, 3, 2])])
def test_store_gives_projections_and_indexer_keys_back_as_they_were(name, states, tmp_path):
    subject, ids = subject_of(name), tuple(range(20, 33))
    chunk = subject.chunk(ids)
    with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
        store.put(chunk)
        back = store.get(ChunkKey(chunk.key.fingerprint, subject.chunk_prefix_ids, ids))
    assert [len(layer) for layer in back.layers] == states
    assert back.layout == chunk.layout
    pairs = zip(chunk.named_tensors(), back.named_tensors(), strict=True)
    assert all(one == other and torch.equal(a, b) for (one, a), (other, b) in pairs)


@pytest.mark.parametrize("name", ["lfm2-deep", pytest.param("qwen3_next-deep", marks=pytest.mark.slow)])
def test_chunk_found_damaged_inside_a_mixer_is_computed_and_changes_nothing(name, tmp_path, monkeypatch):
    """A chunk is then computed by a forward of the same modules, in the middle of the one that asks for it."""
    monkeypatch.setattr("hf_blend.store.stream.READ_BYTES", 0)  # a layer at a time, each when it is used
    model, layers = subject_of(name).model, range(6)

    def logits():
        with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store, torch.no_grad():
            store.pipeline_depth = 1e-9
            cache = BlendCache(model, store, recompute_ratio=0.3)
            given = cache.inputs(None, **pieces())
            return model(**given, past_key_values=cache, logits_to_keep=1).logits, cache.report.computed_chunks

    logits()
    expected, computed = logits()
    assert computed == 0
    sound = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for layer in layers:
        for path, content in sound.items():
            _, last = next(at for name, at in tensors_of(content).items() if re.search(rf"\b{layer}\b", name))
            path.write_bytes(content[: last - 1] + bytes([content[last - 1] ^ 1]) + content[last:])
        got, computed = logits()
        assert torch.equal(got, expected), layer
        assert computed == len(sound), layer


def test_rotary_styles_of_an_indexer_are_its_own():
    assert [style.beside.__name__ for style in rotary_styles(subject_of("deepseek_v32").model)] == ["Half"] * 4
    shared = subject_of("glm_moe_dsa-shared").model
    assert [style.beside is None for style in rotary_styles(shared)] == [False, True] * 2
    full = subject_of("dots3_note_text").model  # in bfloat16 it keeps its indexer's keys in float32
    assert {style.__name__ for style in rotary_styles(tiny_model("dots3_note_text").bfloat16())} == {
        style.__name__ for style in rotary_styles(full)
    }


def test_what_a_mixer_or_an_indexer_does_not_allow_is_refused_by_name():
    subject = subject_of("deepseek_v32")
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(LinearAttention\)"):
        SequenceCache(subject_of("qwen3_next").model)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(Indexed\)"):
        SequenceCache(subject.model)
    with pytest.raises(ConfigError, match="layers are all of the kind LinearAttentionAndFullAttentionLayer"):
        BlendCache(subject_of("falcon_h1").model, memory(), kv_bits=8)
    blended = BlendCache(subject.model, memory())
    with pytest.raises(UnsupportedModelError, match="by an indexer"), sparse_decoding(subject.model, blended):
        pass


def test_without_the_room_other_models_are_blended_and_hybrids_are_refused(monkeypatch):
    monkeypatch.setattr(anatomy, "layer_extensions", list)
    with pytest.raises(UnsupportedModelError, match="state of another kind"):
        BlendCache(tiny_model("lfm2"), ChunkStore.open("memory://"))
    assert subject_of("llama").blend(subject_of("llama").prompts[:1], 0.3).cache.report.reusable_tokens


def test_mixers_of_refuses_a_mixer_that_keeps_other_projections_of_some_rows(monkeypatch):
    run_rows, model = mixer_probe._passed, tiny_model("lfm2")

    def spoilt(model, call, run, hidden, cache):
        output = run_rows(model, call, run, hidden, cache)
        if hidden.shape[1] < mixer_probe.TOKENS:
            run.states += 1
        return output

    monkeypatch.setattr(mixer_probe, "_passed", spoilt)
    with pytest.raises(UnsupportedModelError, match="its projections of some rows are not those of a plain forward"):
        mixers_of(model)


def test_restore_of_a_mixers_snapshot_may_be_done_again():
    one, layer = torch.ones(1, 2, 3, 3), MixerLayer()
    layer.update_recurrent_state(one.clone())
    snapshot = layer.snapshot()
    for times in (2, 3):
        layer.update_recurrent_state(times * one)
        layer.restore(snapshot)
        assert torch.equal(layer.recurrent_states[0], one)
        layer.recurrent_states[0].zero_()  # as a kernel writes it


def test_a_selector_is_given_keys_where_the_mixer_beside_the_attention_ran_first(pieces, monkeypatch):
    model, found = tiny_model("falcon_h1"), []
    score = KvDeviation.score
    monkeypatch.setattr(KvDeviation, "score", lambda self, view: found.append(view.pair(0)) or score(self, view))
    prefilled(model, pieces(), selector="kv-deviation", recompute_ratio=0.3)
    heads = model.config.num_key_value_heads
    assert [(fresh.shape[1], stored.shape[1]) for fresh, stored in found[-1:]] == [(heads, heads)]

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Indexed attention: each layer looks at the few tokens that its indexer chose, by keys of its own."""

import copy
from functools import cache

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, ConfigError, UnsupportedModelError, observer, plugins
from hf_blend.cache.indexed_layer import IndexedLayer
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model.calibrate import rotary_styles
from hf_blend.prefill import probing
from hf_blend.prefill.blend import Prefill
from hf_blend.prefill.realign import Realigner
from hf_blend.prefill.rows import Rows
from hf_blend.sparse.decoding import sparse_decoding
from hf_blend.sparse.partial.blocked import encode_blocks
from hf_blend.store.chunk import ChunkKey
from hf_blend.verify.everything import RUNGS
from hf_blend.verify.ladder import measure
from hf_blend.verify.subject import ModelUnderTest
from hf_blend.verify.zoo import tiny_model

SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}  # every other layer looks where the one before did
RELEASED = {"index_topk": 2048}  # more than any prompt here: the indexer hides nothing
FAST = ("kv-deviation", "query-attention")  # selectors
SLOW = (
    ("axk2", {}), ("deepseek_v32", {}), ("deepseek_v32", RELEASED), ("dots3_note", {}), ("dots3_note_text", {}),
    ("glm_moe_dsa", {}), ("glm_moe_dsa", SHARED), ("hy_v4", {}), ("qwen4_exp", {}), ("qwen4_exp_text", {}),
)  # fmt: skip


@cache
def subject_of(name="deepseek_v32", **fields):
    model = tiny_model(name, **{key: list(value) for key, value in fields.items()})
    if not getattr(model, "_supports_sdpa", True):
        model.set_attn_implementation("eager")
    return ModelUnderTest(model)


def rungs_of(subject, names):
    return [measure(name, subject, "float32", subject.model.config._attn_implementation) for name in names]


def failing(subject, names):
    failed = (one for one in rungs_of(subject, names) if not one.passed)
    return [(one.name, one.max_abs_error, one.tolerance, one.detail) for one in failed]


def pieces(seed=0, lengths=(12, 9, 14), question=6):
    draw = torch.Generator().manual_seed(seed)
    ids = lambda count: torch.randint(8, 128, (count,), generator=draw).tolist()  # noqa: E731
    return {"prefix": [1, *ids(3)], "chunks": [ids(count) for count in lengths], "question": ids(question)}


def with_both(test):
    """With an indexer whose keys are rotated when they are made, and with one that rotates them when it looks."""
    names = ["deepseek_v32", pytest.param("qwen4_exp_text", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("name", names)(test)


def model_of(name):
    fields = {"layer_types": ("linear_attention", "indexed_attention") * 2} if name == "qwen4_exp_text" else {}
    return subject_of(name, **fields).model


def prefill(model, **settings):
    blended = BlendCache(model, ChunkStore.open("memory://"), **settings)
    inputs = blended.inputs(None, **pieces())
    with torch.no_grad():
        logits = model(**inputs, past_key_values=blended, use_cache=True, logits_to_keep=1).logits
        plain = model(**inputs, use_cache=False).logits[:, -1:]
    return blended, logits, plain


def test_a_model_with_an_indexer_equals_the_dense_forward_with_stale_tokens():
    subject = subject_of()
    assert subject.model.config.index_topk < min(len(prompt.ids) for prompt in subject.prompts)
    assert failing(subject, ("fused_ratio",)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), SLOW)
def test_a_model_with_an_indexer_climbs_the_ladder(name, fields):
    model = tiny_model(name, **fields)
    if not getattr(model, "_supports_sdpa", True):
        model.set_attn_implementation("eager")
    subject = ModelUnderTest(model)
    assert failing(subject, RUNGS if any(subject.mixers) else (*RUNGS, "prefix_cache", "question_is_fresh")) == []


def keys_of_the_indexer_unmoved(monkeypatch):
    monkeypatch.setattr(Realigner, "_turn_beside", lambda *_: None)


def keys_of_the_indexer_missing(monkeypatch):
    monkeypatch.setattr(Realigner, "lay_projections", lambda *_: None)


def stored_keys_at_the_check_layer(monkeypatch):
    parts = Prefill._parts
    monkeypatch.setattr(Prefill, "_parts", lambda self, index: parts(self, index) - {"indexer"})


def choice_of_the_indexer_forgotten(monkeypatch):
    monkeypatch.setattr("hf_blend.prefill.blend.has_indexer", lambda _: False)


def table_of_the_first_tokens(monkeypatch):
    behind = Rows.behind
    monkeypatch.setattr(Rows, "behind", lambda self, *given: behind(self, *given).roll(1, 1))


def fresh_keys_not_written(monkeypatch):
    update = Prefill.update_indexer

    def without_the_first(self, index, keys):
        found = update(self, index, keys)
        if self._rows is not None:
            self._indexed[index].scatter_(1, self._rows.columns[:, :4, None].expand(-1, -1, keys.shape[-1]), 0.0)
        return found

    monkeypatch.setattr(Prefill, "update_indexer", without_the_first)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("deepseek_v32", keys_of_the_indexer_unmoved),
        ("deepseek_v32", stored_keys_at_the_check_layer),
        pytest.param("deepseek_v32", choice_of_the_indexer_forgotten, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", fresh_keys_not_written, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", keys_of_the_indexer_missing, marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", keys_of_the_indexer_missing, marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", fresh_keys_not_written, marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", table_of_the_first_tokens, marks=pytest.mark.slow),
    ],
)
def test_the_ladder_fails_where_an_indexer_is_fed_wrongly(name, mistake):
    subject = subject_of(name)
    assert subject.floor
    subject.cache(0.0)  # measured and trusted before anything is broken
    with pytest.MonkeyPatch.context() as monkeypatch:
        mistake(monkeypatch)
        assert any(not one.passed and one.tolerance is not None for one in rungs_of(subject, ("fused_ratio",)))


def test_unchosen_tokens_have_the_stored_keys_of_the_indexer_as_the_model_makes_them_there():
    subject = subject_of()
    got = subject.blend(subject.prompts[:1], 0.3)
    chosen = set(got.cache.report.chosen_columns[0])
    for start, ids, *_ in subject.prompts[0].spans():
        realigned = got.cache.layers[3].indexer_keys[0, start : start + len(ids)]
        stored = subject.chunk(ids).layers[3][2][0]
        home = len(subject.chunk_prefix_ids)
        old, new = ([part[0].float() for part in subject.tables_at(at, len(ids))[3]] for at in (home, start))
        kept = [start + at not in chosen for at in range(len(ids))]
        width = old[0].shape[-1]
        assert torch.equal(realigned[kept, width:], stored[kept, width:])  # what does not turn
        first, second = (turned_back(one[:, :width], *table) for one, table in ((realigned, new), (stored, old)))
        assert torch.allclose(first[kept], second[kept], atol=1e-5)
        assert not torch.allclose(realigned[kept, :width], stored[kept, :width], atol=1e-2)


def turned_back(keys, cos, sin):
    one, other = keys.chunk(2, dim=-1)
    cos, sin = (part[:, : one.shape[-1]] for part in (cos, sin))
    return torch.cat((one * cos + other * sin, other * cos - one * sin), dim=-1)


@with_both
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_decoding_behind_a_blend_goes_on_as_stock(name, how):
    model = model_of(name)
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    inputs = blended.inputs(None, **pieces())
    given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **how}
    torch.manual_seed(0)
    got = model.generate(**inputs, past_key_values=blended, **given)
    torch.manual_seed(0)
    assert torch.equal(got, model.generate(**inputs, **given))
    assert blended.report.reusable_tokens >= 35


@with_both
def test_chunks_behind_a_conversation_are_blended_as_in_a_full_prefill(name):
    model = model_of(name)
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    first = model.generate(**blended.inputs(None, **pieces()), past_key_values=blended, **given)
    inputs = blended.inputs(None, **{**pieces(seed=3), "prefix": None}, history=first)
    got = model.generate(**inputs, past_key_values=blended, **given)
    assert blended.report.reusable_tokens == 35
    assert torch.equal(got, model.generate(**inputs, **given))


@with_both
@pytest.mark.parametrize(
    "selector",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in plugins.describe("selectors")
        if name not in ("explicit", "learned")
    ],
)
def test_every_selector_chooses_among_the_tokens_of_a_model_with_an_indexer(name, selector):
    model = model_of(name)
    for ratio in (0.3, 1.0):
        blended, got, plain = prefill(model, recompute_ratio=ratio, selector=selector)
        assert got.isfinite().all()
        if len(blended.report.chosen_columns[0]) == 35:
            assert torch.allclose(got, plain, atol=1e-5)
    assert selector == "none" or len(blended.report.chosen_columns[0]) == 35


def test_a_selector_that_looks_at_attention_sees_what_the_indexer_leaves(monkeypatch):
    subject, seen = subject_of(), []
    take = probing.AttentionObserver.take

    def taking(self, index, attention):
        seen.append((attention.weights(slice(None)) > 0).sum(dim=-1).amax().item())
        return take(self, index, attention)

    monkeypatch.setattr(probing.AttentionObserver, "take", taking)
    prefill(subject.model, recompute_ratio=0.3, selector="query-attention")
    assert seen
    assert max(seen) == subject.model.config.index_topk


def test_a_cache_with_an_indexer_can_be_cropped_reset_and_copied():
    model = subject_of().model
    blended, *_ = prefill(model, recompute_ratio=0.3)

    def step(one, ids):
        with torch.no_grad():
            return model(torch.tensor([ids]), past_key_values=one, use_cache=True).logits

    twin = copy.deepcopy(blended)
    first = step(blended, [9, 17])
    assert torch.equal(first, step(twin, [9, 17]))
    blended.crop(-2)
    assert all(layer.indexer_keys.shape[1] == layer.length == 45 for layer in blended.layers)
    assert torch.equal(first, step(blended, [9, 17]))
    blended.reset()
    assert all(layer.indexer_keys is None for layer in blended.layers)


def test_a_forward_that_fails_leaves_the_keys_of_the_indexer_as_they_were():
    model = subject_of().model
    blended, *_ = prefill(model, recompute_ratio=0.3)
    before = [layer.indexer_keys.clone() for layer in blended.layers]

    @observer
    def fail(*_):
        raise KeyError("on purpose")

    handle = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"), torch.no_grad():
        model(**blended.inputs(None, **pieces(seed=1)), past_key_values=blended, use_cache=True, logits_to_keep=1)
    handle.remove()
    assert all(torch.equal(layer.indexer_keys, one) for layer, one in zip(blended.layers, before, strict=True))


def test_the_keys_of_an_indexer_come_back_from_disk_as_they_were_stored(tmp_path):
    subject, ids = subject_of("glm_moe_dsa", indexer_types=tuple(SHARED["indexer_types"])), tuple(range(20, 33))
    chunk = subject.chunk(ids)
    with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
        store.put(chunk)
        back = store.get(ChunkKey(chunk.key.fingerprint, subject.chunk_prefix_ids, ids))
    assert [len(layer) for layer in back.layers] == [3, 2, 3, 2]
    pairs = zip(chunk.named_tensors(), back.named_tensors(), strict=True)
    assert all(one == other and torch.equal(a, b) for (one, a), (other, b) in pairs)


def test_the_style_of_an_indexer_is_its_own():
    assert [style.beside.__name__ for style in rotary_styles(subject_of().model)] == ["Half"] * 4
    shared = subject_of("glm_moe_dsa", indexer_types=tuple(SHARED["indexer_types"])).model
    assert [style.beside is None for style in rotary_styles(shared)] == [False, True] * 2


def test_what_an_indexer_does_not_allow_is_refused_by_name():
    model = subject_of().model
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(Indexed\)"):
        SequenceCache(model)
    with pytest.raises(ConfigError, match="layers are all of the kind DynamicIndexedLayer"):
        BlendCache(model, ChunkStore.open("memory://"), kv_bits=8)
    blended = BlendCache(model, ChunkStore.open("memory://"))
    assert all(isinstance(layer, IndexedLayer) for layer in blended.layers)
    with pytest.raises(UnsupportedModelError, match="chooses by an indexer"), sparse_decoding(model, blended):
        pass
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of chunk .* has k, v, p"):
        encode_blocks(subject_of().chunk(range(20, 33)), range(13), 8)

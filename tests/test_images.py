# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Images: two of them behind equal ids are never taken for each other, and what is text around them is still reused.

The oracle is the stock model with a `DynamicCache`, run once with each image.
"""

import functools
import inspect
import logging

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from hf_blend import BlendCache, ChunkStore, PromptError, UnsupportedModelError
from hf_blend.context.reuse import fit
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model.capture import capture_chunk
from hf_blend.model.fingerprint import fingerprint
from hf_blend.model.modality import has_features, other_inputs, placeholder_ids
from hf_blend.prefill.blend import Prefill
from hf_blend.prefill.choice import FullPrefill
from hf_blend.prefill.input_test import InputTest
from hf_blend.prefill.probing import AttentionObserver
from hf_blend.prefill.rows import Rows
from hf_blend.store.chunk import ChunkKey
from hf_blend.verify import image_zoo
from hf_blend.verify.image_zoo import tiny_image_model
from tests.conftest import slow_but
from tests.image_models import (
    CHUNKS,
    END,
    FAST,
    FLOOR,
    IMAGE,
    KINDS,
    PREFIX,
    QUESTION,
    START,
    VIDEO,
    _build,
    arguments,
    blend,
    build,
    filled,
    gap,
    grid,
    picture,
    plain,
    prompt,
    stock,
)

EXACT = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "paligemma"]


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", EXACT)
def test_ratio_1_with_an_image_equals_stock(kind, attention, tokenizer):
    model, store, ids = (
        build(kind, attention),
        filled(kind, attention),
        prompt(kind, CHUNKS[0], picture(kind), *CHUNKS[1:]),
    )
    for seed in (0, 1):
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(
            tokenizer, prefix=PREFIX, chunks=[CHUNKS[0], picture(kind), *CHUNKS[1:]], question=QUESTION
        )
        assert inputs["input_ids"].tolist() == ids.tolist()
        given = arguments(kind, ids, seed)
        with torch.no_grad():
            cache.get_seq_length()
            got = model(**inputs, **given, past_key_values=cache, logits_to_keep=1, use_cache=True).logits[:, -1]
        assert gap(got, stock(kind, ids, seed, attention)[0]) < FLOOR
        assert cache.report.reusable_tokens == sum(map(len, CHUNKS))
        assert cache.report.exact_tokens == len(PREFIX)
    assert len(store) == len(CHUNKS) + 1  # and the prefix


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_an_image_in_front_of_reused_text_has_the_kv_of_stock(kind, ratio):
    store, n = filled(kind), len(picture(kind))
    ids = prompt(kind, picture(kind), *CHUNKS)
    image = slice(len(PREFIX), len(PREFIX) + n)
    answers, wanted_answers = [], []
    for seed in (0, 1):
        logits, cache = blend(kind, ids, seed, store, recompute_ratio=ratio)
        wanted_logits, true_cache = stock(kind, ids, seed)
        answers.append(logits)
        wanted_answers.append(wanted_logits)
        for layer, true in zip(cache.layers, true_cache.layers, strict=True):
            start = ids.shape[1] - layer.keys.shape[2]  # 0, unless a window forgot it
            for got, wanted in ((layer.keys, true.keys), (layer.values, true.values)):
                if not start:
                    assert gap(got[:, :, image], wanted[:, :, image]) < FLOOR
        assert cache.report.loaded_chunks == len(CHUNKS)
        assert not cache.report.refused_chunks
    assert min(gap(*answers), gap(*wanted_answers)) > 5 * FLOOR
    assert len(store) == len(CHUNKS)


@pytest.mark.parametrize(
    "selector",
    [
        "none",
        "boundary",
        "random",
        "kv-deviation",
        "auto",
        "oracle",
        "dependency",
        "query-attention",
        "inter-attention",
    ],
)
@pytest.mark.parametrize("ratio", slow_but(0.15, among=[0.0, 0.15, 1.0]))
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_two_images_behind_equal_ids_give_the_answers_of_two_images(kind, ratio, selector):
    store, ids = filled(kind), prompt(kind, CHUNKS[0], picture(kind), *CHUNKS[1:])
    got = [blend(kind, ids, seed, store, recompute_ratio=ratio, selector=selector)[0] for seed in (0, 1)]
    true = [stock(kind, ids, seed)[0] for seed in (0, 1)]
    assert gap(*got) > 0.25 * gap(*true)
    if ratio == 1.0 and selector != "none":
        assert max(map(gap, got, true)) < FLOOR


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_what_a_selector_looks_at_has_the_image_in_it(kind, monkeypatch):
    store, ids, looked = filled(kind), prompt(kind, picture(kind), *CHUNKS), []
    true_take = AttentionObserver.take
    monkeypatch.setattr(
        AttentionObserver,
        "take",
        lambda self, index, seen: looked.append((index, seen.keys)) or true_take(self, index, seen),
    )
    for selector in ("query-attention", "dependency"):
        blend(kind, ids, 1, store, selector=selector, selector_options={"layers": "0"})
    true = stock(kind, ids, 1)[1].layers
    keys = [keys for index, keys in looked if index == 0]
    assert len(keys) == 2
    assert max(gap(one, true[0].keys) for one in keys) < FLOOR
    full = FullPrefill(build(kind), "oracle", ids, None, 0, {"input_ids": ids, **arguments(kind, ids, 1)})()
    assert max(gap(one[0], two.keys) for one, two in zip(full.layers, true, strict=True)) == 0


@pytest.mark.parametrize("kind", FAST)
def test_generate_with_an_image_writes_what_stock_writes(kind, tokenizer, untouched):
    model, store = build(kind), filled(kind)
    stock(kind, prompt(kind, picture(kind)), 0)  # at its first image a model hooks its eyes itself
    with untouched(model):
        for seed in (0, 1):
            cache = BlendCache(model, store, recompute_ratio=1.0)
            inputs = cache.inputs(tokenizer, prefix=PREFIX, chunks=[*CHUNKS, picture(kind)], question=QUESTION)
            given = {**inputs, **arguments(kind, inputs["input_ids"], seed), "max_new_tokens": 8, "do_sample": False}
            assert model.generate(**given, past_key_values=cache).equal(model.generate(**given))


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_text_behind_a_turn_with_an_image_is_reused(kind, tokenizer):
    model, store = build(kind), filled(kind)
    caches = BlendCache(model, store, recompute_ratio=1.0), DynamicCache(config=model.config.get_text_config())
    options = {"max_new_tokens": 4, "do_sample": False}
    first = caches[0].inputs(tokenizer, prefix=PREFIX, chunks=[picture(kind), CHUNKS[0]], question=QUESTION)
    given = {**first, **arguments(kind, first["input_ids"], 0), **options}
    turns = [model.generate(**given, past_key_values=cache) for cache in caches]
    second = caches[0].inputs(tokenizer, prefix=None, chunks=CHUNKS[1:], question=QUESTION, history=turns[0])
    answers = [model.generate(**second, **options, past_key_values=cache) for cache in caches]
    assert turns[0].equal(turns[1])
    assert answers[0].equal(answers[1])
    assert caches[0].report.loaded_chunks == len(CHUNKS[1:])


@pytest.mark.parametrize("kind", FAST)
def test_generate_with_text_alone_reuses_it(kind, tokenizer):
    cache = BlendCache(build(kind), filled(kind), recompute_ratio=0.0, selector="none")
    inputs = cache.inputs(tokenizer, prefix=PREFIX, chunks=CHUNKS, question=QUESTION)
    build(kind).generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.report.loaded_chunks == len(CHUNKS)
    assert cache.report.reusable_tokens == sum(map(len, CHUNKS))


@pytest.mark.parametrize("kind", FAST)
def test_a_batch_with_images_and_padding_equals_stock(kind):
    store = filled(kind)
    rows = [
        [*PREFIX, *CHUNKS[0], *picture(kind), *QUESTION],
        [*PREFIX, *picture(kind), *CHUNKS[1], *CHUNKS[2], *QUESTION],
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    given = {"attention_mask": mask}
    if kind in ("llava", "gemma3"):
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    wanted, _ = stock(kind, ids, 0, **given)
    got, cache = blend(kind, ids, 0, store, given=given, recompute_ratio=1.0)
    assert gap(got, wanted) < FLOOR
    assert cache.report.reusable_tokens == sum(map(len, CHUNKS))


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2_vl", "qwen2_5_vl", "glm4v"))]
)
def test_text_behind_an_image_is_rotated_for_the_models_own_positions(kind):
    ids = prompt(kind, picture(kind), *CHUNKS)
    _, cache = blend(kind, ids, 0, filled(kind), recompute_ratio=0.0, selector="none")
    true = stock(kind, ids, 0)[1].layers[0]
    other = stock(kind, ids, 0, position_ids=torch.arange(ids.shape[1])[None])[1].layers[0]
    assert cache.report.reusable_tokens == sum(map(len, CHUNKS))
    assert gap(cache.layers[0].keys, true.keys) < FLOOR
    assert gap(cache.layers[0].values, true.values) < FLOOR
    assert gap(other.keys, true.keys) > 0.1  # columns are not positions here: the image takes fewer of them


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_ratio_1_with_a_video_equals_stock(kind):
    model, store = build(kind), filled(kind)
    ids = prompt(kind, CHUNKS[0], [START, *[VIDEO] * 4, END], *CHUNKS[1:])
    for seed in (0, 1):
        frames = grid(seed)
        given = {
            "input_ids": ids,
            "pixel_values_videos": frames["pixel_values"],
            "video_grid_thw": frames["image_grid_thw"],
            "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        }
        cache = BlendCache(model, store, recompute_ratio=1.0)
        cache.get_seq_length()
        with torch.no_grad():
            got = model(**given, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            wanted = model(**given, past_key_values=DynamicCache()).logits[:, -1]
        assert gap(got, wanted) < FLOOR
        assert cache.report.loaded_chunks == len(CHUNKS)


def test_a_chunk_with_a_placeholder_is_computed_in_its_place_and_never_stored(tokenizer):
    model, store = build("llava"), filled("llava")
    for ids in ([*range(80, 90), *picture("llava")], [IMAGE] * 3):
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(tokenizer, prefix=[*PREFIX, IMAGE], chunks=[ids, CHUNKS[0]], question=QUESTION)
        cache.get_seq_length()
        with torch.no_grad():  # no pixels: the placeholders are text here
            got = model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            wanted = model(inputs["input_ids"], use_cache=False).logits[:, -1]
        assert gap(got, wanted) < FLOOR
        assert not store.contains(ChunkKey(fingerprint(model), (1,), tuple(ids)))
    assert len(store) == len(CHUNKS)


def test_what_others_stored_behind_a_placeholder_is_not_looked_up(monkeypatch):
    model, store, ids = build("llava"), filled("llava"), prompt("llava", picture("llava"), *CHUNKS)
    with monkeypatch.context() as patch:
        patch.setattr("hf_blend.model.modality.placeholder_ids", lambda config: frozenset())
        store.add(model, None, [picture("llava")])
    got = blend("llava", ids, 0, store, recompute_ratio=0.0, selector="none")[1]
    assert len(store) == len(CHUNKS) + 1
    assert got.report.loaded_chunks == len(CHUNKS)


def test_placeholders_that_no_config_names_show_at_layer_0(monkeypatch, caplog):
    for place in ("model.modality", "cache.blend_cache", "prefill.plan"):
        monkeypatch.setattr(f"hf_blend.{place}.placeholder_ids", lambda config: frozenset({START}))
    model, store, kind = build("llava"), filled("llava"), "llava"
    unnamed = [*range(80, 100), *[IMAGE] * 16, *range(80, 100)]
    store.add(model, None, [unnamed])
    ids = prompt(kind, [START], unnamed, *CHUNKS)
    answers = [blend(kind, ids, seed, store, recompute_ratio=0.0, selector="none") for seed in (0, 1)]
    assert [cache.report.refused_chunks for _, cache in answers] == [1, 1]
    assert gap(answers[0][0], answers[1][0]) > 1e-2


def test_inputs_without_a_placeholder_in_the_prompt_reuse_nothing(monkeypatch):
    monkeypatch.setattr("hf_blend.cache.blend_cache.placeholder_ids", lambda config: frozenset())
    ids = prompt("llava", CHUNKS[0], picture("llava"), *CHUNKS[1:])
    got, cache = blend("llava", ids, 1, filled("llava"), recompute_ratio=0.0, selector="none")
    assert gap(got, stock("llava", ids, 1)[0]) < FLOOR
    assert cache.report.loaded_chunks == 0


def test_store_add_names_the_placeholder():
    model, store = build("llava"), ChunkStore.open("memory://")
    with pytest.raises(PromptError, match=r"chunk 1 holds the placeholder token 120, where Llava.* computed in place"):
        store.add(model, None, [CHUNKS[0], [11, IMAGE, 12]])
    assert len(store) == 0
    with pytest.raises(PromptError, match="what stands before chunk 0 holds the placeholder token 120"):
        store.add(model, None, CHUNKS, chunk_prefix_ids=[1, IMAGE])
    with pytest.raises(PromptError, match="chunk_prefix_ids holds the placeholder token 120"):
        BlendCache(model, store, chunk_prefix_ids=(1, IMAGE))
    with pytest.raises(PromptError, match="a chunk holds the placeholder token 120"):
        capture_chunk(model, [IMAGE], [1], "")


def test_a_sequence_with_an_image_is_refused_and_not_fitted_to_another_prompt():
    model = build("llava")
    cache, ids = SequenceCache(model), prompt("llava", picture("llava"), *CHUNKS)
    with torch.no_grad(), cache:
        with pytest.raises(PromptError, match="pixel_values came with a SequenceCache, but text alone is expected"):
            model(ids, **plain(0), past_key_values=cache, logits_to_keep=1)
        model(ids, past_key_values=cache, logits_to_keep=1)
    with pytest.raises(PromptError, match="the cache holds the placeholder token 120"):
        fit(cache, ids[0].tolist())


def test_an_image_path_that_is_not_exact_is_refused_by_name_and_leaves_the_model_alone(monkeypatch, untouched):
    _build.cache_clear()  # what was found right stays so
    model, store = build("qwen3_vl"), filled("qwen3_vl")
    ids = prompt("qwen3_vl", picture("qwen3_vl"), *CHUNKS)
    deltas = model.model.rope_deltas
    with monkeypatch.context() as patch, untouched(model):
        patch.setattr(Prefill, "leave", lambda self, output: None)
        for _ in range(2):  # the second time from memory
            with pytest.raises(
                UnsupportedModelError, match=r"Qwen3VL.* cannot be blended with image_grid_thw, .*pixel"
            ):
                blend("qwen3_vl", ids, 0, store, recompute_ratio=1.0)
    assert model.model.rope_deltas is deltas
    _build.cache_clear()


def test_rows_put_back_to_wrong_places_are_refused(monkeypatch, caplog):
    _build.cache_clear()
    true_spread = Rows.spread
    monkeypatch.setattr(Rows, "spread", lambda self, rows, tokens: true_spread(self, rows, tokens).roll(1, -2))
    ids, store = prompt("qwen3_vl", picture("qwen3_vl"), *CHUNKS), filled("qwen3_vl")
    with pytest.raises(UnsupportedModelError, match="is off by"):
        blend("qwen3_vl", ids, 0, store)
    with caplog.at_level(logging.WARNING):
        _build.cache_clear()
        blend("qwen3_vl", ids, 0, filled("qwen3_vl"), allow_unverified=True)
    assert "without being verified (allow_unverified): Qwen3VL" in caplog.text
    _build.cache_clear()


def test_each_kind_of_forward_is_tested_once(monkeypatch):
    _build.cache_clear()
    tests, true_error = [], InputTest._error
    monkeypatch.setattr(InputTest, "_error", lambda *given: tests.append(1) or true_error(*given))
    store = filled("qwen2_5_vl")
    ids, text = prompt("qwen2_5_vl", picture("qwen2_5_vl"), *CHUNKS), prompt("qwen2_5_vl", *CHUNKS)
    for seed in (0, 1):
        blend("qwen2_5_vl", ids, seed, store)
    assert len(tests) == 1
    cache = BlendCache(build("qwen2_5_vl"), store)
    cache.get_seq_length()
    with torch.no_grad():  # what a processor makes of text alone
        build("qwen2_5_vl")(text, mm_token_type_ids=torch.zeros_like(text), past_key_values=cache, logits_to_keep=1)
    assert len(tests) == 1
    assert cache.report.loaded_chunks == len(CHUNKS)


def test_a_model_whose_text_sees_ahead_is_refused_by_name():
    with pytest.raises(
        UnsupportedModelError, match=r"PaliGemma.* cannot be blended: its tokens see those behind them"
    ):
        BlendCache(build("paligemma"), ChunkStore.open("memory://"))


def test_chunks_that_see_ahead_in_a_prompt_are_computed():
    ids, store = prompt("paligemma", picture("paligemma"), *CHUNKS), filled("paligemma", "eager")
    got, cache = blend("paligemma", ids, 0, store, "eager", recompute_ratio=0.0, selector="none")
    assert gap(got, stock("paligemma", ids, 0, "eager")[0]) < FLOOR
    assert cache.report.refused_chunks == len(CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "gemma3"])
def test_images_are_exact_in_bfloat16_too(kind):
    model, ids = build(kind, dtype=torch.bfloat16), prompt(kind, picture(kind), *CHUNKS)
    store = ChunkStore.open("memory://")
    store.add(model, None, CHUNKS)
    given = {
        name: part.bfloat16() if part.is_floating_point() else part for name, part in arguments(kind, ids, 0).items()
    }
    cache = BlendCache(model, store, recompute_ratio=1.0)
    cache.get_seq_length()
    with torch.no_grad():
        got = model(input_ids=ids, **given, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        wanted = model(input_ids=ids, **given, use_cache=False).logits[:, -1]
    assert gap(got.float(), wanted.float()) < 0.1


@pytest.mark.parametrize(
    ("given", "names", "features"),
    [
        ({"input_ids": 1, "attention_mask": torch.ones(1), "use_cache": True, "logits_to_keep": 1}, (), False),
        ({"pixel_values": torch.ones(1), "image_sizes": None}, ("pixel_values",), True),
        ({"mm_encoder_outputs": {"image": [torch.ones(1)]}, "x": [1]}, ("mm_encoder_outputs", "x"), True),
        ({"mm_encoder_outputs": {"image": None, "video": []}}, (), False),
        ({"mm_token_type_ids": torch.zeros(2)}, (), False),
        ({"mm_token_type_ids": torch.ones(2)}, ("mm_token_type_ids",), False),
        ({"token_type_ids": torch.zeros(2)}, ("token_type_ids",), False),
    ],
)
def test_whatever_is_not_known_as_text_counts_as_another_input(given, names, features):
    assert other_inputs(given) == names
    assert has_features(given) is features


@pytest.mark.slow
def test_the_placeholders_of_every_model_that_reads_images_are_found():
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    found = 0
    for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(kind)
        except (ImportError, TypeError, ValueError):
            continue
        names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "vision_start_token_id")
        ids = {value for name in names if isinstance(value := getattr(config, name, None), int) and value >= 0}
        assert placeholder_ids(config) >= ids, kind
        found += bool(ids)
    assert found > 60


def test_a_model_of_text_has_no_placeholders_and_lists_of_them_count():
    assert not placeholder_ids(AutoConfig.for_model("llama"))
    config = AutoConfig.for_model("ovis2")
    assert placeholder_ids(config) >= {config.image_token_id, *config.visual_indicator_token_ids}


@pytest.mark.parametrize("token", [0, 3])
def test_a_model_whose_image_token_is_among_the_first_ids_passes_its_self_test(token, monkeypatch):
    config = {**KINDS["llava"].config, "image_token_index": token}
    monkeypatch.setitem(image_zoo.KINDS, "llava", KINDS["llava"]._replace(config=config))
    assert BlendCache(tiny_image_model("llava"), ChunkStore.open("memory://")).model.config.image_token_id == token


def test_a_transformers_whose_models_take_no_encoded_images_is_refused_by_what_it_lacks(monkeypatch):
    model, ids = build("llava"), prompt("llava", picture("llava"), *CHUNKS)
    cache, forward = BlendCache(model, ChunkStore.open("memory://")), type(model).forward
    signature = inspect.signature(forward)  # transformers 5.17 lacks the argument
    others = [one for name, one in signature.parameters.items() if name != "mm_encoder_outputs"]
    older = functools.wraps(forward)(lambda *args, **given: forward(*args, **given))
    older.__signature__ = signature.replace(parameters=others)
    monkeypatch.setattr(type(model), "forward", older)
    with pytest.raises(UnsupportedModelError, match=r"lacks the argument mm_encoder_outputs .*5\.18 and newer"):
        cache.inputs_with_images(input_ids=ids, **arguments("llava", ids, 0))
    assert not cache.is_expecting

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Images in place and as chunks: known by what is in them, reused at any place, and never taken for one another.

The oracles are the stock model with a `DynamicCache`, run with each image, and a rotation written by hand from the
model's own positions.
"""

import logging

import pytest
import tiny_image_models
import torch
from families import broken, verify_image_types
from tiny_image_models import tiny_image_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, DynamicCache, PreTrainedTokenizerFast

from hf_blend import BlendCache, ChunkStore, PromptError, UnsupportedModelError, plugins
from hf_blend.context.reuse import blended
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.images import encoder as images
from hf_blend.images.encoder import ImageEncoder, digest_of
from hf_blend.images.extra_inputs import FirstForward
from hf_blend.images.prompts import name_images
from hf_blend.model.capture import capture_chunk, capture_forward
from hf_blend.model.fingerprint import fingerprint
from hf_blend.model.modality import has_features, other_inputs, placeholder_ids
from hf_blend.prefill.observing import AttentionObserver
from hf_blend.prefill.rows import Rows
from hf_blend.prompt.content import content_ids, is_content
from hf_blend.selectors.base import TokenView
from hf_blend.store.chunk import ChunkKey
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
    exact,
    filled,
    gap,
    needs_encoding,
    picture,
    prompt,
    stock,
)

TEXT_TOKENS = sum(map(len, CHUNKS))
SELECTORS = sorted({*plugins.describe("selectors")} - {"explicit", "compose"})
SLOW = pytest.mark.slow
ways = pytest.mark.parametrize("chunks", [False, pytest.param(True, marks=needs_encoding)])


@pytest.fixture
def fresh_models():
    """Models that nobody has tested yet, and none that was found wrong left behind."""
    _build.cache_clear()
    yield
    _build.cache_clear()


def towers_run(monkeypatch):
    """Counts the images that go through the vision tower."""
    runs, encode = [], ImageEncoder.encode
    monkeypatch.setattr(ImageEncoder, "encode", lambda self, image: runs.append(1) or encode(self, image))
    return runs


@pytest.mark.parametrize("kind", slow_but(*FAST, among=(*FAST, "qwen2_vl", "glm4v", "idefics3")))
def test_image_in_place_is_exact_at_ratio_1_and_has_the_kv_of_stock_at_any(kind):
    store, n = filled(kind), len(picture(kind))
    at = slice(len(PREFIX), len(PREFIX) + n)
    for seed in (0, 1):
        inputs = arguments(kind, picture(kind), *CHUNKS, seeds=(seed,))
        expected, true = stock(kind, inputs)
        for ratio in (0.0, 0.15, 1.0):
            got, cache = blend(kind, inputs, store, chunks=False, recompute_ratio=ratio)
            for layer, other in zip(cache.layers, true.layers, strict=True):
                if layer.keys.shape[2] == inputs["input_ids"].shape[1]:  # no window has forgotten it
                    assert gap(layer.keys[:, :, at], other.keys[:, :, at]) < FLOOR
                    assert gap(layer.values[:, :, at], other.values[:, :, at]) < FLOOR
            assert (cache.report.loaded_chunks, cache.report.refused_chunks) == (len(CHUNKS), 0)
            assert cache.report.reusable_tokens == TEXT_TOKENS
        assert gap(got, expected) < FLOOR
    assert len(store) == len(CHUNKS)


@needs_encoding
@pytest.mark.parametrize(("kind", "attention"), [*((kind, "sdpa") for kind in FAST), ("llava", "eager")])
def test_images_as_chunks_are_exact_at_ratio_1_and_computed_once(kind, attention, monkeypatch):
    store, text, runs = filled(kind, attention), CHUNKS, towers_run(monkeypatch)
    first = arguments(kind, text[0], picture(kind), picture(kind), *text[1:], seeds=(0, 1))
    moved = arguments(kind, picture(kind), *text[:2], picture(kind), text[2], seeds=(1, 0))
    for inputs, computed in ((first, 2), (moved, 0)):
        report = exact(kind, inputs, store, attention, recompute_ratio=1.0)
        assert report.computed_chunks == report.encoded_images == computed
        assert report.loaded_chunks == len(text) + 2 - computed
        assert report.reusable_tokens == TEXT_TOKENS + 2 * KINDS[kind].tokens
        assert not report.refused_chunks
    assert len(runs) == 2


@SLOW
def test_verify_image_types_finds_every_type_exact_refused_or_not_judged():
    assert [row["model"] for row in verify_image_types() if broken(row)] == []


@ways
@pytest.mark.parametrize("selector", SELECTORS)
def test_two_images_behind_equal_ids_give_the_answers_of_two_images(chunks, selector):
    kind, store = "llava", filled("llava")
    both = [arguments(kind, CHUNKS[0], picture(kind), *CHUNKS[1:], seeds=(seed,)) for seed in (0, 1)]
    true = [stock(kind, inputs)[0] for inputs in both]
    for ratio in (0.15, 1.0):
        got = [blend(kind, inputs, store, chunks=chunks, recompute_ratio=ratio, selector=selector) for inputs in both]
        assert gap(got[0][0], got[1][0]) > (0.1 if chunks else 0.25) * gap(*true)
        assert not chunks or {cache.report.computed_chunks for _, cache in got} == {int(ratio == 0.15)}
    if selector != "none":
        assert max(gap(one, other) for (one, _), other in zip(got, true, strict=True)) < FLOOR


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_selectors_see_attention_and_a_full_prefill_with_the_image_in_it(kind, monkeypatch):
    inputs, looked = arguments(kind, picture(kind), *CHUNKS, seeds=(1,)), []
    take = AttentionObserver.take
    monkeypatch.setattr(
        AttentionObserver,
        "take",
        lambda self, index, seen: looked.append((index, seen.keys)) or take(self, index, seen),
    )
    options = {"layers": "0"}
    blend(kind, inputs, filled(kind), chunks=False, selector="query-attention", selector_options=options)
    true = stock(kind, inputs)[1].layers
    keys = [keys for index, keys in looked if index == 0]
    assert len(keys) == 1
    assert gap(keys[0], true[0].keys) < FLOOR
    full = capture_forward(build(kind), inputs)[0]
    assert max(gap(one[0], two.keys) for one, two in zip(full.layers, true, strict=True)) == 0


@pytest.mark.parametrize(
    ("kind", "chunks", "beams"),
    [
        ("gemma3", False, 1),
        ("qwen3_vl", False, 1),
        pytest.param("llava", True, 3, marks=needs_encoding),
        pytest.param("qwen3_vl", True, 1, marks=needs_encoding),
    ],
)
def test_generate_with_an_image_writes_what_stock_writes(kind, chunks, beams, untouched):
    model, store = build(kind), filled(kind)
    stock(kind, arguments(kind, picture(kind)))  # at its first image a model hooks its eyes itself
    ways = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    with untouched(model):
        for seed in (0, 1):
            cache = BlendCache(model, store, recompute_ratio=1.0)
            pieces = [CHUNKS[0], picture(kind), *CHUNKS[1:]]
            built = cache.inputs(None, prefix=PREFIX, chunks=pieces, question=QUESTION)
            inputs = {**arguments(kind, *pieces, seeds=(seed,)), **built}
            given = cache.inputs_with_images(**inputs) if chunks else inputs
            got = model.generate(**given, **ways, past_key_values=cache)
            assert got.equal(model.generate(**inputs, **ways))
            assert cache.report.reusable_tokens == beams * (TEXT_TOKENS + chunks * KINDS[kind].tokens)
            assert cache.report.exact_tokens == beams * len(PREFIX)


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen3_vl", marks=SLOW)])
def test_text_behind_a_turn_with_an_image_is_reused(kind):
    model, store = build(kind), filled(kind)
    caches = BlendCache(model, store, recompute_ratio=1.0), DynamicCache(config=model.config.get_text_config())
    ways = {"max_new_tokens": 4, "do_sample": False}
    first = caches[0].inputs(None, prefix=PREFIX, chunks=[picture(kind), CHUNKS[0]], question=QUESTION)
    given = {**arguments(kind, picture(kind), CHUNKS[0]), **first, **ways}
    turns = [model.generate(**given, past_key_values=cache) for cache in caches]
    second = caches[0].inputs(None, prefix=None, chunks=CHUNKS[1:], question=QUESTION, history=turns[0])
    answers = [model.generate(**second, **ways, past_key_values=cache) for cache in caches]
    assert turns[0].equal(turns[1])
    assert answers[0].equal(answers[1])
    assert caches[0].report.loaded_chunks == len(CHUNKS[1:])


@needs_encoding
def test_inputs_with_images_of_a_later_turn_are_chunks_too():
    kind, ways = "llava", {"max_new_tokens": 4, "do_sample": False}
    model, store = build(kind), filled(kind)
    mine, true = BlendCache(model, store, recompute_ratio=1.0), DynamicCache(config=model.config.get_text_config())
    blend(kind, arguments(kind, picture(kind), *CHUNKS, seeds=(1,)), store)
    first = mine.inputs(None, prefix=PREFIX, chunks=[picture(kind), CHUNKS[0]], question=QUESTION)
    inputs = {**arguments(kind, picture(kind), CHUNKS[0]), **first}
    turn = model.generate(**mine.inputs_with_images(**inputs), **ways, past_key_values=mine)
    assert turn.equal(model.generate(**inputs, **ways, past_key_values=true))
    second = mine.inputs(None, prefix=None, chunks=[picture(kind)], question=QUESTION, history=turn)
    pixels = {"pixel_values": arguments(kind, picture(kind), seeds=(1,))["pixel_values"]}
    got = model.generate(**mine.inputs_with_images(**second, **pixels), **ways, past_key_values=mine)
    ids, held = second["input_ids"], true.get_seq_length()
    with torch.no_grad():
        expected = model(ids[:, held:], **pixels, past_key_values=true, logits_to_keep=1).logits
    assert got[0, ids.shape[1]] == expected[0, -1].argmax()
    assert mine.report.reusable_tokens == KINDS[kind].tokens


def test_inputs_from_text_keep_nothing_behind_another_image():
    kind, ways = "llava", {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    ways["return_dict_in_generate"] = True
    model, cache = build(kind), BlendCache(build(kind), filled(kind), recompute_ratio=1.0)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(128)}, "w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    pieces = CHUNKS[0], picture(kind), *CHUNKS[1:]
    text, held = " ".join(f"w{token}" for token in prompt(kind, *pieces)[0].tolist()), [0, len(PREFIX + CHUNKS[0]) + 1]
    for seed, past in zip((0, 1), held, strict=True):
        built = cache.inputs_from_text(tokenizer, text)
        assert cache.get_seq_length() == past, "up to the image, whose id is that of any other"
        assert built["input_ids"].equal(prompt(kind, *pieces))
        inputs = {**arguments(kind, *pieces, seeds=(seed,)), **built}
        got, expected = (model.generate(**inputs, **ways, past_key_values=kept) for kept in (cache, None))
        assert gap(got.logits[0], expected.logits[0]) < FLOOR
        assert got.sequences.equal(expected.sequences)


def test_a_history_that_parts_behind_an_image_keeps_it_and_one_that_parts_before_it_is_refused():
    kind, ways = "llava", {"max_new_tokens": 4, "do_sample": False}
    model, cache = build(kind), BlendCache(build(kind), filled(kind), recompute_ratio=1.0)
    built = cache.inputs(None, prefix=PREFIX, chunks=[picture(kind), CHUNKS[0]], question=QUESTION)
    image = arguments(kind, picture(kind), CHUNKS[0], seeds=(1,))
    turn = model.generate(**{**image, **built}, **ways, past_key_values=cache)
    before, behind = turn.clone(), turn.clone()
    before[0, 1], behind[0, -5] = 8, 12
    with pytest.raises(PromptError, match="stand for images, which do not come with it"):
        cache.inputs(None, prefix=None, chunks=[CHUNKS[1]], question=QUESTION, history=before)
    held = cache.get_seq_length()
    second = cache.inputs(None, prefix=None, chunks=[CHUNKS[1]], question=QUESTION, history=behind)
    assert cache.get_seq_length() == turn.shape[1] - 5 < held
    got = model.generate(**second, **ways, past_key_values=cache)
    assert got.equal(model.generate(**second, pixel_values=image["pixel_values"], **ways))


@needs_encoding
def test_prefill_chunk_size_computes_a_prompt_with_images_as_stock_does():
    kind, ways = "llava", {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 24}
    inputs = arguments(kind, CHUNKS[0], picture(kind), *CHUNKS[1:])
    cache = BlendCache(build(kind), filled(kind), recompute_ratio=1.0)
    got = build(kind).generate(**cache.inputs_with_images(**inputs), **ways, past_key_values=cache)
    assert got.equal(build(kind).generate(**inputs, **ways))


@pytest.mark.parametrize(
    ("kind", "chunks"), [("llava", False), ("gemma3", False), pytest.param("qwen3_vl", True, marks=needs_encoding)]
)
def test_batch_of_prompts_with_images_and_padding_equals_stock(kind, chunks, fresh_models):
    rows = [[*CHUNKS[0], *picture(kind)], [*picture(kind), *picture(kind), *CHUNKS[1], *CHUNKS[2]]]
    rows = [[*PREFIX, *row, *QUESTION] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {**tiny_image_models.image_arguments(kind, ids, (0, 1, 2)), "attention_mask": mask}
    if kind in ("llava", "gemma3"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    report = exact(kind, inputs, filled(kind), chunks=chunks, recompute_ratio=1.0)
    assert report.reusable_tokens == TEXT_TOKENS + chunks * 3 * KINDS[kind].tokens


def test_text_behind_an_image_is_rotated_for_the_models_own_positions():
    kind = "qwen3_vl"
    inputs = arguments(kind, picture(kind), *CHUNKS)
    _, cache = blend(kind, inputs, filled(kind), chunks=False, recompute_ratio=0.0, selector="none")
    true = stock(kind, inputs)[1].layers[0]
    other = stock(kind, inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None])[1].layers[0]
    assert gap(cache.layers[0].keys, true.keys) < FLOOR
    assert gap(cache.layers[0].values, true.values) < FLOOR
    assert gap(other.keys, true.keys) > 0.1  # columns are not positions here: the image takes fewer of them


def rotated_by_hand(keys, positions, kind):
    """Keys `[heads, tokens, 16]` turned by positions `[3, tokens]`: a rotation of two halves, 8 pairs."""
    of_pair = {"llava": [0] * 8, "qwen2_vl": [0, 0, 1, 1, 1, 2, 2, 2], "qwen3_vl": [0, 1, 2, 0, 1, 2, 0, 1]}[kind]
    angles = torch.stack([positions[axis].double() * 1e4 ** (-pair / 8) for pair, axis in enumerate(of_pair)], -1)
    (first, second), cos, sin = keys.double().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()


def model_positions(kind, inputs):
    """Where the model puts each token, `[3, tokens]`, by its own function."""
    ids = inputs["input_ids"]
    if kind == "llava":
        return torch.arange(ids.shape[1]).expand(3, -1)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    return build(kind).model.get_rope_index(**{name: inputs[name] for name in names})[0][:, 0]


def image_key(kind, inputs, number):
    """The key under which an image of a prompt is stored."""
    named = name_images(build(kind), ChunkStore.open("memory://"), (1,), inputs, 0)
    return ChunkKey(fingerprint(build(kind)), (1,), named.spans[0][number].token_ids)


def columns(kind, ids, number=0):
    """Where the tokens of an image are."""
    first = (ids[0] == IMAGE).nonzero().flatten()[number * KINDS[kind].tokens]
    return slice(int(first), int(first) + KINDS[kind].tokens)


@needs_encoding
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", pytest.param("qwen2_vl", marks=SLOW)])
def test_stored_keys_of_an_image_are_moved_by_the_difference_of_the_models_positions(kind):
    store = filled(kind)
    inputs = arguments(kind, CHUNKS[0], picture(kind), CHUNKS[1], picture(kind), seeds=(0, 1))
    _, cache = blend(kind, inputs, store, recompute_ratio=0.0, selector="none")
    here = model_positions(kind, inputs)
    for number in (0, 1):
        kept, image = store.get(image_key(kind, inputs, number)), columns(kind, inputs["input_ids"], number)
        alone = arguments(kind, seeds=(number,))
        alone["input_ids"] = torch.tensor([[1, *[IMAGE] * KINDS[kind].tokens]])
        alone["mm_token_type_ids"] = alone["input_ids"] == IMAGE
        distance = here[:, image] - model_positions(kind, alone)[:, 1:]
        for layer in range(1, 4):  # in layer 0 all are computed, to be compared
            keys, values = kept.layers[layer]
            assert gap(cache.layers[layer].keys[0, :, image], rotated_by_hand(keys, distance, kind)) < FLOOR
            assert torch.equal(cache.layers[layer].values[0, :, image], values)


@needs_encoding
@pytest.mark.parametrize("kind", ["llava", pytest.param("gemma3", marks=SLOW)])
def test_image_that_comes_first_is_exact_at_every_ratio(kind):
    store = ChunkStore.open("memory://")
    ids = torch.tensor([[1, *[IMAGE] * KINDS[kind].tokens, END, *QUESTION]])
    inputs = tiny_image_models.image_arguments(kind, ids, (0,))
    for _ in range(2):
        report = exact(kind, inputs, store, recompute_ratio=0.0, selector="none")
    assert report.exact_tokens == 1 + KINDS[kind].tokens


@SLOW
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_video_is_exact_at_ratio_1(kind):
    ids, store = prompt(kind, CHUNKS[0], [START, *[VIDEO] * 4, END], *CHUNKS[1:]), filled(kind)
    for seed in (0, 1):
        frames = KINDS[kind].pixels(seed)
        inputs = {"input_ids": ids, "mm_token_type_ids": 2 * (ids == VIDEO).long()}
        inputs |= {"pixel_values_videos": frames["pixel_values"], "video_grid_thw": frames["image_grid_thw"]}
        assert exact(kind, inputs, store, chunks=False, recompute_ratio=1.0).loaded_chunks == len(CHUNKS)


@SLOW
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "gemma3"])
def test_images_are_exact_in_bfloat16_too(kind):
    model, store = build(kind, dtype=torch.bfloat16), ChunkStore.open("memory://")
    store.add(model, None, CHUNKS)
    inputs = arguments(kind, picture(kind), *CHUNKS)
    inputs = {name: one.bfloat16() if one.is_floating_point() else one for name, one in inputs.items()}
    cache = BlendCache(model, store, recompute_ratio=1.0)
    cache.get_seq_length()
    with torch.no_grad():
        got = model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        expected = model(**inputs, use_cache=False).logits[:, -1]
    assert gap(got.float(), expected.float()) < 0.1


# What images are stored under.


def test_digest_of_and_content_ids_tell_pixels_their_form_and_their_number_of_tokens():
    image = {"pixel_values": torch.ones(16, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    other = {**image, "image_grid_thw": torch.tensor([[1, 2, 8]])}
    moved = {**image, "pixel_values": torch.ones(16, 4).index_fill(0, torch.tensor([3]), 1 + 1e-7)}
    half, turned = ({**image, "pixel_values": one} for one in (torch.ones(16, 4).half(), torch.ones(4, 16)))
    names = [content_ids(digest_of(one), 4) for one in (image, other, moved, half, turned)]
    assert len({*names, content_ids(digest_of(image), 5)[:4]}) == 6
    assert all(map(is_content, names[0]))
    assert not is_content(262_143)
    assert names[0] == content_ids(digest_of(dict(image)), 4)


@needs_encoding
def test_image_with_breaks_between_its_rows_or_other_marks_is_another_chunk():
    kind, store, breaks = "llava", filled("llava"), [START, *([*[IMAGE] * 4, 9] * 4)[:-1], END]
    for pieces, computed in (([breaks, *CHUNKS], 1), ([*CHUNKS, breaks], 0), ([*CHUNKS, picture(kind)], 1)):
        inputs = arguments(kind, *pieces)
        assert exact(kind, inputs, store, recompute_ratio=1.0).computed_chunks == computed
    assert len(store) == len(CHUNKS) + 3  # features, and the KV of the image with and without breaks
    kind, store = "gemma3", filled("gemma3")
    inputs = arguments(kind, CHUNKS[0], picture(kind))
    causal = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    for one in (causal, inputs):  # in the second the tokens of an image see each other
        report = exact(kind, one, store, recompute_ratio=1.0)
        assert report.computed_chunks == 1
    assert report.encoded_images == 0


@needs_encoding
def test_stored_image_needs_no_tower_in_another_process_and_is_computed_again_if_damaged(tmp_path, monkeypatch):
    kind, runs = "qwen3_vl", towers_run(monkeypatch)
    inputs = arguments(kind, picture(kind), CHUNKS[0], picture(kind), seeds=(0, 1))
    found, encoded = [], []
    for damages in (False, False, True):
        with ChunkStore.open(tmp_path) as store:
            for path in tmp_path.glob("objects/**/*.safetensors") if damages else ():
                path.write_bytes(path.read_bytes()[:-64] + bytes(64))
            found.append(blend(kind, inputs, store, recompute_ratio=0.0, selector="none")[1])
            encoded.append(len(runs))
    assert encoded == [2, 2, 4]
    assert [cache.report.computed_chunks for cache in found] == [2, 0, 2]
    for one, *others in zip(*(cache.layers for cache in found), strict=True):
        assert all(torch.equal(one.keys, other.keys) for other in others)


@needs_encoding
def test_features_that_a_codec_rounds_are_not_kept(tmp_path):
    kind, inputs = "llava", arguments("llava", picture("llava"), CHUNKS[0])
    for _ in range(2):
        with ChunkStore.open(tmp_path, codec="int8") as store:
            report = exact(kind, inputs, store, recompute_ratio=1.0)
            assert len(store) == 1
    assert report.loaded_chunks == 1


@needs_encoding
def test_stored_features_that_are_not_the_towers_are_encoded_again(monkeypatch):
    kind, store, runs = "llava", filled("llava"), towers_run(monkeypatch)
    inputs = arguments(kind, picture(kind), *CHUNKS)
    blend(kind, inputs, store)
    (entry,) = (one for one in store.entries() if one.fingerprint != fingerprint(build(kind)))
    image = ImageEncoder(build(kind)).split(inputs)[0]
    key = ChunkKey(entry.fingerprint, (), content_ids(digest_of(image), KINDS[kind].tokens))
    kept = store.get(key)
    store.delete(key)
    store.put(kept.map(lambda states: states.flip(1)))
    monkeypatch.setattr(images, "_forms", type(images._forms)())  # another process
    exact(kind, inputs, store, recompute_ratio=1.0)
    assert len(runs) == 2
    assert torch.equal(store.get(key).layers[0][0], kept.layers[0][0])


@needs_encoding
@pytest.mark.parametrize("encoded", [False, True])
def test_other_images_than_those_that_were_named_are_computed_in_place(encoded):
    kind, store = "llava", filled("llava")
    inputs, other = (arguments(kind, picture(kind), *CHUNKS, seeds=(seed,)) for seed in (0, 1))
    blend(kind, inputs, store)
    cache = BlendCache(build(kind), store, recompute_ratio=0.0, selector="none")
    cache.inputs_with_images(**inputs)
    given = BlendCache(build(kind), store).inputs_with_images(**other) if encoded else other
    with torch.no_grad():
        build(kind)(**given, past_key_values=cache, logits_to_keep=1)
    image = columns(kind, other["input_ids"])
    for layer, true in zip(cache.layers, stock(kind, other)[1].layers, strict=True):
        assert gap(layer.keys[:, :, image], true.keys[:, :, image]) < FLOOR
    assert (cache.report.reusable_tokens, cache.report.refused_chunks) == (TEXT_TOKENS, 0)


@needs_encoding
def test_image_head_takes_the_first_tokens_of_each_image_before_all_others():
    tokens = torch.arange(12)[None]
    chunk = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    view = TokenView(0, tokens, chunk >= 0, chunk, tokens % 4, torch.full((1, 12), 4), images=chunk != 1)
    selector = plugins.load("selectors", "image-head")
    order = selector({"tokens": 2}).score(view)[0].argsort(descending=True, stable=True).tolist()
    assert order == [0, 8, 1, 9, 4, 5, 2, 6, 10, 3, 7, 11]
    inputs = arguments("llava", CHUNKS[0], picture("llava"))
    settings = {"selector": "image-head", "selector_options": {"tokens": 6}, "recompute_ratio": 0.25}
    _, cache = blend("llava", inputs, filled("llava"), **settings)
    image = columns("llava", inputs["input_ids"]).start
    assert cache.report.chosen_columns == [[4, 5, *range(image, image + 6)]]


# Placeholders: ids of which nobody knows by themselves what the model computes there.


def test_chunk_with_a_placeholder_is_computed_in_place_and_never_stored():
    model, store = build("llava"), filled("llava")
    for ids in ([*range(80, 90), *picture("llava")], [IMAGE] * 3):
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(None, prefix=[*PREFIX, IMAGE], chunks=[ids, CHUNKS[0]], question=QUESTION)
        cache.get_seq_length()
        with torch.no_grad():  # no pixels: the placeholders are text here
            got = model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            expected = model(inputs["input_ids"], use_cache=False).logits[:, -1]
        assert gap(got, expected) < FLOOR
        assert not store.contains(ChunkKey(fingerprint(model), (1,), tuple(ids)))
    assert len(store) == len(CHUNKS)


def test_chunks_of_others_behind_placeholders_are_not_looked_up_or_show_at_layer_0(monkeypatch):
    kind, model, store = "llava", build("llava"), filled("llava")
    stale = {"chunks": False, "recompute_ratio": 0.0, "selector": "none"}
    inputs = arguments(kind, picture(kind), *CHUNKS)
    with monkeypatch.context() as patch:
        patch.setattr("hf_blend.model.modality.placeholder_ids", lambda config: frozenset())
        store.add(model, None, [picture(kind)])
    assert blend(kind, inputs, store, **stale)[1].report.loaded_chunks == len(CHUNKS)
    for name in ("model.modality.placeholder_ids", "cache.blending.placeholders_of"):  # a config that names none
        monkeypatch.setattr(f"hf_blend.{name}", lambda *_: frozenset({START}))
    unnamed = [*range(80, 100), *[IMAGE] * 16, *range(80, 100)]
    store.add(model, None, [unnamed])
    both = [arguments(kind, [START], unnamed, *CHUNKS, seeds=(seed,)) for seed in (0, 1)]
    answers = [blend(kind, one, store, **stale) for one in both]
    assert [cache.report.refused_chunks for _, cache in answers] == [1, 1]
    assert gap(answers[0][0], answers[1][0]) > 1e-2


def test_inputs_without_a_placeholder_in_the_prompt_reuse_nothing(monkeypatch):
    monkeypatch.setattr("hf_blend.cache.blending.placeholders_of", lambda *_: frozenset())
    inputs = arguments("llava", CHUNKS[0], picture("llava"), *CHUNKS[1:], seeds=(1,))
    report = exact("llava", inputs, filled("llava"), chunks=False, recompute_ratio=0.0, selector="none")
    assert report.loaded_chunks == 0


def test_inputs_that_nothing_installed_knows_are_computed_and_named(monkeypatch):
    known = plugins.extensions
    monkeypatch.setattr(plugins, "extensions", lambda kind: [] if kind == "extra_inputs" else known(kind))
    inputs = arguments("llava", CHUNKS[0], picture("llava"), *CHUNKS[1:], seeds=(1,))
    report = exact("llava", inputs, filled("llava"), chunks=False, recompute_ratio=0.0, selector="none")
    assert "pixel_values came with the prompt, but only text is known" in report.fallback_reason
    assert (report.loaded_chunks, report.prompt_tokens) == (0, inputs["input_ids"].shape[1])


def test_placeholder_ids_are_those_of_the_config_and_its_lists_and_may_be_the_first_ids(monkeypatch):
    assert not placeholder_ids(AutoConfig.for_model("llama"))
    config = AutoConfig.for_model("ovis2")
    assert placeholder_ids(config) >= {config.image_token_id, *config.visual_indicator_token_ids}
    for token in (0, 3):
        config = {**KINDS["llava"].config, "image_token_index": token}
        monkeypatch.setitem(tiny_image_models.KINDS, "llava", KINDS["llava"]._replace(config=config))
        cache = BlendCache(tiny_image_model("llava"), ChunkStore.open("memory://"))  # passes its self-test
        assert cache.model.config.image_token_id == token


@SLOW
def test_placeholder_ids_of_every_model_that_reads_images_are_found():
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


def test_other_inputs_are_whatever_is_not_known_as_text():
    one = torch.ones(1)
    for given, names, features in (
        ({"input_ids": 1, "attention_mask": one, "use_cache": True, "logits_to_keep": 1}, (), False),
        ({"pixel_values": one, "image_sizes": None}, ("pixel_values",), True),
        ({"mm_encoder_outputs": {"image": [one]}, "x": [1]}, ("mm_encoder_outputs", "x"), True),
        ({"mm_encoder_outputs": {"image": None, "video": []}}, (), False),
        ({"mm_token_type_ids": torch.zeros(2)}, (), False),
        ({"mm_token_type_ids": torch.ones(2)}, ("mm_token_type_ids",), False),
        ({"token_type_ids": torch.zeros(2)}, ("token_type_ids",), False),
    ):
        assert (other_inputs(given), has_features(given)) == (names, features)


# What is refused, by name.


def test_what_keeps_or_moves_text_alone_names_the_placeholder():
    model, store, kind = build("llava"), ChunkStore.open("memory://"), "llava"
    with pytest.raises(PromptError, match=r"chunk 1 holds the placeholder token 120, where Llava.* computed in place"):
        store.add(model, None, [CHUNKS[0], [11, IMAGE, 12]])
    assert len(store) == 0
    with pytest.raises(PromptError, match="what stands before chunk 0 holds the placeholder token 120"):
        store.add(model, None, CHUNKS, chunk_prefix_ids=[1, IMAGE])
    with pytest.raises(PromptError, match="chunk_prefix_ids holds the placeholder token 120"):
        BlendCache(model, store, chunk_prefix_ids=(1, IMAGE))
    with pytest.raises(PromptError, match="a chunk holds the placeholder token 120"):
        capture_chunk(model, [IMAGE], [1], "")
    cache, inputs = SequenceCache(model), arguments(kind, picture(kind), *CHUNKS)
    with torch.no_grad(), cache:
        with pytest.raises(PromptError, match="pixel_values came with a SequenceCache, but text alone is expected"):
            model(**inputs, past_key_values=cache, logits_to_keep=1)
        model(inputs["input_ids"], past_key_values=cache, logits_to_keep=1)
    with pytest.raises(PromptError, match="the cache holds the placeholder token 120"):
        blended(cache, inputs["input_ids"][0].tolist())


@needs_encoding
def test_inputs_with_images_refuses_by_name_what_cannot_be_a_chunk(monkeypatch):
    kind, store = "llava", filled("llava")
    inputs, two = (arguments(kind, picture(kind), *CHUNKS, seeds=seeds) for seeds in ((0,), (0, 1)))
    cache, text = BlendCache(build(kind), store), {"input_ids": prompt(kind, *CHUNKS), "pixel_values": None}
    assert cache.inputs_with_images(**text) == text
    for given, says in (
        (two, "2 images make 32 tokens, expected 16, the placeholders"),
        ({**inputs, "pixel_values_videos": torch.ones(1)}, "pixel_values_videos came with pixel_values, but ids and"),
        ({**inputs, "colours": torch.ones(1, 2)}, r"colours \(1, 2\) came with images, but what it changes .* not"),
        ({**inputs, "image_sizes": torch.ones(3, 2)}, r"image_sizes has shape .* a row for each of the 1 images"),
        ({**inputs, "pixel_values": [1]}, "pixel_values is list, expected a tensor"),
        ({"pixel_values": inputs["pixel_values"]}, r"no input_ids .* came with pixel_values"),
        ({**inputs, "attention_mask": torch.ones(1, 3)}, r"attention_mask has shape \(1, 3\), expected that of input"),
    ):
        with pytest.raises(PromptError, match=says):
            cache.inputs_with_images(**given)
    with torch.no_grad():
        build(kind)(prompt(kind, CHUNKS[0]), past_key_values=cache, logits_to_keep=1)
    with pytest.raises(PromptError, match=r"images came for a cache that holds .* reset"):
        cache.inputs_with_images(**inputs)
    monkeypatch.setattr("hf_blend.images.encoder.ENCODED", "encoded")
    cache = BlendCache(build(kind), store)
    with pytest.raises(UnsupportedModelError, match=r"Llava.* lacks the argument encoded of its .*5\.18 and newer"):
        cache.inputs_with_images(**inputs)
    assert not cache.is_expecting


@needs_encoding
def test_tower_that_sees_several_images_at_once_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(images, "_forms", type(images._forms)())
    run = ImageEncoder._run

    def mixed(self, given):
        output = run(self, given)
        if len(given["pixel_values"]) > 1:
            output.pooler_output = [part + 0.1 for part in output.pooler_output]
        return output

    monkeypatch.setattr(ImageEncoder, "_run", mixed)
    with pytest.raises(UnsupportedModelError, match=r"Llava.* 2 images together is not what it makes of each alone"):
        blend("llava", arguments("llava", *[picture("llava")] * 2, seeds=(0, 1)), filled("llava"))


def test_image_path_that_is_not_exact_is_refused_and_leaves_the_model_alone(
    monkeypatch, untouched, caplog, fresh_models
):
    kind, spread = "qwen3_vl", Rows.spread
    inputs, store, model = arguments(kind, picture(kind), *CHUNKS), filled(kind), build(kind)
    deltas = model.model.rope_deltas
    with monkeypatch.context() as patch, untouched(model):
        patch.setattr(Rows, "spread", lambda self, rows, tokens: spread(self, rows, tokens).roll(1, -2))
        for _ in range(2):  # the second time from memory
            with pytest.raises(UnsupportedModelError, match=r"Qwen3VL.* image_grid_thw, .*pixel.* is off by"):
                blend(kind, inputs, store, chunks=False)
        assert model.model.rope_deltas is deltas
        with caplog.at_level(logging.WARNING):
            _build.cache_clear()
            blend(kind, inputs, filled(kind), chunks=False, allow_unverified=True)
    assert "without being verified (allow_unverified): Qwen3VL" in caplog.text


def test_each_kind_of_forward_is_tested_once(monkeypatch, fresh_models):
    tests, run, kind = [], FirstForward.run, "qwen2_5_vl"
    monkeypatch.setattr(FirstForward, "run", lambda *given: tests.append(1) or run(*given))
    store, text = filled(kind), prompt(kind, *CHUNKS)
    for seed in (0, 1):
        blend(kind, arguments(kind, picture(kind), *CHUNKS, seeds=(seed,)), store, chunks=False)
    assert len(tests) == 1
    inputs = {"input_ids": text, "mm_token_type_ids": torch.zeros_like(text)}  # what a processor makes of text alone
    _, cache = blend(kind, inputs, store, chunks=False)
    assert len(tests) == 1
    assert cache.report.loaded_chunks == len(CHUNKS)


@needs_encoding
@torch.no_grad()
def test_prompt_with_an_image_behind_others_is_computed_until_such_a_forward_was_tested(fresh_models):
    kind, store = "llava", filled("llava")
    inputs, model = arguments(kind, picture(kind), *CHUNKS), build(kind)
    blend(kind, inputs, store)  # a forward of another kind: its image is a chunk
    for is_tested in (False, True):
        cache = BlendCache(model, store, recompute_ratio=0.15)
        cache.watch.hooks.watch_model(stay=True)
        model(torch.tensor([[1, 5, 6]]), past_key_values=cache, logits_to_keep=1)
        behind = {**inputs, "attention_mask": torch.ones(1, 3 + inputs["input_ids"].shape[1], dtype=torch.long)}
        model(**behind, past_key_values=cache, logits_to_keep=1)
        assert bool(cache.report.reusable_tokens) is is_tested
        blend(kind, inputs, store, chunks=False)


def test_model_whose_text_sees_ahead_is_refused_or_computes_its_chunks():
    kind = "paligemma"
    with pytest.raises(UnsupportedModelError, match=r"PaliGemma.* cannot be blended: its tokens see those behind"):
        BlendCache(build(kind), ChunkStore.open("memory://"))
    inputs, store = arguments(kind, picture(kind), *CHUNKS), filled(kind, "eager")
    report = exact(kind, inputs, store, "eager", chunks=False, recompute_ratio=0.0, selector="none")
    assert report.refused_chunks == len(CHUNKS)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Images as chunks: stored once by what is in them, reused at any place, and never taken for one another.

The oracles are the stock model with a `DynamicCache`, and a rotation written by hand from the model's own positions.
"""

import inspect
import itertools

import pytest
import torch
from transformers import DynamicCache, LlavaForConditionalGeneration

from hf_blend import BlendCache, ChunkStore, PromptError, UnsupportedModelError, plugins
from hf_blend.model.fingerprint import fingerprint
from hf_blend.model.images import ImageEncoder, digest_of
from hf_blend.prefill.blend import Prefill
from hf_blend.prefill.images import name_images
from hf_blend.prompt.content import content_ids, is_content
from hf_blend.selectors.base import TokenView
from hf_blend.store.chunk import ChunkKey
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
    arguments,
    build,
    filled,
    gap,
    picture,
    prompt,
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.signature(LlavaForConditionalGeneration.forward).parameters,
    reason="images cannot be encoded ahead: needs transformers 5.18 or newer",
)
SLOW, FAST_CHOICES = pytest.mark.slow, [(0.0, "none"), (0.15, "auto"), (0.15, "image-head"), (1.0, "boundary")]
SELECTORS = sorted({*plugins.describe("selectors")} - {"explicit", "learned", "compose"})


def each(*fast):
    """All kinds whose images are chunks; those that are not named are slow."""
    return [kind if kind in fast else pytest.param(kind, marks=SLOW) for kind in KINDS if kind != "paligemma"]


ROPED = ["llava", "qwen3_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow)]


def given(kind, pieces, seeds):
    """Ids and the arguments of a processor for images with these seeds, in order."""
    ids = prompt(kind, *pieces)
    each = [arguments(kind, ids, seed) for seed in seeds]
    axis = 1 if kind in ("idefics3", "smolvlm") else 0  # [batch, images, …]
    pixels = {name: torch.cat([one[name] for one in each], axis) for name in each[0] if not name.endswith("type_ids")}
    return {"input_ids": ids, **{name: one for name, one in each[0].items() if name.endswith("type_ids")}, **pixels}


@torch.no_grad()
def stock(kind, inputs, **more):
    """Last logits of the model alone, and its cache."""
    cache = DynamicCache()
    output = build(kind)(**inputs, **more, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


@torch.no_grad()
def blend(kind, inputs, store, **settings):
    """Last logits of a blended forward, and its cache."""
    cache = BlendCache(build(kind), store, **settings)
    inputs = cache.inputs_with_images(**inputs)
    return build(kind)(**inputs, past_key_values=cache, logits_to_keep=1, use_cache=True).logits[:, -1], cache


def image_key(kind, inputs, number=0):
    """The key under which an image of a prompt is stored."""
    images = name_images(build(kind), ChunkStore.open("memory://"), (1,), inputs, 0)
    return ChunkKey(fingerprint(build(kind)), (1,), images.spans[0][number].token_ids)


def columns(kind, ids, number=0):
    """Where the tokens of an image are."""
    first = (ids[0] == IMAGE).nonzero().flatten()[number * KINDS[kind][1]]
    return slice(int(first), int(first) + KINDS[kind][1])


def towers_run(kind, monkeypatch):
    """Counts the images that go through the vision tower."""
    runs, true_encode = [], ImageEncoder.encode
    monkeypatch.setattr(ImageEncoder, "encode", lambda self, image: runs.append(1) or true_encode(self, image))
    return runs


@pytest.mark.parametrize("kind", each(*FAST))
def test_ratio_1_with_images_as_chunks_equals_stock_and_no_image_is_computed_twice(kind, monkeypatch):
    store, text, runs = filled(kind), CHUNKS, towers_run(kind, monkeypatch)
    first = given(kind, [text[0], picture(kind), picture(kind), *text[1:]], (0, 1))
    moved = given(kind, [picture(kind), *text[:2], picture(kind), text[2]], (1, 0))
    for inputs, computed in ((first, 2), (moved, 0)):
        got, cache = blend(kind, inputs, store, recompute_ratio=1.0)
        assert gap(got, stock(kind, inputs)[0]) < FLOOR
        assert cache.report.computed_chunks == computed
        assert cache.report.loaded_chunks == len(text) + 2 - computed
        assert cache.report.reusable_tokens == sum(map(len, text)) + 2 * KINDS[kind][1]
        assert cache.report.encoded_images == computed
        assert not cache.report.refused_chunks
    assert len(runs) == 2


@pytest.mark.parametrize("kind", each("llava", "qwen3_vl"))
def test_an_image_moved_to_another_place_has_the_layer_0_kv_of_a_direct_forward(kind, monkeypatch):
    store = filled(kind)
    blend(kind, given(kind, [picture(kind), *CHUNKS], (0,)), store)
    moved = given(kind, [*CHUNKS, picture(kind), [9, 9, 9], picture(kind)], (1, 0))
    blend(kind, moved, store)  # the test of the first such forward is behind it
    monkeypatch.setattr(Prefill, "_look", lambda self, *_: None)  # nothing but what is stored is in layer 0
    _, cache = blend(kind, moved, store, recompute_ratio=0.0, selector="none")
    true = stock(kind, moved)[1].layers[0]
    assert cache.report.loaded_chunks == len(CHUNKS) + 2
    forgot = moved["input_ids"].shape[1] - cache.layers[0].keys.shape[2]  # by a window
    for number in (1,) if forgot else (0, 1):
        image = columns(kind, moved["input_ids"], number)
        held = slice(image.start - forgot, image.stop - forgot)
        assert gap(cache.layers[0].keys[:, :, held], true.keys[:, :, image]) < FLOOR
        assert gap(cache.layers[0].values[:, :, held], true.values[:, :, image]) < FLOOR
        alone = store.get(image_key(kind, moved, number)).layers[0][0]
        assert gap(alone, true.keys[0, :, image]) > 0.1  # where it was computed its keys are others


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


@pytest.mark.parametrize("kind", ROPED)
def test_stored_keys_of_an_image_are_moved_by_the_difference_of_the_models_positions(kind):
    store = filled(kind)
    inputs = given(kind, [CHUNKS[0], picture(kind), CHUNKS[1], picture(kind)], (0, 1))
    _, cache = blend(kind, inputs, store, recompute_ratio=0.0, selector="none")
    here = model_positions(kind, inputs)
    for number in (0, 1):
        kept, image = store.get(image_key(kind, inputs, number)), columns(kind, inputs["input_ids"], number)
        alone = given(kind, [], (number,))
        tokens = [1, *[IMAGE] * KINDS[kind][1]]
        alone["input_ids"], alone["mm_token_type_ids"] = torch.tensor([tokens]), torch.tensor([tokens]) == IMAGE
        distance = here[:, image] - model_positions(kind, alone)[:, 1:]
        for layer in range(1, 4):  # in layer 0 all are computed, to be compared
            keys, values = kept.layers[layer]
            assert gap(cache.layers[layer].keys[0, :, image], rotated_by_hand(keys, distance, kind)) < FLOOR
            assert torch.equal(cache.layers[layer].values[0, :, image], values)


@pytest.mark.parametrize("kind", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_an_image_that_comes_first_is_exact_at_every_ratio(kind):
    store = ChunkStore.open("memory://")
    ids = torch.tensor([[1, *[IMAGE] * KINDS[kind][1], END, *QUESTION]])
    inputs = {"input_ids": ids, **arguments(kind, ids, 0)}
    for _ in range(2):
        got, cache = blend(kind, inputs, store, recompute_ratio=0.0, selector="none")
    assert cache.report.exact_tokens == 1 + KINDS[kind][1]
    assert gap(got, stock(kind, inputs)[0]) < FLOOR


@pytest.mark.parametrize(
    ("ratio", "selector"),
    [
        pytest.param(*pair, marks=[] if pair in FAST_CHOICES else SLOW)
        for pair in itertools.product((0.0, 0.15, 1.0), SELECTORS)
    ],
)
def test_different_pixels_behind_equal_ids_never_reuse_each_other(ratio, selector):
    kind, store = "llava", filled("llava")
    both = [given(kind, [CHUNKS[0], picture(kind), *CHUNKS[1:]], (seed,)) for seed in (0, 1)]
    answers = []
    for inputs in both:
        got, cache = blend(kind, inputs, store, recompute_ratio=ratio, selector=selector)
        assert cache.report.computed_chunks == 1
        answers.append(got)
    true = [stock(kind, inputs)[0] for inputs in both]
    assert gap(*answers) > 0.1 * gap(*true)
    if selector == "full" or (ratio == 1.0 and selector != "none"):
        assert max(map(gap, answers, true)) < FLOOR


def test_an_image_with_breaks_between_its_rows_is_one_chunk():
    kind, store, breaks = "llava", filled("llava"), [START, *([*[IMAGE] * 4, 9] * 4)[:-1], END]
    for pieces, computed in (([breaks, *CHUNKS], 1), ([*CHUNKS, breaks], 0), ([*CHUNKS, picture(kind)], 1)):
        inputs = given(kind, pieces, (0,))
        got, cache = blend(kind, inputs, store, recompute_ratio=1.0)
        assert gap(got, stock(kind, inputs)[0]) < FLOOR
        assert cache.report.computed_chunks == computed
    assert len(store) == len(CHUNKS) + 3  # features, and the KV of the image with and without breaks


def test_an_image_that_was_stored_with_other_marks_is_another_chunk():
    kind, store = "gemma3", filled("gemma3")
    inputs = given(kind, [CHUNKS[0], picture(kind)], (0,))
    causal = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    for one in (causal, inputs):  # in the second the tokens of an image see each other
        got, cache = blend(kind, one, store, recompute_ratio=1.0)
        assert gap(got, stock(kind, one)[0]) < FLOOR
        assert cache.report.computed_chunks == 1
    assert cache.report.encoded_images == 0


def test_names_tell_pixels_their_form_and_their_number_of_tokens():
    image = {"pixel_values": torch.ones(16, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    other = {**image, "image_grid_thw": torch.tensor([[1, 2, 8]])}
    moved = {**image, "pixel_values": torch.ones(16, 4).index_fill(0, torch.tensor([3]), 1 + 1e-7)}
    half = {**image, "pixel_values": torch.ones(16, 4).half()}
    names = [content_ids(digest_of(one), 4) for one in (image, other, moved, half)]
    assert len({*names, content_ids(digest_of(image), 5)[:4]}) == 5
    assert all(map(is_content, names[0]))
    assert not is_content(262_143)
    assert names[0] == content_ids(digest_of(dict(image)), 4)


@pytest.mark.parametrize("kind", each("qwen3_vl"))
def test_generate_with_images_as_chunks_writes_what_stock_writes(kind, tokenizer, untouched):
    model, store = build(kind), filled(kind)
    stock(kind, given(kind, [picture(kind)], (0,)))  # at its first image a model hooks its eyes itself
    options = {"max_new_tokens": 8, "do_sample": False}
    with untouched(model):
        for seed, beams in ((0, 1), (0, 1), (1, 3)):
            cache = BlendCache(model, store, recompute_ratio=1.0)
            pieces = [CHUNKS[0], picture(kind), *CHUNKS[1:]]
            built = cache.inputs(tokenizer, prefix=PREFIX, chunks=pieces, question=QUESTION)
            inputs = {**built, **arguments(kind, built["input_ids"], seed)}
            more = {**options, "num_beams": beams}
            got = model.generate(**cache.inputs_with_images(**inputs), **more, past_key_values=cache)
            assert got.equal(model.generate(**inputs, **more))
            assert cache.report.reusable_tokens == beams * (sum(map(len, CHUNKS)) + KINDS[kind][1])
            assert cache.report.exact_tokens == beams * len(PREFIX)


def test_an_image_of_a_later_turn_is_a_chunk_too(tokenizer):
    kind, options = "llava", {"max_new_tokens": 4, "do_sample": False}
    model, store = build(kind), filled(kind)
    mine, true = BlendCache(model, store, recompute_ratio=1.0), DynamicCache(config=model.config.get_text_config())
    blend(kind, given(kind, [picture(kind), *CHUNKS], (1,)), store)
    first = mine.inputs(tokenizer, prefix=PREFIX, chunks=[picture(kind), CHUNKS[0]], question=QUESTION)
    inputs = {**first, **arguments(kind, first["input_ids"], 0)}
    turn = model.generate(**mine.inputs_with_images(**inputs), **options, past_key_values=mine)
    assert turn.equal(model.generate(**inputs, **options, past_key_values=true))
    second = mine.inputs(tokenizer, prefix=None, chunks=[picture(kind)], question=QUESTION, history=turn)
    inputs = {**second, **arguments(kind, second["input_ids"], 1)}
    got = model.generate(**mine.inputs_with_images(**inputs), **options, past_key_values=mine)
    ids, held = second["input_ids"], true.get_seq_length()
    with torch.no_grad():
        expected = model(ids[:, held:], **arguments(kind, ids, 1), past_key_values=true, logits_to_keep=1).logits
    assert got[0, ids.shape[1]] == expected[0, -1].argmax()
    assert mine.report.reusable_tokens == KINDS[kind][1]


def test_a_prompt_that_comes_in_parts_is_computed_as_stock_does(tokenizer):
    kind, store = "llava", filled("llava")
    inputs = given(kind, [CHUNKS[0], picture(kind), *CHUNKS[1:]], (0,))
    options = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 24}
    cache = BlendCache(build(kind), store, recompute_ratio=1.0)
    got = build(kind).generate(**cache.inputs_with_images(**inputs), **options, past_key_values=cache)
    assert got.equal(build(kind).generate(**inputs, **options))


def test_a_batch_of_prompts_with_images_equals_stock(tokenizer):
    kind, store = "qwen3_vl", filled("qwen3_vl")
    rows = [[*CHUNKS[0], *picture(kind)], [*picture(kind), *picture(kind), *CHUNKS[1], *CHUNKS[2]]]
    rows = [[*PREFIX, *row, *QUESTION] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    images = given(kind, [picture(kind)] * 3, (0, 1, 2))
    inputs = {**images, "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    got, cache = blend(kind, inputs, store, recompute_ratio=1.0)
    assert gap(got, stock(kind, inputs)[0]) < FLOOR
    assert cache.report.reusable_tokens == sum(map(len, CHUNKS)) + 3 * KINDS[kind][1]


def test_a_stored_image_needs_no_tower_in_another_process(tmp_path, monkeypatch):
    kind, runs = "qwen3_vl", towers_run("qwen3_vl", monkeypatch)
    inputs = given(kind, [picture(kind), CHUNKS[0], picture(kind)], (0, 1))
    with ChunkStore.open(tmp_path) as store:
        blend(kind, inputs, store)
    monkeypatch.setattr(ImageEncoder, "_run", lambda *_: pytest.fail("the tower was run"))
    with ChunkStore.open(tmp_path) as store:
        _, cache = blend(kind, inputs, store)
        assert cache.report.loaded_chunks == 2
    assert len(runs) == 2


def test_a_damaged_chunk_of_an_image_is_computed_again(tmp_path):
    kind, inputs = "llava", given("llava", [CHUNKS[0], picture("llava")], (0,))
    with ChunkStore.open(tmp_path) as store:
        _, first = blend(kind, inputs, store, recompute_ratio=0.0, selector="none")
        for _, path in store.files():
            path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    with ChunkStore.open(tmp_path) as store:
        _, cache = blend(kind, inputs, store, recompute_ratio=0.0, selector="none")
    assert (cache.report.computed_chunks, cache.report.encoded_images) == (1, 1)
    assert all(torch.equal(one.keys, two.keys) for one, two in zip(first.layers, cache.layers, strict=True))


def test_features_that_a_codec_rounds_are_not_kept(tmp_path):
    kind, inputs = "llava", given("llava", [picture("llava"), CHUNKS[0]], (0,))
    for _ in range(2):
        store = ChunkStore.open(tmp_path, codec="int8")
        got, cache = blend(kind, inputs, store, recompute_ratio=1.0)
        assert gap(got, stock(kind, inputs)[0]) < FLOOR
        assert len(store) == 1
        store.close()
    assert cache.report.loaded_chunks == 1


@pytest.mark.parametrize("encoded", [False, True])
def test_other_images_than_those_that_were_named_are_computed_in_place(encoded):
    kind, store = "llava", filled("llava")
    inputs = given(kind, [picture(kind), *CHUNKS], (0,))
    other = given(kind, [picture(kind), *CHUNKS], (1,))
    blend(kind, inputs, store)
    cache = BlendCache(build(kind), store, recompute_ratio=0.0, selector="none")
    cache.inputs_with_images(**inputs)
    brought = BlendCache(build(kind), store).inputs_with_images(**other) if encoded else other
    with torch.no_grad():
        build(kind)(**brought, past_key_values=cache, logits_to_keep=1)
    image = columns(kind, other["input_ids"])
    for layer, true in zip(cache.layers, stock(kind, other)[1].layers, strict=True):
        assert gap(layer.keys[:, :, image], true.keys[:, :, image]) < FLOOR
    assert cache.report.reusable_tokens == sum(map(len, CHUNKS))
    assert not cache.report.refused_chunks


def test_what_cannot_be_a_chunk_is_refused_by_name(monkeypatch):
    kind, store = "llava", filled("llava")
    inputs = given(kind, [picture(kind), *CHUNKS], (0,))
    two = given(kind, [picture(kind), *CHUNKS], (0, 1))
    cache = BlendCache(build(kind), store)
    with pytest.raises(PromptError, match="2 images make 32 tokens, expected 16, the placeholders"):
        cache.inputs_with_images(**two)
    with pytest.raises(PromptError, match="pixel_values_videos came with pixel_values, but ids and images alone"):
        cache.inputs_with_images(**inputs, pixel_values_videos=torch.ones(1))
    with pytest.raises(PromptError, match=r"colours \(1, 2\) came with images, but what it changes .* not known"):
        cache.inputs_with_images(**inputs, colours=torch.ones(1, 2))
    with pytest.raises(PromptError, match=r"image_sizes has shape .* expected a row for each of the 1 images"):
        cache.inputs_with_images(**inputs, image_sizes=torch.ones(3, 2))
    with pytest.raises(PromptError, match="pixel_values is list, expected a tensor"):
        cache.inputs_with_images(**{**inputs, "pixel_values": [1]})
    with pytest.raises(PromptError, match=r"no input_ids .* came with pixel_values"):
        cache.inputs_with_images(pixel_values=inputs["pixel_values"])
    with pytest.raises(PromptError, match=r"attention_mask has shape \(1, 3\), expected that of input_ids"):
        cache.inputs_with_images(**inputs, attention_mask=torch.ones(1, 3))
    with torch.no_grad():
        build(kind)(prompt(kind, CHUNKS[0]), past_key_values=cache, logits_to_keep=1)
    with pytest.raises(PromptError, match=r"images came for a cache that holds .* reset"):
        cache.inputs_with_images(**inputs)
    monkeypatch.setattr("hf_blend.model.images.ENCODED", "encoded")
    with pytest.raises(UnsupportedModelError, match=r"Llava.* it lacks the argument encoded of its forward"):
        BlendCache(build(kind), store).inputs_with_images(**inputs)


def test_a_tower_that_sees_several_images_at_once_is_refused_by_name(monkeypatch):
    from hf_blend.model import images

    monkeypatch.setattr(images, "_forms", type(images._forms)())
    true_run = ImageEncoder._run

    def mixed(self, arguments):
        output = true_run(self, arguments)
        if len(arguments["pixel_values"]) > 1:
            output.pooler_output = [part + 0.1 for part in output.pooler_output]
        return output

    monkeypatch.setattr(ImageEncoder, "_run", mixed)
    with pytest.raises(UnsupportedModelError, match=r"Llava.* 2 images together is not what it makes of each alone"):
        blend("llava", given("llava", [picture("llava")] * 2, (0, 1)), filled("llava"))


def test_stored_features_that_are_not_the_towers_are_encoded_again(monkeypatch):
    from hf_blend.model import images

    kind, store, runs = "llava", filled("llava"), towers_run("llava", monkeypatch)
    inputs = given(kind, [picture(kind), *CHUNKS], (0,))
    blend(kind, inputs, store)
    (entry,) = (one for one in store.entries() if one.fingerprint != fingerprint(build(kind)))
    image = ImageEncoder(build(kind)).split(inputs)[0]
    key = ChunkKey(entry.fingerprint, (), content_ids(digest_of(image), KINDS[kind][1]))
    assert key.digest == entry.digest
    kept = store.get(key)
    store.delete(key)
    store.put(kept.map(lambda states: states.flip(1)))
    monkeypatch.setattr(images, "_forms", type(images._forms)())  # another process
    got, _ = blend(kind, inputs, store, recompute_ratio=1.0)
    assert gap(got, stock(kind, inputs)[0]) < FLOOR
    assert len(runs) == 2
    assert torch.equal(store.get(key).layers[0][0], kept.layers[0][0])


def test_a_prompt_without_images_passes_through():
    cache, ids = BlendCache(build("llava"), filled("llava")), prompt("llava", *CHUNKS)
    assert cache.inputs_with_images(input_ids=ids, pixel_values=None) == {"input_ids": ids, "pixel_values": None}


def test_image_head_takes_the_first_tokens_of_each_image_before_all_others():
    tokens = torch.arange(12)[None]
    chunk = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    images = chunk != 1
    view = TokenView(0, tokens, chunk >= 0, chunk, tokens % 4, torch.full((1, 12), 4), images=images)
    selector = plugins.load("selectors", "image-head")
    order = selector({"tokens": 2}).score(view)[0].argsort(descending=True, stable=True).tolist()
    assert order == [0, 8, 1, 9, 4, 5, 2, 6, 10, 3, 7, 11]
    inputs = given("llava", [CHUNKS[0], picture("llava")], (0,))
    settings = {"selector": "image-head", "selector_options": {"tokens": 6}, "recompute_ratio": 0.25}
    _, cache = blend("llava", inputs, filled("llava"), **settings)
    image = columns("llava", inputs["input_ids"]).start
    assert cache.report.chosen_columns == [[4, 5, *range(image, image + 6)]]


def test_a_chat_does_not_keep_an_image_that_another_may_follow(tokenizer):
    cache = BlendCache(build("llava"), filled("llava"))
    cache._beginning = (1, 5, START, IMAGE, 7)
    cache._placeholders = frozenset({START, IMAGE})
    with torch.no_grad():
        build("llava")(torch.tensor([[1, 5, START, IMAGE, 7]]), past_key_values=cache, logits_to_keep=1)
    from hf_blend.prompt.pieces import TextPrompt

    cache._beginning = (1, 5, START, IMAGE, 7)
    assert cache._keep_beginning([TextPrompt((1, 5, START, IMAGE, 7, 8))]) == 2

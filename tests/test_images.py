# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images are computed in full, as stock computes them, and nothing of an image is ever stored.

The oracle is the stock model with a `DynamicCache`.
"""

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from hf_blend import BlendCache, PromptError
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model.anatomy import other_inputs, placeholder_ids
from hf_blend.model.identity import fingerprint
from hf_blend.store.chunk import ChunkKey
from tests.asking import memory
from tests.tiny_image_models import IMAGE, image_inputs, image_tokens, tiny_image_model

PREFIX = [1, 5, 6, 7]
CHUNKS = [[*range(10, 26)], [*range(30, 50)], [*range(52, 70)]]
QUESTION = [7, 8, 9, 11]
FLOOR = 2e-5  # of logits of size 1 to 5; another image moves them by 0.01 to 1
KINDS = pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
GREEDY = {"max_new_tokens": 4, "do_sample": False}


def filled(kind):
    store = memory()
    store.add(tiny_image_model(kind), None, CHUNKS)
    return store


def prompt(kind):
    return torch.tensor([[*PREFIX, *CHUNKS[0], *image_tokens(kind), *CHUNKS[1], *CHUNKS[2], *QUESTION]])


def last_logits(model, inputs, cache):
    with torch.no_grad():
        return model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@KINDS
@pytest.mark.parametrize("seed", [0, 1])
def test_prompt_with_image_is_computed_in_full_and_says_why(kind, seed):
    model = tiny_image_model(kind)
    inputs = image_inputs(kind, prompt(kind), seed)
    cache = BlendCache(model, filled(kind), recompute_ratio=0.0, selector="none")
    cache.get_seq_length()
    got = last_logits(model, inputs, cache)
    assert torch.equal(got, last_logits(model, inputs, DynamicCache(config=model.config)))
    assert "pixel_values" in cache.report.fallback_reason
    assert "computed in full" in cache.report.fallback_reason
    assert cache.report.loaded_chunks == 0
    assert cache.report.prompt_tokens == inputs["input_ids"].shape[1]


@KINDS
def test_text_behind_turn_with_image_is_computed_in_full_with_image(kind):
    model = tiny_image_model(kind)
    cache = BlendCache(model, filled(kind), recompute_ratio=1.0)
    first = {**image_inputs(kind, torch.tensor([[*PREFIX, *image_tokens(kind), *QUESTION]])), **GREEDY}
    turn = model.generate(**first, past_key_values=cache)
    assert turn.equal(model.generate(**first))
    second = cache.inputs(None, prefix=turn[0], chunks=CHUNKS, question=QUESTION)
    inputs = {**image_inputs(kind, second["input_ids"]), **second}
    assert model.generate(**inputs, **GREEDY, past_key_values=cache).equal(model.generate(**inputs, **GREEDY))
    assert "pass its pixel_values" in cache.report.notice


def test_chunk_with_placeholder_is_computed_in_place_and_never_stored():
    model = tiny_image_model("llava")
    store = filled("llava")
    for ids in ([*range(80, 90), *image_tokens("llava")], [IMAGE] * 3):
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(None, prefix=[*PREFIX, IMAGE], chunks=[ids, CHUNKS[0]], question=QUESTION)
        got = last_logits(model, inputs, cache)  # no pixels: the placeholders are text here
        expected = last_logits(model, {"input_ids": inputs["input_ids"]}, DynamicCache(config=model.config))
        assert float((got - expected).abs().max()) < FLOOR
        assert not store.contains(ChunkKey(fingerprint(model), (1,), tuple(ids)))
    assert len(store) == len(CHUNKS)


def test_placeholder_ids_are_those_of_config_and_its_lists():
    assert not placeholder_ids(AutoConfig.for_model("llama"))
    config = AutoConfig.for_model("ovis2")
    assert placeholder_ids(config) >= {config.image_token_id, *config.visual_indicator_token_ids}


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"input_ids": ONE, "attention_mask": ONE, "use_cache": True, "logits_to_keep": 1}, ()),
        ({"mm_encoder_outputs": {"image": [ONE]}}, ("mm_encoder_outputs",)),
        ({"tokenizer": object(), "stop_strings": ["."], "custom": [1]}, ()),  # of `generate`
    ],
)
def test_other_inputs_are_named_by_forward_or_hold_tensors(given, names):
    assert other_inputs(tiny_image_model("qwen3_vl"), given) == names


def test_placeholders_are_refused_by_name():
    kind = "llava"
    model = tiny_image_model("llava")
    store = memory()
    with pytest.raises(PromptError, match=r"chunk 1 holds the placeholder token 120, where Llava.* computed in place"):
        store.add(model, None, [CHUNKS[0], [11, IMAGE, 12]])
    assert len(store) == 0
    with pytest.raises(PromptError, match="chunk_prefix_ids holds the placeholder token 120"):
        BlendCache(model, store, chunk_prefix_ids=(1, IMAGE))
    cache = SequenceCache(model)
    with pytest.raises(PromptError, match=r"pixel_values came with a cache that.*text alone is expected"):
        last_logits(model, image_inputs(kind, prompt(kind)), cache)

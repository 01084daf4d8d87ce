# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What only a real chat model shows: its tokenizer's BOS, its template, and answers that can be read."""

import logging

import pytest

from hf_blend import BlendCache, ChunkStore
from hf_blend.prefill import notices

NOTES = ["The keeper of the light at Skerry is Una Moss.", "A lantern costs four pounds."]
QUESTION = "Who keeps the light?"


@pytest.fixture
def cache(smollm2) -> BlendCache:
    return BlendCache(smollm2[0], ChunkStore.open("memory://"), recompute_ratio=1.0)


@pytest.fixture
def warned(caplog):
    """What was said, with nothing said before."""
    notices.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "hf_blend")
    return lambda: [one.message for one in caplog.records if "chat template" in one.message]


@pytest.mark.slow
def test_inputs_are_the_ids_of_the_joined_text_where_no_token_is_merged(cache, smollm2):
    _, tokenizer = smollm2
    inputs = cache.inputs(tokenizer, chunks=NOTES, question=QUESTION)
    assert inputs["input_ids"].tolist() == [tokenizer("\n\n".join([*NOTES, QUESTION])).input_ids]
    assert tokenizer.bos_token_id not in inputs["input_ids"], "this tokenizer has a BOS and puts it nowhere"
    assert inputs.to("cpu") is inputs, "what a tokenizer gives can be moved"


def test_inputs_warn_once_of_plain_texts_for_a_chat_model(cache, smollm2, warned):
    _, tokenizer = smollm2
    cache.inputs(tokenizer, chunks=[[5, 6]], question=[7])
    cache.inputs_from_messages(tokenizer, [{"role": "user", "content": f"{NOTES[0]} {QUESTION}"}], NOTES[:1])
    assert not warned()
    for _ in range(2):
        cache.inputs(tokenizer, chunks=NOTES, question=QUESTION)
    (said,) = warned()
    assert "inputs_from_messages" in said


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_chunks_in_few_bits_are_reused(codec, smollm2, tmp_path):
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "\n\n".join([*NOTES, QUESTION])}]
    for _ in range(2):  # computed and stored, then read from the disk
        with ChunkStore.open(tmp_path, codec=codec, memory_bytes=0) as store:
            cache = BlendCache(model, store)
            model(**cache.inputs_from_messages(tokenizer, messages, NOTES), past_key_values=cache, logits_to_keep=1)
    assert (cache.report.computed_chunks, cache.report.refused_chunks) == (0, 0)
    assert cache.report.reusable_tokens

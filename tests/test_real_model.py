# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What only a real chat model shows: its tokenizer's BOS, its template, and answers that can be read."""

import pytest

from hf_blend import BlendCache, ChunkStore
from tests.asking import memory

NOTES = ["The keeper of the light at Skerry is Una Moss.", "A lantern costs four pounds."]
QUESTION = "Who keeps the light?"


@pytest.fixture
def cache(smollm2) -> BlendCache:
    return BlendCache(smollm2[0], memory(), recompute_ratio=1.0)


def test_real_model_answers(smollm2):
    model, tokenizer = smollm2
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.slow
def test_inputs_are_ids_of_joined_text_where_no_token_is_merged(cache, smollm2):
    _, tokenizer = smollm2
    inputs = cache.inputs(tokenizer, chunks=NOTES, question=QUESTION)
    assert inputs["input_ids"].tolist() == [tokenizer("\n\n".join([*NOTES, QUESTION])).input_ids]
    assert tokenizer.bos_token_id not in inputs["input_ids"], "this tokenizer has a BOS and puts it nowhere"
    assert inputs.to("cpu") is inputs, "what a tokenizer gives can be moved"


@pytest.mark.slow
def test_chunks_in_few_bits_are_reused(smollm2, tmp_path):
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "\n\n".join([*NOTES, QUESTION])}]
    for _ in range(2):  # computed and stored, then read from the disk
        with ChunkStore.open(tmp_path, codec="int8", memory_bytes=0) as store:
            cache = BlendCache(model, store)
            model(**cache.inputs_from_messages(tokenizer, messages, NOTES), past_key_values=cache, logits_to_keep=1)
    assert cache.report.computed_chunks == 0
    assert cache.report.refused_chunks == 0
    assert cache.report.reusable_tokens

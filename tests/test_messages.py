# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages become the prompt that the chat template makes, and the documents in them are reused."""

import copy
import json
import logging

import pytest
import torch

from hf_blend import BlendCache, PromptError
from hf_blend.evaluation.answering import Turn, build_request
from hf_blend.prefill.report import warn_once
from tests.asking import memory
from tests.chat_templates import (
    ASKED,
    CASES,
    CHATML,
    DOCUMENTS,
    LLAMA3,
    PHI,
    QUESTION,
    SYSTEM,
    TURNS,
    small_tokenizer,
    user,
)

WORDS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def cached(known):
    model = known[0]

    def make(store=None, **settings):
        settings.setdefault("recompute_ratio", 0.2)
        return BlendCache(model, store or memory(), **settings)

    return make


def stock(tokenizer, messages, documents=(), **template):
    """What transformers makes of messages; nothing of ours is in it."""
    given = {"documents": documents} if documents and isinstance(documents[0], dict) else {}
    begins = {"add_generation_prompt": not template.get("continue_final_message", False)}
    made = tokenizer.apply_chat_template(
        messages, **{**begins, **template, **given}, return_dict=True, return_tensors="pt"
    )
    return made["input_ids"]


def answer(model, cache, inputs, **settings):
    return model.generate(**inputs, past_key_values=cache, **WORDS | settings)


@pytest.mark.parametrize(
    ("known", "case"),
    [*(("spaces", case) for case in CASES), ("bytes", "mistral, several turns"), ("bytes", "llama 3")],
    indirect=["known"],
)
def test_inputs_from_messages_are_ids_of_apply_chat_template_and_give_its_text(known, cached, case):
    model, tokenizer = known
    template, messages, documents, given = CASES[case]
    given = {"chat_template": template, **given}
    expected = stock(tokenizer, messages, documents, **given)
    cache = cached(recompute_ratio=1.0)
    inputs = cache.inputs_from_messages(tokenizer, messages, documents, **given)
    assert torch.equal(inputs["input_ids"], expected)
    assert (expected == tokenizer.bos_token_id).sum() == ("bos_token" in template)
    assert torch.equal(answer(model, cache, inputs), model.generate(expected, **WORDS))
    text = tokenizer.decode(expected[0])
    named = [document for document in DOCUMENTS if document in text] or DOCUMENTS
    tokens = sum(len(tokenizer.encode(document, add_special_tokens=False)) for document in named)
    assert cache.report.reusable_tokens + cache.report.exact_tokens > 0.7 * tokens


@pytest.mark.parametrize("case", ["unnamed", *list(CASES)[1::3]])
def test_documents_in_messages_are_loaded_and_prompt_that_was_seen_computes_no_chunk(known, cached, case):
    model, tokenizer = known
    template, messages, documents, given = CASES.get(case, (CHATML, [SYSTEM, *TURNS], (), {}))
    store = memory()
    reports = []
    keys = store.add(model, tokenizer, DOCUMENTS)
    for _ in range(2):
        cache = cached(store)
        inputs = cache.inputs_from_messages(tokenizer, messages, documents, chat_template=template, **given)
        answer(model, cache, inputs, max_new_tokens=1)
        reports.append(cache.report)
    asked = json.dumps([messages, documents])
    assert reports[0].loaded_chunks >= sum(json.dumps(text)[1:-1] in asked for text in DOCUMENTS)
    assert reports[0].computed_chunks == len(store) - len(keys) <= 1, "what is before the documents, and nothing else"
    assert reports[1].computed_chunks == 0
    assert 0 <= reports[1].seam_tokens <= 4 * reports[1].loaded_chunks


def test_text_before_documents_is_exact_from_second_request_on(known, cached):
    model, tokenizer = known
    store = memory()
    reports = []
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        cache = cached(store)
        asked = user("\n\n".join([*documents, QUESTION]))
        inputs = cache.inputs_from_messages(tokenizer, [SYSTEM, asked], documents, chat_template=LLAMA3)
        answer(model, cache, inputs)
        reports.append(cache.report)
    assert reports[0].computed_chunks == 4
    assert reports[1].computed_chunks == 0
    assert reports[1].exact_tokens == reports[0].exact_tokens > 10


def test_inputs_from_messages_pad_batch_on_left(known, cached):
    model, tokenizer = known
    both = [[SYSTEM, ASKED], [TURNS[2]]]
    cache = cached(recompute_ratio=1.0)
    inputs = cache.inputs_from_messages(tokenizer, both, [DOCUMENTS, DOCUMENTS[1:]], chat_template=PHI)
    output = answer(model, cache, inputs)
    for row, messages in enumerate(both):
        alone = model.generate(stock(tokenizer, messages, chat_template=PHI), **WORDS)[0]
        assert torch.equal(output[row, -len(alone) :], alone)
    with pytest.raises(PromptError, match="batch of 2 prompts came with 3 documents, expected a list"):
        cache.inputs_from_messages(tokenizer, both, DOCUMENTS, chat_template=PHI)


def test_inputs_warn_once_of_plain_texts_for_chat_model(known, cached, caplog):
    cache = cached()
    tokenizer = copy.copy(known[1])
    tokenizer.chat_template = CHATML
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "hf_blend")
    cache.inputs(tokenizer, chunks=[[5, 6]], question=[7])
    cache.inputs_from_messages(tokenizer, [ASKED], DOCUMENTS)
    assert not caplog.messages
    for _ in range(2):
        cache.inputs(tokenizer, chunks=DOCUMENTS, question=QUESTION)
    (said,) = caplog.messages
    assert "chat template" in said
    assert "inputs_from_messages" in said


@pytest.fixture
def plain(tiny_model):
    tokenizer = small_tokenizer("spaces")
    tokenizer.chat_template = CHATML
    return tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=2048), tokenizer


def test_turn_is_rendered_as_template_renders_whole_conversation(plain):
    tokenizer = plain[1]
    history = [Turn("Who?", "Mara.", ("DOC\n",)), Turn("Where?", "There.")]
    made = build_request(tokenizer, ["NEW\n"], "When?", "Be short.", history)
    assert tokenizer.apply_chat_template(made["messages"], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nDOC\n\nQuestion: Who?<|im_end|>\n"
        "<|im_start|>assistant\nMara.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        "<|im_start|>assistant\nThere.<|im_end|>\n<|im_start|>user\nNEW\n\nQuestion: When?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer.chat_template = None
    made = build_request(tokenizer, ["NEW\n"], "When?", None, history)
    assert made["chunks"] == ["DOC\n", "NEW\n"]
    said = "Question: Who?\nAnswer: Mara.\nQuestion: Where?\nAnswer: There.\n"
    assert made["question"] == f"{said}Question: When?\nAnswer:"

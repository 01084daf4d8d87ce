# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions over documents become the prompt that a model knows: messages where it has a chat template."""

import pytest
import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.evaluation.answering import FULL_PREFILL
from hf_blend.evaluation.asking import Asked, Method, ask
from hf_blend.evaluation.indexing import index
from hf_blend.evaluation.prompting import INSTRUCTION, ids_of, inputs_of, request, split
from tests.chat_templates import CHATML, DOCUMENTS, GEMMA, JOINED, LLAMA3, QUESTION, small_tokenizer


@pytest.fixture
def known(tiny_model):
    tokenizer = small_tokenizer.__wrapped__("spaces")
    tokenizer.chat_template = CHATML
    return tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=2048), tokenizer


BOTH = ["system", "user"]


@pytest.mark.parametrize(("template", "roles"), [(CHATML, BOTH), (LLAMA3, BOTH), (GEMMA, ["user"])])
def test_the_instruction_is_a_system_message_where_the_template_has_one(known, template, roles):
    tokenizer = known[1]
    tokenizer.chat_template = template
    given = request(tokenizer, DOCUMENTS, QUESTION, None)
    assert [message["role"] for message in given["messages"]] == roles
    text = tokenizer.apply_chat_template(given["messages"], tokenize=False)
    assert text.count(INSTRUCTION) == 1
    assert text.index(INSTRUCTION) < text.index(DOCUMENTS[0]) < text.index(QUESTION)


def test_a_model_without_a_template_has_pieces(known):
    tokenizer = known[1]
    tokenizer.chat_template = None
    assert request(tokenizer, DOCUMENTS, QUESTION, "Be brief.") == {
        "prefix": "Be brief.",
        "chunks": DOCUMENTS,
        "question": QUESTION,
    }


@pytest.mark.parametrize("tokens", [5, 11, 1000])
def test_documents_of_a_chat_model_are_cut_as_text_and_nothing_of_it_is_lost(known, tokens):
    tokenizer = known[1]
    pieces = split(tokenizer, JOINED, tokens)
    assert "".join(pieces) == JOINED
    tokenizer.chat_template = None
    assert len(pieces) == len(split(tokenizer, JOINED, tokens))


def test_what_was_indexed_is_found_in_the_prompt_of_a_question(known):
    model, tokenizer = known
    store = ChunkStore.open("memory://")
    assert index(model, tokenizer, store, [JOINED], 24).stored > 3
    given = request(tokenizer, split(tokenizer, JOINED, 24), QUESTION, None)
    cache = BlendCache(model, store)
    inputs = inputs_of(cache, tokenizer, given)
    assert inputs["input_ids"][0].tolist() == ids_of(tokenizer, given)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
    assert cache.report.computed_chunks <= 1, "what is before the documents"


def test_asking_gives_the_answer_of_a_full_prefill_at_ratio_1_and_marks_documents_only(known):
    model, tokenizer = known
    asked = Asked(request(tokenizer, split(tokenizer, JOINED, 24), QUESTION, None), QUESTION)
    store = ChunkStore.open("memory://")
    ways = (FULL_PREFILL, Method("blend", BlendConfig(1.0)))
    full, blend = (ask(model, tokenizer, store, asked, way, 6) for way in ways)
    assert torch.equal(full.answer.input_ids, blend.answer.input_ids)
    assert full.row["answer"] == blend.row["answer"]
    shown = tokenizer.decode(full.answer.input_ids[: len(full.tokens)])
    assert shown.endswith("by this clock.")

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions over documents become the prompt that a model knows: messages where it has a chat template."""

import pytest
import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.evaluation.answering import FULL_PREFILL, INSTRUCTION, Turn, ids_of, inputs_of, request
from hf_blend.evaluation.asking import Asked, Method, ask
from hf_blend.evaluation.documents import Document
from hf_blend.evaluation.indexing import Indexer
from hf_blend.evaluation.retrieving import Splitter
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


def test_a_turn_is_rendered_as_the_template_renders_the_whole_conversation(known):
    tokenizer = known[1]
    history = [Turn("Who?", "Mara."), Turn("Where?", "There.")]
    made = request(tokenizer, ["DOC\n"], "When?", "Be short.", history)
    assert tokenizer.apply_chat_template(made["messages"], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nDOC\n\nQuestion: Who?<|im_end|>\n"
        "<|im_start|>assistant\nMara.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        "<|im_start|>assistant\nThere.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer.chat_template = None
    made = request(tokenizer, ["DOC\n"], "When?", None, history)
    said = "Question: Who?\nAnswer: Mara.\nQuestion: Where?\nAnswer: There.\n"
    assert made["question"] == f"{said}Question: When?\nAnswer:"


def split(tokenizer, chunk_tokens):
    pytest.importorskip("semantic_text_splitter", reason="the extra rag is not installed: pip install hf-blend[rag]")
    return Splitter(tokenizer, chunk_tokens).split(Document("joined", JOINED))


def test_what_was_indexed_is_found_in_the_prompt_of_a_question(known):
    model, tokenizer = known
    store = ChunkStore.open("memory://")
    pieces = split(tokenizer, 24)
    assert Indexer(model, tokenizer, store, pieces).run().stored > 3
    given = request(tokenizer, [piece.prompt_text for piece in pieces], QUESTION, None)
    cache = BlendCache(model, store)
    inputs = inputs_of(cache, tokenizer, given)
    assert inputs["input_ids"][0].tolist() == ids_of(tokenizer, given)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
    assert cache.report.computed_chunks <= 1, "what is before the documents"


def test_asking_gives_the_answer_of_a_full_prefill_at_ratio_1_and_marks_documents_only(known):
    model, tokenizer = known
    asked = Asked(request(tokenizer, [piece.prompt_text for piece in split(tokenizer, 24)], QUESTION, None), QUESTION)
    store = ChunkStore.open("memory://")
    ways = (FULL_PREFILL, Method("blend", BlendConfig(1.0)))
    full, blend = (ask(model, tokenizer, store, asked, way, 6) for way in ways)
    assert torch.equal(full.answer.input_ids, blend.answer.input_ids)
    assert full.row["answer"] == blend.row["answer"]
    shown = tokenizer.decode(full.answer.input_ids[: len(full.tokens)])
    assert shown.rstrip().endswith("by this clock.")

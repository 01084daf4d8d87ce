# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The classes for LangChain, LlamaIndex and Haystack: answers of stock `generate`, documents reused, real streams."""

import asyncio
import copy
import importlib
import os
import re
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from hf_blend import BlendConfig
from hf_blend.errors import ConfigError, MissingExtraError, PromptError
from hf_blend.integrations.answering import Answerer
from hf_blend.model.identity import fingerprint
from hf_blend.recipes import Recipe
from tests.adapters import adapted, eager, off, switched
from tests.chat_templates import CHATML, DOCUMENTS, JOINED, LLAMA3, QUESTION, SYSTEM, small_tokenizer, user

NEW = {"max_new_tokens": 6, "eos_token_id": None}
TUNED = Recipe({"selector": "boundary", "recompute_ratio": 0.3}, "tuned on 4 prompts")
EVERYTHING = BlendConfig(recompute_ratio=1.0)
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
ASKED = [SYSTEM, user(QUESTION)]
PLACED = [SYSTEM, user(f"{JOINED}\n\n{QUESTION}")]
FRAMEWORKS = {"langchain": "langchain_core", "llamaindex": "llama_index.core", "haystack": "haystack"}


def framework(extra):
    """The module of an extra, or a skip that says what to install."""
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    pytest.importorskip(FRAMEWORKS[extra].partition(".")[0], reason=f"{extra}: pip install hf-blend[{extra}]")
    return importlib.import_module(f"hf_blend.integrations.{extra}")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = copy.deepcopy(small_tokenizer("spaces"))
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def model(shared_model, tokenizer):
    return shared_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)


@pytest.fixture
def stock(model, tokenizer):
    """What `apply_chat_template` and `generate` answer, without anything of ours."""

    def answer(messages=None, text=None):
        if messages:
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        else:
            inputs = tokenizer(text, return_tensors="pt")
        ids = inputs["input_ids"]
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **NEW)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    return answer


@pytest.fixture
def answerer(model, tokenizer, store):
    return Answerer(model, tokenizer, store, EVERYTHING, {"temperature": 0, **NEW})


@pytest.fixture
def fields(model, tokenizer, store):
    """What LangChain's and LlamaIndex' classes are made with."""
    return {"model": model, "tokenizer": tokenizer, "store": store, "temperature": 0, "settings": NEW}


def test_answerer_puts_documents_that_no_message_holds_before_question(answerer, stock):
    answer = answerer.chat(ASKED, DOCUMENTS).whole()
    assert answer.text == stock(PLACED)
    assert answer.report["computed_chunks"] == 4
    system = {**SYSTEM, "content": f"{SYSTEM['content']}\n{DOCUMENTS[1]}"}
    question = user(f"{DOCUMENTS[0]}\n\n{QUESTION}")
    assert answerer.chat([system, ASKED[1]], DOCUMENTS[:2]).whole().text == stock([system, question])


def test_answerer_finds_stored_chunks_in_messages_without_their_names(answerer, store, stock):
    store.add(answerer.model, answerer.tokenizer, DOCUMENTS)
    answer = answerer.chat(PLACED).whole()
    assert answer.report["loaded_chunks"] == 3
    assert answer.text == stock(PLACED)


def test_answer_ends_before_stop_text(answerer):
    whole = answerer.chat(ASKED, DOCUMENTS).whole()
    stop = whole.text[3:6]
    cut = answerer.chat(ASKED, DOCUMENTS, stops=[stop]).whole()
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert whole.reason == "length"
    assert cut.reason == "stop"


def test_answer_of_assisted_decoding_has_no_rejected_candidates(answerer):
    alone = answerer.chat(ASKED, DOCUMENTS, max_new_tokens=24).whole()
    assisted = answerer.chat(ASKED, DOCUMENTS, max_tokens=24, prompt_lookup_num_tokens=3)
    assert "".join(assisted) == alone.text
    assert assisted.tokens == alone.tokens


def test_answer_stops_computing_when_its_stream_is_closed(answerer):
    threads = threading.active_count()
    answer = answerer.chat(ASKED, DOCUMENTS, max_new_tokens=1000)
    stream = iter(answer)
    assert next(stream)
    stream.close()
    assert answer._cache.get_seq_length() < answer.prompt_tokens + 900
    assert threading.active_count() <= threads


@contextmanager
def another_template(answerer):
    answerer.tokenizer.chat_template = LLAMA3
    yield


@contextmanager
def another_generation_config(answerer):
    answerer.model.generation_config.repetition_penalty = 1.5
    yield


@contextmanager
def another_recipe(answerer):
    answerer.store.recipes.put(fingerprint(answerer.model), TUNED)
    yield


@contextmanager
def another_setting(answerer):
    answerer.settings["max_new_tokens"] = 7
    yield


@pytest.mark.parametrize(
    "change", [another_template, another_generation_config, another_recipe, another_setting, off, switched, eager]
)
def test_identity_of_answers_is_another_with(change, tokenizer, store):
    answerer = Answerer(adapted(len(tokenizer)), copy.deepcopy(tokenizer), store, None, {})
    before = answerer.identity
    assert answerer.identity == before
    with change(answerer.model if change in (off, switched, eager) else answerer):
        assert answerer.identity != before


def test_recipe_of_store_is_taken_where_no_settings_are_given(model, tokenizer, store):
    store.recipes.put(fingerprint(model), TUNED)
    answer = Answerer(model, tokenizer, store, None, NEW).chat(ASKED).whole()
    assert answer.report["recipe"] == TUNED.source


@pytest.mark.parametrize(
    ("messages", "documents", "settings", "error", "words"),
    [
        ([SYSTEM], DOCUMENTS, {}, PromptError, "expected one of the role user"),
        ([user([IMAGE])], (), {}, PromptError, "the part .*image.* is no text"),
        (ASKED, (), {"stops": [""]}, ConfigError, "none of them empty"),
    ],
)
def test_answerer_refuses_by_name(answerer, messages, documents, settings, error, words):
    with pytest.raises(error, match=words):
        answerer.chat(messages, documents, **settings).whole()


def test_langchain_answers_as_stock_and_reuses_documents(fields, stock):
    chat = framework("langchain").ChatBlend
    from langchain_core.documents import Document
    from langchain_core.messages import HumanMessage, SystemMessage

    documents = [Document(page_content=text, metadata={"source": "a.md"}) for text in DOCUMENTS]
    messages = [SystemMessage(SYSTEM["content"]), HumanMessage(QUESTION)]
    exact = chat(**fields, blend=EVERYTHING)
    answer = exact.invoke(messages, documents=documents)
    assert answer.content == stock(PLACED)
    assert answer.response_metadata["hf_blend"]["computed_chunks"] == 4
    pieces = list(exact.stream(messages, documents=documents))
    assert len([piece for piece in pieces if piece.content]) > 1
    whole = sum(pieces[1:], pieces[0])
    assert whole.content == answer.content
    assert whole.usage_metadata["output_tokens"] == NEW["max_new_tokens"]
    assert whole.response_metadata["finish_reason"] == "length"
    again = chat(**fields).invoke(messages, documents=documents[::-1])
    assert again.response_metadata["hf_blend"]["computed_chunks"] == 0
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0.5 * again.usage_metadata["input_tokens"]
    assert exact.invoke(messages, documents=documents, stop=[answer.content[3:5]]).content == answer.content[:3]


def test_langchain_batches_caches_and_counts_tokens(fields, tokenizer, stock):
    chat = framework("langchain").ChatBlend
    from langchain_core.caches import InMemoryCache

    llm = chat(**fields, blend=EVERYTHING)
    questions = [f"{QUESTION} {number}" for number in range(3)]
    expected = [stock([user(f"{JOINED}\n\n{question}")]) for question in questions]
    assert [answer.content for answer in llm.batch(questions, documents=DOCUMENTS)] == expected
    assert asyncio.run(llm.ainvoke(questions[0], documents=DOCUMENTS)).content == expected[0]
    assert llm.get_num_tokens(QUESTION) == len(tokenizer.encode(QUESTION, add_special_tokens=False))
    cache = InMemoryCache()
    counts = []
    for tokens in (2, 5, 2):
        other = chat(**{**fields, "settings": {"eos_token_id": None}}, max_new_tokens=tokens, cache=cache)
        usage = other.invoke(QUESTION).usage_metadata
        counts.append(usage["output_tokens"])
    assert counts == [2, 5, 2]
    other.tokenizer = copy.deepcopy(tokenizer)
    other.tokenizer.chat_template = LLAMA3
    assert other.invoke(QUESTION).usage_metadata["input_tokens"] != usage["input_tokens"]
    with pytest.raises(ValueError, match="max_new_token\n"):
        chat(**fields, max_new_token=2)
    with pytest.raises(ConfigError, match="store is 'kv', expected"):
        chat(**{**fields, "store": "kv"}).invoke(QUESTION)


def test_llamaindex_reuses_what_was_retrieved_in_its_own_prompts(store, fields, monkeypatch, stock):
    blend = framework("llamaindex")
    from llama_index.core import QueryBundle
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

    class All(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            nodes = [TextNode(text=text, metadata={"file_name": "a.md"}) for text in DOCUMENTS]
            return [NodeWithScore(node=node, score=1.0) for node in nodes]

    llm = blend.BlendLLM(**fields, blend=EVERYTHING)
    calls = []
    chat = Answerer.chat

    def recorded(self, messages, *arguments, **settings):
        calls.append((messages, chat(self, messages, *arguments, **settings)))
        return calls[-1][1]

    monkeypatch.setattr(Answerer, "chat", recorded)
    engine = RetrieverQueryEngine.from_args(All(), llm=llm, node_postprocessors=[blend.StoreNodes(llm=llm)])
    text = str(engine.query(QUESTION))
    ((messages, answer),) = calls
    assert text == stock(messages)
    assert all(text in messages[-1]["content"] for text in DOCUMENTS)
    assert len(store) == answer.report["loaded_chunks"] == 3


def test_llamaindex_chats_completes_and_streams(fields, stock):
    blend = framework("llamaindex")
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

    llm = blend.BlendLLM(**fields, blend=EVERYTHING)
    messages = [ChatMessage(role=message["role"], content=message["content"]) for message in ASKED]
    whole = llm.chat(messages, documents=DOCUMENTS)
    assert whole.message.content == stock(PLACED)
    parts = list(llm.stream_chat(messages, documents=DOCUMENTS))
    assert len(parts) > 1
    assert parts[-1].message.content == whole.message.content
    text = llm.complete(QUESTION, documents=DOCUMENTS)
    assert text.text == stock(text=f"{JOINED}\n\n{QUESTION}")
    assert "".join(part.delta for part in llm.stream_complete(QUESTION, documents=DOCUMENTS)) == text.text
    assert text.raw["usage"]["completion_tokens"] == NEW["max_new_tokens"]
    assert llm.metadata.context_window == 2048
    with pytest.raises(PromptError, match=r"ImageBlock.*is no text"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(image=b"aaaa")])])


def test_haystack_answers_in_pipeline_and_streams(model, tokenizer, store, stock):
    blend = framework("haystack")
    from haystack import Document, Pipeline, component
    from haystack.dataclasses import ChatMessage

    @component
    class All:
        @component.output_types(documents=list[Document])
        def run(self, query: str) -> dict[str, list[Document]]:
            return {"documents": [Document(content=text, meta={"file_path": "a.md"}) for text in DOCUMENTS]}

    chunks = []
    settings = {"temperature": 0, **NEW}
    pipeline = Pipeline()
    pipeline.add_component("retriever", All())
    llm = blend.BlendChatGenerator(model, tokenizer, store, EVERYTHING, settings, chunks.append)
    pipeline.add_component("llm", llm)
    pipeline.connect("retriever.documents", "llm.documents")
    messages = [ChatMessage.from_system(SYSTEM["content"]), ChatMessage.from_user(QUESTION)]
    for computed in (4, 0):
        chunks.clear()
        (reply,) = pipeline.run({"retriever": {"query": QUESTION}, "llm": {"messages": messages}})["llm"]["replies"]
        assert reply.text == stock(PLACED) == "".join(chunk.content for chunk in chunks)
        assert len(chunks) > 1
        assert reply.meta["hf_blend"]["computed_chunks"] == computed
    assert reply.meta["usage"]["completion_tokens"] == NEW["max_new_tokens"]


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_framework_that_is_missing_is_named_with_its_extra(extra, monkeypatch):
    name = f"hf_blend.integrations.{extra}"
    for known in [*sys.modules]:
        if known == name or f"{known}.".startswith(f"{FRAMEWORKS[extra]}."):
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, FRAMEWORKS[extra], None)
    with pytest.raises(MissingExtraError, match=re.escape(f'pip install "hf-blend[{extra}]"')):
        importlib.import_module(name)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The classes for LangChain, LlamaIndex and Haystack: answers of stock `generate`, documents reused, real streams."""

import asyncio
import copy
import functools
import importlib
import operator
import os
import re
import sys
import threading

import pytest
import torch
from transformers import GenerationConfig

from hf_blend import BlendConfig
from hf_blend.errors import ConfigError, MissingExtraError, PromptError
from hf_blend.integrations.answering import Answerer
from tests.chat_templates import CHATML, COMMAND_R, DOCUMENTS, JOINED, QUESTION, SYSTEM, TITLED, small_tokenizer

NEW = {"max_new_tokens": 6, "eos_token_id": None}
EVERYTHING = BlendConfig(recompute_ratio=1.0)
SEVERAL = GenerationConfig(do_sample=True, num_return_sequences=3)
PICTURED = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": "data:,"}}]
ASKED = [SYSTEM, {"role": "user", "content": QUESTION}]
PLACED = [SYSTEM, {"role": "user", "content": f"{JOINED}\n\n{QUESTION}"}]
FRAMEWORKS = {"langchain": "langchain_core", "llamaindex": "llama_index.core", "haystack": "haystack"}


def framework(extra):
    """The module of an extra, or a skip that says what to install."""
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    pytest.importorskip(FRAMEWORKS[extra].partition(".")[0], reason=f"{extra}: pip install hf-blend[{extra}]")
    return importlib.import_module(f"hf_blend.integrations.{extra}")


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(small_tokenizer("spaces"))
    made.chat_template = CHATML
    return made


@pytest.fixture
def model(shared_model, tokenizer):
    return shared_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)


def stock(model, tokenizer, messages, **template):
    """What `apply_chat_template` and `generate` answer, without anything of ours."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", **template)
    return stock_text(model, tokenizer, ids["input_ids"])


def stock_text(model, tokenizer, ids):
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **NEW)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture
def answerer(model, tokenizer, store):
    return Answerer(model, tokenizer, store, EVERYTHING, {"temperature": 0, **NEW})


@pytest.fixture
def given(model, tokenizer, store):
    """What LangChain's and LlamaIndex' classes are made with."""
    return {"model": model, "tokenizer": tokenizer, "store": store, "temperature": 0, "settings": NEW}


def test_documents_in_no_message_are_put_before_the_question(answerer):
    answer = answerer.chat(ASKED, DOCUMENTS).whole()
    assert answer.text == stock(answerer.model, answerer.tokenizer, PLACED)
    assert answer.report["computed_chunks"] == 4
    messages = [{**SYSTEM, "content": f"{SYSTEM['content']}\n{DOCUMENTS[1]}"}, ASKED[1]]
    given = [messages[0], {"role": "user", "content": f"{DOCUMENTS[0]}\n\n{QUESTION}"}]
    expected = stock(answerer.model, answerer.tokenizer, given)
    assert answerer.chat(messages, DOCUMENTS[:2]).whole().text == expected


def test_a_template_that_takes_documents_gets_them_as_documents(answerer):
    template = {"chat_template": COMMAND_R}
    answer = answerer.chat(ASKED, TITLED, template).whole()
    assert answer.text == stock(answerer.model, answerer.tokenizer, ASKED, documents=TITLED, **template)
    assert answer.report["computed_chunks"] >= 3


def test_stored_chunks_are_found_in_messages_without_naming_them(answerer, store):
    store.add(answerer.model, answerer.tokenizer, DOCUMENTS)
    answer = answerer.chat(PLACED).whole()
    assert answer.report["loaded_chunks"] == 3
    assert answer.text == stock(answerer.model, answerer.tokenizer, PLACED)


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(answerer):
    whole = answerer.chat(ASKED, DOCUMENTS).whole()
    stop = whole.text[3:6]
    cut = answerer.chat(ASKED, DOCUMENTS, stops=[stop]).whole()
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert (whole.reason, cut.reason) == ("length", "stop")


def test_an_answer_by_assisted_decoding_has_no_token_that_was_a_candidate_only(answerer):
    alone = answerer.chat(ASKED, DOCUMENTS, max_new_tokens=24).whole()
    assisted = answerer.chat(ASKED, DOCUMENTS, max_new_tokens=24, prompt_lookup_num_tokens=3)
    assert "".join(assisted) == alone.text
    assert assisted.tokens == alone.tokens


def test_closing_a_stream_ends_the_computation(answerer):
    before = threading.active_count()
    answer = answerer.chat(ASKED, DOCUMENTS, max_new_tokens=1000)
    stream = iter(answer)
    assert next(stream)
    stream.close()
    assert answer._cache.get_seq_length() < answer.prompt_tokens + 900
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda one: one.chat([SYSTEM], DOCUMENTS), PromptError, "has the role user"),
        (lambda one: one.chat(ASKED, [" "]), PromptError, "has no text"),
        (lambda one: one.chat(ASKED, [{"title": "a"}]), PromptError, "has no text"),
        (lambda one: one.chat([{"role": "user", "content": PICTURED}]), PromptError, "the part .*image.* is no text"),
        (lambda one: one.chat([{"role": "user", "content": 5}]), PromptError, "has the part 5, which is no text"),
        (lambda one: one.chat(ASKED, num_beams=4), ConfigError, "num_beams is 4"),
        (lambda one: one.chat(ASKED, num_return_sequences=2), ConfigError, "num_return_sequences is 2"),
        (lambda one: one.complete(QUESTION, generation_config=SEVERAL), ConfigError, "num_return_sequences is 3"),
        (lambda one: one.chat(ASKED, streamer=None), ConfigError, "streamer was passed"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(answerer, call, error, says):
    with pytest.raises(error, match=says):
        call(answerer)


def test_what_generate_refuses_reaches_the_caller(answerer):
    with pytest.raises(ConfigError, match="no_such_setting=1 is no argument of generate"):
        answerer.chat(ASKED, no_such_setting=1)
    with pytest.raises(
        ConfigError, match=r"generate failed with .*repetition_penalty.*: ValueError: .*positive float"
    ):
        answerer.chat(ASKED, repetition_penalty=-1.0).whole()


def test_langchain_answers_as_stock_streams_in_pieces_and_reuses_documents(model, tokenizer, given):
    chat = framework("langchain").ChatBlend
    from langchain_core.documents import Document
    from langchain_core.messages import HumanMessage, SystemMessage

    documents = [Document(page_content=text, metadata={"source": "a.md"}) for text in DOCUMENTS]
    messages = [SystemMessage(SYSTEM["content"]), HumanMessage(QUESTION)]
    exact = chat(**given, blend=EVERYTHING)
    answer = exact.invoke(messages, documents=documents)
    assert answer.content == stock(model, tokenizer, PLACED)
    assert answer.response_metadata["hf_blend"]["computed_chunks"] == 4
    pieces = list(exact.stream(messages, documents=documents))
    assert len([piece for piece in pieces if piece.content]) > 1
    whole = functools.reduce(operator.add, pieces)
    assert whole.content == answer.content
    assert whole.usage_metadata["output_tokens"] == NEW["max_new_tokens"]
    assert whole.response_metadata["finish_reason"] == "length"
    again = chat(**given).invoke(messages, documents=documents[::-1])
    assert again.response_metadata["hf_blend"]["computed_chunks"] == 0
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0.5 * again.usage_metadata["input_tokens"]
    assert exact.invoke(messages, documents=documents, stop=[answer.content[3:5]]).content == answer.content[:3]
    with pytest.raises(PromptError, match="expected a list"):
        exact.invoke(messages, documents=documents[0])


def test_langchain_answers_several_at_once_as_one_alone(model, tokenizer, given):
    llm = framework("langchain").ChatBlend(**given, blend=EVERYTHING)
    questions = [f"{QUESTION} {number}" for number in range(4)]
    turns = [{"role": "user", "content": f"{JOINED}\n\n{question}"} for question in questions]
    answers = llm.batch(questions, documents=DOCUMENTS)
    assert [one.content for one in answers] == [stock(model, tokenizer, [turn]) for turn in turns]
    alone = asyncio.run(llm.ainvoke(questions[0], documents=DOCUMENTS))
    assert alone.content == answers[0].content


MEANT = [  # what is passed when a model is made, or with a call → tokens of the answer
    ({"max_tokens": 2}, {}, 2),
    ({"max_new_tokens": 4}, {"max_tokens": 2}, 2),
    ({"max_tokens": 4}, {"max_new_tokens": 2}, 2),
    ({}, {"max_completion_tokens": 2, "n": 1}, 2),
    ({"max_tokens": 3, "top_k": 5, "num_beams": 1, "temperature": 0.0}, {}, 3),
]


@pytest.mark.parametrize(("made", "called", "tokens"), MEANT)
def test_chat_blend_takes_what_is_meant_by_other_names(model, tokenizer, store, made, called, tokens):
    base = {"model": model, "tokenizer": tokenizer, "store": store, "eos_token_id": None}
    llm = framework("langchain").ChatBlend(**base, **made)
    assert llm.invoke(QUESTION, **called).usage_metadata["output_tokens"] == tokens
    assert len(list(llm.stream(QUESTION, **called))) > 1
    other = framework("llamaindex").BlendLLM(**base, **made)
    assert other.complete(QUESTION, **called).raw["usage"]["completion_tokens"] == tokens
    generator = framework("haystack").BlendChatGenerator(model, tokenizer, store, None, {"eos_token_id": None, **made})
    from haystack.dataclasses import ChatMessage

    (reply,) = generator.run([ChatMessage.from_user(QUESTION)], generation_kwargs=called)["replies"]
    assert reply.meta["usage"]["completion_tokens"] == tokens


def test_chat_blend_takes_stop_texts_counts_by_its_tokenizer_and_is_told_apart_in_a_cache(model, tokenizer, given):
    chat = framework("langchain").ChatBlend
    from langchain_core.caches import InMemoryCache
    from langchain_core.messages import HumanMessage, trim_messages

    whole = chat(**given).invoke(QUESTION).content
    assert whole
    assert chat(**given, stop=[whole[-1:]]).invoke(QUESTION).content == whole[: whole.find(whole[-1:])]
    assert chat(**given, streaming=True).invoke(QUESTION, stream=False).content == whole
    assert chat(**given).get_num_tokens(QUESTION) == len(tokenizer.encode(QUESTION, add_special_tokens=False)) > 3
    said = [HumanMessage("a " * 50), HumanMessage("b")]
    assert trim_messages(said, max_tokens=20, token_counter=chat(**given)) == said[1:]
    cache, asked = InMemoryCache(), {**given, "settings": {"eos_token_id": None}}
    counts = [chat(**asked, max_tokens=count, cache=cache).invoke(QUESTION).usage_metadata for count in (2, 5, 2)]
    assert [one["output_tokens"] for one in counts] == [2, 5, 2]


REFUSED = {  # when it is made, and with a call
    "a typo": ({"max_new_token": 2}, "max_new_token=2 is no argument of generate. Write max_new_tokens, or leave"),
    "something else": ({"nonsense": 2}, "nonsense=2 is no argument of generate. Leave it out"),
    "two answers": ({"n": 2}, "n is 2, expected 1"),
    "no length": ({"max_tokens": 0}, "max_new_tokens is 0, expected a whole number from 1 on"),
    "half a token": ({"max_tokens": 2.5}, "max_new_tokens is 2.5, expected a whole number"),
    "a cold model": ({"temperature": -1}, "temperature is -1.*, expected a number from 0 on"),
    "tools": ({"tools": [{"type": "function"}]}, "tools=.* came, but it answers with text"),
    "a form": ({"response_format": {"type": "json_object"}}, "response_format=.* came, but it answers with text"),
    "log probabilities": ({"logprobs": True}, "logprobs=True is no argument of generate"),
    "an empty stop text": ({"stop": [""]}, r"stop is \[''\], expected a text, or texts, none empty"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_chat_blend_refuses_what_it_cannot_do_in_our_words(model, tokenizer, store, kind):
    settings, says = REFUSED[kind]
    base = {"model": model, "tokenizer": tokenizer, "store": store}
    for make, ask in (
        (framework("langchain").ChatBlend, lambda llm, **given: llm.invoke(QUESTION, **given)),
        (framework("llamaindex").BlendLLM, lambda llm, **given: llm.complete(QUESTION, **given)),
    ):
        with pytest.raises(ConfigError, match=says):
            ask(make(**base, **settings))
        with pytest.raises(ConfigError, match=says):
            ask(make(**base), **settings)


def test_chat_blend_refuses_tools_schemas_and_what_is_no_model_in_our_words(model, tokenizer, given):
    chat, blend = framework("langchain").ChatBlend, framework("llamaindex").BlendLLM
    llm = chat(**given)
    for bind in (lambda: llm.bind_tools([{"name": "clock"}]), lambda: llm.with_structured_output(dict)):
        with pytest.raises(ConfigError, match="came for ChatBlend, but it answers with text"):
            bind()
    with pytest.raises(ConfigError, match="template is 5, expected a dict"):
        llm.invoke(QUESTION, template=5)
    for kind in (chat, blend):
        for wrong, says in (
            ({"store": "kv-store"}, "store is 'kv-store', expected a ChunkStore"),
            ({"model": "a/name"}, "model is 'a/name', expected a model of transformers"),
            ({"tokenizer": None}, "tokenizer is None, expected the model's tokenizer"),
            ({"max_new_tokens": "many"}, f"{kind.__name__} cannot be made: max_new_tokens is 'many'"),
            ({"settings": 5}, "settings is 5, expected a dict"),
        ):
            with pytest.raises(ConfigError, match=says):
                kind(**{**given, **wrong})
        with pytest.raises(ConfigError, match="tokenizer is missing"):
            kind(model=model, store=given["store"])


def test_llamaindex_reuses_what_was_retrieved_in_its_own_prompts(model, tokenizer, store, given, monkeypatch):
    blend = framework("llamaindex")
    from llama_index.core import QueryBundle
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

    class All(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            nodes = [TextNode(text=text, metadata={"file_name": "a.md"}) for text in DOCUMENTS]
            return [NodeWithScore(node=node, score=1.0) for node in nodes]

    llm = blend.BlendLLM(**given, blend=EVERYTHING)
    seen = []

    def noted(self, messages, *rest, **more):
        seen.append((messages, chat(self, messages, *rest, **more)))
        return seen[-1][1]

    chat = Answerer.chat
    monkeypatch.setattr(Answerer, "chat", noted)
    engine = RetrieverQueryEngine.from_args(All(), llm=llm, node_postprocessors=[blend.StoreNodes(llm=llm)])
    said = str(engine.query(QUESTION))
    ((messages, answer),) = seen
    assert said == stock(model, tokenizer, messages)
    assert all(text in messages[-1]["content"] for text in DOCUMENTS)
    assert len(store) == answer.report["loaded_chunks"] == 3


def test_llamaindex_chats_completes_and_streams(model, tokenizer, given):
    blend = framework("llamaindex")
    from llama_index.core.llms import ChatMessage

    llm = blend.BlendLLM(**given, blend=EVERYTHING)
    messages = [ChatMessage(role=one["role"], content=one["content"]) for one in ASKED]
    whole = llm.chat(messages, documents=DOCUMENTS)
    assert whole.message.content == stock(model, tokenizer, PLACED)
    parts = list(llm.stream_chat(messages, documents=DOCUMENTS))
    assert (len(parts) > 1, parts[-1].message.content) == (True, whole.message.content)
    ids = tokenizer(f"{JOINED}\n\n{QUESTION}", return_tensors="pt")["input_ids"]
    text = llm.complete(QUESTION, documents=DOCUMENTS)
    assert text.text == stock_text(model, tokenizer, ids)
    assert "".join(part.delta for part in llm.stream_complete(QUESTION, documents=DOCUMENTS)) == text.text
    assert text.raw["usage"]["completion_tokens"] == NEW["max_new_tokens"]
    assert llm.metadata.context_window == 2048


def test_haystack_answers_in_a_pipeline_and_streams(model, tokenizer, store):
    blend = framework("haystack")
    from haystack import Document, Pipeline, component
    from haystack.dataclasses import ChatMessage

    @component
    class All:
        @component.output_types(documents=list[Document])
        def run(self, query: str) -> dict[str, list[Document]]:
            return {"documents": [Document(content=text, meta={"file_path": "a.md"}) for text in DOCUMENTS]}

    told = []
    llm = blend.BlendChatGenerator(model, tokenizer, store, EVERYTHING, {"temperature": 0, **NEW}, told.append)
    pipeline = Pipeline()
    pipeline.add_component("retriever", All())
    pipeline.add_component("llm", llm)
    pipeline.connect("retriever.documents", "llm.documents")
    messages = [ChatMessage.from_system(SYSTEM["content"]), ChatMessage.from_user(QUESTION)]
    for computed in (4, 0):
        told.clear()
        (reply,) = pipeline.run({"retriever": {"query": QUESTION}, "llm": {"messages": messages}})["llm"]["replies"]
        assert reply.text == stock(model, tokenizer, PLACED) == "".join(chunk.content for chunk in told)
        assert len(told) > 1
        assert reply.meta["hf_blend"]["computed_chunks"] == computed
    assert reply.meta["usage"]["completion_tokens"] == NEW["max_new_tokens"]


SAID = [
    {"role": "user", "content": "How slow?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "clock"}}]},
    {"role": "tool", "content": "Nine minutes."},
]
CALLING = CHATML.replace("message['content'] +", "message['content'] + (message.tool_calls | default('') | string) +")


def test_parts_of_one_text_are_that_text_and_their_documents_stay_where_they_are(answerer, model, tokenizer):
    parts = [{"type": "text", "text": one} for one in (f"{JOINED}\n\n", QUESTION)]
    answer = answerer.chat([SYSTEM, {"role": "user", "content": parts}], DOCUMENTS).whole()
    assert answer.text == stock(model, tokenizer, PLACED)


def test_llamaindex_passes_on_what_tools_said_and_refuses_pictures(model, tokenizer, given, monkeypatch):
    blend = framework("llamaindex")
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

    monkeypatch.setattr(tokenizer, "chat_template", CALLING)
    llm = blend.BlendLLM(**given)
    said = [ChatMessage(role=one["role"], content=one["content"]) for one in SAID]
    said[1].additional_kwargs["tool_calls"] = SAID[1]["tool_calls"]
    assert llm.chat(said).message.content == stock(model, tokenizer, SAID)
    with pytest.raises(PromptError, match=r"ImageBlock.*is no text"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="What?"), ImageBlock(image=b"aaaa")])])


def test_haystack_passes_on_what_tools_said_and_refuses_pictures(model, tokenizer, store, monkeypatch):
    blend = framework("haystack")
    from haystack.dataclasses import ChatMessage, ImageContent, ToolCall

    call = ToolCall("clock", {})
    made = [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}]
    monkeypatch.setattr(tokenizer, "chat_template", CALLING)
    llm = blend.BlendChatGenerator(model, tokenizer, store, generation_kwargs={"temperature": 0, **NEW})
    said = [
        ChatMessage.from_user(SAID[0]["content"]),
        ChatMessage.from_assistant(tool_calls=[call]),
        ChatMessage.from_tool(SAID[2]["content"], origin=call),
    ]
    (reply,) = llm.run(said)["replies"]
    assert reply.text == stock(model, tokenizer, [SAID[0], {**SAID[1], "tool_calls": made}, SAID[2]])
    picture = ImageContent(base64_image="AAAA", mime_type="image/png", validation=False)
    with pytest.raises(PromptError, match=r"image_url.*is no text"):
        llm.run([ChatMessage.from_user(content_parts=["What?", picture])])


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_a_framework_that_is_missing_is_named_with_its_extra(extra, monkeypatch):
    name = f"hf_blend.integrations.{extra}"
    for known in [*sys.modules]:
        if known == name or f"{known}.".startswith(f"{FRAMEWORKS[extra]}."):
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, FRAMEWORKS[extra], None)
    with pytest.raises(MissingExtraError, match=re.escape(f'pip install "hf-blend[{extra}]"')):
        importlib.import_module(name)

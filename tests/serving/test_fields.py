# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the server writes it takes back: an answer, as openai's client dumps it, is a message of the next request."""

import copy
import json

import pytest
from openai.types.chat import ChatCompletionMessage

from hf_blend import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.integrations.vllm.proxy import Proxy
from hf_blend.serving.prompts import chat_prompt
from hf_blend.serving.tenants import Tenant
from hf_blend.serving.tools import Parts
from hf_blend.serving.wire import ChatRequest, Limits, read_request
from tests.chat_templates import TOOLS, small_tokenizer

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.reasoning_content }}|{{ message.content }}|\
{% for call in message.tool_calls or [] %}{{ call.id }} {{ call.function.name }}\
{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %};{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
ASKED = {"role": "user", "content": "Where?"}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "é"}'}}
READ = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": {"query": "é"}}}
ANSWERS = {  # what is written, and as templates read it
    "a text": ({"content": "Here."}, {"content": "Here."}),
    "no text": ({"content": ""}, {"content": ""}),
    "reasoning": ({"content": "Here.", "reasoning_content": "Hm."}, {"content": "Here.", "reasoning_content": "Hm."}),
    "vLLM's reasoning": ({"content": None, "reasoning": "Hm."}, {"content": "", "reasoning_content": "Hm."}),
    "a call": ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [READ]}),
    "a refusal": ({"content": None, "refusal": "I cannot."}, {"content": "I cannot."}),
    "annotations": ({"content": "Here.", "annotations": []}, {"content": "Here."}),
}


def tokenizer_with(template):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def read(*messages):
    fields, body = read_request(ChatRequest, json.dumps({"messages": messages}).encode(), Limits())
    fields.bound(Limits())  # at both doors
    return fields, body


@pytest.mark.parametrize("exclude_none", [False, True])
@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_a_client_sends_back_is_rendered_as_apply_chat_template_does(what, exclude_none):
    written, expected = ANSWERS[what]
    answer = ChatCompletionMessage.model_validate({"role": "assistant", **written})
    fields, _ = read(ASKED, answer.model_dump(exclude_none=exclude_none), ASKED)
    tokenizer = tokenizer_with(TEMPLATE)
    messages = [ASKED, {"role": "assistant", **expected}, ASKED]
    oracle = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = chat_prompt(tokenizer, [message.for_template() for message in fields.messages], []).ids
    assert list(ids) == tokenizer.encode(oracle, add_special_tokens=False)


def test_a_refusal_and_reasoning_reach_vllm_as_the_server_reads_them():
    proxy = Proxy(tokenizer_with(TEMPLATE), BlendConfig())
    rows = [ASKED, *({"role": "assistant", **ANSWERS[name][0]} for name in ("a refusal", "reasoning")), ASKED]
    sent = proxy.rewrite(*read(*rows), Tenant())["messages"]
    assert (sent[1]["content"], sent[1]["refusal"]) == ("I cannot.", None)
    assert sent[2]["reasoning"] == sent[2]["reasoning_content"] == "Hm."
    assert [sent[0], sent[3]] == [ASKED, ASKED]


@pytest.mark.parametrize("more", [{}, {"content": "Here.", "refusal": "I cannot."}, {"audio": {"id": "a"}}])
def test_a_message_that_says_nothing_or_two_things_is_refused(more):
    with pytest.raises(PromptError, match=r"messages\.0\.(content|refusal|audio)"):
        read({"role": "assistant", **more}, ASKED)


@pytest.mark.parametrize("arguments", ['"text"', "[1]", '"[1]"', "7"])
def test_a_call_whose_arguments_no_request_could_hold_is_text(arguments):
    text = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
    parts = Parts(small_tokenizer(), "", TOOLS, False).feed(text, True)
    assert parts == [{"content": text}]

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against the real model: what it sends is taken, and what it reads is there."""

import json

import jsonschema
import openai
import pytest

from hf_blend.evaluation.bundled import load_model
from tests.chat_templates import QWEN3
from tests.serving.processes import running

pytestmark = pytest.mark.slow

DOCUMENTS = ["The harbour of Lund has 214 berths.", "Its master is Ines Okafor."]
QUESTION = "Who is the master of the harbour?"
SCHEMA = {
    "title": "person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "description": "Note a person.", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def real():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def server(real, tmp_path_factory):
    with running(real, tmp_path_factory.mktemp("store"), cache_tokens=4096) as service:
        yield service


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=300)


@pytest.fixture
def guidance():
    return pytest.importorskip("llguidance", reason='JSON schemas need pip install "hf-blend[structured]"')


@pytest.fixture
def with_tools(real, monkeypatch):
    """A chat template that has tools, which the model's own has not."""
    monkeypatch.setattr(real[1], "chat_template", QWEN3)


def asked(**more):
    return {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, **more}


def test_openai(client, guidance):
    documents = {"documents": DOCUMENTS}
    lone = client.chat.completions.create(**asked(temperature=0, logprobs=True, top_logprobs=2), extra_body=documents)
    (choice,) = lone.choices
    assert "Ines" in choice.message.content
    assert "".join(row.token for row in choice.logprobs.content).startswith(choice.message.content)
    assert all(row.top_logprobs[0].logprob == row.logprob for row in choice.logprobs.content)
    parts = client.chat.completions.create(**asked(temperature=0, stream=True), extra_body=documents)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    drawn = [client.chat.completions.create(**asked(n=3, seed=4), extra_body=documents) for _ in range(2)]
    rows = [[one.message.content for one in answer.choices] for answer in drawn]
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 1
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = client.chat.completions.create(**asked(max_tokens=60, response_format=form))
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    text = client.completions.create(model="smollm2", prompt=[QUESTION, "Lund is"], max_tokens=4, logprobs=1)
    assert [len(one.logprobs.tokens) for one in text.choices] == [4, 4]


def test_openai_tools(client, guidance, with_tools):
    given = asked(tools=[TOOL], tool_choice="required", max_tokens=80)
    (choice,) = client.chat.completions.create(**given).choices
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert client.chat.completions.create(**asked(tools=[TOOL], temperature=0)).choices[0].finish_reason

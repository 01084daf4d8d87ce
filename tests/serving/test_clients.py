# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that others wrote against the real model: what they send is taken, and what they read is there."""

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import openai
import pytest

from hf_blend.evaluation.bundled import load_model
from tests.serving.asked import QUESTION, SCHEMA, TOOL
from tests.serving.processes import running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HF_BLEND_CLIENTS", ROOT / ".venv-clients/bin/python"))
DOCUMENTS = ["The harbour of Lund has 214 berths.", "Its master is Ines Okafor."]
WITH_TOOLS = """{% if tools %}<|im_start|>system
Call a tool as <tool_call>{"name": …, "arguments": …}</tool_call>. Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}\
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


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
def with_tools(real, monkeypatch):
    """A chat template that has tools, which the model's own has not."""
    monkeypatch.setattr(real[1], "chat_template", WITH_TOOLS)


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
    given = {"max_tokens": 4, "logprobs": 1, "extra_body": {"ignore_eos": True}}  # drawn, an answer may end at once
    text = client.completions.create(model="smollm2", prompt=[QUESTION, "Lund is"], **given)
    assert [len(one.logprobs.tokens) for one in text.choices] == [4, 4]


def test_openai_tools(client, guidance, with_tools):
    given = asked(tools=[TOOL], tool_choice="required", max_tokens=80)
    (choice,) = client.chat.completions.create(**given).choices
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert client.chat.completions.create(**asked(tools=[TOOL], temperature=0)).choices[0].finish_reason


@pytest.mark.parametrize("name", ["langchain", "llama_index", "litellm", "lm_eval", "locust"])
def test_client_of_another_project(server, guidance, with_tools, tmp_path, name):
    """Each in the environment of clients, whose versions are not those of the tests."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: `make test-clients` makes it, HF_BLEND_CLIENTS names another")
    command = [str(PYTHON), "-P", str(Path(__file__).with_name("clients.py")), name, server.url, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
    assert found.returncode == 0, f"{found.stdout[-1500:]}{found.stderr[-3000:]}"
    assert not server.running.total()

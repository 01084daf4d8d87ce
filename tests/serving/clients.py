# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that others wrote, each asking a server as its users do: python clients.py NAME URL FOLDER [SECONDS].

Run by the interpreter of an environment that holds them, `make test-clients`; nothing of hf_blend is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
from asked import QUESTION, SCHEMA, TOOL

MODEL = "smollm2"
KEY = "a key that nobody checks"


def langchain(url, folder, seconds):
    import langchain_openai

    given = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0, "temperature": 0}
    chat = langchain_openai.ChatOpenAI(**given, max_tokens=80)
    whole = chat.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.text for part in chat.stream(QUESTION)) == whole.text
    for method in ("json_schema", "function_calling"):
        jsonschema.validate(chat.with_structured_output(SCHEMA, method=method).invoke(QUESTION), SCHEMA)
    bound = chat.bind_tools([TOOL], tool_choice="note").invoke(QUESTION)
    assert [call["name"] for call in bound.tool_calls] == ["note"]
    done = {"role": "tool", "content": "noted", "tool_call_id": bound.tool_calls[0]["id"]}
    assert chat.invoke([("user", QUESTION), bound, done]).text
    assert chat.bind(extra_body={"documents": ["Its master is Ines Okafor."]}).invoke(QUESTION).text
    text = langchain_openai.OpenAI(**{**given, "temperature": 1}, max_tokens=4, n=2)
    rows = text.generate([QUESTION, "Lund is"]).generations
    assert [len(row) for row in rows] == [2, 2]
    assert len(list(text.stream("Lund is"))) > 0


def llama_index(url, folder, seconds):
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    given = {"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0.0, "max_retries": 0}
    given |= {"max_tokens": 40, "context_window": 4096, "timeout": 600.0}
    for is_chat in (True, False):
        model = OpenAILike(**given, is_chat_model=is_chat)
        whole = model.complete("The harbour of Lund is").text
        assert whole
        assert [part.text for part in model.stream_complete("The harbour of Lund is")][-1] == whole
    model = OpenAILike(**given, is_chat_model=True, is_function_calling_model=True)
    asked = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    assert model.chat(asked).message.content

    def note(name: str) -> str:
        """Note a person."""
        return f"noted {name}"

    tool = FunctionTool.from_defaults(note)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    assert [call.tool_name for call in model.get_tool_calls_from_response(answer)] == ["note"]


def litellm(url, folder, seconds):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    import litellm

    given = {"api_base": f"{url}/v1", "api_key": KEY, "temperature": 0, "max_tokens": 40, "timeout": 600}
    asked = {"model": f"openai/{MODEL}", "messages": [{"role": "user", "content": QUESTION}]}
    whole = litellm.completion(**given, **asked).choices[0].message.content
    parts = litellm.completion(**given, **asked, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    found = litellm.completion(**{**given, "max_tokens": 80}, **asked, response_format=form)
    jsonschema.validate(json.loads(found.choices[0].message.content), SCHEMA)
    called = litellm.completion(**{**given, "max_tokens": 80}, **asked, tools=[TOOL], tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "note"
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=["Lund is", QUESTION], **given)
    assert len(text.choices) == 2


def lm_eval(url, folder, seconds):
    """A task of its own, of generated text: log probabilities of prompts (`echo`) are not served."""
    rows = [{"question": f"{number} and {number} is", "answer": str(2 * number)} for number in range(3)]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "sums.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
    (folder / "sums.yaml").write_text(task)
    for kind, path in (("local-completions", "completions"), ("local-chat-completions", "chat/completions")):
        given = f"model={MODEL},base_url={url}/v1/{path},num_concurrent=2,max_retries=1,tokenized_requests=False"
        given += ",tokenizer_backend=None"
        words = ["--model", kind, "--model_args", given, "--tasks", "sums", "--include_path", str(folder)]
        words += ["--apply_chat_template"] if "chat" in kind else []
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
        command = [sys.executable, "-m", "lm_eval", "run", *words, "--output_path", str(folder / kind)]
        found = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=500)
        assert found.returncode == 0, found.stderr[-3000:]
        (result,) = (folder / kind).rglob("results_*.json")
        assert json.loads(result.read_text())["n-samples"]["sums"]["effective"] == len(rows)


def locust(url, folder, seconds):
    """Some users who ask again and again: none gets an error."""
    code = f"""
from locust import HttpUser, between, task

class Asks(HttpUser):
    wait_time = between(0.1, 0.5)

    @task
    def ask(self):
        documents = ["Its master is Ines Okafor.", "The harbour of Lund has 214 berths."]
        asked = {{"model": {MODEL!r}, "max_tokens": 4, "messages": [{{"role": "user", "content": {QUESTION!r}}}]}}
        self.client.post("/v1/chat/completions", json={{**asked, "documents": documents}})
"""
    (folder / "locustfile.py").write_text(code)
    words = ["--headless", "-u", "3", "-r", "3", "-t", f"{seconds}s", "--stop-timeout", "60", "--host", url]
    command = [sys.executable, "-m", "locust", "-f", str(folder / "locustfile.py"), *words, "--json"]
    found = subprocess.run(command, text=True, capture_output=True, timeout=seconds + 120)
    (row,) = json.loads(found.stdout)
    print(row["num_requests"], "requests,", row["num_failures"], "failures")
    assert found.returncode == 0, found.stderr[-3000:]
    assert row["num_requests"] > 0
    assert row["num_failures"] == 0


CLIENTS = {one.__name__: one for one in (langchain, llama_index, litellm, lm_eval, locust)}

if __name__ == "__main__":
    name, url, folder, *rest = sys.argv[1:]
    CLIENTS[name](url, Path(folder), int(rest[0]) if rest else 20)

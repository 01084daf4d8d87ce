# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients send beside a prompt: several answers, how they are drawn, log probabilities, tools, and their form."""

import functools
import json
import sys

import httpx
import jsonschema
import openai
import pytest
import torch
from transformers import LogitsProcessorList

from hf_blend.errors import PromptError
from hf_blend.serving.prompts import chat_prompt
from hf_blend.serving.sampling import Sampling, make_sampling
from hf_blend.serving.structured import Follows, Grammars
from hf_blend.serving.tools import Parts, fits
from hf_blend.serving.wire import CompletionRequest, Limits, read_request
from tests.chat_templates import QWEN3, TOOLS, small_tokenizer
from tests.serving.processes import running

MODEL = "smollm2"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "Rolf works as the"
FREE = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "clocks"}'}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rolf", "Ines"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(reference, tmp_path_factory):
    limits = Limits(new_tokens=12, choices=6, stop_chars=64)
    with running(reference, tmp_path_factory.mktemp("store"), limits=limits) as service:
        yield service


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def texts(http, **fields):
    answer = http.post(TEXT, json={**FREE, **fields})
    assert answer.status_code == 200, answer.text
    rows = answer.json()["choices"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["text"] for row in rows]


def stock(reference, **settings):
    """What `generate` of transformers writes."""
    model, tokenizer = reference
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, "pad_token_id": 1, **settings}
    output = model.generate(ids, **given)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_each_of_several_prompts_gets_its_answers_in_their_order(http, reference):
    prompts = [PROMPT, "Ines lives in", "The miller"]
    lone = [texts(http, prompt=prompt, temperature=0)[0] for prompt in prompts]
    assert texts(http, prompt=prompts, temperature=0, n=2) == [text for text in lone for _ in range(2)]
    ids = [reference[1](prompt)["input_ids"] for prompt in prompts]
    answer = http.post(TEXT, json={**FREE, "prompt": ids, "temperature": 0}).json()
    assert [row["text"] for row in answer["choices"]] == lone
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 3 * FREE["max_tokens"]


def test_several_streamed_answers_are_those_of_the_whole(client):
    given = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "n": 3, "seed": 5, "max_tokens": 6}
    whole = client.chat.completions.create(**given, extra_body={"ignore_eos": True})
    asked = {**given, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    rows = ["", "", ""]
    for part in parts:
        rows[part.choices[0].index] += part.choices[0].delta.content or ""
    assert rows == [choice.message.content for choice in whole.choices]
    assert len(set(rows)) > 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts[-1:]] == ["length"]
    with client.chat.completions.stream(**given, extra_body={"ignore_eos": True}) as events:
        joined = events.until_done().current_completion_snapshot
    dumps = [[row.message.model_dump(exclude={"parsed"}) for row in one.choices] for one in (joined, whole)]
    assert dumps[0] == dumps[1]
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.hf_blend["prefill"] == whole.usage.hf_blend["prefill"]


def test_equal_seeds_give_equal_texts_whatever_stands_beside(http):
    alone = texts(http, seed=7)
    assert texts(http, seed=7, n=4)[:1] == alone
    assert texts(http, seed=7, documents=["Rolf bought a satchel too."], n=2) != alone
    beside = texts(http, prompt=[PROMPT, "Ines lives", "The"], seed=7)
    assert beside[:1] == alone
    assert len({*texts(http, seed=8, n=5), *alone}) > 3


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"repetition_penalty": 0.05}, {"repetition_penalty": 0.05}),
        ({"logit_bias": {"200": 90, "201": -90}}, {"sequence_bias": [[[200], 90.0], [[201], -90.0]]}),
    ],
)
def test_a_greedy_answer_with_a_processor_is_that_of_generate(fields, settings, http, reference):
    found = texts(http, temperature=0, **fields)
    assert found == [stock(reference, **settings)]
    assert found != texts(http, temperature=0)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-300}, {"temperature": 1e-300}])
def test_what_leaves_one_token_is_greedy(fields, http):
    assert texts(http, **{"temperature": 2.0, **fields}) == texts(http, temperature=0)


def test_drawn_tokens_have_the_frequencies_of_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 0.5]])
    rows = [Sampling(0, LogitsProcessorList(), False, str(seed)).draw([], logits) for seed in range(4000)]
    counts = torch.bincount(torch.cat(rows), minlength=5) / 4000
    assert counts[3] == 0
    assert (counts - logits.softmax(1)[0]).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_penalties_are_of_the_tokens_of_the_answer_alone():
    asked = CompletionRequest(prompt="a", temperature=0, presence_penalty=1.0, frequency_penalty=0.25)
    processors = make_sampling(asked, {}, prompt_tokens=2, number=0, grammar=None).processors
    given = processors(torch.tensor([[4, 4, 1, 1, 3]]), torch.zeros(1, 5))
    assert given.tolist() == [[0.0, -1.5, 0.0, -1.25, 0.0]]


def test_what_a_request_leaves_out_is_as_the_model_says():
    defaults = {"temperature": 0.5, "top_k": 3}
    kinds = lambda **fields: {  # noqa: E731
        type(one).__name__: one
        for one in make_sampling(CompletionRequest(prompt="a", **fields), defaults, 1, 0, None).processors
    }
    assert kinds()["TemperatureLogitsWarper"].temperature == 0.5
    assert kinds()["TopKLogitsWarper"].top_k == 3
    assert kinds(temperature=1.0, top_k=-1) == {}
    assert list(kinds(temperature=0)) == []


def test_log_probabilities_are_those_of_the_model(client, reference):
    model, tokenizer = reference
    given = {"temperature": 0, "max_tokens": 4, "extra_body": {"ignore_eos": True, "repetition_penalty": 2.0}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=3, **given).choices[0]
    ids = tokenizer(PROMPT)["input_ids"]
    whole = client.completions.create(model=MODEL, prompt=PROMPT, **given).choices[0].text
    assert "".join(answer.logprobs.tokens) == whole == answer.text
    assert answer.logprobs.text_offset == [len("".join(answer.logprobs.tokens[:n])) for n in range(4)]
    own = model(torch.tensor([ids])).logits[0, -1].log_softmax(0)
    top = [tokenizer.decode([*ids[-1:], token])[len(tokenizer.decode(ids[-1:])) :] for token in own.topk(3).indices]
    assert [word.strip() for word in answer.logprobs.top_logprobs[0]] == [word.strip() for word in top]
    assert list(answer.logprobs.top_logprobs[0].values()) == pytest.approx(own.topk(3).values.tolist(), abs=1e-4)

    messages = [{"role": "user", "content": PROMPT}]
    chat = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 2, **given}
    whole = client.chat.completions.create(**chat).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**chat, stream=True)]
    rows = [row for part in parts if part.logprobs for row in part.logprobs.content]
    assert rows == whole.logprobs.content
    assert "".join(row.token for row in rows) == whole.message.content
    assert [row.top_logprobs[0].logprob >= row.logprob for row in rows] == [True] * 4


def test_fields_that_change_no_answer_are_taken(client):
    given = {"user": "anna", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "n": 1}
    given |= {"prompt_cache_key": "k", "safety_identifier": "s", "modalities": ["text"], "verbosity": "low"}
    echoed = {"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None, "annotations": []}
    messages = [HI, echoed, {"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4, **given)
    assert whole.choices[0].message.content


WRONG = {
    "n": ({"n": 7}, "7 answers came, at most 6 are taken"),
    "n of prompts": ({"prompt": ["a"] * 4, "n": 2}, "8 answers came, at most 6 are taken"),
    "no prompt": ({"prompt": []}, "prompt has no text, expected at least one"),
    "prompts": ({"prompt": {"a": 1}}, "prompt is {'a': 1}, expected a valid string or a valid list"),
    "bias": ({"logit_bias": {"1": 101}}, "logit_bias.1 is 101, expected less than or equal to 100"),
    "bias of a token": ({"logit_bias": {"999999": 1}}, "logit_bias has the token 999999, expected one below"),
    "biases": ({"logit_bias": {str(one): 1 for one in range(1025)}}, "logit_bias is"),
    "logprobs": ({"logprobs": True}, "logprobs is True, expected a valid integer"),
    "logprobs of many": ({"logprobs": 21}, "logprobs is 21, expected less than or equal to 20"),
    "min_p": ({"min_p": 1.5}, "min_p is 1.5, expected less than or equal to 1"),
    "penalty": ({"presence_penalty": -3}, "presence_penalty is -3, expected greater than or equal to -2"),
    "echo": ({"echo": True}, "echo is True, expected False"),
    "best_of": ({"best_of": 4}, "best_of is 4, expected 1"),
    "unknown": ({"tempreature": 1}, "tempreature is no field of this request"),
    "form": ({"response_format": {"type": "xml"}}, "response_format.type is 'xml', expected 'text', 'json_object'"),
    "form without": ({"response_format": {"type": "json_schema"}}, "expected a json_schema with type"),
}


HI, DROPPED = {"role": "user", "content": "hi"}, "messages.1.tool_calls came, but the model's chat template leaves"
CHAT_WRONG = {
    "tools": ({"tools": TOOLS}, "tools came, but the model's chat template leaves that out"),
    "choice": ({"tool_choice": "required"}, "tool_choice is 'required', expected one of tools: []"),
    "named": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice is 'x', expected one of tools: ['search']",
    ),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs is 2, expected 0 without logprobs"),
    "template": ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs has 'chat_template'"),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments is",
    ),
    "history": ({"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, HI]}, DROPPED),
    "history without content": ({"messages": [HI, {"role": "assistant", "tool_calls": [CALL]}, HI]}, DROPPED),
    "name": ({"messages": [HI, {**HI, "name": "anna"}]}, "messages.1.name came"),
    "documents": ({"documents": ["a"] * 257}, "257 documents came, at most 256 are taken"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content is missing, expected text"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
        "served reads text alone",
    ),
    "modalities": ({"modalities": ["audio"]}, "modalities.0 is 'audio', expected 'text'"),
    "functions": ({"functions": [{}]}, "functions is [{}], expected"),
}


@pytest.mark.parametrize(("path", "what"), [*((TEXT, what) for what in WRONG), *((CHAT, what) for what in CHAT_WRONG)])
def test_what_is_not_served_is_refused_with_its_name_and_what_was_expected(path, what, http):
    asked = {"model": MODEL, "messages": [HI], "max_tokens": 2}
    body, (fields, words) = (FREE, WRONG[what]) if path == TEXT else (asked, CHAT_WRONG[what])
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def qwen():
    tokenizer = small_tokenizer("spaces")
    tokenizer.chat_template = QWEN3
    return tokenizer


def test_a_last_message_of_the_assistant_is_continued():
    tokenizer = qwen()
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In the"}]
    prompt = chat_prompt(tokenizer, messages, [], template={"enable_thinking": False})
    text = tokenizer.decode(prompt.ids)
    assert text.endswith("In the")
    assert not tokenizer.decode(chat_prompt(tokenizer, messages[:1], []).ids).endswith("In the")


def test_tools_and_arguments_of_a_template_reach_the_prompt():
    tokenizer, messages = qwen(), [{"role": "user", "content": "Where?"}]
    plain = tokenizer.decode(chat_prompt(tokenizer, messages, []).ids)
    given = tokenizer.decode(chat_prompt(tokenizer, messages, [], template={"tools": TOOLS}).ids)
    assert "search" in given
    assert "search" not in plain
    thinking = chat_prompt(tokenizer, messages, [], template={"enable_thinking": False})
    assert tokenizer.decode(thinking.ids).startswith(plain)
    assert tokenizer.decode(thinking.ids) != plain
    with pytest.raises(PromptError, match=r"messages\.1\.tool_calls came, but the model's chat template leaves"):
        chat_prompt(tokenizer, [*messages, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *messages], [])


def parts_of(text, tools=TOOLS, is_forced=False, size=3):
    parts = Parts(qwen(), "", tools, is_forced)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [delta for piece in pieces for delta in parts.feed(piece, False)] + parts.feed("", True)
    content = "".join(delta.get("content", "") for delta in found)
    calls = [call for delta in found for call in delta.get("tool_calls", [])]
    return content, [(call["index"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_calls_are_found_in_what_a_model_writes_and_text_around_them_is_text():
    one = '<tool_call>\n{"name": "search", "arguments": {"query": "é <b>"}}\n</tool_call>'
    expected = ("search", '{"query": "é <b>"}')
    assert parts_of(f"Let me see.\n{one}") == ("Let me see.", [(0, *expected)])
    assert parts_of(f"{one}\n{one}")[1] == [(0, *expected), (1, *expected)]
    assert parts_of("No call, <tool> at all.") == ("No call, <tool> at all.", [])
    assert parts_of("a < b <tool_call>oops") == ("a < b <tool_call>oops", [])
    assert parts_of("a <tool_call>{oops}</tool_call> b")[0].startswith("a <tool_call>{oops}")
    assert parts_of("<tool_call>[1]</tool_call>") == ("<tool_call>[1]</tool_call>", [])
    assert parts_of(one, tools=[]) == (one, [])
    assert parts_of('{"name": "search", "arguments": {}}', is_forced=True) == ("", [(0, "search", "{}")])
    assert parts_of('{"name": "sea', is_forced=True) == ('{"name": "sea', [])


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        ('{"a": 1}\nCALL\nBAD', '{"a": 1}\nBAD', 1), ('{"a": 1}\nBAD', '{"a": 1}\nBAD', 0),
        ("```json\n{}\n```\nCALL\n<tool_call>{", "```json\n{}\n```\n<tool_call>{", 1),
    ],
)  # fmt: skip
def test_what_came_before_a_broken_call_is_kept_however_the_answer_comes(text, content, count):
    """An answer that begins as JSON is held back, and comes in one piece then."""
    call = '<tool_call>{"name": "search", "arguments": {"query": "clocks"}}</tool_call>'
    broken = call.replace('{"query": "clocks"}', "[1]")
    expected = content.replace("BAD", broken), [(number, "search", '{"query": "clocks"}') for number in range(count)]
    for size in (1, 3, 1000):
        assert parts_of(text.replace("CALL", call).replace("BAD", broken), size=size) == expected


BARE = '{"name": "search", "arguments": {"query": "clocks"}}'


@pytest.mark.parametrize("form", ["{}", "\n{} \n", "```json\n{}\n```", "``` {} ```"])
def test_bare_json_of_a_call_is_one(form):
    expected = ("", [(0, "search", '{"query": "clocks"}')])
    for size in (1, 3, 100):
        assert parts_of(form.replace("{}", BARE), size=size) == expected
    other = BARE.replace("arguments", "parameters")
    assert parts_of(form.replace("{}", other)) == expected, "as Llama writes it"


@pytest.mark.parametrize(
    "text",
    [
        BARE.replace("search", "delete"), BARE.replace('"clocks"', "5"), BARE.replace("query", "q"),
        BARE.replace("}}", '}, "id": 1}'), f"Call: {BARE}", f"{BARE} It is done.", f"```python\n{BARE}\n```",
        BARE[:-1], "{}", '{"name": ["search"], "arguments": {}}', "```", "`a` is a key", "[" * 50,
    ],
)  # fmt: skip
def test_bare_json_that_is_no_call_of_a_tool_is_content(text):
    closed = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    tools = [{"type": "function", "function": {"name": "search", "parameters": closed}}]
    for size in (1, 3, 100):
        assert parts_of(text, tools, size=size) == (text, [])
    assert parts_of(text, tools=[]) == (text, [])


def test_text_that_begins_no_call_is_sent_at_once_where_tools_are_given():
    fed = (
        {"Let": "Let", " me": " me"},
        {"``": "", "`js": "", "\n": "```js", "a": "\na"},
        {" ": "", "[": " [", "{": "{"},
    )
    for pieces in fed:
        parts = Parts(qwen(), "", TOOLS, False)
        assert ["".join(part["content"] for part in parts.feed(text, False)) for text in pieces] == [*pieces.values()]


def test_fits_looks_at_types_keys_and_choices():
    kinds = {"type": ["string", "null"], "enum": ["a", None]}
    schema = {"properties": {"a": kinds, "b": {"items": {"type": "integer"}}}, "additionalProperties": False}
    good = [{}, {"a": "a"}, {"a": None, "b": [1, 2]}]
    bad = [{"a": 1}, {"a": "b"}, {"b": [1, "x"]}, {"b": [True]}, {"c": 1}]
    assert [fits(value, schema) for value in good + bad] == [True] * len(good) + [False] * len(bad)
    assert fits({"a": 1}, None)
    assert fits({"a": 1}, {"type": 5, "enum": 5, "properties": 5, "required": 5})
    assert not fits(1, {"const": 2})
    assert fits(1.5, {"type": "number"})
    assert not fits(1.5, {"type": "integer"})


def test_tokens_drawn_as_a_schema_allows_are_json_of_it(guidance):
    tokenizer = small_tokenizer("bytes")
    grammars = Grammars(tokenizer, len(tokenizer) + 5, [tokenizer.eos_token_id])
    for seed in range(3):
        grammar = Follows(grammars.compiled(SCHEMA), 2, [tokenizer.eos_token_id])
        sampling = Sampling(2, LogitsProcessorList([grammar]), False, str(seed), grammar=grammar)
        ids = [5, 6]
        while ids[-1] != tokenizer.eos_token_id:
            again = [sampling.draw(ids, torch.zeros(1, len(tokenizer) + 5)) for _ in range(2)]
            assert torch.equal(*again), "a step that is computed again draws the same"
            ids.append(int(again[0]))
        jsonschema.validate(json.loads(tokenizer.decode(ids[2:], skip_special_tokens=True)), SCHEMA)
        assert not sampling.error


OPEN = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/c"}}, "required": ["a"]}
OPEN["$defs"] = {"c": {"anyOf": [{"type": "null"}, {"properties": {"d": {"type": "object"}}}]}}


def test_no_object_of_a_schema_has_a_key_twice_or_others_unless_it_allows_them(guidance):
    tokenizer = small_tokenizer("bytes")
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def takes(schema, text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return grammars.compiled(schema).validate_tokens(ids) == len(ids)

    assert takes(OPEN, '{"a": "x", "b": {"d": {"e": 1}}}')
    for text in ('{"a": "x", "a"', '{"a": "x", "\\u0061"', '{"a": "x", "c"', '{"a": "x", "b": {"e"'):
        assert not takes(OPEN, text), text
    others = {"patternProperties": {"^c": {}}}, {"additionalProperties": True}, {"required": ["a", "c"]}
    joined = {"anyOf": [{"properties": {"c": {}}}]}, {"allOf": [{"properties": {"c": {}}}]}
    for odd in ({"properties": 5}, {"required": 5}, {"required": [{}]}, {"properties": {"a": {"type": "x"}}}):
        with pytest.raises(PromptError, match="the JSON schema cannot be followed"):
            grammars.compiled({**OPEN, **odd})
    for more in (*others, *joined):
        assert takes({**OPEN, **more}, '{"a": "x", "c": 1}'), more


@pytest.mark.parametrize("schema", [{"type": "banana"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_a_schema_that_makes_no_sense_is_refused(schema, guidance):
    tokenizer = small_tokenizer("bytes")
    with pytest.raises(PromptError, match="the JSON schema cannot be followed"):
        Grammars(tokenizer, len(tokenizer), [2]).compiled(schema)
    other = small_tokenizer("spaces")
    with pytest.raises(PromptError, match="serve the model with one"):
        Grammars(other, len(other), [2]).compiled({"type": "object"})


DEEP = functools.reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(200), {"type": "null"})
FANS = {f"d{one}": {"properties": {name: {"$ref": f"#/$defs/d{one + 1}"} for name in "abcd"}} for one in range(30)}
BOMBS = {
    "deep": DEEP,
    "references": {"$defs": {**FANS, "d30": {}}, "$ref": "#/$defs/d0"},
    "a long text": {"type": "string", "maxLength": 10**9},
    "a text that is too short": {"type": "string", "minLength": 10**6},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**7},
    "a pattern": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "words": {"enum": [f"v{one}" for one in range(5000)]},
    "names": {"type": "object", "properties": {f"p{one}": {"type": "string"} for one in range(500)}},
    "all of any": {"allOf": [{"anyOf": [{"required": [f"{a}{b}"]} for b in range(4)]} for a in range(12)]},
    "itself": {"$ref": "#"},
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_schema_made_to_cost_much_is_refused_or_followed(what, guidance):
    tokenizer = small_tokenizer("bytes")
    try:
        matcher = Grammars(tokenizer, len(tokenizer), [2]).compiled(BOMBS[what])
    except PromptError:
        return
    grammar, ids = Follows(matcher, 0, [2]), list[int]()
    for _ in range(10):
        allowed = grammar(torch.tensor([ids], dtype=torch.long).reshape(1, -1), torch.zeros(1, len(tokenizer)))
        assert allowed.isfinite().any()
        ids.append(int(allowed[0].argmax()))
        if ids[-1] == 2:
            return


def test_a_grammar_that_becomes_too_complex_ends_the_answer_and_says_so(guidance):
    tokenizer = small_tokenizer("bytes")
    grammar = Follows(Grammars(tokenizer, len(tokenizer), [2]).compiled(SCHEMA), 0, [2])
    odd = tokenizer.encode("]", add_special_tokens=False)
    allowed = grammar(torch.tensor([odd]), torch.zeros(1, len(tokenizer)))
    assert allowed[0].isfinite().nonzero()[:, 0].tolist() == [2]
    assert grammar.error


def test_without_the_library_of_schemas_a_form_is_refused_by_name(http, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = http.post(TEXT, json={**FREE, "ignore_eos": False, "response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert "response_format, or a tool that is to be called, needs llguidance" in answer.json()["error"]["message"]
    assert 'pip install "hf-blend[structured]"' in answer.json()["error"]["message"]


MANY = {
    "prompts": {"prompt": [{}] * 30},
    "ids": {"prompt": [1] * 2000 + ["a"]},
    "names": {f"k{number}": 0 for number in range(2000)},
}


@pytest.mark.parametrize("what", MANY)
def test_read_request_holds_few_errors_however_many_there_are(what, monkeypatch):
    counts = []
    monkeypatch.setattr(
        "hf_blend.serving.wire.described", lambda errors: (counts.append(len(errors)), (None, "no"))[1]
    )
    with pytest.raises(PromptError):
        read_request(CompletionRequest, json.dumps({"prompt": "a", **MANY[what]}).encode(), Limits())
    assert counts[0] <= 6


def test_read_request_keeps_nothing_that_changes_no_answer():
    given = {"prompt": "a", **{name: [[]] * 1000 for name in ("user", "metadata", "store", "service_tier")}}
    fields, _ = read_request(CompletionRequest, json.dumps(given).encode(), Limits())
    assert {getattr(fields, name) for name in given if name != "prompt"} == {None}

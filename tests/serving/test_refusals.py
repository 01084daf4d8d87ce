# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server does not do is refused by the name of the field, in the form of OpenAI's errors."""

import json

import pytest

wire = pytest.importorskip("hf_blend.serving.wire", reason="pip install hf-blend[serve]")

MESSAGE = {"role": "user", "content": "Where?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ELSEWHERE = "vLLM with the connector of hf_blend serves more"

UNSERVED = {*wire.NEUTRAL, "top_k", "chat_template", "chat_template_kwargs", "reasoning_effort", "tempreature"}
WRONG = {  # the text begins with the field
    "messages.0.role 'tool' is not served here": {"messages": [{"role": "tool", "content": "a"}]},
    "messages.0.content.0.type 'image_url' is not served here": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "max_completion_tokens is 1.5, expected a valid integer": {"max_completion_tokens": 1.5},
    "stream is 1, expected a valid boolean": {"stream": 1},
    "stream_options.pad is not served here": {"stream_options": {"pad": True}},
}
BODIES = {
    "the body is no JSON": b"\xff\xfe{",
    "the body is no JSON: NaN is no number of JSON": b'{"temperature": NaN}',
    "surrogates not allowed": b'{"messages": "\\ud800"}',
    "the body is nested too deeply": b'{"a":' + b"[" * 200_000,
}


def read(**fields):
    body = json.dumps({"messages": [MESSAGE], **fields}).encode()
    return wire.read_request(wire.ChatRequest, body, wire.RequestLimits())


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_unserved_field_is_refused_by_name(name):
    with pytest.raises(wire.Refused) as raised:
        read(**{name: "something"})
    error = raised.value.body()["error"]
    message = error.pop("message")
    assert message.startswith(f"{name!r} is not served here.")
    assert ELSEWHERE in message
    assert error == {"param": name, "type": "invalid_request_error", "code": "not_served"}


def test_unserved_field_names_nearest():
    with pytest.raises(wire.Refused, match="Write 'temperature', or leave it out"):
        read(tempreature=1)


@pytest.mark.parametrize("text", WRONG)
def test_wrong_value_is_refused_by_name(text):
    with pytest.raises(wire.Refused) as raised:
        read(**WRONG[text])
    error = raised.value
    said = str(error)
    assert said.startswith(text)
    assert error.status == 400
    assert error.param
    if "not served here" in text:
        assert ELSEWHERE in said


@pytest.mark.parametrize("text", BODIES)
def test_body_that_is_no_request_is_refused(text):
    with pytest.raises(wire.Refused) as raised:
        wire.read_request(wire.ChatRequest, BODIES[text], wire.RequestLimits())
    assert text in str(raised.value)


def test_completion_refuses_what_is_no_text():
    for prompt in ([5, 6], ["a", "b"], "", None):
        body = json.dumps({"prompt": prompt})
        with pytest.raises(wire.Refused, match=r"^prompt"):
            wire.read_request(wire.CompletionRequest, body.encode(), wire.RequestLimits())


def test_fields_that_ask_for_nothing_are_accepted():
    neutral = {name: values[0] for name, values in wire.NEUTRAL.items()}
    assert read(**neutral, **dict.fromkeys(wire.IGNORED, "a")) == read()
    assert read(**dict.fromkeys(UNSERVED)) == read(), "null asks for nothing"


def test_answer_of_server_is_accepted_as_message():
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage(role="assistant", content="There.").model_dump()
    request = read(messages=[MESSAGE, answer, MESSAGE])
    assert [message.text for message in request.messages] == ["Where?", "There.", "Where?"]


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "Whe"}, {"type": "text", "text": "re?"}]
    (message,) = read(messages=[{"role": "user", "content": parts}]).messages
    assert message.text == "Where?"


def test_error_text_is_short_and_encodable():
    with pytest.raises(wire.Refused) as raised:
        read(**{"x" * 100_000: 1})
    assert len(json.dumps(raised.value.body())) < 1500

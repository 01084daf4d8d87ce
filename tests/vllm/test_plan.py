# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request says to the connector, and the salt of its plan. Nothing here needs vLLM."""

import copy
import json
import sys

import pytest

import hf_blend.integrations.vllm as connector
from hf_blend import BlendConfig
from hf_blend.errors import MissingExtraError, PromptError
from hf_blend.integrations.vllm.plan import plan_salt, read_params, request_fields
from hf_blend.prompt.pieces import Prompt, Span
from tests.chat_templates import CHATML, QUESTION, assistant, small_tokenizer, user
from tests.chat_templates import DOCUMENTS as TEXTS

IDS = [1, *range(10, 40), *range(50, 80), 7, 8, 9]
DOCUMENTS = [[1, 31], [31, 61]]


class Letters:
    """A tokenizer: a token a character."""

    def encode(self, text, add_special_tokens=True):
        return list(map(ord, text))


def test_salt_names_all_that_blended_blocks_depend_on():
    base = {"token_ids": IDS, "documents": DOCUMENTS, "config": BlendConfig(), "tenant": "a", "secret": b"s" * 32}
    others = (
        {},
        {"token_ids": [*IDS, 5]},
        {"documents": [[1, 30], [31, 61]]},
        {"config": BlendConfig(recompute_ratio=0.2)},
        {"tenant": "b"},
        {"secret": None},
    )
    salts = [plan_salt(**base | other) for other in others]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {64}
    spans = read_params({"documents": DOCUMENTS}, IDS, None).spans
    for same in ([*reversed(DOCUMENTS)], spans):
        assert plan_salt(**base | {"documents": same}) == salts[0], "named in another way"


def test_documents_are_given_as_indices_as_spans_or_as_texts():
    text = "Two boats lie at the pier. The red one leaks. Nobody minds."
    chunk = tuple(map(ord, text))
    ids = [*map(ord, f"Read. {text} Which?")]
    (span,) = read_params({"documents": [text]}, ids, Letters).spans
    assert span == Span.whole(6, chunk)
    cut = [*ids[:6], *ids[8:]]
    (span,) = read_params({"documents": [text]}, cut, Letters).spans
    assert span == Span(6, chunk, 2, len(chunk) - 2)
    given = [span.start, list(span.token_ids), span.first, span.tokens]
    assert read_params({"documents": [given]}, cut, None).spans == (span,)
    params = read_params({"tenant": "a", "do_remote_decode": False}, IDS, None)
    assert params.tenant == "a"
    assert params.spans == ()


NOT_THERE = """[
    "a text", [[3, 2]], [[0, 99]], [[1, 20], [19, 30]], ["no such text"], [[1, [9, 9, 9], 0, 3]],
    [[1, [10, 11], 0, 0]], [[1, [10, 11], 0, 3]], [[1, [10, 11, 12], -3, 2]], [[-63, [10, 11], 0, 2]],
    [[63, [9], 0, 3]]
]"""


@pytest.mark.parametrize("documents", json.loads(NOT_THERE))
def test_what_is_not_in_prompt_is_refused(documents):
    with pytest.raises(PromptError):
        read_params({"documents": documents}, IDS, Letters)
    with pytest.raises(PromptError):
        read_params({"documents": [[1, 2]], "tenant": 5}, IDS, Letters)


def test_in_named_prompt_no_other_chunk_is_looked_for():
    spans = read_params({"documents": DOCUMENTS}, IDS, None).spans
    prompt = Prompt(tuple(IDS), spans)
    assert not prompt.is_searched
    assert prompt.spans == spans


def test_connector_without_vllm_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "hf_blend.integrations.vllm.connector", raising=False)
    with pytest.raises(MissingExtraError, match=r'pip install "hf-blend\[vllm\]"'):
        _ = connector.BlendConnector
    with pytest.raises(AttributeError, match="BlendConector"):
        _ = connector.BlendConector


ASKED = [user(QUESTION)]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = CHATML
    return tokenizer


def rendered(tokenizer, messages):
    """The ids that vLLM makes of messages."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_request_fields_name_documents_in_prompt_that_vllm_renders(tokenizer):
    salts = set()
    for texts in (TEXTS, TEXTS[::-1]):
        fields = request_fields(tokenizer, ASKED, [*texts, ""], BlendConfig())
        assert fields["messages"] == [user("\n\n".join([*texts, QUESTION]))]
        ids = rendered(tokenizer, fields["messages"])
        spans = read_params(fields["kv_transfer_params"], ids, None).spans
        assert [tokenizer.decode(span.token_ids).strip() for span in spans] == texts
        assert fields["cache_salt"] == plan_salt(ids, spans, BlendConfig())
        salts.add(fields["cache_salt"])
    assert len(salts) == 2


def test_request_fields_keep_tenants_apart(tokenizer):
    for documents in (TEXTS, ()):
        salts = set()
        for tenant, secret in (("a", b"k" * 32), ("b", b"k" * 32), ("a", b"l" * 32)):
            fields = request_fields(tokenizer, ASKED, documents, BlendConfig(), tenant=tenant, secret=secret)
            salts.add(fields["cache_salt"])
        assert len(salts) == 3


def test_request_fields_without_documents_change_nothing(tokenizer):
    assert request_fields(tokenizer, ASKED, (), BlendConfig()) == {"messages": ASKED}


def test_request_fields_refuse_documents_without_question(tokenizer):
    with pytest.raises(PromptError, match="expected one of the role user"):
        request_fields(tokenizer, [assistant("It is")], TEXTS, BlendConfig())


def test_request_fields_are_what_client_of_openai_sends(tokenizer):
    openai = pytest.importorskip("openai")
    httpx = pytest.importorskip("httpx")
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return httpx.Response(500)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(base_url="http://vllm/v1", api_key="none", http_client=http, max_retries=0)
    fields = request_fields(tokenizer, ASKED, TEXTS, BlendConfig())
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="m", messages=ASKED, extra_body=fields)
    assert sent == [{"model": "m", **fields}]

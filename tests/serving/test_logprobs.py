# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of an answer: of the tokens that the model wrote, whose bytes are its text."""

import math
from contextlib import contextmanager

import openai
import pytest
import torch
from transformers import LogitsProcessorList

from hf_blend.prompt.detokenizer import Detokenizer
from hf_blend.serving.sampling import Sampling
from tests.serving.chains import chain, tokenizer_of
from tests.serving.processes import running

MODEL = "smollm2"
TEXTS = {"bytes": "a🙂日é b", "spaces": "🙂日é the"}
MARK = "x\n"  # a prompt; behind it, and behind a template's last line, the answer begins
BYTES = {  # of each token, by hand
    "bytes": [b"a", *(bytes([one]) for one in "🙂日é".encode()), b" b"],
    "spaces": [b"", *(bytes([one]) for one in "🙂日é".encode()), b" the"],  # a first space is no text
}
OFFSETS = {"bytes": [0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4], "spaces": [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3]}


@contextmanager
def serving(kind, text, folder, change=None):
    """OpenAI's client of a server whose model writes a text, and the model, its tokenizer and the tokens."""
    tokenizer = tokenizer_of(kind)
    first, ids = tokenizer.encode(MARK)[-1], tokenizer.encode(text, add_special_tokens=False)
    model = chain(tokenizer, first, ids)
    if change:
        change(model, tokenizer)
    with running((model, tokenizer), folder, cache_tokens=512) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0, timeout=60)
        yield client, model, tokenizer, ids


@pytest.fixture(scope="module", params=["bytes", "spaces"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def served(kind, tmp_path_factory):
    with serving(kind, TEXTS[kind], tmp_path_factory.mktemp("store")) as opened:
        yield opened


def chatted(client, **more):
    """A whole answer, and the same one streamed: text, and rows of log probabilities."""
    given = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**{**given, **more}).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**{**given, **more}, stream=True)]
    rows = [row for part in parts if part.logprobs for row in part.logprobs.content]
    assert rows == whole.logprobs.content
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    return whole.message.content, whole.logprobs.content


def completed(client, **more):
    """As above; text, and columns of log probabilities."""
    given = {"model": MODEL, "prompt": MARK, "temperature": 0, **more}
    whole = client.completions.create(**given).choices[0]
    parts = [part.choices[0] for part in client.completions.create(**given, stream=True)]
    columns = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for part in parts:
        for name, column in columns.items():
            column += getattr(part.logprobs, name) if part.logprobs else []
    assert columns == {name: getattr(whole.logprobs, name) for name in columns}
    assert "".join(part.text for part in parts) == whole.text
    return whole.text, whole.logprobs


def expected(model, tokenizer, ids, prompt):
    """`[tokens, vocabulary]` log probabilities, of the model alone."""
    front = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    with torch.no_grad():
        return model(torch.tensor([[*front, *ids]])).logits[0, len(front) - 1 : -1].log_softmax(-1)


def test_logprobs_of_a_chat_have_the_bytes_of_each_token_and_join_to_the_text(kind, served):
    client, model, tokenizer, ids = served
    text, rows = chatted(client, top_logprobs=5)
    assert text == TEXTS[kind] == b"".join(bytes(row.bytes) for row in rows).decode()
    assert [bytes(row.bytes) for row in rows] == BYTES[kind]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    own = expected(model, tokenizer, ids, rendered["input_ids"])
    for row, token, right in zip(rows, ids, own, strict=True):
        assert row.logprob == pytest.approx(float(right[token]), abs=1e-4)
        assert [one.logprob for one in row.top_logprobs] == pytest.approx(right.topk(5).values.tolist(), abs=1e-4)
        assert [(one.token, one.bytes, one.logprob) for one in row.top_logprobs].count(
            (row.token, row.bytes, row.logprob)
        ) == 1
    emoji = "".join(row.token for row in rows[1:5])
    assert emoji == r"\xf0\x9f\x99\x82", "as OpenAI writes it"


def test_logprobs_of_a_completion_have_as_many_tokens_as_asked_for_and_offsets_into_the_text(kind, served):
    client, model, tokenizer, ids = served
    text, found = completed(client, logprobs=5)
    assert text == TEXTS[kind]
    assert found.text_offset == OFFSETS[kind]
    assert found.tokens[1:5] == [rf"bytes:\x{byte:x}" for byte in "🙂".encode()]
    own = expected(model, tokenizer, ids, MARK)
    assert found.token_logprobs == pytest.approx(own[range(len(ids)), ids].tolist(), abs=1e-4)
    for top, token, logprob, right in zip(found.top_logprobs, found.tokens, found.token_logprobs, own, strict=True):
        assert list(top.values()) == pytest.approx(right.topk(5).values.tolist(), abs=1e-4)
        assert top[token] == logprob


def test_logprobs_are_the_models_own_whatever_token_is_drawn(kind, served):
    client, model, tokenizer, _ = served
    other = tokenizer.convert_tokens_to_ids("s" if kind == "spaces" else "b")
    forced = {"logit_bias": {str(other): 100}, "max_tokens": 1, "temperature": 0.5}
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    right = expected(model, tokenizer, [other], rendered["input_ids"])[0]
    text, (row,) = chatted(client, top_logprobs=2, **forced)
    assert text == row.token
    assert row.logprob == pytest.approx(float(right[other]), abs=1e-4)
    assert [one.logprob for one in row.top_logprobs] == pytest.approx(right.topk(2).values.tolist(), abs=1e-4)
    for count in (0, 2):
        text, found = completed(client, logprobs=count, **forced)
        assert len(found.top_logprobs[0]) == count + 1, "the token itself is among them"
        assert found.top_logprobs[0][text] == found.token_logprobs[0] == min(found.top_logprobs[0].values())


def test_logprobs_end_where_a_stop_text_cuts_the_answer(kind, served):
    client = served[0]
    stops = {"🙂": 5, "日": 5, "é": 8, "日é": 5}  # tokens before it, the first one too
    for stop, count in stops.items():
        count = 1 if stop == "🙂" and kind == "bytes" else 0 if stop == "🙂" else count
        text, rows = chatted(client, stop=[stop])
        assert text == TEXTS[kind].partition(stop)[0]
        assert b"".join(bytes(row.bytes) for row in rows).decode() == text
        assert len(rows) == count
        assert len(completed(client, stop=[stop], logprobs=1)[1].tokens) == count
    last = TEXTS[kind][-2:]  # in the middle of the last token, whose probability is of the whole
    text, rows = chatted(client, stop=[last[-1]])
    assert text == TEXTS[kind].partition(last[-1])[0]
    assert b"".join(bytes(row.bytes) for row in rows).decode().startswith(text)


def test_logprobs_tell_tokens_with_an_equal_text_apart(tmp_path):
    twins = []

    def add_twin(model, tokenizer):  # "▁a" and "a", where a text begins
        twins.extend(map(tokenizer.convert_tokens_to_ids, ("▁a", "a")))
        with torch.no_grad():
            model.lm_head.weight[twins[1]] = 1.01 * model.lm_head.weight[twins[0]]

    with serving("spaces", "a", tmp_path, add_twin) as (client, _, _, _):
        bias = {"logit_bias": {str(twins[0]): 20}, "max_tokens": 1}
        _, (row,) = chatted(client, top_logprobs=3, **bias)
        text, found = completed(client, logprobs=3, **bias)
    first, second, _ = row.top_logprobs
    assert (row.token, row.bytes) == (first.token, first.bytes) == (second.token, second.bytes)
    assert row.logprob == second.logprob < first.logprob
    assert text == "a"
    top, values = found.top_logprobs[0], list(found.top_logprobs[0].values())
    assert (len(top), top["a"], top[f"token_id:{twins[1]}"]) == (3, values[1], values[0])
    assert found.token_logprobs == [values[1]]


def test_added_bytes_are_the_tokens_own_where_they_are_no_characters(kind):
    tokenizer = tokenizer_of(kind)
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if kind == "bytes":
        names = {byte: name for name in tokenizer.get_vocab() if len(name) == 1 for byte in [byte_of(name)]}
    odd = [0xF0, 0x9F, 0x80, 0xFF, 0xC3, 0xE6, 0x97, 0x41, 0xA9, 0xED, 0xA0, 0x80]
    ids = [tokenizer.convert_tokens_to_ids(names[byte]) for byte in odd]
    detokenizer = Detokenizer(tokenizer, [])
    for count in range(1, len(ids) + 1):
        detokenizer.feed(ids[:count], count == len(ids))
    assert b"".join(detokenizer.added(ids, index, [ids[index]])[0] for index in range(len(ids))) == bytes(odd)
    assert detokenizer.offsets == sorted(detokenizer.offsets)


def byte_of(name):
    """The byte that a character of GPT-2's names stands for, as its authors made the list."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return ord(name) if ord(name) in plain else rest[ord(name) - 256]


def test_special_tokens_that_the_text_leaves_out_have_no_bytes_and_keep_their_names(kind, served):
    client, _, tokenizer, _ = served
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    bias = {"logit_bias": {str(special): 100}, "max_tokens": 2, "temperature": 0}
    text, rows = chatted(client, top_logprobs=0, **bias)
    assert (text, [(row.token, row.bytes) for row in rows]) == ("", [("<|im_end|>", [])] * 2)
    text, found = completed(client, logprobs=1, **bias)
    assert (text, found.tokens, found.text_offset) == ("", ["<|im_end|>"] * 2, [0, 0])


def test_pieces_of_an_answer_are_offset_the_same_however_many_tokens_come_at_once(kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(f"{TEXTS[kind]} 🙂", add_special_tokens=False)
    alone, together = Detokenizer(tokenizer, []), Detokenizer(tokenizer, [])
    text = "".join(alone.feed(ids[: end + 1], end + 1 == len(ids)) for end in range(len(ids)))
    assert together.feed(ids, False) + together.feed(ids, True) == text == tokenizer.decode(ids)
    cut = Detokenizer(tokenizer, [])
    assert cut.feed(ids[:-1], False) + cut.feed(ids[:-1], True) == tokenizer.decode(ids[:-1]), "an end that is no more"
    assert together.offsets == alone.offsets
    own = [b"".join(alone.added(ids, index, [ids[index]])) for index in range(len(ids))]
    assert own == [b"".join(together.added(ids, index, [ids[index]])) for index in range(len(ids))]
    assert [len(b"".join(own[:index]).decode(errors="ignore")) for index in range(len(ids))] == alone.offsets


def test_log_probability_of_what_cannot_be_is_a_number_of_json():
    sampling = Sampling(0, LogitsProcessorList(), True, "0", top_logprobs=3)
    sampling.draw([], torch.tensor([[0.0, -math.inf, 1.0]]))
    assert [value for _, value in sampling.logprobs[0].top][2] == -9999.0

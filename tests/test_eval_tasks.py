# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts as published, token by token, on the real files; rows of the hub; files that are no good."""

import itertools
import json
from functools import partial

import pytest

from hf_blend import plugins
from hf_blend.errors import ConfigError, PromptError
from hf_blend.evaluation.rows import read_rows
from hf_blend.evaluation.tasks.base import Sample, Shape, Task, polished
from tests.asking import raising

TASKS = ("hotpotqa", "multi-news", "musique", "needle", "samsum", "wikimqa")
INSTRUCTION = (733, 16289, 28793)
END = (733, 28748, 16289, 28793)
FILES = {
    "musique": "musique_cacheblend.jsonl",
    "wikimqa": "2wikimqa_cacheblend_clean.jsonl",
    "hotpotqa": "hotpotqa_natural.jsonl",
    "samsum": "restricted/samsum_longbench_mini_fewshot.jsonl",
}
PROMPTS = {
    "musique": (
        "You will be asked a question after reading several passages. Please directly answer the question based on "
        "the given passages. Do NOT repeat the question. The answer should be within 5 words..\nPassages:\n",
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer "
        "should be within 5 words. \nQuestion:{}\nAnswer:",
    ),
    "wikimqa": (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\n",
        "\n\nAnswer the question based on the given passages. Answer the question within 5 words. Do NOT repeat the "
        "question or output any other words. Question: {}\nAnswer:",
    ),
}
PROMPTS["hotpotqa"] = PROMPTS["wikimqa"]


class Words:
    """A tokenizer whose tokens are words; it adds BOS unless told not to."""

    bos_token_id = 1
    bos_token = "<s>"
    chat_template = None

    def encode(self, text, add_special_tokens=True):
        ids = [1] * add_special_tokens
        for word in text.replace("<s>", "<s> ").split():
            if word == "<s>":
                ids.append(1)
            else:
                ids.append(10 + sum(word.encode()))
        return ids


def task(name, tokenizer=None, data=None, seed=0):
    made: Task = plugins.load("evaluation.tasks", name)(tokenizer or Words(), data, seed)
    return made


def real(published, name):
    path = published / FILES[name]
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    return path


def row(**fields):
    return {"chunks": ["one two", "three"], "question": "Who?", "answers": ["Ann"], **fields}


def encoded(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", ["musique", "wikimqa", "hotpotqa"])
def test_question_prompt_is_published_one_piece_by_piece(published, mistral_tokenizer, name):
    path = real(published, name)
    prefix, asked = PROMPTS[name]
    first = task(name, mistral_tokenizer, path).samples(1)[0]
    source = read_rows(path)
    ids = partial(encoded, mistral_tokenizer)
    assert first.prefix == INSTRUCTION + ids(prefix)
    assert first.chunks == tuple(ids(f"\n\n{chunk}\n\n") for chunk in source[0]["chunks"])
    assert first.question == ids(asked.format(polished(source[0]["question"]))) + END
    assert all(chunk[0] == 28705 for chunk in first.chunks), "every piece is tokenized on its own"
    assert first.answers == tuple(source[0]["answers"])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_reads_every_real_file_or_says_why_not(published, mistral_tokenizer, name):
    for path in sorted(published.glob("**/*.jsonl")):
        made = task(name, mistral_tokenizer, path)
        source = read_rows(path)
        if made.asks and not source[0]["question"]:
            with pytest.raises(PromptError, match=f"{source[0]['id']} has no question"):
                made.samples(1)
            continue
        (sample,) = made.samples(1)
        assert all([sample.chunks, *sample.chunks, sample.question, sample.answers]), path


def test_needle_depends_on_seed_alone_and_never_ends():
    made = task("needle", seed=3)
    first = made.samples(4)
    assert first == task("needle", seed=3).samples(4)
    assert first != task("needle", seed=4).samples(4)
    assert len({one.id for one in first}) == 4
    row = next(iter(made.rows()))
    assert first[0].id == row["id"]
    assert first[0].answers == tuple(row["answers"])
    assert first[0].chunks == tuple(map(made.ids, row["chunks"]))
    with pytest.raises(ConfigError, match=r"without end.*limit"):
        made.samples()


def test_needle_lies_in_one_chunk_and_its_number_is_answer():
    for found in itertools.islice(task("needle", seed=1).rows(), 20):
        thing = found["question"][28:-1]
        needle = f"The magic number of {thing} is {found['answers'][0]}."
        chunks = found["chunks"]
        assert needle in "\n".join(chunks)
        assert str(chunks).count("magic number") == 1


SAMPLE = Sample("s", (1,), ((1, 2, 3), (4, 5), (6, 7, 8, 9)), (10,), ("a",))


def test_shape_cuts_chunks_over_their_seams_behind_turning_or_shuffling_them():
    assert Shape().applied(SAMPLE) == SAMPLE
    assert Shape(4, "reversed").applied(SAMPLE).chunks == ((6, 7, 8, 9), (4, 5, 1, 2), (3,))
    orders = set()
    for seed in range(8):
        shape = Shape(None, "shuffled", seed)
        order = shape.applied(SAMPLE).chunks
        assert order == shape.applied(SAMPLE).chunks
        assert sorted(order) == sorted(SAMPLE.chunks)
        orders.add(order)
    assert len(orders) > 1


# Rows of the hub in their own columns, files of one object per line, and what is no good.


def test_hub_that_does_not_answer_is_told_with_way_out(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", raising(ConnectionError("offline")))
    with pytest.raises(PromptError, match=r"(?s)MuSiQue.*offline.*--data"):
        task("musique").samples(1)


GOOD = json.dumps(row())
BAD = {
    "nothing": ("", "no line"),
    "cut off": (GOOD[:-5], "line 1 .* not JSON"),
    "chunks as text": (json.dumps(row(chunks="a b")), "chunks"),
    "an answer as text": (json.dumps(row(answers="Ann")), "answers"),
    "one id twice": (f"{json.dumps(row(id='a'))}\n\n{json.dumps(row(id='a'))}", "line 3 .*'a' again"),
    "not UTF-8": ("\xff\xfe\x00", "cannot be read"),
    "a field by two names": (json.dumps(row(documents=["a"])), "chunks twice, as documents and by another name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_file_that_is_no_good_is_refused_with_file_line_and_remedy(tmp_path, kind):
    content, message = BAD[kind]
    path = tmp_path / "bad.jsonl"
    path.write_text(content, "latin-1")
    with pytest.raises(PromptError, match=f"(?s){message}") as raised:
        task("needle", data=path).samples(5)
    assert "bad.jsonl" in str(raised.value)

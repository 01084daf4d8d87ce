# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts as published, token by token, on the real files; rows of the hub; files that are no good."""

import itertools
import json
import re
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
        words = text.replace("<s>", "<s> ").split()
        return [1] * add_special_tokens + [1 if word == "<s>" else 10 + sum(word.encode()) for word in words]


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
    path, (prefix, asked) = real(published, name), PROMPTS[name]
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


@pytest.mark.parametrize("name", ["needle"])
def test_what_is_made_here_depends_on_seed_alone_and_never_ends(name):
    first, again, other = (task(name, seed=seed).samples(4) for seed in (3, 3, 4))
    assert first == again != other
    assert len({one.id for one in first}) == 4
    assert task(name, seed=3).samples(2) == first[:2]
    row = next(iter(task(name, seed=3).rows()))
    chunks = first[0].chunks
    assert first[0].id == row["id"]
    assert first[0].answers == tuple(row["answers"])
    assert chunks == tuple(task(name).ids(chunk) for chunk in row["chunks"])
    with pytest.raises(ConfigError, match=r"without end.*limit"):
        task(name).samples()


def test_needle_lies_in_one_chunk_and_its_number_is_answer():
    for found in itertools.islice(task("needle", seed=1).rows(), 20):
        needle = f"The magic number of {found['question'][28:-1]} is {found['answers'][0]}."
        assert sum(needle in chunk for chunk in found["chunks"]) == 1
        assert " ".join(found["chunks"]).count("magic number") == 1


SAMPLE = Sample("s", (1,), ((1, 2, 3), (4, 5), (6, 7, 8, 9)), (10,), ("a",))


def test_shape_cuts_chunks_over_their_seams_behind_turning_or_shuffling_them():
    assert Shape().applied(SAMPLE) == SAMPLE
    assert Shape(chunk_tokens=4).applied(SAMPLE).chunks == ((1, 2, 3, 4), (5, 6, 7, 8), (9,))
    assert Shape(chunk_tokens=100).applied(SAMPLE).chunks == ((1, 2, 3, 4, 5, 6, 7, 8, 9),)
    assert Shape(chunk_order="reversed").applied(SAMPLE).chunks == SAMPLE.chunks[::-1]
    assert Shape(4, "reversed").applied(SAMPLE).chunks == ((6, 7, 8, 9), (4, 5, 1, 2), (3,))
    orders = {seed: Shape(None, "shuffled", seed).applied(SAMPLE).chunks for seed in range(8)}
    assert all(sorted(one) == sorted(SAMPLE.chunks) for one in orders.values())
    assert len(set(orders.values())) > 1
    assert orders[0] == Shape(None, "shuffled", 0).applied(SAMPLE).chunks


def test_shape_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"'sorted'.*given, shuffled, reversed"):
        Shape(chunk_order="sorted")
    for settings in ({"chunk_tokens": 0}, {"most_chunks": 0}):
        with pytest.raises(ConfigError, match="0, expected 1 or more"):
            Shape(**settings)


# Rows of the hub in their own columns, files of one object per line, and what is no good.

@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: calls are noted, rows come as they were put there."""
    datasets = pytest.importorskip("datasets")
    asked = []
    held = {}

    def load_dataset(name, configuration=None, *, split, streaming):
        assert streaming, "a few rows must not cost the whole data set"
        asked.append((name, configuration, split))
        return iter(held[split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked, held


@pytest.mark.parametrize("error", [ConnectionError("offline"), RuntimeError("scripts are no longer supported")])
@pytest.mark.parametrize("name", ["musique", "samsum"])
def test_hub_that_does_not_answer_is_told_with_way_out(monkeypatch, name, error):
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", raising(error))
    with pytest.raises(PromptError, match=rf"(?s)(MuSiQue|samsum).*{error}.*--data"):
        task(name).samples(1)


GOOD = json.dumps(row())
BAD = {
    "nothing": ("", "no line"),
    "blank": ("\n \n", "no line"),
    "no JSON": (f"{GOOD}\n{{chunks: 1}}\n", "line 2 .* not JSON"),
    "cut off": (GOOD[:-5], "line 1 .* not JSON"),
    "a list": (json.dumps(["a"]), "line 1 .* expected an object with chunks"),
    "no chunks": (json.dumps({"question": "Who?", "answers": ["a"]}), "chunks"),
    "no chunk": (json.dumps(row(chunks=[])), "chunks"),
    "an empty chunk": (json.dumps(row(chunks=["a", ""])), "chunk 1 is .* has no text"),
    "chunks as text": (json.dumps(row(chunks="a b")), "chunks"),
    "no question": (json.dumps({"chunks": ["a"], "answers": ["a"]}), "question"),
    "a question of no text": (json.dumps(row(question=3)), "question"),
    "no answers": (json.dumps(row(answers=[])), "answers"),
    "an answer as text": (json.dumps(row(answers="Ann")), "answers"),
    "nested answers": (json.dumps(row(answers=[["Ann"]])), "answers"),
    "one id twice": (f"{json.dumps(row(id='a'))}\n\n{json.dumps(row(id='a'))}", "line 3 .*'a' again"),
    "not UTF-8": (b"\xff\xfe\x00", "cannot be read"),
    "a prefix of no text": (json.dumps(row(prefix=1)), "line 1 .* has prefix=1, expected a text or null"),
    "a field by two names": (json.dumps(row(documents=["a"])), "chunks twice, as documents and by another name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_file_that_is_no_good_is_refused_with_file_line_and_remedy(tmp_path, kind):
    content, message = BAD[kind]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PromptError, match=f"(?s){message}") as raised:
        task("needle", data=path).samples(5)
    assert re.search(r"bad\.jsonl", str(raised.value))

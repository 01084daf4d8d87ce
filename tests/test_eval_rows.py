# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where samples come from: rows of the hub in their own columns, files of one object per line, and what is no good."""

import itertools
import json
import re

import pytest

from hf_blend import plugins
from hf_blend.errors import PromptError
from hf_blend.evaluation.rows import read_rows


class Words:
    """A tokenizer whose tokens are words."""

    bos_token_id, bos_token, chat_template = 1, "<s>", None

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [10 + sum(word.encode()) for word in text.split()]


def task(name, data=None):
    return plugins.load("evaluation.tasks", name)(Words(), data)


def row(**fields):
    return {"chunks": ["one two", "three"], "question": "Who?", "answers": ["Ann"], **fields}


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return path


CONTEXT = {"title": ["Ann", "Bob"], "sentences": [["Ann is.", " She sings."], ["Bob is."]]}
ROWS_OF_THE_HUB = {
    "hotpotqa": (
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
        {"id": "5a8b", "question": "Who sings?", "answer": "Ann", "type": "bridge", "level": "hard",
         "supporting_facts": {"title": ["Ann"], "sent_id": [1]}, "context": CONTEXT},
        ["Ann\n\nAnn is. She sings.", "Bob\n\nBob is."], ["Ann"],
    ),
    "wikimqa": (
        ("framolfese/2WikiMultihopQA", None, "validation"),
        {"id": "13f5", "question": "Who sings?", "answer": "Ann", "type": "comparison",
         "supporting_facts": {"title": ["Ann"], "sent_id": [1]},
         "context": {"title": ["Ann", "Bob"], "sentences": [["Ann is.", "She sings."], ["Bob is."]]}},
        ["Ann\n\nAnn is. She sings.", "Bob\n\nBob is."], ["Ann"],
    ),
    "musique": (
        ("dgslibisey/MuSiQue", None, "validation"),
        {"id": "2hop__1", "question": "Who sings?", "answer": "Ann", "answer_aliases": ["Annie"], "answerable": True,
         "question_decomposition": [{"id": 1, "question": "x", "answer": "Ann", "paragraph_support_idx": 0}],
         "paragraphs": [{"idx": 0, "title": "Ann", "paragraph_text": "She sings.", "is_supporting": True},
                        {"idx": 1, "title": "Bob", "paragraph_text": "Bob is.", "is_supporting": False}]},
        ["Ann\n\nShe sings.", "Bob\n\nBob is."], ["Ann", "Annie"],
    ),
    "multi-news": (
        ("Awesome075/multi_news_parquet", None, "test"),
        {"document": "Ann sings. ||||| Bob is. |||||", "summary": "Ann sings"},
        ["Ann sings.", "Bob is."], ["Ann sings"],
    ),
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: calls are noted, rows come as they were put there."""
    datasets = pytest.importorskip("datasets")
    asked, held = [], {}

    def load_dataset(name, configuration=None, *, split, streaming):
        assert streaming, "a few rows must not cost the whole data set"
        asked.append((name, configuration, split))
        return iter(held[split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked, held


@pytest.mark.parametrize("name", ROWS_OF_THE_HUB)
def test_a_row_of_the_hub_becomes_passages_question_and_answers(hub, name):
    (where, source, chunks, answers), (asked, held) = ROWS_OF_THE_HUB[name], hub
    held[where[2]] = [source]
    made = task(name)
    (found,) = made.rows()
    assert (found["chunks"], found["answers"], asked) == (chunks, answers, [where])
    (sample,) = made.samples()
    assert (sample.answers, len(sample.chunks)) == (tuple(answers), len(chunks))


def test_news_without_an_article_is_left_out(hub):
    hub[1]["test"] = [{"document": " ||||| ", "summary": "nothing"}, ROWS_OF_THE_HUB["multi-news"][1]]
    assert [len(one.chunks) for one in task("multi-news").samples()] == [2]


def test_dialogues_of_the_hub_come_behind_examples_from_the_training_split(hub):
    asked, held = hub
    held["train"] = ({"id": str(n), "dialogue": f"Ann: {n}", "summary": f"Ann says {n}."} for n in itertools.count())
    held["test"] = [{"id": "t1", "dialogue": "Bob: hi\r\nAnn: hi", "summary": "They greet."}]
    (found,) = task("samsum").rows()
    assert asked == [("knkarthick/samsum", None, "train"), ("knkarthick/samsum", None, "test")]
    assert found["chunks"] == [f"Dialogue: Ann: {n}\nSummary: Ann says {n}.\n" for n in range(20)]
    assert (found["question"], found["answers"]) == ("Dialogue: Bob: hi\r\nAnn: hi\nSummary: ", ["They greet."])


@pytest.mark.parametrize("error", [ConnectionError("offline"), RuntimeError("scripts are no longer supported")])
@pytest.mark.parametrize("name", ["musique", "samsum"])
def test_a_hub_that_does_not_answer_is_told_with_the_way_out(monkeypatch, name, error):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", load_dataset)
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
    "an empty chunk": (json.dumps(row(chunks=["a", ""])), "none empty"),
    "chunks as text": (json.dumps(row(chunks="a b")), "chunks"),
    "no question": (json.dumps({"chunks": ["a"], "answers": ["a"]}), "question"),
    "a question of no text": (json.dumps(row(question=3)), "question"),
    "no answers": (json.dumps(row(answers=[])), "answers"),
    "an answer as text": (json.dumps(row(answers="Ann")), "answers"),
    "nested answers": (json.dumps(row(answers=[["Ann"]])), "answers"),
    "one id twice": (f"{json.dumps(row(id='a'))}\n\n{json.dumps(row(id='a'))}", "line 3 .*'a' again"),
    "not UTF-8": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["musique", "samsum", "needle"])
def test_a_file_that_is_no_good_is_refused_with_file_line_and_remedy(tmp_path, name, kind):
    content, message = BAD[kind]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PromptError, match=f"(?s){message}") as raised:
        task(name, data=path).samples(5)
    assert re.search(r"bad\.jsonl", str(raised.value))


@pytest.mark.parametrize("name", ["", "absent.jsonl"])
def test_a_folder_or_a_file_that_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(PromptError, match="cannot be read"):
        task("musique", data=tmp_path / name).samples()


def test_odd_line_breaks_inside_texts_and_a_mark_at_the_beginning_are_no_harm(tmp_path):
    path = tmp_path / "rows.jsonl"
    source = row(chunks=["one\u2028two\u0085three"], question="Who\u2029?")
    path.write_text("\ufeff" + json.dumps(source, ensure_ascii=False) + "\r\n", "utf-8", newline="")
    assert read_rows(path) == [{"id": "1", **source}]


def test_other_names_of_a_field_are_read_as_that_field(tmp_path):
    path = written(
        tmp_path, row(), {"documents": ["one two", "three"], "question": "Who?", "answer": "Ann"}, {"text": "one"}
    )
    first, second, third = read_rows(path, needs=("chunks",))
    assert {**second, "id": first["id"]} == first
    assert third == {"id": "3", "chunks": ["one"]}


ODD = {
    "has no answers or answer, expected a list of texts; it has": {"chunks": ["a"], "question": "q"},
    "has documents=3, expected a list of texts, none empty": {"documents": 3, "question": "q", "answers": ["a"]},
    "has answer=None, expected a text": {"chunks": ["a"], "question": "q", "answer": None},
    "has prefix=1, expected a text or null": row(prefix=1),
    "has chunks twice, as documents and by another name, expected one": row(documents=["a"]),
}


@pytest.mark.parametrize("said", ODD)
def test_a_row_that_is_refused_is_named_by_line_and_field(tmp_path, said):
    with pytest.raises(PromptError, match=re.escape("line 2 of ") + ".*rows.jsonl' " + re.escape(said)):
        read_rows(written(tmp_path, row(), {"id": "x", **ODD[said]} if "it has" not in said else ODD[said]))


def test_the_limit_counts_samples_and_no_further_row_is_read(tmp_path):
    path = written(tmp_path, *[row(id=str(n)) for n in range(5)])
    assert [one.id for one in task("musique", data=path).samples(2)] == ["0", "1"]
    assert len(task("musique", data=path).samples()) == 5

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts as published, token by token, on the real files; rows of the hub; files that are no good."""

import itertools
import json
from functools import partial

import pytest
from worlds import REFERENCE_TASK

from hf_blend import plugins
from hf_blend.errors import ConfigError, PromptError
from hf_blend.evaluation.rows import read_rows
from hf_blend.evaluation.tasks.base import Sample, Shape, Task, polished

TASKS = ("hotpotqa", "multi-news", "musique", "needle", "samsum", "wikimqa")
INSTRUCTION, END = (733, 16289, 28793), (733, 28748, 16289, 28793)
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

    bos_token_id, bos_token, chat_template = 1, "<s>", None

    def encode(self, text, add_special_tokens=True):
        words = text.replace("<s>", "<s> ").split()
        return [1] * add_special_tokens + [1 if word == "<s>" else 10 + sum(word.encode()) for word in words]


class Chatty(Words):
    chat_template = "given"

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return f"<s><user> {turns[0]['content']} <end> <assistant>"


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


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
    return path


def test_every_task_is_in_the_list():
    assert tuple(plugins.describe("evaluation.tasks")) == TASKS


@pytest.mark.parametrize("name", ["musique", "wikimqa", "hotpotqa"])
def test_a_question_prompt_is_the_published_one_piece_by_piece(published, mistral_tokenizer, name):
    path, (prefix, asked) = real(published, name), PROMPTS[name]
    first, source = task(name, mistral_tokenizer, path).samples(1)[0], read_rows(path)
    ids = partial(encoded, mistral_tokenizer)
    assert first.prefix == INSTRUCTION + ids(prefix)
    assert first.chunks == tuple(ids(f"\n\n{chunk}\n\n") for chunk in source[0]["chunks"])
    assert first.question == ids(asked.format(polished(source[0]["question"]))) + END
    assert all(chunk[0] == 28705 for chunk in first.chunks), "every piece is tokenized on its own"
    assert first.answers == tuple(source[0]["answers"])


@pytest.mark.parametrize("name", ["musique", "wikimqa"])
def test_going_through_text_as_the_published_scripts_do_gives_the_same_tokens(published, mistral_tokenizer, name):
    for sample in task(name, mistral_tokenizer, real(published, name)).samples(3):
        ids = [*sample.prefix, *itertools.chain(*sample.chunks), *sample.question]
        assert mistral_tokenizer.encode(mistral_tokenizer.decode(ids)) == [1, *ids]


def test_no_token_is_lost_where_a_tokenizer_adds_no_bos(published):
    from transformers import AutoTokenizer

    folder = published / "tokenizers" / "gpt2-bpe"
    if not folder.is_dir():
        pytest.skip("the tokenizer of GPT-2 is not here")
    tokenizer, path = AutoTokenizer.from_pretrained(folder), real(published, "musique")
    sample = task("musique", tokenizer, path).samples(1)[0]
    texts = [tokenizer.decode(chunk) for chunk in sample.chunks]
    assert texts == [f"\n\n{chunk}\n\n" for chunk in read_rows(path)[0]["chunks"]]
    assert tokenizer.decode(sample.prefix).startswith("You will be asked"), "no tags where the tokenizer has none"


def test_a_few_shot_prompt_has_no_tags_and_leaves_out_the_middle_example_until_the_rest_fits(
    published, mistral_tokenizer
):
    path = real(published, "samsum")
    ids = partial(encoded, mistral_tokenizer)
    samples, rows = task("samsum", mistral_tokenizer, path).samples(5), read_rows(path)
    assert len(samples) == 5
    for sample, source in zip(samples, rows, strict=False):
        known = [ids(chunk) for chunk in source["chunks"]]
        while sum(map(len, known)) > 3400:
            known.pop(len(known) // 2)
        assert sample.chunks == tuple(known)
        assert sum(map(len, sample.chunks)) <= 3400 < sum(len(ids(chunk)) for chunk in source["chunks"])
        assert sample.question == ids("\n\n" + source["question"])
        assert source["question"].endswith("Summary: ")
    begins = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
    assert samples[0].prefix == ids(begins)


def test_a_few_shot_row_of_which_no_example_fits_is_left_out(tmp_path):
    parts = ["word " * 3401], ["a " * 3400, "b"], ["a", "b " * 3400]
    path = written(tmp_path, *[row(chunks=chunks) for chunks in parts])
    found = task("samsum", data=path).samples()
    assert [(one.id, list(map(len, one.chunks))) for one in found] == [("2", [3400]), ("3", [1])]


def test_a_dialogue_without_a_question_is_summarised_at_once(tmp_path):
    made = task("samsum", data=written(tmp_path, row(question=""))).samples()[0]
    assert made.question == encoded(Words(), "Summary:")


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


@pytest.mark.parametrize(
    ("name", "rows", "distinct", "chunks"), [("musique", 150, 1255, 1500), ("wikimqa", 102, 748, 1020)]
)
def test_as_many_chunks_come_again_as_published(published, name, rows, distinct, chunks):
    found = read_rows(real(published, name))
    texts = [chunk for one in found for chunk in one["chunks"]]
    assert (len(found), len(set(texts)), len(texts)) == (rows, distinct, chunks)


@pytest.mark.parametrize(
    ("question", "wanted"),
    [("Who is it?", "who is it?"), ("Who is it", "who is it?"), ("É ele?", "é ele?"), ("who?", "who?"), ("A", "a?")],
)
def test_a_question_ends_in_its_mark_and_begins_small(question, wanted):
    assert polished(question) == wanted


def test_other_tokenizers_get_what_their_template_puts_around_a_users_turn(tmp_path):
    path, words = written(tmp_path, row()), partial(encoded, Words())
    chatty, plain = (task("musique", one, path).samples()[0] for one in (Chatty(), Words()))
    assert chatty.prefix == words("<user>") + plain.prefix, "BOS stands in front once, not here"
    assert chatty.question == plain.question + words("<end> <assistant>")
    assert task("samsum", Chatty(), path).samples()[0].question == task("samsum", data=path).samples()[0].question


@pytest.mark.parametrize("name", ["needle", REFERENCE_TASK])
def test_what_is_made_here_depends_on_the_seed_alone_and_never_ends(name):
    first, again, other = (task(name, seed=seed).samples(4) for seed in (3, 3, 4))
    assert first == again != other
    assert len({one.id for one in first}) == 4
    assert task(name, seed=3).samples(2) == first[:2]
    with pytest.raises(ConfigError, match=r"without end.*limit"):
        task(name).samples()


def test_a_needle_lies_in_one_chunk_and_its_number_is_the_answer():
    for found in itertools.islice(task("needle", seed=1).rows(), 20):
        needle = f"The magic number of {found['question'][28:-1]} is {found['answers'][0]}."
        assert sum(needle in chunk for chunk in found["chunks"]) == 1
        assert " ".join(found["chunks"]).count("magic number") == 1


SAMPLE = Sample("s", (1,), ((1, 2, 3), (4, 5), (6, 7, 8, 9)), (10,), ("a",))


def test_chunks_stay_as_they_are_unless_told():
    assert Shape().applied(SAMPLE) == SAMPLE


def test_chunks_are_cut_anew_over_their_seams():
    assert Shape(chunk_tokens=4).applied(SAMPLE).chunks == ((1, 2, 3, 4), (5, 6, 7, 8), (9,))
    assert Shape(chunk_tokens=100).applied(SAMPLE).chunks == ((1, 2, 3, 4, 5, 6, 7, 8, 9),)


def test_chunks_are_turned_round_or_shuffled_before_they_are_cut():
    assert Shape(chunk_order="reversed").applied(SAMPLE).chunks == SAMPLE.chunks[::-1]
    assert Shape(4, "reversed").applied(SAMPLE).chunks == ((6, 7, 8, 9), (4, 5, 1, 2), (3,))
    orders = {seed: Shape(None, "shuffled", seed).applied(SAMPLE).chunks for seed in range(8)}
    assert all(sorted(one) == sorted(SAMPLE.chunks) for one in orders.values())
    assert len(set(orders.values())) > 1
    assert orders[0] == Shape(None, "shuffled", 0).applied(SAMPLE).chunks


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"chunk_order": "sorted"}, "'sorted'.*given, shuffled, reversed"), ({"chunk_tokens": 0}, "0, wanted 1 or more")],
)
def test_a_shape_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Shape(**settings)

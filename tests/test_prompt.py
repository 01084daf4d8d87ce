# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts are joined as ids, so that a chunk is the same tokens wherever it stands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.errors import PromptError
from hf_blend.prompt.pieces import batch, build, build_all, tokenize
from hf_blend.prompt.tokenizer import front_ids

ids = st.lists(st.integers(3, 127), min_size=1, max_size=6)


class Merging:
    """A tokenizer that reads "ab" as one token, as real ones do across the seams of joined text."""

    bos_token_id = 1

    @staticmethod
    def encode(text, add_special_tokens=True):
        return [*([1] if add_special_tokens else []), *(50 + ord(letter) for letter in text.replace("ab", "A"))]


@given(ids, st.lists(ids, min_size=1, max_size=4), ids)
def test_spans_say_where_each_chunk_stands(prefix, chunks, question):
    prompt = build(None, prefix, chunks, question)
    assert list(prompt.ids) == [*prefix, *sum(chunks, []), *question]
    for (start, chunk, *_), wanted in zip(prompt.spans(), chunks, strict=True):
        assert list(prompt.ids[start : start + len(chunk)]) == list(chunk) == wanted


def test_no_token_is_merged_across_a_seam_and_bos_comes_once():
    prompt = build(Merging, "xa", ["ba", "b"], "b", separator="")
    assert prompt.ids == (1, 170, 147, 148, 147, 148, 148)
    assert len(tokenize(Merging, "xabab")) == 3


@pytest.mark.parametrize(
    ("prefix", "front"),
    [(None, (1,)), ("", (1,)), ("x", (1, 170)), ([7, 8], (7, 8)), ((), ()), (torch.tensor([7]), (7,))],
)
def test_bos_stands_before_text_and_nothing_before_ids(prefix, front):
    if isinstance(prefix, torch.Tensor):
        prefix = prefix.tolist()
    assert build(Merging, prefix, [[5]], [6]).prefix == front


def test_a_tokenizer_without_bos_puts_nothing_in_front():
    class NoBos(Merging):
        """It has a BOS, but puts none before a text."""

        @staticmethod
        def encode(text, add_special_tokens=True):
            return Merging.encode(text, add_special_tokens=False)

    assert build(NoBos, None, [[5]], [6]).ids == (5, 6)
    assert build(NoBos, "x", [[5]], [6]).ids == (170, 5, 6)
    assert front_ids(None) == ()


def test_what_a_tokenizer_puts_behind_a_text_is_not_put_before_a_prompt():
    class Ending(Merging):
        """It puts two tokens before a text, and one behind it."""

        @staticmethod
        def encode(text, add_special_tokens=True):
            bare = Merging.encode(text, add_special_tokens=False)
            return [1, 7, *bare, 2] if add_special_tokens else bare

    assert build(Ending, "x", ["b"], [6]).ids == (1, 7, 170, 60, 60, 148, 6)


def test_texts_are_separated_and_chunks_keep_their_ids():
    prompt = build(Merging, "x", ["b", "c", [9], "d", "e\n", "f"], "q")
    apart = (60, 60)
    assert prompt.ids == (1, 170, *apart, 148, *apart, 149, 9, 150, *apart, 151, 60, 152, *apart, 163)
    assert [prompt.ids[span.start : span.stop] for span in prompt.spans()] == list(prompt.chunks)
    assert prompt.chunks == ((148,), (149,), (9,), (150,), (151, 60), (152,))


@pytest.mark.parametrize(("left", "right"), [("b\n", "c"), ("b", " c"), ("b ", "\nc")])
def test_white_space_between_texts_is_separation_enough(left, right):
    assert build(Merging, None, [left, right], [6]).separators == ((), ())[:1]


def test_the_separator_can_be_chosen_and_left_out():
    assert build(Merging, None, ["b", "c"], "d", separator="-").ids == (1, 148, 95, 149, 95, 150)
    assert build(Merging, None, ["b", "c"], "d", separator="").ids == (1, 148, 149, 150)
    with pytest.raises(PromptError, match="separator is 5"):
        build(Merging, None, ["b"], "c", separator=5)


def test_behind_a_history_and_no_chunk_the_question_is_separated_from_the_prefix():
    assert build(Merging, "x", [], "b", [5, 6]).ids == (5, 6, 170, 60, 60, 148)


def test_numbers_of_numpy_and_torch_become_plain_integers():
    assert all(type(token) is int for token in tokenize(None, torch.tensor([4, 5])))


def test_a_batch_is_padded_on_the_left():
    made = batch([build(None, [1], [[5, 6]], [7]), build(None, [1], [[8]], [9])], pad_id=99)
    assert made.input_ids.tolist() == [[1, 5, 6, 7], [99, 1, 8, 9]]
    assert made.attention_mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def prompts():
    return batch([build(None, [1], [[5, 6]], [7]), build(None, [1], [[5, 6]], [7, 8, 9])], pad_id=0)


def found(rows, seen=None):
    made = prompts()
    prompt = made.find(rows, seen or [0] * len(rows))
    return prompt and [made.prompts.index(one) for one in prompt]


def test_rows_are_known_again_repeated_in_any_order_and_with_candidates_behind_them():
    assert found([[1, 5, 6, 7, 8, 9], [1, 5, 6, 7], [1, 5, 6, 7, 70, 71]]) == [1, 0, 0]
    assert found([[1, 5, 6, 7], [1, 5, 6, 7], [1, 5, 6, 7, 8, 9], [1, 5, 6, 7, 8, 9]]) == [0, 0, 1, 1]


def test_rows_are_known_by_their_parts_too():
    assert found([[1, 5], [1, 5]]) == [0, 1]
    assert found([[6, 7], [6, 7, 8, 9]], [2, 2]) == [0, 1]
    assert found([[], [8, 9]], [0, 4]) == [0, 1]


def test_a_row_that_is_another_prompt_makes_none_known():
    assert found([[1, 5, 6, 7], [1, 5, 9]]) is None
    assert found([[1, 5, 70, 7]]) is None
    assert found([[6, 70]], [2]) is None
    assert found([[70]], [4]) is None, "what comes behind a prompt is no part of it"


@pytest.mark.parametrize("prefix", [None, "x", [1, 2], ()])
def test_one_prefix_serves_a_whole_batch(prefix):
    made = build_all(Merging, prefix, [[[5]], [[6]], [[7]]], ["q", "r", [9]])
    assert [prompt.prefix for prompt in made] == [build(Merging, prefix, [[5]], "q").prefix] * 3


def test_a_list_of_prefixes_gives_each_request_its_own():
    made = build_all(Merging, ["x", [4]], [[[5]], [[6]]], ["q", "r"])
    assert [prompt.prefix for prompt in made] == [(1, 170), (4,)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, [], [1]), r"chunks is \[\]"),
        ((None, "abc", [1]), "chunks is 'abc'"),
        ((None, [[1], []], [1]), r"chunk 1 is \[\]"),
        ((None, [[1]], []), r"question is \[\]"),
        ((None, [[[1]]], [[1], [2]]), "2 questions came with 1 lists of chunks and 2 prefixes"),
        (([[1], [2], [3]], [[[1]], [[2]]], [[1], [2]]), "2 lists of chunks and 3 prefixes"),
        ((None, ["caf\udce9"], [1]), r"'caf\\udce9' .* at 3, which is half of a surrogate pair"),
    ],
)
def test_what_makes_no_prompt_is_refused(arguments, text):
    with pytest.raises(PromptError, match=text):
        build_all(None, *arguments)

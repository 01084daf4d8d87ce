# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts are joined as ids, so that a chunk is the same tokens wherever it stands."""

import torch
from hypothesis import given
from hypothesis import strategies as st

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
def test_spans_say_where_each_chunk_is(prefix, chunks, question):
    prompt = build(None, prefix, chunks, question)
    assert list(prompt.ids) == [*prefix, *sum(chunks, []), *question]
    for (start, chunk, *_), ids_ in zip(prompt.spans, chunks, strict=True):
        assert list(prompt.ids[start : start + len(chunk)]) == list(chunk) == ids_


class Ending(Merging):
    """It puts two tokens before a text, and one behind it."""

    @staticmethod
    def encode(text, add_special_tokens=True):
        bare = Merging.encode(text, add_special_tokens=False)
        return [1, 7, *bare, 2] if add_special_tokens else bare


def test_build_merges_no_token_across_seam_and_puts_in_front_what_tokenizer_puts_there():
    made = build(Merging, "xa", ["ba", "b"], "b", separator="")
    assert made.ids == (1, 170, 147, 148, 147, 148, 148)
    assert len(tokenize(Merging, "xabab")) == 3
    for prefix, front in ((None, (1,)), ("x", (1, 170)), ([7, 8], (7, 8)), ((), ())):
        assert build(Merging, prefix, [[5]], [6]).prefix == front
    made = build(Ending, "x", ["b"], [6])
    assert made.ids == (1, 7, 170, 60, 60, 148, 6)
    assert front_ids(None) == ()
    assert tokenize(None, torch.tensor([4, 5])) == (4, 5)


def test_build_separates_texts_and_chunks_keep_their_ids():
    prompt = build(Merging, "x", ["b", [9], "e\n", "f"], "q")
    apart = (60, 60)
    assert prompt.ids == (1, 170, *apart, 148, 9, 151, 60, 152, *apart, 163)
    assert prompt.chunks == ((148,), (9,), (151, 60), (152,))
    for left, right in (("b\n", "c"), ("b", " c"), ("b ", "\nc")):
        made = build(Merging, None, [left, right], [6])
        assert made.spans[0].stop == made.spans[1].start, "white space is separation enough"
    made = build(Merging, None, ["b", "c"], "d", separator="-")
    assert made.ids == (1, 148, 95, 149, 95, 150)
    assert build(Merging, torch.tensor([5, 6]), [], "b").ids == (5, 6, 148), "a conversation's ids are a prefix"


def prompts():
    return batch([build(None, [1], [[5, 6]], [7]), build(None, [1], [[5, 6]], [7, 8, 9])], pad_id=0)


def found(rows, seen=None):
    made = prompts()
    prompt = made.find(rows, seen or [0] * len(rows))
    return prompt and [made.prompts.index(one) for one in prompt]


def test_find_knows_rows_by_their_parts():
    first = [1, 5, 6, 7]
    second = [1, 5, 6, 7, 8, 9]
    cases = (
        ([second, first, [*first, 70, 71]], None, [1, 0, 0]),  # with a candidate behind
        ([[6, 7], [6, 7, 8, 9]], [2, 2], [0, 1]),
        ([[70]], [4], None),  # what comes behind a prompt is no part of it
        ([[], []], [9, 9], None),  # nor is nothing
    )
    for rows, seen, expected in cases:
        assert found(rows, seen) == expected


def test_build_all_takes_one_prefix_or_one_for_each_request():
    made = build_all(Merging, "x", [[[5]], [[6]]], ["q", [9]])
    assert [prompt.prefix for prompt in made] == [(1, 170)] * 2
    made = build_all(Merging, ["x", [4]], [[[5]], [[6]]], ["q", "r"])
    assert [prompt.prefix for prompt in made] == [(1, 170), (4,)]

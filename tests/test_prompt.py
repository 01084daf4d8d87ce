# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts are joined as ids, so that a chunk is the same tokens wherever it stands."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.prompt.pieces import build, build_all, find_continued, front_ids, tokenize

ids = st.lists(st.integers(3, 127), min_size=1, max_size=6)


class Merging:
    """A tokenizer that reads "ab" as one token, as real ones do across the seams of joined text."""

    bos_token_id = 1

    @staticmethod
    def encode(text, add_special_tokens=True):
        ids = [50 + ord(letter) for letter in text.replace("ab", "A")]
        return [1, *ids] if add_special_tokens else ids


class Ending(Merging):
    """It puts two tokens before a text, and one behind it."""

    @staticmethod
    def encode(text, add_special_tokens=True):
        bare = Merging.encode(text, add_special_tokens=False)
        return [1, 7, *bare, 2] if add_special_tokens else bare


def spelled(ids):
    """The letters of ids, and those that are none as digits."""
    return "".join(chr(token - 50) if token > 50 else str(token) for token in ids)


@given(ids, st.lists(ids, min_size=1, max_size=4), ids)
def test_spans_say_where_each_chunk_is(prefix, chunks, question):
    prompt = build(None, prefix, chunks, question)
    assert prompt.ids == (*prefix, *sum(chunks, []), *question)
    for (start, chunk, *_), expected in zip(prompt.spans, chunks, strict=True):
        stop = start + len(chunk)
        assert prompt.ids[start:stop] == chunk
        assert chunk == tuple(expected)


def test_build_merges_no_token_across_seam_and_puts_in_front_what_tokenizer_puts_there():
    made = build(Merging, "xa", ["ba", "b"], "b", separator="")
    assert spelled(made.ids) == "1xababb"
    assert spelled(tokenize(Merging, "xabab")) == "xAA"
    for prefix, front in ((None, "1"), ("x", "1x"), ([7, 8], "78"), ((), "")):
        assert spelled(build(Merging, prefix, [[5]], [6]).prefix) == front
    assert spelled(build(Ending, "x", ["b"], [6]).ids) == "17x\n\nb6"
    assert front_ids(None) == ()
    assert tokenize(None, torch.tensor([4, 5])) == (4, 5)


def test_build_separates_texts_and_chunks_keep_their_ids():
    prompt = build(Merging, "x", ["b", [9], "e\n", "f"], "q")
    assert spelled(prompt.ids) == "1x\n\nb9e\nf\n\nq"
    assert list(map(spelled, prompt.chunks)) == ["b", "9", "e\n", "f"]
    for left, right in (("b\n", "c"), ("b", " c"), ("b ", "\nc")):
        made = build(Merging, None, [left, right], [6])
        assert spelled(made.ids) == f"1{left}{right}6", "white space is separation enough"
    made = build(Merging, None, ["b", "c"], "d", separator="-")
    assert spelled(made.ids) == "1b-c-d"
    made = build(Merging, torch.tensor([5, 6]), [], "b")
    assert spelled(made.ids) == "56b", "a conversation's ids are a prefix"


def test_find_knows_rows_by_their_parts():
    first = [1, 5, 6, 7]
    second = [*first, 8, 9]
    prompts = [build(None, [1], [[5, 6]], one[3:]) for one in (first, second)]
    candidate = [*first, 70, 71]  # of an assistant
    assert find_continued(prompts, [second, first, candidate], [0, 0, 0]) == [prompts[1], prompts[0], prompts[0]]
    assert find_continued(prompts, [first[2:], second[2:]], [2, 2]) == prompts
    assert find_continued(prompts, [[70], [71]], [4, 6]) is None, "what comes behind a prompt is no part of it"
    assert find_continued(prompts, [[], []], [9, 9]) is None, "nor is nothing"


def test_build_all_takes_one_prefix_or_one_for_each_request():
    chunks = [[[5]], [[6]]]
    for prefix, fronts in (("x", ["1x", "1x"]), (["x", [4]], ["1x", "4"])):
        made = build_all(Merging, prefix, chunks, ["q", [9]])
        assert [spelled(prompt.prefix) for prompt in made] == fronts

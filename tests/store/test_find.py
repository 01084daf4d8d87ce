# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding chunks by content: as a naive search would, only faster."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.store.index import ContentIndex, IndexRecord, pack_tokens

TOKENS = st.lists(st.integers(0, 2), max_size=60)  # few different tokens, so that chunks overlap and repeat
CHUNKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def record(token_ids, fingerprint="f", chunk_prefix_ids=(1,)):
    return IndexRecord(fingerprint, chunk_prefix_ids, pack_tokens(token_ids), 0, 0.0)


def index_of(chunks):
    index = ContentIndex()
    for chunk in chunks:
        index.add(str(chunk), record(chunk))
    return index


def naive(chunks: list[list[int]], prompt: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(prompt):
        lengths = [len(chunk) for chunk in chunks if prompt[start : start + len(chunk)] == chunk]
        if lengths:
            yield start, start + max(lengths)
        start += max(lengths, default=1)


@given(chunks=CHUNKS, prompt=TOKENS)
def test_find_agrees_with_a_naive_search(chunks, prompt):
    assert index_of(chunks).find("f", (1,), prompt) == list(naive(chunks, prompt))


@given(chunks=CHUNKS, gone=st.sets(st.integers(0, 11)), prompt=TOKENS)
def test_find_forgets_what_was_discarded(chunks, gone, prompt):
    index = index_of(chunks)
    removed = [chunk for place, chunk in enumerate(chunks) if place in gone]
    for chunk in removed:
        index.discard(str(chunk))
    left = [chunk for chunk in chunks if chunk not in removed]
    assert index.find("f", (1,), prompt) == list(naive(left, prompt))
    assert len(index) == len({str(chunk) for chunk in left})


@given(before=st.integers(0, 40), length=st.integers(1, 40), after=st.integers(0, 40))
def test_a_chunk_is_found_at_any_offset(before, length, after):
    chunk = list(range(100, 100 + length))
    prompt = [7] * before + chunk + [7] * after
    assert index_of([chunk]).find("f", (1,), prompt) == [(before, before + length)]


@pytest.mark.parametrize("question", [("g", (1,)), ("f", ()), ("f", (1, 1))])
def test_another_model_or_sink_sees_nothing(question):
    assert index_of([[5, 6]]).find(*question, [5, 6]) == []


def test_the_longest_chunk_at_an_offset_wins_and_the_rest_of_a_shorter_one_is_found_alone():
    index = index_of([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1], [4, 5]])
    assert index.find("f", (1,), [*range(1, 11), 1, 2, 3, 4, 5, 1]) == [(0, 10), (10, 13), (13, 15), (15, 16)]


def test_adding_twice_is_adding_once():
    index = index_of([[5, 6], [5, 6]])
    index.discard("[5, 6]")
    assert index.find("f", (1,), [5, 6]) == []
    index.discard("[5, 6]")
    assert "[5, 6]" not in index


def test_thousands_of_chunks_with_one_beginning_cost_one_look_each():
    head = list(range(8))
    chunks = [[*head, 100 + number, *range(50)] for number in range(3000)]
    index = index_of(chunks)
    prompt = [token for chunk in chunks[::100] for token in [9, *chunk]]
    assert len(index.find("f", (1,), prompt)) == 30

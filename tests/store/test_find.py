# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding chunks by content: as a naive search would, only faster."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.store import ChunkKey

from .conftest import catalog_of

TOKENS = st.lists(st.integers(0, 2), max_size=60)  # few different tokens, so that chunks overlap and repeat
CHUNKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def found(catalog, *question):
    return [(run.start, run.stop) for run in catalog.match(*question, parts=False)]


def naive(chunks: list[list[int]], prompt: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(prompt):
        lengths = [len(chunk) for chunk in chunks if prompt[start : start + len(chunk)] == chunk]
        if lengths:
            yield start, start + max(lengths)
        start += max(lengths, default=1)


@given(chunks=CHUNKS, prompt=TOKENS)
def test_find_agrees_with_a_naive_search(chunks, prompt):
    assert found(catalog_of(*chunks), "f", (1,), prompt) == list(naive(chunks, prompt))


@given(chunks=CHUNKS, gone=st.sets(st.integers(0, 11)), prompt=TOKENS)
def test_find_forgets_what_was_removed(chunks, gone, prompt):
    catalog = catalog_of(*chunks)
    removed = [chunk for place, chunk in enumerate(chunks) if place in gone]
    for chunk in removed:
        catalog._at_hand[0].remove(ChunkKey("f", (1,), tuple(chunk)).digest)
    left = [chunk for chunk in chunks if chunk not in removed]
    assert found(catalog, "f", (1,), prompt) == list(naive(left, prompt))
    assert (len(catalog), catalog.counts("f")[0]) == (len({*map(tuple, left)}),) * 2


@given(before=st.integers(0, 40), length=st.integers(1, 40), after=st.integers(0, 40))
def test_a_chunk_is_found_at_any_offset(before, length, after):
    chunk = list(range(100, 100 + length))
    prompt = [7] * before + chunk + [7] * after
    assert found(catalog_of(chunk), "f", (1,), prompt) == [(before, before + length)]


@pytest.mark.parametrize("question", [("g", (1,)), ("f", ()), ("f", (1, 1))])
def test_another_model_or_sink_sees_nothing(question):
    assert found(catalog_of([5, 6]), *question, [5, 6]) == []


def test_the_longest_chunk_at_an_offset_wins_and_the_rest_of_a_shorter_one_is_found_alone():
    catalog = catalog_of([1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1], [4, 5])
    assert found(catalog, "f", (1,), [*range(1, 11), 1, 2, 3, 4, 5, 1]) == [(0, 10), (10, 13), (13, 15), (15, 16)]


def test_thousands_of_chunks_with_one_beginning_cost_one_look_each():
    head = list(range(8))
    chunks = [[*head, 100 + number, *range(50)] for number in range(3000)]
    catalog = catalog_of(*chunks)
    prompt = [token for chunk in chunks[::100] for token in [9, *chunk]]
    assert len(found(catalog, "f", (1,), prompt)) == 30

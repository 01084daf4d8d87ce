# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding chunks by content as a naive search would, only faster, also where first or last tokens differ."""

import random
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.store import ChunkKey
from hf_blend.store.index import Index

from .conftest import catalog_of

TOKENS = st.lists(st.integers(0, 2), max_size=60)  # few different tokens, so that chunks overlap and repeat
CHUNKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def found(catalog, *question):
    """The chunks that are whole in a prompt."""
    with mock.patch.object(Index, "inside", return_value=()):
        return [(run.start, run.start + run.tokens) for run in catalog.find(*question)]


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


@pytest.mark.parametrize("question", [("g", (1,)), ("f", ()), ("f", (1, 1))])
def test_another_model_or_sink_sees_nothing(question):
    assert found(catalog_of([5, 6]), *question, [5, 6]) == []


def matches(catalog, prompt):
    return [(run.start, list(run.key.token_ids), run.first, run.tokens) for run in catalog.find("f", (1,), prompt)]


def drawn(seed, tokens, vocabulary=1000):
    return random.Random(seed).choices(range(10, vocabulary), k=tokens)


@given(st.integers(40, 90), st.integers(0, 8), st.integers(0, 8), st.integers(0, 20), st.integers(0, 999))
def test_a_chunk_is_found_up_to_eight_other_tokens_at_either_end(length, head, tail, before, seed):
    chunk = drawn(seed, length)
    inside = chunk[head : length - tail]
    prompt = [*[1] * before, *[2] * bool(head), *inside, *[3] * bool(tail), 4]
    found = matches(catalog_of(chunk, drawn(seed + 1, 40)), prompt)
    assert found == [(before + bool(head), chunk, head, length - head - tail)]


@given(st.lists(st.tuples(st.integers(8, 40), st.integers(0, 6)), min_size=1, max_size=6), st.integers(0, 10**6))
def test_what_is_found_is_in_the_prompt_without_overlap_and_cannot_be_longer(shapes, seed):
    source = random.Random(seed)
    chunks = [[source.randrange(10, 16) for _ in range(length)] for length, _ in shapes]
    prompt = [token for chunk, (_, cut) in zip(chunks, shapes, strict=True) for token in [1, *chunk[cut:], 2]]
    found, stop = matches(catalog_of(*chunks), prompt), 0
    for start, chunk, first, tokens in found:
        assert start >= stop, "from left to right, without overlap"
        assert tokens > 0
        assert prompt[start : start + tokens] == chunk[first : first + tokens]
        stop = start + tokens
    taken = {at for start, _, _, tokens in found for at in range(start, start + tokens)}
    for start, chunk, first, tokens in found:
        for place, inside in ((start - 1, first - 1), (start + tokens, first + tokens)):
            is_inside = 0 <= place < len(prompt) and 0 <= inside < len(chunk)
            assert not is_inside or place in taken or prompt[place] != chunk[inside], "it ends where a token differs"


def test_of_chunks_with_one_beginning_the_one_that_agrees_the_furthest_is_found():
    head = drawn(0, 30)
    chunks = [[*head, *drawn(number, 20)] for number in range(1, 500)]
    prompt = [1, 2, *chunks[77][3:-1], 5]
    assert matches(catalog_of(*chunks), prompt) == [(2, chunks[77], 3, 46)]


def test_the_second_of_two_overlapping_chunks_begins_where_the_first_ends_if_it_is_worth_reading():
    text = drawn(0, 150)
    first, second = text[:100], text[60:]
    assert matches(catalog_of(first, second), [1, *text, 2]) == [(1, first, 0, 100), (101, second, 40, 50)]
    first, second = text[:100], text[10:105]
    assert matches(catalog_of(first, second), [1, *text, 2]) == [(1, first, 0, 100)]


def test_a_beginning_that_is_cut_off_is_found_from_a_quarter_on_and_a_longer_run_goes_before_whole_chunks():
    chunk = drawn(0, 100)
    assert matches(catalog_of(chunk), [1, *chunk[:25], 2]) == [(1, chunk, 0, 25)]
    assert matches(catalog_of(chunk), [1, *chunk[:24], 2]) == []
    assert matches(catalog_of(chunk), [1, *chunk[40:], 2]) == [], "what was before these tokens is not there"
    assert matches(catalog_of(chunk, chunk[10:13]), [1, *chunk[1:], 2]) == [(1, chunk, 1, 99)]


@pytest.mark.parametrize("text", [[7] * 4000, [7, 8] * 2000, list(range(7, 12)) * 800])
def test_text_that_repeats_itself_is_matched_without_end(text):
    assert sum(tokens for *_, tokens in matches(catalog_of(text[:64], [*text[:50], 3]), [1, *text, 2])) > 3900

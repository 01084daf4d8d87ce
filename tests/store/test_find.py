# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding chunks by content as a naive search would, only faster, also where first or last tokens differ."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_blend.store import ChunkKey
from hf_blend.store.index import ChunkIndex, Listed

TOKENS = st.lists(st.integers(0, 2), max_size=60)  # few different tokens, so that chunks overlap and repeat
SHORT = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12)  # found only as a whole


def index_of(*chunks: Sequence[int]) -> ChunkIndex:
    """An index of chunks of the model "f" behind the prefix 1, in memory."""
    index = ChunkIndex("")
    index.add([Listed(ChunkKey("f", (1,), tuple(chunk)), 1, 0.0) for chunk in chunks])
    return index


def matches(index, prompt, *, fingerprint="f", prefix=(1,), gone=()):
    found = index.find(fingerprint, prefix, prompt, lambda key: list(key.token_ids) not in gone)
    return [(run.start, list(run.key.token_ids), run.first, run.tokens) for run in found]


def naive(chunks: list[list[int]], prompt: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(prompt):
        lengths = [len(chunk) for chunk in chunks if prompt[start : start + len(chunk)] == chunk]
        if lengths:
            yield start, start + max(lengths)
        start += max(lengths, default=1)


@example(chunks=[[0], [0, 0, 0]], gone=set(), prompt=[0] * 5)
@given(chunks=SHORT, gone=st.sets(st.integers(0, 11)), prompt=TOKENS)
def test_find_gives_stored_chunks_that_cover_what_naive_search_covers(chunks, gone, prompt):
    removed = [chunk for number, chunk in enumerate(chunks) if number in gone]
    left = [chunk for chunk in chunks if chunk not in removed]
    covered = set()
    for start, chunk, first, tokens in matches(index_of(*chunks), prompt, gone=removed):
        covered.update(range(start, start + tokens))  # by a part of a chunk where it meets another one
        assert chunk in left
        assert prompt[start : start + tokens] == chunk[first : first + tokens]
    for start, stop in naive(left, prompt):
        assert not covered.isdisjoint(range(start, stop))


@pytest.mark.parametrize("question", [("g", (1,)), ("f", ()), ("f", (1, 1))])
def test_find_sees_nothing_of_another_model_or_prefix(question):
    fingerprint, prefix = question
    assert matches(index_of([5, 6]), [5, 6], fingerprint=fingerprint, prefix=prefix) == []
    assert matches(index_of([5, 6]), [5, 6]) == [(0, [5, 6], 0, 2)]


def drawn(seed, tokens, vocabulary=1000):
    return random.Random(seed).choices(range(10, vocabulary), k=tokens)


@given(st.integers(40, 90), st.integers(0, 8), st.integers(0, 8), st.integers(0, 20), st.integers(0, 999))
def test_chunk_is_found_up_to_eight_other_tokens_at_either_end(length, head, tail, before, seed):
    chunk = drawn(seed, length)
    prompt = [1] * before
    if head:
        prompt.append(2)
    start = len(prompt)
    prompt += chunk[head : length - tail]
    if tail:
        prompt.append(3)
    found = matches(index_of(chunk, drawn(seed + 1, 40)), [*prompt, 4])
    assert found == [(start, chunk, head, length - head - tail)]


@given(st.lists(st.tuples(st.integers(8, 40), st.integers(0, 6)), min_size=1, max_size=6), st.integers(0, 10**6))
def test_runs_are_in_prompt_without_overlap_and_cannot_be_longer(shapes, seed):
    source = random.Random(seed)
    chunks = []
    prompt = []
    for length, cut in shapes:
        chunk = source.choices(range(10, 16), k=length)
        chunks.append(chunk)
        prompt += [1, *chunk[cut:], 2]
    free = {*range(len(prompt))}
    edges = []  # what a longer run would have in the prompt and in the chunk
    stop = 0
    for start, chunk, first, tokens in matches(index_of(*chunks), prompt):
        assert start >= stop, "from left to right, without overlap"
        assert tokens > 0
        stop = start + tokens
        last = first + tokens
        assert prompt[start:stop] == chunk[first:last]
        free.difference_update(range(start, stop))
        if first:
            edges.append((start - 1, chunk[first - 1]))
        edges += [(stop, token) for token in chunk[last : last + 1]]
    for position, token in edges:
        assert position not in free or prompt[position] != token


def test_longest_run_wins_among_many_chunks_with_one_beginning():
    head = drawn(0, 30)
    chunks = [[*head, *drawn(number, 20)] for number in range(1, 500)]
    prompt = [1, 2, *chunks[77][3:-1], 5]
    assert matches(index_of(*chunks), prompt) == [(2, chunks[77], 3, 46)]


def test_second_of_two_overlapping_chunks_begins_where_first_ends():
    text = drawn(0, 150)
    first = text[:100]
    second = text[60:]
    assert matches(index_of(first, second), [1, *text, 2]) == [(1, first, 0, 100), (101, second, 40, 50)]


def test_cut_off_beginning_is_found_from_quarter_on():
    chunk = drawn(0, 100)
    index = index_of(chunk)
    assert matches(index, [1, *chunk[:25], 2]) == [(1, chunk, 0, 25)]
    assert matches(index, [1, *chunk[:24], 2]) == []
    assert matches(index, [1, *chunk[40:], 2]) == [], "what was before these tokens is not there"


def test_short_run_is_used_where_eight_tokens_are_missing_but_not_more_than_half():
    chunk = drawn(0, 20)
    index = index_of(chunk)
    assert matches(index, [1, *chunk[6:18], 2]) == [(1, chunk, 6, 12)]
    assert matches(index, [1, *chunk[6:17], 2]) == [], "nine are missing"
    text = drawn(1, 60)
    first = text[:40]
    for start, found in ((36, [(41, text[36:46], 4, 6)]), (33, [])):
        second = text[start : start + 10]  # what the first one leaves of it
        assert matches(index_of(first, second), [1, *text, 2]) == [(1, first, 0, 40), *found]


@pytest.mark.parametrize("text", [[7] * 4000, [7, 8] * 2000])
def test_text_that_repeats_itself_is_matched_without_end(text):
    found = matches(index_of(text[:64], [*text[:50], 3]), [1, *text, 2])
    assert sum(tokens for *_, tokens in found) > 3900

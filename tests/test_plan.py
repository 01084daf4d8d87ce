# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns are reused, and which of them are exact."""

import pytest
import torch

from hf_blend import ChunkStore
from hf_blend.model.identity import fingerprint
from hf_blend.prefill.plan import ChunkOrigin, Planner, PromptRow
from hf_blend.prefill.request import PendingPrompt, Request
from hf_blend.prompt.pieces import Span

BOS = (1,)
A = tuple(range(10, 17))
B = tuple(range(20, 25))
Q = (50, 51, 52)


@pytest.fixture
def planner(shared_model):
    """A planner for a store that holds the given chunks; `planner(A, B)`."""

    def make(*chunks, sink=BOS, **settings):
        model = shared_model(num_hidden_layers=2)
        store = ChunkStore.open("memory://", **settings)
        store.add(model, None, chunks, chunk_prefix_ids=sink)
        return Planner(model, store, fingerprint(model), ChunkOrigin(sink))

    return make


def plan(planner, ids, known=(None,), at_beginning=True):
    (spans,) = known
    row = PromptRow(ids, len(ids), 0, spans=spans, is_first=at_beginning)
    return planner.plan([row], len(ids))


def slots(made):
    return [(slot.row, slot.start, slot.chunk.key.token_ids, slot.exact) for slot in made.chunks]


def test_prefix_is_entry_of_its_own_once_it_was_computed(planner):
    one = planner(A)
    prefix = (*BOS, 5, 6)
    row = (*prefix, *A, *Q)
    chunk = (0, 3, A, False)
    both = [(0, 0, prefix, True), chunk]
    assert slots(plan(one, row)) == [chunk]
    assert slots(plan(one, row, known=[[Span.whole(3, A)]])) == both
    assert slots(plan(one, row)) == both
    made = plan(planner(A, B), (*A, *B, *Q), at_beginning=False)
    assert slots(made) == [(0, 0, A, False), (0, 7, B, False)]


def test_chunks_and_what_prompt_begins_with_are_those_of_stores_namespace(planner):
    made = plan(planner(A, namespace="theirs"), (*BOS, 5, *A, *Q))
    assert slots(made) == [(0, 2, A, False)]
    assert made.chunks[0].chunk.key.namespace == "theirs"
    one = planner(namespace="theirs")
    for start, chunk, row in ((0, A, (*A, *Q)), (3, B, (*BOS, 5, 6, *B, *Q))):
        made = plan(one, row, known=[[Span.whole(start, chunk)]])
        assert made.chunks[0].exact
        assert {placed.chunk.key.namespace for placed in made.chunks} == {"theirs"}


def test_parse_counts_what_came_of_prompt_and_not_what_was_held_before_it(shared_model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1]])  # 4 held, 3 of the prompt, 2 new
    arguments = {"input_ids": torch.tensor([[8, 9], [8, 9]]), "attention_mask": mask, "logits_to_keep": 1}
    request = Request.parse(arguments, shared_model(), 7, PendingPrompt(cached=4))
    assert request.rows == [[8, 9], [8, 9]]
    assert request.before == [3, 2]


LONG = tuple(range(20, 60))


def parts(made):
    return [(slot.start, slot.inside.start, slot.tokens, slot.exact) for slot in made.chunks]


def test_chunk_whose_edges_differ_is_reused_inside_and_never_exact(planner):
    one = planner(LONG)
    made = plan(one, (*BOS, 7, 8, *LONG[1:-2], *Q))
    assert parts(made) == [(3, 1, 37, False)]
    assert made.found["seam_tokens"] == 3
    made = plan(one, (*BOS, 7, *LONG[1:], *Q))
    assert parts(made) == [(2, 1, 39, False)]


def test_beginning_of_chunk_right_behind_its_sink_is_exact_whatever_follows(planner):
    made = plan(planner(LONG), (*BOS, *LONG[:-3], *Q))
    assert parts(made) == [(0, 0, 1, True), (1, 0, 37, True)]


def test_places_inside_chunk_are_counted_from_its_stored_beginning(planner):
    made = plan(planner(LONG), (*BOS, 7, *LONG[2:], *Q))
    chunk, place, length = made.token_table()[:3, 0, 2:40]
    assert chunk.unique().tolist() == [0]
    assert length.unique().tolist() == [40]
    assert place.tolist() == list(range(2, 40))


def test_known_chunks_come_first_and_others_are_searched_where_asked(planner):
    one = planner(A, LONG)
    row = (*BOS, 5, *A, *LONG, *Q)
    spans = [Span(3, A, 1, 6)]
    searched = PromptRow(row, len(row), 0, spans=spans, prefix=0, is_searched=True)
    assert parts(one.plan([searched], len(row))) == [(3, 1, 6, False), (9, 0, 40, False)]
    made = plan(one, row, known=[spans])
    assert parts(made) == [(0, 0, 3, True), (3, 1, 6, False)], "what is before it is an entry"


def test_chunk_that_padding_divides_is_computed_and_one_behind_it_is_reused(planner):
    row = (*BOS, 5, *A, *B, *Q)
    width = len(row) + 2
    divided = PromptRow(row, len(row), 0, columns=(*range(5), *range(7, width)))
    made = planner(A, B).plan([divided], width)
    assert slots(made) == [(0, 11, B, False)]


def test_drop_makes_tokens_of_chunk_fresh_whatever_else_is_computed(planner):
    made = plan(planner(A, B), (*BOS, 5, *A, *B, *Q))
    made.drop(made.chunks[0])
    (fresh,) = made.fresh(with_reusable=False)
    assert [column for column, is_fresh in enumerate(fresh) if not is_fresh] == [9, 10, 11, 12, 13]


def test_probe_computes_none_of_draft_behind_prompt(planner):
    row = (*BOS, 5, *A, *Q)
    prompt = PromptRow(row, len(row) + 2, 0, spans=[Span.whole(2, A)], prefix=0)
    made = planner(A).plan([prompt], len(row) + 2, logits_rows=3)
    assert made.sampled(2).nonzero()[1].tolist() == [0, 1, 9, 11], "of the question the first and the last"

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns are reused, and which of them are exact."""

import pytest
import torch

from hf_blend import ChunkStore
from hf_blend.model.identity import fingerprint
from hf_blend.prefill.plan import Planner, PromptRow
from hf_blend.prefill.request import PendingPrompt, Request
from hf_blend.prompt.pieces import Span

BOS = (1,)
A = tuple(range(10, 17))
B = tuple(range(120, 125))
Q = (50, 51, 52)
LONG = tuple(range(20, 60))


@pytest.fixture
def planner(shared_model):
    """A planner for a store that holds the given chunks; `planner(A, B)`."""

    def make(*chunks, **settings):
        model = shared_model(num_hidden_layers=2)
        store = ChunkStore.open("memory://", **settings)
        store.add(model, None, chunks, chunk_prefix_ids=BOS)
        return Planner(model, store, fingerprint(model), BOS)

    return make


def plan(planner, *ids, **fields):
    return planner.plan([PromptRow(ids, len(ids), 0, **fields)], len(ids))


def chunks(made):
    """Of each chunk: column, tokens of the whole, first of those inside, how many, and whether they are exact."""
    found = []
    for placed in made.chunks:
        found.append((placed.start, placed.chunk.key.token_ids, placed.inside.start, placed.tokens, placed.exact))
    return found


def whole(start, ids, exact=False):
    """What `chunks` gives of a chunk of which nothing is cut off."""
    return start, ids, 0, len(ids), exact


def test_prefix_is_entry_of_its_own_once_it_was_computed(planner):
    one = planner(A)
    row = (*BOS, 5, 6, *A, *Q)
    prefix = whole(0, row[:3], exact=True)
    chunk = whole(3, A)
    assert chunks(plan(one, *row)) == [chunk]
    assert chunks(plan(one, *row, spans=[Span.whole(3, A)])) == [prefix, chunk]
    assert chunks(plan(one, *row)) == [prefix, chunk]


def test_chunks_of_later_part_are_never_exact(planner):
    made = plan(planner(A, B), *A, *B, *Q, is_first=False)
    assert chunks(made) == [whole(0, A), whole(7, B)]


def test_chunks_and_what_prompt_begins_with_are_those_of_stores_namespace(planner):
    made = plan(planner(A, namespace="theirs"), *BOS, 5, *A, *Q)
    assert chunks(made) == [whole(2, A)]
    assert made.chunks[0].chunk.key.namespace == "theirs"
    one = planner(namespace="theirs")
    for start, row in ((0, (*A, *Q)), (3, (*BOS, 5, 6, *A, *Q))):
        made = plan(one, *row, spans=[Span.whole(start, A)])
        assert made.chunks[0].exact
        assert {placed.chunk.key.namespace for placed in made.chunks} == {"theirs"}


def test_parse_counts_tokens_before_new_ones_without_padding(shared_model):
    mask = torch.ones(2, 9)  # 7 held, 2 new
    mask[0, :2] = 0
    mask[1, 0] = 0
    mask[1, 4:6] = 0
    rows = [[8, 9], [8, 9]]
    arguments = {"input_ids": torch.tensor(rows), "attention_mask": mask, "logits_to_keep": 1}
    request = Request.parse(arguments, shared_model(), 7, PendingPrompt())
    assert [(list(row.ids), row.before) for row in request.rows] == [(rows[0], 5), (rows[1], 4)]
    unknown, _ = PendingPrompt().rows(request)  # of no prompt that is known, so none of its tokens are cached
    assert [(row.before, row.end) for row in unknown] == [(0, 2), (0, 2)]


def test_chunk_whose_edges_differ_is_reused_inside_and_never_exact(planner):
    one = planner(LONG)
    made = plan(one, *BOS, 7, 8, *LONG[1:-2], *Q)
    assert chunks(made) == [(3, LONG, 1, 37, False)]
    assert made.found["seam_tokens"] == 3
    made = plan(one, *BOS, 7, *LONG[2:], *Q)
    assert chunks(made) == [(2, LONG, 2, 38, False)]
    chunk, offset, length = made.token_table()[:3, 0, 2:40]
    assert chunk.unique().tolist() == [0]
    assert length.unique().tolist() == [40]
    assert offset.tolist() == list(range(2, 40)), "counted from its stored beginning"


def test_beginning_of_chunk_right_behind_its_sink_is_exact_whatever_follows(planner):
    made = plan(planner(LONG), *BOS, *LONG[:-3], *Q)
    assert chunks(made) == [whole(0, BOS, exact=True), (1, LONG, 0, 37, True)]


def test_known_chunks_come_first_and_others_are_searched_where_asked(planner):
    one = planner(A, LONG)
    row = (*BOS, 5, *A, *LONG, *Q)
    spans = [Span(3, A, 1, 6)]
    known = (3, A, 1, 6, False)
    made = plan(one, *row, spans=spans, prefix=0, is_searched=True)
    assert chunks(made) == [known, whole(9, LONG)]
    made = plan(one, *row, spans=spans)
    assert chunks(made) == [whole(0, row[:3], exact=True), known], "what is before it is an entry"


def test_chunk_that_padding_divides_is_computed_and_one_behind_it_is_reused(planner):
    row = (*BOS, 5, *A, *B, *Q)
    width = len(row) + 1
    divided = PromptRow(row, len(row), 0, columns=(*range(5), *range(6, width)))
    made = planner(A, B).plan([divided], width)
    assert chunks(made) == [whole(10, B)]


def test_drop_makes_tokens_of_chunk_fresh_whatever_else_is_computed(planner):
    made = plan(planner(A, B), *BOS, 5, *A, *B, *Q)
    made.drop(made.chunks[0])
    (fresh,) = made.fresh(with_reusable=False)
    assert (~fresh).nonzero()[0].tolist() == [9, 10, 11, 12, 13]


def test_probe_computes_none_of_draft_behind_prompt(planner):
    row = (*BOS, 5, *A, *Q)
    prompt = PromptRow(row, len(row) + 2, 0, spans=[Span.whole(2, A)], prefix=0)
    made = planner(A).plan([prompt], len(row) + 2, logits_rows=3)
    assert made.sampled(2).nonzero()[1].tolist() == [0, 1, 9, 11], "of the question the first and the last"

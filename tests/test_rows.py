# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows: sets of columns that only shrink, each batch entry its own; and the choice of the highest scores."""

import math
from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_blend.cache.indexed_layer import IndexedKind
from hf_blend.cache.layers import BlendLayer, BlendSlidingLayer
from hf_blend.model.anatomy import LayerCall, decoder_layers
from hf_blend.model.attention import ROWS
from hf_blend.prefill.arguments import RowArguments
from hf_blend.prefill.layer_kind import LayerKind
from hf_blend.prefill.rows import Rows, highest


@st.composite
def grids(draw, batch=None, places=None):
    """`[batch, places]` boolean, at least one True in each entry."""
    batch = batch or draw(st.integers(1, 4))
    places = places or draw(st.integers(1, 12))
    grid = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * places, max_size=batch * places)))
    grid = grid.view(batch, places)
    for row in range(batch):
        grid[row, draw(st.integers(0, places - 1))] = True
    return grid


def fillers(rows):
    return torch.zeros_like(rows.columns, dtype=torch.bool) if rows.filler is None else rows.filler


def sets(rows):
    """The columns of each entry, without the repetitions."""
    return [columns[~filler].tolist() for columns, filler in zip(rows.columns, fillers(rows), strict=True)]


def wanted_sets(grid):
    return [row.nonzero().flatten().tolist() for row in grid]


@given(grids())
def test_rows_hold_wanted_places_sorted_and_each_once(grid):
    rows, index = Rows.of(grid)
    assert sets(rows) == wanted_sets(grid)
    assert torch.equal(index, rows.columns)
    assert rows.columns.shape[1] == grid.sum(1).max()


@given(st.data())
def test_keeping_some_rows_twice_is_keeping_what_both_want(data):
    first = data.draw(grids())
    second = data.draw(grids(batch=first.shape[0], places=first.shape[1])) & first
    second[:, 0] |= ~second.any(1) & first[:, 0]
    second |= first & ~second.any(1, keepdim=True)
    rows, _ = Rows.of(first)
    kept, index = rows.keep(rows.take(second))
    assert sets(kept) == wanted_sets(second)
    assert torch.equal(rows.columns.gather(1, index), kept.columns)


@given(grids(), st.integers(0, 1000))
def test_states_taken_and_written_back_change_nothing_and_touch_no_other_column(grid, seed):
    batch, places = grid.shape
    states = torch.randn(batch, 2, places, 3, generator=torch.Generator().manual_seed(seed))
    rows, _ = Rows.of(grid)
    pair = (states, -states)
    written = grid[:, None, :, None].expand_as(states)
    taken = rows.take_pair(pair)
    targets = [torch.full_like(states, 7.0) for _ in pair]
    rows.write_states(targets, taken)
    for one, kept, target in zip(pair, taken, targets, strict=True):
        assert torch.equal(kept, torch.stack([one[row][:, columns] for row, columns in enumerate(rows.columns)]))
        assert torch.equal(target, torch.where(written, one, torch.tensor(7.0)))


def test_rows_of_layers_own_table_are_not_taken_for_those_of_other_layers(shared_model):
    table = tuple(torch.arange(24.0).view(1, 12, 2) + part for part in (0, 100))
    given = (torch.zeros(1, 12, 64),), {"position_embeddings": table}
    calls = [LayerCall.bind(layer, *given) for layer in decoder_layers(shared_model())[:2]]
    kinds = [IndexedKind(), LayerKind()]
    prefill = SimpleNamespace(width=12)
    kinds[0]._table = table
    rows = Rows.at([[2, 5, 7, 11]], torch.device("cpu"))
    fewer, _ = rows.last(2)
    cuts = RowArguments(SimpleNamespace(_attn_implementation="sdpa"), [BlendLayer()], 0, 12)
    for call, kind in zip(calls, kinds, strict=True):
        for kept in (rows, fewer):
            cuts.cut(0, call, kept, None, True, {12: kept.columns})
            kind.take_rows(prefill, call, kept)
    assert [part.shape[1] for call in calls for part in call.arguments["position_embeddings"]] == [14, 14, 2, 2]
    assert torch.equal(calls[1].arguments["position_embeddings"][1], table[1][:, [7, 11]])


def test_cut_takes_rows_of_all_tokens_where_there_are_as_many_heads_as_rows_that_ran(shared_model):
    by_head = torch.randn(2, 3, 12, 4)
    columns = [[1, 7], [5, 9]]
    given = {"position_embeddings": (by_head,), "attention_mask": None}
    call = LayerCall.bind(decoder_layers(shared_model())[0], (torch.zeros(2, 12, 64),), given)
    rows = Rows.at(columns, torch.device("cpu"))
    ran = torch.tensor([[0, 2], [1, 2]])
    cuts = RowArguments(SimpleNamespace(_attn_implementation="sdpa"), [BlendLayer()], 0, 12)
    cuts.cut(0, call, rows, None, True, {12: rows.columns, 3: ran})
    expected = torch.stack([by_head[row][:, kept] for row, kept in enumerate(columns)])
    assert torch.equal(call.arguments["position_embeddings"][0], expected)


def test_cut_counts_keys_of_window_from_first_that_layer_still_holds(shared_model):
    call = LayerCall.bind(decoder_layers(shared_model())[0], (torch.zeros(1, 12, 64),), {"attention_mask": None})
    cuts = RowArguments(SimpleNamespace(_attn_implementation="flash_attention_2"), [BlendSlidingLayer(8)], 20, 12, {0})
    cuts.cut(0, call, Rows.at([[2, 5, 7, 11]], torch.device("cpu")), None, True, {})
    columns = torch.tensor([[22], [25], [27], [31]])
    keys = torch.arange(13, 32)
    visible = (keys <= columns) & (keys > columns - 8)
    assert torch.equal(call.arguments[ROWS].plain()[0, 0], visible)


@st.composite
def choices(draw):
    eligible = draw(grids())
    size = eligible.numel()
    value = st.sampled_from([0.0, 1.0, 1.0, 2.0, -3.5, float("nan"), float("-inf"), 1e30])
    scores = torch.tensor(draw(st.lists(value, min_size=size, max_size=size))).view_as(eligible)
    counts = [draw(st.integers(0, eligible.shape[1] + 2)) for _ in eligible]
    return scores, eligible, counts


@given(choices())
@example((torch.tensor([[9.0, math.nan]]), torch.tensor([[False, True]]), [1]))
def test_highest_are_those_of_plain_sort_with_earlier_first(choice):
    scores, eligible, counts = choice
    marked = highest(scores, eligible, counts)
    for row, places in enumerate(eligible):
        value = [-math.inf if math.isnan(score) else score for score in scores[row].tolist()]
        order = sorted(places.nonzero().flatten().tolist(), key=lambda place: (-value[place], place))
        assert wanted_sets(marked)[row] == sorted(order[: counts[row]])

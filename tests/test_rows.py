# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows: sets of columns that only shrink, each batch entry its own; and the choice of the highest scores."""

import math
from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_blend.cache.layers import BlendLayer, BlendSlidingLayer
from hf_blend.model.anatomy import LayerCall, decoder_layers
from hf_blend.model.attention import ROWS
from hf_blend.prefill.rows import RowArguments, Rows, highest


@st.composite
def grids(draw):
    """`[batch, columns]` boolean, at least one True in each entry."""
    width = draw(st.integers(1, 12))
    columns = st.sets(st.integers(0, width - 1), min_size=1)
    entries = draw(st.lists(columns, min_size=1, max_size=4))
    grid = torch.zeros(len(entries), width, dtype=torch.bool)
    for row, selected in zip(grid, entries, strict=True):
        row[sorted(selected)] = True
    return grid


def sets(rows):
    """The columns of each entry, without the repetitions."""
    found = []
    for entry, columns in enumerate(rows.columns):
        if rows.filler is not None:
            columns = columns[~rows.filler[entry]]
        found.append(columns.tolist())
    return found


def columns_of(grid):
    return [row.nonzero().flatten().tolist() for row in grid]


@given(grids())
def test_rows_are_selected_columns_sorted_and_each_once(grid):
    rows, index = Rows.of(grid)
    assert sets(rows) == columns_of(grid)
    assert torch.equal(index, rows.columns)
    assert rows.columns.shape[1] == grid.sum(1).max()


@given(grids(), st.integers(0, 1000))
def test_keep_of_rows_keeps_their_columns(first, seed):
    second = first & torch.randint(0, 2, first.shape, generator=torch.Generator().manual_seed(seed)).bool()
    second |= first & ~second.any(1, keepdim=True)  # none is empty
    rows, _ = Rows.of(first)
    kept, index = rows.keep(rows.take(second))
    assert sets(kept) == columns_of(second)
    assert torch.equal(rows.columns.gather(1, index), kept.columns)


@given(grids(), st.integers(0, 1000))
def test_states_taken_and_written_back_change_nothing_and_touch_no_other_column(grid, seed):
    batch, width = grid.shape
    pair = torch.randn(2, batch, 2, width, 3, generator=torch.Generator().manual_seed(seed))
    rows, _ = Rows.of(grid)
    taken = rows.take_pair(tuple(pair))
    for states, kept in zip(pair, taken, strict=True):
        for row, columns in enumerate(rows.columns):
            assert torch.equal(kept[row], states[row][:, columns])
    targets = torch.full_like(pair, 7.0)
    rows.write_states(tuple(targets), taken)
    written = grid[:, None, :, None].expand_as(pair)
    assert torch.equal(targets, pair.where(written, 7.0))


def cut(model, columns, given, taken, cache_layer, attention="sdpa", past=0):
    """A call of layer 0 with the arguments of twelve tokens, cut to the rows at some columns."""
    config = SimpleNamespace(_attn_implementation=attention)
    hidden = torch.zeros(len(columns), 12, 64)
    call = LayerCall.bind(decoder_layers(model)[0], (hidden,), {"attention_mask": None, **given})
    rows = Rows.at(columns, torch.device("cpu"))
    RowArguments(config, [cache_layer], past, 12, {0}).cut(0, call, rows, None, True, {12: rows.columns, **taken})
    return call.arguments


def test_cut_takes_rows_of_all_tokens_where_there_are_as_many_heads_as_rows_that_ran(shared_model):
    by_head = torch.randn(2, 3, 12, 4)
    columns = [[1, 7], [5, 9]]
    ran = torch.tensor([[0, 2], [1, 2]])
    arguments = cut(shared_model(), columns, {"position_embeddings": (by_head,)}, {3: ran}, BlendLayer())
    (found,) = arguments["position_embeddings"]
    for row, kept in enumerate(columns):
        assert torch.equal(found[row], by_head[row][:, kept])


def test_cut_counts_keys_of_window_from_first_that_layer_still_holds(shared_model):
    columns = [[2, 5, 7, 11]]
    arguments = cut(shared_model(), columns, {}, {}, BlendSlidingLayer(8), "flash_attention_2", past=20)
    columns = torch.tensor([[22], [25], [27], [31]])
    keys = torch.arange(13, 32)
    visible = (keys <= columns) & (keys > columns - 8)
    assert torch.equal(arguments[ROWS].plain()[0, 0], visible)


@st.composite
def choices(draw):
    eligible = draw(grids())
    size = eligible.numel()
    value = st.sampled_from([0.0, 1.0, 1.0, 2.0, -3.5, math.nan, -math.inf, 1e30])
    scores = torch.tensor(draw(st.lists(value, min_size=size, max_size=size))).view_as(eligible)
    count = st.integers(0, eligible.shape[1] + 2)
    return scores, eligible, draw(st.lists(count, min_size=len(eligible), max_size=len(eligible)))


@given(choices())
@example((torch.tensor([[9.0, math.nan]]), torch.tensor([[False, True]]), [1]))
def test_highest_are_those_of_plain_sort_with_earlier_first(choice):
    scores, eligible, counts = choice
    marked = columns_of(highest(scores, eligible, counts))
    values = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).tolist()
    for row, columns in enumerate(columns_of(eligible)):
        columns.sort(key=values[row].__getitem__, reverse=True)  # equal ones stay in order
        assert marked[row] == sorted(columns[: counts[row]])

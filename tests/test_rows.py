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
from hf_blend.prefill.blend import LayerKind
from hf_blend.prefill.rows import RowArguments, Rows, highest


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


def expected_sets(grid):
    return [row.nonzero().flatten().tolist() for row in grid]


@given(grids())
def test_rows_hold_wanted_places_sorted_and_each_once(grid):
    rows, index = Rows.of(grid)
    assert sets(rows) == expected_sets(grid)
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
    assert sets(kept) == expected_sets(second)
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
        for row, columns in enumerate(rows.columns):
            assert torch.equal(kept[row], one[row][:, columns])
        assert torch.equal(target, one.where(written, 7.0))


def test_rows_of_layers_own_table_are_not_taken_for_those_of_other_layers(shared_model):
    cos = torch.arange(24.0).view(1, 12, 2)
    sin = cos + 100
    given = (torch.zeros(1, 12, 64),), {"position_embeddings": (cos, sin)}
    own, other = (LayerCall.bind(layer, *given) for layer in decoder_layers(shared_model())[:2])
    kind = IndexedKind()
    kind._table = (cos, sin)
    prefill = SimpleNamespace(width=12)
    rows = Rows.at([[2, 5, 7, 11]], torch.device("cpu"))
    fewer, _ = rows.last(2)
    cuts = RowArguments(SimpleNamespace(_attn_implementation="sdpa"), [BlendLayer()], 0, 12)
    for call, its_kind in ((own, kind), (other, LayerKind())):
        for kept in (rows, fewer):
            cuts.cut(0, call, kept, None, True, {12: kept.columns})
            its_kind.take_rows(prefill, call, kept)
    for part in own.arguments["position_embeddings"]:
        assert part.shape[1] == 14
    found_cos, found_sin = other.arguments["position_embeddings"]
    assert torch.equal(found_cos, cos[:, [7, 11]])
    assert torch.equal(found_sin, sin[:, [7, 11]])


def test_cut_takes_rows_of_all_tokens_where_there_are_as_many_heads_as_rows_that_ran(shared_model):
    by_head = torch.randn(2, 3, 12, 4)
    columns = [[1, 7], [5, 9]]
    given = {"position_embeddings": (by_head,), "attention_mask": None}
    layer = decoder_layers(shared_model())[0]
    call = LayerCall.bind(layer, (torch.zeros(2, 12, 64),), given)
    rows = Rows.at(columns, torch.device("cpu"))
    ran = torch.tensor([[0, 2], [1, 2]])
    cuts = RowArguments(SimpleNamespace(_attn_implementation="sdpa"), [BlendLayer()], 0, 12)
    cuts.cut(0, call, rows, None, True, {12: rows.columns, 3: ran})
    (found,) = call.arguments["position_embeddings"]
    for row, kept in enumerate(columns):
        assert torch.equal(found[row], by_head[row][:, kept])


def test_cut_counts_keys_of_window_from_first_that_layer_still_holds(shared_model):
    layer = decoder_layers(shared_model())[0]
    call = LayerCall.bind(layer, (torch.zeros(1, 12, 64),), {"attention_mask": None})
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    cuts = RowArguments(config, [BlendSlidingLayer(8)], 20, 12, {0})
    rows = Rows.at([[2, 5, 7, 11]], torch.device("cpu"))
    cuts.cut(0, call, rows, None, True, {})
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
    values = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).tolist()
    found = expected_sets(marked)
    for row, places in enumerate(expected_sets(eligible)):
        places.sort(key=values[row].__getitem__, reverse=True)  # equal ones stay in order
        assert found[row] == sorted(places[: counts[row]])

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Scattered rows see exactly what they would see in a full prefill, whatever the model's mask looks like."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hf_blend.model import attention
from hf_blend.model.attention import LocalLines, MadeLines, row_lines

LOWEST = torch.finfo(torch.float32).min
TOKENS = 300
PAST = 10
WINDOW = 20


def scattered(batch, kept, rows):
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(batch):
        order = torch.randperm(rows, generator=generator)
        drawn.append(order[:kept].sort().values)
    return torch.stack(drawn)


def attention_inputs(batch, rows, keys):
    """Query of four heads, K and V of two."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, 4, rows, 8, generator=generator)
    key = torch.randn(batch, 2, keys, 8, generator=generator)
    value = torch.randn(batch, 2, keys, 8, generator=generator)
    return query, key, value


def attended(lines, *states, **options):
    """Attention of rows, `[batch, heads, rows, width]`; no stock function and no module is asked."""
    output, _ = lines.attend(None, None, *states, None, **options)
    return output.transpose(1, 2)


def check(states, lines, dense, atol=2e-6):
    """Attention of rows is what torch computes under a dense mask."""
    expected = scaled_dot_product_attention(*states, attn_mask=dense, scale=0.3, enable_gqa=True)
    got = attended(lines, *states, scaling=0.3)
    assert got.dtype == states[0].dtype
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kept", [1, 250])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["none", "window", "padding"])
def test_row_lines_of_no_mask_are_made_from_columns(kind, batch, kept):
    rows = scattered(batch, kept, TOKENS)
    columns = rows[:, None, :, None] + PAST
    keys = torch.arange(TOKENS + PAST)
    dense = keys <= columns
    mask = None
    window = None
    if kind == "window":
        window = WINDOW
        dense = dense & (keys > columns - WINDOW)
    if kind == "padding":
        mask = torch.ones(batch, len(keys))
        mask[-1, :5] = 0
        dense = dense & mask[:, None, None].bool()
    lines = row_lines(mask, rows, PAST, len(keys), window=window)
    assert torch.equal(lines.plain(), dense)
    check(attention_inputs(batch, kept, len(keys)), lines, dense)


@pytest.mark.parametrize("kept", [1, 250])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["boolean", "additive", "additive by head"])
def test_row_lines_of_made_mask_are_its_own(kind, batch, kept):
    rows = scattered(batch, kept, TOKENS)
    columns = torch.arange(TOKENS)[:, None] + PAST
    keys = torch.arange(TOKENS + PAST)
    hidden = (keys > columns) | (keys <= columns - WINDOW)
    heads = 4 if kind == "additive by head" else 1
    mask = torch.randn(batch, heads, *hidden.shape, generator=torch.Generator().manual_seed(3))
    mask = mask.masked_fill(hidden, LOWEST)
    if kind == "boolean":
        mask = mask > LOWEST
    lines = row_lines(mask, rows, PAST, len(keys))
    dense = torch.stack([mask[entry, :, row] for entry, row in enumerate(rows)])
    assert torch.equal(lines.plain(), dense)
    check(attention_inputs(batch, kept, len(keys)), lines, dense)


def test_attend_keeps_bfloat16():
    rows = scattered(1, 150, 200)
    states = [one.bfloat16() for one in attention_inputs(1, 150, 200)]
    lines = row_lines(None, rows, 0, 200)
    check(states, lines, lines.plain(), atol=2e-2)


def test_row_that_sees_no_key_disturbs_no_other():
    seen = torch.ones(6, 6).tril().bool()
    states = attention_inputs(1, 6, 6)
    expected = scaled_dot_product_attention(*states, attn_mask=seen, enable_gqa=True)
    seen[2] = False
    lines = MadeLines(seen[None, None])
    got = attended(lines, *states)
    got[:, :, 2] = expected[:, :, 2]
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@given(
    kept=st.sets(st.integers(0, 63), min_size=1),
    step=st.sampled_from([4, 8, 16]),
    kept_bytes=st.sampled_from([0, 1 << 20]),
    batch=st.integers(1, 2),
)
@example(kept={0, 1, 2, 3, 10, 13}, step=4, kept_bytes=0, batch=1)  # the last block is short
def test_attend_cuts_any_columns_into_blocks_of_any_size(kept, step, kept_bytes, batch):
    columns = torch.tensor(sorted(kept))
    dense = (torch.arange(64) <= columns[:, None])[None, None]
    states = attention_inputs(batch, len(columns), 64)
    for lines in (MadeLines(dense), LocalLines(columns.expand(batch, -1), 64)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK_ROWS", (step, step))
            patch.setattr(attention, "BLOCK_BYTES", 0)
            patch.setattr(attention, "SMALL_MASK", (0, 0))
            patch.setattr(attention, "KEPT_BYTES", kept_bytes)
            for _ in range(2):
                check(states, lines, dense, atol=1e-5)
        stop = 0
        for block in lines.blocks:
            assert block.rows.start == stop
            stop = block.rows.stop
        assert stop == len(columns)


def test_blocks_read_no_key_that_all_their_rows_are_before():
    columns = torch.arange(0, 1500, 15)
    lines = LocalLines(columns[None], 1500, numbers=columns.tolist)
    assert [block.keys.stop for block in lines.blocks] == [int(columns[63]) + 1, 1486]


def test_blocks_of_causal_mask_make_no_tensor_of_all_rows_and_keys():
    columns = torch.arange(0, 1 << 20, 64)
    lines = LocalLines(columns[None], 1 << 20, numbers=columns.tolist)  # 16 GiB as booleans
    assert lines.shape == (1, 1, 1 << 14, 1 << 20)
    assert len(lines.blocks) == (1 << 14) / 64

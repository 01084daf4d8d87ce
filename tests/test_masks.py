# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Scattered rows see exactly what they would see in a full prefill, whatever the model's mask looks like."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hf_blend.model import attention
from hf_blend.model.attention import LocalLines, attend, row_lines

LOWEST = torch.finfo(torch.float32).min


def scattered(batch, kept, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(rows, generator=generator)[:kept].sort().values for _ in range(batch)])


def full_mask(kind, batch, rows, past):
    """The boolean mask `[batch, 1, rows, keys]` that a model makes for all its new tokens."""
    queries = torch.arange(rows)[:, None] + past
    keys = torch.arange(rows + past)
    mask = keys <= queries
    if kind == "sliding":
        mask = mask & (keys > queries - 20)
    mask = mask.expand(batch, 1, -1, -1).clone()
    if kind == "padded":
        for row in range(batch):
            mask[row, :, :, : 5 * row] = False
            mask[row, :, torch.arange(rows) + past < 5 * row] = True
    return mask


def attention_inputs(batch, rows, keys, heads=4, kv_heads=2, width=8):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, heads, rows, width, generator=generator)
    return query, *(torch.randn(batch, kv_heads, keys, width, generator=generator) for _ in range(2))


def check(states, lines, dense, atol=2e-6):
    """Attention of rows is what torch computes under a dense mask."""
    expected = scaled_dot_product_attention(*states, attn_mask=dense, scale=0.3, enable_gqa=True)
    got = attend(*states, lines, scale=0.3)
    assert got.dtype == states[0].dtype
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("batch", [1, 2])
def test_row_lines_without_mask_are_causal_at_each_column(past, batch):
    rows = scattered(batch, 9, 30)
    mask = row_lines(None, rows, past, 30 + past).plain()
    assert mask.dtype == torch.bool
    visible = torch.arange(30 + past) <= rows[..., None] + past
    assert torch.equal(mask[:, 0], visible)


@pytest.mark.parametrize("mask_batch", [1, 3])
def test_row_lines_are_those_of_models_mask(mask_batch):
    additive = torch.randn(mask_batch, 2, 20, 26, generator=torch.Generator().manual_seed(0))
    rows = scattered(3, 6, 20)
    mask = row_lines(additive, rows, 6, 26).plain()
    for entry in range(3):
        assert torch.equal(mask[entry], additive[entry % mask_batch][:, rows[entry]])


@pytest.mark.parametrize("kind", ["causal", "sliding", "padded"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("kept", [1, 250])
def test_attend_is_attention_under_dense_mask(kind, batch, additive, kept):
    total = 300
    past = 10
    keys = total + past
    rows = scattered(batch, kept, total - 20) + 20
    model_mask = full_mask(kind, batch, total, past)
    dense = torch.stack([model_mask[entry, :, columns] for entry, columns in enumerate(rows)])
    if additive:
        model_mask = torch.zeros(model_mask.shape).masked_fill(~model_mask, LOWEST)
    lines = row_lines(model_mask, rows, past, keys)
    states = attention_inputs(batch, kept, keys)
    check(states, lines, dense)


def test_attend_keeps_bfloat16():
    rows = scattered(1, 150, 200)
    states = [one.bfloat16() for one in attention_inputs(1, 150, 200)]
    lines = row_lines(None, rows, 0, 200)
    check(states, lines, torch.arange(200) <= rows[0][:, None], atol=2e-2)


@pytest.mark.parametrize("heads", [1, 4])
def test_attend_does_not_fold_heads_that_see_different_keys(heads):
    generator = torch.Generator().manual_seed(3)
    additive = torch.randn(1, heads, 120, 120, generator=generator)
    hidden = torch.ones(120, 120).triu(1).bool()
    additive.masked_fill_(hidden, LOWEST)
    rows = scattered(1, 70, 120)
    lines = row_lines(additive, rows, 0, 120)
    check(attention_inputs(1, 70, 120), lines, additive[:, :, rows[0]])


def test_row_that_sees_no_key_disturbs_no_other():
    seen = torch.ones(6, 6).tril().bool()
    states = attention_inputs(1, 6, 6)
    expected = scaled_dot_product_attention(*states, attn_mask=seen, enable_gqa=True)
    blind = seen.clone()
    blind[2] = False
    lines = row_lines(blind[None, None], torch.arange(6)[None], 0, 6)
    got = attend(*states, lines)
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
    query, key, value = attention_inputs(batch, len(columns), 64)
    expected = scaled_dot_product_attention(query, key, value, dense, enable_gqa=True)
    made = [attention.MadeLines(dense), LocalLines(columns.expand(batch, -1), 64)]
    for lines in made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK_ROWS", (step, step))
            patch.setattr(attention, "BLOCK_BYTES", 0)
            patch.setattr(attention, "SMALL_MASK", (0, 0))
            patch.setattr(attention, "KEPT_BYTES", kept_bytes)
            for _ in range(2):
                got = attend(query, key, value, lines)
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        rows = [number for block in lines.blocks for number in range(64)[block.rows]]
        assert rows == list(range(len(columns)))


def test_blocks_read_no_key_that_all_their_rows_are_before():
    columns = torch.arange(0, 1500, 15)
    lines = LocalLines(columns[None], 1500, numbers=columns.tolist)
    assert [block.keys.stop for block in lines.blocks] == [int(columns[63]) + 1, 1486]


def test_blocks_of_causal_mask_make_no_tensor_of_all_rows_and_keys():
    columns = torch.arange(0, 1 << 20, 64)
    lines = LocalLines(columns[None], 1 << 20, numbers=columns.tolist)  # 16 GiB as booleans
    assert lines.shape == (1, 1, 1 << 14, 1 << 20)
    assert len(lines.blocks) == (1 << 14) / 64


def test_gradients_go_through_attend():
    rows = scattered(1, 700, 1000)
    given = attention_inputs(1, 700, 1000)
    dense = torch.arange(1000) <= rows[0][:, None]
    by_blocks = lambda *states: attend(*states, row_lines(None, rows, 0, 1000))  # noqa: E731
    stock = lambda *states: scaled_dot_product_attention(*states, attn_mask=dense, enable_gqa=True)  # noqa: E731
    for one, other in zip(gradients(by_blocks, given), gradients(stock, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def gradients(attention, given):
    states = [one.clone().requires_grad_() for one in given]
    return torch.autograd.grad(attention(*states).square().sum(), states)

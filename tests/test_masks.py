# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Scattered rows see exactly what they would see in a full prefill, whatever the model's mask looks like."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hf_blend.model import row_masks
from hf_blend.model.row_masks import LocalLines, RowMask, attend, row_mask

LOWEST = torch.finfo(torch.float32).min


def scattered(batch, kept, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(rows, generator=generator)[:kept].sort().values for _ in range(batch)])


def full_mask(kind, batch, rows, past):
    """The boolean mask `[batch, 1, rows, keys]` that a model makes for all its new tokens."""
    queries, keys = torch.arange(rows)[:, None] + past, torch.arange(rows + past)
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


def check(states, mask, dense, atol=2e-6):
    """Attention under a row mask is what torch computes under a dense one."""
    given = {"scale": 0.3, "enable_gqa": True}
    got, expected = (scaled_dot_product_attention(*states, attn_mask=one, **given) for one in (mask, dense))
    assert (type(got), got.dtype) == (torch.Tensor, states[0].dtype)
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "another"])
@pytest.mark.parametrize("past", [0, 7])
def test_without_a_mask_of_the_model_each_row_is_causal_at_its_own_place(implementation, past):
    rows = scattered(2, 9, 30)
    mask = row_mask(None, rows, past, 30 + past, implementation)
    assert mask.dtype == (torch.bool if implementation != "eager" else torch.float32)
    visible = mask if mask.dtype == torch.bool else mask == 0
    for entry, places in enumerate(rows):
        for line, place in enumerate(places):
            seen = visible[entry if visible.shape[0] > 1 else 0, 0, line].nonzero().flatten().tolist()
            assert seen == list(range(int(place) + past + 1))


@pytest.mark.parametrize("mask_batch", [1, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_carry_their_own_lines_of_the_models_mask(mask_batch, implementation):
    additive = torch.randn(mask_batch, 2, 20, 26, generator=torch.Generator().manual_seed(0))
    rows = scattered(3, 6, 20)
    mask = row_mask(additive, rows, 6, 26, implementation)
    for entry in range(3):
        assert torch.equal(torch.as_tensor(mask)[entry], additive[entry % mask_batch][:, rows[entry]])


@pytest.mark.parametrize("kind", ["causal", "sliding", "padded"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("kept", [1, 40, 250])
def test_attention_by_blocks_is_attention_under_the_dense_mask(kind, batch, additive, kept):
    total, past = 300, 10
    rows = scattered(batch, kept, total - 20) + 20
    model_mask = full_mask(kind, batch, total, past)
    dense = torch.stack([model_mask[entry, :, places] for entry, places in enumerate(rows)])
    if additive:
        model_mask = torch.zeros(model_mask.shape).masked_fill(~model_mask, LOWEST)
    mask = row_mask(model_mask, rows, past, total + past, "sdpa")
    check(attention_inputs(batch, kept, total + past), mask, dense)


def test_a_bfloat16_query_keeps_its_dtype():
    rows, states = scattered(1, 150, 200), [one.bfloat16() for one in attention_inputs(1, 150, 200)]
    check(states, row_mask(None, rows, 0, 200, "sdpa"), torch.arange(200) <= rows[0][:, None], atol=2e-2)


def test_to_all_other_code_a_row_mask_is_a_tensor():
    mask = row_mask(None, torch.tensor([[1, 3]]), 0, 5, "sdpa")
    assert type(mask & mask) is torch.Tensor
    assert mask[0, 0].tolist() == [[True, True, False, False, False], [True, True, True, True, False]]
    assert torch.where(mask, 0.0, 1.0).sum() == 4


@pytest.mark.parametrize("heads", [1, 4])
def test_heads_that_see_different_keys_are_not_folded(heads):
    generator = torch.Generator().manual_seed(3)
    additive = torch.randn(1, heads, 120, 120, generator=generator).masked_fill(
        ~torch.ones(120, 120).tril().bool(), LOWEST
    )
    rows = scattered(1, 70, 120)
    check(attention_inputs(1, 70, 120), row_mask(additive, rows, 0, 120, "sdpa"), additive[:, :, rows[0]])


def test_a_row_that_sees_no_key_disturbs_no_other():
    seen = torch.ones(6, 6).tril().bool()
    mask = seen.index_fill(0, torch.tensor([2]), False)
    mask, states = row_mask(mask[None, None], torch.arange(6)[None], 0, 6, "sdpa"), attention_inputs(1, 6, 6)
    got, expected = (scaled_dot_product_attention(*states, attn_mask=one, enable_gqa=True) for one in (mask, seen))
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(got[:, :, others], expected[:, :, others], atol=2e-6, rtol=0)


@given(
    kept=st.sets(st.integers(0, 63), min_size=1),
    group=st.sampled_from([1, 2, 4]),
    step=st.sampled_from([4, 8, 16]),
    run=st.sampled_from([2, 5, 100]),
    kept_bytes=st.sampled_from([0, 1 << 20]),
    batch=st.sampled_from([1, 2]),
    in_two=st.booleans(),
)
@example(kept={0, 1, 2, 3, 10, 13}, group=1, step=4, run=100, kept_bytes=0, batch=1, in_two=False)  # the last is short
@example(kept={*range(9, 64)}, group=2, step=4, run=5, kept_bytes=0, batch=1, in_two=True)  # one run
def test_any_columns_cut_into_blocks_of_any_size_give_attention_under_the_dense_mask(
    kept, group, step, run, kept_bytes, batch, in_two
):
    columns = torch.tensor(sorted(kept))
    dense = (torch.arange(64) <= columns[:, None])[None, None]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, len(columns), 8, generator=generator)
    key, value = torch.randn(2, batch, 4 // group, 64, 8, generator=generator)
    expected = scaled_dot_product_attention(query, key, value, dense, enable_gqa=True)
    made = [row_masks.MadeLines(dense), LocalLines(columns.expand(batch, -1), 64)]
    made += [LocalLines(columns[None], 64, ask=columns.tolist)] if batch == 1 else []
    for lines in made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_masks, "BLOCK_ROWS", (step, step))
            patch.setattr(row_masks, "SPAN_ROWS", (step, step))
            patch.setattr(row_masks, "RUN_ROWS", run)
            patch.setattr(row_masks, "SMALL_MASK", 0)
            patch.setattr(row_masks, "CAUSAL_MASK", (0, 0 if in_two else 1 << 20))
            patch.setattr(row_masks, "CAUSAL_ROWS", step)
            patch.setattr(row_masks, "KEPT_BYTES", kept_bytes)
            patch.setattr(row_masks, "_fused", row_masks._fused if in_two else None)
            got = [attend(query, key, value, lines) for _ in range(2)]
            blocks = lines.spans if in_two and lines.is_causal else lines.blocks
        assert [number for block in blocks for number in range(64)[block.rows]] == list(range(len(columns)))
        for one in got:
            torch.testing.assert_close(one, expected, atol=1e-5, rtol=0)


def test_a_block_of_few_rows_reads_no_key_that_all_its_rows_are_before():
    columns = torch.arange(0, 1500, 15)
    lines = LocalLines(columns[None], 1500, ask=columns.tolist)
    assert not lines.spans
    assert [block.keys.stop for block in lines.blocks] == [int(columns[47]) + 1, int(columns[95]) + 1, 1486]
    assert len(LocalLines(columns[None, :40], 1500, ask=columns[:40].tolist).blocks) == 1, "too few to cut"


def test_attention_in_two_steps_makes_no_mask_of_the_keys_that_a_block_shares(monkeypatch):
    rows, made, cut = scattered(1, 700, 4000), [], LocalLines.cut
    monkeypatch.setattr(LocalLines, "cut", lambda *given: made.append(cut(*given)) or made[-1])
    mask, dense = row_mask(None, rows, 0, 4000, "sdpa"), torch.arange(4000) <= rows[0][:, None]
    check(attention_inputs(1, 700, 4000), mask, dense)
    assert 0 < sum(mask.numel() for mask in made) < 0.11 * 700 * 4000


def test_gradients_go_through_attention_by_blocks():
    rows = scattered(1, 700, 1000)
    given = attention_inputs(1, 700, 1000)
    dense = torch.arange(1000) <= rows[0][:, None]
    by_blocks = lambda *states: attend(*states, row_mask(None, rows, 0, 1000, "sdpa").lines)  # noqa: E731
    stock = lambda *states: scaled_dot_product_attention(*states, attn_mask=dense, enable_gqa=True)  # noqa: E731
    for one, other in zip(gradients(by_blocks, given), gradients(stock, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def gradients(attention, given):
    states = [one.clone().requires_grad_() for one in given]
    return torch.autograd.grad(attention(*states).square().sum(), states)


def test_a_causal_mask_takes_no_memory_until_some_code_asks_for_a_tensor():
    columns = torch.arange(0, 1 << 20, 64)
    mask = RowMask.of(LocalLines(columns[None], 1 << 20, ask=columns.tolist))  # 16 GiB as booleans
    assert mask.shape == (1, 1, 1 << 14, 1 << 20)
    assert (mask.dtype, mask.dim(), mask.device.type) == (torch.bool, 4, "cpu")
    assert len(mask.lines.spans) <= (1 << 14) / 64 + 1

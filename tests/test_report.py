# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The meter is honest: the charged budget is what a count by hand gives."""

import json

import pytest
import torch

from hf_blend import BlendCache
from hf_blend.model.anatomy import layer_costs
from hf_blend.prefill.report import BlendReport
from tests.asking import memory

LAYERS = 4
REUSABLE = range(5, 76)
BEFORE = 2 * 64 * (64 + 32 + 32)  # queries, keys, values of the tiny model
AFTER = 2 * (64 * 64 + 3 * 64 * 128)  # output projection, and the three matrices of the MLP
PER_KEY = 2 * 2 * 64  # scores and sums, over all heads


def whole(columns, keys_before=0):
    return sum(BEFORE + AFTER + PER_KEY * (column + keys_before + 1) for column in columns)


@pytest.fixture
def report(shared_model, pieces, tokenizer):
    """The report of one request with 5 exact, 71 reusable and 9 other tokens."""

    def run(request=None, **settings):
        model = shared_model(**settings.pop("config", {}))
        cache = BlendCache(model, memory(), **{"selector": "kv-deviation", **settings})
        inputs = cache.inputs(tokenizer, **(request or pieces()))
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False, eos_token_id=None)
        return cache.report

    return run


def test_cost_of_layer_is_counted_not_looked_up_and_leaves_model_untouched(tiny_model, untouched):
    model = tiny_model()
    with untouched(model):
        costs = layer_costs(model)
        assert layer_costs(model) is costs
    assert [(one.before_kv, one.after_kv, one.per_key) for one in costs] == [(BEFORE, AFTER, PER_KEY)] * LAYERS
    assert costs[0].of_columns(torch.tensor([3, 10])) == whole([3, 10])


@pytest.mark.parametrize(
    ("selector", "ratio"),
    [
        ("kv-deviation", 0.15),
        ("kv-deviation", 0.5),
        ("kv-deviation", 1.0),
        ("boundary", 0.3),
        ("query-attention", 0.15),
    ],
)
def test_charged_budget_is_what_count_by_hand_gives(report, selector, ratio):
    got = report(recompute_ratio=ratio, selector=selector)
    chosen = got.chosen_columns[0]
    spent = whole(chosen)  # layer 2
    spent += BEFORE * len(chosen)  # the last layer computes K and V; only the last row goes on
    if selector == "kv-deviation":
        spent += whole(REUSABLE)  # layer 0: all
        spent += BEFORE * len(REUSABLE) + whole(chosen)  # check layer: all to look, then the chosen
    else:
        spent += 2 * whole(chosen)  # selected before layer 0
    assert (got.scoring_flops > 0) == (selector == "query-attention")
    spent += got.scoring_flops
    assert got.charged_budget == pytest.approx(spent / (LAYERS * whole(REUSABLE)), rel=1e-6)


def test_behind_history_every_token_is_charged_for_keys_of_history_too(shared_model, pieces, tokenizer):
    model = shared_model()
    cache = BlendCache(model, memory(), recompute_ratio=0.3, selector="kv-deviation")
    given = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    output = model.generate(**cache.inputs(tokenizer, **pieces()), **given)
    held = cache.get_seq_length()
    turn = pieces((14, 21), seed=5)
    inputs = cache.inputs(tokenizer, chunks=turn["chunks"], question=turn["question"], prefix=output[0])
    model.generate(**inputs, **given)
    got = cache.report  # the last token that was said comes before the chunks
    first = output.shape[1]
    chosen = got.chosen_columns[0]
    reusable = range(first, first + 35)
    assert got.past_tokens == 88
    assert str(got).startswith("88 tokens kept, then ")
    assert got.reusable_tokens == 35
    assert held == first - 1
    spent = whole(reusable) + BEFORE * len(reusable) + 2 * whole(chosen) + BEFORE * len(chosen)
    assert got.charged_budget == pytest.approx(spent / (LAYERS * whole(reusable)), rel=1e-9)
    full = LAYERS * whole(range(held, first + 35 + len(turn["question"])))
    assert got.flop_bound == pytest.approx(full / got.flops, rel=1e-9)


def test_report_is_one_line_for_people_and_json_for_programs(report):
    got = report(recompute_ratio=0.15)
    shown = json.loads(json.dumps(got.to_dict()))
    assert shown["charged_budget"] == got.charged_budget
    assert shown["chosen_columns"] == got.chosen_columns
    assert not [name for name in shown if name.startswith("_")]
    assert "85 tokens: 9 new, 5 exact, 71 reusable, of which 11 recomputed (ratio 15%, cost" in str(got)
    assert "\n" not in str(got)
    fresh = BlendReport(0.15)
    assert fresh.charged_budget == 0
    assert fresh.flop_bound == 1

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a probe gives the gradients that torch gives for a stock cache, and leaves nothing behind."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend import plugins
from hf_blend.prefill.value_gradients import SCALE
from hf_blend.selectors.dependence import ROWS, Dependence
from tests.asking import PIECES, hooks, prefill, prepared

OTHER = {"prefix": [1, 9], "chunks": [[*range(30, 52)], [*range(12, 31)]], "question": [9, 8, 7, 6, 5, 4]}
LONGER = {**PIECES, "question": [*range(20, 60)]}
REUSABLE = slice(3, 58)  # columns of PIECES


class Seen(Dependence):
    """Keeps what it saw."""

    def score(self, view):
        type(self).scores = super().score(view)
        return type(self).scores


@pytest.fixture
def seen(monkeypatch):
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda room, name: Seen if name == "dependence" else load(room, name))
    Seen.scores = None
    return Seen


def stock_gradients(model, row, start):
    """Length of value times length of its gradient at the columns before `start`, of stored KV, by torch alone."""
    cache, inputs = prepared(model, row, selector="none", recompute_ratio=0.0)
    cache.activate_past_recording()
    prefill(model, inputs, cache)
    stock, leaves = DynamicCache(), []
    with torch.enable_grad():
        for index, layer in enumerate(cache.layers):
            leaves.append(layer.values[:, :, :start].detach().clone().requires_grad_())
            stock.update(layer.keys[:, :, :start].detach().clone(), leaves[-1], index)
        logits = model(inputs["input_ids"][:, start:], past_key_values=stock).logits[0, -1]
        gradients = torch.autograd.grad(logits.log_softmax(-1).max(), leaves)
    pairs = zip(leaves, gradients, strict=True)
    return sum((value.norm(dim=-1) * own.norm(dim=-1)).sum(dim=(0, 1)) for value, own in [*pairs][len(leaves) // 3 :])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3"])
@torch.no_grad()
def test_scores_are_those_of_torch_and_nothing_is_left_behind(tiny_model, seen, family, frozen):
    model = tiny_model(family).requires_grad_(not frozen)
    expected = stock_gradients(model, PIECES, REUSABLE.stop)[REUSABLE]
    cache, inputs = prepared(model, PIECES, selector="dependence", recompute_ratio=0.2)
    logits = prefill(model, inputs, cache)
    own = seen.scores[0, REUSABLE] / SCALE
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-6 * float(expected.max()))
    chosen = sorted((expected.argsort(descending=True)[:11] + REUSABLE.start).tolist())
    assert cache.report.chosen_columns == [chosen]
    assert not logits.requires_grad and logits.grad_fn is None
    assert not any(states.requires_grad for layer in cache.layers for states in (layer.keys, layer.values))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert hooks(model) == 0


def test_scores_of_an_entry_are_the_same_beside_another_and_with_a_question_cut_to_rows(tiny_model, seen):
    model = tiny_model("qwen2")
    alone = []
    for row in (OTHER, LONGER):
        cache, inputs = prepared(model, row, selector="dependence", recompute_ratio=0.2)
        prefill(model, inputs, cache)
        alone.append(cache.report.chosen_columns[0])
    assert len(LONGER["question"]) > ROWS
    cache, inputs = prepared(model, OTHER, LONGER, selector="dependence", recompute_ratio=0.2)
    prefill(model, inputs, cache)
    padding = (inputs["attention_mask"] == 0).sum(1).tolist()
    assert cache.report.chosen_columns == [
        [column + pad for column in chosen] for chosen, pad in zip(alone, padding, strict=True)
    ]


@pytest.mark.parametrize("way", ["kv_bits", "inference_mode", "qwen3_next"])
def test_where_there_is_no_gradient_the_default_rule_chooses(tiny_model, way):
    model = tiny_model(way) if way == "qwen3_next" else tiny_model()
    settings = {"kv_bits": 8} if way == "kv_bits" else {}
    chosen = []
    for selector in ("dependence", "expected-error"):
        cache, inputs = prepared(model, PIECES, selector=selector, recompute_ratio=0.2, **settings)
        with torch.inference_mode(way == "inference_mode"):
            prefill(model, inputs, cache)
        chosen.append(cache.report.chosen_columns)
    assert chosen[0] == chosen[1]


def test_way_back_is_charged_and_a_failure_in_it_leaves_model_and_cache_as_they_were(
    tiny_model, untouched, monkeypatch
):
    model = tiny_model("qwen2")
    charged = []
    for selector in ("explicit", "expected-error", "dependence"):
        cache, inputs = prepared(model, PIECES, selector=selector, recompute_ratio=0.2)
        prefill(model, inputs, cache)
        charged.append(cache.report.charged_budget)
    assert charged[2] - charged[0] > 1.6 * (charged[1] - charged[0]) > 0
    with untouched(model):
        cache, inputs = prepared(model, PIECES, selector="dependence", recompute_ratio=0.2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "grad", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prefill(model, inputs, cache)
        assert cache.get_seq_length() == 0
        assert prefill(model, inputs, cache).isfinite().all()
        assert cache.report.reused_tokens > 0

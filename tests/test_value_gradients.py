# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a probe gives the gradients that torch gives for a stock cache, and leaves nothing behind."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend import plugins
from hf_blend.selectors.dependence import Dependence
from tests.asking import PIECES, hooks, prefill, prepared

OTHER = {"prefix": [1, 9], "chunks": [[*range(30, 52)], [*range(12, 31)]], "question": [9, 8, 7, 6, 5, 4]}
LONG_QUESTION = {**PIECES, "question": [*range(20, 60)]}


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
    start = len(PIECES["prefix"]) + sum(map(len, PIECES["chunks"]))
    expected = stock_gradients(model, PIECES, start)
    cache, inputs = prepared(model, PIECES, selector="dependence", recompute_ratio=0.2)
    logits = prefill(model, inputs, cache)
    own = seen.scores[0, 3:start] / 256
    torch.testing.assert_close(own, expected[3:], rtol=1e-3, atol=1e-6 * float(expected.max()))
    assert not logits.requires_grad and logits.grad_fn is None
    assert not any(states.requires_grad for layer in cache.layers for states in (layer.keys, layer.values))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert hooks(model) == 0

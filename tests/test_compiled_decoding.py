# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled code: a cache refuses what it cannot enter, and is not compiled by `generate` behind the user's back."""

import logging

import pytest
import torch
from transformers import CompileConfig

from hf_blend.errors import ConfigError
from hf_blend.sparse.decoding import sparse_decoding
from tests.asking import generated, prefilled, prepared


class Compiler:
    """Runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

        def backend(graph, example):  # a function, because generate copies its settings
            self.graphs += 1
            return graph.forward

        self.backend = backend
        self.config = CompileConfig(backend=backend, mode=None, dynamic=None)
        self.config._compile_all_devices = True  # transformers compiles on a GPU only


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep all of it
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


@torch.no_grad()
def test_prefill_in_compiled_code_is_refused_by_name(shared_model, pieces, compiler):
    model = shared_model(num_hidden_layers=2)
    compiled = torch.compile(model, backend=compiler.backend)
    cache, inputs = prepared(model, pieces())
    with pytest.raises(ConfigError, match="prefill came from compiled code"):
        compiled(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_compiled_step_appends_to_blended_prefill(shared_model, pieces, compiler):
    model = shared_model(num_hidden_layers=2)
    compiled = torch.compile(model, backend=compiler.backend)
    logits = []
    for run in (model, compiled):
        cache, _, _ = prefilled(model, pieces(), recompute_ratio=0.15)
        logits.append(run(torch.tensor([[5]]), past_key_values=cache).logits)
    assert compiler.graphs
    torch.testing.assert_close(*logits)


@torch.no_grad()
def test_sparse_step_in_compiled_code_is_refused_by_name(shared_model, pieces, compiler):
    model = shared_model(num_hidden_layers=2)
    compiled = torch.compile(model, backend=compiler.backend)
    cache, _, _ = prefilled(model, pieces())
    with (
        sparse_decoding(model, cache, block_tokens=8, min_tokens=0),
        pytest.raises(ConfigError, match="sparse step came from compiled code"),
    ):
        compiled(torch.tensor([[5]]), past_key_values=cache)


def test_is_compileable_is_false_where_generate_would_compile(tiny_model, pieces, compiler):
    model = tiny_model(num_hidden_layers=2, num_key_value_heads=4)
    cache, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    generated(model, inputs, cache, compile_config=compiler.config)
    assert compiler.graphs == 0
    assert not cache.is_compileable

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The size of a cache, said from the config, is what caches of transformers really hold."""

import json

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.evaluation.cache_size import cache_size
from tests.conftest import shared_zoo_model

FAMILIES = ("llama", "mistral", "gemma3_text", "falcon", "deepseek_v3", "gptj")
TOKENS, BATCH = 40, 2


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_size_is_that_of_a_filled_cache_to_the_byte(name):
    model = shared_zoo_model(name)
    cache = DynamicCache(config=model.config)
    model(torch.arange(3, 3 + TOKENS).repeat(BATCH, 1), past_key_values=cache)
    states = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    held = sum(part.numel() * part.element_size() for part in states)
    assert cache_size(model.config, context_tokens=TOKENS, batch=BATCH).nbytes == held


def test_a_known_model_takes_what_is_known_of_it():
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    found = cache_size(config, context_tokens=8192, dtype=torch.bfloat16)
    assert found.bytes_per_token == 128 * 1024
    assert found.nbytes == 2**30
    assert found.without_groups_nbytes == 4 * 2**30
    assert found.without_windows_nbytes == found.nbytes
    assert 0.5 < found.int8_nbytes / found.nbytes < 0.56


def test_windows_bound_what_their_layers_keep():
    config = AutoConfig.for_model("mistral", sliding_window=1024)
    short, long = (cache_size(config, context_tokens=tokens).nbytes for tokens in (1023, 100_000))
    assert short == long
    assert cache_size(config, context_tokens=100_000).without_windows_nbytes > 90 * long
    with pytest.raises(UnsupportedModelError, match="state"):
        cache_size(AutoConfig.for_model("qwen3_next"), context_tokens=100)


@pytest.mark.parametrize("wrong", [{"context_tokens": 0}, {"context_tokens": 1, "batch": 0}])
def test_numbers_below_one_are_refused(wrong):
    with pytest.raises(ConfigError, match="from 1 on"):
        cache_size(AutoConfig.for_model("llama"), **wrong)


def test_the_command_says_so_in_json(run):
    code, out, err = run(*"size tiny:llama --context 100 --batch 3 --dtype bfloat16 --json".split())
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["cache_bytes"] == 3 * 100 * found["bytes_per_token"]
    assert found["requests_that_fit"] == found["free_memory_bytes"] * 3 // found["cache_bytes"]
    code, _, err = run("size", "tiny:llama", "--dtype", "bfloat")
    assert (code, "bfloat16" in err) == (2, True)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model is tested once before it is blended, refused if it is off, and left as it was."""

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model as build

from hf_blend import BlendCache
from hf_blend.cache.blend_cache import trial_cache
from hf_blend.errors import UnsupportedModelError
from hf_blend.model.calibrate import ensure_trusted, ratio_1, shared_scale
from hf_blend.model.checks import CHECKS, CheckedModel, allowed_of, token_errors
from hf_blend.prefill import rows
from tests.asking import looking_ahead, memory, raising


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_promised_families_pass_with_room(family, dtype, tiny_model):
    model = tiny_model(family).to(dtype)
    result = ratio_1(CheckedModel(model, trial_cache))
    assert result.error < result.tolerance / 2
    assert len(ensure_trusted(model, trial_cache)) == model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_whose_blend_is_off_is_refused_with_way_out(dtype, tiny_model, monkeypatch):
    monkeypatch.setattr(rows, "row_lines", looking_ahead)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedModelError, match=f"off by .* in {name}, where .*allow_unverified=True"):
        ensure_trusted(tiny_model().to(dtype), trial_cache)


def test_self_test_that_breaks_is_refusal_and_says_how(tiny_model, monkeypatch):
    monkeypatch.setattr(rows, "row_lines", raising(RuntimeError("the shapes 3 and 4 do not match")))
    with pytest.raises(UnsupportedModelError, match="ended in RuntimeError: the shapes 3 and 4 do not match"):
        ensure_trusted(tiny_model(), trial_cache)


def test_user_may_overrule_it_and_is_warned_once(tiny_model, monkeypatch, caplog):
    monkeypatch.setattr(rows, "row_lines", looking_ahead)
    model = tiny_model()
    with caplog.at_level(logging.WARNING, "hf_blend"):
        for _ in range(3):
            BlendCache(model, memory(), allow_unverified=True)
    said = [record.message for record in caplog.records if "without being verified" in record.message]
    assert said == [caplog.messages[0]]
    with pytest.raises(UnsupportedModelError):
        BlendCache(model, memory())


def test_without_style_there_is_nothing_to_blend_with_so_nothing_overrules_it(tiny_model):
    model = tiny_model("gpt2", num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of GPT2LMHeadModel cannot be moved.*full prefill"):
        ensure_trusted(model, trial_cache, allow_unverified=True)


def test_model_is_tested_once_and_again_with_another_attention(tiny_model, monkeypatch):
    model = tiny_model()
    calls = []
    instead = replace(CHECKS["ratio_1"], measure=lambda subject: calls.append(1) or ratio_1(subject))
    monkeypatch.setitem(CHECKS, "ratio_1", instead)
    for _ in range(3):
        BlendCache(model, memory())
    assert len(calls) == 1
    model.set_attn_implementation("eager")
    BlendCache(model, memory())
    assert len(calls) == 2


def test_self_test_leaves_model_as_it_was_in_training_too(tiny_model, untouched):
    model = tiny_model()
    model.train()
    model.lm_head.eval()
    with untouched(model):
        ensure_trusted(model, trial_cache)
    assert model.training
    assert not model.lm_head.training


@pytest.mark.parametrize("seed", range(3))
def test_projections_that_quantise_whole_call_by_one_scale_are_named(seed, tiny_model):
    """Whether the error of such a model shows in the tests that follow depends on which token is the largest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(build("llama", seed=seed), {torch.nn.Linear})
    store = memory()
    said = r"self_attn\.q_proj \(torch\.ao\..*Linear\) quantises .* by one scale"
    with pytest.raises(UnsupportedModelError, match=said):
        BlendCache(model, store)
    for dtype in (torch.float32, torch.bfloat16):
        assert not shared_scale(tiny_model("llama").to(dtype))


def test_token_errors_of_what_is_no_number_are_infinite_and_of_no_other_token():
    expected = torch.ones(3, 4)
    got = expected.clone()
    got[1, 2] = float("nan")
    assert token_errors(got, expected).tolist() == [0.0, float("inf"), 0.0]
    assert token_errors(2 * expected, expected).tolist() == [1.0] * 3
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert [allowed_of((1.0, 2.0, 3.0), dtype) for dtype in dtypes] == [1.0, 2.0, 3.0, 3.0]

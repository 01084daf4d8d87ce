# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Families that differ in how they turn keys or pass rows, and those that are refused, by what stands in the way."""

import re
from pathlib import Path

import pytest
import torch
from families import broken, verify_types
from tiny_models import EXTRA, tiny_model

from hf_blend.model.anatomy import KEYWORD
from hf_blend.model.calibrate import rotary_styles
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.runner import measure
from tests.asking import PIECES, as_stock, prepared
from tests.conftest import skip_in_the_oldest, slow_but

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "families.json"
STYLES = {
    "gpt_oss": "half narrow",
    "deepseek_v3": "half in values",
    "llama4_text": "interleaved narrow + unrotated",
    "gptj": "interleaved narrow",
    "nanochat": "half reversed",
}
EXTENDED = ["deepseek_v3", "nanochat"]  # the others attend within windows, or never ask for their attention
if KEYWORD == "cache":  # GPT-J of transformers 5.24 receives a table, and asks for its attention
    STYLES["gptj"] = "interleaved narrow reversed"
    EXTENDED.append("gptj")


def unproved(subject, *rungs):
    """What checks of a model in float32 with sdpa do not pass."""
    found = []
    for rung in rungs:
        check = measure(rung, subject, "float32", "sdpa")
        if not check.passed:
            found.append(check)
    return found


@pytest.mark.parametrize("name", slow_but("deepseek_v3", among=STYLES))
def test_family_is_exact_with_its_own_rotary_style(name):
    (row,) = verify_types([name])
    assert row["supported"], row["reason"]
    assert row["rotary"] == STYLES[name]
    assert row["max_abs_error"] <= 1e-5
    assert row["move"] == "exact"
    assert row["move_error"] <= 1e-5
    assert row["extend"] == "exact" or re.match(r"layer \d", row["extend"])
    assert (row["extend"] == "exact") is (name in EXTENDED)
    assert row["heal"] == row["heal_bfloat16"] == "exact"
    assert row["heal_bfloat16_error"] <= row["heal_bfloat16_floor"]
    assert not broken(row)


def test_type_whose_config_switches_cache_off_is_exact():
    (row,) = verify_types(["mpt"])
    assert row["supported"], row["reason"]
    assert row["max_abs_error"] <= 1e-5


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("xlstm", "no attribute 'rnn_state'" if KEYWORD == "cache" else "left NoneType in the cache"),
        ("bart", "encoder-decoder"),
        ("gpt2", "no rotary table"),
        ("hunyuan_v1_dense", "as a norm behind the rotation does"),
        ("trocr", "positions to the embeddings that it counts itself"),
    ],
)
def test_family_is_refused_for_what_stands_in_way(name, cause):
    (row,) = verify_types([name])
    assert not row["supported"]
    assert cause in row["reason"]
    assert row["reason"] == row["move"] == row["extend"] == row["heal"] == row["heal_bfloat16"]


def test_norm_behind_rotation_is_in_way_only_where_what_turns_together_has_other_weights():
    model = tiny_model("hunyuan_v1_dense")
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.query_layernorm, layer.self_attn.key_layernorm):
                norm.weight[8:] = norm.weight[:8]
    assert {style.__name__ for style in rotary_styles(model)} == {"Half"}
    assert unproved(ModelUnderTest(model), "moved_chunk", "fused_ratio") == []


@pytest.mark.parametrize("name", ["gemma4_text", pytest.param("gemma3n_text", marks=pytest.mark.slow)])
def test_model_whose_last_layers_look_at_kv_of_others_is_exact(name):
    skip_in_the_oldest("layers that share K and V leave none, which is refused")
    model = tiny_model(name, **EXTRA["gemma3n_text"])
    subject = ModelUnderTest(model)
    assert unproved(subject, "ratio_1", "fused_ratio") == []
    chunk = subject.chunk(subject.prompts[0].chunks[0])
    assert [*map(len, chunk.layers)] == [2, 2, 2, 0, 0]
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    for how in ({}, {"num_beams": 2}):
        as_stock(model, inputs, cache, **how)
        cache.reset()

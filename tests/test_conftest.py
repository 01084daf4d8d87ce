# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fixtures are tests of others, so they are tested first."""

import pytest
import torch


def register_hook(model):
    model.model.layers[1].register_forward_pre_hook(print)


def set_attribute(model):
    model.model.layers[2].self_attn.left_behind = 1


def set_config(model):
    model.config.left_behind = 1


def set_attention(model):
    model.set_attn_implementation("eager")


def set_training(model):
    model.train()


def change_weights(model):
    model.lm_head.weight.add_(1)


def replace_module(model):
    model.model.norm = torch.nn.Identity()


CHANGES = {
    "hooks": register_hook,
    "left_behind": set_attribute,
    "config": set_config,
    "attention": set_attention,
    "training": set_training,
    "weight lm_head": change_weights,
    "model.norm.weight": replace_module,
}


@pytest.mark.parametrize("part", CHANGES)
def test_untouched_sees_what_was_left_behind(tiny_model, untouched, part):
    model = tiny_model().requires_grad_(False)
    with pytest.raises(AssertionError, match=part), untouched(model):
        CHANGES[part](model)

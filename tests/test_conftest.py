# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fixtures are tests of others, so they are tested first."""

import pytest
import torch


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("hooks", lambda model: model.model.layers[1].register_forward_pre_hook(lambda *_: None)),
        ("attributes", lambda model: setattr(model.model.layers[2].self_attn, "left_behind", 1)),
        ("config", lambda model: setattr(model.config, "left_behind", 1)),
        ("attention", lambda model: model.set_attn_implementation("eager")),
        ("training", lambda model: model.train()),
        ("weights", lambda model: model.lm_head.weight.add_(1)),
        ("classes", lambda model: setattr(model.model, "norm", torch.nn.Identity())),
    ],
)
def test_untouched_sees_what_was_left_behind(tiny_model, untouched, part, change):
    model = tiny_model().requires_grad_(False)
    with pytest.raises(AssertionError, match=part), untouched(model):
        change(model)

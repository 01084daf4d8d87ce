# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fixtures are tests of others, so they are tested first."""

import pytest
import torch


def test_tiny_model_is_the_same_at_each_call_and_attends_to_something(tiny_model):
    state = torch.random.get_rng_state()
    first, second = tiny_model(attn_implementation="eager"), tiny_model()
    assert torch.equal(torch.random.get_rng_state(), state)
    prompt = torch.arange(3, 35)[None]
    with torch.no_grad():
        seen = first(prompt, output_attentions=True)
        assert torch.equal(second(prompt).logits, tiny_model()(prompt).logits)
    last_rows = torch.stack(seen.attentions)[..., -1, :]
    assert last_rows.max(dim=-1).values.mean() > 2 / 32, "attention is nearly uniform: nothing depends on the context"


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


def test_untouched_also_looks_after_an_exception_and_lets_others_through(tiny_model, untouched):
    model = tiny_model()
    with pytest.raises(RuntimeError, match="inside"), untouched(model):
        raise RuntimeError("inside")

    def leave_something_and_fail():
        model.left_behind = 1
        raise RuntimeError("inside")

    with pytest.raises(AssertionError, match="attributes"), untouched(model):
        leave_something_and_fail()

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The hooks come for one forward, see only their own cache, and go."""

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_blend.model.anatomy import decoder_layers, wants_all_rows
from hf_blend.model.hooks import ForwardHooks
from tests.asking import PIECES, asked, hooks


class Recorder(DynamicCache):
    """A cache that writes down what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []
        self.hooks = None
        self.enters_layers = True
        self.prefill = self

    def forward_begins(self, arguments):
        self.told.append(("begins", sorted(arguments)))
        if self.enters_layers:
            self.hooks.enter_layers(width=6)

    def enter(self, index, call):
        self.told.append(index)

    def forward_ends(self, failed=False):
        self.told.append("failed" if failed else "ends")
        self.hooks.leave()


@pytest.fixture
def model(tiny_model):
    made = tiny_model(num_hidden_layers=2)
    wants_all_rows(made)  # a forward of its own, once per model
    return made


def guest_in(model):
    guest = Recorder()
    guest.hooks = ForwardHooks(guest, model, decoder_layers(model))
    return guest


@torch.no_grad()
def run(model, cache, *args, **kwargs):
    return model(*(args or (torch.arange(3, 9)[None],)), past_key_values=cache, **kwargs).logits


def test_guest_sees_its_forward_from_beginning_to_end_and_changes_nothing(model, untouched):
    wanted = run(model, DynamicCache())
    with untouched(model):
        guest = guest_in(model)
        guest.hooks.watch_model()
        assert torch.equal(run(model, guest, use_cache=True), wanted)
    assert guest.told == [("begins", ["input_ids", "past_key_values", "use_cache"]), 0, 1, "ends"]


def test_arguments_given_by_place_have_their_names(model):
    guest = guest_in(model)
    guest.hooks.watch_model()
    run(model, guest, torch.arange(3, 9)[None], torch.ones(1, 6, dtype=torch.long))
    assert guest.told[0] == ("begins", ["attention_mask", "input_ids", "past_key_values"])


@pytest.mark.parametrize("when", ["before we watch", "before the call", "within the call"])
def test_hooks_of_others_that_are_called_after_failure_hide_no_error_and_all_are_called(model, monkeypatch, when):
    """Torch walks along the hooks of the module that raised, where none but the last may be removed."""
    guest = guest_in(model)
    called = []
    handles = []

    def register(*_):
        for _ in range(2):
            handles.append(model.register_forward_hook(lambda *_: called.append(1), always_call=True))

    if when == "before we watch":
        register()
    guest.hooks.watch_model()
    if when == "before the call":
        register()
    if when == "within the call":
        handles.append(model.model.norm.register_forward_pre_hook(lambda *_: None))
        handles.append(model.model.embed_tokens.register_forward_hook(register))
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[1].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, guest)
    assert guest.told[-1] == "failed"
    assert len(called) == 2
    assert hooks(model) == len(handles) + (when == "within the call"), "one that could not go in the midst of the walk"
    guest.hooks.watch_model()
    run(model, guest)
    assert guest.told[-1] == "ends"
    assert hooks(model) == len(handles), "without a failure all may go"
    for handle in handles:
        handle.remove()
    assert hooks(model) == 0


def test_of_request_door_over_stock_attention_stays_in_transformers_tables_and_nothing_else(tiny_model):
    model = tiny_model("llama")
    masks = dict(ALL_MASK_ATTENTION_FUNCTIONS)

    def stock_functions():
        functions = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in ALL_ATTENTION_FUNCTIONS}
        return {name: getattr(function, "stock", function) for name, function in functions.items()}

    before = stock_functions()
    asked(model, PIECES)
    assert stock_functions() == before
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == masks
    assert model.config._attn_implementation == "sdpa"

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every public method of `transformers.Cache` gives what stock `DynamicCache` gives, or differs as the docs say.

The oracle is `DynamicCache` filled by the same model. Each call is made on a cache that is empty and on one that holds
a prompt; compared are its result or its exception, the lengths behind it, and the logits of the tokens that come next.
A method that a later transformers adds fails `test_every_public_method_is_judged` until it has a case here.
"""

import copy
import inspect
from functools import cache as remembered
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import Cache, DynamicCache

from hf_blend import BlendCache
from hf_blend.context.sequence_cache import SequenceCache, ShiftCache
from tests.asking import memory, prompt
from tests.conftest import shared_zoo_model

HELD = 100  # tokens of the prompt: some groups of kv_bits are packed
AWAY = TemporaryDirectory()

KINDS = {
    "BlendCache": {},
    "BlendCache kv_bits": {"kv_bits": 8},
    "BlendCache kv_device_map": {"kv_device_map": {1: "cpu", 3: "disk"}, "offload_folder": AWAY.name},
    "SequenceCache": {},
    "ShiftCache": {},
}
NOISE = {kind: 3e-2 if "kv_bits" in kind else 1e-5 for kind in KINDS}  # of logits of size 1; measured 8e-3 and 1e-6
BLENDS, SEQUENCES = ([kind for kind in KINDS if kind.startswith(name)] for name in ("Blend", "S"))


# what is called, by method; None marks a property or a part of the interface that is read
CALLS = {
    "__len__": [len],
    "__bool__": [bool],
    "__deepcopy__": [lambda one: copy.deepcopy(one).get_seq_length()],
    "activate_past_recording": [lambda one: one.activate_past_recording()],
    "batch_repeat_interleave": [lambda one: one.batch_repeat_interleave(2)],
    "batch_select_indices": [lambda one: one.batch_select_indices(torch.tensor([0])),
                             lambda one: one.batch_select_indices([0]), lambda one: one.batch_select_indices((0,)),
                             lambda one: one.batch_select_indices(torch.tensor([True]))],
    "batch_size": [lambda one: one.batch_size],
    "crop": [lambda one: one.crop(0), lambda one: one.crop(-1), lambda one: one.crop(-60),
             lambda one: one.crop(-HELD), lambda one: one.crop(-HELD - 1), lambda one: one.crop(-10 * HELD),
             lambda one: one.crop(torch.tensor(-3))],
    "early_initialization": [lambda one: one.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))],
    "get_conv_state": [lambda one: one.get_conv_state(0)],
    "get_mask_sizes": [lambda one: one.get_mask_sizes(5, 0), lambda one: one.get_mask_sizes(1, 3)],
    "get_max_length": [lambda one: one.get_max_length(), lambda one: one.get_max_length(1)],
    "get_query_offset": [lambda one: one.get_query_offset(), lambda one: one.get_query_offset(3)],
    "get_recurrent_state": [lambda one: one.get_recurrent_state(0)],
    "get_seq_length": [lambda one: one.get_seq_length(), lambda one: one.get_seq_length(3)],
    "has_previous_state": [lambda one: one.has_previous_state(), lambda one: one.has_previous_state(0)],
    "is_compileable": [lambda one: one.is_compileable],
    "is_croppable": [lambda one: one.is_croppable],
    "is_dummy": [lambda one: one.is_dummy],
    "is_initialized": [lambda one: one.is_initialized],
    "is_linear": [lambda one: one.is_linear],
    "is_recording_past": [lambda one: one.is_recording_past(0)],
    "is_sliding": [lambda one: one.is_sliding],
    "offload": [lambda one: one.offload(0)],
    "prefetch": [lambda one: one.prefetch(0)],
    "reorder_cache": [lambda one: one.reorder_cache(torch.tensor([0]))],
    "reset": [lambda one: one.reset()],
    "update_conv_state": [lambda one: one.update_conv_state(torch.ones(1, 2, 3), 0)],
    "update_indexer": [lambda one: one.update_indexer(torch.ones(1, 2, 3), 0)],
    "update_recurrent_state": [lambda one: one.update_recurrent_state(torch.ones(1, 2, 3), 0)],
}  # fmt: skip
UPDATE = {"update"}  # caches take K and V of their own model alone, see test_contract.py, test_sequence_cache.py
OLD = {"get_max_cache_shape", "max_batch_size", "max_cache_len"}  # deprecated names that are gone in 5.23
FAULTY = {"crop", "reset"}  # of stock in 5.17: crop fails on an empty cache, reset keeps the length and zeroes K and V
ROWS = {"batch_repeat_interleave": 2}  # of the tokens that come next

# what differs, by method and kind: what ours gives for each call, empty and filled; docs/extending.md says it in words
DIFFERENCES = {
    ("__bool__", *KINDS): {"empty": [False], "filled": [True]},
    ("batch_size", *BLENDS): {"empty": [-1], "filled": [1]},
    ("is_compileable", *BLENDS): {"empty": [False], "filled": [True]},
}


def model():
    return shared_zoo_model("llama")


@torch.no_grad()
def forward(one, tokens):
    return model()(tokens, past_key_values=one).logits


def made(kind, state):
    if kind == "stock":
        return copy.deepcopy(stock(state))
    makers = {"SequenceCache": SequenceCache, "ShiftCache": ShiftCache}
    make = makers.get(kind.split()[0], lambda model, **settings: BlendCache(model, memory(), **settings))
    return begun(make(model(), **KINDS[kind]), state)


def begun(one, state):
    if state == "filled":
        forward(one, prompt(HELD, 0))
    return one


@remembered
def stock(state):
    return begun(DynamicCache(config=model().config), state)


def result(call, one):
    """What a call gives, or the class of what it raises."""
    try:
        return call(one), None
    except Exception as error:  # compared, whatever it is
        return None, error


def same(got, expected):
    if isinstance(expected, list) and expected and isinstance(expected[0], torch.Tensor):
        shapes = [one.shape for one in expected]  # what was packed before is compared by the logits
        return [one.shape for one in got] == shapes and all(
            torch.equal(one[..., -5:, :], other[..., -5:, :]) for one, other in zip(got, expected, strict=True)
        )
    return type(got) is type(expected) and got == expected


def resets():
    one = made("stock", "filled")
    one.reset()
    return one.get_seq_length() == 0


def public_methods():
    return {name for name, _ in inspect.getmembers(Cache) if not name.startswith("_")}


def test_every_public_method_is_judged():
    assert public_methods() <= CALLS.keys() | OLD | UPDATE, "judge the new methods of transformers.Cache: add a case"
    for name, *kinds in DIFFERENCES:
        assert name in CALLS
        assert {*kinds} <= KINDS.keys()


@pytest.mark.parametrize("name", [name for name, *_ in DIFFERENCES])
def test_what_is_listed_as_difference_is_one(name):
    for given in (given for (method, *_), given in DIFFERENCES.items() if method == name):
        assert given != {state: [call(made("stock", state)) for call in CALLS[name]] for state in given}


@pytest.mark.parametrize("state", ["empty", "filled"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_method_gives_what_stock_gives_or_differs_as_docs_say(kind, state):
    differing = {name: given[state] for (name, *kinds), given in DIFFERENCES.items() if kind in kinds}
    wrong = []
    present = {name for name in CALLS if name.startswith("__") or hasattr(Cache, name)}
    for name in sorted(present - (set() if resets() else FAULTY)):
        for number, call in enumerate(CALLS[name]):
            own = made(kind, state)
            other = made("stock", state)
            (got, error), (expected, stock_error) = result(call, own), result(call, other)
            if name in differing:
                expected = differing[name][number]
            if stock_error is not None or error is not None:
                if not isinstance(error, type(stock_error)):
                    wrong.append((name, number, repr(error), repr(stock_error)))
                continue
            if not same(got, expected):
                wrong.append((name, number, got, expected))
            if type(own.get_seq_length()) is not int or own.get_seq_length() != other.get_seq_length():
                wrong.append((name, number, "length", own.get_seq_length(), other.get_seq_length()))
                continue
            rows = ROWS.get(name, 1)
            logits = [forward(one, prompt(3, 1, rows)) for one in (own, other)]
            apart = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
            if not apart <= NOISE[kind]:
                wrong.append((name, number, "logits", apart))
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_tokens_to_keep_is_refused_by_crop_as_by_stock(kind):
    own = made(kind, "filled")
    with pytest.raises(ValueError, match=rf"crop\(7\).*negative number.*crop\(-{HELD - 7}\)"):
        own.crop(7)
    assert own.get_seq_length() == HELD


@pytest.mark.parametrize("kind", KINDS)
def test_after_reset_another_prompt_is_answered_as_by_new_cache(kind):
    used = made(kind, "filled")
    used.reset()
    asked = prompt(9, 5)
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    new = model().generate(asked, past_key_values=made(kind, "empty"), **greedy)
    assert torch.equal(model().generate(asked, past_key_values=used, **greedy), new)
    assert used.get_seq_length() == 14

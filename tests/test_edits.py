# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that depart from a cache: what both have is found, moved, blended and healed.

The oracle is stock transformers: a plain forward of the new ids.
"""

import copy
import re
from difflib import SequenceMatcher

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_blend import BlendCache
from hf_blend.cache import edits
from hf_blend.cache.edits import Run, common_runs
from hf_blend.prompt.pieces import Prompt
from tests.asking import apart, failing, generated, longrope, memory, noting, states_of
from tests.chat_templates import DOCUMENTS
from tests.conftest import random_ids, shared_tiny_model, skip_in_the_oldest, slow_but
from tests.conftest import shared_zoo_model as zoo_model
from tests.test_turns import small

IDS = st.lists(st.integers(0, 2), max_size=40)


def windows(ids, width):
    return [tuple(ids[start : start + width]) for start in range(len(ids) - width + 1)]


@given(IDS, IDS, st.integers(1, 5))
def test_runs_are_common_whole_and_cover_every_shared_window(held, prompt, least):
    stop = 0
    covered = set()
    for run in common_runs(held, prompt, least):
        assert run.start >= stop
        assert run.tokens >= least
        stop = run.start + run.tokens
        held_stop = run.held + run.tokens
        assert held[run.held : held_stop] == prompt[run.start : stop]
        assert stop == len(prompt) or held[held_stop:][:1] != prompt[stop:][:1]
        covered.update(range(run.start, stop))
    shared = {*windows(held, least)}
    for start, window in enumerate(windows(prompt, least)):
        assert window not in shared or start in covered


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_runs_are_those_of_difflib_where_ids_are_unique(held, one, other):
    first, last = sorted((one, other))
    prompt = [*held[:first], -1, *held[last:]]
    expected = []
    for block in SequenceMatcher(None, held, prompt, autojunk=False).get_matching_blocks():
        if block.size >= 4:
            expected.append(Run(block.b, block.a, block.size))
    assert common_runs(held, prompt, 4) == expected


def test_run_may_come_from_behind_and_repeats_continue_the_run_before():
    first = random_ids(40, 1)
    second = random_ids(40, 2)
    held = [*first, *second, *first]
    prompt = [*second, *first, 0, *first]
    assert common_runs(held, prompt) == [Run(0, 40, 80), Run(81, 0, 40)]
    assert common_runs(held, first[:32]) == []
    assert common_runs([], held) == []


def test_equal_hashes_are_not_equal_ids(monkeypatch):
    held = random_ids(100, 1)
    prompt = random_ids(100, 2)
    prompt[50:90] = held[10:50]
    monkeypatch.setattr(edits, "_hashes", lambda ids, width: np.zeros(len(ids) - width + 1, "uint64"))
    monkeypatch.setattr(edits, "_MOST_ALIKE", 100)
    assert common_runs(held, prompt) == [Run(50, 10, 40)]


def test_text_that_repeats_itself_compares_few_positions(monkeypatch):
    calls = []
    noting(monkeypatch, edits, "shared_tokens", lambda *_: calls.append(1))
    assert len(common_runs([7] * 3000, [*[7] * 40, 8] * 70)) == 70
    assert len(calls) <= edits._MOST_ALIKE * 70


HELD = [1, *random_ids(200, 1)]
MORE = random_ids(20, 9)
EDITS = {
    "dropped": [*HELD[:40], *HELD[60:], *MORE],
    "inserted": [*HELD[:40], *MORE, *HELD[40:], *MORE],
    "exchanged": [*HELD[:20], *HELD[120:], *HELD[60:110], *MORE],
    "first_token": [5, *HELD[1:], *MORE],
    "cut_at_end": [*HELD[:30], *HELD[50:180]],
    "shortened": [*HELD[:40], *MORE],
}
MOVED = {"dropped": 141, "inserted": 161, "exchanged": 131, "first_token": 200, "cut_at_end": 129}
KINDS = "llama deepseek_v3 gpt_neox glm4 cohere bloom gptj phi3 granitemoe".split()
NOTHING = {"recompute_ratio": 0.0, "selector": "none", "allow_unverified": True}
ALL = {"recompute_ratio": 1.0, "allow_unverified": True}
LOGITS = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}


@torch.no_grad()
def holding(model, ids=(HELD,), **settings):
    """A cache with these tokens."""
    cache = BlendCache(model, memory(), **{"edits": "blend", **settings})
    model(torch.tensor(ids), past_key_values=cache, logits_to_keep=1)
    return cache


def continued(cache, edit, **ways):
    """The logits of the token behind a prompt, which the cache may have in part."""
    inputs = cache.expect(None, [Prompt(tuple(EDITS[edit]))])
    return generated(cache.model, inputs, cache, **LOGITS, **ways).logits[0]


def edited(model, edit, **settings):
    """A cache that held what was edited, behind the edited prompt, and the logits of the token behind that."""
    cache = holding(model, **settings)
    return cache, continued(cache, edit)


@torch.no_grad()
def stock(model, ids):
    """The plain cache of a prompt, and the logits of the token behind it."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([ids]), past_key_values=cache).logits[:, -1]
    return cache, logits


@torch.no_grad()
def last_logits(cache, edit):
    """The logits of the token behind a prompt, whose last token is computed again."""
    cache.crop(-1)
    return cache.model(torch.tensor([EDITS[edit][-1:]]), past_key_values=cache).logits[:, -1]


def off(got, expected):
    return apart(got, expected) / float(expected.abs().max())


def check_close(got, expected, allowed=1e-5):
    assert off(got, expected) < allowed


def check_states(cache, full, tokens=None):
    """K and V of the first tokens are those of stock."""
    for states, expected in zip(states_of(cache), states_of(full), strict=True):
        check_close(states[:, :, :tokens], expected[:, :, :tokens])


@pytest.mark.parametrize("kind", slow_but(*KINDS[:3], among=KINDS))
@pytest.mark.parametrize("edit", ["exchanged", "first_token"])
def test_moved_keys_are_those_of_their_new_positions(kind, edit):
    """K and V of layer 0 depend on the token and its position alone; what is not rotated is what the cache had."""
    model = zoo_model(kind)
    cache = holding(model, **NOTHING)
    fixed = ["values" if style.slot == 0 else "keys" for style in cache.state.info.styles]
    before = copy.deepcopy(cache.layers)
    continued(cache, edit)
    assert cache.report.moved_tokens == MOVED[edit]
    expected, _ = stock(model, EDITS[edit])
    for name in ("keys", "values"):
        check_close(getattr(cache.layers[0], name), getattr(expected.layers[0], name))
    shared = cache.report.past_tokens
    for run in common_runs(HELD, EDITS[edit][shared:-1]):
        start = shared + run.start
        new = slice(start, start + run.tokens)
        old = slice(run.held, run.held + run.tokens)
        for layer, held, name in zip(cache.layers, before, fixed, strict=True):
            moved = getattr(layer, name)[:, :, new]
            assert torch.equal(moved, getattr(held, name)[:, :, old])


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("settings", [{"edits": "compute"}, ALL, {"recompute_ratio": 0.1}])
def test_computed_recomputed_and_healed_are_those_of_full_prefill(edit, settings):
    model = shared_tiny_model()
    expected, logits = stock(model, EDITS[edit])
    cache, got = edited(model, edit, **settings)
    moved = 0 if "edits" in settings else MOVED.get(edit, 0)
    assert cache.report.moved_tokens == moved
    assert cache.report.past_tokens == [a == b for a, b in zip(HELD, EDITS[edit], strict=False)].index(False)
    is_blended = moved > 0 and settings is not ALL
    assert is_blended == (off(got, logits) > 1e-3)
    if is_blended:
        assert len(cache.report.chosen_columns[0]) < moved
    cache.heal()
    check_states(cache, expected)


@pytest.mark.parametrize("kind", slow_but(*KINDS[1:3], among=KINDS))
def test_models_of_all_kinds_recompute_and_heal(kind):
    model = zoo_model(kind)
    _, logits = stock(model, EDITS["dropped"])
    _, got = edited(model, "dropped", **ALL)
    check_close(got, logits, 1e-4)
    cache, got = edited(model, "dropped", recompute_ratio=0.1, allow_unverified=True)
    assert off(got, logits) > 1e-4
    assert cache.report.moved_tokens == MOVED["dropped"]
    cache.heal()
    check_close(last_logits(cache, "dropped"), logits, 1e-4)


STATEFUL = r"layer 0 is a .*window, a state"
COMPUTED = [("gemma3_text", STATEFUL), ("falcon_h1", STATEFUL), ("llama", "rotary frequencies differ")]


@pytest.mark.parametrize("edit", ["dropped", "shortened"])
@pytest.mark.parametrize(("kind", "reason"), [*COMPUTED, pytest.param("jamba", STATEFUL, marks=pytest.mark.slow)])
def test_what_cannot_be_moved_is_computed_by_name(kind, reason, edit):
    config = {"rope_parameters": longrope(100)} if kind == "llama" else {}
    model = zoo_model(kind, **config)
    _, logits = stock(model, EDITS[edit])
    cache, got = edited(model, edit, **NOTHING)
    check_close(got, logits, 1e-4)
    assert cache.report.moved_tokens == 0
    assert re.search(reason, cache.report.fallback_reason)
    assert cache.report.fallback_reason in str(cache.report)


def test_batch_is_computed_with_the_reason():
    model = shared_tiny_model()
    _, expected = stock(model, EDITS["dropped"])
    cache = holding(model, [HELD, HELD[::-1]])
    inputs = cache.expect(None, [Prompt(tuple(EDITS["dropped"]))] * 2)
    (logits,) = generated(model, inputs, cache, **LOGITS).logits
    check_close(logits, expected.expand(2, -1))
    assert "holds 2 requests" in cache.report.fallback_reason


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_states_are_moved_and_healed(bits):
    model = shared_tiny_model()
    _, computed = edited(model, "dropped", kv_bits=bits, edits="compute")
    _, got = edited(model, "dropped", kv_bits=bits, **ALL)
    check_close(got, computed)
    cache, moved = edited(model, "dropped", kv_bits=bits, **NOTHING)
    assert cache.report.moved_tokens == MOVED["dropped"]
    cache.heal()
    fresh = holding(model, [EDITS["dropped"]], kv_bits=bits)
    expected = last_logits(fresh, "dropped")
    check_close(last_logits(cache, "dropped"), expected, 0.5 * off(moved, expected))


def test_prompt_that_begins_with_what_is_moved_is_not_exact():
    model, tokenizer = small()
    text = "\n\n".join(DOCUMENTS)
    held = tokenizer(f"First. {text}", add_special_tokens=False)["input_ids"]
    cache = holding(model, [held], **ALL)
    inputs = cache.inputs_from_text(tokenizer, text, add_special_tokens=False)
    (logits,) = generated(model, inputs, cache, **LOGITS).logits
    ids = inputs["input_ids"][0].tolist()
    check_close(logits, stock(model, ids)[1])
    assert cache.report.past_tokens == cache.report.exact_tokens == 0
    assert 33 < cache.report.moved_tokens < len(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_moved(tiny_model, dtype):
    model = tiny_model().to(dtype)
    _, computed = edited(model, "exchanged", edits="compute")
    for settings, allowed in ((ALL, 0.02), (NOTHING, 0.5)):
        cache, got = edited(model, "exchanged", **settings)
        check_close(got, computed, allowed)
        assert cache.report.moved_tokens == MOVED["exchanged"]
        assert cache.report.refused_chunks == 0


def test_prompt_in_parts_moves_the_same():
    skip_in_the_oldest("generate gives a prompt in parts otherwise")
    for settings, allowed in ((ALL, 1e-5), (NOTHING, 0.05)):
        _, expected = edited(shared_tiny_model(), "exchanged", **settings)
        cache = holding(shared_tiny_model(), **settings)
        check_close(continued(cache, "exchanged", prefill_chunk_size=50), expected, allowed)
        assert cache.report.moved_tokens == MOVED["exchanged"] - 2, "of each part the last token is computed"


def test_failed_forward_can_be_run_again():
    model = shared_tiny_model()
    _, logits = stock(model, EDITS["dropped"])
    cache = holding(model, **ALL)
    with failing(model.model.layers[2].mlp), pytest.raises(ZeroDivisionError):
        continued(cache, "dropped")
    assert cache.get_seq_length() == 40
    check_close(continued(cache, "dropped"), logits)


def test_states_of_another_model_are_not_moved(tiny_model):
    """The model changes between the prompt and its forward, of which nothing is cached."""
    model = tiny_model()
    ids = EDITS["first_token"]
    cache = holding(model, **NOTHING)
    inputs = cache.expect(None, [Prompt(tuple(ids))])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    (logits,) = generated(model, inputs, cache, **LOGITS).logits
    check_close(logits, stock(model, ids)[1])
    assert cache.report.moved_tokens == 0


@pytest.mark.parametrize(("edits", "computed", "moved"), [("blend", 0, 141), ("compute", 1, 0)])
def test_stored_chunk_leaves_its_tokens_to_what_is_moved(edits, computed, moved):
    model = shared_tiny_model()
    ids = EDITS["dropped"]
    cache = holding(model, edits=edits, **ALL)
    inputs = cache.inputs(None, prefix=ids[:80], chunks=[ids[80:120]], question=ids[120:])
    generated(model, inputs, cache, max_new_tokens=1)
    assert cache.report.computed_chunks == computed
    assert cache.report.moved_tokens == moved
    assert cache.report.reusable_tokens == (moved or 40)

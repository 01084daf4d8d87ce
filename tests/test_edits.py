# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that depart from a cache: what both have is found, moved, blended and healed.

The oracle is stock transformers: a plain forward of the new ids.
"""

from difflib import SequenceMatcher

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_blend import BlendCache, ConfigError
from hf_blend.cache import edits
from hf_blend.cache.edits import Run, common_runs
from hf_blend.prompt.pieces import Prompt
from tests.asking import apart, failing, generated, memory
from tests.chat_templates import DOCUMENTS
from tests.conftest import random_ids, shared_tiny_model, slow_but
from tests.conftest import shared_zoo_model as zoo_model
from tests.test_turns import Chat, small

IDS = st.lists(st.integers(0, 2), max_size=40)


def windows(ids, width):
    return [tuple(ids[start : start + width]) for start in range(len(ids) - width + 1)]


@given(IDS, IDS, st.integers(1, 5))
def test_runs_are_common_whole_and_cover_every_shared_window(held, prompt, least):
    runs = common_runs(held, prompt, least)
    shared = {*windows(held, least)}
    stop = 0
    for run in runs:
        assert run.start >= stop
        assert run.tokens >= least
        assert held[run.held : run.held + run.tokens] == prompt[run.start : run.start + run.tokens]
        stop = run.start + run.tokens
        assert held[run.held + run.tokens :][:1] != prompt[stop:][:1] or stop == len(prompt)
    covered = {position for run in runs for position in range(run.start, run.start + run.tokens)}
    for start, window in enumerate(windows(prompt, least)):
        assert window not in shared or start in covered


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60), st.data())
def test_runs_are_those_of_difflib_where_ids_are_unique(held, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))))
    prompt = [*held[:start], -1, *held[stop:]]
    blocks = SequenceMatcher(None, held, prompt, autojunk=False).get_matching_blocks()
    expected = [Run(block.b, block.a, block.size) for block in blocks if block.size >= 4]
    assert common_runs(held, prompt, 4) == expected


def test_run_may_come_from_behind_and_repeats_continue_the_run_before():
    first, second = random_ids(40, 1), random_ids(40, 2)
    held = [*first, *second, *first]
    assert common_runs(held, [*second, *first, 0, *first]) == [Run(0, 40, 80), Run(81, 0, 40)]
    assert common_runs(held, first[:32]) == common_runs([], held) == []


def test_equal_hashes_are_not_equal_ids(monkeypatch):
    held, prompt = random_ids(100, 1), random_ids(100, 2)
    prompt[50:90] = held[10:50]
    monkeypatch.setattr(edits, "_hashes", lambda ids, width: edits.np.zeros(len(ids) - width + 1, "uint64"))
    monkeypatch.setattr(edits, "_MOST_ALIKE", 100)
    assert common_runs(held, prompt) == [Run(50, 10, 40)]


def test_text_that_repeats_itself_compares_few_positions(monkeypatch):
    calls = []
    agreement = edits._agreement
    monkeypatch.setattr(edits, "_agreement", lambda *pair: calls.append(1) or agreement(*pair))
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
    "nothing_common": [1, *random_ids(100, 7)],
}  # fmt: skip
MOVED = {
    "dropped": 141,
    "inserted": 161,
    "exchanged": 131,
    "first_token": 200,
    "begins_later": 141,
    "cut_at_end": 129,
    "nothing_common": 0,
}
KINDS = ("llama", "deepseek_v3", "gpt_neox", "glm4", "cohere", "bloom", "gptj", "phi3", "granitemoe")
NOTHING = {"recompute_ratio": 0.0, "selector": "none", "allow_unverified": True}
ALL = {"recompute_ratio": 1.0, "allow_unverified": True}


@torch.no_grad()
def holding(model, ids, **settings):
    """A cache with these tokens."""
    cache = BlendCache(model, memory(), **{"edits": "blend", **settings})
    model(torch.tensor(ids), past_key_values=cache, logits_to_keep=1)
    return cache


def continued(model, cache, ids, **ways):
    """The logits of the token behind a prompt, which the cache may have in part."""
    inputs = cache.expect(None, [Prompt(tuple(ids))])
    ways = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, **ways}
    return generated(model, inputs, cache, **ways).logits[0]


@torch.no_grad()
def stock(model, ids):
    """The plain cache of a prompt, and the logits of the token behind it."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([ids]), past_key_values=cache).logits[:, -1]
    return cache, logits


def off(got, expected):
    return apart(got, expected) / float(expected.abs().max())


@pytest.mark.parametrize("kind", slow_but(*KINDS[:3], among=KINDS))
@pytest.mark.parametrize("edit", ["exchanged", "first_token"])
def test_moved_keys_are_those_of_their_new_positions(kind, edit):
    """K and V of layer 0 depend on the token and its position alone; what is not rotated is what the cache had."""
    model, ids = zoo_model(kind), EDITS[edit]
    cache = holding(model, [HELD], **NOTHING)
    fixed = ["values" if style.slot == 0 else "keys" for style in cache.state.info.styles]
    before = [getattr(layer, name).clone() for layer, name in zip(cache.layers, fixed, strict=True)]
    continued(model, cache, ids)
    assert cache.report.moved_tokens == MOVED[edit]
    expected, _ = stock(model, ids)
    assert off(cache.layers[0].keys, expected.layers[0].keys) < 1e-5
    assert off(cache.layers[0].values, expected.layers[0].values) < 1e-5
    shared = cache.report.past_tokens
    for run in common_runs(HELD, ids[shared:-1]):
        new, old = (slice(first, first + run.tokens) for first in (shared + run.start, run.held))
        for layer, name, held in zip(cache.layers, fixed, before, strict=True):
            assert torch.equal(getattr(layer, name)[:, :, new], held[:, :, old])


@pytest.mark.parametrize("edit", EDITS)
def test_computed_recomputed_and_healed_are_those_of_full_prefill(edit):
    model, ids = shared_tiny_model(), EDITS[edit]
    expected, logits = stock(model, ids)
    for settings in ({"edits": "compute"}, ALL, {"recompute_ratio": 0.1}):
        cache = holding(model, [HELD], **settings)
        got = continued(model, cache, ids)
        is_blended = settings.get("recompute_ratio") == 0.1 and MOVED[edit] > 0
        assert cache.report.moved_tokens == (0 if "edits" in settings else MOVED[edit])
        assert is_blended == (off(got, logits) > 1e-3)
        assert is_blended == (len(cache.report.chosen_columns[0]) < MOVED[edit] if is_blended else False)
        cache.heal()
        for layer, full in zip(cache.layers, expected.layers, strict=True):
            assert off(layer.keys, full.keys) < 1e-5
            assert off(layer.values, full.values) < 1e-5


@pytest.mark.parametrize("kind", slow_but(*KINDS[1:3], among=KINDS))
def test_models_of_all_kinds_recompute_and_heal(kind):
    model, ids = zoo_model(kind), EDITS["dropped"]
    _, logits = stock(model, ids)
    assert off(continued(model, holding(model, [HELD], **ALL), ids), logits) < 1e-4
    cache = holding(model, [HELD], recompute_ratio=0.1, allow_unverified=True)
    assert off(continued(model, cache, ids), logits) > 1e-4
    assert cache.report.moved_tokens == MOVED["dropped"]
    cache.heal()
    cache.crop(-1)
    assert off(model(torch.tensor([ids[-1:]]), past_key_values=cache).logits[:, -1], logits) < 1e-4


@pytest.mark.parametrize("kind", slow_but("gemma3_text", "falcon_h1", among=("gemma3_text", "falcon_h1", "jamba")))
def test_windows_and_states_are_computed_by_name(kind):
    model, ids = zoo_model(kind), EDITS["dropped"]
    cache = holding(model, [HELD], **NOTHING)
    assert off(continued(model, cache, ids), stock(model, ids)[1]) < 1e-4
    assert cache.report.moved_tokens == 0
    assert "layer 0 is a" in cache.report.fallback_reason
    assert "window, a state" in str(cache.report)


def test_batch_is_computed_with_the_reason():
    model, ids = shared_tiny_model(), EDITS["dropped"]
    cache = holding(model, [HELD, HELD[::-1]])
    inputs = cache.expect(None, [Prompt(tuple(ids))] * 2)
    logits = generated(model, inputs, cache, output_logits=True, return_dict_in_generate=True).logits[0]
    assert off(logits, stock(model, ids)[1].expand(2, -1)) < 1e-5
    assert "holds 2 requests" in cache.report.fallback_reason


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_states_are_moved_and_healed(bits):
    model, ids = shared_tiny_model(), EDITS["dropped"]
    computed = continued(model, holding(model, [HELD], kv_bits=bits, edits="compute"), ids)
    cache = holding(model, [HELD], kv_bits=bits, **ALL)
    assert off(continued(model, cache, ids), computed) < 1e-5
    cache = holding(model, [HELD], kv_bits=bits, **NOTHING)
    moved = continued(model, cache, ids)
    assert cache.report.moved_tokens == MOVED["dropped"]
    cache.heal()
    cache.crop(-1)
    with torch.no_grad():
        healed = model(torch.tensor([ids[-1:]]), past_key_values=cache).logits[:, -1]
    fresh = holding(model, [ids[:-1]], kv_bits=bits)
    with torch.no_grad():
        expected = model(torch.tensor([ids[-1:]]), past_key_values=fresh).logits[:, -1]
    assert off(healed, expected) < 0.5 * off(moved, expected)


def test_prompt_that_begins_with_what_is_moved_is_not_exact():
    model, tokenizer = small()
    text = "\n\n".join(DOCUMENTS)
    held, ids = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (f"First. {text}", text))
    cache = holding(model, [held], **ALL)
    inputs = cache.inputs_from_text(tokenizer, text, add_special_tokens=False)
    ways = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    assert off(generated(model, inputs, cache, **ways).logits[0], stock(model, ids)[1]) < 1e-5
    assert cache.report.past_tokens == cache.report.exact_tokens == 0
    assert 33 < cache.report.moved_tokens < len(ids)


def test_half_precision_is_moved(tiny_model):
    model, ids = tiny_model().bfloat16(), EDITS["exchanged"]
    computed = continued(model, holding(model, [HELD], edits="compute"), ids)
    for settings, allowed in ((ALL, 0.02), (NOTHING, 0.5)):
        cache = holding(model, [HELD], **settings)
        assert off(continued(model, cache, ids), computed) < allowed
        assert cache.report.moved_tokens == MOVED["exchanged"]
        assert cache.report.refused_chunks == 0


def test_prompt_in_parts_moves_the_same():
    model, ids = shared_tiny_model(), EDITS["exchanged"]
    for settings in (ALL, NOTHING):
        whole, parts = (holding(model, [HELD], **settings) for _ in range(2))
        expected = continued(model, whole, ids)
        assert off(continued(model, parts, ids, prefill_chunk_size=50), expected) < (1e-5 if settings is ALL else 0.05)
        assert parts.report.moved_tokens == MOVED["exchanged"] - 2, "of each part the last token is computed"


def test_failed_forward_can_be_run_again():
    model, ids = shared_tiny_model(), EDITS["dropped"]
    cache = holding(model, [HELD], **ALL)
    with failing(model.model.layers[2].mlp), pytest.raises(ZeroDivisionError):
        continued(model, cache, ids)
    assert cache.get_seq_length() == 40
    assert off(continued(model, cache, ids), stock(model, ids)[1]) < 1e-5


def test_states_of_another_model_are_not_moved(tiny_model):
    """The model changes between the prompt and its forward, of which nothing is cached."""
    model, ids = tiny_model(), EDITS["first_token"]
    cache = holding(model, [HELD], **NOTHING)
    inputs = cache.expect(None, [Prompt(tuple(ids))])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    ways = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    assert off(generated(model, inputs, cache, **ways).logits[0], stock(model, ids)[1]) < 1e-5
    assert cache.report.moved_tokens == 0


def test_stored_chunk_leaves_its_tokens_to_what_is_moved():
    model, ids = shared_tiny_model(), EDITS["dropped"]
    for settings in ({}, {"edits": "compute"}):
        cache = holding(model, [HELD], **ALL, **settings)
        inputs = cache.inputs(None, prefix=ids[:80], chunks=[ids[80:120]], question=ids[120:])
        generated(model, inputs, cache, max_new_tokens=1)
        assert cache.report.computed_chunks == len(settings)
        assert cache.report.moved_tokens == (0 if settings else MOVED["dropped"])
        assert cache.report.reusable_tokens == (40 if settings else MOVED["dropped"])


def test_thoughts_that_the_template_strips_are_moved_over():
    model, tokenizer = small(template="qwen3")
    chat = Chat(model, tokenizer, "qwen3", edits="blend")
    chat.ask("Who is it? " * 5, "<think>\nHm, hm.\n</think>\n\n" + "It is Marta, and she keeps bees. " * 5)
    chat.cache.heal()
    chat.ask("Where?")
    assert chat.cache.report.moved_tokens > 33


def test_edits_is_checked():
    with pytest.raises(ConfigError, match="'keep', expected one of compute, blend"):
        BlendCache(shared_tiny_model(), memory(), edits="keep")

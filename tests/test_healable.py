# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What `BlendCache.heal` refuses by name, and what it leaves as it was."""

import copy
import threading

import pytest
import torch

from hf_blend import BlendCache, observer
from hf_blend.cache import healing
from hf_blend.context.self_extend import self_extend
from hf_blend.errors import ConfigError, PromptError, UnsupportedModelError
from hf_blend.hybrids.mixer import ActiveRows, Mixer, MixerPass, Projection
from hf_blend.prompt.pieces import TextPrompt
from tests.asking import failing, generated, memory, prepared, prompt
from tests.conftest import random_pieces, shared_zoo_model, skip_in_the_oldest
from tests.test_healing import ANSWER, REUSED, blended, kv, off


def tiny(kind, **config):
    if kind == "deepseek_v32":
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    return shared_zoo_model(kind, **config)


PAIR = random_pieces(), random_pieces(seed=3)
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def states(cache):
    """Copies of K and V of all layers, and of the keys of indexers."""
    beside = [layer.indexer_keys for layer in cache.layers if getattr(layer, "indexer_keys", None) is not None]
    return [tensor.clone() for tensor in (*(states for pair in kv(cache) for states in pair), *beside)]


def refused(cache, words, error=ConfigError, history=None):
    """Let healing be refused, with these words, and nothing be written."""
    before = states(cache)
    with pytest.raises(error, match=words):
        cache.heal(history=history)
    assert all(map(torch.equal, states(cache), before))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("llama", None), ("llama", 8), ("llama", 4), ("mistral", None), ("falcon_h1", None), ("deepseek_v32", 8)],
)
def test_other_ids_than_those_of_tokens_are_refused_before_they_are_written(kind, bits):
    settings = {"mistral": {"sliding_window": 16}, "deepseek_v32": {"index_topk": 512}}.get(kind, {})
    model = tiny(kind, **settings)
    cache, ids = blended(model, kv_bits=bits)
    other = ids.clone()
    other[0, -4] = (ids[0, -4] + 7) % 90 + 3
    column = ids.shape[1] - 4
    refused(cache, f"at column {column} of row 0 K and V of layer 0 are off by", PromptError, other)
    assert cache.heal(history=ids) == 0
    assert bits or off(model, cache, ids[:, :-1]) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
)
def test_rows_that_were_changed_are_refused(change):
    cache, _ = blended(tiny("llama"), *PAIR)
    change(cache)
    refused(cache, "rows were selected")


def test_beams_are_refused_by_name():
    model = tiny("llama")
    cache, inputs = prepared(model, random_pieces(), **REUSED)
    ids = generated(model, inputs, cache, num_beams=3, **ANSWER)
    refused(cache, "as beam search does", history=ids)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("index", [[1], [False, True]])
def test_next_turn_keeps_nothing_of_another_row(beams, index):
    model = tiny("llama")
    cache, ids = blended(model, *PAIR)
    if beams > 1:
        cache.batch_repeat_interleave(2)
        index = [3] if index == [1] else [False, False, False, True]
    rows = copy.deepcopy(cache.prompts.beginnings)
    cache.batch_select_indices(torch.tensor(index))
    own, other = (TextPrompt(tuple(row.tolist()), ()) for row in (ids[1], ids[0]))
    assert cache.prompts.beginnings == rows[1:]
    assert len(cache.turns.keep_beginning(cache, [own])[1].rows()[0]) == len(rows[1])
    cache.turns.keep_beginning(cache, [other])
    shared = [*map(torch.equal, ids[0], ids[1])].index(False)
    assert cache.get_seq_length() == shared


@torch.no_grad()
def test_tokens_at_grouped_positions_are_refused():
    model = tiny("llama")
    cache, ids = blended(model)
    with self_extend(model, trained_tokens=16, max_tokens=400):
        refused(cache, "inside self_extend", UnsupportedModelError, ids)
        model(ids[:, -1:], past_key_values=cache)
    refused(cache, "have seen self_extend", history=ids)
    cache.reset()
    assert not cache.kv.frontier.obstacles


@pytest.mark.parametrize("bits", [8, 4])
def test_small_calls_reach_end_of_packed_groups(bits):
    cache, ids = blended(tiny("llama"), kv_bits=bits)
    left = [cache.heal(8, ids) for _ in range(4)]
    assert left[-1] == 0, left


def test_failure_restores_indexer_beside_packed_tokens():
    model = tiny("deepseek_v32", index_topk=512)
    cache, ids = blended(model, kv_bits=8)
    before = states(cache)
    with failing(model.model.layers[-1].mlp), pytest.raises(ZeroDivisionError):
        cache.heal(history=ids)
    assert all(map(torch.equal, states(cache), before))
    assert cache.heal(history=ids) == 0


def test_mixer_pass_is_not_disturbed_by_forward_of_another_thread():
    linear = torch.nn.Linear(4, 4)
    mixer = torch.nn.Sequential(linear)
    of_linear = Projection(linear, 4, ((slice(0, 4), slice(0, 4)),), reads_hidden=True)
    passed = MixerPass(Mixer(mixer, (of_linear,), 4), None, ActiveRows(None, 5, {}))
    passed.enter()
    passed._is_inside = True
    hidden = torch.randn(1, 5, 4)
    before = linear.forward

    def forward_beside(states):
        linear.forward = before
        thread = threading.Thread(target=linear, args=(torch.randn(1, 3, 4),))
        thread.start()
        thread.join()
        return before(states)

    linear.forward = forward_beside
    output = linear(hidden)
    passed.leave()
    assert torch.equal(passed.states, output)


@torch.no_grad()
def test_crop_shortens_what_is_known_of_prompt():
    model = tiny("llama")
    cache, ids = blended(model)
    cache.crop(-40)
    cut = ids[:, : cache.get_seq_length()]
    assert cache.prompts.beginnings == (tuple(cut[0].tolist()),)
    for token in (7, 8, 9):
        model(torch.tensor([[token]]), past_key_values=cache)
    longer = torch.cat([cut, torch.tensor([[7, 8, 9, 10]])], 1)
    output = generated(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, cache, **ANSWER)
    assert cache.heal(history=output) == 0
    assert off(model, cache, output[:, :-1]) < 1e-5


def test_crop_of_padded_rows_leaves_no_id_that_may_be_gone():
    cache, _ = blended(tiny("llama"), random_pieces(), random_pieces((9,), seed=5))
    width = max(map(len, cache.prompts.beginnings))
    rows = cache.prompts.beginnings
    cache.crop(width - 5 - cache.get_seq_length())  # the answer, and five tokens
    for row, left in zip(rows, cache.prompts.beginnings, strict=True):
        assert left == row[: len(left)]
        assert len(left) <= len(row) - 5


@pytest.mark.parametrize("healed", [0, 30])
def test_state_that_records_its_past_is_healed_with_it(healed):
    model = tiny("lfm2")
    cache, ids = blended(model)
    if healed:
        cache.heal(healed, ids)
    cache.activate_past_recording()
    assert cache.heal(history=ids) == 0
    cache.crop(-3)
    assert off(model, cache, ids[:, :-4]) < 1e-5


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_frequencies_that_depend_on_length_are_refused_beyond_trained_one(rope):
    longest = 512 if rope is LONGROPE else 64
    model = tiny("llama", rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=longest)
    cache, ids = blended(model)
    refused(cache, "rotary frequencies", history=ids)
    short, ids = blended(model, random_pieces((20,)))
    assert short.get_seq_length() < 64
    assert short.heal(history=ids) == 0
    assert off(model, short, ids[:, :-1]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "bits"), [("llama", None), ("llama", 8), ("gemma3_text", None), ("falcon_h1", None), ("deepseek_v32", 8)]
)
def test_cache_of_inference_mode_is_healed_outside_of_it(kind, bits):
    model = tiny(kind, **({"index_topk": 512} if kind == "deepseek_v32" else {}))
    with torch.inference_mode():
        cache, ids = blended(model, kv_bits=bits)
        before = states(cache)
    with failing(model.model.layers[-1]), pytest.raises(ZeroDivisionError):
        cache.heal(history=ids)
    assert all(map(torch.equal, states(cache), before))
    assert cache.heal(history=ids) == 0
    with torch.inference_mode():
        assert bits or off(model, cache, ids[:, :-1]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("logits_to_keep", [0, 1])
def test_padding_of_later_turn_is_refused(logits_to_keep):
    model = tiny("llama")
    cache, ids = blended(model, *PAIR)
    turn = prompt(6, rows=2)
    mask = torch.ones(2, cache.get_seq_length() + 6)
    mask[1, -6:-3] = 0
    model(turn, attention_mask=mask, past_key_values=cache, logits_to_keep=logits_to_keep)
    refused(cache, "hold padding", history=torch.cat([ids[:, :-1], turn], 1))


@torch.no_grad()
def test_padding_of_turn_that_was_not_seen_is_refused():
    model = tiny("llama")
    cache, ids = blended(model, *PAIR)
    turn = prompt(6, rows=2)
    model.model(turn, past_key_values=cache)  # past the hooks of the whole model
    refused(cache, "mask was not seen", history=torch.cat([ids[:, :-1], turn], 1))
    alone, ids = blended(model)
    model.model(turn[:1], past_key_values=alone)
    ids = torch.cat([ids[:, :-1], turn[:1]], 1)
    assert alone.heal(history=ids) == 0
    assert off(model, alone, ids) < 1e-5


@torch.no_grad()
def test_failed_padded_prompt_leaves_no_obstacle():
    model = tiny("llama")
    cache, ids = blended(model, *PAIR)
    chunks = PAIR[0]["chunks"], PAIR[1]["chunks"][:1]  # are stored: nothing fails before the prompt itself
    inputs = cache.inputs(None, chunks=chunks, question=[row["question"] for row in PAIR], history=ids)
    with failing(model.model.layers[1]), pytest.raises(ZeroDivisionError):
        generated(model, inputs, cache, **ANSWER)
    assert cache.heal(history=ids) == 0


@pytest.mark.parametrize("change", ["weights", "mode"])
def test_model_that_is_another_one_behind_block_leaves_no_half_of_it(change, monkeypatch, tiny_model):
    monkeypatch.setattr(healing, "BLOCK_TOKENS", 32)
    model = tiny_model()
    cache, ids = blended(model)
    before = states(cache)
    calls = []

    @observer
    def switch(module, *_):
        calls.append(module)
        if len(calls) == 2 and change == "weights":
            with torch.no_grad():
                module.mlp.down_proj.weight.mul_(1.5)
        elif len(calls) == 2:
            model.train()

    handle = model.model.layers[0].register_forward_hook(switch)
    with pytest.raises(ConfigError, match="other weights" if change == "weights" else "training mode"):
        cache.heal(history=ids)
    handle.remove()
    column = cache.kv.frontier.column
    assert column == 37
    assert all(map(torch.equal, (now[:, :, column:] for now in states(cache)), (was[:, :, column:] for was in before)))


def test_cache_with_tokens_is_true_and_empty_one_false():
    model = tiny("llama")
    cache = BlendCache(model, memory())
    assert bool(cache) is False
    generated(model, {"input_ids": prompt(9), "attention_mask": torch.ones(1, 9)}, cache)
    assert bool(cache) is True


def test_fewer_tokens_than_none_are_refused():
    with pytest.raises(ConfigError, match=r"heal\(-5\) was called"):
        BlendCache(tiny("llama"), memory()).heal(-5)

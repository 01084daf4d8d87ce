# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A `BlendCache` that was saved and loaded continues as if there had been no file between; other files are refused.

The oracle is stock transformers, and a cache that was not saved.
"""

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import BlendCache, ConfigError, StoreError
from hf_blend.cache.session import KIND
from tests.asking import generated, memory, prompt
from tests.conftest import random_pieces, shared_zoo_model, skip_in_the_oldest, slow_but
from tests.forging import SESSIONS, forged, taken_apart

CASES = [
    ("llama", 8), ("gemma3_text", None), ("qwen3_next", 8), ("falcon_h1", None), ("minimax", None),
    ("deepseek_v32", 8), ("jamba", None), ("lfm2", None),
]  # fmt: skip
REUSED = {"recompute_ratio": 0.0, "selector": "none", "allow_unverified": True}


def held(kind="llama", **settings):
    """A cache behind a blended prompt and an answer, and all ids."""
    model = shared_zoo_model(kind)
    cache = BlendCache(model, memory(), **REUSED | settings)
    return cache, generated(model, cache.inputs(None, **random_pieces((40, 40))), cache)


def states(cache):
    found = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "state"):
            for name, tensor in layer.state().items():
                found[index, name] = tensor
    return found


def next_turn(cache, output):
    """The ids of a further turn."""
    return generated(cache.model, cache.inputs(None, chunks=[], question=[5, 6, 7], prefix=output[0]), cache)


@pytest.mark.parametrize(("kind", "bits"), slow_but(*CASES[:6], among=CASES))
def test_loaded_cache_continues_as_saved_one(kind, bits, tmp_path, untouched):
    if kind == "deepseek_v32":
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    cache, output = held(kind, kv_bits=bits)
    model = cache.model
    with untouched(model):
        size = cache.save(tmp_path / "chat")
        again = BlendCache.load(model, memory(), tmp_path / "chat", kv_bits=bits, **REUSED)
    assert size == (tmp_path / "chat").stat().st_size
    assert states(again).keys() == states(cache).keys()
    for name, tensor in states(cache).items():
        assert torch.equal(states(again)[name], tensor), name
    assert again.get_seq_length() == cache.get_seq_length() == output.shape[1] - 1
    if kind == "jamba":  # whose code cannot continue a state with several tokens
        with torch.no_grad():
            step = [model(torch.tensor([[9]]), past_key_values=one).logits for one in (cache, again)]
        assert torch.equal(*step)
        return
    assert torch.equal(next_turn(again, output), next_turn(cache, output))
    assert again.heal(0) == cache.heal(0) > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_past_that_was_recorded_for_assisted_decoding_is_not_saved(kind, tmp_path):
    model = shared_zoo_model(kind)
    cache = BlendCache(model, memory(), recompute_ratio=1.0, allow_unverified=True)
    output = generated(model, cache.inputs(None, **random_pieces((40, 40))), cache)
    cache.activate_past_recording()
    drafted = prompt(9)
    with torch.no_grad():
        model(torch.cat([output[:, -1:], drafted], 1), past_key_values=cache)
    output = torch.cat([output, drafted, prompt(1)], 1)
    cache.save(tmp_path / "chat")
    again = BlendCache.load(model, memory(), tmp_path / "chat", **REUSED)
    whole = torch.cat([output, torch.tensor([[5, 6, 7]])], 1)
    expected = generated(model, {"input_ids": whole})
    assert torch.equal(next_turn(again, output), expected)


def test_loaded_cache_heals_to_full_prefill_and_is_stock_then(tmp_path):
    cache, output = held()
    cache.heal(20)
    cache.save(tmp_path / "chat")
    again = BlendCache.load(cache.model, memory(), tmp_path / "chat", **REUSED)
    assert again.state.tokens.rows() == output[:, :-1].tolist()
    assert again.heal(0) == cache.heal(0)
    assert again.heal() == 0, "the ids of the answer are in the file"
    whole = torch.cat([output, torch.tensor([[5, 6, 7]])], 1)
    expected = generated(cache.model, {"input_ids": whole})
    assert torch.equal(next_turn(again, output), expected)


def test_empty_cache_is_saved_and_loaded(tmp_path):
    model = shared_zoo_model("llama")
    BlendCache(model, memory()).save(tmp_path / "empty")
    cache = BlendCache.load(model, memory(), tmp_path / "empty", recompute_ratio=1.0)
    inputs = cache.inputs(None, **random_pieces())
    assert torch.equal(generated(model, inputs, cache), generated(model, inputs))


def id_below_nothing(state):
    state["ids"][0] = -1


def more_exact_than_there_are(state):
    state["counts"][1] = 10**6


@pytest.mark.parametrize("change", [*SESSIONS, id_below_nothing, more_exact_than_there_are])
def test_crafted_file_is_refused_by_name(change, tmp_path):
    cache, _output = held()
    path = tmp_path / "chat"
    cache.save(path)
    about, state = taken_apart(path.read_bytes())
    change(state)
    path.write_bytes(forged(KIND, about, state))
    with pytest.raises(StoreError, match="chat holds what no session of this model holds"):
        BlendCache.load(cache.model, memory(), path, **REUSED)


def test_tampered_file_and_other_model_and_bits_are_refused_by_name(tmp_path):
    cache, _output = held()
    path = tmp_path / "chat"
    model = cache.model
    cache.save(path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-50] ^= 1
    for damaged in (content[:-9], bytes(flipped), b"hello", b""):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="is not what was saved"):
            BlendCache.load(model, memory(), path, **REUSED)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="saved with another model"):
        BlendCache.load(tiny_model("llama", seed=1), memory(), path, **REUSED)
    with pytest.raises(StoreError, match=r"another kv_bits \(''\) than this cache's \('8'\)"):
        BlendCache.load(model, memory(), path, kv_bits=8, **REUSED)
    with pytest.raises(StoreError, match="cannot be read"):
        BlendCache.load(model, memory(), tmp_path / "absent", **REUSED)
    with pytest.raises(StoreError, match="cannot be written"):
        cache.save(tmp_path / "no" / "folder")


def test_save_refuses_what_is_no_conversation_by_name(tmp_path):
    model = shared_zoo_model("llama")
    two = BlendCache(model, memory(), **REUSED)
    pieces = {name: [ids, ids] for name, ids in random_pieces().items()}
    generated(model, two.inputs(None, **pieces), two)
    with pytest.raises(ConfigError, match="are of 2 requests"):
        two.save(tmp_path / "two")
    away, _output = held(kv_device_map="disk", offload_folder=tmp_path)
    with pytest.raises(ConfigError, match="kv_device_map"):
        away.save(tmp_path / "away")
    padded = BlendCache(model, memory(), **REUSED)
    ids = prompt(30)
    mask = torch.ones(1, 30)
    mask[0, :4] = 0
    generated(model, {"input_ids": ids, "attention_mask": mask}, padded)
    with pytest.raises(ConfigError, match="hold padding"):
        padded.save(tmp_path / "padded")
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint(("two", "away", "padded"))

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KV that accelerate places beyond the device: the text is the same, the device holds no more than allowed."""

import copy
import gc
import json
import os

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tiny_models import tiny_model as zoo_model

from hf_blend import BlendCache, BlendConfig, observer
from hf_blend.cache.layers import BlendLayer
from hf_blend.errors import OffloadError
from hf_blend.offload import memory as placing
from hf_blend.offload.layer import OffloadedLayer
from hf_blend.offload.memory import GROW_TOKENS, KVMemory
from hf_blend.offload.states import AwayLayer
from tests.asking import GREEDY, batched, check_equal, memory, states_of
from tests.asking import LONG as PIECES
from tests.asking import asked as answered
from tests.conftest import random_pieces, slow_but

LAYERS = 12  # of the long model
ROW = 2 * 2 * 16 * 4  # bytes of K and V of a token in a layer
WAYS = {**GREEDY, "max_new_tokens": 12}
LONG = random_pieces((250, 250, 250, 250), prefix=2, question=4)
TOKENS = 3 + 4 * 250 + 4


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture(scope="module")
def long_model(tiny_model):
    return tiny_model(num_hidden_layers=LAYERS, max_position_embeddings=2048)


def asked(model, store, pieces=PIECES, ways=WAYS, **settings):
    return answered(model, pieces, store=store, ways=ways, **settings)


class Live:
    """The oracle: tensors that are alive while a step attends, found by the garbage collector; no mapped files."""

    def __init__(self, model, tokens, cache):
        self.least = tokens * ROW // 2
        self.most = (tokens + 2 * GROW_TOKENS) * ROW // 2
        self.peak = 0
        gc.collect()  # what other tests have left
        self.cache = cache
        self.columns = range(tokens, tokens + 2 * GROW_TOKENS + 1)  # no other test has prompts of this length
        self.handle = model.model.layers[5].self_attn.o_proj.register_forward_pre_hook(observer(self.look))

    def look(self, module, args):
        if args[0].shape[1] != 1:
            return
        files = set()
        for layer in self.cache.kv_memory.away.values():
            if layer.disk_bytes:
                files.update(pool.untyped_storage().data_ptr() for pool in layer._pools)
        found = {}
        for one in gc.get_objects():
            if type(one) is torch.Tensor and any(size in self.columns for size in one.shape):
                storage = one.untyped_storage()
                if self.least <= storage.nbytes() <= self.most and storage.data_ptr() not in files:
                    found[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(found.values()))


def test_kv_device_map_holds_one_layer_of_twelve_and_text_is_same(long_model, untouched, tmp_path):
    store = memory()
    _, expected = asked(long_model, store, LONG)
    limit = 2 * (TOKENS + 12 + 2 * GROW_TOKENS) * ROW  # one layer that stays, and one at work
    places = dict.fromkeys(range(1, LAYERS), "disk")
    with untouched(long_model):
        cache, got = asked(long_model, store, LONG, kv_device_map=places, offload_folder=str(tmp_path))
    assert torch.equal(got, expected)
    assert cache.report.reusable_tokens == 1000
    held = cache.kv_memory
    layer = (TOKENS + 12 + 2 * GROW_TOKENS) * ROW
    assert held.loads >= 11 * 11
    assert held.prefetched >= held.loads - 12
    assert held.disk_bytes > 10 * TOKENS * ROW
    live = Live(long_model, TOKENS, cache)
    more = cache.inputs(None, prefix=got[0, :-1].tolist(), chunks=[], question=got[0, -1:].tolist())
    long_model.generate(**more, past_key_values=cache, **{**WAYS, "max_new_tokens": 3})
    live.handle.remove()
    assert 2 * TOKENS * ROW <= live.peak <= limit + layer, "a layer beyond: the one read ahead"
    assert list(tmp_path.iterdir()) == [], "files have no names: nothing is left, also by a process that is killed"


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_offloaded_layer_is_layer_on_its_device_whatever_is_done_with_it(tmp_path, monkeypatch, place):
    monkeypatch.setattr(placing, "is_same", lambda *_: False)  # as if a GPU computed, and "cpu" were another place
    torch.manual_seed(0)
    plain = BlendLayer()
    held = KVMemory([0, 1], BlendConfig(kv_device_map=place, offload_folder=tmp_path))
    layer = OffloadedLayer(held, 0)
    other = OffloadedLayer(held, 1)

    def states(tokens, batch=2):
        return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 6)

    def same(what):
        assert layer.get_seq_length() == plain.get_seq_length(), what
        assert torch.equal(layer.keys, plain.keys), what
        assert torch.equal(layer.values, plain.values), what

    def update(new):
        for got, expected in zip(layer.update(*new), plain.update(*new), strict=True):
            assert torch.equal(got, expected)

    for tokens in (150, 1, 1, 70, *([1] * 130), 200, 1):
        new = states(tokens)
        update(new)
        other.update(*new)
    same("appended")
    for removed in (-1, -30, -100, -1):
        layer.crop(removed)
        plain.crop(removed)
        same(removed)
        update(states(5))
    twin = copy.deepcopy(layer)
    for one in (plain, layer):
        one.batch_select_indices(torch.tensor([1, 0]))
        one.batch_repeat_interleave(2)
    same("batch")
    update(states(3, 4))
    assert twin.keys.shape[0] == 2
    new = states(90, 4)
    for one in (plain, layer):
        snapshot = one.snapshot()
        one.update(*new)
        one.open(9, *new)
        one.restore(snapshot)
    same("restored")
    assert torch.equal(copy.deepcopy(layer).keys, plain.keys), "no bit changes in a copy"
    for one in (plain, layer):
        one.reset()
    update(states(3, 1))
    same("used again")
    layer.reset()
    other.reset()
    assert held.disk_bytes == 0


MODES = {"batch": "llama", "windows": "gemma3_text", "on the CPU": "llama", "hybrid": "qwen3_next"}


@pytest.mark.parametrize("how", slow_but("batch", "windows", among=MODES))
def test_kv_device_map_gives_logits_of_cache_on_its_device(tmp_path, how):
    model = zoo_model(MODES[how])
    store = memory()
    pieces = PIECES
    ways = {**WAYS, "max_new_tokens": 70, "output_logits": True, "return_dict_in_generate": True}
    place = "cpu" if how == "on the CPU" else "disk"
    if how == "batch":
        pieces = batched(PIECES, {"prefix": [1], "chunks": [[9, 8, 7] * 30, [4, 5] * 20], "question": [8, 9]})
    there, found = asked(model, store, pieces, ways, kv_device_map=place, offload_folder=tmp_path)
    here, expected = asked(model, store, pieces, ways)
    assert torch.equal(found.sequences, expected.sequences)
    check_equal(found.logits, expected.logits)
    plain = [index for index, layer in enumerate(here.layers) if type(layer) is BlendLayer]
    assert sorted(there.kv_memory.device_map) == plain, "windows and states stay where they are"
    assert (there.kv_memory.disk_bytes > 0) == (place == "disk")


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_kv_device_map_of_model_that_accelerate_offloads(tiny_model, tmp_path, how):
    model = tiny_model()
    store = memory()
    _, expected = asked(model, store)
    if how == "cpu":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    places = {"kv_device_map": {1: "disk", 3: "disk"}, "offload_folder": tmp_path / "kv"}
    cache, got = asked(model, store, **places)
    assert torch.equal(got, expected)
    assert cache.kv_memory.disk_bytes > 0


@pytest.mark.parametrize("failing", [2, 4])
def test_write_that_fails_leaves_what_was_there_and_can_be_asked_again(
    model, untouched, tmp_path, monkeypatch, failing
):
    """What becomes of a layer that fails is in `test_promises`."""
    places = {"kv_device_map": {1: "disk", 2: "disk"}, "offload_folder": str(tmp_path)}
    cache, first = asked(model, memory(), recompute_ratio=1.0, **places)
    turn = {"prefix": first[0], "chunks": [list(range(30, 100))], "question": [3, 4]}
    before = [states.clone() for states in states_of(cache)]
    reserve = os.posix_fallocate
    calls = []

    def full(*given):
        calls.append(given)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        reserve(*given)

    with untouched(model), monkeypatch.context() as patch:
        more = cache.inputs(None, **turn)
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match="No space left"):
            model.generate(**more, past_key_values=cache, **WAYS)
    check_equal(states_of(cache), before)
    inputs = cache.inputs(None, **turn)
    got = model.generate(**inputs, past_key_values=cache, **WAYS)
    assert torch.equal(got, model.generate(inputs["input_ids"], **WAYS))


def test_away_layer_is_refused_in_forked_process(monkeypatch):
    states = torch.randn(8, 1, 2, 4)
    layer = AwayLayer(states, states, torch.device("cpu"), None)
    layer.append(states, states)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: layer.append(states, states), lambda: layer.bring(8)):
        with pytest.raises(OffloadError, match="forked process"):
            call()


def test_folder_that_is_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OffloadError, match=r"cannot be used.*Give a folder"):
        BlendCache(model, memory(), kv_device_map="disk", offload_folder=tmp_path / "file")


def test_disk_without_folder_is_refused_before_anything_is_written(model, untouched):
    with untouched(model), pytest.raises(OffloadError, match="offload_folder is None"):
        asked(model, memory(), kv_device_map="disk")


def test_kv_device_map_survives_json(tmp_path):
    config = BlendConfig(kv_device_map={4: "cuda:1", 5: 0, 6: "disk"}, offload_folder=tmp_path)
    again = BlendConfig.from_dict(json.loads(config.to_json()))
    assert again == config
    assert again.device_map == {4: 1, 5: 0, 6: "disk"}

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""On a second device a blend gives what it gives on the CPU, copies ahead, and is asked for no values in a layer."""

from concurrent.futures import Future

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, observer
from hf_blend.model.anatomy import decoder_layers
from hf_blend.prefill import copies, realign
from hf_blend.sparse.decoding import sparse_decoding
from tests.conftest import build_tiny_model
from tests.second_device import DEVICE, There, move, second_device

GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Recorder:
    """A stream of copies that does each at once, and says in which order they were asked for."""

    def __init__(self, said):
        self.said = said
        self.place = None

    def submit(self, place, work):
        self.place, done = place, Future()
        done.set_result(work())
        return done

    def pinned(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def send(self, host):
        self.said.append(("copy", *self.place))
        return host.to(DEVICE), self.place

    def join(self, moved, event):
        assert isinstance(moved, There)
        self.said.append(("wait", *event))

    def close(self):
        self.said.append(("close",))


def generated(model, inputs_of, sparse=False, **settings):
    cache = BlendCache(model, ChunkStore.open("memory://"), **{"recompute_ratio": 0.15, **settings})
    inputs = inputs_of(cache)
    if sparse:
        with sparse_decoding(model, cache, share=0.3, block_tokens=8):
            return model.generate(**inputs, past_key_values=cache, **GREEDY), cache
    return model.generate(**inputs, past_key_values=cache, **GREEDY), cache


@pytest.fixture(scope="module")
def models():
    """A model on the CPU, and the same on the second device."""
    with second_device(), torch.no_grad():
        there = move(build_tiny_model())
    return build_tiny_model(), there


@pytest.fixture
def said(monkeypatch):
    """What copies and layers say, in order; layers say how often the device was asked for a value, too."""
    said = []
    monkeypatch.setattr(copies, "open_stream", lambda device: Recorder(said) if device.type == "cuda" else None)
    monkeypatch.setattr(realign, "GROUP_BYTES", 1)  # as for chunks of a real size: a layer at a time
    return said


def prefilled(model, store, pieces, said, mode, **settings):
    """The text, the cache, and what was said from where the blended prefill enters the first layer."""

    def says(name, index):
        return observer(lambda *_: said.append((name, index, sum(mode.asked.values()))))

    cache = BlendCache(model, store, **{"recompute_ratio": 0.15, **settings})
    inputs = cache.inputs(None, **pieces())
    handles = []
    for index, layer in enumerate(decoder_layers(model)):
        handles.append(layer.register_forward_pre_hook(says("begin", index)))
        handles.append(layer.register_forward_hook(says("end", index)))
    said.clear()
    try:
        output = model.generate(**inputs, past_key_values=cache, **GREEDY)
    finally:
        for handle in handles:
            handle.remove()
    first = said.index(next(one for one in said if one[0] in ("copy", "close")))
    start = max(place for place, one in enumerate(said[:first]) if one[:2] == ("begin", 0))
    return output.cpu(), cache, said[start:]


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_what_is_stored_of_layer_is_copied_while_one_before_computes(models, pieces, said, tmp_path, tier):
    expected, _ = generated(models[0], lambda one: one.inputs(None, **pieces()))
    assert not said, "on a CPU there is nothing to copy"
    with second_device() as mode, torch.no_grad():
        store = ChunkStore.open("memory://" if tier == "memory" else tmp_path)
        store.add(models[1], None, pieces()["chunks"])
        store = store if tier == "memory" else ChunkStore.open(tmp_path)
        output, cache, found = prefilled(models[1], store, pieces, said, mode)
    assert torch.equal(output, expected)
    assert cache.report.loaded_chunks >= 3
    events = [one[:2] if one[0] in ("begin", "end") else one for one in found]
    copied = [one for one in events if one[0] == "copy"]
    assert copied == [("copy", layer, layer + 1, which) for layer in range(4) for which in (0, 1)]
    for _, layer, *rest in copied[2:]:
        order = [("begin", layer - 1), ("copy", layer, *rest), ("end", layer - 1)]
        places = [events.index(one) for one in order]
        assert places == sorted(places), "queued before the layer that it runs under has ended"
        assert events.index(("wait", layer, *rest)) > events.index(("begin", layer))
    assert events.count(("close",)) == 1


@pytest.mark.parametrize("selector", ["boundary", "kv-deviation", "query-attention"])
def test_inside_layers_no_value_is_asked_of_device_but_once_per_request(models, pieces, said, selector):
    with second_device() as mode, torch.no_grad():
        store = ChunkStore.open("memory://")
        store.add(models[1], None, pieces()["chunks"])
        _, _, found = prefilled(models[1], store, pieces, said, mode, selector=selector)
    counts = {one[:2]: one[2] for one in reversed(found) if one[0] in ("begin", "end")}
    assert counts["end", 3] - counts["begin", 0] <= 1  # does layer 0 fit


SLOW = pytest.mark.slow
CASES = [
    pytest.param({"selector": "kv-deviation"}, True, id="a-batch"),
    pytest.param({"sparse": True}, False, id="sparse"),
    pytest.param({"sparse": True}, True, id="sparse-batch", marks=SLOW),
    pytest.param({"selector": "query-attention"}, False, id="query-attention", marks=SLOW),
    pytest.param({"check_layers": (1, 2), "gradual": True}, True, id="gradual", marks=SLOW),
    pytest.param({"kv_bits": 8}, True, id="kv_bits", marks=SLOW),
]


@pytest.mark.parametrize(("settings", "is_batch"), CASES)
def test_no_tensor_meets_one_of_another_device(models, pieces, tokenizer, said, settings, is_batch):
    batch = [pieces(), pieces((12, 20, 22), seed=1, question=5)]
    given = {name: [one[name] for one in batch] for name in batch[0]} if is_batch else batch[0]
    expected, _ = generated(models[0], lambda one: one.inputs(tokenizer, **given), **settings)
    with second_device(), torch.no_grad():
        output, _ = generated(models[1], lambda one: one.inputs(tokenizer, **given), **settings)
    assert torch.equal(output.cpu(), expected)

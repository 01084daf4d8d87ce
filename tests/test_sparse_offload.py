# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding over K and V that are away: the text of K and V on the device, and little of them there."""

import gc

import pytest
import torch

from hf_blend import BlendCache, BlendConfig, ChunkStore, observer, plugins, sparse_decoding
from hf_blend.offload.layer import OffloadedLayer
from hf_blend.offload.memory import GROW_TOKENS, KVMemory
from hf_blend.sparse.away import AwayBlocks
from hf_blend.sparse.blocks import ROOM_TOKENS
from hf_blend.sparse.config import SparseConfig
from hf_blend.sparse.lock import Selection, SparseMetrics
from tests.asking import prompt
from tests.conftest import build_tiny_model, random_pieces, shared_zoo_model
from tests.second_device import There, move, second_device
from tests.test_sparse import draft_model

SMALL = {"share": 0.3, "block_tokens": 8, "min_tokens": 0, "recent_blocks": 1}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PIECES = random_pieces((100, 89, 78, 67))
LOADED = ("loaded_blocks", "loaded_bytes")


@pytest.fixture
def model(shared_model):
    return shared_model()


def decoded(model, pieces=PIECES, ways=GREEDY, sparse=SMALL, draft=None, **settings):
    """Text with logits, what selections went through, and the cache."""
    cache = BlendCache(model, ChunkStore.open("memory://"), **settings)
    inputs = cache.inputs(None, **pieces)
    with sparse_decoding(model, cache, draft=draft, **sparse) as session:
        output = model.generate(
            **inputs, past_key_values=cache, **ways, return_dict_in_generate=True, output_logits=draft is None
        )
    return output, session.metrics, cache


def alike(found, expected):
    (output, metrics, _) = found
    (output_there, metrics_there, _) = expected
    assert torch.equal(output.sequences, output_there.sequences)
    if output.logits is not None:
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(output_there.logits), rtol=0, atol=5e-6)
    assert metrics.loaded_blocks > 0
    assert {**vars(metrics), **dict.fromkeys(LOADED, 0)} == vars(metrics_there)


@pytest.mark.parametrize("method", ["kvstar", "gsa"])
def test_sparse_decoding_from_disk_gives_text_of_blocks_on_device(model, untouched, tmp_path, method):
    sparse = {**SMALL, "method": method}
    expected = decoded(model, sparse=sparse)
    with untouched(model):
        found = decoded(model, sparse=sparse, kv_device_map="disk", offload_folder=str(tmp_path))
    alike(found, expected)
    assert found[2].report.sparse == vars(found[1])


def test_draft_sees_what_its_target_sees_from_disk(tmp_path):
    model = shared_zoo_model("llama")
    draft = draft_model()
    ids = prompt(170)[0].tolist()  # that a draft knows, too
    pieces = {**PIECES, "chunks": [ids[:90], ids[90:]]}
    ways = {**GREEDY, "assistant_model": draft}
    expected = decoded(model, pieces, ways, draft=draft)
    alike(decoded(model, pieces, ways, draft=draft, kv_device_map="disk", offload_folder=str(tmp_path)), expected)
    assert expected[1].rounds > 0


def test_away_blocks_read_again_what_changed_below_tail(tmp_path):
    held = KVMemory([0], BlendConfig(kv_device_map="disk", offload_folder=tmp_path))
    layer = OffloadedLayer(held, 0)
    config = SparseConfig(block_tokens=8, min_tokens=0)
    blocks = AwayBlocks(layer, config, plugins.load("sparse.methods", "gsa")({}), SparseMetrics())

    def step(tokens, selection):
        keys, values = torch.randn(2, 2, 2, tokens, 4)
        layer.update(keys, values)
        blocks.begin()
        got = blocks.attended(selection)
        blocks.settle()
        whole = layer.read(0, layer.length)
        columns = selection.columns(layer.length, 8)
        for states, expected in zip(got, whole, strict=True):
            for row in range(2):
                assert torch.equal(states[row], expected[row][:, columns[row]])

    selection = Selection(((0, 4, 11), (1, 4, 10)), 96)
    step(100, selection)
    step(1, selection)
    layer.crop(-40)
    selection = Selection(((0, 4, 11), (4, 8, 10)), 104)
    step(50, selection)
    layer.batch_select_indices(torch.tensor([1, 0]))
    step(1, selection)
    blocks.close()
    tensors = [states for states in vars(blocks).values() if isinstance(states, torch.Tensor | tuple)]
    assert tensors == [], "nothing of a session stays on the device"


class LiveThere:
    """The oracle: tensors on the second device that are alive while a layer of a step attends."""

    def __init__(self, model, cache):
        gc.collect()
        self.cache = cache
        self.before = self.bytes()
        self.peak = 0
        some = [model.model.layers[2], model.model.layers[5]]
        self.handles = [layer.self_attn.o_proj.register_forward_pre_hook(observer(self.look)) for layer in some]

    @staticmethod
    def bytes():
        there = [one.held.untyped_storage() for one in gc.get_objects() if type(one) is There]
        return sum({one.data_ptr(): one.nbytes() for one in there}.values())

    def look(self, module, args):
        if args[0].shape[1] == 1 and self.cache.report.sparse:  # a step behind the first
            self.peak = max(self.peak, self.bytes() - self.before)


@pytest.mark.slow
def test_device_holds_share_and_tail_and_rest_is_in_host_memory(monkeypatch):
    pieces = random_pieces((1200,))
    ways = {**GREEDY, "max_new_tokens": 4}
    sparse = {"share": 0.25, "block_tokens": 16, "min_tokens": 0}
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 2048}
    expected, *_ = decoded(build_tiny_model(**sizes), pieces, sparse=sparse, ways=ways)
    monkeypatch.setattr(KVMemory, "_read_ahead", lambda *_: None)
    with second_device(), torch.no_grad():
        model = move(build_tiny_model(**sizes))
        cache = BlendCache(model, ChunkStore.open("memory://"), kv_device_map="cpu")
        inputs = cache.inputs(None, **pieces)
        live = LiveThere(model, cache)
        with sparse_decoding(model, cache, **sparse):
            found = model.generate(**inputs, past_key_values=cache, **ways)
        assert torch.equal(found.cpu(), expected.sequences)
        every = 6 * 2 * 1200 * 2 * 16 * 4
        spare = 6 * 2 * 2 * 16 * 4 * (ROOM_TOKENS + GROW_TOKENS + 2 * 16 + 1200 / 16)  # and the mean key of each block
        masks = 60_000  # of the steps, and their ids
        assert 0.25 * every < live.peak < 0.25 * every + spare + masks
        assert cache.kv_memory.disk_bytes == 0

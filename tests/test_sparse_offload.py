# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding over K and V that are away: the text of K and V on the device, and little of them there."""

import gc
import math

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, blended, sparse_decoding
from hf_blend.errors import OffloadError
from hf_blend.verify.zoo import tiny_model as zoo_model
from tests.conftest import build_tiny_model
from tests.second_device import There, move, second_device

SMALL = {"share": 0.3, "block_tokens": 8, "min_tokens": 0, "recent_blocks": 1}
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CHUNKS = [[(7 * place + 3 * chunk) % 120 + 3 for place in range(100 - 11 * chunk)] for chunk in range(4)]
PIECES = {"prefix": [1, 4, 5], "chunks": CHUNKS, "question": [5, 6, 7, 8]}
BATCH = {
    "prefix": [1, 4, 5],
    "chunks": [CHUNKS[:3], CHUNKS[1:], [*CHUNKS[2:], CHUNKS[0]]],
    "question": [[5, 6, 7, 8], [9], [17, 3]],
}


@pytest.fixture(scope="module")
def model():
    return build_tiny_model()


def decoded(model, pieces=PIECES, ways=GREEDY, sparse=SMALL, draft=None, **settings):
    cache = BlendCache(model, ChunkStore.open("memory://"), **settings)
    inputs = cache.inputs(None, **pieces)
    with sparse_decoding(model, cache, draft=draft, **sparse) as session:
        ids = model.generate(**inputs, past_key_values=cache, **ways)
        held = cache.kv_memory and cache.kv_memory.resident_bytes
    return ids, session.metrics, cache, held


@pytest.mark.parametrize("method", ["gsa", "kvstar", "mean-key", "quest"])
@pytest.mark.parametrize("pieces", [PIECES, BATCH], ids=["one", "batch"])
def test_the_text_is_that_of_blocks_on_the_device(model, untouched, tmp_path, pieces, method):
    sparse = {**SMALL, "method": method}
    expected, there, _, _ = decoded(model, pieces, sparse=sparse)
    with untouched(model):
        got, metrics, cache, _ = decoded(
            model, pieces, sparse=sparse, kv_device_map="disk", offload_folder=str(tmp_path)
        )
    assert torch.equal(got, expected)
    assert metrics.loaded_blocks > 0
    assert {**vars(metrics), "loaded_blocks": 0, "prefetched_blocks": 0, "loaded_bytes": 0} == vars(there)
    assert cache.report.sparse == vars(metrics)

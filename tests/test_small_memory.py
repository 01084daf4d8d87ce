# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that is smaller than one prompt still serves it: a request never pushes out its own chunks, and says so."""

import gc

import pytest
import torch

from hf_blend import ChunkStore, observer
from tests.asking import memory, prefilled, raising

CHUNKS = 10
TOKENS = 20
MODEL = "llama"


@pytest.fixture
def prompt(pieces):
    """Chunks of equal lengths behind BOS alone, so that each takes as many bytes."""
    return {**pieces((TOKENS,) * CHUNKS, prefix=0), "prefix": [1]}


@pytest.fixture
def chunk_bytes(shared_model, prompt):
    """Of one of them."""
    with memory() as store:
        ask(shared_model(MODEL), store, prompt)
        entries = [entry for entry in store.entries() if entry.tokens == TOKENS]
        held = store.stats()["bytes"]["memory"]
    assert len(entries) == CHUNKS
    return held / (CHUNKS + 1 / TOKENS)  # BOS is a chunk of one token


def ask(model, store, prompt, ratio=0.2):
    """Prefill; the report and the last logits."""
    cache, logits, _ = prefilled(model, prompt, store=store, recompute_ratio=ratio)
    return cache.report, logits


def test_notice_says_how_much_of_prompt_there_is_room_for(shared_model, prompt, chunk_bytes):
    model = shared_model(MODEL)
    with memory() as large:
        expected = ask(model, large, prompt)
    with ChunkStore.open("memory://", memory_bytes=int(6.5 * chunk_bytes)) as store:
        first, *more = [ask(model, store, prompt) for _ in range(3)]
        assert store.stats()["bytes"]["memory"] <= 6.5 * chunk_bytes
    assert first[0].loaded_chunks == 0
    assert first[0].computed_chunks == CHUNKS + 1
    for report, logits in more:
        assert report.loaded_chunks in (6, 7)  # the first request's BOS is its oldest entry, and may have left
        assert report.computed_chunks == CHUNKS + 1 - report.loaded_chunks
        assert torch.equal(logits, expected[1])
    for report, _ in (first, *more):
        assert "the store has room for 60% of this prompt's chunks" in report.notice
        assert "memory_bytes" in report.notice
    assert expected[0].notice == ""


def test_notice_is_empty_where_disk_keeps_what_memory_does_not(shared_model, prompt, chunk_bytes, tmp_path):
    with ChunkStore.open(tmp_path, memory_bytes=int(3.5 * chunk_bytes)) as store:
        assert ask(shared_model(MODEL), store, prompt)[0].notice == ""
        report, _ = ask(shared_model(MODEL), store, prompt)
    assert report.notice == ""
    assert report.loaded_chunks == CHUNKS + 1
    assert report.computed_chunks == 0


def test_chunks_of_request_that_failed_or_ended_may_go(shared_model, prompt, pieces, chunk_bytes, monkeypatch):
    model = shared_model(MODEL)
    other = {**pieces((TOKENS,) * 3, prefix=0, seed=5), "prefix": [1]}
    with ChunkStore.open("memory://", memory_bytes=int(6.5 * chunk_bytes)) as store:
        with monkeypatch.context() as patch:
            fails = raising(RuntimeError("fails here"))  # with its traceback, which holds the request
            patch.setitem(model.model.layers[1]._forward_pre_hooks, -1, observer(fails))
            with pytest.raises(RuntimeError, match="fails here"):
                ask(model, store, prompt)
        del fails
        gc.collect()
        ask(model, store, prompt)
        ask(model, store, other)
        report, _ = ask(model, store, other)
    assert report.loaded_chunks == 4
    assert report.computed_chunks == 0

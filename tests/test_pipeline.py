# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that come while the model computes: the same bits as from memory, whatever happens on the way."""

import threading
import time
from typing import Any

import pytest
import torch

from hf_blend import ChunkStore, plugins
from hf_blend.prefill.pipeline import Pipeline
from hf_blend.store import entry
from hf_blend.store.stream import StreamedLayers
from hf_blend.store.tiers.base import EntryFault
from tests.asking import logits
from tests.conftest import shared_zoo_model
from tests.faults.faulty_tier import FaultyTier
from tests.servers import wait_for

CHUNKS = [list(range(10, 42)), list(range(40, 90))]
PIECES: dict[str, Any] = {"prefix": [5, 6], "chunks": CHUNKS, "question": [7, 8, 9]}
MemoryTier = plugins.load("store.tiers", "memory")


@pytest.fixture(scope="module")
def model():
    return shared_zoo_model("llama")


def answered(model: Any, store: ChunkStore, **settings: Any) -> tuple[torch.Tensor, Any]:
    got, cache = logits(model, PIECES, store=store, tokens=4, recompute_ratio=0.2, **settings)
    return got, cache.report


def cold(tier: Any) -> ChunkStore:
    """A store over a tier, with nothing in memory."""
    return ChunkStore(None, [tier])


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "hf_blend-load"]


@pytest.fixture
def filled(model):
    """A tier that holds the chunks, and the logits that they give."""
    tier = MemoryTier()
    expected, report = answered(model, cold(tier))
    assert report.computed_chunks == 3
    return tier, expected


@pytest.fixture(autouse=True)
def _one_layer_at_a_time(monkeypatch):
    monkeypatch.setattr("hf_blend.store.stream.READ_BYTES", 0)


@pytest.mark.parametrize("selector", ["random", "kv-deviation", "query-attention"])
def test_streamed_chunks_give_same_bits(model, filled, selector):
    tier, _ = filled
    expected, _ = answered(model, cold(tier), selector=selector)
    store = cold(tier)
    got, report = answered(model, store, selector=selector)
    assert torch.equal(got, expected)
    assert report.loaded_chunks == 3
    assert not threads()


@pytest.mark.parametrize("seed", range(4))
def test_layer_that_is_damaged_or_cannot_be_read_is_computed_in_same_request(model, filled, seed):
    tier, expected = filled
    store = cold(FaultyTier(tier, seed, {"read.flip": 0.05, "read.io": 0.03, "read.truncate": 0.03}))
    for _ in range(3):
        got, _ = answered(model, store)
        assert torch.equal(got, expected)
    assert not threads()
    assert torch.equal(answered(model, cold(tier))[0], expected)


def test_damaged_layer_is_put_again(model, filled, monkeypatch):
    tier, expected = filled
    read = entry.EntryReader.layers
    broken = []

    def damaged(self: Any, place: int, least_bytes: int) -> Any:
        if place == 2 and not broken:
            broken.append(self)
            raise EntryFault("digest", "on purpose")
        return read(self, place, least_bytes)

    monkeypatch.setattr(entry.EntryReader, "layers", damaged)
    store = cold(tier)
    got, _ = answered(model, store)
    assert torch.equal(got, expected)
    assert store.stats()["removed"]["corrupt"] == 1
    assert store.stats()["stored"]["bytes"] == 1, "and put again"


def test_layer_that_is_late_is_computed(model, filled, monkeypatch):
    tier, expected = filled
    read = entry.EntryReader.layers
    hold = threading.Event()

    def hanging(self: Any, place: int, least_bytes: int) -> Any:
        if place == 2:
            hold.wait(20)
        return read(self, place, least_bytes)

    monkeypatch.setattr(entry.EntryReader, "layers", hanging)
    monkeypatch.setattr(Pipeline.close, "__defaults__", (0.01,))
    store = cold(tier)
    store.layer_reader.patience_s = 0.05
    started = time.monotonic()
    got, _ = answered(model, store)
    assert time.monotonic() - started < 15
    hold.set()
    assert torch.equal(got, expected)
    assert "bytes:late" in store.stats()["load_failures"]


def test_pipeline_reads_ahead_of_use_until_it_is_closed():
    read: list[int] = []
    whole: list[int] = []
    gate = threading.Semaphore(3)

    def take(place: int) -> Any:
        gate.acquire()
        read.append(place)
        return [(torch.zeros(1), torch.zeros(1))]

    stream = StreamedLayers(8, take, lambda layers: whole.append(1), lambda fault: pytest.fail(str(fault)), 5.0)
    pipeline = Pipeline([stream])
    wait_for(lambda: read == [0, 1, 2], "layers were read ahead")
    gate.release(8)
    assert len(stream[7]) == 2
    assert read == list(range(8)), "each once, in order"
    assert whole == [1]
    pipeline.close()
    assert not threads()


def test_pipeline_that_is_closed_reads_no_more():
    asked: list[int] = []
    gate = threading.Semaphore(1)

    def take(place: int) -> Any:
        asked.append(place)
        gate.acquire()
        return [(torch.zeros(1), torch.zeros(1))]

    stream = StreamedLayers(8, take, patience_s=5.0)
    pipeline = Pipeline([stream])
    wait_for(lambda: asked == [0, 1], "layers were read ahead")
    pipeline.close(0.01)  # in the midst of a read
    gate.release(8)
    wait_for(lambda: not threads(), "the thread ended")
    assert asked == [0, 1]
    assert len(stream[5]) == 2, "it is read where it is used"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_layer_whose_reader_died_is_read_where_it_is_used():
    asked: list[int] = []

    def take(place: int) -> Any:
        asked.append(place)
        if len(asked) == 1:
            raise LookupError("no fault that is known")
        return [(torch.zeros(1), torch.zeros(1))]

    stream = StreamedLayers(2, take, patience_s=60.0)
    Pipeline([stream])
    wait_for(lambda: not threads(), "the thread died")
    assert len(stream[0]) == 2
    assert asked == [0, 0]

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tiers elsewhere that are killed, full or restarted empty: a miss, a warning a minute, and never an answer."""

import errno
import importlib
import json
import sys

import pytest

from hf_blend import ChunkStore, plugins
from hf_blend.errors import ConfigError, MissingExtraError
from hf_blend.store import store as store_module
from hf_blend.store.tiers.memory import MemoryTier
from hf_blend.store.tiers.remote import AWAY_S, HEAD_BYTES, PIECE_BYTES
from tests.asking import logits, memory, noting, raising

NAME = "ab" * 8 + "/" + "e" * 64
LARGE = bytes(range(256)) * ((2 * PIECE_BYTES + HEAD_BYTES) // 256 + 7)


def shared_folder(folder):
    return plugins.load("store.tiers", "fsspec")(f"file://{folder}/far")


def count_calls(tier, monkeypatch):
    """Counts the questions that really go to the server."""
    asked = []
    for method in ("ask_stat", "ask_bytes", "ask_put", "ask_delete", "ask_all"):
        noting(monkeypatch, tier, method, lambda *_, method=method: asked.append(method))
    return asked


def test_large_object_is_read_in_pieces(tmp_path, monkeypatch):
    tier = shared_folder(tmp_path)
    tier.put(NAME, [memoryview(LARGE)[:1000], memoryview(LARGE)[1000:]])
    asked = count_calls(tier, monkeypatch)
    source = tier.open(NAME)
    target = bytearray(len(LARGE))
    source.read_into(0, memoryview(target)[:10])
    assert asked == ["ask_stat", "ask_bytes"]
    source.read_into(10, memoryview(target)[10:])
    assert bytes(target) == LARGE
    assert len(asked) <= 3 + -(-len(LARGE) // PIECE_BYTES)


def test_server_that_refuses_put_serves_what_it_has(tmp_path, chunk, same, monkeypatch):
    tier = shared_folder(tmp_path)
    store = ChunkStore(None, [tier])
    stored = chunk()
    store.put(stored)
    monkeypatch.setattr(tier._files, "pipe_file", raising(PermissionError(errno.EACCES, "no")))
    store.put(chunk((8, 9)))
    assert store.stats()["store_failures"] == {"EACCES": 1}
    same(store.get(stored.key), stored)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "restarted empty"])
def test_generation_continues_when_server_is(how, new_server, served_tier, tiny_model, pieces, monkeypatch, caplog):
    model = tiny_model()
    request = pieces()

    def generate(store):
        got, cache = logits(model, request, store=store, recompute_ratio=0.3)
        return got, cache.report.computed_chunks

    expected, _ = generate(memory())
    server = new_server("s3")
    tier = served_tier("s3", server)
    store = ChunkStore(None, [tier])
    assert generate(store)[0].equal(expected)
    got, computed = generate(store)
    assert got.equal(expected)
    assert computed == 0
    server.kill()
    if how == "restarted empty":
        server.start()
    asked = count_calls(tier, monkeypatch)
    for _ in range(2):
        got, computed = generate(store)
        assert got.equal(expected)
    if how == "killed":
        assert computed == 4
        assert len(asked) == 1, "nothing was waited for twice"
        about_reading = [record for record in caplog.records if "cannot be read now" in record.getMessage()]
        assert len(about_reading) == 1


def test_server_that_failed_is_asked_again_after_some_seconds(chunk, same, monkeypatch):
    tier = plugins.load("store.tiers", "fsspec")("memory://again")
    store = ChunkStore(None, [tier])
    store.put(chunk())
    broken = [True]

    def info(path):
        if broken:
            raise ConnectionError("gone")
        return original(path)

    original = tier._info
    monkeypatch.setattr(tier, "_info", info)
    assert store.get(chunk().key) is None
    broken.clear()
    assert store.get(chunk().key) is None, "it has some seconds of peace"
    tier._away_until_s -= AWAY_S
    same(store.get(chunk().key), chunk())
    assert store.stats()["misses"] == {"io": 2}


def far_tier():
    tier = MemoryTier()
    tier.is_local = False
    tier.name = "far"
    return tier


def test_every_byte_of_far_entry_is_read_once_and_verified_before_it_is_copied(chunk, same, content):
    far = far_tier()
    near = MemoryTier()
    stored = chunk()
    ChunkStore(None, [far]).put(stored)
    reads = []
    (source,) = far.objects.values()
    original = source.read_into
    source.read_into = lambda start, target: reads.append(range(start, start + len(target))) or original(start, target)
    store = ChunkStore(None, [near, far])
    same(store.get(stored.key), stored)
    assert sorted(byte for read in reads for byte in read) == list(range(len(content(stored))))
    assert [one.content for one in near.objects.values()] == [content(stored)]
    same(store.get(stored.key), stored)
    assert store.stats()["hits"] == {"bytes": 1, "far": 1}
    near.objects.clear()
    source.content = source.content[:-1] + b"?"
    assert store.get(stored.key) is None
    assert not near.objects


def test_chunk_deleted_while_it_is_read_is_not_kept(chunk):
    far = far_tier()
    near = MemoryTier()
    stored = chunk()
    ChunkStore(None, [far]).put(stored)
    store = ChunkStore(None, [near, far])
    streamed = store.stream(stored.key)
    store.delete(stored.key)
    assert len([streamed.layers[index] for index in range(2)]) == 2
    assert not near.objects


def test_folder_that_was_never_there_costs_miss(chunk):
    with ChunkStore.open("memory://", memory_bytes=0, remote="file:///proc/never") as store:
        store.put(chunk())
        assert store.get(chunk().key) is None
        assert len(store) == 0


def test_missing_package_is_named_with_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(MissingExtraError, match=r"s3fs.*pip install \"hf-blend\[s3\]\""):
        ChunkStore.open("memory://", remote="s3://bucket/never-opened-before")


def test_corpus_is_indexed_into_shared_folder(tmp_path, run, model_folder):
    url = f"file://{tmp_path}/far"
    words = ("index", "--model", model_folder, "--store", "memory://", "--remote", url, "--json")
    for stored in (True, False):
        said = json.loads(run(*words)[1])
        assert (said["stored"] > 0, said["present"] > 0) == (stored, not stored)
    with ChunkStore.open(url) as store:
        assert len(store) > 10


def test_url_is_location_too(tmp_path, chunk, same):
    url = f"file://{tmp_path}/far"
    with ChunkStore.open(url) as store:
        store.put(chunk())
    with ChunkStore.open(url, memory_bytes=0) as store:
        same(store.get(chunk().key), chunk())
        assert store.stats()["hits"] == {"file": 1}
    with pytest.raises(ConfigError, match="both URLs"):
        ChunkStore.open(url, remote=url)


@pytest.mark.parametrize("url", ["nothing://hunter2", "hunter2"])
def test_url_that_cannot_be_read_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError) as refused:
        ChunkStore.open("memory://", remote=url)
    assert "hunter2" not in str(refused.value)


def test_store_finds_what_others_put_on_server_part_at_time(tmp_path, chunk, monkeypatch):
    tier = shared_folder(tmp_path)
    chunks = [chunk((7, number)) for number in range(4)]
    for one in chunks:
        ChunkStore(None, [tier]).put(one)
    reader = ChunkStore(None, [shared_folder(tmp_path)])
    monkeypatch.setattr(store_module, "_LIST_S", -1.0)
    key = chunks[2].key
    asked = (key.fingerprint, key.chunk_prefix_ids, (7, 2))
    assert reader.find(*asked) == []
    monkeypatch.setattr(store_module, "_LIST_S", 60.0)
    assert reader.find(*asked) == [(0, key, 0, 2)]
    assert len(reader) == 4

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tiers in real servers that are killed, frozen and restarted empty: time is lost once, and never an answer."""

import contextlib
import gc
import importlib
import json
import logging
import sys
import threading
import weakref
from functools import partial

import pytest

from hf_blend import ChunkStore, plugins
from hf_blend.errors import ConfigError, MissingExtraError
from hf_blend.store import catalog
from hf_blend.store.opening import Limits
from hf_blend.store.tiers.base import EntryFault
from hf_blend.store.tiers.remote import HEAD_BYTES, PIECE_BYTES
from hf_blend.threads import start
from tests.asking import logits, noting
from tests.servers import wait_for

KINDS = ("redis", pytest.param("s3", marks=pytest.mark.slow))  # S3 keeps the promises of a tier in test_tiers.py too
NAME = "ab/cd/" + "e" * 64
LARGE = bytes(range(256)) * ((2 * PIECE_BYTES + HEAD_BYTES) // 256 + 7)
IMPATIENT_S = 0.3
LOST = r"no answer within|did not answer|[Cc]onnect|closed|EndpointConnectionError"


def hurry(tier):
    """From now on nothing is waited for, and the server is asked again soon."""
    tier.circuit.deadline_s = IMPATIENT_S
    tier.circuit._pause_s = 0.05


def on(tier):
    """A store that keeps chunks in a tier alone: a put returns when the tier has the chunk, or has refused it."""
    return ChunkStore([], [tier], limits=Limits(queue_bytes=0))


def wait_until_healthy(tier):
    def asked():
        with contextlib.suppress(OSError):
            tier.stat(NAME)
        return tier.is_healthy

    wait_for(asked, "closing of the circuit")


def count_calls(tier, monkeypatch):
    """Counts the questions that really go to the server, those in the background left out."""
    asked = []
    for method in ("ask_stat", "ask_bytes", "ask_put", "ask_delete", "ask_all"):
        noting(monkeypatch, tier, method, lambda *_, method=method: asked.append(method))
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_object_is_read_in_pieces(kind, served_tier, monkeypatch):
    tier = served_tier(kind)
    assert tier.put_if_absent(NAME, [memoryview(LARGE)[:1000], memoryview(LARGE)[1000:]])
    asked = count_calls(tier, monkeypatch)
    source, target = tier.open(NAME), bytearray(len(LARGE))
    source.read_into(0, memoryview(target)[:10])
    assert asked == ["ask_stat", "ask_bytes"]
    source.read_into(10, memoryview(target)[10:])
    assert bytes(target) == LARGE
    assert len(asked) <= 2 + -(-len(LARGE) // PIECE_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_object_that_is_replaced_while_it_is_read_is_never_mixed_with_the_other(kind, served_tier):
    tier, other = served_tier(kind), LARGE[::-1]
    tier.put_if_absent(NAME, [memoryview(LARGE)])
    source, target = tier.open(NAME), bytearray(len(LARGE))
    tier.delete(NAME)
    tier.put_if_absent(NAME, [memoryview(other)])
    if kind == "redis":
        with pytest.raises(EntryFault, match="truncated"):
            source.read_into(0, memoryview(target))
        assert not tier.delete(NAME, source)
        assert tier.contains(NAME)


def test_a_listing_asks_for_one_key_in_each_command_as_servers_in_cluster_mode_want_it(new_server, served_tier):
    tier = served_tier("redis", new_server("redis"))
    tier.put_if_absent(NAME, [memoryview(b"content")])
    tier._client.execute_command("ACL", "SETUSER", "default", "-mget")
    assert [name for name, _ in tier.listing()] == [NAME]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_server_lost_while_an_object_is_read_opens_the_circuit(kind, how, new_server, served_tier, monkeypatch):
    server = new_server(kind)
    tier = served_tier(kind, server)
    tier.put_if_absent(NAME, [memoryview(LARGE)])
    source, target = tier.open(NAME), bytearray(len(LARGE))
    source.read_into(0, memoryview(target)[:HEAD_BYTES])
    hurry(tier)
    server.kill() if how == "killed" else server.freeze()
    with pytest.raises(OSError, match=LOST):
        source.read_into(HEAD_BYTES, memoryview(target)[HEAD_BYTES:])
    assert bytes(target[:HEAD_BYTES]) == LARGE[:HEAD_BYTES]
    assert not tier.is_healthy
    asked = count_calls(tier, monkeypatch)
    for _ in range(50):
        with pytest.raises(OSError, match="did not answer"):
            tier.open(NAME)
    assert asked == [], "an open circuit asks nothing of the server in a request"

    server.start() if how == "killed" else server.thaw()
    tier.circuit.deadline_s = 60.0
    if kind == "s3" and how == "killed":  # forgot its buckets too
        tier._files.mkdir(tier._root.partition("/")[0])
    wait_until_healthy(tier)
    assert (tier.open(NAME) is None) == (how == "killed")
    if how == "frozen":
        source.read_into(HEAD_BYTES, memoryview(target)[HEAD_BYTES:])
        assert bytes(target) == LARGE


class Content(bytearray):
    """Bytes that may be watched."""


def test_a_write_that_failed_keeps_no_bytes_until_a_collection(new_server, served_tier):
    server = new_server("redis")
    tier = served_tier("redis", server)
    server.kill()
    content, gone = Content(1 << 20), []
    weakref.finalize(content, gone.append, True)
    gc.disable()
    try:
        error = start(partial(tier.ask_put, NAME, content), "put").exception(30)
        is_lost = isinstance(error, OSError)
        del content, error
        assert is_lost
        assert gone
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["cut", "drip", "garbage"])
def test_an_answer_that_is_cut_dripping_or_garbled_is_a_miss_and_never_other_bytes(
    kind, way, proxied_tier, chunk, same, monkeypatch
):
    proxy, tier = proxied_tier(kind)
    store, stored = on(tier), chunk(range(40))
    store.put(stored)
    same(store.get(stored.key), stored)
    hurry(tier)
    proxy.way = way
    for _ in range(5):
        assert store.get(stored.key) is None
    store.put(stored)
    proxy.way = "whole"
    tier.circuit.deadline_s = 60.0
    wait_until_healthy(tier)
    store.put(stored)
    same(store.get(stored.key), stored)


def test_a_server_killed_while_an_object_is_written_shows_nothing_of_it(new_server, served_tier, monkeypatch):
    server = new_server("redis")
    tier = served_tier("redis", server)
    kill_at_the_second_piece = lambda key, *_, **__: server.kill() if key.endswith(":1") else None  # noqa: E731
    noting(monkeypatch, tier._client, "set", kill_at_the_second_piece)
    hurry(tier)
    with pytest.raises(OSError, match=LOST):
        tier.put_if_absent(NAME, [memoryview(LARGE)])
    server.start()
    monkeypatch.undo()
    wait_until_healthy(tier)
    assert not tier.contains(NAME)
    assert list(tier.listing("ab/")) == []


def test_a_writer_that_dies_leaves_pieces_that_vanish_by_themselves(served_tier, monkeypatch):
    tier = served_tier("redis")

    def die_before_the_names(*_, **kwargs):
        if "nx" in kwargs:
            raise KeyboardInterrupt

    noting(monkeypatch, tier._client, "set", die_before_the_names)
    with pytest.raises(KeyboardInterrupt):
        tier.ask_put(NAME, LARGE)
    left = tier._client.keys("*")
    assert len(left) == -(-len(LARGE) // PIECE_BYTES)
    assert all(0 < tier._client.ttl(key) <= 600 for key in left)
    monkeypatch.undo()
    assert tier.put_if_absent(NAME, [memoryview(LARGE)])
    kept = set(tier._client.keys("*")) - set(left)
    assert all(tier._client.ttl(key) == -1 for key in kept)


def test_pieces_that_the_server_evicted_are_a_miss_and_the_rest_goes(served_tier, chunk, same):
    tier = served_tier("redis")
    store, stored = on(tier), chunk()
    store.put(stored)
    (piece,) = [key for key in tier._client.keys("*") if key.endswith(b":0")]
    tier._client.delete(piece)
    assert store.get(stored.key) is None
    assert tier._client.keys("*") == []
    store.put(stored)
    same(store.get(stored.key), stored)


def test_a_full_server_refuses_a_put_and_goes_on_serving(new_server, served_tier, chunk, same):
    tier = served_tier("redis", new_server("redis"))
    store, stored = on(tier), chunk()
    store.put(stored)
    tier._client.config_set("maxmemory", "1mb")
    store.put(chunk(tuple(range(10, 500)), layers=40))
    assert store.stats()["store_failures"] == {"EIO": 1}
    assert tier.is_healthy
    same(store.get(stored.key), stored)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["killed", "frozen", "restarted empty"])
def test_generation_goes_on_when_the_server_is(kind, how, new_server, served_tier, tiny_model, pieces, monkeypatch):
    model, request = tiny_model(), pieces()

    def generate(store):
        got, cache = logits(model, request, store=store, recompute_ratio=0.3)
        return got, cache.report

    wanted, _ = generate(ChunkStore.open("memory://"))
    server = new_server(kind)
    tier = served_tier(kind, server)
    first, _ = generate(on(tier))
    stored, report = generate(store := ChunkStore([], [tier]))
    assert report.computed_chunks == 0
    assert first.equal(wanted)
    assert stored.equal(wanted)

    hurry(tier)
    server.freeze() if how == "frozen" else server.kill()
    if how == "restarted empty":
        tier.circuit.deadline_s = 60.0
        server.start()
    asked = count_calls(tier, monkeypatch)
    got, report = generate(store)
    assert got.equal(wanted)
    assert report.computed_chunks == 4
    if how != "restarted empty":
        assert not tier.is_healthy
        assert len(asked) == 1, "nothing was waited for twice"
        assert generate(store)[0].equal(wanted)
        assert len(asked) == 1


def test_threads_that_waited_for_a_frozen_server_end_when_it_is_gone(new_server, served_tier):
    server = new_server("redis")
    tier = served_tier("redis", server)
    tier.put_if_absent(NAME, [memoryview(b"x")])
    before = threading.active_count()
    hurry(tier)
    server.freeze()
    with pytest.raises(TimeoutError, match="no answer within"):
        tier.stat(NAME)
    server.thaw()
    wait_for(lambda: threading.active_count() <= before, "end of the threads")


@pytest.mark.parametrize("url", ["redis://user:hunter2@127.0.0.1:1/0", "s3://bucket/hunter2", "file:///proc/hunter2"])
def test_a_server_that_was_never_there_costs_nothing_at_opening_and_its_password_is_not_logged(url, caplog, chunk):
    caplog.set_level(logging.DEBUG, "hf_blend")
    if url.startswith("s3"):
        pytest.importorskip("s3fs")
        url = url.replace("hunter2", "folder")
    with ChunkStore.open("memory://", memory_bytes=0, remote=url) as store:
        tier = store.storage.tiers[0].tier
        tier.circuit.deadline_s = IMPATIENT_S
        if url.startswith("s3"):
            tier._files.endpoint_url = "http://127.0.0.1:1"
        store.put(chunk())
        store.flush()
        assert store.get(chunk().key) is None
        assert len(store) == 0
    if not url.startswith("file"):
        assert "hunter2" not in caplog.text


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"redis.*pip install \"hf-blend\[redis\]\""):
        ChunkStore.open("memory://", remote="redis://host")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(MissingExtraError, match=r"s3fs.*pip install \"hf-blend\[s3\]\""):
        ChunkStore.open("memory://", remote="s3://bucket/never-opened-before")


def test_a_corpus_is_indexed_into_a_server(served_tier, run, model_folder):
    url = url_of(served_tier("redis"))
    words = ("index", "--model", model_folder, "--store", "memory://", "--remote", url, "--json")
    for stored in (True, False):
        said = json.loads(run(*words)[1])
        assert (said["stored"] > 0, said["present"] > 0) == (stored, not stored)
    with ChunkStore.open(url) as store:
        assert len(store) > 10


def test_a_url_is_a_location_too(served_tier, chunk, same):
    url = url_of(served_tier("redis"))
    with ChunkStore.open(url) as store:
        store.put(chunk())
    with ChunkStore.open(url, memory_bytes=0) as store:
        same(store.get(chunk().key), chunk())
        assert store.stats()["hits"] == {"redis": 1}
    with pytest.raises(ConfigError, match="both URLs"):
        ChunkStore.open(url, remote=url)


@pytest.mark.parametrize("url", ["redis://host:none/0", "nothing://hunter2", "hunter2"])
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError) as refused:
        ChunkStore.open("memory://", remote=url)
    assert "hunter2" not in str(refused.value)


def test_valkey_urls_mean_the_same():
    pytest.importorskip("redis")
    kind = plugins.load("store.tiers", "redis")
    assert kind.from_url("valkey://h:1/2")._client.connection_pool.connection_kwargs["port"] == 1


def test_a_store_finds_what_others_put_on_a_server_a_part_at_a_time(served_tier, chunk, monkeypatch):
    tier, chunks = served_tier("redis"), [chunk((7, number)) for number in range(4)]
    for one in chunks:
        on(tier).put(one)
    reader = ChunkStore([], [plugins.load("store.tiers", "redis")(url_of(tier), deadline_s=60.0)])
    monkeypatch.setattr(catalog, "_LEARN_S", -1.0)
    assert reader.find(chunks[0].key.fingerprint, chunks[0].key.chunk_prefix_ids, (7, 2)) == []
    monkeypatch.setattr(catalog, "_LEARN_S", 60.0)
    assert reader.find(chunks[0].key.fingerprint, chunks[0].key.chunk_prefix_ids, (7, 2)) == [(0, chunks[2].key, 0, 2)]
    assert len(reader) == 4


def url_of(tier):
    known = tier._client.connection_pool.connection_kwargs
    return f"redis://{known['host']}:{known['port']}/{known['db']}"


OTHERS = {
    "list": lambda client, key: client.rpush(key, "a"),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "text": lambda client, key: client.set(key, "a"),
    "number": lambda client, key: client.set(key, 7),
}


@pytest.mark.parametrize("is_read_first", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_a_key_of_another_type_gives_way_to_the_chunk(other, is_read_first, served_tier, chunk, same):
    tier = served_tier("redis")
    store, elsewhere = ChunkStore([], [tier]), chunk((7, 1))
    name = store.storage.catalog.name(chunk().key.digest)
    OTHERS[other](tier._client, f"hf_blend:{name}")
    store.put(elsewhere)
    assert store.flush(60)
    assert [found for found, _ in tier.listing()] == [store.storage.catalog.name(elsewhere.key.digest)]
    if is_read_first:
        assert store.get(chunk().key) is None
        reason = "foreign" if other in ("list", "hash") else "format"
        assert store.stats()["load_failures"] == {f"redis:{reason}": 1}
        assert store.stats()["removed"]["corrupt"] == 1
    store.put(chunk())
    assert store.flush(60)
    same(ChunkStore([], [tier]).get(chunk().key), chunk())
    assert tier.is_healthy


def test_a_piece_of_another_type_gives_way_with_its_object(served_tier, chunk, same):
    tier = served_tier("redis")
    store = ChunkStore([], [tier])
    store.put(chunk())
    assert store.flush(60)
    (piece,) = [key for key in tier._client.keys("*") if key.endswith(b":0")]
    tier._client.delete(piece)
    tier._client.rpush(piece, "a")
    assert ChunkStore([], [tier]).get(chunk().key) is None
    assert tier._client.keys("*") == []
    store = ChunkStore([], [tier])
    store.put(chunk())
    assert store.flush(60)
    same(ChunkStore([], [tier]).get(chunk().key), chunk())


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_folder_in_the_place_of_an_object_gives_way_if_it_is_empty_and_is_named(scheme, tmp_path, chunk, same):
    tier = plugins.load("store.tiers", "fsspec")(f"{scheme}://{tmp_path}/shared")
    store = ChunkStore([], [tier])
    path = tier._path(store.storage.catalog.name(chunk().key.digest))
    tier._files.makedirs(path)
    tier._files.pipe_file(f"{path}/mine", b"mine")
    assert store.get(chunk().key) is None
    assert list(store.stats()["load_failures"]) == [f"{scheme}:foreign"]
    store.put(chunk())
    assert store.flush(60)
    assert list(store.stats()["store_failures"]) == ["EISDIR"]
    assert tier.is_healthy
    assert tier._files.cat_file(f"{path}/mine") == b"mine"
    tier._files.rm_file(f"{path}/mine")
    store.put(chunk())
    assert store.flush(60)
    same(ChunkStore([], [tier]).get(chunk().key), chunk())

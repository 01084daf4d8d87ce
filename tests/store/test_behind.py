# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a tier on another machine costs a request: one read, no write, and never more than computing would."""

import contextlib
import errno
import gc
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from throttled import WrappedTier

from hf_blend import ChunkStore
from hf_blend.errors import StoreError
from hf_blend.store import write_queue
from hf_blend.store.opening import Limits
from hf_blend.store.reader import MOST_LATE, LateLoads
from hf_blend.store.stream import ComputeTimes
from hf_blend.store.tiers.memory import MemoryTier
from hf_blend.store.tiers.remote import HEAD_BYTES
from tests.asking import asked, raising
from tests.faults.faulty_tier import FaultyTier
from tests.faults.tiers import FaultyServer
from tests.servers import wait_for

WAIT_S = 60.0  # for what must happen; nothing here waits so long unless it fails


class Far(WrappedTier):
    """A tier on another machine, in this process: counts calls and bytes, and answers when a test lets it.

    `calls` has how often a method was called, by its name and by whether the thread of the test called it.
    """

    def __init__(self, tier=None):
        super().__init__(tier or MemoryTier())
        self.name, self.is_local = "far", False
        self.calls, self.nbytes, self.mine = Counter(), 0, threading.get_ident()
        self.open_gate, self.read_gate, self.put_gate = (threading.Event() for _ in range(3))
        self.at_put = threading.Event()
        for gate in (self.open_gate, self.read_gate, self.put_gate):
            gate.set()

    def count(self, method):
        self.calls[method, "request" if threading.get_ident() == self.mine else "behind"] += 1

    def open(self, name):
        self.count("open")
        assert self.open_gate.wait(WAIT_S)
        source = self.tier.open(name)
        return None if source is None else FarSource(source, self)

    def put_if_absent(self, name, parts):
        self.count("put")
        self.at_put.set()
        assert self.put_gate.wait(WAIT_S)
        return self.tier.put_if_absent(name, parts)

    def contains(self, name):
        self.count("contains")
        return self.tier.contains(name)

    def stat(self, name):
        self.count("stat")
        return self.tier.stat(name)

    def delete(self, name, source=None):
        self.count("delete")
        return self.tier.delete(name, getattr(source, "source", source))


class FarSource:
    after = None  # what happens once this many bytes were read, and what

    def __init__(self, source, tier):
        self.source, self.tier, self.stat, self.identity = source, tier, source.stat, source.identity
        self.whole = source.stat.nbytes

    def read_into(self, start, target):
        assert self.tier.read_gate.wait(WAIT_S)
        assert self.source is not None, "read after it was gone"
        self.source.read_into(start, target)
        self.tier.nbytes += len(target)
        self.whole -= len(target)
        if self.whole == 0 and self.after:
            FarSource.after(self.tier)

    def close(self):
        self.source.close()


@pytest.fixture
def far():
    tier = Far()
    yield tier
    for gate in (tier.open_gate, tier.read_gate, tier.put_gate):
        gate.set()


@pytest.fixture
def filled(far, chunk):
    """A far tier that holds one chunk."""
    with ChunkStore([], [far]) as writer:
        writer.put(chunk(layers=4))
    far.calls.clear()
    return far


never = raising(AssertionError("nothing has to be computed"))


def streamed(store, key, recompute=never, **given):
    """A chunk by way of `stream`, all its layers read."""
    found = store.stream(key, recompute, **given)
    if found is not None:
        list(found.layers)
    return found


WAYS = pytest.mark.parametrize("load", [lambda store, key: store.get(key), streamed], ids=["get", "stream"])


@contextlib.contextmanager
def held_up(far, store, *chunks):
    """Puts chunks, none of which is written before the block ends; then all are that are in the queue."""
    far.put_gate.clear()
    for one in chunks:
        store.put(one)
    assert not chunks or far.at_put.wait(WAIT_S)
    yield
    far.put_gate.set()
    assert store.flush()


def counted(store, group):
    """As in `stats`, which also reads from every tier."""
    return store.storage.stats.group(group)


def threads():
    return [one.name for one in threading.enumerate() if one.name == "hf_blend-write"]


def join_writers():
    wait_for(lambda: not threads(), "the end of the writers")


# one read


@WAYS
def test_every_byte_of_a_hit_in_front_of_a_nearer_tier_is_read_once(load, filled, chunk, same, content):
    near, stored = MemoryTier(), chunk(layers=4)
    store = ChunkStore([], [near, filled])
    same(load(store, stored.key), stored)
    assert store.flush()
    assert filled.nbytes == len(content(stored))
    assert filled.calls["open", "request"] == 1
    assert [one.content for one in near.objects.values()] == [content(stored)]
    assert store.stats()["stored"] == {near.name: 1}
    same(load(store, stored.key), stored)
    assert store.stats()["hits"] == {near.name: 1, "far": 1}


@WAYS
@pytest.mark.parametrize("is_alone", [True, False])
def test_every_byte_crosses_the_network_once(load, is_alone, chunk, same, content):
    server, stored = FaultyServer({}), chunk(range(3, 2003), layers=6)
    assert len(content(stored)) > 2 * HEAD_BYTES
    with ChunkStore([], [server]) as writer:
        writer.put(stored)
    server.sent = 0
    same(load(ChunkStore([], [server] if is_alone else [MemoryTier(), server]), stored.key), stored)
    assert server.sent == len(content(stored))


@WAYS
@pytest.mark.parametrize("what", ["evicted", "replaced", "gone"])
def test_what_becomes_of_the_object_after_it_was_read_changes_nothing(
    load, what, filled, chunk, same, content, monkeypatch
):
    near, stored = MemoryTier(), chunk(layers=4)
    (name,) = filled.tier.objects

    def happen(tier):
        tier.tier.objects.clear()
        if what == "replaced":
            tier.tier.put_if_absent(name, [memoryview(b"other bytes")])
        if what == "gone":
            monkeypatch.setattr(tier.tier, "open", never)

    monkeypatch.setattr(FarSource, "after", staticmethod(happen))
    store = ChunkStore([], [near, filled])
    same(load(store, stored.key), stored)
    assert store.flush()
    assert [one.content for one in near.objects.values()] == [content(stored)]
    assert filled.calls["delete", "request"] == filled.calls["delete", "behind"] == 0
    assert not store.stats()["load_failures"]


@WAYS
@pytest.mark.parametrize("fault", ["put.io", "put.full", "put.torn", "put.lost", "put.flip", "stat.io"])
@pytest.mark.parametrize("queue_bytes", [1 << 30, 0])
def test_a_copy_that_fails_costs_neither_the_chunk_nor_the_object(load, fault, queue_bytes, filled, chunk, same):
    near, stored = FaultyTier(MemoryTier()), chunk(layers=4)
    store = ChunkStore(Limits(memory_bytes=1 << 24).memories(), [near, filled], limits=Limits(queue_bytes=queue_bytes))
    near.arm(fault)
    same(load(store, stored.key), stored)
    assert store.flush()
    assert len(filled.tier.objects) == 1
    assert filled.calls["delete", "request"] == filled.calls["delete", "behind"] == 0
    same(load(store, stored.key), stored)
    assert store.stats()["hits"] == {"memory": 1, "far": 1}


@WAYS
def test_a_chunk_that_a_full_device_cannot_hold_is_used_all_the_same(load, filled, chunk, same, monkeypatch):
    stored = chunk(layers=4)
    store = ChunkStore(Limits(memory_bytes=1 << 24).memories(), [filled])
    monkeypatch.setattr(store.storage.memories[0], "put", raising(RuntimeError("out of memory")))
    same(load(store, stored.key), stored)
    assert store.stats()["store_failures"] == {"RuntimeError": 1}


@WAYS
def test_without_memory_for_a_copy_a_chunk_is_read_all_the_same(load, filled, chunk, same, monkeypatch):
    monkeypatch.setattr("hf_blend.store.reader.np.empty", raising(MemoryError()))
    near, stored = MemoryTier(), chunk(layers=4)
    same(load(ChunkStore([], [near, filled]), stored.key), stored)
    assert not near.objects


def test_what_was_deleted_while_it_was_read_is_not_kept(filled, chunk, same, monkeypatch):
    near, stored = MemoryTier(), chunk(layers=4)
    store = ChunkStore(Limits(memory_bytes=1 << 24).memories(), [near, filled])
    monkeypatch.setattr(FarSource, "after", staticmethod(lambda tier: store.delete(stored.key)))
    same(store.get(stored.key), stored)
    assert store.flush()
    assert not near.objects
    assert not store.contains(stored.key)


def test_what_vanished_since_it_was_listed_is_forgotten(chunk):
    server, asked_for = FaultyServer({}), (chunk().key.fingerprint, (1,), [5, 6, 7])
    with ChunkStore([], [server]) as store:
        store.put(chunk())
    assert len(store.find(*asked_for)) == 1
    server.objects.clear()
    assert store.get(chunk().key) is None
    assert store.find(*asked_for) == []


# writes behind


def test_a_put_calls_nothing_of_a_far_tier_and_is_found_at_once(far, chunk, same):
    store, stored = ChunkStore([], [far]), chunk()
    with held_up(far, store, stored):
        assert store.contains(stored.key)
        same(store.get(stored.key), stored)
        same(streamed(store, stored.key), stored)
        assert store.tier_of(stored.key) == "queue"
        assert [entry.tier for entry in store.entries()] == ["queue"]
        assert store.stats()["hits"] == {"queue": 2}
        assert store.stats()["queued_bytes"] == {"far": pytest.approx(stored.nbytes, abs=4096)}
        assert not [call for call, thread in far.calls if thread == "request"]
    assert len(far.tier.objects) == 1
    assert [entry.tier for entry in store.entries()] == ["far"]
    assert store.stats()["stored"] == {"far": 1}


def test_a_request_whose_chunks_are_all_missing_asks_a_far_tier_once_for_each_and_writes_nothing(
    far, shared_model, pieces
):
    store, request = ChunkStore([], [far]), pieces()
    with held_up(far, store):
        cache, _ = asked(shared_model(), request, store=store, recompute_ratio=0.3)
        lookups = far.calls["open", "request"] + far.calls["open", "behind"]
        assert cache.report.computed_chunks == lookups == len(request["chunks"]) + 1
        assert not [call for call, thread in far.calls if thread == "request" and call != "open"]
    assert len(far.tier.objects) == lookups
    (entry, *_) = store.entries()
    assert 0 < store._compute_times._per_token_s[entry.fingerprint] < math.inf, "it learned what computing costs"


def test_what_does_not_fit_a_queue_is_dropped_and_counted(far, chunk, content, same):
    chunks = [chunk((7, number)) for number in range(6)]
    nbytes = len(content(chunks[0]))
    store = ChunkStore([], [far], limits=Limits(queue_bytes=3 * nbytes))
    with held_up(far, store, *(one for one in chunks for _ in range(2))):
        assert store.stats()["queued_bytes"] == {"far": 3 * nbytes}
        assert store.stats()["dropped_writes"] == {"far:full": 6}
        assert [store.contains(one.key) for one in chunks] == 3 * [True] + 3 * [False]
        assert len(store) == 3
    assert len(far.tier.objects) == 3
    store.put(chunks[4])
    assert store.flush()
    assert len(far.tier.objects) == 4


def test_a_queue_has_a_bound_in_entries_too_and_takes_one_that_is_too_large_when_it_is_empty(far, chunk, monkeypatch):
    monkeypatch.setattr(write_queue, "QUEUE_ENTRIES", 2)
    store = ChunkStore([], [far])
    with held_up(far, store, chunk((7, 0))):
        for number in range(1, 5):
            store.put(chunk((7, number)))
        assert store.stats()["dropped_writes"] == {"far:full": 2}
    with ChunkStore([], [far], limits=Limits(queue_bytes=1)) as tiny:
        tiny.put(chunk((8, 8)))
    assert len(far.tier.objects) == 4


def test_a_corpus_waits_for_room_and_until_it_is_written(far, shared_model):
    store = ChunkStore([], [far], limits=Limits(queue_bytes=1))
    keys = store.add(shared_model(), None, [[5, number, 7] for number in range(4)])
    assert len(far.tier.objects) == len(keys) == 4
    assert not store.stats()["dropped_writes"]


def test_with_no_queue_a_put_returns_when_it_is_written(far, chunk):
    store = ChunkStore([], [far], limits=Limits(queue_bytes=0))
    store.put(chunk())
    assert len(far.tier.objects) == 1
    assert not threads()
    assert store.stats()["queued_bytes"] == {}


def test_a_deleted_chunk_is_not_written_later(far, chunk):
    first, second = chunk((7, 1)), chunk((7, 2))
    store = ChunkStore([], [far])
    with ThreadPoolExecutor(1) as pool, held_up(far, store, first, second):
        assert store.delete(second.key)
        assert not store.contains(second.key)
        pool.submit(store.delete, first.key)
    assert not far.tier.objects
    assert not store.contains(first.key)
    assert len(store) == 0


def test_a_delete_that_cannot_be_kept_says_so(far, chunk, monkeypatch):
    monkeypatch.setattr("hf_blend.store.admin.DELETE_S", 0.01)
    store, stored = ChunkStore([], [far]), chunk()
    with held_up(far, store, stored), pytest.raises(StoreError, match="still being written"):
        store.delete(stored.key)


def test_a_flush_waits_no_longer_than_it_was_told_and_what_a_close_leaves_is_counted(far, chunk, monkeypatch):
    monkeypatch.setattr("hf_blend.store.admin.FLUSH_S", 0.01)
    store = ChunkStore([], [far])
    with held_up(far, store, *(chunk((7, number)) for number in range(3))):
        assert not store.flush(0.01)
        store.close()
        assert store.stats()["dropped_writes"] == {"far:closed": 2}
    store.close()
    assert len(far.tier.objects) == 1
    join_writers()


def test_no_thread_lives_without_work(far, chunk):
    store = ChunkStore([], [far])
    for number in range(3):
        assert not threads()
        store.put(chunk((7, number)))
        assert store.flush()
        join_writers()
    assert len(far.tier.objects) == 3


def test_a_store_that_nobody_holds_any_more_still_writes_what_was_put(far, chunk):
    far.put_gate.clear()
    ChunkStore([], [far]).put(chunk())
    gc.collect()
    far.put_gate.set()
    join_writers()
    assert len(far.tier.objects) == 1


def test_a_write_that_fails_is_counted_and_later_ones_are_written(chunk):
    far = Far(FaultyTier(MemoryTier()))
    store = ChunkStore([], [far])
    far.tier.arm("put.io")
    store.put(chunk((7, 1)))
    assert store.flush()
    assert store.stats()["store_failures"] == {"EIO": 1}
    assert not store.contains(chunk((7, 1)).key)
    store.put(chunk((7, 2)))
    assert store.flush()
    assert len(far.tier.tier.objects) == 1
    assert len(store) == 1


def test_a_machine_without_threads_drops_and_counts(far, chunk, monkeypatch):
    store = ChunkStore([], [far])
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    store.put(chunk())
    assert store.stats()["dropped_writes"] == {"far:thread": 1}
    assert not store.contains(chunk().key)


EXITS = """
import sys, time, torch
from pathlib import Path
from hf_blend.store import ChunkKey, ChunkKV, ChunkStore, write_queue
from hf_blend.store.tiers.disk import DiskTier

class Far(DiskTier):
    is_local = False
    def __init__(self, name, call_s):
        super().__init__(Path(sys.argv[1], name), durable=False)
        self.name, self.call_s = name, call_s
    def put_if_absent(self, name, parts):
        time.sleep(self.call_s)
        return super().put_if_absent(name, parts)

write_queue.EXIT_S = 1.0
store = ChunkStore([], [Far("fast", 0.0), Far("slow", 0.4)])
for number in range(8):
    states = torch.ones(1, 1, 2)
    store.put(ChunkKV(ChunkKey("ab" * 32, (), (number,)), ((states, states),), (), (-1,)))
"""


def test_a_process_that_ends_writes_what_it_can_in_a_bounded_time(tmp_path):
    done = subprocess.run([sys.executable, "-P", "-c", EXITS, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    written = {tier: len(list((tmp_path / tier / "objects").rglob("*.safetensors"))) for tier in ("fast", "slow")}
    assert written["fast"] == 8
    assert 1 <= written["slow"] < 8


# no longer than computing


def test_a_get_that_takes_longer_than_its_budget_is_a_miss_and_is_held_when_it_comes(filled, chunk, same):
    stored = chunk(layers=4)
    store = ChunkStore(Limits(memory_bytes=1 << 24).memories(), [near := MemoryTier(), filled])
    filled.read_gate.clear()
    assert store.get(stored.key, budget_s=0.01) is None
    assert counted(store, "misses") == {"slow": 1}
    assert counted(store, "load_failures") == {"far:slow": 1}
    filled.read_gate.set()
    wait_for(lambda: store.admin.level_in_process(stored.key.digest), "the late load")
    same(store.get(stored.key, budget_s=0.01), stored)
    assert store.stats()["hits"] == {"memory": 1}
    assert store.flush()
    assert len(near.objects) == len(filled.tier.objects) == 1


def test_a_tier_that_is_slow_all_the_time_is_asked_by_a_few_loads_only(filled, chunk):
    store = ChunkStore([], [filled])
    filled.open_gate.clear()
    for _ in range(3 * MOST_LATE):
        assert store.get(chunk().key, budget_s=0.001) is None
    assert filled.calls["open", "behind"] == MOST_LATE
    filled.open_gate.set()
    wait_for(lambda: not store.reader._late._late, "the end of the late loads")
    assert store.get(chunk(layers=4).key, budget_s=WAIT_S) is not None


@pytest.mark.parametrize("gate", ["open_gate", "read_gate"])
def test_a_stream_that_does_not_begin_in_time_is_a_miss(gate, filled, chunk):
    store = ChunkStore([], [filled])
    getattr(filled, gate).clear()
    assert store.stream(chunk().key, never, budget_s=0.01) is None
    assert counted(store, "misses") == {"slow": 1}


def test_a_layer_that_takes_longer_than_the_budget_is_computed_and_those_before_it_are_used(
    filled, chunk, same, monkeypatch
):
    monkeypatch.setattr("hf_blend.store.stream.READ_BYTES", 0)
    stored, computed = chunk(layers=4), []
    store = ChunkStore([], [filled])
    found = store.stream(stored.key, lambda: computed.append(1) or stored, budget_s=5.0)
    first = found.layers[0]
    filled.read_gate.clear()
    found.layers._budget_s = 0.01
    layers = list(found.layers)
    assert computed == [1]
    assert layers[0][0] is first[0]
    same(replace(found, layers=layers), stored)
    assert counted(store, "misses") == {"slow": 1}
    assert filled.calls["delete", "request"] == 0, "slow is not damaged"


def test_waiting_for_all_layers_together_uses_up_one_budget(filled, chunk):
    store = ChunkStore([], [filled])
    found = store.stream(chunk(layers=4).key, never, budget_s=50.0)
    before = found.layers._budget_s
    list(found.layers)
    assert 0 < found.layers._budget_s < before <= 50.0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_near_tier_has_no_budget(depth, tmp_path, chunk, same, monkeypatch):
    monkeypatch.setattr(LateLoads, "run", never)
    stored = chunk()
    ChunkStore.open(tmp_path).put(stored)
    store = ChunkStore.open(tmp_path, memory_bytes=0)
    store.pipeline_depth = depth
    same(streamed(store, stored.key, budget_s=0.0), stored)


def test_how_long_a_chunk_is_worth_waiting_for_is_learned_from_those_that_were_computed(filled, chunk):
    now, stored = [100.0], chunk(layers=4)
    times = ComputeTimes(lambda: now[0])
    assert times.expect_s(stored.key) == math.inf
    for took_s, expected_s in ((6.0, 6.0), (6.0, 6.0), (2.0, 5.0)):
        with times.timed(stored.key):
            now[0] += took_s
        assert times.expect_s(stored.key) == pytest.approx(expected_s)
    assert times.expect_s(chunk((1, 2, 3, 4, 5, 6)).key) == pytest.approx(10.0)
    assert times.expect_s(chunk(fingerprint="cd" * 32).key) == math.inf
    with pytest.raises(ZeroDivisionError), times.timed(stored.key):
        raise ZeroDivisionError
    assert times.expect_s(stored.key) == pytest.approx(5.0)

    store = ChunkStore([], [filled])
    filled.open_gate.clear()
    with store.timed(stored.key):
        pass
    assert store.stream(stored.key, never) is None, "computing takes no time at all"
    assert counted(store, "misses") == {"slow": 1}


def test_what_is_written_to_a_chunk_that_waits_is_neither_handed_out_nor_stored(far, chunk):
    store, stored = ChunkStore([], [far]), chunk()
    with held_up(far, store, chunk((8, 8)), stored):  # the first is being written, until the block ends
        store.get(stored.key).layers[0][0].zero_()
        assert store.get(stored.key) is None
    assert store.stats()["dropped_writes"] == {"far:changed": 1}
    assert not far.contains(store.storage.catalog.name(stored.key.digest))


@pytest.fixture
def beside(tmp_path):
    """A store whose remote tier is a folder, asked at once, and that folder's tier."""
    given = {"memory_bytes": 0, "durability": "none", "remote_queue_bytes": 0}
    with ChunkStore.open(tmp_path / "near", remote=f"file://{tmp_path / 'far'}", **given) as store:
        yield store, store.tiers()[1]


def test_a_put_that_a_full_remote_folder_refuses_is_on_disk_and_the_tier_is_asked_on(beside, chunk, same, monkeypatch):
    (store, remote), chunks, room = beside, [chunk((5, number)) for number in range(5)], 2
    asked, put = [], remote.ask_put

    def bounded(name, parts):
        asked.append(name)
        if len(asked) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(name, parts)

    monkeypatch.setattr(remote, "ask_put", bounded)
    for one in chunks:
        store.put(one)
    assert len({*asked}) == len(chunks), "the circuit stays closed: the folder answered"
    assert remote.is_healthy
    assert store.stats()["store_failures"] == {"ENOSPC": len(chunks) - room}
    for one in chunks:
        same(store.get(one.key), one)


def test_an_object_that_cannot_be_opened_leaves_the_others_of_its_tier_in_reach(beside, tmp_path, chunk, same):
    (store, _), chunks = beside, [chunk((5, number)) for number in range(2)]
    for one in chunks:
        store.put(one)
    for path in (tmp_path / "near" / "objects").rglob("*.safetensors"):
        path.unlink()
    path = next(path for path in (tmp_path / "far").rglob("*.safetensors") if path.stem == chunks[0].key.digest)
    path.unlink()
    path.symlink_to(path)
    assert store.get(chunks[0].key) is None
    same(store.get(chunks[1].key), chunks[1])
    assert store.stats()["healthy"] == {"disk": True, "file": True}

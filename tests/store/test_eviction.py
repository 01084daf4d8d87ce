# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Caps hold, what was used least recently leaves first, and the order survives a restart."""

import os
import subprocess
import sys

import pytest

from hf_blend import ChunkStore
from hf_blend.store.tiers.disk import DiskTier
from hf_blend.store.tiers.memory import MemoryTier


@pytest.fixture(scope="module")
def entry_bytes(chunk, content):
    return len(content(chunk((5, 0))))


def numbers(store):
    return sorted(entry_number for entry_number in range(10) if store.contains(KEYS[entry_number]))


KEYS: dict[int, object] = {}


@pytest.fixture(autouse=True)
def _keys(chunk):
    KEYS.update({number: chunk((5, number)).key for number in range(10)})


def test_disk_keeps_its_cap_and_its_order_after_restart(tmp_path, chunk, entry_bytes):
    given = {"memory_bytes": 0, "durability": "none", "disk_bytes": 4 * entry_bytes}
    with ChunkStore.open(tmp_path, **given) as store:
        for number in range(4):
            store.put(chunk((5, number)))
        for number in (0, 0, 2):
            assert store.get(KEYS[number]) is not None
    with ChunkStore.open(tmp_path, **given) as store:
        store.put(chunk((5, 4)))
        assert store.get(KEYS[4]) is not None
        store.put(chunk((5, 5)))
        assert numbers(store) == [0, 2, 4, 5]
        assert store.stats()["evicted"] == {"disk": 2}
        assert store.stats()["bytes"]["disk"] <= 4 * entry_bytes


def test_chunk_that_can_never_fit_evicts_nothing_and_stays_in_memory(tmp_path, chunk, entry_bytes, same):
    large = chunk(range(2000))
    with ChunkStore.open(tmp_path, disk_bytes=3 * entry_bytes, durability="none") as store:
        for number in range(3):
            store.put(chunk((5, number)))
        store.put(large)
        assert numbers(store) == [0, 1, 2]
        same(store.get(large.key), large)
        stats = store.stats()
        assert stats["store_failures"] == {"ENOSPC": 1}
        assert stats["evicted"] == {}


def test_use_by_another_process_keeps_entry(tmp_path, chunk, entry_bytes):
    given = {"memory_bytes": 0, "durability": "none", "disk_bytes": 3 * entry_bytes}
    one = ChunkStore.open(tmp_path, **given)
    two = ChunkStore.open(tmp_path, **given)
    for number in range(4):
        one.put(chunk((5, number)))
    two.get(KEYS[1])
    one.put(chunk((5, 4)))
    assert numbers(one) == [1, 3, 4]


def test_many_entries_let_some_more_go_and_are_not_listed_each_time(tmp_path, chunk, entry_bytes, monkeypatch):
    monkeypatch.setattr("hf_blend.store.capacity._MANY", 5)
    monkeypatch.setattr("hf_blend.store.capacity._MORE_SHARE", 3)
    store = ChunkStore.open(tmp_path, memory_bytes=0, durability="none", disk_bytes=6 * entry_bytes)
    for number in range(7):
        store.put(chunk((5, number)))
    assert numbers(store) == [3, 4, 5, 6]
    assert store.stats()["evicted"] == {"disk": 3}


def test_full_device_lets_as_much_go_as_is_needed(tmp_path, chunk, monkeypatch):
    store = ChunkStore.open(tmp_path, memory_bytes=0, durability="none")
    for number in range(3):
        store.put(chunk((5, number)))
    put = DiskTier.put
    full = [True]

    def refuse_once(*given):
        if full.pop() if full else False:
            raise OSError(28, "full")
        put(*given)

    monkeypatch.setattr(DiskTier, "put", refuse_once)
    store.put(chunk((5, 3)))
    assert store.contains(KEYS[3])
    assert store.stats()["evicted"]["disk"] >= 1


def test_entry_that_cannot_be_deleted_is_no_reason_to_wait_for_ever(tmp_path, chunk, entry_bytes, monkeypatch):
    store = ChunkStore.open(tmp_path, memory_bytes=0, durability="none", disk_bytes=2 * entry_bytes)
    for number in range(2):
        store.put(chunk((5, number)))
    monkeypatch.setattr(DiskTier, "delete", lambda *_: (_ for _ in ()).throw(OSError(13, "denied")))
    store.put(chunk((5, 2)))
    assert numbers(store) == [0, 1, 2]


def test_collect_shrinks_every_namespace_to_target_and_removes_orphans(tmp_path, chunk, entry_bytes):
    for name in ("", "other"):
        with ChunkStore.open(tmp_path, memory_bytes=0, namespace=name) as store:
            store.put(chunk((5, 0), namespace=name))
            store.put(chunk((5, 1), namespace=name))
    orphan = tmp_path / "incoming" / "half.tmp"
    orphan.write_bytes(b"half")
    young = tmp_path / "incoming" / "young.tmp"
    young.write_bytes(b"half")
    os.utime(orphan, (1, 1))
    store = ChunkStore.open(tmp_path, memory_bytes=0)
    assert not orphan.exists()
    assert young.exists()
    assert store.collect(entry_bytes)["freed_bytes"] == 3 * entry_bytes
    assert len(list((tmp_path / "objects").rglob("*.safetensors"))) == 1


HOLD = "import filelock, sys; held = filelock.FileLock(sys.argv[1]).acquire(); print(flush=True); sys.stdin.read()"


def test_lock_of_another_process_stops_eviction_and_log_and_nothing_else(tmp_path, chunk, same, monkeypatch):
    monkeypatch.setattr("hf_blend.store.tiers.disk._BUSY_S", 0.05)
    store = ChunkStore.open(tmp_path, durability="none")
    store.put(chunk((5, 0)))
    (log,) = (tmp_path / "index").glob("*.rows")
    before = log.read_bytes()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        store.put(chunk((5, 1)))
        assert store.collect(0)["freed_bytes"] == 0
        assert log.read_bytes() == before
    for one in (store, ChunkStore.open(tmp_path, memory_bytes=0)):
        (found,) = one.find(KEYS[1].fingerprint, (1,), (5, 1))
        same(one.get(found.key), chunk((5, 1)))
    assert store.collect(0)["freed_bytes"] > 0


def test_memory_tier_of_bytes_is_bounded_too(chunk, entry_bytes):
    store = ChunkStore(None, [MemoryTier()], cap_bytes=2 * entry_bytes)
    for number in range(5):
        store.put(chunk((5, number)))
    assert numbers(store) == [3, 4]

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The index of a folder saves listing it and reading its entries, and can do no harm."""

import contextlib
import errno
import functools
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_blend.store import ChunkKey, ChunkKV, ChunkStore
from hf_blend.store.index import Index
from hf_blend.store.tiers.base import ObjectStat
from hf_blend.store.tiers.disk import DiskTier
from tests.asking import raising


@pytest.fixture
def root(tmp_path, chunk):
    """A store of six chunks, closed, whose directories are not young."""
    root = tmp_path / "store"
    with ChunkStore.open(root) as store:
        for number in range(6):
            store.put(chunk((5, number), fingerprint=f"{number % 2:064x}", chunk_prefix_ids=(1,) * (number % 3)))
    aged(root)
    assert len(listed(root)) == 6
    return root


@pytest.fixture
def first(chunk):
    """One of the chunks in the store."""
    return chunk((5, 0), fingerprint="0" * 64, chunk_prefix_ids=())


def aged(root, seconds=1):
    for folder in (root / "objects").rglob("*"):
        if folder.is_dir():
            os.utime(folder, (seconds, seconds))


def index_of(root):
    (path,) = (root / "index").glob("*.sqlite")
    return path


def listed(root):
    with ChunkStore.open(root) as store:
        return [(entry.digest, entry.fingerprint, entry.tokens, entry.nbytes) for entry in store.entries()]


@pytest.fixture
def long_chunks(root, monkeypatch):
    """The store with twenty more chunks, which are read two at a time, and a prompt with two of them."""
    ids = [tuple(range(24 * number, 24 * number + 24)) for number in range(20)]
    with ChunkStore.open(root, memory_bytes=0) as store:
        for one in ids:
            store.put(ChunkKV(ChunkKey("0" * 64, (), one), (((torch.ones(1, 24, 2),) * 2),), (), (-1,)))
        monkeypatch.setattr("hf_blend.store.index._PAGE", 2)
        yield store, [7, *ids[19], 9, *ids[0]]


never = raising(AssertionError("the folder was listed, or an entry read"))


def test_a_store_opens_from_its_index_without_listing_folders_or_reading_entries(root, monkeypatch):
    expected = listed(root)
    monkeypatch.setattr(DiskTier, "listing", never)
    monkeypatch.setattr("hf_blend.store.catalog.read_key", never)
    assert listed(root) == expected
    with ChunkStore.open(root) as store:
        assert [start for start, *_ in store.find("0" * 64, (), [9, 5, 0, 9])] == [1]


def test_a_folder_of_an_earlier_version_opens_without_its_index(root, same, first):
    expected = listed(root)
    shutil.rmtree(root / "index")
    shutil.rmtree(root / "incoming")
    (root / "index").mkdir()
    (root / "index" / ("0" * 32 + ".index")).write_bytes(b"sha256:")
    assert listed(root) == expected
    with ChunkStore.open(root) as store:
        same(store.get(first.key), first)


@pytest.mark.slow
def test_any_damage_to_the_index_changes_nothing(root):
    expected, path = listed(root), index_of(root)
    good = path.read_bytes()
    damages = [good[:length] for length in range(0, len(good), 4001)]
    for bit in range(0, len(good) * 8, 1511):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    for bad in damages:
        path.write_bytes(bad)
        assert listed(root) == expected


def in_its_place(make):
    """Puts something else where the index was."""

    def spoil(path):
        path.unlink()
        make(path)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "faults"),
    [
        (os.unlink, {}),
        (lambda path: path.write_bytes(b""), {}),
        (lambda path: path.write_bytes(b"x" * 5000), {"index:format": 1}),
        (lambda path: path.write_bytes(path.read_bytes()[:9000]), {"index:format": 1}),
        (in_its_place(os.mkfifo), {"index:format": 1}),
        (in_its_place(os.mkdir), {"index:format": 1}),
        (in_its_place(lambda path: path.symlink_to("/dev/zero")), {"index:format": 1}),
    ],
)
def test_what_is_no_index_is_counted_and_made_again(root, spoil, faults, monkeypatch):
    expected, path = listed(root), index_of(root)
    spoil(path)
    with ChunkStore.open(root) as store:
        assert len(store) == 6
        assert store.stats()["skipped"] == faults
    assert index_of(root).is_file()
    monkeypatch.setattr("hf_blend.store.catalog.read_key", never)
    assert listed(root) == expected


def test_damage_that_shows_only_when_the_file_is_written_hides_nothing(root):
    expected, path = listed(root), index_of(root)
    bad = bytearray(path.read_bytes())
    bad[18] ^= 4  # the version for writers: SQLite reads the file, and does not write it
    path.write_bytes(bad)
    aged(root, 2)
    assert listed(root) == expected
    assert listed(root) == expected


def test_a_stale_index_is_corrected_by_the_directory(root, chunk, first):
    path = index_of(root)
    before = path.read_bytes()
    with ChunkStore.open(root) as store:
        store.delete(first.key)
        store.put(chunk((8, 8)))
    expected = listed(root)
    path.write_bytes(before)
    assert listed(root) == expected
    shutil.rmtree(root / "objects")
    assert listed(root) == []


def test_an_index_that_cannot_be_written_is_read_all_the_same(root, monkeypatch):
    expected = listed(root)
    monkeypatch.setattr(DiskTier, "listing", never)
    monkeypatch.setattr("hf_blend.store.index.os.access", lambda *_: False)
    assert listed(root) == expected


@contextlib.contextmanager
def held(root):
    """Another process writes to the index."""
    with contextlib.closing(sqlite3.connect(index_of(root), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


def test_what_another_process_does_with_the_index_is_waited_for_and_then_passed_over(root, first, same, monkeypatch):
    monkeypatch.setattr("hf_blend.store.index.BUSY_S", 0.05)
    with held(root), ChunkStore.open(root, memory_bytes=0) as store:
        same(store.get(first.key), first)
        assert store.find("0" * 64, (), [9, 5, 0, 9]) == []
    assert len(listed(root)) == 6


def test_where_a_file_system_has_no_locks_a_process_has_an_index_of_its_own(root, monkeypatch):
    expected = listed(root)
    monkeypatch.setattr("hf_blend.store.index.BUSY_S", 0.05)
    monkeypatch.setattr("hf_blend.store.index.fcntl.lockf", raising(OSError(errno.ENOLCK, "No locks available")))
    with held(root):  # SQLite says the same where there are no locks
        assert listed(root) == expected


def test_a_full_device_leaves_the_index_as_it_is(root, chunk, monkeypatch):
    expected, full = listed(root), sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    monkeypatch.setattr("hf_blend.store.index.Index._group", raising(full))
    with ChunkStore.open(root, memory_bytes=0) as store:
        store.put(chunk((8, 8)))
        assert store.stats()["skipped"] == {}
    monkeypatch.undo()
    assert len(listed(root)) == len(expected) + 1


def test_chunks_are_found_before_the_filter_has_all_of_them(long_chunks, monkeypatch):
    store, prompt = long_chunks
    monkeypatch.setattr("hf_blend.store.index._WARM_S", 0.0)
    cold = store.find("0" * 64, (), prompt)
    assert [found.start for found in cold] == [1, 26]
    monkeypatch.setattr("hf_blend.store.index._WARM_S", 60.0)
    assert store.find("0" * 64, (), prompt) == cold


def test_threads_that_read_the_filter_at_once_do_not_wait_for_each_other_and_lose_nothing(long_chunks, monkeypatch):
    (store, prompt), insert, found = long_chunks, np.insert, []

    def read_meanwhile(*given):
        monkeypatch.setattr(np, "insert", insert)
        found.append(pool.submit(store.find, "0" * 64, (), prompt).result(10))
        return insert(*given)

    monkeypatch.setattr("hf_blend.store.index._WARM_S", 60.0)
    monkeypatch.setattr(np, "insert", read_meanwhile)
    with ThreadPoolExecutor(1) as pool:
        found.append(store.find("0" * 64, (), prompt))
    assert [[one.start for one in each] for each in found] == [[1, 26]] * 2


def test_rows_that_changed_in_the_file_are_not_counted(root):
    expected = listed(root)
    for change in ("name = 'x'", "owner = ''", "nbytes = 7", "chunk = NULL", "created = -1"):
        with contextlib.closing(sqlite3.connect(index_of(root))) as db, db:
            db.execute(f"UPDATE objects SET {change} WHERE name = (SELECT max(name) FROM objects)")
        with ChunkStore.open(root) as store:
            assert len(store) == 6, change
        assert listed(root) == expected, change


def test_many_threads_and_stores_share_one_folder(tmp_path, chunk):
    def write(first):
        with ChunkStore.open(tmp_path / "s", memory_bytes=0, durability="none") as store:
            for number in range(first, first + 8):
                store.put(chunk((7, number)))
                assert store.find(chunk().key.fingerprint, (1,), [1, 7, number, 2])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, (0, 4, 8)))
    assert len(listed(tmp_path / "s")) == 16


def test_what_another_store_lists_while_folders_are_looked_at_stays(tmp_path, chunk, monkeypatch):
    with ChunkStore.open(tmp_path) as store, ChunkStore.open(tmp_path) as other:
        shards = DiskTier.shards

        def looked_at(tier, space=""):
            found = shards(tier, space)
            monkeypatch.setattr(DiskTier, "shards", shards)
            other.put(chunk())
            assert len(other) == 1
            return found

        monkeypatch.setattr(DiskTier, "shards", looked_at)
        assert len(store) == 1


def tier_of(*names, stamp="", meanwhile=lambda: None):
    """A tier of one folder, and what happens once that is listed."""

    def listing(*_):
        meanwhile()
        return [(name, ObjectStat(3, 1.0)) for name in names]

    return SimpleNamespace(shards=lambda _: {"aa/bb/": stamp}, listing=listing)


def bring_in_step(index, tier):
    index.sync(tier, "aa", thorough=True)


def test_a_row_that_another_store_writes_while_its_folder_is_listed_stays(tmp_path):
    index, other = Index(tmp_path / "index"), Index(tmp_path / "index")
    bring_in_step(index, tier_of("aa/bb/1"))
    entered = [("aa/bb/1", 3, 2.0, None)]  # removed and put again
    bring_in_step(index, tier_of(meanwhile=lambda: other.enter(entered)))
    assert "aa/bb/1" in other


@pytest.mark.parametrize(
    ("statement", "is_made"),
    [("PRAGMA user_version", False), ("SELECT 1 FROM parts WHERE prefix = ? AND digest", True)],
)
def test_what_others_write_while_an_index_is_looked_at_is_no_damage(tmp_path, monkeypatch, statement, is_made):
    path, faults, waiting = tmp_path / "index", [], []

    def write():
        with contextlib.suppress(OSError):  # who reads keeps who writes waiting
            bring_in_step(Index(path), tier_of("aa/bb/1", "aa/bb/2", stamp="2"))

    class Connection(sqlite3.Connection):
        def execute(self, sql, *given):
            if waiting and sql.startswith(statement):
                waiting.pop()()
            return super().execute(sql, *given)

    if is_made:
        bring_in_step(Index(path), tier_of("aa/bb/1", stamp="1"))
    monkeypatch.setattr("hf_blend.store.index.BUSY_S", 0.05)
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Connection))
    waiting.append(write)
    bring_in_step(Index(path, on_fault=faults.append), tier_of("aa/bb/1", stamp="1"))
    assert waiting == faults == []


def test_a_file_that_another_process_made_again_is_not_removed(tmp_path):
    index, other = Index(tmp_path / "index"), Index(tmp_path / "index")
    for one in (index, other):
        one.enter([("aa/bb/0", 3, 1.0, None)])
    other.remake()
    for one, name in ((other, "aa/bb/1"), (index, "aa/bb/2")):
        one.enter([(name, 3, 1.0, None)])
    assert other.names("aa") == index.names("aa") == ["aa/bb/1", "aa/bb/2"]


def test_an_index_that_is_made_again_while_chunks_are_looked_for_hides_none(root, monkeypatch):
    starts = Index.starts

    def made_again(index, *given):
        monkeypatch.setattr(Index, "starts", starts)
        store.storage.tiers[0].index.remake()
        return starts(index, *given)

    with ChunkStore.open(root, memory_bytes=0) as store:
        monkeypatch.setattr(Index, "starts", made_again)
        assert store.find("0" * 64, (), [9, 5, 0, 9])


def test_damaged_and_misplaced_entries_are_not_listed(root):
    expected = listed(root)
    first, second = sorted((root / "objects").rglob("*.safetensors"))[:2]
    content = second.read_bytes()
    index_of(root).unlink()
    second.write_bytes(content[:100])
    (first.parent / f"{first.stem[:2]}{'0' * 62}.safetensors").write_bytes(first.read_bytes())
    with ChunkStore.open(root) as store:
        assert len(store) == 5
        assert len(store) == 5  # and they are not read again and again
    second.write_bytes(content)
    assert listed(root) == expected


def test_an_entry_that_vanishes_while_the_store_looks_at_it_is_passed_over(root, monkeypatch):
    index_of(root).unlink()
    monkeypatch.setattr("hf_blend.store.tiers.disk.DiskTier.open", lambda self, name: None)
    assert listed(root) == []


def test_entries_that_cannot_be_listed_now_leave_what_is_known(root, monkeypatch):
    store = ChunkStore.open(root)
    assert len(store) == 6
    monkeypatch.setattr(DiskTier, "shards", raising(PermissionError(13, "Permission denied")))
    assert len(store) == 6

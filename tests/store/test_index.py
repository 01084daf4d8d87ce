# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The log of ids: lost, stale, damaged, torn or forged it costs time, and hides no chunk for long."""

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_blend import ChunkStore
from hf_blend.store.index import _ROW, ChunkIndex, Listed
from hf_blend.store.tiers.disk import DiskTier

FINGERPRINT = "ab" * 32
TEXTS = [tuple(range(start, start + 30)) for start in range(10, 310, 30)]
PROMPT = [token for text in TEXTS for token in (3, *text)]


@pytest.fixture
def root(tmp_path, chunk):
    """A folder with ten chunks."""
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        for ids in TEXTS:
            store.put(chunk(ids))
    return tmp_path


def found(store, prompt=PROMPT):
    return sorted(span.key.token_ids for span in store.find(FINGERPRINT, (1,), prompt))


def reopened(root):
    return ChunkStore.open(root, memory_bytes=0)


def log(root, suffix):
    (path,) = (root / "index").glob(f"*.{suffix}")
    return path


def test_store_opens_from_its_log_without_listing_or_reading_entries(root, monkeypatch):
    monkeypatch.setattr(DiskTier, "names", None)
    monkeypatch.setattr(DiskTier, "open", None)
    assert found(reopened(root)) == TEXTS


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["index", "rows", "ids"])
def test_what_is_no_file_in_place_of_log_keeps_nobody_waiting(root, name, make, chunk):
    new = tuple(range(400, 430))
    if name == "index":
        shutil.rmtree(root / name)
        make(root / name)
    else:
        path = log(root, name)
        path.unlink()
        make(path)
    with reopened(root) as store:
        known = found(store)
        assert known == ([] if name == "ids" else TEXTS), "ids that are lost hide their chunks until these are used"
        store.put(chunk(new))
        for _ in range(2):
            assert found(store, [*PROMPT, *new]) == [*known, new]


@pytest.mark.parametrize("suffixes", [("rows",), ("ids",), ("rows", "ids")])
@pytest.mark.parametrize("spoil", ["gone", "empty", "noise", "half", "another"])
def test_spoilt_log_is_made_again_or_gives_no_wrong_key(root, suffixes, spoil):
    for suffix in suffixes:
        path = log(root, suffix)
        good = path.read_bytes()
        path.unlink()
        contents = {"empty": b"", "noise": random.Random(0).randbytes(len(good)), "half": good[: len(good) // 2]}
        if spoil != "gone":
            path.write_bytes(contents.get(spoil, good[::-1]))
    store = reopened(root)
    assert set(found(store)) <= set(TEXTS)
    entries = [entry.digest for entry in store.entries()]
    assert len(store) == 10
    assert set(found(store)) <= set(TEXTS)
    if "rows" in suffixes:
        assert len(entries) == 10
        assert found(store) == TEXTS


def test_every_flipped_bit_of_row_is_noticed(root, chunk):
    path = log(root, "rows")
    good = path.read_bytes()
    for position in range(_ROW.itemsize):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        index = ChunkIndex("", path.with_suffix(""))
        assert index.refresh() is False
        assert len(index.digests()) == 9


def test_torn_row_is_cut_off_by_next_writer(root, chunk):
    path = log(root, "rows")
    path.write_bytes(path.read_bytes() + b"\1" * (_ROW.itemsize - 5))
    with reopened(root) as store:
        store.put(chunk(range(500, 530)))
        assert len(found(store, [*PROMPT, *range(500, 530)])) == 11
    assert path.stat().st_size == 11 * _ROW.itemsize
    assert len(found(reopened(root), [*PROMPT, *range(500, 530)])) == 11


def test_other_processes_entries_are_seen_at_once(root, chunk, same):
    one = reopened(root)
    two = reopened(root)
    assert found(one) == found(two) == TEXTS
    two.put(chunk(range(500, 530)))
    assert len(found(one, [*PROMPT, *range(500, 530)])) == 11
    one.delete(chunk(TEXTS[0]).key)
    assert found(two) == TEXTS[1:]
    assert len(one) == 10
    assert len(two) == 10
    two.put(chunk(TEXTS[0]))
    assert found(one) == TEXTS
    same(one.get(chunk(TEXTS[0]).key), chunk(TEXTS[0]))


def test_entries_copied_from_elsewhere_are_found(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(root / "objects", other / "objects")
    assert found(reopened(other)) == TEXTS
    space = next((other / "objects").iterdir())
    for path in list(space.iterdir())[:4]:
        path.unlink()
    later_s = space.stat().st_mtime + 1  # file systems tell times apart by milliseconds
    os.utime(space, (later_s, later_s))
    store = reopened(other)
    assert len(found(store)) == len(store) == store.known(FINGERPRINT)[0] == 6


def test_damaged_and_misplaced_entries_are_not_listed(root, chunk):
    shutil.rmtree(root / "index")
    paths = sorted((root / "objects").rglob("*.safetensors"))
    paths[0].write_bytes(paths[1].read_bytes())
    paths[2].write_bytes(b"{}")
    store = reopened(root)
    assert len(list(store.entries())) == 8
    assert {result.reason for result in store.check()} == {"", "key", "truncated"}
    assert sum(result.removed for result in store.check(repair=True)) == 2
    assert len(store) == 8


def test_log_without_most_of_its_entries_is_written_again(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr("hf_blend.store.index.MOST_DEAD", 3)
    with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
        keys = [chunk(ids).key for ids in TEXTS]
        for ids in TEXTS:
            store.put(chunk(ids))
        store.remove([key.digest for key in keys[:8]])
        assert len(list(store.entries())) == len(store) == 2
        assert log(tmp_path, "rows").stat().st_size == 2 * _ROW.itemsize
        assert found(store) == TEXTS[8:]
        store.put(chunk(TEXTS[0]))
    assert found(reopened(tmp_path)) == [TEXTS[0], *TEXTS[8:]]


@pytest.mark.parametrize("place", ["memory://", "disk"])
def test_index_of_long_lived_store_forgets_evicted_chunks(place, tmp_path, chunk, monkeypatch):
    monkeypatch.setattr("hf_blend.store.index.MOST_DEAD", 3)
    cap_bytes = 3 * chunk((5, 0)).nbytes
    given = {"memory_bytes": cap_bytes}
    if place == "disk":
        given = {"memory_bytes": 0, "durability": "none", "disk_bytes": 12 * cap_bytes}
        place = tmp_path
    with ChunkStore.open(place, **given) as store:
        for number in range(60):
            store.put(chunk((5, number)))
        rows = len(store.index._rows)
        here = len(store)
        assert 2 <= here <= 12
        assert rows <= 2 * here + 4
        assert len(found(store, [5, 59])) == 1


def test_log_that_cannot_be_written_hides_no_chunk_of_this_process(tmp_path, chunk, monkeypatch):
    def refuse(*_):
        raise OSError(28, "full")

    store = ChunkStore.open(tmp_path, memory_bytes=0)
    monkeypatch.setattr(ChunkIndex, "_append", refuse)
    store.put(chunk(TEXTS[0]))
    assert found(store) == TEXTS[:1]
    monkeypatch.undo()
    store.put(chunk(TEXTS[1]))
    assert set(found(store)) >= {TEXTS[1]}
    assert len(list(reopened(tmp_path).entries())) == 2


def test_threads_and_stores_share_one_folder(tmp_path, chunk):
    def use(number):
        with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
            for ids in TEXTS[number % 5 :: 5]:
                store.put(chunk(ids))
            return found(store)

    with ThreadPoolExecutor(5) as pool:
        assert all(set(seen) <= set(TEXTS) for seen in pool.map(use, range(10)))
    store = reopened(tmp_path)
    assert found(store) == TEXTS
    assert len(store) == 10


def test_fork_of_open_store_is_refused_by_name(root, chunk):
    store = reopened(root)
    child = os.fork()
    if not child:
        refused = 0
        for act in (lambda: store.get(chunk(TEXTS[0]).key), lambda: store.put(chunk()), lambda: found(store)):
            try:
                act()
            except OSError as error:
                refused += "Open the store again in this process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert found(store) == TEXTS


def test_listed_rows_survive_any_ids(chunk):
    index = ChunkIndex("n")
    keys = [chunk(ids, namespace="n", fingerprint=name).key for ids in ((1,), (7,) * 40) for name in ("", "a\udcff")]
    index.add([Listed(key, 5, 1.5) for key in keys])
    for key in keys:
        assert index.get(key.digest) == Listed(key, 5, 1.5)
    index.drop(keys[0].digest)
    assert index.get(keys[0].digest) is None
    assert index.unknown([key.digest for key in keys]) == [keys[0].digest]

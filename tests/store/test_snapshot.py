# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The index on disk speeds up opening, and can do no harm."""

import os

import pytest

from hf_blend.store import ChunkStore
from hf_blend.store import snapshot as snapshot_module
from hf_blend.store.snapshot import load_snapshot, save_snapshot


@pytest.fixture
def root(tmp_path, chunk):
    """A store of six chunks, closed, with its index."""
    root = tmp_path / "store"
    with ChunkStore.open(root) as store:
        for number in range(6):
            store.put(chunk((5, number), fingerprint=f"{number % 2:064x}", chunk_prefix_ids=(1,) * (number % 3)))
    return root


def index_of(root):
    (path,) = (root / "index").glob("*.index")
    return path


def listed(root):
    with ChunkStore.open(root) as store:
        return [(entry.digest, entry.fingerprint, entry.tokens, entry.nbytes) for entry in store.entries()]


def never(*_):
    raise AssertionError("an entry was read")


def test_a_store_opens_from_its_index_without_reading_entries(root, monkeypatch):
    wanted = listed(root)
    assert len(wanted) == 6
    monkeypatch.setattr("hf_blend.store.catalog.read_key", never)
    assert listed(root) == wanted
    with ChunkStore.open(root) as store:
        assert [start for start, *_ in store.find("0" * 64, (), [9, 5, 0, 9])] == [1]


def test_any_damage_to_the_index_changes_nothing(root):
    wanted, path = listed(root), index_of(root)
    good = path.read_bytes()
    damages = [good[:length] for length in range(0, len(good), 97)]
    for bit in range(0, len(good) * 8, 211):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    for bad in damages:
        path.write_bytes(bad)
        assert listed(root) == wanted
    assert load_snapshot(path).keys() == {digest for digest, *_ in wanted}  # it was made again


@pytest.mark.parametrize("replace", [os.unlink, os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_an_index_that_is_missing_or_no_file_changes_nothing(root, replace):
    wanted, path = listed(root), index_of(root)
    if replace is not os.unlink:
        path.unlink()
    replace(path)
    assert listed(root) == wanted


def test_a_stale_index_is_corrected_by_the_directory(root, chunk):
    before, path = index_of(root).read_bytes(), index_of(root)
    with ChunkStore.open(root) as store:
        store.delete(chunk((5, 0), fingerprint="0" * 64, chunk_prefix_ids=()).key)
        store.put(chunk((8, 8)))
    wanted = listed(root)
    path.write_bytes(before)
    assert listed(root) == wanted


def test_an_index_that_lies_can_only_cause_a_miss(root, chunk):
    path = index_of(root)
    records = load_snapshot(path)
    digests = list(records)
    lies = dict(zip(digests, [records[digest] for digest in digests[1:] + digests[:1]], strict=True))
    save_snapshot(path, list(lies.items()))
    with ChunkStore.open(root) as store:
        for number in range(6):
            wanted = chunk((5, number), fingerprint=f"{number % 2:064x}", chunk_prefix_ids=(1,) * (number % 3))
            for _, key, *_ in store.find(wanted.key.fingerprint, wanted.key.chunk_prefix_ids, [5, number]):
                got = store.get(key)
                assert got is None or got.layers[0][0].equal(wanted.layers[0][0])


def test_an_index_of_a_later_form_is_not_used(root, monkeypatch):
    monkeypatch.setattr(snapshot_module, "_FORMAT", "hf_blend.index/3")
    assert load_snapshot(index_of(root)) == {}
    monkeypatch.undo()
    assert load_snapshot(index_of(root)) != {}


def test_an_index_that_cannot_be_saved_costs_nothing_now(root, chunk, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot_module, "write_atomically", refused)
    with ChunkStore.open(root) as store:
        store.put(chunk((8, 8)))
    monkeypatch.undo()
    assert len(listed(root)) == 7


def test_the_index_is_saved_on_the_way_when_much_was_read(root, monkeypatch):
    index_of(root).unlink()
    monkeypatch.setattr("hf_blend.store.catalog._SAVE_EVERY", 6)
    assert len(ChunkStore.open(root)) == 6  # never closed
    assert len(load_snapshot(index_of(root))) == 6


def test_damaged_and_misplaced_entries_are_not_listed(root):
    wanted = listed(root)
    first, second = sorted((root / "objects").rglob("*.safetensors"))[:2]
    content = second.read_bytes()
    index_of(root).unlink()
    second.write_bytes(content[:100])
    (first.parent / f"{first.stem[:2]}{'0' * 62}.safetensors").write_bytes(first.read_bytes())
    with ChunkStore.open(root) as store:
        assert len(store) == 5
        assert len(store) == 5  # and they are not read again and again
    second.write_bytes(content)
    assert listed(root) == wanted


def test_an_entry_that_vanishes_while_the_store_looks_at_it_is_passed_over(root, monkeypatch):
    index_of(root).unlink()
    monkeypatch.setattr("hf_blend.store.tiers.disk.DiskTier.open", lambda self, name: None)
    assert listed(root) == []


def test_entries_that_cannot_be_listed_now_leave_what_is_known(root, monkeypatch):
    store = ChunkStore.open(root)
    assert len(store) == 6

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hf_blend.store.tiers.disk.DiskTier.names", refused)
    assert len(store) == 6

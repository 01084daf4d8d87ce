# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, private, durable, and behind no link."""

import errno
import os
import stat

import pytest

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import EntryFault
from hf_blend.store.tiers.disk import DiskTier, read_json, write_json
from tests.asking import noting, raising

NAME = "ab" * 8 + "/" + "e" * 64


@pytest.fixture
def tier(tmp_path):
    return DiskTier(tmp_path / "store")


def put(tier, content=b"content"):
    tier.put(NAME, [memoryview(content)])


def content(tier):
    source = tier.open(NAME)
    target = bytearray(source.stat.nbytes)
    source.read_into(0, memoryview(target))
    source.close()
    return bytes(target)


def test_files_and_directories_are_private(tier):
    put(tier)
    for path in tier.root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_few_bytes_at_time_still_are_all(tier, monkeypatch):
    read = os.preadv
    write = os.write
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, start: read(handle, [buffers[0][:3]], start))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:2]))
    put(tier, b"0123456789")
    assert content(tier) == b"0123456789"


@pytest.mark.parametrize("call", ["write", "fdatasync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "an I/O error"), KeyboardInterrupt()])
def test_failing_or_interrupted_write_leaves_nothing_behind(tier, monkeypatch, call, error):
    put(tier, b"old")
    monkeypatch.setattr(os, call, raising(error))
    with pytest.raises(type(error)):
        put(tier, b"new")
    monkeypatch.undo()
    assert content(tier) == b"old"
    assert list((tier.root / "incoming").iterdir()) == []


def test_data_is_synced_before_it_gets_its_name_and_name_after(tier, monkeypatch):
    put(tier)
    calls = []
    for name in ("write", "fdatasync", "replace", "fsync", "unlink"):
        noting(monkeypatch, os, name, lambda *_, name=name: calls.append(name))
    put(tier)
    tier.delete(NAME)
    assert calls == ["write", "fdatasync", "replace", "fsync", "unlink", "fsync"]


@pytest.mark.parametrize("gone", ["objects", "incoming", "."])
def test_directory_removed_while_running_is_made_again(tier, gone):
    import shutil

    put(tier)
    shutil.rmtree(tier.root / gone)
    put(tier)
    assert content(tier) == b"content"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "link to nothing"])
def test_what_is_no_file_is_refused_without_touching_it_or_waiting(tier, tmp_path, kind):
    target = tmp_path / "target"
    target.write_bytes(b"target")
    path = tier.path(NAME)
    path.parent.mkdir()
    makers = {
        "link": lambda: path.symlink_to(target),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "link to nothing": lambda: path.symlink_to("nothing"),
    }
    makers[kind]()
    with pytest.raises(EntryFault, match="foreign") as caught:
        tier.open(NAME)
    assert not caught.value.corrupt
    assert tier.stat(NAME) is None
    assert list(tier.listing()) == []
    put(tier)
    assert content(tier) == b"content"
    assert target.read_bytes() == b"target"


@pytest.mark.parametrize("level", ["incoming", "objects/" + NAME[:16]])
def test_folder_that_is_link_is_not_written_behind(tier, tmp_path, level, chunk):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tier.root / level).symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        put(tier)
    assert list(elsewhere.iterdir()) == []


def test_index_that_is_link_is_not_written_behind(tmp_path, chunk, same):
    target = tmp_path / "target"
    target.write_bytes(b"target")
    with ChunkStore.open(tmp_path / "store", memory_bytes=0) as store:
        store.put(chunk())
    for path in (tmp_path / "store" / "index").iterdir():
        path.unlink()
        path.symlink_to(target)
    with ChunkStore.open(tmp_path / "store", memory_bytes=0) as store:
        store.put(chunk((9, 9)))
        same(store.get(chunk((9, 9)).key), chunk((9, 9)))
        assert len(list(store.entries())) == 2
    assert target.read_bytes() == b"target"


def test_other_files_are_not_entries(tier):
    put(tier)
    folder = tier.path(NAME).parent
    for name in ("x", "e" * 64, "E" * 64 + ".safetensors", "e" * 63 + ".safetensors", "e" * 64 + ".tmp"):
        (folder / name).write_bytes(b"x")
    (tier.root / "objects" / "zz").mkdir()
    assert list(tier.names()) == [NAME]


def test_folder_that_may_only_be_read_serves_what_it_holds(tmp_path, chunk, same, monkeypatch):
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        store.put(chunk())
    denied = raising(PermissionError(errno.EACCES, "denied"))
    store = ChunkStore.open(tmp_path, memory_bytes=0)
    for name in ("utime", "mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, name, denied)
    same(store.get(chunk().key), chunk())
    assert len(store.find(chunk().key.fingerprint, (1,), [5, 6, 7])) == 1
    store.put(chunk((9, 9)))
    assert store.stats()["store_failures"] == {"EACCES": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 9 + "]" * 9, "9 levels"), (" " * (1 << 16) + "1", "65537 bytes"), ("{", "cannot be read"), ("", "cannot")],
)
def test_small_file_beside_chunks_is_bounded(text, reason, tmp_path):
    path = tmp_path / "small.json"
    write_json(path, [[[[[[[["deep"]]]]]]]])
    assert read_json(path) == [[[[[[[["deep"]]]]]]]]
    path.write_text(text)
    with pytest.raises(EntryFault, match=reason):
        read_json(path)

# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The disk tier: whole or absent, whatever the file system does."""

import contextlib
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_blend.errors import StoreError
from hf_blend.store.tiers import disk
from hf_blend.store.tiers import files as files_module
from hf_blend.store.tiers.base import EntryFault
from hf_blend.store.tiers.disk import DiskTier
from hf_blend.store.tiers.files import remove_abandoned, write_atomically
from tests.asking import noting, raising
from tests.faults.damage import NODES

NAME = "ab/cd/" + "cd" * 32
PARTS = [memoryview(b"head"), memoryview(b""), memoryview(b"x" * 5000)]
CONTENT = b"head" + b"x" * 5000


@pytest.fixture
def tier(tmp_path):
    return DiskTier(tmp_path / "store")


def read(tier, name=NAME):
    source = tier.open(name)
    assert source is not None
    content = bytearray(source.stat.nbytes)
    source.read_into(0, memoryview(content))
    source.close()
    return bytes(content)


def leftovers(tier):
    return [path.name for path in tier.root.rglob("*") if path.is_file()]


def test_files_and_directories_are_private(tier):
    old = os.umask(0)
    try:
        tier.put_if_absent(NAME, PARTS)
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tier.root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    folders = [tier.root, *(path for path in tier.root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_a_system_that_reads_a_few_bytes_at_a_time_still_reads_all(tier, monkeypatch):
    tier.put_if_absent(NAME, PARTS)
    original = os.preadv
    monkeypatch.setattr(files_module.os, "preadv", lambda handle, to, start: original(handle, [to[0][:7]], start))
    assert read(tier) == CONTENT


@pytest.mark.parametrize(
    ("call", "error", "after"),
    [
        ("write", OSError(errno.ENOSPC, "full"), 0),
        ("write", OSError(errno.EIO, "broken"), 1),
        ("fdatasync", OSError(errno.EIO, "broken"), 0),
        ("rename", OSError(errno.EXDEV, "another device"), 0),
        ("open", OSError(errno.EMFILE, "too many"), 3),
        ("rename", KeyboardInterrupt("interrupted"), 0),
    ],
)
def test_a_failing_or_interrupted_write_leaves_nothing_behind(tier, monkeypatch, call, error, after):
    calls = []

    def fail(*_, **__):
        calls.append(call)
        if len(calls) > after:
            raise error

    noting(monkeypatch, os, call, fail)
    with pytest.raises(type(error), match=error.args[-1]):
        tier.put_if_absent(NAME, PARTS)
    monkeypatch.undo()
    assert leftovers(tier) == []
    assert tier.put_if_absent(NAME, PARTS)
    assert read(tier) == CONTENT


def test_data_is_synced_before_it_gets_its_name_and_the_name_after(tier, monkeypatch):
    calls = []
    for name in ("fdatasync", "rename", "fsync"):
        noting(monkeypatch, os, name, lambda *_, name=name: calls.append(name))
    tier.put_if_absent(NAME, PARTS)
    assert calls[-3:] == ["fdatasync", "rename", "fsync"]
    assert calls[:-3] == ["fsync"] * 3  # the new directories
    calls.clear()
    scratch = DiskTier(tier.root.parent / "scratch", durable=False)
    scratch.put_if_absent(NAME, PARTS)
    assert calls == ["rename"]


def test_a_removal_and_the_folders_of_a_new_store_reach_the_device(tmp_path, monkeypatch):
    synced = []
    noting(monkeypatch, disk, "sync_directory", synced.append)
    tier = DiskTier(tmp_path / "new" / "er" / "store")
    assert synced == [tmp_path / "new" / "er", tmp_path / "new", tmp_path]
    tier.put_if_absent(NAME, PARTS)
    synced.clear()
    tier.delete(NAME)
    assert synced == [tier.path(NAME).parent]
    synced.clear()
    assert not tier.delete(NAME)
    scratch = DiskTier(tmp_path / "scratch" / "store", durable=False)
    scratch.put_if_absent(NAME, PARTS)
    scratch.delete(NAME)
    assert synced == []


def test_a_directory_removed_while_running_is_made_again(tier):
    tier.put_if_absent(NAME, PARTS)
    shutil.rmtree(tier.root / "objects" / "ab")
    assert tier.open(NAME) is None
    assert names(tier, "ab") == set()
    assert tier.put_if_absent(NAME, PARTS)
    assert read(tier) == CONTENT


@pytest.mark.parametrize("act", ["put_if_absent", "set_pin"])
def test_a_root_removed_while_running_is_made_again(tier, act):
    tier.put_if_absent(NAME, PARTS)
    tier.set_pin(NAME, True)
    shutil.rmtree(tier.root)
    assert tier.open(NAME) is None
    assert (tier.pins(), names(tier)) == (frozenset(), set())
    getattr(tier, act)(NAME, PARTS)
    assert tier.pins() == ({NAME} if act == "set_pin" else set())
    assert (tier.root.stat().st_mode & 0o777, tier.contains(NAME)) == (0o700, act == "put_if_absent")


@pytest.mark.parametrize("place", ["incoming", "objects", "objects/ab", "objects/ab/cd"])
def test_a_file_in_the_place_of_a_directory_gives_way(tier, place):
    path = tier.root / place if place != "objects/ab/cd" else tier.path(NAME).parent
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"mine")
    assert tier.open(NAME) is None
    assert tier.put_if_absent(NAME, PARTS)
    assert read(tier) == CONTENT


def bind_socket(path, _):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # names of sockets are short
        made.bind("s")
    (path.parent / "s").rename(path)


PLANTED = {**NODES, "socket": bind_socket}


@pytest.mark.parametrize("kind", sorted({*PLANTED} - {"gone", "hard link to another"}))
def test_what_is_not_a_file_is_refused_without_touching_it_or_waiting(tier, tmp_path, kind):
    path, target = tier.path(NAME), tmp_path / "target"
    path.parent.mkdir(parents=True)
    target.write_bytes(b"secret")
    PLANTED[kind](path, target)
    with pytest.raises(EntryFault) as caught:
        tier.open(NAME)
    assert (caught.value.reason, caught.value.corrupt) == ("foreign", False)
    assert not tier.contains(NAME)
    if kind == "directory":
        (path / "mine").touch()
        with pytest.raises(OSError, match="directory"):
            tier.put_if_absent(NAME, PARTS)
        (path / "mine").unlink()
    assert tier.put_if_absent(NAME, PARTS)  # takes the place of the link, never of what it leads to
    assert read(tier) == CONTENT
    assert target.read_bytes() == b"secret"


def names(tier, space=""):
    return {name for prefix in tier.shards(space) for name, _ in tier.listing(prefix)}


def test_parts_of_the_listing_have_a_stamp_that_tells_of_other_writers(tier):
    other = DiskTier(tier.root)
    stored = [f"ab/{number:02x}/{number:02x}" + "0" * 62 for number in range(20)]
    for name in stored:
        other.put_if_absent(name, PARTS)
    for prefix in tier.shards():
        os.utime(tier.root / "objects" / prefix, (1, 1))
    before = tier.shards("ab")
    assert before == tier.shards() == other.shards("ab")
    assert len(before) == 20
    other.delete(stored[0])
    assert {prefix for prefix, stamp in tier.shards("ab").items() if stamp != before[prefix]} == {"ab/00/"}
    assert names(tier, "ab") == names(tier) == set(stored[1:])
    assert tier.shards("00") == {}
    assert dict(tier.listing("ab/01/", {stored[1]})) == {stored[1]: None}, "what is known is not looked at"


def test_a_young_directory_has_no_stamp(tier):
    """Two writes within one tick of the file system's clock leave the same time."""
    tier.put_if_absent("ab/cd/" + "cd" * 32, PARTS)
    assert tier.shards("ab") == {"ab/cd/": ""}


def test_other_files_are_not_entries(tier):
    tier.put_if_absent(NAME, PARTS)
    shard = tier.path(NAME).parent
    for name in ("notes.txt", "ff" * 32 + ".safetensors", "cd" * 32, "cd.safetensors"):
        (shard / name).write_bytes(b"x")
    (tier.root / "objects" / "file").write_bytes(b"x")
    assert names(tier, "ab") == {NAME}
    tier.remove_orphans()
    assert len(leftovers(tier)) == 6


def orphan(tier, folder):
    """A temporary file as a process leaves it when it is killed before the rename."""
    code = (
        "import os, sys, pathlib\n"
        "from hf_blend.store.tiers import files\n"
        "files.os.rename = lambda *paths: (print(flush=True), sys.stdin.read(), os._exit(9))\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "files.write_atomically(path, [b'part'], durable=False, folder=path.parents[3] / sys.argv[2])\n"
    )
    path = tier.path(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    process.stdout.readline()
    return process


def test_a_temporary_file_goes_when_its_writer_is_gone_and_not_before(tier):
    tier.put_if_absent(NAME, PARTS)
    left = tier.root / "incoming"
    with orphan(tier, "incoming") as process:
        assert DiskTier(tier.root).remove_orphans() == 0
        assert len(list(left.glob("*.tmp"))) == 1
        process.kill()
        process.wait()
    assert DiskTier(tier.root).remove_orphans() == 1
    assert list(left.glob("*.tmp")) == []


def test_remove_abandoned_goes_by_age_where_there_are_no_locks_and_leaves_other_files(tmp_path, monkeypatch):
    path, other = tmp_path / f"{'cd' * 32}.{'0' * 16}.tmp", tmp_path / "notes.tmp"
    monkeypatch.setattr(files_module.fcntl, "flock", raising(OSError(errno.ENOLCK, "no locks")))
    for one in (path, other):
        one.write_bytes(b"part")
    assert not remove_abandoned(path)
    for one in (path, other):
        os.utime(one, (1, 1))
    assert remove_abandoned(path)
    assert not remove_abandoned(path)
    assert not remove_abandoned(other)
    write_atomically(path, [b"x"], durable=False)


def test_a_file_that_is_taken_for_abandoned_before_it_has_its_lock_is_made_again(tmp_path, monkeypatch):
    flock, removed = files_module.fcntl.flock, []

    def seen_first(handle, flags):
        monkeypatch.setattr(files_module.fcntl, "flock", flock)
        removed.extend(path for path in tmp_path.glob("*.tmp") if remove_abandoned(path))
        flock(handle, flags)

    monkeypatch.setattr(files_module.fcntl, "flock", seen_first)
    write_atomically(tmp_path / "whole", [b"x"], durable=False)
    assert removed
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_an_unusable_place_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"cannot be kept at .*file.*memory://"):
            DiskTier(root)

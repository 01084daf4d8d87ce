# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store with a placement keeps each chunk in one tier, whatever is put, read, evicted and moved.

What is in a tier is read from its folder, by the names of files: nothing of the store is asked.
"""

import errno
import os
import random
import shutil

import pytest

from hf_blend import ChunkStore, ConfigError
from hf_blend.store.opening import Limits
from hf_blend.store.tiers.memory import MemoryTier

ROOM = 4  # chunks on the disk


@pytest.fixture
def folders(tmp_path):
    return {"disk": tmp_path / "near", "file": tmp_path / "far"}


@pytest.fixture
def opened(folders, chunk, content):
    def open_store(placement="disk", room=ROOM, **given):
        given = {"memory_bytes": 0, "durability": "none", "disk_bytes": room * len(content(chunk())) + 99, **given}
        return ChunkStore.open(folders["disk"], remote=f"file://{folders['file']}", placement=placement, **given)

    return open_store


def kept(folders):
    """Digest → (tier, bytes) of every entry of every folder."""
    return [(path.stem, tier, path.read_bytes()) for tier, root in folders.items()
            for path in sorted((root / "objects").rglob("*.safetensors"))]  # fmt: skip


def assert_each_in_one(folders, chunks, content):
    found = {name: (tier, stored) for name, tier, stored in kept(folders)}
    assert len(found) == len(kept(folders)), "a chunk is in two tiers"
    assert set(found) == {one.key.digest for one in chunks}
    for one in chunks:
        assert found[one.key.digest][1] == content(one)
    return {name: tier for name, (tier, _) in found.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("placement", ["disk", "remote"])
def test_each_chunk_is_in_one_tier_and_whole_after_anything(opened, folders, chunk, content, same, placement, seed):
    draw, store, known = random.Random(f"{placement} {seed}"), opened(placement), []
    for step in range(40):
        act = draw.choice(["put", "put", "get", "get", "stream", "move", "reopen", "collect", "rebalance"])
        one = draw.choice(known) if known else None
        if act == "put" or one is None:
            one = draw.choice(known) if known and draw.random() < 0.3 else chunk((5, step))
            known = [*known, one] if one not in known else known
            store.put(one)
        elif act == "get":
            same(store.get(one.key), one)
        elif act == "stream":
            got = store.stream(one.key, recompute=lambda: pytest.fail("it was lost"))
            assert len(tuple(got.layers)) == len(one.layers)
        elif act == "move":
            assert store.move([one.key], draw.choice(["disk", "file"])) == 1
        elif act == "reopen":
            store.close()
            store = opened(placement)
        elif act == "collect":
            store.collect()
            store._tiers[0].shrink(draw.randrange(3) * len(content(one)))
        else:
            store.rebalance()
        assert store.flush()
        assert_each_in_one(folders, known, content)
    assert len(store) == len(known)
    assert not store.stats()["load_failures"]
    store.close()


def test_new_chunks_go_to_their_tier_what_is_evicted_moves_behind_it_and_what_is_read_comes_back(
    opened, folders, chunk, content, same
):
    chunks = [chunk((5, number)) for number in range(ROOM + 2)]
    with opened() as store:
        for one in chunks[:ROOM]:
            store.put(one)
        assert set(assert_each_in_one(folders, chunks[:ROOM], content).values()) == {"disk"}
        for one in chunks[ROOM:]:
            store.put(one)
        where = assert_each_in_one(folders, chunks, content)
        assert [where[one.key.digest] for one in chunks] == ["file"] * 2 + ["disk"] * ROOM, "the oldest left"
        same(store.get(chunks[0].key), chunks[0])
        store.flush()
        assert assert_each_in_one(folders, chunks, content)[chunks[0].key.digest] == "disk"
        assert store.stats()["moved"] == {"file": 3, "disk": 1}
    with opened("remote") as store:
        store.put(chunk((5, 99)))
        store.flush()
        assert assert_each_in_one(folders, [*chunks, chunk((5, 99))], content)[chunk((5, 99)).key.digest] == "file"
        same(store.get(chunks[0].key), chunks[0])
        assert assert_each_in_one(folders, [*chunks, chunk((5, 99))], content)[chunks[0].key.digest] == "disk"
        assert store.rebalance() == {"moved": ROOM, "stay": 0, "placed": 3}
    assert {tier for _, tier, _ in kept(folders)} == {"file"}


def test_what_a_killed_process_left_twice_is_once_when_it_was_read(opened, folders, chunk, content, same):
    one, other = chunk((5, 1)), chunk((5, 2))
    for placement in (None, None):
        with opened(placement) as store:
            store.put(one)
            store.put(other)
    assert len(kept(folders)) == 4
    with opened() as store:
        same(store.get(one.key), one)
        store.flush()
        assert sorted(tier for name, tier, _ in kept(folders) if name == one.key.digest) == ["disk"]
        assert store.rebalance()["moved"] == 1, "the other one's copy went"
    assert set(assert_each_in_one(folders, [one, other], content).values()) == {"disk"}


def test_a_copy_that_is_damaged_does_not_cost_the_good_one(opened, folders, chunk, content, same):
    one = chunk((5, 1))
    with opened(None) as store:
        store.put(one)
    (path,) = (folders["disk"] / "objects").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with opened() as store:
        store.put(chunk((5, 2)))
        same(store.get(one.key), one)
        store.flush()
        assert_each_in_one(folders, [one, chunk((5, 2))], content)


def test_a_tier_behind_that_refuses_costs_what_is_evicted_and_nothing_else(opened, folders, chunk, same):
    with opened(room=1) as store:
        store.put(chunk((5, 1)))
        shutil.rmtree(folders["file"], ignore_errors=True)
        folders["file"].write_text("no folder any more")
        store.put(chunk((5, 2)))
        same(store.get(chunk((5, 2)).key), chunk((5, 2)))
        assert store.get(chunk((5, 1)).key) is None
        assert store.stats()["store_failures"]


@pytest.mark.parametrize("queue_bytes", [1 << 30, 0])
def test_what_a_full_remote_tier_refuses_is_kept_on_the_disk_and_the_tier_is_asked_on(
    opened, folders, chunk, content, same, queue_bytes, monkeypatch
):
    chunks = [chunk((5, number)) for number in range(12)]
    with opened("remote", room=len(chunks), remote_queue_bytes=queue_bytes) as store:
        (remote,) = (tier.tier for tier in store._tiers if tier.name == "file")
        room, asked, put = 3, [], remote.ask_put

        def bounded(name, parts):
            asked.append(name)
            if len(asked) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return put(name, parts)

        monkeypatch.setattr(remote, "ask_put", bounded)
        for one in chunks:
            store.put(one)
        assert store.flush()
        where = assert_each_in_one(folders, chunks, content)
        assert [where[one.key.digest] for one in chunks] == ["file"] * room + ["disk"] * (len(chunks) - room)
        assert len(asked) == len(chunks), "the circuit stays closed: the server answered"
        assert remote.is_healthy
        assert store.stats()["store_failures"] == {"ENOSPC": len(chunks) - room}
        for one in chunks:
            same(store.get(one.key), one)
        assert assert_each_in_one(folders, chunks, content) == where, "reading moves nothing where it is refused"
        monkeypatch.undo()
        assert store.rebalance()["moved"] == len(chunks) - room
    assert set(assert_each_in_one(folders, chunks, content).values()) == {"file"}


def test_an_object_that_cannot_be_opened_leaves_the_others_of_its_tier_in_reach(opened, folders, chunk, same):
    chunks = [chunk((5, number)) for number in range(2)]
    with opened("remote") as store:
        for one in chunks:
            store.put(one)
        assert store.flush()
        path = next(path for path in folders["file"].rglob("*.safetensors") if path.stem == chunks[0].key.digest)
        path.unlink()
        path.symlink_to(path)
        assert store.get(chunks[0].key) is None
        same(store.get(chunks[1].key), chunks[1])
        assert store.stats()["healthy"] == {"disk": True, "file": True}


def test_what_a_lost_remote_tier_does_not_take_is_kept_on_the_disk(opened, folders, chunk, content, monkeypatch):
    chunks = [chunk((5, number)) for number in range(3)]
    with opened("remote") as store:
        (remote,) = (tier.tier for tier in store._tiers if tier.name == "file")
        monkeypatch.setattr(remote, "ask_put", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        for one in chunks:
            store.put(one)
        assert store.flush()
        assert not remote.is_healthy
        assert set(assert_each_in_one(folders, chunks, content).values()) == {"disk"}


def test_a_chunk_that_is_deleted_or_moved_while_it_is_written_behind_waits_for_nobody(
    opened, folders, chunk, content, monkeypatch
):
    monkeypatch.setattr("hf_blend.store.store.DELETE_S", 2.0)
    with opened("remote", room=40) as store:
        for number in range(20):
            store.put(chunk((5, number)))
            assert store.delete(chunk((5, number)).key)
        store.flush()
        assert not kept(folders)
        for number in range(20):
            store.put(chunk((5, number)))
            store.flush()
            store.move([chunk((5, number)).key], "disk")
            store.put(chunk((5, number)))  # back again, behind the next move
            store.move([chunk((5, number)).key], "disk")
        store.flush()
        assert_each_in_one(folders, [chunk((5, number)) for number in range(20)], content)


@pytest.mark.parametrize("limit", ["disk_bytes", "quota_bytes"])
def test_rebalancing_stops_where_there_is_no_room_and_loses_nothing(opened, folders, chunk, content, limit):
    chunks = [chunk((5, number)) for number in range(ROOM + 3)]
    with opened("remote", room=40) as store:
        for one in chunks:
            store.put(one)
    with opened(**{"room": 40, limit: ROOM * len(content(chunk())) + 99}) as store:
        assert store.rebalance() == {"moved": ROOM, "stay": 3, "placed": 0}
        assert_each_in_one(folders, chunks, content)


def test_a_good_chunk_does_not_leave_for_one_that_cannot_be_verified_now(
    opened, folders, chunk, content, same, monkeypatch
):
    one = chunk((5, 1))
    with opened(None) as store:
        store.put(one)
    (path,) = (folders["file"] / "objects").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with opened(None) as store:
        far = store.tiers()[1]
        with monkeypatch.context() as patched:
            patched.setattr(far, "open", lambda _: (_ for _ in ()).throw(OSError("not now")))
            assert store.move([one.key], far.name) == 0
        same(store.get(one.key), one)
        assert store.move([one.key, chunk((5, 3)).key], far.name) == 1, "the damaged one was removed; one is nowhere"
        with pytest.raises(ConfigError, match=r"no tier named 'dsk'.*Did you mean 'disk'"):
            store.move([one.key], "dsk")
    assert assert_each_in_one(folders, [one], content) == {one.key.digest: "file"}
    with opened(None) as store:
        same(store.get(one.key), one)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"placement": "dsk"}, "no tier named 'dsk' .* Did you mean 'disk'"),
        ({"placement": "disk", "ttl_s": 5.0}, "placement='disk' came with ttl_s=5.0, expected one of them"),
    ],
)
def test_what_makes_no_sense_is_refused(opened, given, text):
    with pytest.raises(ConfigError, match=text):
        opened(**given)


def test_without_a_placement_nothing_can_be_rebalanced():
    with ChunkStore.open("memory://") as store, pytest.raises(ConfigError, match="expected one opened with a placem"):
        store.rebalance()
    with pytest.raises(ConfigError, match="no tier named 'remote'"):
        ChunkStore([], [MemoryTier()], placement="remote", limits=Limits())

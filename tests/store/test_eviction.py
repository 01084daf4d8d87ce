# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who leaves a full tier: by policy, never what is pinned, never more than is needed, and the same after a restart."""

import random

import pytest

from hf_blend import plugins
from hf_blend.store import ChunkStore

POLICIES = plugins.describe("store.eviction")


def used(policy, uses):
    for stamp, (name, share) in enumerate(uses):
        policy.use(name, float(stamp))
        if share is not None:
            policy.use(name, float(stamp), share)
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_victims_come_once_each_by_score_and_again_the_same(name):
    draw = random.Random(0)
    uses = [(f"n{draw.randrange(20)}", draw.choice([None, draw.random()])) for _ in range(500)]
    policy = used(plugins.load("store.eviction", name)(), uses)
    order = list(policy.victims())
    assert len(order) == len(set(order)) == len({name for name, _ in uses})
    assert order == sorted(order, key=lambda name: policy.states()[name][0])
    assert list(policy.victims()) == order
    policy.forget(order[0])
    assert list(policy.victims()) == order[1:]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_goes_on_where_another_stopped(name):
    make = plugins.load("store.eviction", name)
    before = used(make(), [("a", 0.2), ("b", 0.9), ("c", None), ("a", None), ("b", None)])
    after = used(make(), [("c", None), ("b", None), ("a", None)])
    after.restore(before.states())
    assert list(after.victims()) == list(before.victims())


def test_importance_keeps_what_is_asked_for_often_and_matters():
    policy = plugins.load("store.eviction", "importance")()
    used(policy, [("often", 0.5)] * 5 + [("rare", 0.5), ("idle", 0.01), ("idle", 0.01), ("idle", 0.01)])
    assert list(policy.victims()) == ["idle", "rare", "often"]


@pytest.fixture
def entry_bytes(tmp_path, chunk):
    with ChunkStore.open(tmp_path / "probe", memory_bytes=0) as probe:
        probe.put(chunk())
        return next(iter(probe.entries())).nbytes


def held(store, chunks):
    return [number for number, one in enumerate(chunks) if store.contains(one.key)]


def test_the_disk_keeps_its_cap_and_its_order_after_a_restart(tmp_path, chunk, entry_bytes):
    chunks = [chunk((5, 6, 7 + number)) for number in range(6)]
    settings = {"memory_bytes": 0, "disk_bytes": 3 * entry_bytes}
    with ChunkStore.open(tmp_path / "s", **settings) as store:
        for one in chunks[:3]:
            store.put(one)
        store.get(chunks[0].key)
    with ChunkStore.open(tmp_path / "s", **settings) as store:
        store.put(chunks[3])
        assert held(store, chunks) == [0, 2, 3]
        assert store.stats()["bytes"]["disk"] <= store.stats()["capacity_bytes"]["disk"]
        assert store.stats()["evicted"] == {"disk": 1}
        assert len(store) == 3


def test_what_is_pinned_stays_and_a_full_house_refuses(tmp_path, chunk, entry_bytes):
    chunks = [chunk((5, 6, 7 + number)) for number in range(4)]
    settings = {"memory_bytes": 0, "disk_bytes": 2 * entry_bytes}
    with ChunkStore.open(tmp_path / "s", **settings) as store:
        store.put(chunks[0])
        store.pin(chunks[0].key)
    with ChunkStore.open(tmp_path / "s", **settings) as store:
        store.put(chunks[1])
        store.put(chunks[2])
        assert held(store, chunks) == [0, 2]
        store.pin(chunks[2].key)
        store.put(chunks[3])
        assert held(store, chunks) == [0, 2]
        assert store.stats()["store_failures"] == {"ENOSPC": 1}
        store.unpin(chunks[0].key)
        store.put(chunks[3])
        assert held(store, chunks) == [2, 3]


def test_a_tenant_over_its_quota_evicts_its_own(tmp_path, chunk, entry_bytes):
    mine, theirs = ([chunk((5, 6, n), namespace=space) for n in range(7, 11)] for space in ("mine", "theirs"))
    with ChunkStore.open(tmp_path / "s", memory_bytes=0, namespace="theirs") as other:
        for one in theirs:
            other.put(one)
        with ChunkStore.open(tmp_path / "s", memory_bytes=0, namespace="mine", quota_bytes=2 * entry_bytes) as store:
            for one in mine:
                store.put(one)
            assert held(store, mine) == [2, 3]
        assert held(other, theirs) == [0, 1, 2, 3]


def test_an_old_chunk_is_a_miss_and_goes_and_one_from_the_future_is_not_immortal(tmp_path, chunk):
    import os

    one, two = chunk(), chunk((8, 9))
    with ChunkStore.open(tmp_path / "s", memory_bytes=0, ttl_s=3600) as store:
        for stored, age_s in ((one, -7200), (two, 315_360_000)):
            store.put(stored)
            (path,) = (tmp_path / "s").rglob(f"{stored.key.digest}.safetensors")
            created = path.stat().st_mtime + age_s
            os.utime(path, (created, created))
            assert store.get(stored.key) is None
        assert store.stats()["misses"] == {"expired": 2}
        assert store.stats()["removed"] == {"expired": 2}


def test_a_store_with_a_secret_takes_only_what_was_signed_with_it(tmp_path, chunk, same):
    plain, signed = chunk(), chunk((8, 9))
    ChunkStore.open(tmp_path / "s").put(plain)
    store = ChunkStore.open(tmp_path / "s", memory_bytes=0, secret=b"one")
    store.put(signed)
    assert store.get(plain.key) is None
    same(store.get(signed.key), signed)
    for other in (b"two", None):
        assert ChunkStore.open(tmp_path / "s", memory_bytes=0, secret=other).get(signed.key) is None

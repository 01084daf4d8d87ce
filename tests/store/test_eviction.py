# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who leaves a full tier: by policy, never what is pinned, never more than is needed, and the same after a restart."""

import math
import os
import random
import time
from types import SimpleNamespace

import pytest

from hf_blend import plugins
from hf_blend.store import ChunkStore, budget, memory
from hf_blend.store.budget import BoundedTier, Budget
from hf_blend.store.index import Index, one_more
from hf_blend.store.tiers.memory import MemoryTier

POLICIES = plugins.describe("store.eviction")


def used(policy, uses, path=None):
    scores = plugins.load("store.eviction", policy)()
    budget = Budget(None, scores, Index(path, scores))
    for name, share in uses:
        budget.use(name) if name in budget.index else budget.add(name, 1)
        if share is not None:
            budget.use(name, share)
    return budget


def order(budget):
    budget.apply()
    return [name for name, _ in budget.index.in_order()]


@pytest.mark.parametrize("policy", POLICIES)
def test_objects_leave_once_each_by_score_in_the_same_order_after_a_restart(tmp_path, policy):
    draw = random.Random(0)
    uses = [(f"n{draw.randrange(40)}", draw.choice([None, draw.random()])) for _ in range(300)]
    whole, path = used(policy, uses), tmp_path / "index" / "t.sqlite"
    used(policy, uses[:150], path).apply()
    first = order(whole)
    assert order(used(policy, uses[150:], path)) == first
    assert sorted(first) == sorted({name for name, _ in uses})
    assert whole.victims(0) == []
    whole._cap_bytes = 30
    whole.set_pin(first[0], True)
    assert whole.victims(0) == first[1:11]


def test_another_policy_scores_what_is_known_of_uses(tmp_path):
    path = tmp_path / "index" / "t.sqlite"
    used("importance", [("a", 0.9), ("b", 0.1), ("c", 0.5)], path).apply()
    assert order(used("lru", [], path)) == ["a", "b", "c"]
    assert order(used("lru", [("a", None)], path)) == ["b", "c", "a"]
    assert order(used("importance", [], path)) == ["b", "c", "a"], "what was reported is still known"


def test_importance_and_lfu_score_by_what_is_asked_for_often():
    uses = [("often", 0.5)] * 5 + [("rare", 0.5), ("idle", 0.01), ("idle", 0.01), ("idle", 0.01)]
    assert order(used("importance", uses)) == ["idle", "rare", "often"]
    frequency, uses = -math.inf, (3.0, 10.0, 500.0, 2000.0)
    for count, use in enumerate(uses, 1):
        frequency = one_more(frequency, use)
        assert frequency == pytest.approx(math.log(sum(2 ** (one / 512) for one in uses[:count])))
    budget = used("lfu", [("a", None), ("b", None), ("a", None)])
    before = order(budget)
    budget.use("b", 0.5)
    assert order(budget) == before == ["b", "a"], "a report of important tokens is no use"


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


def test_what_can_never_fit_evicts_nothing_and_what_is_larger_than_all_may_be_leaves_first(
    tmp_path, chunk, entry_bytes
):
    chunks = [chunk((5, 6, 7 + number)) for number in range(3)]
    large = chunk(range(3, 400))
    with ChunkStore.open(tmp_path / "s", memory_bytes=0) as store:
        for one in (*chunks[:2], large):
            store.put(one)
    settings = {"memory_bytes": 0, "disk_bytes": 3 * entry_bytes}
    with ChunkStore.open(tmp_path / "s", **settings) as store:
        store.put(chunks[2])
        assert held(store, [*chunks, large]) == [0, 1, 2]
        store.put(large)
        assert held(store, [*chunks, large]) == [0, 1, 2]
        assert store.stats()["store_failures"] == {"ENOSPC": 1}


def test_sizes_of_the_index_are_read_again_before_more_leaves_than_comes(tmp_path, chunk, entry_bytes):
    chunks, settings = [chunk((5, 6, 7 + number)) for number in range(4)], {"disk_bytes": 10 * entry_bytes}
    with ChunkStore.open(tmp_path / "s", memory_bytes=0, **settings) as store:
        for one in chunks[:3]:
            store.put(one)
        (tier,) = store.storage.tiers
        tier.index.enter([(name, 9 * entry_bytes, time.time(), None) for name in tier.index.names("")])
    with ChunkStore.open(tmp_path / "s", memory_bytes=0, **settings) as store:
        store.put(chunks[3])
        assert held(store, chunks) == [0, 1, 2, 3]
        assert store.stats()["bytes"]["disk"] == sum(one.nbytes for one in store.entries()) < 5 * entry_bytes


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


def test_an_old_chunk_in_memory_is_not_there_and_a_miss(chunk, monkeypatch):
    with ChunkStore.open("memory://", ttl_s=3600) as store:
        store.put(chunk())
        assert store.contains(chunk().key)
        later_s = time.monotonic() + 7200
        monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: later_s, time=time.time))
        assert not store.contains(chunk().key)
        assert store.get(chunk().key) is None


def test_what_cannot_be_deleted_is_tried_once_and_stays(tmp_path, chunk, entry_bytes, monkeypatch):
    chunks, tried, unlink = [chunk((5, 6, 7 + number)) for number in range(5)], [], os.unlink
    monkeypatch.setattr(budget, "_LOOK_EVERY_S", 0.0)
    with ChunkStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=2 * entry_bytes) as store:

        def refuse_the_first(path, **given):
            if chunks[0].key.digest in str(path):
                tried.append(path)
                raise PermissionError(13, "Permission denied")
            unlink(path, **given)

        monkeypatch.setattr(os, "unlink", refuse_the_first)
        for one in chunks:
            store.put(one)
        assert held(store, chunks) == [0, 4]
    assert len(tried) == 1


def test_describe_counts_what_turns_out_to_be_a_tenants(chunk):
    policy, name = plugins.load("store.eviction", "lru")(), "ab/cd/" + "cd" * 32
    tier = BoundedTier(MemoryTier(), None, policy, Index(None, policy), owner="mine", quota_bytes=10)
    tier.index.enter([(name, 8, 0.0, "")])
    assert tier.fits(3, tier.quota)
    tier.describe([(name, chunk().key)])
    assert not tier.fits(3, tier.quota)
